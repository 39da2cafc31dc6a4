"""ROCKETMQ and MSGPACK headers: unusual but valid ones, and malformed ones."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from halfmq.remoting import msgpack_header, rocketmq_header
from halfmq.remoting.codes import HeaderType
from halfmq.remoting.errors import HeaderError
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.headers import GetMaxOffsetRequestHeader, HeartbeatRequestHeader
from halfmq.remoting.replies import encode_request


def field(key: bytes, value: bytes) -> bytes:
    return struct.pack(">H", len(key)) + key + struct.pack(">i", len(value)) + value


def binary(ext: bytes, *, code: int = 30, language: int = 3, remark: bytes = b"") -> bytes:
    fixed = struct.pack(">hBhiii", code, language, 409, 5, 0, len(remark))
    return fixed + remark + struct.pack(">i", len(ext)) + ext


TOPIC_AND_QUEUE = field(b"topic", b"t") + field(b"queueId", b"0")
TYPED = GetMaxOffsetRequestHeader(topic="t", queue_id=0)


def test_binary_header_with_remark_and_unknown_language() -> None:
    """The number of an unknown language is kept."""
    command = rocketmq_header.decode(binary(TOPIC_AND_QUEUE, language=99, remark=b"hi"), b"x")

    assert (command.code, command.opaque, command.version) == (30, 5, 409)
    assert (command.language, command.remark, command.body) == (99, "hi", b"x")
    assert command.header == TYPED


def test_duplicate_keys_are_kept_once() -> None:
    """Java with an ACL hook writes its fields twice, with equal values."""
    command = rocketmq_header.decode(binary(TOPIC_AND_QUEUE + TOPIC_AND_QUEUE), b"")

    assert command.header == TYPED
    assert command.texts == {"topic": "t", "queueId": "0"}


def test_an_empty_number_counts_as_absent() -> None:
    """Java reads empty values back as null."""
    ext = TOPIC_AND_QUEUE + field(b"committed", b"") + field(b"bname", b"")
    assert rocketmq_header.decode(binary(ext), b"").header == TYPED

    command = rocketmq_header.decode(binary(field(b"topic", b"t") + field(b"queueId", b"")), b"")
    assert command.header_error == "queueId is missing"


def test_binary_header_without_fields_has_none() -> None:
    """A request without fields still has its typed header."""
    command = rocketmq_header.decode(binary(b"", code=34), b"")
    assert command.header == HeartbeatRequestHeader()

    assert rocketmq_header.decode(binary(b"", code=28), b"").header is None


def test_binary_headers_keep_text_beyond_ascii() -> None:
    """Lengths count bytes, not characters."""
    ext = field(b"topic", "訂單".encode()) + field("ключ".encode(), "é".encode())
    command = rocketmq_header.decode(binary(ext, code=9999), b"")

    assert command.header == {"topic": "訂單", "ключ": "é"}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        bytes(10),
        binary(b"")[:-1],
        binary(b"") + b"\x00",
        binary(TOPIC_AND_QUEUE)[:-1],
        binary(TOPIC_AND_QUEUE[:-1]),
        binary(b"\x00"),
        binary(b"\xff\xff"),
        binary(b"\x00\x01k\x7f\xff\xff\xff"),
        binary(b"\x00\x01k\xff\xff\xff\xff"),
        binary(field(b"\xff", b"v")),
        binary(field(b"k", b"\xff")),
        binary(b"", remark=b"\xff"),
        struct.pack(">hBhiii", 30, 3, 409, 5, 0, -1) + bytes(20),
        struct.pack(">hBhiii", 30, 3, 409, 5, 0, 2**31 - 1) + bytes(20),
        struct.pack(">hBhiiii", 30, 3, 409, 5, 0, 0, -1),
        struct.pack(">hBhiiii", 30, 3, 409, 5, 0, 0, 500) + b"ab",
    ],
)
def test_binary_headers_with_wrong_lengths_are_header_errors(raw: bytes) -> None:
    """Every length is checked before it is used."""
    with pytest.raises(HeaderError):
        rocketmq_header.decode(raw, b"")


def test_a_code_beyond_16_bits_has_no_binary_form() -> None:
    """The official client truncates it and gets the answer to another request."""
    with pytest.raises(HeaderError):
        encode_request(200050, opaque=1, header={}, header_type=HeaderType.ROCKETMQ)


def packed(*items: object) -> bytes:
    return msgspec.msgpack.encode(items)


def test_msgpack_header_with_a_map_is_typed_too() -> None:
    """A peer may send a map if it does not know the header classes."""
    ext = {"topic": "t", "queueId": "0", "other": "x"}
    command = msgpack_header.decode_request(packed(30, 1, 0, 3, 479, None, ext), b"")

    assert command.header == TYPED
    assert command.header_error is None


@pytest.mark.parametrize("code", [34, 127, 128, 200, 255, 256, 310, 65535, 70000, -1])
def test_msgpack_codes_of_every_width_are_read(code: int) -> None:
    """MSGPACK writes small numbers in fewer bytes."""
    command = msgpack_header.decode_request(packed(code, 1, 0, 3, 479, None, None), b"")

    assert command.code == code


def test_a_msgpack_header_that_does_not_fit_is_noted_in_the_command() -> None:
    """As with JSON: the broker can answer the request."""
    for ext in (["t"], ["t", "abc"], [None, 0], {"topic": "t"}, None, ["t", 2**31], []):
        command = msgpack_header.decode_request(packed(30, 1, 0, 3, 479, None, ext), b"")

        assert command.header_error
        assert isinstance(command.header, dict)


def test_msgpack_ext_of_an_unknown_request_is_kept() -> None:
    """The broker refuses such a request with an answer."""
    raw = packed(9999, 1, 0, 3, 479, None, {"x": "1"})
    assert msgpack_header.decode_request(raw, b"").header == {"x": "1"}

    command = msgpack_header.decode_request(packed(9999, 1, 0, 3, 479, None, ["x"]), b"")
    assert command.code == 9999
    assert msgpack_header.ext_texts(command) == {}


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"\xc1", b"\x97", b"\x97\x0b", packed(), packed(30), packed("30", 1, 0, 3, 479, None),
        packed(30, 2**31, 0, 3, 479, None, None), packed(30, 1, 0, None, 479, None, None),
        packed(30, 1, 0, 3, 479, 5, None), packed(30, 1, 0, 3, 479, None, 5),
        packed(30, 1, 0, 3, 479, None, {"a": 1}), packed(30, 1, 0, 3, 479, None, "text"),
        packed(30, 1, 0, 3, 479, None, ["t", 0]) + b"\x00", b"\x81\xa4code\x1e",
        packed(30, 1, 0, 3, 479, None, ["t", 0])[:-1], b"\x97" + b"\x91" * 100_000,
        packed(30, 1, 0, 3, 479, None, ["t", 0]).replace(b"\xa1t", b"\xa1\xff"),
        packed(0, 1, 1, 3, 479, None, 5), packed(0, 1, 1, 3, 479, None, b"bytes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("decode", [msgpack_header.decode_request, msgpack_header.decode_response])
def test_msgpack_headers_of_another_shape_are_header_errors(decode: Any, raw: bytes) -> None:
    """Everything but the array of seven or nine elements."""
    with pytest.raises(HeaderError):
        decode(raw, b"")


def test_msgpack_numbers_may_be_texts() -> None:
    """As in JSON, "4" is 4."""
    raw = packed(30, 1, 0, 3, 479, None, ["t", "4", "false"])
    command = msgpack_header.decode_request(raw, b"")

    assert isinstance(command.header, GetMaxOffsetRequestHeader)
    assert command.header.queue_id == 4
    assert command.header.committed is False


def test_msgpack_frames_pass_the_frame_decoder_of_a_client() -> None:
    """A client reads requests (check-backs) and answers from one stream."""
    frame = encode_request(
        40, opaque=1, header={"consumerGroup": "g"}, header_type=HeaderType.MSGPACK, one_way=True
    )
    (command,) = FrameDecoder(responses_first=True).receive_data(frame)

    assert command.is_one_way
    assert getattr(command.header, "consumer_group", None) == "g"
