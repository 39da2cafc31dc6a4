"""Signatures of requests: those of official clients, and those of MSGPACK headers."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmq.remoting import msgpack_header
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import GetRouteInfoRequestHeader
from halfmq.remoting.signature import Signer, signed_text


def test_the_official_test_vectors_are_met() -> None:
    """Texts and keys are those of RocketMQ's own tests in Java and Go."""
    assert (
        Signer("adiaushdiaushd").sign(b"Hello RocketMQ Client ACL Feature")
        == "tAb/54Rwwcq+pbH8Loi7FWX4QSQ="
    )
    text = signed_text({"topic": "TopicTest", "AccessKey": "rocketmq2", "Signature": "ignored"})
    assert text == b"rocketmq2TopicTest"
    assert Signer("12345678").sign(text) == "GeeGoP9mRvDhoVp4PD5omX0prgE="


@given(secret=st.text(max_size=200), text=st.binary(max_size=300), body=st.binary(max_size=300))
def test_it_is_hmac_sha1_for_every_length_of_secret(secret: str, text: bytes, body: bytes) -> None:
    """HMAC hashes secrets that are longer than a block first."""
    expected = hmac.digest(secret.encode(), text + body, hashlib.sha1)

    assert Signer(secret).digest(text, body) == expected
    assert Signer(secret).verify(expected, text, body)


@pytest.mark.parametrize(
    "signature", ["", "AAAA", "tAb/54Rwwcq+pbH8Loi7FWX4QSQ", "\u00e9" * 28, b""]
)
def test_other_values_do_not_verify(signature: str | bytes) -> None:
    """No value raises an error."""
    signer = Signer("adiaushdiaushd")

    assert not signer.verify(signature, b"Hello RocketMQ Client ACL Feature")


def test_the_field_added_after_signing_can_be_left_out() -> None:
    """Clients up to 4.9.3 sign a query by unique key before they mark it as one."""
    fields = {"AccessKey": "a", "topic": "T", "_UNIQUE_KEY_QUERY": "true"}

    assert signed_text(fields) == b"atrueT"
    assert signed_text(fields, without_unique_key_query=True) == b"aT"


def _msgpack(topic: str) -> bytes:
    header = GetRouteInfoRequestHeader(topic=topic)
    return msgpack_header.encode(RequestCode.GET_ROUTEINFO_BY_TOPIC, 7, 0, 3, 479, None, header)


def test_a_signed_msgpack_header_is_read_like_an_unsigned_one() -> None:
    """It has two more elements at the end; the typed header is the same."""
    raw = _msgpack("T")
    signed = msgpack_header.sign(raw, b"body", "me", Signer("secret"))

    plain = msgpack_header.decode_request(raw, b"body")
    read = msgpack_header.decode_request(signed, b"body")

    assert (read.code, read.opaque, read.header) == (plain.code, plain.opaque, plain.header)
    assert msgpack_header.split_signature(raw) == ("", b"", b"")


def test_a_msgpack_signature_covers_every_byte() -> None:
    """After a change of any byte of header or body, it does not verify."""
    body = b"body"
    signed = msgpack_header.sign(_msgpack("T"), body, "me", Signer("secret"))

    def fits(header: bytes, body: bytes) -> bool:
        name, signature, text = msgpack_header.split_signature(header)
        return name == "me" and Signer("secret").verify(signature, text, body)

    assert fits(signed, body)
    assert not fits(signed, b"bode")
    for place in range(len(signed)):
        changed = bytearray(signed)
        changed[place] ^= 1
        assert not fits(bytes(changed), body), place


@given(raw=st.binary(max_size=80))
def test_garbage_has_no_signature(raw: bytes) -> None:
    """No bytes raise an error or give an access key."""
    name, _signature, _text = msgpack_header.split_signature(b"\x99" + raw)

    assert isinstance(name, str)
