"""Replies: whole frames in the header type of their request."""

from __future__ import annotations

import json

import pytest

from halfmq.broker.errors import REFUSAL_FIELDS
from halfmq.remoting.codes import VERSION, HeaderType, LanguageCode, RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import (
    HeartbeatResponseHeader,
    PullMessageResponseHeader,
    QueryMessageResponseHeader,
    SendMessageResponseHeader,
)
from halfmq.remoting.replies import (
    encode_pull_reply,
    encode_reply,
    encode_request,
    encode_send_reply,
)
from halfmq.remoting.shown_text import REMARK_MAX, shown
from tests.support.frames import RecordedFrame, recorded

MSG_ID = "0A00000500002A9F000000004000007E"
UNIQ_KEY = "0A00000512345CB0D902075BCD150007"


def request(code: int, header_type: int = HeaderType.JSON) -> RemotingCommand:
    return RemotingCommand(code, opaque=77, header_type=header_type)


def decode(frame: bytes) -> RemotingCommand:
    (command,) = FrameDecoder(responses_first=True).receive_data(frame)
    return command


def official(file: str, request_code: int, code: int) -> RemotingCommand:
    """Return the first answer of an official server with this code to such a request."""
    open_requests: set[tuple[int, object]] = set()
    for line in recorded(file):
        if line.flag == 0 and line.code == request_code:
            open_requests.add((line.connection, line.opaque))
        elif (line.connection, line.opaque) in open_requests and is_answer(line, code):
            return decode(line.frame)
    raise AssertionError("no such answer was recorded")


def is_answer(line: RecordedFrame, code: int) -> bool:
    return line.flag == 1 and line.code == code


@pytest.mark.parametrize("header_type", list(HeaderType))
@pytest.mark.parametrize("transaction_id", [UNIQ_KEY, None])
def test_send_replies_give_the_place_of_the_message(
    header_type: HeaderType, transaction_id: str | None
) -> None:
    """A producer makes its SendResult of these fields."""
    reply = decode(encode_send_reply(request(310, header_type), MSG_ID, 2, 2**40, transaction_id))

    assert (reply.code, reply.opaque, reply.flag) == (0, 77, 1)
    assert (reply.header_type, reply.language, reply.version) == (header_type, 3, VERSION)
    header = response_header(reply, SendMessageResponseHeader)
    assert (header.msg_id, header.queue_id, header.queue_offset) == (MSG_ID, 2, 2**40)
    assert header.transaction_id == transaction_id
    assert (header.msg_region, header.trace_on) == ("DefaultRegion", "true")


def test_send_reply_has_the_fields_of_the_official_one() -> None:
    """Official clients read these without checking whether they exist."""
    theirs = official("java-5.3.3-json-send", 310, 0)
    ours = decode(encode_send_reply(request(310), MSG_ID, 2, 5, UNIQ_KEY))

    assert isinstance(theirs.header, dict)
    assert isinstance(ours.header, dict)
    assert ours.header.keys() == theirs.header.keys()


def test_json_replies_are_compact_and_their_values_texts() -> None:
    """The Go client cannot read numbers, and splits headers at commas."""
    frame = encode_send_reply(request(310), MSG_ID, 2, 5, UNIQ_KEY)
    header = frame[8:]
    fields = json.loads(header)

    assert header == json.dumps(fields, separators=(",", ":")).encode()
    assert all(isinstance(value, str) for value in fields["extFields"].values())
    assert fields["language"] == "PYTHON"
    assert fields["serializeTypeCurrentRPC"] == "JSON"


@pytest.mark.parametrize("text", ['"', "\\", "\x00\x01", "%d%b%%", "訂單🚀", '","code":1,"x":"'])
@pytest.mark.parametrize("header_type", list(HeaderType))
def test_texts_of_clients_cannot_break_a_reply(header_type: HeaderType, text: str) -> None:
    """Clients choose their UNIQ_KEY, and the topic names that remarks repeat."""
    reply = decode(encode_send_reply(request(310, header_type), MSG_ID, 1, 2, text))
    assert response_header(reply, SendMessageResponseHeader).transaction_id == text

    reply = decode(encode_reply(request(310, header_type), 17, remark=text))
    assert reply.remark == shown(text)

    pull = encode_pull_reply(
        request(11, header_type),
        19,
        next_begin_offset=0,
        min_offset=0,
        max_offset=0,
        remark=text,
        body_size=0,
    )
    assert decode(pull).remark == text


@pytest.mark.parametrize("header_type", list(HeaderType))
def test_a_remark_is_cut_and_an_answer_that_fits_no_frame_is_replaced(
    header_type: HeaderType,
) -> None:
    """A request may have a field of 16 MB, and its refusal quotes it."""
    name = "\x1b\r" + 9_000_000 * "x" + "\nSee"
    asked = request(34, header_type)
    reply = decode(encode_reply(asked, 17, remark=f"topic[{name}] not exist"))
    assert (reply.code, len(reply.remark or "") < 2 * REMARK_MAX) == (17, True)
    assert (reply.remark or "").startswith(r"topic[\x1b\rxxx")
    assert (reply.remark or "").endswith("xxx\nSee] not exist")

    header = HeartbeatResponseHeader(unequal_topic=name, unequal_client_id=name)
    reply = decode(encode_reply(asked, header=header, body=b"body"))
    assert (reply.code, reply.body) == (1, b"")
    assert "the answer has a header of" in (reply.remark or "")


