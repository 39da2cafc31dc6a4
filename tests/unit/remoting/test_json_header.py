"""JSON headers: everything that official servers accept is read, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halfmq.remoting.codes import LanguageCode
from halfmq.remoting.errors import HeaderError
from halfmq.remoting.headers import (
    ConsumerSendMsgBackRequestHeader,
    EndTransactionRequestHeader,
    GetMaxOffsetRequestHeader,
    HeartbeatRequestHeader,
    PullMessageRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
)
from halfmq.remoting.json_header import decode_request, decode_response, ext_texts

SEND_V2 = {
    "a": "g", "b": "t", "c": "TBW102", "d": "4", "e": "2", "f": "0", "g": "1758268800000", "h": "0",
    "i": "KEYS\x01k\x02", "j": "0", "k": "false", "m": "false", "n": "broker-a",
}  # fmt: skip


def header(code: int, ext: object, **fields: object) -> bytes:
    envelope = {"code": code, "extFields": ext, "flag": 0, "language": "JAVA", "opaque": 7}
    return json.dumps(envelope | fields, separators=(",", ":"), ensure_ascii=False).encode()


def test_a_send_is_read_with_numbers_as_numbers() -> None:
    """Handlers never get a text where a number is declared."""
    command = decode_request(header(310, SEND_V2), b"body")

    assert command.header == SendMessageRequestHeaderV2(
        producer_group="g",
        topic="t",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=2,
        sys_flag=0,
        born_timestamp=1758268800000,
        flag=0,
        properties="KEYS\x01k\x02",
        broker_name="broker-a",
    )
    assert isinstance(command.header, SendMessageRequestHeader)
    assert command.header_error is None


def test_numbers_of_the_cpp_client_are_read() -> None:
    """It writes most numbers as JSON numbers, and booleans as "0" and "1"."""
    ext = SEND_V2 | {"d": 4, "e": 2, "f": 0, "h": 0, "k": "1", "m": "1", "l": 16}
    raw = header(310, ext, language="CPP") + b"\n"
    command = decode_request(raw, b"")

    assert command.language == LanguageCode.CPP
    assert isinstance(command.header, SendMessageRequestHeaderV2)
    assert command.header.queue_id == 2
    assert command.header.unit_mode is True
    assert command.header.batch is True
    assert command.header.max_reconsume_times == 16


def test_a_number_where_text_is_declared_becomes_its_digits() -> None:
    """Every digit stays, because signatures cover them."""
    ext: dict[str, Any] = {"offset": 1, "group": 12, "delayLevel": 0, "originMsgId": 1e5}
    raw = header(36, ext)
    command = decode_request(raw, b"")

    assert command.header == ConsumerSendMsgBackRequestHeader(
        offset=1, group="12", delay_level=0, origin_msg_id="100000.0"
    )
    assert ext_texts(raw)["originMsgId"] == "100000.0"
    assert ext_texts(raw.replace(b"100000.0", b"1E+05"))["originMsgId"] == "1E+05"


def test_nulls_count_as_absent() -> None:
    """The official reader accepts them."""
    ext = {"topic": "t", "queueId": "0", "committed": None, "z": {"a": "x"}}
    raw = header(30, ext, remark=None, version=None, language=None)
    command = decode_request(raw, b"")

    assert command.header == GetMaxOffsetRequestHeader(topic="t", queue_id=0)
    assert command.remark is None
    assert command.language == LanguageCode.JAVA
    assert ext_texts(raw) == {"topic": "t", "queueId": "0", "z": '{"a":"x"}'}


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("TRUE", True), ("1", True), ("false", False), ("0", False), ("", False),
     ("yes", False), (True, True), (False, False)],
)  # fmt: skip
def test_every_text_but_true_is_false(text: object, value: bool) -> None:
    """As in Java, plus the C++ client's "1"; no boolean makes a request invalid."""
    command = decode_request(header(310, SEND_V2 | {"k": text}), b"")

    assert command.header_error is None
    assert isinstance(command.header, SendMessageRequestHeaderV2)
    assert command.header.unit_mode is value


@pytest.mark.parametrize(
    ("language", "number"),
    [("GO", 9), ("COBOL", 7), (3, 3), ("3", 3), (99, 7), (None, 0), (True, 7), ([], 7)],
)
def test_every_language_is_accepted(language: object, number: int) -> None:
    """Newer clients may send languages that are not known yet."""
    command = decode_request(header(30, {"topic": "t", "queueId": "0"}, language=language), b"")

    assert command.language == number
    assert isinstance(command.header, GetMaxOffsetRequestHeader)


