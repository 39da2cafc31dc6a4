"""Typed headers: every class, in every header type, for requests and for responses."""

from __future__ import annotations

import msgspec
import pytest

from halfmq.remoting import headers
from halfmq.remoting.codes import HeaderType, RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import HeaderError
from halfmq.remoting.ext_fields import Header, array_variant, fields_of, texts_of
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.headers import (
    REQUEST_HEADERS,
    RESPONSE_HEADERS,
    EndTransactionRequestHeader,
    GetMinOffsetResponseHeader,
    HeartbeatResponseHeader,
    PullMessageResponseHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
    response_header,
)
from halfmq.remoting.replies import encode_reply, encode_request
from halfmq.remoting.serialization import ext_fields

SAMPLES: dict[type, object] = {str: "text", int: 7, bool: True}


def full(kind: type[Header]) -> Header:
    """Return a header with a value in every field."""
    return kind(**{field.attribute: SAMPLES[field.kind] for field in fields_of(kind)})


def least(kind: type[Header]) -> Header:
    """Return a header with its required fields alone."""
    return kind(**{f.attribute: SAMPLES[f.kind] for f in fields_of(kind) if f.required})


def decode(frame: bytes) -> RemotingCommand:
    (command,) = FrameDecoder().receive_data(frame)
    return command


@pytest.mark.parametrize("code", sorted(REQUEST_HEADERS))
@pytest.mark.parametrize("header_type", list(HeaderType))
def test_every_request_header_survives_every_header_type(
    code: int, header_type: HeaderType
) -> None:
    """Whatever the sender's encoding, a handler sees the same typed header."""
    kind = REQUEST_HEADERS[code]
    for header in (full(kind), least(kind)):
        command = decode(encode_request(code, opaque=1, header=header, header_type=header_type))

        assert command.header_error is None
        assert isinstance(command.header, kind)
        assert msgspec.structs.asdict(command.header) == msgspec.structs.asdict(header)
        assert ext_fields(command) == texts_of(header)


@pytest.mark.parametrize("code", sorted(RESPONSE_HEADERS))
@pytest.mark.parametrize("header_type", list(HeaderType))
def test_every_response_header_survives_every_header_type(
    code: int, header_type: HeaderType
) -> None:
    """A client gets back what the broker's handler put in."""
    kind = RESPONSE_HEADERS[code]
    request = RemotingCommand(code, opaque=5, header_type=header_type)
    for header in (full(kind), least(kind)):
        command = decode(encode_reply(request, header=header))

        assert (command.opaque, command.is_response) == (5, True)
        received = response_header(command, kind)
        assert msgspec.structs.asdict(received) == msgspec.structs.asdict(header)


def test_every_listed_code_has_a_name() -> None:
    """The tables are keyed by codes that we can also name in a log line."""
    assert {RequestCode(code) for code in REQUEST_HEADERS | RESPONSE_HEADERS}


def test_header_classes_use_kinds_that_the_tolerant_reader_knows() -> None:
    """Texts, numbers and booleans are all there is on the wire."""
    classes = {*REQUEST_HEADERS.values(), *RESPONSE_HEADERS.values()}
    kinds = {field.kind for kind in classes for field in fields_of(kind)}

    assert kinds == {str, int, bool}


def test_both_send_headers_name_the_same_things() -> None:
    """Handlers are written once for codes 10, 310, 320, 324 and 325."""
    long, short = fields_of(SendMessageRequestHeader), fields_of(SendMessageRequestHeaderV2)

    assert [field.attribute for field in long] == [field.attribute for field in short]
    assert "".join(field.name for field in short) == "abcdefghijklmn"
    assert long[0].name == "producerGroup"
    assert long[-1].name == "bname"


