"""Deliver delayed messages when they are due.

All messages of one level wait equally long, so the queue of a level is in the order of due times
and only its head must be watched. When the head is due it is appended again, to its real topic, and
the level's position advances. The last wait of a delivery at a chosen time is in the shortest
level, so it is late by at most that delay (a second by default), and never early. The forms of a
waiting message are in ``levels``.

A message goes to its queue as a commit does: to another one if its topic has lost that queue, and
to a topic that is created again if it was deleted. If it cannot be created, the message is
deferred.

Clocks: the wait in a level, and `TRANSACTION_DELAY_MS`, are measured on the monotonic clock from
the moment at which this process stored the record (`arrivals`). In each record of a longer delay
that property holds the time left when it was stored. Steps of the wall clock therefore have no
effect. A message stored before the start waits until its store timestamp plus the delay, but at
most the delay from the start: a timestamp in the future counts as now. `TRANSACTION_DELIVER_MS` is
a time by the wall clock. It is compared when a wait ends, and each time the head of a level is
read. So after a step forward, a message that is not at the head is late by the rest of its level's
delay, at most two hours by default.

Positions are saved in `delayOffset.json` only as far as the delivered copies are on disk, so a
crash loses no message. Deliveries between the last save and the crash are found in the log at the
next start (`resume`), so they are not repeated. Delivery is at least once.

A message that is not in memory is fetched by a thread (`fetches`), and its level waits. A message
that cannot be read from the disk is deferred: those after it are delivered, and it is retried until
that succeeds. Meanwhile the saved position stays before it, and the log is kept from there. So a
crash loses no message, but delivers those after it once more.

Source: RocketMQ `ScheduleMessageService`, `HookUtils.transformDelayLevelMessage`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from halfmq.store.errors import (
    CorruptRecordError,
    PropertiesTooLongError,
    RecordTooLargeError,
    StoreError,
)
from halfmq.store.files.page_cache import Missing, NotInMemoryError, allowed_to_wait
from halfmq.store.format.record import decode_record
from halfmq.store.format.topics import SCHEDULE_TOPIC
from halfmq.store.log.append_request import AppendRequest

from ..loop.fetches import Fetch
from ..loop.slices import Slice
from ..ports import Store
from ..tables.table_file import PeriodicSave, TableFile, as_integer, as_object
from .arrivals import Arrivals
from .levels import COMMITTED_MARK, DELIVER_MARK, DelayLevels, delivered, left_to_wait_ms, restored
from .resume import DeliveredCopies

logger = logging.getLogger(__name__)

BATCH_COUNT_MAX: Final = 32
BATCH_BYTES_MAX: Final = 262_144
"""Messages and bytes delivered from one level before the loop may serve others."""

IDLE_TICK_S: Final = 1.0
"""Longest time in seconds between two ticks. No level is shorter, so a message stored in an empty
level is not due before the next tick. A step of the wall clock is noticed within this time."""

CLOCK_STEP_MS: Final = 1_000
"""Change of the wall clock against the monotonic one, in ms, that counts as a step. A smaller one
delays a delivery at a chosen time no more than the shortest level does."""

DELETED_TICK_S: Final = 0.1
"""Seconds until a level is read again whose entries point to deleted files."""

TICK_S_MIN: Final = 0.01
"""Seconds between two ticks if nothing is overdue: messages of a dense queue are grouped."""

RETRY_AFTER_ERROR_MS: Final = 10_000
"""Milliseconds until delivery continues after the store refused. Source: `DELAY_FOR_A_PERIOD`."""

FETCHES_MAX: Final = 32
"""Fetches for one batch; then it is read even if that blocks on the disk, because fetched bytes may
be evicted before they are used. A binary search for the queue's end takes some twenty."""

DEFERRED_MAX: Final = 256
"""Deferred messages of a level, which could not be delivered; with more, the level waits.
Enough for a lost page of the queue, which has 204 entries."""

PERSIST_INTERVAL_MS: Final = 1_000
"""Milliseconds between two writes of the positions: a crash may repeat deliveries of this time.
RocketMQ: 10 s."""


