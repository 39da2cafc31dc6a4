"""Consumption message by message: handles of popped messages, and headers and bodies of requests.

A handle (RocketMQ's ``extraInfo``, property ``POP_CK``) has eight fields with blanks between them:
begin of the checkpoint, pop time, invisible time, revive queue, kind of topic, broker, queue and
queue offset. Clients of halfmq send it back unread.

Source: RocketMQ ``ExtraInfoUtil``, ``KeyBuilder``, ``PopMessageRequestHeader``
and its neighbours, ``BatchAck``, ``SetMessageRequestModeRequestBody``.
"""

from base64 import b64decode
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import field

from .codes import RequestCode
from .errors import BodyError
from .ext_fields import Header, Int32, Int64, Name, answer_header, request_header
from .fastjson import json_reader

ORDER_QUEUE: Final = 999
"""The revive queue in handles of messages that were popped in order: they have no checkpoint."""

_RETRY_PREFIX: Final = "%RETRY%"


class PopHandle(NamedTuple):
    """One delivery of a message."""

    start: int  # queue offset at which the checkpoint begins
    pop_ms: int
    invisible_ms: int
    revive_queue: int
    kind: str  # see `kind_of`
    broker_name: str
    queue_id: int
    offset: int

    def __str__(self) -> str:
        return " ".join(map(str, self))


def parse_handle(text: str, offset: int) -> PopHandle:
    """Return the handle of the message at a queue offset; old clients leave that out of the text.

    Raises:
        ValueError: This is no handle.
    """
    fields = text.split(" ")
    if not 7 <= len(fields) <= 8:
        raise ValueError(f"{len(fields)} fields")
    start, pop_ms, invisible_ms, revive_queue = map(int, fields[:4])
    return PopHandle(
        start, pop_ms, invisible_ms, revive_queue, fields[4], fields[5], int(fields[6]), offset
    )


def pop_retry_topic(topic: str, group: str, *, version_2: bool = False) -> str:
    """Return the topic of messages of ``topic`` that the group has not acknowledged in time."""
    return f"{_RETRY_PREFIX}{group}{'+' if version_2 else '_'}{topic}"


def kind_of(topic: str) -> str:
    """Return 0 for an ordinary topic; 1 or 2 for a retry topic of that version."""
    if not topic.startswith(_RETRY_PREFIX):
        return "0"
    return "2" if "+" in topic else "1"


def topic_of_kind(kind: str, topic: str, group: str) -> str:
    """Return the topic in which a message of ``topic`` was popped."""
    return topic if kind == "0" else pop_retry_topic(topic, group, version_2=kind == "2")


def offsets_text(kind: str, queue_id: int, offsets: Sequence[int]) -> str:
    """Return what a pop's answer says about the messages of one queue."""
    return f"{kind} {queue_id} {','.join(map(str, offsets))}"


def parse_offsets(text: str | None) -> dict[tuple[str, int], list[int]]:
    """Return offsets by kind of topic and queue id.

    Raises:
        ValueError: The text is damaged.
    """
    found: dict[tuple[str, int], list[int]] = {}
    for part in (text or "").split(";"):
        if part:
            kind, queue_id, offsets = part.split(" ")
            found[kind, int(queue_id)] = [int(one) for one in offsets.split(",")]
    return found


@request_header(RequestCode.POP_MESSAGE)
class PopMessageRequestHeader(Header, frozen=True, kw_only=True):
    """POP_MESSAGE (200050): get messages and hide them from the other members of the group."""

    consumer_group: Name
    topic: Name
    queue_id: Int32  # -1: any
    max_msg_nums: Int32
    invisible_time: Int64  # ms
    poll_time: Int64  # ms to wait for a message
    born_time: Int64 = 0  # ms, by the client's clock
    init_mode: Int32 = 0  # where a new group begins: 0 at the first message, 1 at the end
    exp_type: Name | None = None
    exp: str | None = None
    order: bool = False
    attempt_id: Name | None = None
    broker_name: Name | None = field(default=None, name="bname")


