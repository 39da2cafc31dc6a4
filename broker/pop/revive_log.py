"""The revive topic: each pop and acknowledgement is a record of it, and a start reads them again.

It has several queues. All of a queue before its offset of `REVIVE_GROUP` is settled: no message is
in flight by a checkpoint that lies there, so a start reads from that offset on.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from attrs import define

from halfmq.remoting.pop import PopHandle
from halfmq.store.errors import StoreError
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore

from ..tables.consumer_offsets import ConsumerOffsetTable
from ..tables.topic_table import TopicTable
from .in_flight import CHUNK, InFlight, PopCheckpoint, PopQueue
from .order import HeldLock, OrderLock, OrderLocks
from .records import REVIVE_GROUP, REVIVE_QUEUES, PopRecord, PopRecords, decode_pop

logger = logging.getLogger(__name__)

POSITIONS_QUEUE: Final = 0  # the revive queue of all positions

OLD_CHUNKS: Final = 16
"""Chunks of a revive queue after which a checkpoint is written again: a start reads no more."""


@define(eq=False, repr=False, slots=False)
class ReviveLog:
    """Stores what pops do, and keeps what is in flight and which queues are locked."""

    _store: MessageStore
    _topics: TopicTable
    _offsets: ConsumerOffsetTable  # how far the queues are settled
    _records: PopRecords
    _now_ms: Callable[[], int]  # the wall clock
    _monotonic_ms: Callable[[], int]  # the clock that counts invisible times
    _wake: Callable[[], None]  # schedules what makes messages visible again

    def __attrs_post_init__(self) -> None:
        self.topic, self.broker_name = self._records.topic, self._records.broker_name
        self.in_flight, self.locks = InFlight(), OrderLocks()
        self._settled: dict[int, int] = {}  # revive queue → offset settled at the last save

    def read(self, revive_queue: int) -> Iterator[tuple[int, PopRecord]]:
        """Yield offset and content of the records of a queue that are not settled."""
        first, end = self._store.queues.bounds(self.topic, revive_queue)
        settled = self._offsets.query(REVIVE_GROUP, self.topic, revive_queue)
        offset = min(max(settled + 1, first), end)
        while offset < end:
            chunk = self._read_chunk(revive_queue, offset)
            offset += CHUNK
            yield from chunk

    def _read_chunk(self, revive_queue: int, start: int) -> list[tuple[int, PopRecord]]:
        entries = self._store.queues.entries(self.topic, revive_queue, start, CHUNK)
        found: list[tuple[int, PopRecord]] = []
        for offset, entry in enumerate(entries, start):
            record = self._store.reader.record_at(entry.physical_offset)
            said = None if record is None else decode_pop(record.body)
            if said is not None:
                found.append((offset, said))
        return found

    def add(self, said: PopRecord, revive_queue: int, revive_offset: int, left_ms: int) -> None:
        """Add the messages of a checkpoint, which become visible after `left_ms`."""
        checkpoint = PopCheckpoint(
            due_ms=self._monotonic_ms() + left_ms,
            number=0,
            pop_ms=said.pop_ms,
            invisible_ms=said.invisible_ms,
            revive_queue=revive_queue,
            revive_offset=revive_offset,
            start=said.start,
            span=said.offsets[-1] - said.start + 1,
        )
        self.in_flight.add(said.queue, checkpoint, said.offsets)

    def store_checkpoints(
        self, said: Sequence[PopRecord], revive_queue: int, *more: AppendRequest, left_ms: int
    ) -> int:
        """Store checkpoints and then other records; return where the log ends after them.

        Their messages become visible after `left_ms`.
        """
        self._topics.ensure(self.topic, REVIVE_QUEUES)
        now_ms = self._now_ms()
        records = [self._records.encode(one, revive_queue, now_ms) for one in said]
        appended = self._store.append([*records, *more])
        for one, stored in zip(said, appended, strict=False):
            self.add(one, revive_queue, stored.queue_offset, left_ms)
        self._wake()
        return appended[-1].end

    def store_position(
        self,
        queue: PopQueue,
        offset: int,
        lock: OrderLock | None = None,
        more: Sequence[AppendRequest] = (),
    ) -> int:
        """Store where a group continues, the lock of the queue, and other records before.

        Return where the log ends after them.
        """
        self._topics.ensure(self.topic, REVIVE_QUEUES)
        now_ms = self._now_ms()
        said = PopRecord(queue, now_ms, offset, (), lock=lock)
        *_, stored = self._store.append(
            [*more, self._records.encode(said, POSITIONS_QUEUE, now_ms)]
        )
        self.set_lock(queue, lock, stored.queue_offset)
        return stored.end

    def set_lock(self, queue: PopQueue, lock: OrderLock | None, revive_offset: int) -> None:
        """Set the lock of a queue, which began with its pop; None ends it."""
        held = None
        if lock is not None:
            # At a start the clock may have been set back: then the lock begins again.
            age_ms = max(self._now_ms() - lock.pop_ms, 0)
            held = HeldLock(lock, self._monotonic_ms() - age_ms, revive_offset)
        self.locks.put(queue, held)

    def done(self, queue: PopQueue, handles: Sequence[PopHandle]) -> AppendRequest:
        """Return the record that the messages of these handles, all of one pop, are done."""
        first, offsets = handles[0], tuple(handle.offset for handle in handles)
        said = PopRecord(queue, first.pop_ms, first.start, offsets, is_checkpoint=False)
        return self._records.encode(said, first.revive_queue, self._now_ms())

    def save_progress(self) -> None:
        """Save what was settled when this was called last: the offsets of groups are saved too."""
        for revive_queue in range(REVIVE_QUEUES):
            settled = self._settled.get(revive_queue, -1)
            if settled > self._offsets.query(REVIVE_GROUP, self.topic, revive_queue):
                self._offsets.keep(REVIVE_GROUP, self.topic, revive_queue, settled)
            chunk = self._first_chunk(revive_queue)
            _, end = self._store.queues.bounds(self.topic, revive_queue)
            self._settled[revive_queue] = (end if chunk is None else min(chunk * CHUNK, end)) - 1

    def _first_chunk(self, revive_queue: int) -> int | None:
        """Return the oldest chunk of a revive queue that a start must read; None if none."""
        chunks = [self.in_flight.first_chunk(revive_queue)]
        if revive_queue == POSITIONS_QUEUE:
            first = self.locks.first_revive_offset()
            chunks.append(None if first is None else first // CHUNK)
        return min((one for one in chunks if one is not None), default=None)

    def write_again(self) -> None:
        """Store old checkpoints and locks again that still count; see `OLD_CHUNKS`."""
        for revive_queue in range(REVIVE_QUEUES):
            chunk = self._first_chunk(revive_queue)
            _, end = self._store.queues.bounds(self.topic, revive_queue)
            if chunk is None or end // CHUNK - chunk < OLD_CHUNKS:
                continue
            try:
                self._write_chunk_again(revive_queue, chunk)
            except (NotInMemoryError, StoreError, OSError) as error:
                logger.warning("event=pop_not_written_again error=%r", str(error))

    def _write_chunk_again(self, revive_queue: int, chunk: int) -> None:
        for offset, said in self._read_chunk(revive_queue, chunk * CHUNK):
            held = self.locks.get(said.queue)
            if said.lock is not None and held is not None and held.revive_offset == offset:
                self.store_position(said.queue, said.start, held.lock)
            if not said.is_checkpoint:
                continue
            left = {
                offset: one
                for offset in said.offsets
                if (one := self.in_flight.get(said.queue, offset)) is not None
                and one.is_of(said.start, said.pop_ms)
            }
            for checkpoint in set(left.values()):
                said.offsets = tuple(left)
                left_ms = max(checkpoint.due_ms - self._monotonic_ms(), 0)
                self.store_checkpoints([said], revive_queue, left_ms=left_ms)
