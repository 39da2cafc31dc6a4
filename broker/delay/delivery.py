"""Deliver delayed messages when they are due.

All messages of one level wait equally long, so the queue of a level is in the order of due times
and only its head must be watched. When the head is due it is appended again, under its real topic,
and the level's position moves on. The last wait of a delivery at a chosen time is one of the
shortest level, so it is up to that much late (a second by default), and never early. The forms of a
message while it waits are in ``levels``.

Which clock counts: the wait in a level, and `TRANSACTION_DELAY_MS`, count on the monotonic clock
from the moment at which this process stored the record (`arrivals`); each record of a longer delay
holds in that property what was left when it was stored. Steps of the wall clock therefore change
nothing. What was stored before the start waits until its store timestamp plus the delay, but never
longer than the delay from the start on: a timestamp ahead of the clock counts as now.
`TRANSACTION_DELIVER_MS` is a time by the wall clock. It is compared when a wait is over, and at
each look for the head of a level; so after a step forward a message that others are ahead of is
late by what its level still waits, two hours at most by default.

Positions are kept in `delayOffset.json`, and only as far as the copies are on disk: a crash loses
no delivery. Those between the last write and the crash are found in the log at the next start
(`delay_resume`), so they are not repeated either. Delivery is at least once.

What is not in memory is fetched by a thread (`fetches`), and its level waits for it. A message that
the disk refuses is put off: those after it go on, and it is tried again until it can be read. The
saved position stays in front of it meanwhile, and the log is kept from there on; so a crash neither
loses it nor the others, but delivers those after it once more.

Source: RocketMQ `ScheduleMessageService`, `HookUtils.transformDelayLevelMessage`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from halfmq.store.errors import (
    CorruptRecordError,
    PropertiesTooLongError,
    RecordTooLargeError,
    StoreError,
)
from halfmq.store.files.page_cache import Missing, NotInMemoryError, allowed_to_wait
from halfmq.store.format.record import decode_record
from halfmq.store.format.topics import SCHEDULE_TOPIC
from halfmq.store.log.append_request import AppendRequest, AppendResult

from ..loop.fetches import Fetch
from ..loop.slices import Slice
from ..tables.table_file import PeriodicSave, TableFile, as_integer, as_object
from .arrivals import Arrivals
from .levels import COMMITTED_MARK, DELIVER_MARK, DelayLevels, delivered, left_to_wait_ms, restored
from .resume import DeliveredCopies, ResumeStore

logger = logging.getLogger(__name__)

BATCH_COUNT_MAX: Final = 32
BATCH_BYTES_MAX: Final = 262_144
"""Messages and bytes delivered from one level before the loop may serve others."""

IDLE_LOOK_S: Final = 1.0
"""Longest time in seconds between two looks. No level is shorter, so what is stored in an empty one
is not due before the next look; and a step of the wall clock is noticed this soon."""

CLOCK_STEP_MS: Final = 1_000
"""Change of the wall clock against the monotonic one, in ms, that counts as a step. Less makes a
delivery at a time no later than the shortest level does."""

SKIPPED_LOOK_S: Final = 0.1
"""Seconds until the next look at a level whose entries lead to nothing: files are being deleted."""

LOOK_S_MIN: Final = 0.01
"""Seconds between two looks when nothing is overdue: a dense queue leaves in small groups."""

RETRY_AFTER_ERROR_MS: Final = 10_000
"""Milliseconds until delivery goes on when the store refused. Source: `DELAY_FOR_A_PERIOD`."""

FETCHES_MAX: Final = 32
"""Fetches for one batch; then it is read waiting for the disk. Memory may be so short that what was
fetched is gone before it is used. A search for the queue's end halves it some twenty times."""

PUT_OFF_MAX: Final = 256
"""Messages of a level that the disk refused and that are passed for now; more make the level wait.
Enough for a lost page of the queue, which has 204 entries."""

PERSIST_INTERVAL_MS: Final = 1_000
"""Milliseconds between two writes of the positions: what a crash may repeat. RocketMQ's is 10 s."""


