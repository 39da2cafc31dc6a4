"""Frames split at any byte, and any bytes that a peer may send."""

from __future__ import annotations

import struct
from contextlib import suppress

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from halfmq.remoting import bodies, fastjson
from halfmq.remoting.codes import HeaderType
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.correlation import Correlation
from halfmq.remoting.errors import BodyError, ProtocolError
from halfmq.remoting.ext_fields import Header, texts_of
from halfmq.remoting.framing import FrameDecoder, encode_frame
from halfmq.remoting.serialization import ext_fields
from tests.support.frames import TEXTS, requests, responses

COMMANDS = requests() | responses()


def comparable(command: RemotingCommand) -> tuple[object, ...]:
    """Return comparable values: the array variant of a header equals the header."""
    header = command.header
    if isinstance(header, Header):
        header = msgspec.structs.asdict(header)
    return (
        command.code,
        command.opaque,
        command.flag,
        command.language,
        command.version,
        command.remark,
        header,
        command.body,
        command.header_type,
        command.header_error,
    )


def read(decoder: FrameDecoder, stream: bytes, step: int) -> list[tuple[object, ...]]:
    commands: list[RemotingCommand] = []
    for start in range(0, len(stream), step):
        commands += decoder.receive_data(stream[start : start + step])
    return [comparable(command) for command in commands]


@given(sent=st.lists(COMMANDS, max_size=5), step=st.integers(min_value=1, max_value=600))
def test_any_split_yields_the_same_commands(sent: list[RemotingCommand], step: int) -> None:
    """TCP may split the stream at any byte; both kinds of decoder return the same commands."""
    stream = b"".join(map(encode_frame, sent))
    expected = [comparable(command) for command in sent]

    for responses_first in (False, True):
        decoder = FrameDecoder(responses_first=responses_first)
        assert read(decoder, stream, step) == expected
        assert decoder.buffered == 0


@given(sent=requests())
def test_typed_requests_survive_the_wire(sent: RemotingCommand) -> None:
    """A header of any class, with any texts, survives every encoding.

    The exception is the ROCKETMQ header, to which empty texts and absent ones are the same only
    where a number or boolean is declared, which our headers never leave empty.
    """
    (received,) = FrameDecoder().receive_data(encode_frame(sent))

    assert comparable(received) == comparable(sent)
    assert ext_fields(received) == texts_of(sent.header)


@given(
    texts=st.dictionaries(TEXTS, TEXTS, max_size=6),
    header_type=st.sampled_from([HeaderType.JSON, HeaderType.ROCKETMQ, HeaderType.MSGPACK]),
)
def test_ext_fields_nobody_declared_survive_too(
    texts: dict[str, str], header_type: HeaderType
) -> None:
    """Signatures cover them."""
    sent = RemotingCommand(9999, header=texts, header_type=header_type)
    (received,) = FrameDecoder().receive_data(encode_frame(sent))

    assert ext_fields(received) == texts


def check_garbage(stream: bytes, step: int) -> None:
    """Feed a decoder: it gives commands or a ProtocolError, in bounded memory."""
    frame_size_max = 4096
    for responses_first in (False, True):
        decoder = FrameDecoder(frame_size_max=frame_size_max, responses_first=responses_first)
        with suppress(ProtocolError):
            for start in range(0, len(stream), step):
                decoder.receive_data(stream[start : start + step])
                assert decoder.buffered < frame_size_max


@given(stream=st.binary(max_size=300), step=st.integers(min_value=1, max_value=300))
def test_garbage_is_a_protocol_error_and_nothing_else(stream: bytes, step: int) -> None:
    check_garbage(stream, step)


@given(
    header_type=st.integers(min_value=0, max_value=3),
    header=st.binary(max_size=120),
    body=st.binary(max_size=20),
    lie=st.sampled_from([0, 0, 0, -1, 1, 1000]),
)
def test_garbage_in_a_whole_frame_is_a_protocol_error(
    header_type: int, header: bytes, body: bytes, lie: int
) -> None:
    """Bytes after a valid frame head reach the header readers."""
    size = max(0, len(header) + lie)
    head = struct.pack(">iI", 4 + len(header) + len(body), header_type << 24 | size)
    check_garbage(head + header + body, 10_000)