def test_a_batch_reply_carries_all_ids() -> None:
    """The batch's SendResult has one id per message, joined by commas."""
    ids = ",".join([MSG_ID] * 100)
    reply = decode(encode_send_reply(request(320), ids, 1, 2, None))

    assert response_header(reply, SendMessageResponseHeader).msg_id == ids


def test_refused_sends_have_the_fields_of_official_refusals() -> None:
    """Java clients read region and trace flag from refusals too."""
    assert official("raw-5.3.3-send", 310, 29).header == REFUSAL_FIELDS


@pytest.mark.parametrize("header_type", list(HeaderType))
def test_the_length_of_a_pull_reply_counts_its_body(header_type: HeaderType) -> None:
    """The caller sends the body after this head, in pieces straight from the log."""
    head = encode_pull_reply(
        request(11, header_type),
        0,
        next_begin_offset=2**40,
        min_offset=1,
        max_offset=2**41,
        remark="FOUND",
        body_size=6,
    )
    decoder = FrameDecoder(responses_first=True)
    assert decoder.receive_data(head + b"abc") == []
    (reply,) = decoder.receive_data(b"def")

    assert (reply.body, reply.remark, reply.opaque) == (b"abcdef", "FOUND", 77)
    assert response_header(reply, PullMessageResponseHeader) == expected_pull_header(
        reply, next_begin_offset=2**40, min_offset=1, max_offset=2**41
    )


def expected_pull_header(
    reply: RemotingCommand, *, next_begin_offset: int, min_offset: int, max_offset: int
) -> PullMessageResponseHeader:
    kind = type(response_header(reply, PullMessageResponseHeader))
    return kind(
        suggest_which_broker_id=0,
        next_begin_offset=next_begin_offset,
        min_offset=min_offset,
        max_offset=max_offset,
        topic_sys_flag=0,
        group_sys_flag=0,
    )


def test_pull_reply_has_the_fields_of_the_official_one() -> None:
    """With codes 0, 19, 20 and 21, all four offsets are required."""
    ours = decode(
        encode_pull_reply(
            request(11),
            19,
            next_begin_offset=0,
            min_offset=0,
            max_offset=0,
            remark="NO_MESSAGE_IN_QUEUE",
            body_size=0,
        )
    )
    theirs = official("java-5.3.3-json-pull", 11, 19)

    assert isinstance(theirs.header, dict)
    assert isinstance(ours.header, dict)
    assert ours.header.keys() == theirs.header.keys()


def test_answers_with_a_header_class_have_ext_fields_even_if_empty() -> None:
    """Java reads them without a null check. Other answers have none, as the official ones."""
    for code in (11, 14, 15, 35, 38, 103):
        assert decode(encode_reply(request(code))).header == {}
        assert decode(encode_reply(request(code), 1, remark="no")).header == {}
    for code in (17, 36, 37, 41, 42, 105, 9999):
        assert decode(encode_reply(request(code))).header is None
        assert decode(encode_reply(request(code), 1, remark="no")).header is None


@pytest.mark.parametrize("header_type", list(HeaderType))
def test_a_reply_has_the_opaque_and_header_type_of_its_request(header_type: HeaderType) -> None:
    """Language and version are halfmq's own."""
    header = QueryMessageResponseHeader(
        index_last_update_timestamp=1, index_last_update_phyoffset=2
    )
    reply = decode(
        encode_reply(request(12, header_type), 0, header=header, remark="r", body=b"records")
    )

    assert (reply.opaque, reply.flag, reply.header_type) == (77, 1, header_type)
    assert (reply.language, reply.version) == (LanguageCode.PYTHON, VERSION)
    assert (reply.remark, reply.body) == ("r", b"records")
    received = response_header(reply, QueryMessageResponseHeader)
    assert received.index_last_update_phyoffset == 2


def test_json_replies_keep_an_empty_remark() -> None:
    """Tools print a remark if there is one."""
    assert decode(encode_reply(request(31), remark="")).remark == ""
    assert decode(encode_reply(request(31))).remark is None


@pytest.mark.parametrize("header_type", list(HeaderType))
def test_one_way_requests_carry_the_flag(header_type: HeaderType) -> None:
    """The receiver must not answer them."""
    frame = encode_request(
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
        opaque=2**31 - 1,
        header={"consumerGroup": "g"},
        one_way=True,
        header_type=header_type,
        body=b"b",
        remark="text",
        language=LanguageCode.CPP,
    )
    (command,) = FrameDecoder().receive_data(frame)

    assert command.is_one_way
    assert (command.opaque, command.body, command.remark) == (2**31 - 1, b"b", "text")
    assert command.language == LanguageCode.CPP
    assert getattr(command.header, "consumer_group", None) == "g"


def test_a_header_of_another_type_is_a_type_error() -> None:
    """The caller is wrong; nothing is sent."""
    with pytest.raises(TypeError, match="neither a header struct nor a map"):
        encode_request(30, opaque=1, header=object())  # type: ignore[arg-type]