@answer_header(RequestCode.POP_MESSAGE, RequestCode.PEEK_MESSAGE)
class PopMessageResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to POP_MESSAGE; the body has the stored records, one after the other."""

    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32
    rest_num: Int64
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


@request_header(RequestCode.PEEK_MESSAGE)
class PeekMessageRequestHeader(Header, frozen=True, kw_only=True):
    """PEEK_MESSAGE (200052): see the next messages without taking them."""

    consumer_group: Name
    topic: Name
    queue_id: Int32
    max_msg_nums: Int32
    broker_name: Name | None = field(default=None, name="bname")


@request_header(RequestCode.ACK_MESSAGE)
class AckMessageRequestHeader(Header, frozen=True, kw_only=True):
    """ACK_MESSAGE (200051): the message is consumed."""

    consumer_group: Name
    topic: Name  # where the message was popped, perhaps a retry topic
    queue_id: Int32
    extra_info: str  # the handle
    offset: Int64
    broker_name: Name | None = field(default=None, name="bname")


@request_header(RequestCode.CHANGE_MESSAGE_INVISIBLETIME)
class ChangeInvisibleTimeRequestHeader(AckMessageRequestHeader, frozen=True, kw_only=True):
    """CHANGE_MESSAGE_INVISIBLETIME (200053): hide a popped message for so long from now on."""

    invisible_time: Int64  # ms


@answer_header(RequestCode.CHANGE_MESSAGE_INVISIBLETIME)
class ChangeInvisibleTimeResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to CHANGE_MESSAGE_INVISIBLETIME: what the new handle is made of."""

    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32


@request_header(RequestCode.NOTIFICATION)
class NotificationRequestHeader(Header, frozen=True, kw_only=True):
    """NOTIFICATION (200054): wait until there are messages, without popping them."""

    consumer_group: Name
    topic: Name
    queue_id: Int32
    poll_time: Int64
    born_time: Int64 = 0
    order: bool = False
    attempt_id: Name | None = None
    exp_type: Name | None = None
    exp: str | None = None
    broker_name: Name | None = field(default=None, name="bname")


@answer_header(RequestCode.NOTIFICATION)
class NotificationResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to NOTIFICATION."""

    has_msg: bool
    polling_full: bool = False


@request_header(RequestCode.POLLING_INFO)
class PollingInfoRequestHeader(Header, frozen=True, kw_only=True):
    """POLLING_INFO (200055): how many pops wait."""

    consumer_group: Name
    topic: Name
    queue_id: Int32
    broker_name: Name | None = field(default=None, name="bname")


@answer_header(RequestCode.POLLING_INFO)
class PollingInfoResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to POLLING_INFO."""

    polling_num: Int32


_BITS_MAX: Final = 8_192  # of a bit set, in bytes: far more offsets than one pop gets


class BatchAck(msgspec.Struct, gc=False):
    """Messages of one pop from one queue that are consumed."""

    group: str = msgspec.field(name="c")
    topic: str = msgspec.field(name="t")
    kind: str = msgspec.field(name="r")
    start: int = msgspec.field(name="so")
    queue_id: int = msgspec.field(name="q")
    revive_queue: int = msgspec.field(name="rq")
    pop_ms: int = msgspec.field(name="pt")
    invisible_ms: int = msgspec.field(name="it")
    bits: str = msgspec.field(name="b")

    @property
    def popped_topic(self) -> str:
        """The topic in which the messages were popped, perhaps a retry topic."""
        return topic_of_kind(self.kind, self.topic, self.group)

    def handles(self, broker_name: str) -> list[PopHandle]:
        """Return the handle of each message. Raises BodyError."""
        try:
            bits = int.from_bytes(b64decode(self.bits, validate=True), "little")
        except ValueError as error:
            raise BodyError(f"b is no bit set in base64: {error}") from None
        if bits.bit_length() > _BITS_MAX:
            raise BodyError(f"b has {bits.bit_length()} bits, the limit is {_BITS_MAX}")
        checkpoint = self.start, self.pop_ms, self.invisible_ms, self.revive_queue
        return [
            PopHandle(*checkpoint, self.kind, broker_name, self.queue_id, self.start + number)
            for number in range(bits.bit_length())
            if bits >> number & 1
        ]


class BatchAckBody(msgspec.Struct, rename="camel", gc=False):
    """Body of BATCH_ACK_MESSAGE (200151)."""

    broker_name: str = ""
    acks: tuple[BatchAck, ...] = ()


decode_batch_ack: Final = json_reader(BatchAckBody, "a batch of acknowledgements", empty=b"{}")
"""Decodes the body of BATCH_ACK_MESSAGE (200151)."""


class RequestMode(msgspec.Struct, rename="camel", omit_defaults=False, gc=False):
    """Body of SET_MESSAGE_REQUEST_MODE (401): how a group gets the messages of a topic."""

    consumer_group: str
    topic: str
    mode: str = "PULL"  # or POP
    pop_share_queue_num: int = 0  # further clients that pop a client's queues; 0: all of them


_decode_mode: Final = json_reader(RequestMode, "a request mode")


def decode_request_mode(body: bytes) -> RequestMode:
    """Decode the body of SET_MESSAGE_REQUEST_MODE (401). Raises BodyError."""
    found = _decode_mode(body)
    if found.mode not in {"PULL", "POP"}:
        raise BodyError(f"mode={found.mode[:40]!r}, expected PULL or POP")
    return found