def test_envelope_numbers_may_be_texts_or_missing() -> None:
    """The official reader converts them; a request without opaque gets 0."""
    raw = b'{"code":"30","opaque":"12","extFields":{"topic":"t","queueId":"0"}}'
    command = decode_request(raw, b"")
    assert (command.code, command.opaque, command.flag, command.version) == (30, 12, 0, 0)

    command = decode_request(b'{"code":30,"extFields":{"topic":"t","queueId":"0"}}', b"")
    assert command.opaque == 0


def test_key_order_and_blanks_do_not_matter() -> None:
    """Only the fast path depends on the position of ``code``."""
    raw = b'{ "opaque" : 9 ,\n"extFields" : { "topic" : "t" , "queueId" : "0" } , "code" : 30 }\n '
    command = decode_request(raw, b"")

    assert (command.code, command.opaque) == (30, 9)
    assert command.header == GetMaxOffsetRequestHeader(topic="t", queue_id=0)


def test_the_last_of_duplicate_keys_is_kept() -> None:
    """The fast and the tolerant reader agree."""
    raw = b'{"code":30,"extFields":{"topic":"a","topic":"b","queueId":"0"},"opaque":1,"opaque":2}'
    command = decode_request(raw, b"")

    assert command.opaque == 2
    assert command.header == GetMaxOffsetRequestHeader(topic="b", queue_id=0)
    assert ext_texts(raw)["topic"] == "b"


def test_a_second_code_cannot_mix_up_two_requests() -> None:
    """The header's class always belongs to the code that selects the handler."""
    pull = b'{"code":30,"extFields":{"topic":"b","queueId":"0"},"code":11}'
    command = decode_request(pull, b"")

    assert command.code == 11
    assert not isinstance(command.header, GetMaxOffsetRequestHeader)
    assert command.header_error == "consumerGroup is missing"


def test_raw_control_characters_in_texts_are_read() -> None:
    """They separate properties, and not every client escapes them."""
    raw = header(310, SEND_V2).replace(b"\\u0001", b"\x01").replace(b"\\u0002", b"\x02")
    command = decode_request(raw, b"")

    assert isinstance(command.header, SendMessageRequestHeaderV2)
    assert command.header.properties == "KEYS\x01k\x02"


def test_text_beyond_ascii_is_kept() -> None:
    """Keys and tags may be in any script, escaped or not."""
    ext = SEND_V2 | {"i": "KEYS\x01訂單🚀\x02"}
    plain = decode_request(header(310, ext), b"")
    escaped = decode_request(json.dumps({"code": 310, "extFields": ext}).encode(), b"")

    assert isinstance(plain.header, SendMessageRequestHeaderV2)
    assert plain.header.properties == "KEYS\x01訂單🚀\x02"
    assert plain.header == escaped.header


def test_half_a_surrogate_pair_becomes_a_question_mark() -> None:
    """It has no UTF-8 form, so it could not be stored or sent."""
    raw = b'{"code":30,"remark":"\\ud800","extFields":{"topic":"a\\udc00","queueId":"0"}}'
    command = decode_request(raw, b"")

    assert command.remark == "?"
    assert command.header == GetMaxOffsetRequestHeader(topic="a?", queue_id=0)


def test_a_heartbeat_needs_no_ext_fields() -> None:
    """Handlers get a typed header even if the frame has none."""
    assert decode_request(b'{"code":34,"opaque":1}', b"{}").header == HeartbeatRequestHeader()
    assert decode_request(header(34, {"Signature": "x"}), b"{}").header == HeartbeatRequestHeader()


@pytest.mark.parametrize(
    ("ext", "error"),
    [
        ({"topic": "t"}, "queueId is missing"),
        ({"queueId": "0"}, "topic is missing"),
        ({"topic": "t", "queueId": None}, "queueId is missing"),
        ({"topic": "t", "queueId": ""}, "queueId is missing"),
        ({"topic": "t", "queueId": "abc"}, "queueId is not a number in range: 'abc'"),
        ({"topic": "t", "queueId": "2147483648"}, "queueId is not a number in range: '2147483648'"),
        ({"topic": "t", "queueId": True}, "queueId is not a number in range: 'true'"),
        (None, "topic is missing"),
    ],
)
def test_a_header_that_does_not_fit_is_noted_in_the_command(ext: object, error: str) -> None:
    """The broker answers the request with this text and keeps the connection."""
    command = decode_request(header(30, ext), b"")

    assert command.header_error == error
    assert isinstance(command.header, dict)


