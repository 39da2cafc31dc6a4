"""No request is larger than its code allows, and no name is longer than names may be."""

from __future__ import annotations

import msgspec
import pytest

from halfmq.remoting.bodies import (
    EXPRESSION_LENGTH_MAX,
    ConsumerData,
    HeartbeatData,
    SubscriptionData,
    decode_heartbeat,
    encode_heartbeat,
)
from halfmq.remoting.codes import FLAG_RESPONSE, HeaderType
from halfmq.remoting.errors import BodyError, FrameTooLargeError, ProtocolError
from halfmq.remoting.ext_fields import names_of
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.header_tables import REQUEST_HEADERS
from halfmq.remoting.replies import encode_request
from halfmq.remoting.request_sizes import FIELDS_MAX, NAME_LENGTH_MAX, REQUEST_SIZES, SMALL
from halfmq.remoting.serialization import encode_header, join_frame
from tests.support.frames import all_recorded
from tests.support.usual_headers import pull_header, send_header

KINDS = list(HeaderType)
LARGE = 9 << 20
TEXTS = {
    *("properties", "i"),  # of messages, which have a limit of their own
    *("subscription", "key", "attributes", "topicList", "filterGroups", "value"),
    *("msgId", "transactionId"),  # its unique key, which its producer may choose
    *("recallHandle", "statsKey", "reason", "bornHost", "storeHost"),
    *("exp", "extraInfo"),
}
"""Fields that may be longer than a name."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_that_its_request_may_not_have_is_neither_buffered_nor_parsed(kind: int) -> None:
    """The first read that shows the code is enough; a message has its own limit."""
    pull = encode_request(11, opaque=1, header=pull_header(), body=bytes(LARGE), header_type=kind)
    send = encode_request(310, opaque=1, header=send_header(), body=bytes(LARGE), header_type=kind)
    for size in (64, len(pull)):
        with pytest.raises(FrameTooLargeError):
            FrameDecoder().receive_data(pull[:size])
    answer = join_frame(kind, encode_header(kind, 0, 1, FLAG_RESPONSE, 0, 479, None, None), pull)

    decoder = FrameDecoder()
    for one in (send, answer):
        assert decoder.receive_data(one[:9]) == []
        assert len(decoder.receive_data(one[9:])) == 1


def test_the_code_counts_wherever_it_stands() -> None:
    """A header that hides its code until it is read must not have another request's body."""
    frame = join_frame(HeaderType.JSON, b'{"opaque":1,"code":34}', bytes(LARGE))

    assert FrameDecoder().receive_data(frame[:1_000]) == []
    with pytest.raises(FrameTooLargeError):
        FrameDecoder().receive_data(frame)


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_has_a_limit_and_so_has_the_number_of_its_fields(kind: int) -> None:
    """Both are above what any official client sends."""
    long = encode_request(
        34, opaque=1, header={"extra": "x" * SMALL.header}, header_type=kind, body=b"{}"
    )
    fields = {str(number): "" for number in range(FIELDS_MAX + 1)}
    with pytest.raises(ProtocolError):
        FrameDecoder().receive_data(
            encode_request(9_999, opaque=1, header=fields, header_type=kind)
        )
    with pytest.raises(FrameTooLargeError):
        FrameDecoder().receive_data(long)


def test_recorded_requests_have_a_tenth_of_their_limits() -> None:
    """Official clients, brokers and tools stay far below, but for messages."""
    for line in all_recorded():
        is_request = line.direction.startswith(("client", "broker→namesrv"))
        if is_request and line.code:  # 0: an answer
            size = REQUEST_SIZES.get(line.code, SMALL)
            assert len(line.header) < size.header / 10
            assert len(line.body) <= size.body / 10, line


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_name_is_refused_before_a_handler_sees_it(kind: int) -> None:
    """Every text of a request's header is a name, unless it is listed here."""
    longest, longer = "n" * NAME_LENGTH_MAX, "n" * (NAME_LENGTH_MAX + 1)
    for text, is_right in ((longest, True), (longer, False)):
        frame = encode_request(11, opaque=1, header=pull_header(topic=text), header_type=kind)
        (command,) = FrameDecoder().receive_data(frame)
        assert (command.header_error is None) is is_right
        assert len(command.header_error or "") < 100
    for code, header in REQUEST_HEADERS.items():
        schema = msgspec.json.schema(header)["$defs"][header.__name__]["properties"]
        for name in set(names_of(header)) - TEXTS:
            kinds = schema[name].get("anyOf", [schema[name]])
            for one in kinds:
                assert one.get("type") != "string" or "maxLength" in one, (code, name)


@pytest.mark.parametrize(
    ("client_id", "group", "topic", "expression"),
    [
        ("n" * 256, "g", "t", "*"),
        ("c", "n" * 256, "t", "*"),
        ("c", "g", "n" * 256, "*"),
        ("c\x1b[2J", "g", "t", "*"),
        ("c", "g\r\n", "t", "*"),
        ("c", "g", "t", "x" * (EXPRESSION_LENGTH_MAX + 1)),
    ],
)
def test_a_heartbeat_with_a_name_that_is_none_is_refused(
    client_id: str, group: str, topic: str, expression: str
) -> None:
    """What it names is kept for as long as its connection lives, and logged."""
    subscription = SubscriptionData(topic=topic, sub_string=expression)
    consumer = ConsumerData(group_name=group, subscription_data_set=(subscription,))
    body = encode_heartbeat(HeartbeatData(client_id=client_id, consumer_data_set=(consumer,)))

    with pytest.raises(BodyError) as caught:
        decode_heartbeat(body)
    assert len(str(caught.value)) < 100