@given(data=st.data(), sent=COMMANDS)
def test_a_garbled_frame_is_a_command_or_a_protocol_error(
    data: st.DataObject, sent: RemotingCommand
) -> None:
    """After flipped bits and lost bytes, the decoder gives commands or a ProtocolError."""
    frame = bytearray(encode_frame(sent))
    for _ in range(data.draw(st.integers(min_value=1, max_value=3))):
        position = data.draw(st.integers(min_value=0, max_value=len(frame) - 1))
        frame[position] = data.draw(st.integers(min_value=0, max_value=255))

    check_garbage(bytes(frame), 10_000)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ENVELOPE_KEYS = ["code", "opaque", "flag", "language", "version", "remark", "extFields"]


@given(
    code=st.sampled_from([10, 11, 30, 34, 36, 37, 310, 9999]) | JSON_VALUES,
    fields=st.dictionaries(st.sampled_from(ENVELOPE_KEYS[1:]) | TEXTS, JSON_VALUES, max_size=5),
    ext=st.dictionaries(
        st.sampled_from(["topic", "queueId", "a", "e", "k", "producerGroup"]) | TEXTS,
        JSON_VALUES,
        max_size=5,
    ),
)
@example(code=30, fields={"flag": 1}, ext={"topic": None})
def test_odd_json_headers_are_commands_or_protocol_errors(
    code: object, fields: dict[str, object], ext: dict[str, object]
) -> None:
    """Valid JSON of any shape reaches every branch of the tolerant reader."""
    header = msgspec.json.encode({"code": code, "extFields": ext} | fields)
    check_garbage(struct.pack(">iI", 4 + len(header), len(header)) + header, 10_000)


@given(items=st.lists(JSON_VALUES, max_size=9), start=st.sampled_from([[], [30, 1, 0, 3, 479]]))
def test_odd_msgpack_headers_are_commands_or_protocol_errors(
    items: list[object], start: list[object]
) -> None:
    try:
        header = msgspec.msgpack.encode(start + items)
    except OverflowError:  # MSGPACK has no integers beyond 64 bits
        return
    head = struct.pack(">iI", 4 + len(header), HeaderType.MSGPACK << 24 | len(header))
    check_garbage(head + header, 10_000)


@given(
    body=st.binary(max_size=60) | st.text('{}[]:,"0129.-eEx$ref\\ \n', max_size=60).map(str.encode)
)
def test_bodies_are_values_or_body_errors(body: bytes) -> None:
    for decode in (
        fastjson.parse,
        bodies.decode_heartbeat,
        bodies.decode_route,
        bodies.decode_lock_batch,
        bodies.decode_consumer_status,
    ):
        with suppress(BodyError):
            decode(body)


@given(value=JSON_VALUES)
def test_odd_json_bodies_are_values_or_body_errors(value: object) -> None:
    """Valid JSON of any shape, where a known body is expected."""
    for name in (
        "consumerDataSet",
        "messageQueueTable",
        "mqSet",
        "queueDatas",
        "brokerDatas",
        "clientID",
    ):
        body = msgspec.json.encode({name: value})
        for decode in (
            bodies.decode_heartbeat,
            bodies.decode_route,
            bodies.decode_lock_batch,
            bodies.decode_consumer_status,
        ):
            with suppress(BodyError):
                decode(body)


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("register"), st.integers(min_value=0, max_value=50)),
            st.tuples(st.just("match"), st.integers(min_value=0, max_value=30)),
            st.tuples(st.just("expire"), st.integers(min_value=0, max_value=60)),
        ),
        max_size=40,
    )
)
def test_correlation_behaves_like_a_plain_dict(steps: list[tuple[str, int]]) -> None:
    """Requests expire as if every deadline were checked each time."""
    correlation: Correlation[int] = Correlation()
    model: dict[int, int] = {}  # opaque to deadline, which is also the value
    for step, number in steps:
        if step == "register":
            model[correlation.register(number, number)] = number
        elif step == "match":
            assert correlation.match(number) == model.pop(number, None)
        else:
            late = {opaque: deadline for opaque, deadline in model.items() if deadline <= number}
            assert correlation.expire(number) == list(late.values())
            model = {opaque: deadline for opaque, deadline in model.items() if opaque not in late}
        assert len(correlation) == len(model)
    assert correlation.fail_all() == list(model.values())