def test_a_plus_sign_is_part_of_a_number() -> None:
    command = decode_request(header(30, {"topic": "t", "queueId": "+3"}), b"")

    assert command.header == GetMaxOffsetRequestHeader(topic="t", queue_id=3)


def test_offsets_have_at_most_64_bits() -> None:
    """They are packed into 8 bytes."""
    ext = {
        "producerGroup": "g", "tranStateTableOffset": "0", "commitLogOffset": str(2**63 - 1),
        "commitOrRollback": "8", "msgId": "m",
    }  # fmt: skip
    command = decode_request(header(37, ext), b"")
    assert isinstance(command.header, EndTransactionRequestHeader)
    assert command.header.commit_log_offset == 2**63 - 1

    command = decode_request(header(37, ext | {"commitLogOffset": str(2**63)}), b"")
    assert command.header_error is not None


def test_go_requests_with_an_empty_expression_type_are_read() -> None:
    """An empty text is a value; only numbers and booleans cannot be empty."""
    ext = {
        "consumerGroup": "g", "topic": "t", "queueId": "0", "queueOffset": "5", "maxMsgNums": "32",
        "sysFlag": "2", "commitOffset": "0", "suspendTimeoutMillis": "20000", "subVersion": "0",
        "subscription": "", "expressionType": "", "maxMsgBytes": "",
    }  # fmt: skip
    command = decode_request(header(11, ext), b"")

    assert isinstance(command.header, PullMessageRequestHeader)
    assert command.header.expression_type == ""
    assert command.header.max_msg_bytes is None


def test_an_unknown_request_keeps_its_ext_fields() -> None:
    """The broker checks its signature before it refuses it with code 3."""
    command = decode_request(header(9999, {"x": "1", "y": 2}), b"")

    assert command.header == {"x": "1", "y": "2"}
    assert command.header_error is None
    assert decode_request(b'{"code":9999,"extFields":{}}', b"").header == {}
    assert decode_request(b'{"code":9999}', b"").header is None


@pytest.mark.parametrize("code", [10, 11, 12, 17, 22, 34, 310])
def test_a_response_is_never_read_as_the_request_of_its_number(code: int) -> None:
    """Response codes and request codes overlap."""
    raw = header(code, {"topic": "t"}, flag=1)

    for decode in (decode_request, decode_response):
        command = decode(raw, b"")
        assert command.is_response
        assert command.header == {"topic": "t"}
        assert command.header_error is None


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"null", b"[1,2,3]", b'"text"', b"7", b"{}", b'{"opaque":1}',
        b'{"code":null}', b'{"code":30,', b'{"code":30}x', b'{"code":30}{"code":30}',
        b"{'code':30}", b'{"code":"x"}', b'{"code":NaN}', b'{"code":1e2}', b'{"code":2147483648}',
        b'{"code":30,"opaque":8589934592}', b'{"code":30,"opaque":-2147483649}',
        b'{"code":30,"flag":4294967296}', b'{"code":30,"version":[]}', b'{"code":30,"opaque":1.5}',
        b'{"code":30,"opaque":true}', b'{"code":30,"opaque":3,"remark":"\xff\xfe"}',
        b'{"code":30,"zzz":"\xff"}', b'{"code":30,"extFields":[]}', b'{"code":30,"extFields":"x"}',
        b'{"code":30,"extFields":1}', b'\xef\xbb\xbf{"code":30}', '{"code":30}'.encode("utf-16"),
        b'{"code":' + b"9" * 5000 + b"}", b'{"code":30,"x":' + b"[" * 100_000,
        b'{"code":30,"x":' + b'{"a":' * 100_000,
        b'{"code":30,"extFields":{"topic":"\xed\xa0\x80","queueId":"0"}}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("decode", [decode_request, decode_response])
def test_anything_else_is_a_header_error(decode: Any, raw: bytes) -> None:
    """Malformed, too deep, too long, not UTF-8, or out of range."""
    with pytest.raises(HeaderError):
        decode(raw, b"")


@pytest.mark.parametrize(
    "digits", [b"9" * 5000, b"-" + b"9" * 5000, b"1e99999", b"0." + b"1" * 5000]
)
def test_a_number_of_any_length_gets_the_same_error(digits: bytes) -> None:
    """Also one with more digits than Python converts."""
    raw = b'{"code":30,"extFields":{"topic":"t","queueId":%b}}' % digits
    command = decode_request(raw, b"")

    assert command.header_error is not None
    assert command.header_error.startswith("queueId is not a number in range")
    assert len(command.header_error) < 100
