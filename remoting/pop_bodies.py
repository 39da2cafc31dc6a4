"""Bodies of requests about pop: acknowledgements in a batch, and the modes of groups.

Source: RocketMQ ``BatchAck``, ``SetMessageRequestModeRequestBody``.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Final

import msgspec

from .errors import BodyError
from .pop_handle import PopHandle, topic_of_kind

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


_decode_acks: Final = msgspec.json.Decoder(BatchAckBody).decode


def decode_batch_ack(body: bytes) -> BatchAckBody:
    """Decode the body of BATCH_ACK_MESSAGE (200151). Raises BodyError."""
    try:
        return _decode_acks(body) if body else BatchAckBody()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(f"batch of acknowledgements: {error}") from error


def encode_batch_ack(
    broker_name: str, group: str, topic: str, handles: Sequence[PopHandle]
) -> bytes:
    """Return the body for handles of one pop from one queue; ``topic`` is no retry topic."""
    first = handles[0]
    bits = sum(1 << handle.offset - first.start for handle in handles)
    packed = b64encode(bits.to_bytes(bits.bit_length() // 8 + 1, "little")).decode()
    ack = BatchAck(
        group,
        topic,
        first.kind,
        first.start,
        first.queue_id,
        first.revive_queue,
        first.pop_ms,
        first.invisible_ms,
        packed,
    )
    return msgspec.json.encode(BatchAckBody(broker_name, (ack,)))


class RequestMode(msgspec.Struct, rename="camel", omit_defaults=False, gc=False):
    """Body of SET_MESSAGE_REQUEST_MODE (401): how a group gets the messages of a topic."""

    consumer_group: str
    topic: str
    mode: str = "PULL"  # or POP
    pop_share_queue_num: int = 0  # further clients that pop a client's queues; 0: all of them


_decode_mode: Final = msgspec.json.Decoder(RequestMode).decode


def decode_request_mode(body: bytes) -> RequestMode:
    """Decode the body of SET_MESSAGE_REQUEST_MODE (401). Raises BodyError."""
    try:
        found = _decode_mode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(f"request mode: {error}") from error
    if found.mode not in {"PULL", "POP"}:
        raise BodyError(f"mode={found.mode[:40]!r}, expected PULL or POP")
    return found