class _Delivered(NamedTuple):
    """Messages before `next_offset` are delivered once the log is durable up to `log_end`."""

    log_end: int
    next_offset: int


class _Found(NamedTuple):
    """Records read from a queue."""

    data: bytes
    next_offset: int


class _Batch(NamedTuple):
    """Due messages at the head of a queue."""

    messages: list[AppendRequest]
    next_offset: int
    head_due_ms: int | None  # when the next one is due, on the monotonic clock
    is_blocked: bool = False  # the next one is due, and has no destination


@dataclass(slots=True)
class _Level:
    """One queue of the schedule topic."""

    level: int
    delay_ms: int
    arrivals: Arrivals
    next_offset: int = 0  # after the last message that was appended
    saved_offset: int = 0  # position that may be written to the file
    unsaved: deque[_Delivered] = field(default_factory=deque)
    head_due_ms: int | None = None  # of the message at `next_offset`, if it was read
    is_fetching: bool = False  # whether a fetch is in progress, which the next read waits for
    fetches: int = 0  # since the last successful read
    read_singly_before: int = 0  # messages before this queue offset are read one by one
    deferred: deque[int] = field(default_factory=deque)  # queue offsets of deferred messages
    retry_ms: int = 0  # when the first of `deferred` is tried again, on the monotonic clock


