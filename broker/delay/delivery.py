"""Deliver messages when they are due: delay levels, retries, times of delivery, delayed commits.

A message with a delay level waits in ``SCHEDULE_TOPIC_XXXX``, one with a time of delivery and a
delayed commit in ``rmq_sys_wheel_timer``, all in RocketMQ's form. `DueTimes` has the due time and
the place of each of them. When one is due, it is appended again, to its real topic.

**A start** reads the queues: their entries hold the due times (`store.format.timers`).

**A delivery is decided by the log.** The delivered record holds the place of the message that it
delivers (`link_of`), and so does the record of a recall. `DoneFile` says which messages are done,
as of an offset of the log and as far as that is durable; a start reads the log from there. So after
a kill no message is delivered twice, and after a power cut none is lost.

**Clocks.** Delays are counted on the monotonic clock, so that steps of the wall clock have no
effect. A message stored before the start waits until its store time plus the delay, but at most the
delay from the start: the clock may have been set back. ``TIMER_DELIVER_MS`` is a time by the wall
clock.

**Destinations.** A message goes to its queue as a commit does: to another one if its topic has lost
that queue, and to a topic that is created again if it was deleted. While it cannot be created, or
the message cannot be read, that message is put off, and those after it are delivered.

**Apache RocketMQ.** A start delivers what waits in the store of an Apache RocketMQ. `DoneFile`
writes the files from which that one goes on.

**Retention.** A message that waits longer than the log is kept is stored again before its file is
deleted (`copy_forward`).

Source: RocketMQ ``ScheduleMessageService``, ``TimerMessageStore``.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from attrs import define

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.recall_handle import RecallHandle
from halfmq.store.errors import PropertiesTooLongError, RecordTooLargeError, StoreError
from halfmq.store.files.page_cache import Missing, NotInMemoryError, allowed_to_wait
from halfmq.store.format.properties import PROPERTY_REAL_TOPIC, PROPERTY_UNIQ_KEY
from halfmq.store.format.queue_entry import QueueEntry
from halfmq.store.format.record import Record, decode_record
from halfmq.store.format.timers import timer_delay_ms, timer_due_ms
from halfmq.store.format.topics import TIMER_TOPIC
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore

from ..errors import MessageRefusedError
from ..limits.kept import DELAYED, Kept
from ..loop.fetches import Fetch
from .done_file import DoneFile
from .find_waiting import waiting_messages
from .levels import DelayLevels, restored
from .timer_records import TimerError, again, is_recall, link_of, recall_of, text_of
from .waiting import (
    DELIVERED,
    OFFSET_BITS,
    PENDING,
    RECALLED,
    TIMER_QUEUE,
    Due,
    DueTimes,
    WaitingQueue,
    number_of,
    place_of,
    queue_offset_of,
)

logger = logging.getLogger(__name__)

BATCH_COUNT_MAX: Final = 32
"""Messages delivered before the loop may serve others."""

IDLE_TICK_S: Final = 1.0
"""Longest time in seconds between two ticks: a step of the wall clock is noticed within it."""

RETRY_AFTER_ERROR_MS: Final = 10_000
"""Milliseconds until what the disk or the store refused is tried again. Source:
`DELAY_FOR_A_PERIOD`."""

UNREADABLE_MS: Final = 5
"""Milliseconds until a message is looked at again that is due before it is on disk."""

FETCHES_MAX: Final = 32
"""Fetches for one batch; then it is read even if that blocks on the disk, because fetched bytes may
be evicted before they are used."""

COPIES_FOUND_MAX: Final = 64
"""Records read to find a message that was stored again: one for each time that this was done."""

INDEX_MARGIN_MS: Final = 60_000  # the index keeps whole seconds, and clocks may step

DEFERRED_PER_WAIT: Final = 256
"""Messages that are put off for `RETRY_AFTER_ERROR_MS`; twice as many wait twice as long."""

COPIES_MAX: Final = 500
"""Messages stored again in one step, before old files are deleted: some milliseconds of work."""


class Recalled(NamedTuple):
    """A message that nobody gets, once the log is durable up to `durable_at`."""

    unique_key: str
    durable_at: int


class WaitingMessage(NamedTuple):
    """A message that waits."""

    record: Record
    place: int
    due_ms: int


class WaitingPage(NamedTuple):
    """A part of a listing."""

    messages: list[WaitingMessage]
    next_after: int | None  # `after` of the next page; None: this is the last


@define(eq=False, repr=False, slots=False)
class DelayService:
    """Delivers due messages; call `tick` after the seconds that it returns."""

    _store: MessageStore
    _levels: DelayLevels
    _directory: Path
    _scan: Callable[[int], Iterable[Record]]  # reads the log from an offset on
    _now_ms: Callable[[], int]  # the wall clock
    _monotonic_ms: Callable[[], int]
    _fetch: Fetch  # reads what is not in memory and calls back on this thread, at once or later
    # Returns the queue for a message to a topic and queue now; None if there is none.
    _queue_of: Callable[[str, int], int | None]
    _wake: Callable[[], None] = lambda: None  # schedules `tick` soon

    def __attrs_post_init__(self) -> None:
        self._done = DoneFile(
            self._store, self._directory, now_ms=self._now_ms, monotonic_ms=self._monotonic_ms
        )
        self.persist_job, self.persist = self._done.persist_job, self._done.persist
        self.positions = self._done.positions
        self.oldest_waiting_offset = self._done.oldest_offset
        self._due = DueTimes(self._now_ms, self._monotonic_ms)
        self._queues: list[WaitingQueue] = []
        self.waiting = 0
        self._undeliverable = 0
        self._put_off: set[int] = set()  # places of messages that are due and cannot be delivered
        self._paused_until_ms = 0
        self._is_fetching = False
        self._fetches = 0  # since the last successful read
        self._singly = 0  # messages to read one by one, because one of them cannot be read

    def load(self) -> None:
        """Find the waiting messages; the store must be open.

        Raises:
            DamagedTableError: See `DoneFile.load`.
        """
        self._queues = waiting_messages(
            self._store, self._done, self._levels, self._scan, self._now_ms(), self._due
        )
        self.waiting = len(self._due)

    def on_stored(self, request: AppendRequest) -> None:
        """Add a message that has just been appended; messages of other topics are ignored."""
        number = number_of(request.topic, request.queue_id)
        if number is None or number >= len(self._queues):  # a client may name any queue
            return
        queue = self._queues[number]
        place = place_of(number, queue.end)
        if number == TIMER_QUEUE:
            if is_recall(request.properties):
                queue.add(DELIVERED)
                return
            delay_ms = timer_delay_ms(request.properties)
        else:
            delay_ms = self._levels.delay_ms(number)
        if delay_ms is None:
            due_ms = timer_due_ms(request.properties, self._now_ms()) or 0
            is_next = self._due.add_at(due_ms, place)
        else:
            is_next = self._due.add_after(delay_ms, place)
        queue.add(PENDING)
        self.waiting += 1
        if is_next:
            self._wake()

    def tick(self) -> float:
        """Deliver a batch of due messages; return the seconds until the next call."""
        now = self._monotonic_ms()
        if now < self._paused_until_ms:
            return (self._paused_until_ms - now) / 1_000
        if self._is_fetching:
            return IDLE_TICK_S
        due = self._due.take_due(1 if self._singly else BATCH_COUNT_MAX)
        if due:
            self._singly = max(self._singly - 1, 0)
            self._deliver([one for one in due if self._state(one.place) == PENDING])
        return self._due.wait_s(IDLE_TICK_S)

    def _deliver(self, due: Sequence[Due]) -> None:
        found: list[tuple[Due, AppendRequest]] = []
        waits: list[Due] = []
        missing: list[Missing] = []
        for one in due:
            queue, queue_offset = self._queue(one.place), queue_offset_of(one.place)
            if queue_offset >= self._store.queues.bounds(queue.topic, queue.queue_id)[1]:
                self._due.add_after(UNREADABLE_MS, one.place)  # it is not on disk yet
                continue
            record: Record | None = None
            try:
                with allowed_to_wait(self._fetches >= FETCHES_MAX):
                    record = self._record(self._entry(one.place))
            except NotInMemoryError as error:
                missing += error.missing
            except OSError as error:
                self._defer(one.place, str(error))
                continue
            if missing:  # those that follow keep their order
                waits.append(one)
            elif (message := self._message(one.place, record)) is not None:
                found.append((one, message))
        if missing:
            self._begin_fetch(missing, waits)
        else:
            self._fetches = 0
        if found:
            self._append(found)

    def _message(self, place: int, record: Record | None) -> AppendRequest | None:
        """Return the request that delivers a record; None if it cannot be delivered, or not now."""
        message = None if record is None else restored(record)
        if message is None:
            # A lost or damaged record, or one without a destination, must not delay the others.
            self._give_up(place, "it is damaged, or names no destination")
            return None
        queue_id = self._queue_of(message.topic, message.queue_id)
        if queue_id is None:
            self._defer(place, "its topic is gone and cannot be created")
            return None
        message.queue_id = queue_id
        message.prepared_transaction_offset = link_of(place)
        return message

    def _append(self, found: Sequence[tuple[Due, AppendRequest]]) -> None:
        places = [one.place for one, _ in found]
        try:
            appended = self._store.append([message for _, message in found])
        except (RecordTooLargeError, PropertiesTooLongError) as error:
            if len(found) > 1:
                for one_of_them in found:
                    self._append([one_of_them])
                return
            self._give_up(places[0], str(error))  # a limit was lowered after it was stored
        except StoreError as error:
            logger.error("event=delivery_refused error=%r", str(error))  # noqa: TRY400
            self._due.put_back(one for one, _ in found)
            self._paused_until_ms = self._monotonic_ms() + RETRY_AFTER_ERROR_MS
        else:
            self._finish(places, DELIVERED, appended[0].physical_offset, appended[-1].end)

    def _finish(self, places: Sequence[int], state: int, log_start: int, log_end: int) -> None:
        self.waiting -= len(places)
        self._put_off.difference_update(places)
        self._done.mark(places, state, log_start, log_end)

    def _give_up(self, place: int, reason: str) -> None:
        """Deliver a message never; the log still has it."""
        logger.error(
            "event=delayed_message_not_delivered place=%s reason=%r", self._shown(place), reason
        )
        self._undeliverable += 1
        self._finish([place], DELIVERED, 0, 0)

    def _defer(self, place: int, reason: str) -> None:
        """Put a message off; the more there are, the longer, so that the attempts stay few."""
        if place not in self._put_off:
            logger.error(
                "event=delayed_message_put_off place=%s reason=%r", self._shown(place), reason
            )
            self._put_off.add(place)
        waits = 1 + len(self._put_off) // DEFERRED_PER_WAIT
        self._due.add_after(RETRY_AFTER_ERROR_MS * waits, place)

    def _begin_fetch(self, missing: Sequence[Missing], waits: Sequence[Due]) -> None:
        """Read messages from the disk, on a thread, and deliver them then; all others wait."""

        def on_fetched(is_there: bool) -> None:
            self._is_fetching = False
            if is_there or len(waits) > 1:
                self._due.put_back(waits)
                self._fetches += 1
                self._singly = 0 if is_there else len(waits)
            else:
                self._fetches = 0
                self._defer(waits[0].place, "it cannot be read")
            self._wake()

        self._is_fetching = True
        self._fetch(NotInMemoryError(missing), on_fetched)

    def recall(self, handle: RecallHandle) -> Recalled:
        """Keep a waiting message from being delivered.

        Raises:
            TimerError: The message does not wait any more, or never did.
            NotInMemoryError: It must be read from the disk first.
            StoreError: The recall could not be stored, and the message waits on.
        """
        waiting = self._named(handle)
        if (
            waiting is None
            or handle.unique_key != text_of(waiting.record, PROPERTY_UNIQ_KEY)
            or handle.topic != text_of(waiting.record, PROPERTY_REAL_TOPIC)
        ):
            raise TimerError(
                "recall failed, timestamp invalid: no such message waits; it has been delivered, "
                "or was recalled before"
            )
        if self._state(waiting.place) == RECALLED:  # the answer to the first request was lost
            return Recalled(handle.unique_key, self._store.write_offset)
        (appended,) = self._store.append([recall_of(*waiting)])
        self._finish([waiting.place], RECALLED, appended.physical_offset, appended.end)
        return Recalled(handle.unique_key, appended.end)

    def _named(self, handle: RecallHandle) -> WaitingMessage | None:
        """Return the waiting, or recalled, message that a handle names, or its latest copy."""
        if self._state(handle.place) != DELIVERED:
            return self._waiting(handle.place)
        index = self._store.index
        end_ms = max(self._now_ms(), index.last_update[0]) + INDEX_MARGIN_MS
        for offset in index.query(TIMER_TOPIC, handle.unique_key, COPIES_FOUND_MAX, 0, end_ms):
            record = self._store.reader.record_at(offset)
            if record is None or is_recall(record.properties):
                continue
            place = place_of(TIMER_QUEUE, record.queue_offset)
            is_copy = record.prepared_transaction_offset < 0
            is_meant = is_copy or handle.place < 0  # RocketMQ names a message by its key
            if is_meant and self._state(place) != DELIVERED:
                return self._waiting(place)
        return None

    def page(self, after: int, max_count: int, max_bytes: int) -> WaitingPage:
        """Return waiting messages, queue by queue, in the order in which they were stored.

        Args:
            after: `next_after` of the previous page; -1 for the first.
            max_count: Most messages to look at.
            max_bytes: Bytes of records after which the page ends.

        Raises:
            NotInMemoryError: A message must be read from the disk first.
        """
        found: list[WaitingMessage] = []
        size = 0
        for _ in range(max_count):
            place = self._next_pending(max(after + 1, 0))
            if place is None:
                return WaitingPage(found, None)
            after = place
            message = self._waiting(place)
            if message is not None:
                found.append(message)
                size += message.record.total_size
            if size >= max_bytes:
                break
        return WaitingPage(found, after)

    def _next_pending(self, place: int) -> int | None:
        """Return the first place from one on where a message waits."""
        first = queue_offset_of(place)
        for queue in self._queues[place >> OFFSET_BITS :]:
            queue_offset = queue.next_pending(first)
            if queue_offset is not None:
                return place_of(queue.number, queue_offset)
            first = 0
        return None

    def kept(self) -> Kept:
        return {DELAYED: self.waiting}

    def require_room(self) -> None:
        """Raise if no more messages may wait; commits always may.

        Raises:
            RequestRefusedError: Too many wait.
        """
        if self.waiting >= DELAYED.most:
            raise MessageRefusedError(
                f"{DELAYED.most} messages wait for their time of delivery: send it later",
                ResponseCode.SYSTEM_BUSY,
            )

    def metrics(self) -> dict[str, int]:
        """Return how many messages wait, and how many of them are due and cannot be delivered yet.

        ``undeliverable`` counts those that were given up since the start.
        """
        return {
            "waiting": self.waiting,
            "put_off": len(self._put_off),
            "undeliverable": self._undeliverable,
        }

    def copy_forward(self, end: int) -> bool:
        """Store waiting messages again that lie before an offset of the log, which is deleted next.

        Their time of delivery does not change. Return whether there were some; then call it again
        before the log is deleted.

        Raises:
            NotInMemoryError: A message must be read from the disk first.
        """
        copied = 0
        for queue in self._queues:
            offset = queue.next_pending(queue.base)
            while offset is not None and copied < COPIES_MAX:
                entry = self._entry(place_of(queue.number, offset))
                if entry is None or entry.physical_offset >= end:
                    break
                if not self._copy(place_of(queue.number, offset)):
                    return False
                copied += 1
                offset = queue.next_pending(offset + 1)
        return copied > 0

    def _copy(self, place: int) -> bool:
        waiting = self._waiting(place)
        if waiting is None:  # it is damaged, and cannot be delivered either
            self._finish([place], DELIVERED, 0, 0)
            return True
        try:
            (appended,) = self._store.append([again(*waiting)])
        except StoreError as error:  # the log is kept for it
            logger.warning("event=delayed_message_not_copied error=%r", str(error))
            return False
        self._finish([place], DELIVERED, appended.physical_offset, appended.end)
        return True

    def _queue(self, place: int) -> WaitingQueue:
        return self._queues[place >> OFFSET_BITS]

    def _state(self, place: int) -> int:
        is_known = 0 <= place >> OFFSET_BITS < len(self._queues)  # a client may name any place
        return self._queue(place).state(queue_offset_of(place)) if is_known else DELIVERED

    def _entry(self, place: int) -> QueueEntry | None:
        queue = self._queue(place)
        offset = queue_offset_of(place)
        return next(iter(self._store.queues.entries(queue.topic, queue.queue_id, offset, 1)), None)

    def _record(self, entry: QueueEntry | None) -> Record | None:
        """Return the record of a queue entry; None if there is none, or it is damaged.

        Raises:
            NotInMemoryError: It must be read from the disk first.
            OSError: It cannot be read.
        """
        if entry is None:
            return None
        encoded = self._store.reader.record_bytes(entry.physical_offset)
        return None if encoded is None else decode_record(encoded, check_crc=False)

    def _waiting(self, place: int) -> WaitingMessage | None:
        """Return the message at a place; raises as `_record` does."""
        entry = self._entry(place)
        record = self._record(entry)
        if entry is None or record is None:
            return None
        due_ms = timer_due_ms(record.properties, record.store_timestamp) or entry.tags_code
        return WaitingMessage(record, place, due_ms)

    def _shown(self, place: int) -> str:
        queue = self._queue(place)
        return f"{queue.topic}:{queue.queue_id}:{queue_offset_of(place)}"
