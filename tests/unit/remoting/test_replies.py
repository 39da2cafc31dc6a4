"""Replies: whole frames that mirror their request."""

from __future__ import annotations

import json

import pytest

from halfmq.remoting.codes import VERSION, HeaderType, LanguageCode, RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.headers import (
    PullMessageResponseHeader,
    QueryMessageResponseHeader,
    SendMessageResponseHeader,
    response_header,
)
from halfmq.remoting.replies import (
    encode_pull_reply,
    encode_reply,
    encode_request,
    encode_send_error,
    encode_send_reply,
)
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
def test_send_reply_says_where_the_message_is(
    header_type: HeaderType, transaction_id: str | None
) -> None:
    """All that a producer makes its SendResult of, in the encoding it asked in."""
    reply = decode(encode_send_reply(request(310, header_type), MSG_ID, 2, 2**40, transaction_id))

    assert (reply.code, reply.opaque, reply.flag) == (0, 77, 1)
    assert (reply.header_type, reply.language, reply.version) == (header_type, 3, VERSION)
    header = response_header(reply, SendMessageResponseHeader)
    assert (header.msg_id, header.queue_id, header.queue_offset) == (MSG_ID, 2, 2**40)
    assert header.transaction_id == transaction_id
    assert (header.msg_region, header.trace_on) == ("DefaultRegion", "true")


def test_send_reply_has_the_fields_of_the_official_one() -> None:
    """Official clients read these without asking whether they exist."""
    theirs = official("java-5.3.3-json-send", 310, 0)
    ours = decode(encode_send_reply(request(310), MSG_ID, 2, 5, UNIQ_KEY))

    assert isinstance(theirs.header, dict)
    assert isinstance(ours.header, dict)
    assert ours.header.keys() == theirs.header.keys()


def test_json_replies_are_compact_and_their_values_texts() -> None:
    """The Go client fails a frame over a number, and cuts bodies and headers at commas."""
    frame = encode_send_reply(request(310), MSG_ID, 2, 5, UNIQ_KEY)
    header = frame[8:]
    fields = json.loads(header)

    assert header == json.dumps(fields, separators=(",", ":")).encode()
    assert all(isinstance(value, str) for value in fields["extFields"].values())
    assert fields["language"] == "PYTHON"
    assert fields["serializeTypeCurrentRPC"] == "JSON"


@pytest.mark.parametrize("text", ['"', "\\", "\x00\x01", "%d%b%%", "訂單🚀", '","code":1,"x":"'])
@pytest.mark.parametrize("header_type", list(HeaderType))
def test_a_clients_own_text_cannot_break_a_reply(header_type: HeaderType, text: str) -> None:
    """UNIQ_KEY is whatever the client wrote; so are topics in remarks, and regions in settings."""
    reply = decode(encode_send_reply(request(310, header_type), MSG_ID, 1, 2, text, text))
    header = response_header(reply, SendMessageResponseHeader)
    assert (header.transaction_id, header.msg_region) == (text, text)

    reply = decode(encode_send_error(request(310, header_type), 17, text))
    assert reply.remark == text

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


def test_more_regions_than_are_remembered_still_work() -> None:
    """Templates are kept for a few regions only; a broker has one."""
    for number in range(50):
        region = f"region-{number}"
        reply = decode(encode_send_reply(request(310), MSG_ID, 1, 2, None, region))
        assert response_header(reply, SendMessageResponseHeader).msg_region == region


def test_a_batch_reply_carries_all_ids() -> None:
    """The batch's SendResult has one id per message, joined by commas."""
    ids = ",".join([MSG_ID] * 100)
    reply = decode(encode_send_reply(request(320), ids, 1, 2, None))

    assert response_header(reply, SendMessageResponseHeader).msg_id == ids


def test_flush_timeout_replies_count_as_stored() -> None:
    """Codes 10, 11 and 12 carry the same fields as success."""
    reply = decode(encode_send_reply(request(310), MSG_ID, 1, 2, None, code=10))

    assert reply.code == 10
    assert response_header(reply, SendMessageResponseHeader).msg_id == MSG_ID


def test_send_refusal_has_the_fields_of_the_official_one() -> None:
    """Java reads region and trace flag from refusals too."""
    theirs = official("raw-5.3.3-send", 310, 29)
    ours = decode(encode_send_error(request(310), 29, "no"))

    assert ours.header == theirs.header == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
    assert (ours.code, ours.remark) == (29, "no")


@pytest.mark.parametrize("header_type", list(HeaderType))
def test_pull_reply_counts_a_body_that_follows(header_type: HeaderType) -> None:
    """The body goes to the socket in pieces straight from the log, after this head."""
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
    """On 0, 19, 20 and 21 all four offsets must be there."""
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
    """Java reads them without a null test; where the official answer has none, neither has ours."""
    for code in (11, 14, 15, 35, 38, 103):
        assert decode(encode_reply(request(code))).header == {}
        assert decode(encode_reply(request(code), 1, remark="no")).header == {}
    for code in (17, 36, 37, 41, 42, 105, 9999):
        assert decode(encode_reply(request(code))).header is None
        assert decode(encode_reply(request(code), 1, remark="no")).header is None


@pytest.mark.parametrize("header_type", list(HeaderType))
def test_a_reply_mirrors_its_request(header_type: HeaderType) -> None:
    """Opaque and encoding come from the request, language and version are ours."""
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


def test_an_empty_remark_is_not_an_absent_one_in_json() -> None:
    """Tools print a remark if there is one."""
    assert decode(encode_reply(request(31), remark="")).remark == ""
    assert decode(encode_reply(request(31))).remark is None


@pytest.mark.parametrize("header_type", list(HeaderType))
def test_one_way_requests_carry_the_flag(header_type: HeaderType) -> None:
    """Nobody may answer them."""
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


def test_a_header_of_another_kind_is_our_callers_mistake() -> None:
    """It is refused before anything is sent."""
    with pytest.raises(TypeError, match="neither a header struct nor a map"):
        encode_request(30, opaque=1, header=object())  # type: ignore[arg-type]