class DelayService:
    """Delivers due messages; call `tick` after the seconds that it returns."""

    def __init__(
        self,
        store: Store,
        levels: DelayLevels,
        path: Path,
        *,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        fetch: Fetch,
        queue_of: Callable[[str, int], int | None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Wire it; `now_ms` is the wall clock.

        `fetch` reads what is not in memory and calls back on this thread, at once or later; `wake`
        schedules `tick` soon. `queue_of` returns the queue for a message to a topic and queue now;
        None if there is none.
        """
        self._store = store
        self._levels = levels
        self._file = TableFile(
            path,
            now_ms,
            table_key="offsetTable",
            if_removed="delivered messages are then found in the log, and the others delivered; if "
            "there are very many, some may be delivered twice",
        )
        self._now_ms, self._monotonic_ms = now_ms, monotonic_ms
        self._clocks_apart_ms = now_ms() - monotonic_ms()
        self._fetch, self._wake = fetch, wake
        self._queue_of = queue_of
        self._queues: list[_Level] = []
        self._turn = -1  # the level that was served last
        self._paused_until_ms = 0
        self._saves = PeriodicSave(PERSIST_INTERVAL_MS, monotonic_ms)

    def load(self) -> None:
        """Read the positions; the store must be open.

        Raises:
            DamagedTableError: Neither the file nor its backup can be read.
        """
        offsets = as_object(self._file.load().get("offsetTable"))
        # Messages in the queues of levels that were removed from the setting must still be
        # delivered.
        used = [queue + 1 for topic, queue in self._store.queues.names() if topic == SCHEDULE_TOPIC]
        count = max(len(self._levels.levels_ms), *used, 0)
        copies = DeliveredCopies(self._store, count)
        self._queues = [
            self._positioned(level, as_integer(offsets.get(str(level)), 0), copies)
            for level in range(1, count + 1)
        ]

    def _positioned(self, level: int, offset: int, copies: DeliveredCopies) -> _Level:
        first, end = self._store.queues.bounds(SCHEDULE_TOPIC, level - 1)
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
        """Record an append to the queue of a level; call it right after the append."""
        if queue_id < len(self._queues):  # a client may name any queue of the schedule topic
            self._queues[queue_id].arrivals.add(self._store.write_offset, self._monotonic_ms())

    @property
    def waiting(self) -> int:
        """Number of messages that are stored and not yet delivered."""
        return sum(
            self._end(queue) - queue.next_offset + len(queue.deferred) for queue in self._queues
        )

    def metrics(self) -> dict[str, int]:
        """Return how many messages wait, and how many of them are due and cannot be delivered."""
        deferred = sum(len(queue.deferred) for queue in self._queues)
        return {"waiting": self.waiting, "put_off": deferred}

    def oldest_waiting_offset(self) -> int | None:
        """Return the physical offset of the oldest message that the log must keep; None if none.

        The log must keep messages whose delivered copy is not on disk yet.

        Raises:
            NotInMemoryError: Queue entries must be read from the disk first.
        """
        self._advance_saved_offsets()
        offsets: list[int] = []
        missing: list[Missing] = []
        for queue in self._queues:
            try:
                offset = self._oldest_undelivered(queue)
            except NotInMemoryError as error:
                missing += error.missing  # of all levels, for one fetch
            else:
                offsets += [] if offset is None else [offset]
        if missing:
            raise NotInMemoryError(missing)
        return min(offsets, default=None)

    def _oldest_undelivered(self, queue: _Level) -> int | None:
        """Return the physical offset of the first message of a level without a durable copy."""
        queue_offset = queue.saved_offset
        while True:
            found = self._store.queues.get(
                SCHEDULE_TOPIC, queue.level - 1, queue_offset, max_count=1, max_bytes=1
            )
            if found.ranges:
                return found.ranges[0][0]
            if found.next_offset <= queue_offset:
                return None
            queue_offset = found.next_offset

    def tick(self) -> float:
        """Deliver due messages, a batch of each level in turn, as many as fit into a slice.

        Return the seconds until the next call.
        """
        now = self._monotonic_ms()
        self._check_clock_step(now)
        if now < self._paused_until_ms:
            return (self._paused_until_ms - now) / 1_000
        wait, time_slice = IDLE_TICK_S, Slice()
        for served in range(1, len(self._queues) + 1):
            self._turn = (self._turn + 1) % len(self._queues)
            wait = min(wait, self._deliver(self._queues[self._turn], now))
            if time_slice.is_over and served < len(self._queues):
                return 0
        return max(min(wait, IDLE_TICK_S), TICK_S_MIN) if wait > 0 else 0

    def _check_clock_step(self, now: int) -> None:
        """Read all heads again after a step of the wall clock: one may wait for a time by it."""
        apart_ms = self._now_ms() - now
        step_ms = apart_ms - self._clocks_apart_ms
        if abs(step_ms) > CLOCK_STEP_MS:
            logger.warning("event=clock_stepped milliseconds=%d", step_ms)
            self._clocks_apart_ms = apart_ms
            for queue in self._queues:
                queue.head_due_ms = None

    def _deliver(self, queue: _Level, now: int) -> float:
        """Serve one level; return the seconds until it must be served again."""
        if queue.is_fetching:
            return IDLE_TICK_S
        if queue.deferred and queue.retry_ms <= now:
            return self._retry(queue, now)
        if queue.head_due_ms is not None and queue.head_due_ms > now:
            return (queue.head_due_ms - now) / 1_000
        first, end = self._store.queues.bounds(SCHEDULE_TOPIC, queue.level - 1)
        if queue.next_offset < first:  # the log before it was deleted by age
            self._move(queue, first, 0)
        if queue.next_offset >= end:
            return IDLE_TICK_S
        max_count = 1 if queue.next_offset < queue.read_singly_before else BATCH_COUNT_MAX
        try:
            found = self._read(queue, queue.next_offset, max_count)
        except NotInMemoryError as missing:
            return self._begin_fetch(queue, missing, partial(self._defer, queue, max_count))
        except OSError as error:
            logger.warning("event=delayed_messages_not_read error=%r", error)
            self._defer(queue, max_count)
            return 0
        if not found.data:
            self._move(queue, max(found.next_offset, queue.next_offset), 0)
            return DELETED_TICK_S
        batch = self._due_of(queue, queue.next_offset, found.data, now)
        if batch.next_offset != queue.next_offset:
            log_end = self._append(queue, queue.next_offset, batch.messages, now)
            if log_end is None:
                return RETRY_AFTER_ERROR_MS / 1_000
            self._move(queue, batch.next_offset, log_end)
        if batch.is_blocked:
            self._defer(queue, 1)
            return 0
        queue.head_due_ms = batch.head_due_ms
        return 0 if batch.head_due_ms is None else (batch.head_due_ms - now) / 1_000

    def _read(self, queue: _Level, offset: int, max_count: int) -> _Found:
        """Read messages from a queue offset.

        Raises:
            NotInMemoryError: They must be read from the disk first.
            OSError: They cannot be read.
        """
        may_wait = queue.fetches >= FETCHES_MAX
        with allowed_to_wait(may_wait):
            found = self._store.queues.get(
                SCHEDULE_TOPIC,
                queue.level - 1,
                offset,
                max_count=max_count,
                max_bytes=BATCH_BYTES_MAX,
            )
        data = self._store.reader.read(found.ranges) if found.count else b""
        if data is None:
            if not may_wait:
                raise self._store.reader.lacking_ranges(found.ranges)
            data = self._store.reader.read_cold(found.ranges)
        queue.fetches = 0
        return _Found(data, found.next_offset)

    def _due_of(self, queue: _Level, start: int, data: bytes, now: int) -> _Batch:
        """Return the due messages in `data`, whose first record has the queue offset `start`."""
        now_ms = self._now_ms()
        messages: list[AppendRequest] = []
        next_offset = start
        position = 0
        while position < len(data):
            try:
                record = decode_record(data, position)
            except CorruptRecordError as error:
                if position == 0:
                    # It cannot be delivered, and must not delay those after it.
                    logger.error(  # noqa: TRY400
                        "event=delayed_record_unreadable level=%d queue_offset=%d reason=%r",
                        queue.level,
                        next_offset,
                        error.reason,
                    )
                    next_offset += 1
                break
            waited_ms = now - queue.arrivals.stored_ms(
                record.physical_offset, record.store_timestamp
            )
            wait_ms = queue.delay_ms - waited_ms
            left_ms = 0
            committed = COMMITTED_MARK in record.properties
            if committed:  # on other messages these properties are not validated
                left_ms = left_to_wait_ms(record.properties, waited_ms=waited_ms, now_ms=now_ms)
                if DELIVER_MARK in record.properties:
                    wait_ms = min(wait_ms, left_ms)
            if wait_ms > 0:
                return _Batch(messages, next_offset, now + wait_ms)
            message = restored(record)
            if message is None:
                logger.warning("event=delayed_record_without_target message=%s", record.msg_id)
            elif left_ms > 0:
                messages.append(self._levels.wait_again(message, left_ms))
            else:
                queue_id = self._queue_of(message.topic, message.queue_id)
                if queue_id is None:
                    return _Batch(messages, next_offset, None, is_blocked=True)
                message.queue_id = queue_id
                messages.append(delivered(message) if committed else message)
            next_offset = record.queue_offset + 1
            position += record.total_size
        return _Batch(messages, next_offset, None)

    # --- messages that are not in memory

    def _begin_fetch(
        self, queue: _Level, missing: NotInMemoryError, on_unreadable: Callable[[], None]
    ) -> float:
        """Start a fetch; the level is served again when it is done."""

        def on_fetched(is_there: bool) -> None:
            queue.is_fetching = False
            if is_there:
                queue.fetches += 1
            else:
                on_unreadable()
            self._wake()

        queue.is_fetching = True
        self._fetch(missing, on_fetched)
        return IDLE_TICK_S if queue.is_fetching else 0

    def _defer(self, queue: _Level, count: int) -> None:
        """Defer the head of a level; if ``count`` messages were read, first read them singly."""
        queue.fetches = 0
        retry_ms = self._monotonic_ms() + RETRY_AFTER_ERROR_MS
        if count > 1:
            queue.read_singly_before = queue.next_offset + count
        elif len(queue.deferred) >= DEFERRED_MAX:
            queue.head_due_ms = retry_ms
        else:
            logger.error(
                "event=delayed_message_put_off level=%d queue_offset=%d",
                queue.level,
                queue.next_offset,
            )
            if not queue.deferred:
                queue.retry_ms = retry_ms
            queue.deferred.append(queue.next_offset)
            self._move(queue, queue.next_offset + 1, 0)

    def _defer_again(self, queue: _Level) -> None:
        """Move the first deferred message after the others, to retry them first."""
        queue.fetches = 0
        queue.deferred.rotate(-1)
        queue.retry_ms = self._monotonic_ms() + RETRY_AFTER_ERROR_MS

    def _retry(self, queue: _Level, now: int) -> float:
        """Deliver a deferred message, and if that succeeds, the next one at once."""
        offset = queue.deferred[0]
        try:
            found = self._read(queue, offset, 1)
        except NotInMemoryError as missing:
            return self._begin_fetch(queue, missing, partial(self._defer_again, queue))
        except OSError:
            self._defer_again(queue)
            return 0
        log_end = 0
        if found.data:  # it is still there
            batch = self._due_of(queue, offset, found.data, now)
            if batch.next_offset == offset:  # not due, or without a destination
                self._defer_again(queue)
                return 0
            end = self._append(queue, offset, batch.messages, now)
            if end is None:
                return RETRY_AFTER_ERROR_MS / 1_000
            log_end = end
            logger.info(
                "event=delayed_message_read_again level=%d queue_offset=%d", queue.level, offset
            )
        _save_when_durable(queue, log_end)
        queue.deferred.popleft()
        return 0

    # --- delivered messages and saved positions

    def _append(
        self, queue: _Level, offset: int, messages: list[AppendRequest], now: int
    ) -> int | None:
        """Append messages; return how far the log must be durable, None if the store refused."""
        try:
            return self._append_fitting(messages)
        except StoreError as error:
            logger.error(  # noqa: TRY400
                "event=delivery_refused level=%d queue_offset=%d error=%r",
                queue.level,
                offset,
                str(error),
            )
            self._paused_until_ms = now + RETRY_AFTER_ERROR_MS
            return None

    def _append_fitting(self, messages: list[AppendRequest]) -> int:
        """Append messages except those too large; return how far the log must be durable."""
        try:
            appended = self._store.append(messages) if messages else []
            return max((one.end for one in appended), default=0)
        except (RecordTooLargeError, PropertiesTooLongError) as error:
            if len(messages) == 1:
                # A limit was lowered after it was stored. It stays in the schedule topic.
                logger.error(  # noqa: TRY400
                    "event=delayed_message_not_delivered topic=%s reason=%r",
                    messages[0].topic,
                    str(error),
                )
                return 0
        return max(self._append_fitting([message]) for message in messages)

    @staticmethod
    def _move(queue: _Level, next_offset: int, log_end: int) -> None:
        if next_offset != queue.next_offset:
            queue.next_offset = next_offset
            _save_when_durable(queue, log_end)
        queue.head_due_ms = None

    def persist_job(self) -> Callable[[], None] | None:
        """Return a function that writes the positions, on any thread; None if nothing is due."""
        self._advance_saved_offsets()
        return self._job() if self._saves.is_due() else None

    def persist(self) -> None:
        """Write the positions now; call it at a stop, after the last flush."""
        self._advance_saved_offsets()
        if self._saves.dirty:
            self._job()()

    def _advance_saved_offsets(self) -> None:
        durable = self._store.durable_offset
        for queue in self._queues:
            if queue.deferred:
                continue
            while queue.unsaved and queue.unsaved[0].log_end <= durable:
                queue.saved_offset = queue.unsaved.popleft().next_offset
                self._saves.dirty = True

    def saved_offsets(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the next message of each level that is in use, and the version of that table."""
        self._advance_saved_offsets()
        table = {str(one.level): one.saved_offset for one in self._queues if self._is_used(one)}
        return table, self._file.data_version

    def _job(self) -> Callable[[], None]:
        self._file.next_version()
        table, _ = self.saved_offsets()
        return self._saves.job(self._file.prepare(lambda: {"offsetTable": table}), self._file)

    def _is_used(self, queue: _Level) -> bool:
        return queue.saved_offset > 0 or self._end(queue) > 0

    def _end(self, queue: _Level) -> int:
        return self._store.queues.bounds(SCHEDULE_TOPIC, queue.level - 1)[1]


def _save_when_durable(queue: _Level, log_end: int) -> None:
    """Save the position once the log is durable up to `log_end` and nothing is deferred."""
    if queue.deferred and queue.unsaved:  # merge them into one entry while messages are deferred
        log_end = max(log_end, queue.unsaved.pop().log_end)
    queue.unsaved.append(_Delivered(log_end, queue.next_offset))
