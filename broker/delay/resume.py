"""Find the messages of a delay level that were delivered before the broker was killed.

The positions in `delayOffset.json` are up to a second old, and all messages after them would be
delivered again. But a delivered message has a copy later in the log: in its own queue (or in
another level, if it has to wait again), equal in everything that its sender set except the delay.
So the position advances over all messages whose copy is found. The search for copies begins at the
store time at which the message was due, or a few seconds before the end of the queue if that is
earlier, because the wall clock may have been set back.

A copy is not found in a queue other than that of its message: one that replaced a lost queue.

Errors of the search do no harm. A record taken for a copy equals the message in everything that its
sender set, including the unique key, so its consumers have the message. A message without a copy is
delivered again.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Final

from halfmq.store.errors import CorruptRecordError
from halfmq.store.format.properties import (
    PROPERTY_CRC32,
    PROPERTY_DELAY,
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION_DELAY_MS,
    PROPERTY_TRANSACTION_DELIVER_MS,
    PROPERTY_UNIQ_KEY,
    get_property,
    without_properties,
)
from halfmq.store.format.record import Record, decode_record
from halfmq.store.format.topics import SCHEDULE_TOPIC

from ..ports import Store
from .levels import COMMIT_DELAY_PREFIX

logger = logging.getLogger(__name__)

RESUME_RECORDS_MAX: Final = 50_000
"""Records read per level and per queue to find copies: some seconds of deliveries. Messages beyond
are delivered again."""

RESUME_BYTES_MAX: Final = 128 << 20
"""Bytes read per level and per queue to find copies: a second of a fast disk."""

RESUME_BACK_MS: Final = 3_000
"""Milliseconds before a queue's end from which copies are searched at the latest. Positions are
written every second, so a copy that they do not cover is younger."""

_STEP_COUNT: Final = 256
_STEP_BYTES: Final = 4 << 20
_CHANGED: Final = (  # properties set by a delivery, a further wait, or the store
    PROPERTY_CRC32,
    PROPERTY_DELAY,
    PROPERTY_REAL_TOPIC,
    PROPERTY_REAL_QID,
    PROPERTY_TRANSACTION_DELAY_MS,
    PROPERTY_TRANSACTION_DELIVER_MS,
)


class DeliveredCopies:
    """Finds copies; create one for all levels of a start."""

    def __init__(self, store: Store, level_count: int) -> None:
        self._store = store
        self._level_count = level_count

    def position(self, level: int, delay_ms: int, saved: int) -> int:
        """Return the queue offset after the last message of a level whose copy is in the log."""
        copies = _Copies()
        position = saved
        for record in self._records(SCHEDULE_TOPIC, level - 1, saved):
            due_ms = record.store_timestamp + delay_ms
            for queue in self._targets(record):
                if queue not in copies.queues:  # all that follow are due later
                    copies.add(queue, self._records(*queue, self._start(queue, due_ms)))
            if not copies.consume(record, due_ms):
                break
            position = record.queue_offset + 1
        return position

    def _start(self, queue: tuple[str, int], due_ms: int) -> int:
        _, end = self._store.queues.bounds(*queue)
        newest_ms = self._store.queues.store_time_at(*queue, end - 1)
        return self._store.queues.offset_by_time(*queue, min(due_ms, newest_ms - RESUME_BACK_MS))

    def _targets(self, record: Record) -> Iterator[tuple[str, int]]:
        topic, queue_id = _destination(record)
        if topic and queue_id.isdigit():
            yield topic.decode(errors="replace"), int(queue_id[:9])
        if COMMIT_DELAY_PREFIX in record.properties:
            for number in range(self._level_count):
                yield SCHEDULE_TOPIC, number

    def _records(self, topic: str, queue_id: int, start: int) -> Iterator[Record]:
        """Yield the messages of a queue from an offset, up to damage or the limit."""
        _, end = self._store.queues.bounds(topic, queue_id)
        offset, left, bytes_left = start, RESUME_RECORDS_MAX, RESUME_BYTES_MAX
        while offset < end and left > 0 and bytes_left > 0:
            found = self._store.queues.get(
                topic, queue_id, offset, max_count=_STEP_COUNT, max_bytes=_STEP_BYTES
            )
            if found.count == 0:
                return
            try:
                data = self._store.reader.read_cold(found.ranges)
                at = 0
                while at < len(data):
                    record = decode_record(data, at)
                    yield record
                    at += record.total_size
            except (OSError, CorruptRecordError) as error:
                logger.warning(
                    "event=copies_unreadable topic=%s queue=%d offset=%d error=%r",
                    topic,
                    queue_id,
                    offset,
                    str(error),
                )
                return
            offset = found.next_offset
            left -= found.count
            bytes_left -= len(data)


class _Copies:
    """Records that may be copies, by their content."""

    def __init__(self) -> None:
        self.queues: set[tuple[str, int]] = set()
        self._stored: dict[bytes, list[tuple[int, int]]] = {}  # physical offset, store time

    def add(self, queue: tuple[str, int], records: Iterable[Record]) -> None:
        """Add the records of a queue."""
        self.queues.add(queue)
        for record in records:
            places = self._stored.setdefault(_content(record), [])
            insort(places, (record.physical_offset, record.store_timestamp))

    def consume(self, original: Record, due_ms: int) -> bool:
        """Remove the first copy of a message due at this time; return False if there is none."""
        places = self._stored.get(_content(original), [])
        # Without a key it may be an equal message that was delivered earlier.
        has_key = get_property(original.properties, PROPERTY_UNIQ_KEY.encode()) is not None
        for index, (physical_offset, stored_ms) in enumerate(places):
            if physical_offset > original.physical_offset and (has_key or stored_ms >= due_ms):
                del places[index]
                return True
        return False


def _destination(record: Record) -> tuple[bytes, bytes]:
    """Return the topic and queue id where a record will be, or was, delivered."""
    if record.topic != SCHEDULE_TOPIC:
        return record.topic.encode(), b"%d" % record.queue_id
    topic = get_property(record.properties, b"REAL_TOPIC") or b""
    return topic, get_property(record.properties, b"REAL_QID") or b""


def _content(record: Record) -> bytes:
    """Return a digest of what a message and its copy share: destination and sender's content."""
    properties = without_properties(record.properties, _CHANGED)
    numbers = b"%d %d %d " % (record.flag, record.born_timestamp, record.reconsume_times)
    digest = blake2b(numbers, digest_size=16)
    digest.update(b"%b %b %d " % (*_destination(record), len(properties)))
    digest.update(properties)
    digest.update(record.body)
    return digest.digest()
