"""Records of pops in the log, in RocketMQ's form, in the revive topic.

* A checkpoint names the messages that a pop got from one queue.
* An acknowledgement names some of them that are done.
* A position, a checkpoint without messages, says where the group continues; -1 says that the group
  has left pop, so that earlier checkpoints do not move it. Of a queue that is popped in order, it
  also has the lock, in a field of our own.

RocketMQ stores them as timer messages first, which bring them to the revive topic when they are
due. Ours go there at once, with the current time as their time of delivery: RocketMQ takes that as
its clock, and waits until the times in the bodies have passed.

Source: RocketMQ ``PopCheckPoint``, ``AckMsg``, ``BatchAckMsg``, ``PopReviveService``.
"""

from typing import Final

import msgspec
from attrs import define

from halfmq.store.format.properties import encode_properties, get_property, tag_hash
from halfmq.store.log.append_request import AppendRequest

from .in_flight import PopQueue
from .order import OrderLock

REVIVE_QUEUES: Final = 8  # of the revive topic; RocketMQ's `reviveQueueNum`
REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
"""Its offsets say how far the revive queues are settled: a start reads on from there."""

LEFT: Final = -1
"""The position of a group that does not pop any more."""


class _Body(msgspec.Struct, gc=False):
    """Body of a checkpoint or an acknowledgement."""

    group: str = msgspec.field(name="c")
    topic: str = msgspec.field(name="t")
    queue_id: int = msgspec.field(name="q")
    pop_ms: int = msgspec.field(name="pt")
    start: int = msgspec.field(name="so")
    broker_name: str = msgspec.field(name="bn", default="")
    invisible_ms: int = msgspec.field(name="it", default=0)
    count: int = msgspec.field(name="n", default=-1)  # -1: an acknowledgement
    differences: tuple[int, ...] = msgspec.field(name="d", default=())
    bits: int = msgspec.field(name="bm", default=0)
    offset: int = msgspec.field(name="ao", default=-1)
    offsets: tuple[int, ...] = msgspec.field(name="aol", default=())
    lock: OrderLock | None = None


_decode: Final = msgspec.json.Decoder(_Body).decode
_encode: Final = msgspec.json.Encoder(order="sorted").encode


class PopRecord(msgspec.Struct, gc=False):
    """What a record of the revive topic says."""

    queue: PopQueue
    pop_ms: int
    start: int
    offsets: tuple[int, ...]
    invisible_ms: int = 0
    is_checkpoint: bool = True  # or an acknowledgement
    lock: OrderLock | None = None


def decode_pop(encoded: bytes) -> PopRecord | None:
    """Return what the body of a record of the revive topic says; None if it is none of these."""
    try:
        body = _decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    queue = PopQueue(body.group, body.topic, body.queue_id)
    if body.count >= 0:
        offsets = tuple(
            body.start + difference
            for number, difference in enumerate(body.differences)
            if not body.bits >> number & 1
        )
        return PopRecord(queue, body.pop_ms, body.start, offsets, body.invisible_ms, lock=body.lock)
    offsets = body.offsets or (body.offset,)
    return PopRecord(queue, body.pop_ms, body.start, offsets, is_checkpoint=False)


@define(eq=False, repr=False)
class PopRecords:
    """Makes the records of one broker."""

    topic: str
    broker_name: str
    _host: bytes

    def encode(self, said: PopRecord, revive_queue: int, now_ms: int) -> AppendRequest:
        """Return the record that says this; a checkpoint without offsets is a position."""
        queue, offsets = said.queue, said.offsets
        body: dict[str, object] = {
            "bn": self.broker_name,
            "c": queue.group,
            "pt": said.pop_ms,
            "q": queue.queue_id,
            "so": said.start,
            "t": queue.topic,
        }
        if said.is_checkpoint:
            tag, offset = "ck", said.start
            body |= {
                "bm": 0,
                "d": [offset - said.start for offset in offsets],
                "it": said.invisible_ms,
                "n": len(offsets),
                "reviveTime": said.pop_ms + said.invisible_ms,
                "ro": 0,
            }
        elif len(offsets) > 1:
            tag, offset = "bAck", -1
            body |= {"aol": offsets, "ao": -1}
        else:
            tag, offset = "ack", offsets[0]
            body |= {"ao": offset}
        if said.lock is not None:
            body["lock"] = msgspec.to_builtins(said.lock, str_keys=True)
        key = (
            f"{queue.topic}@{queue.queue_id}@{offset}@{queue.group}@{said.pop_ms}@"
            f"{self.broker_name}@{'ck' if said.is_checkpoint else 'ack'}"
        )
        properties = {"TAGS": tag, "UNIQ_KEY": key, "TIMER_DELIVER_MS": str(now_ms)}
        return AppendRequest(
            topic=self.topic,
            queue_id=revive_queue,
            body=_encode(body),
            properties=encode_properties(properties),
            tags_code=tag_hash(tag),
            born_timestamp=now_ms,
            born_host=self._host,
            store_host=self._host,
        )


def is_from_timer(properties: bytes) -> bool:
    """Return whether RocketMQ's timer has brought a record: it was written before a take-over."""
    return get_property(properties, b"TIMER_OUT_MS") is not None
