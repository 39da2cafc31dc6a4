"""Typed headers: every class, in every header type, for requests and for responses."""

from __future__ import annotations

import msgspec
import pytest

from halfmq.remoting import access_bodies, admin_headers, headers, own_requests, pop
from halfmq.remoting.codes import HeaderType, RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import HeaderError
from halfmq.remoting.ext_fields import Header, array_variant, fields_of, texts_of
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.header_tables import REQUEST_HEADERS, RESPONSE_HEADERS, response_header
from halfmq.remoting.headers import (
    EndTransactionRequestHeader,
    HeartbeatResponseHeader,
    OffsetResponseHeader,
    PullMessageResponseHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from halfmq.remoting.replies import encode_reply, encode_request
from halfmq.remoting.serialization import ext_fields

SAMPLES: dict[type, object] = {str: "text", int: 7, bool: True}


def full(kind: type[Header]) -> Header:
    """Return a header with a value in every field."""
    return kind(**{field.attribute: SAMPLES[field.kind] for field in fields_of(kind)})


INT16_MAX = 2**15 - 1  # of the code in a ROCKETMQ header


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
    """A handler gets the same typed header from every encoding; pop has no ROCKETMQ headers."""
    if header_type == HeaderType.ROCKETMQ and code > INT16_MAX:
        return
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
    """A client gets the values that the broker's handler set."""
    kind = RESPONSE_HEADERS[code]
    request = RemotingCommand(code, opaque=5, header_type=header_type)
    for header in (full(kind), least(kind)):
        command = decode(encode_reply(request, header=header))

        assert (command.opaque, command.is_response) == (5, True)
        received = response_header(command, kind)
        assert msgspec.structs.asdict(received) == msgspec.structs.asdict(header)


def test_every_listed_code_has_a_name() -> None:
    """Log lines name the code of a request."""
    assert {RequestCode(code) for code in REQUEST_HEADERS | RESPONSE_HEADERS}


def test_header_fields_are_texts_numbers_or_booleans() -> None:
    """The reader of texts knows no other types."""
    classes = {*REQUEST_HEADERS.values(), *RESPONSE_HEADERS.values()}
    kinds = {field.kind for kind in classes for field in fields_of(kind)}

    assert kinds == {str, int, bool}


def test_both_send_headers_have_the_same_attributes() -> None:
    """One handler serves codes 10, 310, 320, 324 and 325."""
    long, short = fields_of(SendMessageRequestHeader), fields_of(SendMessageRequestHeaderV2)

    assert [field.attribute for field in long] == [field.attribute for field in short]
    assert "".join(field.name for field in short) == "abcdefghijklmn"
    assert long[0].name == "producerGroup"
    assert long[-1].name == "bname"


def test_names_on_the_wire_are_the_official_ones() -> None:
    """A few of those that are not the camel case of the attribute."""
    names = {f.name for code in (34, 35, 310) for f in fields_of(RESPONSE_HEADERS[code])}
    assert {"IS_SUPPORT_HEART_BEAT_V2", "IS_SUB_CHANGE", "MSG_REGION", "TRACE_ON"} <= names
    assert fields_of(REQUEST_HEADERS[35])[0].name == "clientID"
    assert fields_of(REQUEST_HEADERS[12])[-1].name == "_UNIQUE_KEY_QUERY"
    assert "bodyCrc32" in {field.name for field in fields_of(REQUEST_HEADERS[103])}


def test_none_is_left_out_and_an_empty_text_is_sent() -> None:
    """As in Java: readers distinguish absent from empty."""
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
    """All but "true" are false, as in Java."""
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
def test_an_answer_without_a_required_field_is_a_header_error(
    header_type: HeaderType, texts: dict[str, str] | None, reason: str
) -> None:
    """The error gives the field; a client must not guess an offset."""
    request = RemotingCommand(11, header_type=header_type)
    command = decode(encode_reply(request, header=texts))

    with pytest.raises(HeaderError, match=reason):
        response_header(command, PullMessageResponseHeader)


def test_a_malformed_msgpack_answer_is_a_header_error() -> None:
    """Its ext fields are decoded only when the caller reads the header."""
    good = SendMessageResponseHeader(msg_id="m", queue_id=1, queue_offset=2)
    frame = encode_reply(RemotingCommand(310, header_type=HeaderType.MSGPACK), header=good)
    broken = frame.replace(b"\xa1m", b"\xa1\xff")
    command = decode(broken)

    with pytest.raises(HeaderError):
        response_header(command, SendMessageResponseHeader)
    with pytest.raises(HeaderError):
        response_header(decode(frame), OffsetResponseHeader)


def test_an_array_may_be_longer_or_shorter_than_the_class() -> None:
    """A newer peer may send more fields, an older one fewer."""
    kind = array_variant(SendMessageResponseHeader)
    newer = msgspec.msgpack.encode(["m", 1, 2, None, None, "r", "true", None, "a new field"])
    older = msgspec.msgpack.encode(["m", 1, 2])

    assert msgspec.msgpack.decode(newer, type=kind).msg_region == "r"
    assert msgspec.msgpack.decode(older, type=kind).msg_region is None


def test_every_public_header_class_is_in_a_table() -> None:
    """No other class is ever decoded."""
    used = {*REQUEST_HEADERS.values(), *RESPONSE_HEADERS.values()}
    classes = {
        value
        for module in (access_bodies, admin_headers, headers, own_requests, pop)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Header) and value is not Header
    }

    assert classes == used
