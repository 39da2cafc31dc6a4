"""Deliver messages at the time that their senders chose, to the millisecond.

A message with ``TIMER_DELAY_SEC``, ``TIMER_DELAY_MS`` or ``TIMER_DELIVER_MS`` waits in
``rmq_sys_wheel_timer`` in RocketMQ's form, and a heap holds its due time and its offset in the
queue of that topic. When it is due, it is appended again, to its real topic. There are no files of
a timer wheel: the queue has all waiting messages with their due times (`store.format.timers`), so
a start fills the heap from it.

**A delivery is decided by the log.** The delivered record holds the timer queue offset of the
message that it delivers (`link_of`), and so does the record of a recall. `halfmqTimers.json` says
which messages are done, as of an offset of the log and as far as that is durable; a start reads the
log from there. So after a kill no message is delivered twice, and after a power cut none is lost.

**Clocks.** A relative delay is counted on the monotonic clock, so that steps of the wall clock have
no effect; for messages stored before the start the store timestamp plus the delay is compared with
the wall clock. ``TIMER_DELIVER_MS`` is a time by the wall clock.

**Apache RocketMQ.** A start delivers what waits in the store of an Apache RocketMQ; its
`timercheck` says what has been delivered. One that takes a store over begins at the first message
that waits (`timer_checkpoint`), and delivers all that follow, also those that halfmq has delivered
before their turn.

**Retention.** A message that waits longer than the log is kept is stored again before its file is
deleted (`copy_forward`).

Source: RocketMQ ``TimerMessageStore``.
"""

from __future__ import annotations

import heapq
import logging
import zlib
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from halfmq.remoting.recall_handle import RecallHandle
from halfmq.store.errors import StoreError
from halfmq.store.files import disk
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.filler import FILLER_TAGS_CODE
from halfmq.store.format.flags import TRANSACTION_MASK
from halfmq.store.format.properties import (
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_UNIQ_KEY,
)
from halfmq.store.format.queue_entry import PRE_BLANK
from halfmq.store.format.record import Record, decode_record
from halfmq.store.format.timers import delivered_ms, is_due_time, timer_checkpoint
from halfmq.store.format.topics import TIMER_TOPIC
from halfmq.store.log.append_request import AppendRequest

from ..limits.kept import TIMERS, Kept
from ..loop.fetches import Fetch
from ..ports import Store
from ..tables.table_file import PeriodicSave, TableFile, as_integer, as_object, as_text
from .levels import restored
from .timer_records import (
    QUEUE,
    TimerError,
    TimerRule,
    Waiting,
    again,
    due_ms_of,
    is_recall,
    link_of,
    recall_of,
    text_of,
)

logger = logging.getLogger(__name__)

BATCH_COUNT_MAX: Final = 32
"""Messages delivered before the loop may serve others."""

IDLE_TICK_S: Final = 1.0
"""Longest time in seconds between two ticks: a step of the wall clock is noticed within it."""

RETRY_AFTER_ERROR_MS: Final = 10_000
"""Milliseconds until a message is tried again that the disk or the store refused."""

UNREADABLE_MS: Final = 5
"""Milliseconds until a message is looked at again that is due before it is on disk."""

COPIES_MAX: Final = 500
"""Messages stored again in one step, before old files are deleted: some milliseconds of work."""

SAVE_INTERVAL_MS: Final = 5_000
"""Milliseconds between two writes of the file: a start after a kill reads so much of the log."""

LOG_BYTES_MAX: Final = 64 << 20
"""Bytes of log after which the file is written though no message has become due: a start reads so
much in well under a second."""

_OFFSET_BITS: Final = 48  # of a heap entry, below the due time
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1
_ENTRIES_STEP: Final = 4_096  # queue entries read at once by a start
_PENDING, _DELIVERED, _RECALLED = 0, 1, 2  # one byte for each queue offset


class _Done(NamedTuple):
    """Messages that are done once the log is durable up to `log_end`."""

    log_start: int
    log_end: int
    queue_offsets: Sequence[int]


class Recalled(NamedTuple):
    """A message that nobody gets, once the log is durable up to `durable_at`."""

    unique_key: str
    durable_at: int


