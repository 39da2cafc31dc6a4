"""Splitting the byte stream into frames: boundaries, limits, and broken streams."""

from __future__ import annotations

import tracemalloc
from collections import deque

import pytest

from halfmq.remoting.codes import HeaderType, LanguageCode
from halfmq.remoting.errors import (
    FrameTooLargeError,
    HeaderError,
    OtherProtocolError,
    ProtocolError,
)
from halfmq.remoting.framing import FRAME_SIZE_MAX, FrameDecoder
from halfmq.remoting.headers import GetRouteInfoRequestHeader, QueryConsumerOffsetRequestHeader
from halfmq.remoting.replies import encode_request

ROUTE_REQUEST = bytes.fromhex(
    """
    00 00 00 89 00 00 00 85 7b 22 63 6f 64 65 22 3a 31 30 35 2c 22 65 78 74 46 69 65 6c 64 73 22 3a
    7b 22 74 6f 70 69 63 22 3a 22 54 6f 70 69 63 54 65 73 74 22 7d 2c 22 66 6c 61 67 22 3a 30 2c 22
    6c 61 6e 67 75 61 67 65 22 3a 22 50 59 54 48 4f 4e 22 2c 22 6f 70 61 71 75 65 22 3a 37 2c 22 73
    65 72 69 61 6c 69 7a 65 54 79 70 65 43 75 72 72 65 6e 74 52 50 43 22 3a 22 4a 53 4f 4e 22 2c 22
    76 65 72 73 69 6f 6e 22 3a 34 30 39 7d
    """
)
OFFSET_REQUEST = bytes.fromhex(
    """
    00 00 00 50 01 00 00 4c 00 0e 03 01 99 00 00 00 08 00 00 00 00 00 00 00 00 00 00 00 37 00 0d 63
    6f 6e 73 75 6d 65 72 47 72 6f 75 70 00 00 00 02 43 47 00 05 74 6f 70 69 63 00 00 00 09 54 6f 70
    69 63 54 65 73 74 00 07 71 75 65 75 65 49 64 00 00 00 01 30
    """
)


def test_json_request_is_byte_for_byte_the_worked_example() -> None:
    """Encoding gives the documented bytes, and decoding them the request."""
    frame = encode_request(105, opaque=7, header={"topic": "TopicTest"}, version=409)

    assert frame == ROUTE_REQUEST
    (command,) = FrameDecoder().receive_data(ROUTE_REQUEST)
    assert command.header == GetRouteInfoRequestHeader(topic="TopicTest")
    assert (command.code, command.opaque, command.flag) == (105, 7, 0)
    assert (command.language, command.version) == (LanguageCode.PYTHON, 409)
    assert not command.is_response
    assert not command.is_one_way


def test_binary_request_is_byte_for_byte_the_worked_example() -> None:
    header = {"consumerGroup": "CG", "topic": "TopicTest", "queueId": "0"}
    frame = encode_request(
        14, opaque=8, header=header, version=409, header_type=HeaderType.ROCKETMQ
    )

    assert frame == OFFSET_REQUEST
    (command,) = FrameDecoder().receive_data(OFFSET_REQUEST)
    assert command.header == QueryConsumerOffsetRequestHeader(
        consumer_group="CG", topic="TopicTest", queue_id=0
    )
    assert command.header_type == HeaderType.ROCKETMQ


def test_a_msgpack_request_has_its_fields_as_an_array() -> None:
    """They are in the declared order, numbers as numbers."""
    header = QueryConsumerOffsetRequestHeader(consumer_group="CG", topic="T", queue_id=3)
    frame = encode_request(14, opaque=8, header=header, header_type=HeaderType.MSGPACK)

    assert frame == bytes.fromhex("00000015 02000011 97 0e 08 00 03 cd01df c0 94 a24347 a154 03 c0")
    (command,) = FrameDecoder().receive_data(frame)
    assert isinstance(command.header, QueryConsumerOffsetRequestHeader)
    assert command.header.queue_id == 3
    assert command.header.set_zero_if_not_found is None


def test_every_prefix_waits_and_the_rest_completes_it() -> None:
    """A frame is a command once its last byte has arrived, and none before."""
    for cut in range(1, len(ROUTE_REQUEST)):
        decoder = FrameDecoder()

        assert decoder.receive_data(ROUTE_REQUEST[:cut]) == []
        assert decoder.buffered == cut
        (command,) = decoder.receive_data(ROUTE_REQUEST[cut:])
        assert command.code == 105
        assert decoder.buffered == 0


