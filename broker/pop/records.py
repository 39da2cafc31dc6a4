"""Records of pops in the log, in RocketMQ's form, in the revive topic.

* A checkpoint names the messages that a pop got from one queue.
* An acknowledgement names some of them that are done.
* A position, a checkpoint without messages, says where the group continues; -1 says that the group
  has left pop, so that earlier checkpoints do not move it.

RocketMQ stores them as timer messages first, which bring them to the revive topic when they are
due. Ours go there at once, with the current time as their time of delivery: RocketMQ takes that as
its clock, and waits until the times in the bodies have passed.

Source: RocketMQ ``PopCheckPoint``, ``AckMsg``, ``BatchAckMsg``, ``PopReviveService``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from halfmq.store.format.properties import encode_properties, get_property, tag_hash
from halfmq.store.log.append_request import AppendRequest

from .in_flight import PopQueue

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


_decode: Final = msgspec.json.Decoder(_Body).decode
_encode: Final = msgspec.json.Encoder().encode


class PopRecord(msgspec.Struct, gc=False):
    """What a record of the revive topic says."""

    queue: PopQueue
    pop_ms: int
    start: int
    offsets: tuple[int, ...]
    invisible_ms: int
    is_checkpoint: bool  # or an acknowledgement


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
        return PopRecord(queue, body.pop_ms, body.start, offsets, body.invisible_ms, True)
    offsets = body.offsets or (body.offset,)
    return PopRecord(queue, body.pop_ms, body.start, offsets, 0, False)


class PopRecords:
    """Makes the records of one broker."""

    def __init__(self, topic: str, broker_name: str, host: bytes) -> None:
        self.topic = topic
        self.broker_name = broker_name
        self._host = host

    def checkpoint(
        self,
        queue: PopQueue,
        revive_queue: int,
        start: int,
        offsets: Sequence[int],
        pop_ms: int,
        invisible_ms: int,
        now_ms: int,
    ) -> AppendRequest:
        """Return the record of a pop; without offsets, that of a position."""
        body = {
            "bm": 0,
            "bn": self.broker_name,
            "c": queue.group,
            "d": [offset - start for offset in offsets],
            "it": invisible_ms,
            "n": len(offsets),
            "pt": pop_ms,
            "q": queue.queue_id,
            "reviveTime": pop_ms + invisible_ms,
            "ro": 0,
            "so": start,
            "t": queue.topic,
        }
        return self._request("ck", revive_queue, queue, start, body, pop_ms, now_ms)

    def acknowledgement(
        self,
        queue: PopQueue,
        revive_queue: int,
        start: int,
        offsets: Sequence[int],
        pop_ms: int,
        now_ms: int,
    ) -> AppendRequest:
        """Return the record that messages of a checkpoint are done."""
        is_batch = len(offsets) > 1
        body: dict[str, object] = {
            **({"aol": list(offsets)} if is_batch else {}),
            "ao": -1 if is_batch else offsets[0],
            "bn": self.broker_name,
            "c": queue.group,
            "pt": pop_ms,
            "q": queue.queue_id,
            "so": start,
            "t": queue.topic,
        }
        tag, offset = ("bAck", -1) if is_batch else ("ack", offsets[0])
        return self._request(tag, revive_queue, queue, offset, body, pop_ms, now_ms)

    def _request(
        self,
        tag: str,
        revive_queue: int,
        queue: PopQueue,
        offset: int,
        body: dict[str, object],
        pop_ms: int,
        now_ms: int,
    ) -> AppendRequest:
        key = (
            f"{queue.topic}@{queue.queue_id}@{offset}@{queue.group}@{pop_ms}@{self.broker_name}@"
            f"{'ck' if tag == 'ck' else 'ack'}"
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