class TimerPage(NamedTuple):
    """A part of a listing."""

    records: list[tuple[Record, bytes]]  # decoded, and as they are stored
    next_after: int | None  # `after` of the next page; None: this is the last


class TimerService:
    """Delivers due messages; call `tick` after the seconds that it returns."""

    def __init__(
        self,
        store: Store,
        path: Path,
        *,
        scan: Callable[[int], Iterable[Record]],
        rule: TimerRule,
        broker_name: str,
        queue_of: Callable[[str, int], int | None],
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        fetch: Fetch,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Wire it; `scan` reads the log from an offset on.

        `queue_of` returns the queue for a message to a topic and queue now; None if there is none.

        `fetch` reads what is not in memory and calls back on this thread; `wake` schedules `tick`.
        """
        self._store = store
        self._file = TableFile(path, now_ms, table_key="timers")
        self._checkpoint_path = path.with_name("timercheck")
        self._scan = scan
        self.rule = rule
        self.broker_name = broker_name
        self._queue_of = queue_of
        self._now_ms, self._monotonic_ms = now_ms, monotonic_ms
        self._fetch, self._wake = fetch, wake
        # Due time and queue offset in one number, which takes half the memory of a tuple.
        self._by_wall_clock: list[int] = []
        self._by_monotonic_clock: list[int] = []
        self._base = 0  # queue offset before which all messages are done
        self._states = bytearray()  # of the messages from there on
        self._undurable: deque[_Done] = deque()
        self._saves = PeriodicSave(SAVE_INTERVAL_MS, monotonic_ms)
        self._saved_to = 0  # offset of the log as of which the file was written last
        self.pending = 0

    # --- a start

    def load(self) -> None:
        """Find the waiting messages; the store must be open."""
        content = as_object(self._file.load().get("timers"))
        first, end = self._store.queues.bounds(TIMER_TOPIC, QUEUE)
        base = min(max(as_integer(content.get("queueOffset"), 0), first), end)
        states = _unpacked(as_text(content.get("done"), ""))
        del states[: base - as_integer(content.get("queueOffset"), 0)]
        del states[end - base :]
        self._base, self._states = base, states.ljust(end - base, bytes([_PENDING]))
        if end > base:
            self._saved_to = as_integer(content.get("logOffset"), 0) if states else 0
            self._read_log(self._saved_to)
            self._read_queue(end)

    def _read_log(self, start: int) -> None:
        """Find the deliveries and recalls that the file does not have."""
        for record in self._scan(start):
            link = record.prepared_transaction_offset
            if link >= 0 or record.sys_flag & TRANSACTION_MASK:
                continue
            if link == -1 - record.physical_offset:  # a filler, which names its own place
                continue
            recalls = record.topic == TIMER_TOPIC and is_recall(record)
            self._set_state(-1 - link, _RECALLED if recalls else _DELIVERED)
            if recalls:
                self._set_state(record.queue_offset, _DELIVERED)

    def _read_queue(self, end: int) -> None:
        """Fill the heap with the messages that wait."""
        heap, states, base = self._by_wall_clock, self._states, self._base
        foreign: list[int] = []
        for start in range(base, end, _ENTRIES_STEP):
            entries = self._store.queues.entries(TIMER_TOPIC, QUEUE, start, _ENTRIES_STEP)
            for queue_offset, entry in enumerate(entries, start):
                if states[queue_offset - base] != _PENDING:
                    continue
                if entry.size == PRE_BLANK.size or entry.tags_code == FILLER_TAGS_CODE:
                    states[queue_offset - base] = _DELIVERED  # its record is lost
                elif is_due_time(entry.tags_code):
                    heap.append(entry.tags_code << _OFFSET_BITS | queue_offset)
                else:
                    foreign.append(queue_offset)
        self._add_foreign(foreign)
        heapq.heapify(heap)
        self.pending = len(heap)

    def _add_foreign(self, queue_offsets: Sequence[int]) -> None:
        """Add the messages of an Apache RocketMQ, whose queue entries do not tell their times."""
        path = self._checkpoint_path
        before_ms = delivered_ms(disk.read_bytes(path)) if disk.exists(path) else 0
        waiting: dict[tuple[str, str], tuple[int, int]] = {}
        for queue_offset in queue_offsets:
            self._set_state(queue_offset, _DELIVERED)
            record = self._record(queue_offset)
            if record is None:
                continue
            topic = text_of(record, PROPERTY_REAL_TOPIC)
            if is_recall(record):
                waiting.pop((topic, text_of(record, PROPERTY_TIMER_DEL_UNIQKEY)), None)
            elif (due_ms := due_ms_of(record)) > before_ms:
                waiting[topic, text_of(record, PROPERTY_UNIQ_KEY)] = due_ms, queue_offset
        for due_ms, queue_offset in waiting.values():
            self._set_state(queue_offset, _PENDING)
            self._by_wall_clock.append(due_ms << _OFFSET_BITS | queue_offset)

    # --- delivery

    def stored(self, waiting: Waiting, queue_offset: int) -> None:
        """Add a message that has just been appended at an offset of the timer queue."""
        heap, due_ms = self._by_wall_clock, waiting.due_ms
        if waiting.wait_ms is not None:
            heap, due_ms = self._by_monotonic_clock, self._monotonic_ms() + waiting.wait_ms
        self._push(heap, due_ms, queue_offset)
        self._extend_to(queue_offset + 1)
        self.pending += 1
        if heap[0] & _OFFSET_MASK == queue_offset:  # the next one due
            self._wake()

    def tick(self) -> float:
        """Deliver a batch of due messages; return the seconds until the next call."""
        now = self._monotonic_ms()
        clocks = (self._by_wall_clock, self._now_ms()), (self._by_monotonic_clock, now)
        due: list[int] = []
        for heap, now_ms in clocks:
            while heap and heap[0] >> _OFFSET_BITS <= now_ms and len(due) < BATCH_COUNT_MAX:
                due.append(heapq.heappop(heap) & _OFFSET_MASK)
        if due:
            self._deliver([one for one in due if self._state(one) == _PENDING], now)
        waits = [(heap[0] >> _OFFSET_BITS) - now_ms for heap, now_ms in clocks if heap]
        return min(max(min(waits) / 1_000, 0), IDLE_TICK_S) if waits else IDLE_TICK_S

    def _deliver(self, queue_offsets: Sequence[int], now: int) -> None:
        _, readable_end = self._store.queues.bounds(TIMER_TOPIC, QUEUE)
        found: list[tuple[int, AppendRequest]] = []
        missing: dict[int, NotInMemoryError] = {}
        for queue_offset in queue_offsets:
            if queue_offset >= readable_end:  # it is not on disk yet
                self._push(self._by_monotonic_clock, now + UNREADABLE_MS, queue_offset)
                continue
            try:
                record = self._record(queue_offset)
            except NotInMemoryError as error:
                missing[queue_offset] = error
                continue
            except OSError as error:
                self._put_off(queue_offset, now, str(error))
                continue
            message = None if record is None else restored(record)
            if message is None:
                logger.error("event=timer_without_target queue_offset=%d", queue_offset)
                self._done([queue_offset], _DELIVERED, 0, 0)
                continue
            queue_id = self._queue_of(message.topic, message.queue_id)
            if queue_id is None:
                self._put_off(queue_offset, now, "its topic is gone and cannot be created")
                continue
            message.queue_id = queue_id
            message.prepared_transaction_offset = link_of(queue_offset)
            found.append((queue_offset, message))
        if missing:
            self._begin_fetch(missing)
        if found:
            self._append(found, now)

    def _append(self, found: Sequence[tuple[int, AppendRequest]], now: int) -> None:
        try:
            appended = self._store.append([message for _, message in found])
        except StoreError as error:
            if len(found) == 1:
                self._put_off(found[0][0], now, str(error))
                return
            for one in found:  # perhaps one of them is at fault
                self._append([one], now)
            return
        offsets = [queue_offset for queue_offset, _ in found]
        self._done(offsets, _DELIVERED, appended[0].physical_offset, appended[-1].end)

    def _put_off(self, queue_offset: int, now: int, reason: str) -> None:
        logger.error("event=timer_put_off queue_offset=%d reason=%r", queue_offset, reason)
        self._push(self._by_monotonic_clock, now + RETRY_AFTER_ERROR_MS, queue_offset)

    def _begin_fetch(self, missing: Mapping[int, NotInMemoryError]) -> None:
        """Read messages from the disk, on a thread, and deliver them then."""

        def on_fetched(is_there: bool) -> None:
            now = self._monotonic_ms()
            for queue_offset in missing:
                if is_there:
                    self._push(self._by_monotonic_clock, now, queue_offset)
                else:
                    self._put_off(queue_offset, now, "it cannot be read")
            self._wake()

        parts = [part for error in missing.values() for part in error.missing]
        self._fetch(NotInMemoryError(parts), on_fetched)

    # --- recall

    def recall(self, handle: RecallHandle) -> Recalled:
        """Keep a waiting message from being delivered.

        Raises:
            TimerError: The message does not wait any more, or never did.
            NotInMemoryError: It must be read from the disk first.
            StoreError: The recall could not be stored, and the message waits on.
        """
        state = self._state(handle.queue_offset)
        record = None if state == _DELIVERED else self._record(handle.queue_offset)
        if (
            record is None
            or handle.unique_key != text_of(record, PROPERTY_UNIQ_KEY)
            or (handle.topic != text_of(record, PROPERTY_REAL_TOPIC))
        ):
            raise TimerError(
                "recall failed, timestamp invalid: no such message waits; it has been delivered, "
                "or was recalled before"
            )
        if state == _RECALLED:  # the answer to the first request was lost
            return Recalled(handle.unique_key, self._store.write_offset)
        (appended,) = self._store.append([recall_of(record)])
        self._extend_to(appended.queue_offset + 1)
        self._set_state(appended.queue_offset, _DELIVERED)
        self._done([handle.queue_offset], _RECALLED, appended.physical_offset, appended.end)
        return Recalled(handle.unique_key, appended.end)

    # --- what operators see

    def page(self, after: int, max_count: int, max_bytes: int) -> TimerPage:
        """Return waiting messages in the order in which they were stored.

        Args:
            after: `next_after` of the previous page; -1 for the first.
            max_count: Most messages to return.
            max_bytes: Bytes of records after which the page ends.

        Raises:
            NotInMemoryError: A message must be read from the disk first.
        """
        found: list[tuple[Record, bytes]] = []
        size = 0
        at = max(after + 1 - self._base, 0)
        while len(found) < max_count and size < max_bytes:
            at = self._states.find(_PENDING, at)
            encoded = None if at < 0 else self._encoded(self._base + at)
            if encoded is None:  # after the last readable one
                return TimerPage(found, None)
            found.append((decode_record(encoded, check_crc=False), encoded))
            size += len(encoded)
            at += 1
        return TimerPage(found, self._base + at - 1)

    def kept(self) -> Kept:
        """Return how much of what it keeps for peers is used."""
        return {TIMERS: self.pending}

    # --- retention

    def oldest_waiting_offset(self) -> int | None:
        """Return the physical offset of the oldest message that the log must keep; None if none.

        The log must keep messages until the record of their delivery is on disk.
        """
        self._forget_durable()
        kept = [one for each in self._undurable for one in each.queue_offsets]
        at = self._states.find(_PENDING)
        if at >= 0:
            kept.append(self._base + at)
        entries = self._store.queues.entries(TIMER_TOPIC, QUEUE, min(kept), 1) if kept else []
        return entries[0].physical_offset if entries else None

    def copy_forward(self, end: int) -> bool:
        """Store waiting messages again that lie before an offset of the log, which is deleted next.

        Their time of delivery does not change. Return whether there were some; then call it again
        before the log is deleted.

        Raises:
            NotInMemoryError: A message must be read from the disk first.
        """
        for copied in range(COPIES_MAX):
            at = self._states.find(_PENDING)
            record = None if at < 0 else self._record(self._base + at)
            if record is None or record.physical_offset >= end:
                return copied > 0
            try:
                (appended,) = self._store.append([again(record)])
            except StoreError as error:  # the log is kept for it
                logger.warning("event=timer_not_copied error=%r", str(error))
                return False
            self._extend_to(appended.queue_offset + 1)
            self._push(self._by_wall_clock, due_ms_of(record), appended.queue_offset)
            self.pending += 1
            self._done([self._base + at], _DELIVERED, appended.physical_offset, appended.end)
        return True

    # --- the file

    def persist_job(self) -> Callable[[], None] | None:
        """Return a function that writes the file, on any thread; None if nothing is due."""
        if self.pending and self._store.durable_offset - self._saved_to > LOG_BYTES_MAX:
            self._saves.dirty = True  # or a start would read all that was sent since then
        return self._job() if self._saves.is_due() else None

    def persist(self) -> None:
        """Write the file now; call it at a stop, after the last flush."""
        if self._saves.dirty:
            self._job()()
            disk.write_file(self._checkpoint_path, timer_checkpoint(self._now_ms(), self._base))

    def _job(self) -> Callable[[], None]:
        self._forget_durable()
        if not self._undurable:
            self._trim()
        states, base = bytearray(self._states), self._base
        for one in self._undurable:
            for queue_offset in one.queue_offsets:
                states[queue_offset - base] = _PENDING
        log_offset = self._undurable[0].log_start if self._undurable else self._store.durable_offset
        self._saved_to = log_offset
        self._file.next_version()

        def content() -> dict[str, object]:
            done = _packed(states)
            return {"timers": {"queueOffset": base, "logOffset": log_offset, "done": done}}

        return self._saves.job(self._file.prepare(content), self._file)

    def _forget_durable(self) -> None:
        durable = self._store.durable_offset
        while self._undurable and self._undurable[0].log_end <= durable:
            self._undurable.popleft()

    def _trim(self) -> None:
        """Forget the messages at the begin of the queue that are done for good."""
        at = self._states.find(_PENDING)
        done = len(self._states) if at < 0 else at
        del self._states[:done]
        self._base += done

    # --- shared by them

    def _push(self, heap: list[int], due_ms: int, queue_offset: int) -> None:
        heapq.heappush(heap, due_ms << _OFFSET_BITS | queue_offset)

    def _record(self, queue_offset: int) -> Record | None:
        """Return the waiting record at a queue offset; None if there is none.

        Raises:
            NotInMemoryError: It must be read from the disk first.
            OSError: It cannot be read.
        """
        encoded = self._encoded(queue_offset)
        return None if encoded is None else decode_record(encoded, check_crc=False)

    def _encoded(self, queue_offset: int) -> bytes | None:
        entries = self._store.queues.entries(TIMER_TOPIC, QUEUE, queue_offset, 1)
        return self._store.reader.record_bytes(entries[0].physical_offset) if entries else None

    def _state(self, queue_offset: int) -> int:
        at = queue_offset - self._base
        return self._states[at] if 0 <= at < len(self._states) else _DELIVERED

    def _set_state(self, queue_offset: int, state: int) -> None:
        at = queue_offset - self._base
        if 0 <= at < len(self._states):
            self._states[at] = state

    def _extend_to(self, end: int) -> None:
        self._states.extend(bytes(max(end - self._base - len(self._states), 0)))

    def _done(self, queue_offsets: Sequence[int], state: int, log_start: int, log_end: int) -> None:
        """Mark messages; the record that says so lies between two offsets of the log."""
        for queue_offset in queue_offsets:
            self._set_state(queue_offset, state)
        self.pending -= len(queue_offsets)
        self._undurable.append(_Done(log_start, log_end, queue_offsets))
        self._saves.dirty = True


def _packed(states: bytearray) -> str:
    return b64encode(zlib.compress(states, 1)).decode()


def _unpacked(text: str) -> bytearray:
    """Return the states of a file; empty if they are damaged: the log has them all."""
    try:
        return bytearray(zlib.decompress(b64decode(text))) if text else bytearray()
    except (ValueError, zlib.error):
        return bytearray()