class ScheduleStore(ResumeStore, Protocol):
    """What delivery needs of the store."""

    @property
    def durable_offset(self) -> int: ...

    @property
    def write_offset(self) -> int: ...

    def queues(self) -> list[tuple[str, int]]: ...

    def read(self, ranges: Sequence[tuple[int, int]]) -> bytes | None: ...

    def lacking_ranges(self, ranges: Sequence[tuple[int, int]]) -> NotInMemoryError: ...


class Log(Protocol):
    """Where due messages go: appends, has them flushed, and wakes who waits for them."""

    def append(
        self, group: Sequence[AppendRequest], *, contiguous: bool = False
    ) -> list[AppendResult]: ...


class _Delivered(NamedTuple):
    """Up to `next_offset` all is delivered, once the log is durable up to `log_end`."""

    log_end: int
    next_offset: int


class _Found(NamedTuple):
    """What was read of a queue."""

    data: bytes
    next_offset: int


class _Batch(NamedTuple):
    """What a look at the head of a queue found."""

    drafts: list[AppendRequest]
    next_offset: int
    head_due_ms: int | None  # when the first that is not due will be, on the monotonic clock


@dataclass(slots=True)
class _Level:
    """One queue of the schedule topic."""

    level: int
    delay_ms: int
    arrivals: Arrivals
    next_offset: int = 0  # in memory: what was appended
    saved_offset: int = 0  # what may be written to the file
    unsaved: deque[_Delivered] = field(default_factory=deque)
    head_due_ms: int | None = None  # of the message at `next_offset`, if it was looked at
    is_fetching: bool = False  # what the next look needs; there is none before
    fetches: int = 0  # since the last look that found all it needed
    alone_before: int = 0  # queue offset before which messages are read one by one
    put_off: deque[int] = field(default_factory=deque)  # queue offsets that the disk refused
    retry_ms: int = 0  # when the first of `put_off` is tried again, on the monotonic clock