def test_names_on_the_wire_are_the_official_ones() -> None:
    """Spot checks where the rule "camel case" does not hold."""
    names = {f.name for code in (34, 35, 310) for f in fields_of(RESPONSE_HEADERS[code])}
    assert {"IS_SUPPORT_HEART_BEAT_V2", "IS_SUB_CHANGE", "MSG_REGION", "TRACE_ON"} <= names
    assert fields_of(REQUEST_HEADERS[35])[0].name == "clientID"
    assert fields_of(REQUEST_HEADERS[12])[-1].name == "_UNIQUE_KEY_QUERY"
    assert "bodyCrc32" in {field.name for field in fields_of(REQUEST_HEADERS[103])}


def test_what_is_none_is_not_sent() -> None:
    """Java leaves null fields out; readers tell absent from empty."""
    header = EndTransactionRequestHeader(
        producer_group="g",
        tran_state_table_offset=1,
        commit_log_offset=2,
        commit_or_rollback=8,
        msg_id="",
        from_transaction_check=True,
    )

    assert texts_of(header) == {
        "producerGroup": "g",
        "tranStateTableOffset": "1",
        "commitLogOffset": "2",
        "commitOrRollback": "8",
        "msgId": "",
        "fromTransactionCheck": "true",
    }


def test_booleans_of_an_answer_may_be_any_text() -> None:
    """A broker of another age writes them its own way."""
    texts = {"IS_SUB_CHANGE": "False", "IS_SUPPORT_HEART_BEAT_V2": "nonsense"}
    command = RemotingCommand(0, flag=1, header=texts)

    assert response_header(command, HeartbeatResponseHeader) == HeartbeatResponseHeader(
        is_support_heart_beat_v2=False, is_sub_change=False
    )


@pytest.mark.parametrize("header_type", list(HeaderType))
@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ({"minOffset": "0"}, "suggestWhichBrokerId is missing"),
        ({"suggestWhichBrokerId": "0", "nextBeginOffset": "x"}, "nextBeginOffset is not a number"),
        (None, "suggestWhichBrokerId is missing"),
    ],
)
def test_an_answer_without_what_it_promises_is_the_peers_fault(
    header_type: HeaderType, texts: dict[str, str] | None, reason: str
) -> None:
    """A client must not guess an offset."""
    request = RemotingCommand(11, header_type=header_type)
    command = decode(encode_reply(request, header=texts))

    with pytest.raises(HeaderError, match=reason):
        response_header(command, PullMessageResponseHeader)


def test_a_broken_msgpack_answer_is_the_peers_fault() -> None:
    """Its ext fields are looked at only when someone asks for them."""
    good = SendMessageResponseHeader(msg_id="m", queue_id=1, queue_offset=2)
    frame = encode_reply(RemotingCommand(310, header_type=HeaderType.MSGPACK), header=good)
    broken = frame.replace(b"\xa1m", b"\xa1\xff")
    command = decode(broken)

    with pytest.raises(HeaderError):
        response_header(command, SendMessageResponseHeader)
    with pytest.raises(HeaderError):
        response_header(decode(frame), GetMinOffsetResponseHeader)


def test_an_array_may_be_longer_or_shorter_than_the_class() -> None:
    """So a newer peer can add fields at the end, and an older one lack them."""
    kind = array_variant(SendMessageResponseHeader)
    newer = msgspec.msgpack.encode(["m", 1, 2, None, None, "r", "true", None, "a new field"])
    older = msgspec.msgpack.encode(["m", 1, 2])

    assert msgspec.msgpack.decode(newer, type=kind).msg_region == "r"
    assert msgspec.msgpack.decode(older, type=kind).msg_region is None


def test_every_public_header_class_is_in_a_table() -> None:
    """A class that no code leads to would never be used."""
    used = {*REQUEST_HEADERS.values(), *RESPONSE_HEADERS.values()}
    classes = {
        value
        for value in vars(headers).values()
        if isinstance(value, type) and issubclass(value, Header) and value is not Header
    }

    assert classes - used == {headers.EmptyHeader}