def test_a_frame_without_body_has_an_empty_one() -> None:
    """On the wire no body and an empty one are the same; handlers always get bytes."""
    (command,) = FrameDecoder().receive_data(ROUTE_REQUEST)
    assert command.body == b""

    (command,) = FrameDecoder().receive_data(encode_request(105, opaque=1, body=b"\x00\xff"))
    assert command.body == b"\x00\xff"


@pytest.mark.parametrize("length", [-1, -(2**31), 0, 1, 3, FRAME_SIZE_MAX - 3, 2**31 - 1])
def test_an_impossible_length_is_refused_as_soon_as_it_is_read(length: int) -> None:
    """The decoder never waits for, or buffers, a frame over the limit."""
    with pytest.raises(FrameTooLargeError) as caught:
        FrameDecoder().receive_data(length.to_bytes(4, signed=True))

    assert caught.value.size == length + 4
    assert caught.value.size_max == FRAME_SIZE_MAX


@pytest.mark.parametrize(
    ("stream", "protocol"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2"),
        (b"GET /health HTTP/1.1\r\n", "HTTP"),
        (b"OPTIONS * HTTP/1.1\r\n", "HTTP"),
        (b"HTTP/1.1 400 Bad Request\r\n", "HTTP"),
        (bytes.fromhex("16030100f5010000f10303"), "TLS"),
        (bytes.fromhex("15030100020228" * 2), "TLS"),
    ],
)
def test_another_protocol_is_named(stream: bytes, protocol: str) -> None:
    """A number of bytes that nobody sent helps no one."""
    for size in (len(stream), 4, 1):  # TCP may cut anywhere
        parts = [stream[start : start + size] for start in range(0, len(stream), size)]
        with pytest.raises(OtherProtocolError, match=f"speaks {protocol} and not"):
            deque(map(FrameDecoder().receive_data, parts), maxlen=0)


def test_the_largest_frame_is_accepted_and_one_byte_more_is_not() -> None:
    """The limit counts the whole frame, its length bytes included."""
    frame = encode_request(105, opaque=1, header={"topic": "T"})
    exact = FrameDecoder(frame_size_max=len(frame))
    too_small = FrameDecoder(frame_size_max=len(frame) - 1)

    assert len(exact.receive_data(frame)) == 1
    with pytest.raises(FrameTooLargeError):
        too_small.receive_data(frame)


@pytest.mark.parametrize("header_type", [3, 127, 255])
def test_an_unknown_header_type_is_refused(header_type: int) -> None:
    """Its header cannot be read, so the stream cannot be trusted any more."""
    frame = b"\x00\x00\x00\x06" + bytes([header_type]) + b"\x00\x00\x02{}"

    with pytest.raises(HeaderError, match=f"header type {header_type}"):
        FrameDecoder().receive_data(frame)


def test_a_header_longer_than_its_frame_is_refused() -> None:
    """It would end in the next frame."""
    with pytest.raises(HeaderError, match="longer than its frame"):
        FrameDecoder().receive_data(bytes.fromhex("00000006 00000003 7b7d"))


def test_commands_before_a_bad_frame_are_returned() -> None:
    """The broker can still serve them."""
    with pytest.raises(ProtocolError) as caught:
        FrameDecoder().receive_data(ROUTE_REQUEST + OFFSET_REQUEST + b"GET / HTTP/1.1\r\n")

    assert [command.code for command in caught.value.commands] == [105, 14]


def test_nothing_is_read_after_a_bad_frame() -> None:
    """The decoder refuses all further bytes, because frame boundaries are unknown."""
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError):
        decoder.receive_data(b"\x00\x00\x00\x00")

    with pytest.raises(ProtocolError) as caught:
        decoder.receive_data(ROUTE_REQUEST)
    assert caught.value.commands == []
    assert decoder.buffered == 0


def test_a_large_frame_in_small_reads_is_not_copied_for_every_read() -> None:
    """Memory stays below three times its size: the buffer, its bytes and the body."""
    body = bytes(4 * 1024 * 1024)
    frame = encode_request(310, opaque=1, header={"b": "T"}, body=body)
    decoder = FrameDecoder()

    tracemalloc.start()
    try:
        commands = []
        for start in range(0, len(frame), 65_536):
            commands += decoder.receive_data(frame[start : start + 65_536])
            assert decoder.buffered < len(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert [command.body for command in commands] == [body]
    assert peak < 3.5 * len(frame)