class DelayService:
    """Delivers what is due; call `tick` when it asks for it."""

    def __init__(
        self,
        store: ScheduleStore,
        log: Log,
        levels: DelayLevels,
        path: Path,
        *,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        fetch: Fetch,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Wire it; `now_ms` is the wall clock.

        `fetch` has in memory what `tick` lacks and calls back on this thread, at once or later;
        `wake` has `tick` called soon.
        """
        self._store = store
        self._log = log
        self._levels = levels
        self._file = TableFile(
            path,
            now_ms,
            holds="offsetTable",
            without="what was delivered is then found in the log, and the rest delivered; of very "
            "many messages some may come twice",
        )
        self._now_ms, self._monotonic_ms = now_ms, monotonic_ms
        self._clocks_apart_ms = now_ms() - monotonic_ms()
        self._fetch, self._wake = fetch, wake
        self._queues: list[_Level] = []
        self._turn = -1  # the level that was looked at last
        self._paused_until_ms = 0
        self._saves = PeriodicSave(PERSIST_INTERVAL_MS, monotonic_ms)

    def load(self) -> None:
        """Read the positions; the store must be open.

        Raises:
            DamagedTableError: They cannot be read, nor their backup.
        """
        offsets = as_object(self._file.load().get("offsetTable"))
        # A shorter list of levels than before must not strand what waits in the last queues.
        used = [queue + 1 for topic, queue in self._store.queues() if topic == SCHEDULE_TOPIC]
        count = max(len(self._levels.levels_ms), *used, 0)
        copies = DeliveredCopies(self._store, count)
        self._queues = [
            self._positioned(level, as_integer(offsets.get(str(level)), 0), copies)
            for level in range(1, count + 1)
        ]

    def _positioned(self, level: int, offset: int, copies: DeliveredCopies) -> _Level:
        first, end = self._store.queue_bounds(SCHEDULE_TOPIC, level - 1)
        start = min(max(offset, first), end)
        if start != offset:
            logger.warning(
                "event=delay_offset_moved level=%d saved=%d used=%d", level, offset, start
            )
        delay_ms = self._levels.delay_ms(level)
        delivered = copies.position(level, delay_ms, start)
        if delivered != start:
            logger.info("event=delay_resumed level=%d saved=%d used=%d", level, start, delivered)
            self._saves.dirty = True
        arrivals = Arrivals(
            self._store.write_offset,
            delay_ms,
            now_ms=self._now_ms(),
            monotonic_ms=self._monotonic_ms(),
        )
        return _Level(level, delay_ms, arrivals, next_offset=delivered, saved_offset=delivered)

    def on_stored(self, queue_id: int) -> None:
        """Take note of an append to the queue of a level, right after it."""
        if queue_id < len(self._queues):  # a client may name any queue of the schedule topic
            self._queues[queue_id].arrivals.note(self._store.write_offset, self._monotonic_ms())

    @property
    def waiting(self) -> int:
        """Messages that are stored and not yet delivered."""
        return sum(
            self._end(queue) - queue.next_offset + len(queue.put_off) for queue in self._queues
        )

    def oldest_waiting_offset(self) -> int | None:
        """Physical offset of the oldest message that the log must keep; None when there is none.

        That is one whose delivered copy is not on disk yet.

        Raises:
            NotInMemoryError: It would have to wait for the disk, and may not.
        """
        self._note_durable()
        offsets: list[int] = []
        missing: list[Missing] = []
        for queue in self._queues:
            try:
                offset = self._offset_behind(queue)
            except NotInMemoryError as error:
                missing += error.missing  # of all levels, for one fetch
            else:
                offsets += [] if offset is None else [offset]
        if missing:
            raise NotInMemoryError(missing)
        return min(offsets, default=None)

    def _offset_behind(self, queue: _Level) -> int | None:
        """Return where the first message of a level lies that is not delivered for good."""
        queue_offset = queue.saved_offset
        while True:
            found = self._store.get(
                SCHEDULE_TOPIC, queue.level - 1, queue_offset, max_count=1, max_bytes=1
            )
            if found.ranges:
                return found.ranges[0][0]
            if found.next_offset <= queue_offset:
                return None
            queue_offset = found.next_offset

    def tick(self) -> float:
        """Deliver what is due, a batch of each level in turn, as far as a slice goes.

        Return the seconds until the next call.
        """
        now = self._monotonic_ms()
        self._note_clock_step(now)
        if now < self._paused_until_ms:
            return (self._paused_until_ms - now) / 1_000
        wait, time_slice = IDLE_LOOK_S, Slice()
        for looked in range(1, len(self._queues) + 1):
            self._turn = (self._turn + 1) % len(self._queues)
            wait = min(wait, self._deliver(self._queues[self._turn], now))
            if time_slice.is_over and looked < len(self._queues):
                return 0
        return max(min(wait, IDLE_LOOK_S), LOOK_S_MIN) if wait > 0 else 0

    def _note_clock_step(self, now: int) -> None:
        """Look at all heads again when the wall clock was set: one may wait for a time by it."""
        apart_ms = self._now_ms() - now
        step_ms = apart_ms - self._clocks_apart_ms
        if abs(step_ms) > CLOCK_STEP_MS:
            logger.warning("event=clock_stepped milliseconds=%d", step_ms)
            self._clocks_apart_ms = apart_ms
            for queue in self._queues:
                queue.head_due_ms = None

    def _deliver(self, queue: _Level, now: int) -> float:
        """Serve one level; return the seconds until it wants to be looked at again."""
        if queue.is_fetching:
            return IDLE_LOOK_S
        if queue.put_off and queue.retry_ms <= now:
            return self._retry(queue, now)
        if queue.head_due_ms is not None and queue.head_due_ms > now:
            return (queue.head_due_ms - now) / 1_000
        first, end = self._store.queue_bounds(SCHEDULE_TOPIC, queue.level - 1)
        if queue.next_offset < first:  # the log in front was deleted by age
            self._move(queue, first, 0)
        if queue.next_offset >= end:
            return IDLE_LOOK_S
        max_count = 1 if queue.next_offset < queue.alone_before else BATCH_COUNT_MAX
        try:
            found = self._read(queue, queue.next_offset, max_count)
        except NotInMemoryError as missing:
            return self._begin_fetch(queue, missing, partial(self._refused, queue, max_count))
        except OSError as error:
            logger.warning("event=delayed_messages_not_read error=%r", error)
            self._refused(queue, max_count)
            return 0
        if not found.data:
            self._move(queue, max(found.next_offset, queue.next_offset), 0)
            return SKIPPED_LOOK_S
        batch = _due_of(queue, queue.next_offset, found.data, now, self._now_ms(), self._levels)
        if batch.next_offset != queue.next_offset:
            log_end = self._append(queue, queue.next_offset, batch.drafts, now)
            if log_end is None:
                return RETRY_AFTER_ERROR_MS / 1_000
            self._move(queue, batch.next_offset, log_end)
        queue.head_due_ms = batch.head_due_ms
        return 0 if batch.head_due_ms is None else (batch.head_due_ms - now) / 1_000

    def _read(self, queue: _Level, offset: int, max_count: int) -> _Found:
        """Read messages from a queue offset on.

        Raises:
            NotInMemoryError: It would have to wait for the disk.
            OSError: The disk refuses them.
        """
        may_wait = queue.fetches >= FETCHES_MAX
        with allowed_to_wait(may_wait):
            found = self._store.get(
                SCHEDULE_TOPIC,
                queue.level - 1,
                offset,
                max_count=max_count,
                max_bytes=BATCH_BYTES_MAX,
            )
        data = self._store.read(found.ranges) if found.count else b""
        if data is None:
            if not may_wait:
                raise self._store.lacking_ranges(found.ranges)
            data = self._store.read_cold(found.ranges)
        queue.fetches = 0
        return _Found(data, found.next_offset)

    # --- messages that are not in memory

    def _begin_fetch(
        self, queue: _Level, missing: NotInMemoryError, refused: Callable[[], None]
    ) -> float:
        """Have it fetched; the level is looked at again when that is done."""

        def on_fetched(is_there: bool) -> None:
            queue.is_fetching = False
            if is_there:
                queue.fetches += 1
            else:
                refused()
            self._wake()

        queue.is_fetching = True
        self._fetch(missing, on_fetched)
        return IDLE_LOOK_S if queue.is_fetching else 0

    def _refused(self, queue: _Level, count: int) -> None:
        """Pass the head of a level for now, once it is sure that it is the one to blame."""
        queue.fetches = 0
        retry_ms = self._monotonic_ms() + RETRY_AFTER_ERROR_MS
        if count > 1:
            queue.alone_before = queue.next_offset + count
        elif len(queue.put_off) >= PUT_OFF_MAX:
            queue.head_due_ms = retry_ms
        else:
            logger.error(
                "event=delayed_message_put_off level=%d queue_offset=%d",
                queue.level,
                queue.next_offset,
            )
            if not queue.put_off:
                queue.retry_ms = retry_ms
            queue.put_off.append(queue.next_offset)
            self._move(queue, queue.next_offset + 1, 0)

    def _refused_again(self, queue: _Level) -> None:
        """Let the others that were put off have their turn first."""
        queue.fetches = 0
        queue.put_off.rotate(-1)
        queue.retry_ms = self._monotonic_ms() + RETRY_AFTER_ERROR_MS

    def _retry(self, queue: _Level, now: int) -> float:
        """Deliver one that was put off, and the next one at once if that is possible."""
        offset = queue.put_off[0]
        try:
            found = self._read(queue, offset, 1)
        except NotInMemoryError as missing:
            return self._begin_fetch(queue, missing, partial(self._refused_again, queue))
        except OSError:
            self._refused_again(queue)
            return 0
        log_end = 0
        if found.data:  # it is still there
            batch = _due_of(queue, offset, found.data, now, self._now_ms(), self._levels)
            if batch.next_offset == offset:  # not due
                self._refused_again(queue)
                return 0
            end = self._append(queue, offset, batch.drafts, now)
            if end is None:
                return RETRY_AFTER_ERROR_MS / 1_000
            log_end = end
            logger.info(
                "event=delayed_message_read_again level=%d queue_offset=%d", queue.level, offset
            )
        _note_moved(queue, log_end)
        queue.put_off.popleft()
        return 0

    # --- what was delivered

    def _append(
        self, queue: _Level, offset: int, drafts: list[AppendRequest], now: int
    ) -> int | None:
        """Append them; return where the log must be durable, None when the store refused."""
        try:
            return self._append_fitting(drafts)
        except StoreError as error:
            logger.error(  # noqa: TRY400
                "event=delivery_refused level=%d queue_offset=%d error=%r",
                queue.level,
                offset,
                str(error),
            )
            self._paused_until_ms = now + RETRY_AFTER_ERROR_MS
            return None

    def _append_fitting(self, drafts: list[AppendRequest]) -> int:
        """Append all; return where the log must be durable. Leave out what no longer fits."""
        try:
            return max((one.end for one in self._log.append(drafts)), default=0) if drafts else 0
        except (RecordTooLargeError, PropertiesTooLongError) as error:
            if len(drafts) == 1:
                # A limit was lowered since it was stored. It stays in the schedule topic.
                logger.error(  # noqa: TRY400
                    "event=delayed_message_not_delivered topic=%s reason=%r",
                    drafts[0].topic,
                    str(error),
                )
                return 0
        return max(self._append_fitting([draft]) for draft in drafts)

    @staticmethod
    def _move(queue: _Level, next_offset: int, log_end: int) -> None:
        if next_offset != queue.next_offset:
            queue.next_offset = next_offset
            _note_moved(queue, log_end)
        queue.head_due_ms = None

    def persist_if_dirty(self) -> None:
        """Write the positions if some moved and the last write is long enough ago."""
        job = self.persist_job()
        if job is not None:
            job()

    def persist_job(self) -> Callable[[], None] | None:
        """Return a function that writes the positions, on any thread; None when nothing is due."""
        self._note_durable()
        return self._job() if self._saves.is_due() else None

    def persist(self) -> None:
        """Write the positions now; call it at the end, after the last flush."""
        self._note_durable()
        if self._saves.dirty:
            self._job()()

    def _note_durable(self) -> None:
        durable = self._store.durable_offset
        for queue in self._queues:
            if queue.put_off:
                continue
            while queue.unsaved and queue.unsaved[0].log_end <= durable:
                queue.saved_offset = queue.unsaved.popleft().next_offset
                self._saves.dirty = True

    def _job(self) -> Callable[[], None]:
        self._file.step()
        table = {str(one.level): one.saved_offset for one in self._queues if self._is_used(one)}
        return self._saves.job(self._file.prepare(lambda: {"offsetTable": table}), "delay_offsets")

    def _is_used(self, queue: _Level) -> bool:
        return queue.saved_offset > 0 or self._end(queue) > 0

    def _end(self, queue: _Level) -> int:
        return self._store.queue_bounds(SCHEDULE_TOPIC, queue.level - 1)[1]


def _note_moved(queue: _Level, log_end: int) -> None:
    """Have the position saved once the log is durable up to `log_end`, and nothing is put off."""
    if queue.put_off and queue.unsaved:  # in one entry, however long that takes
        log_end = max(log_end, queue.unsaved.pop().log_end)
    queue.unsaved.append(_Delivered(log_end, queue.next_offset))


def _due_of(
    queue: _Level, start: int, data: bytes, now: int, now_ms: int, levels: DelayLevels
) -> _Batch:
    """Return what is due of the records in `data`, which begins with that at queue offset `start`.

    `now` is on the monotonic clock, `now_ms` by the wall clock.
    """
    drafts: list[AppendRequest] = []
    next_offset = start
    position = 0
    while position < len(data):
        try:
            record = decode_record(data, position)
        except CorruptRecordError as error:
            if position == 0:
                # Nothing can be delivered of it, and it must not hold up those behind it.
                logger.error(  # noqa: TRY400
                    "event=delayed_record_unreadable level=%d queue_offset=%d reason=%r",
                    queue.level,
                    next_offset,
                    error.reason,
                )
                next_offset += 1
            break
        waited_ms = now - queue.arrivals.stored_ms(record.physical_offset, record.store_timestamp)
        wait_ms = queue.delay_ms - waited_ms
        left_ms = 0
        committed = COMMITTED_MARK in record.properties
        if committed:  # to others these are properties like any, which nobody has checked
            left_ms = left_to_wait_ms(record.properties, waited_ms=waited_ms, now_ms=now_ms)
            if DELIVER_MARK in record.properties:
                wait_ms = min(wait_ms, left_ms)
        if wait_ms > 0:
            return _Batch(drafts, next_offset, now + wait_ms)
        draft = restored(record)
        if draft is None:
            logger.warning("event=delayed_record_without_target message=%s", record.msg_id)
        elif left_ms > 0:
            drafts.append(levels.wait_again(draft, left_ms))
        else:
            drafts.append(delivered(draft) if committed else draft)
        next_offset = record.queue_offset + 1
        position += record.total_size
    return _Batch(drafts, next_offset, None)
