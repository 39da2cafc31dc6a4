"""Which messages are done, on disk: our own file, and those of Apache RocketMQ.

`halfmqDelays.json` has the states of all queues as of an offset of the log, as far as that is
durable; a start reads the log from there on.

`delayOffset.json` and `timercheck` tell an Apache RocketMQ that takes the store over where to
begin: at the first message that waits. It delivers all that follow, also those that were delivered
before their turn. A start of halfmq begins where a RocketMQ has stopped, if that is further on.

Source: RocketMQ ``ScheduleMessageService``, ``TimerCheckpoint``.
"""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from attrs import define

from halfmq.store.files import disk
from halfmq.store.files.page_cache import Missing, NotInMemoryError
from halfmq.store.format.timers import delivered_ms, timer_checkpoint
from halfmq.store.message_store import MessageStore

from ..tables.table_file import JsonObject, PeriodicSave, TableFile, as_integer, as_object
from .waiting import OFFSET_BITS, TIMER_QUEUE, WaitingQueue, packed, queue_offset_of

SAVE_INTERVAL_MS: Final = 5_000
"""Milliseconds between two writes of the files: a start after a kill reads so much of the log."""

LOG_BYTES_MAX: Final = 64 << 20
"""Bytes of log after which the files are written though no message has become due: a start reads so
much in well under a second."""


class _Done(NamedTuple):
    """Messages that are done once the log is durable up to `log_end`."""

    log_start: int
    log_end: int
    state: int
    places: Sequence[int]


@define(eq=False, repr=False, slots=False)
class DoneFile:
    """Marks messages as done, and saves that as far as it is durable."""

    _store: MessageStore
    _directory: Path
    _now_ms: Callable[[], int]
    _monotonic_ms: Callable[[], int]

    def __attrs_post_init__(self) -> None:
        self._file = TableFile(
            self._directory / "halfmqDelays.json", self._now_ms, table_key="delays"
        )
        self._positions = TableFile(
            self._directory / "delayOffset.json",
            self._now_ms,
            table_key="offsetTable",
            if_removed="halfmq finds in its log what it has delivered, and delivers the others",
        )
        self._checkpoint_path = self._directory / "timercheck"
        self._saves = PeriodicSave(SAVE_INTERVAL_MS, self._monotonic_ms)
        self._queues: list[WaitingQueue] = []
        self._undurable: deque[_Done] = deque()
        self._saved_to = 0  # offset of the log as of which the files were written last

    def load(self, count: int) -> tuple[list[WaitingQueue], int]:
        """Return so many queues, and the offset from which the log says what else is done.

        Raises:
            DamagedTableError: The positions of RocketMQ cannot be read, nor their backup.
        """
        content = as_object(self._file.load().get("delays"))
        positions = as_object(self._positions.load().get("offsetTable"))
        saved = as_object(content.get("queues"))
        for number in range(count):
            queue = WaitingQueue(number, as_object(saved.get(str(number))))
            first, end = self._store.queues.bounds(queue.topic, queue.queue_id)
            queue.limit(max(first, as_integer(positions.get(str(number)), 0)), end)
            self._queues.append(queue)
        self._saved_to = as_integer(content.get("logOffset"), 0) if saved else 0
        oldest = self._first_offset()
        # A message is delivered by a record that follows it in the log.
        log_end = self._store.durable_offset
        return self._queues, max(self._saved_to, log_end if oldest is None else oldest)

    def delivered_by_rocketmq_ms(self) -> int:
        """Return the time up to which a RocketMQ has delivered the messages of its timer queue."""
        path = self._checkpoint_path
        return delivered_ms(disk.read_bytes(path)) if disk.exists(path) else 0

    def mark(self, places: Sequence[int], state: int, log_start: int, log_end: int) -> None:
        """Mark messages; the record that says so lies between two offsets of the log."""
        for place in places:
            self._queue(place).mark(queue_offset_of(place), state, durable=False)
        self._undurable.append(_Done(log_start, log_end, state, places))
        self._saves.dirty = True

    def _queue(self, place: int) -> WaitingQueue:
        return self._queues[place >> OFFSET_BITS]

    def oldest_offset(self) -> int | None:
        """Return the physical offset of the first message that is not done for good; None if none.

        Raises:
            NotInMemoryError: A queue entry must be read from the disk first.
        """
        self._trim()
        return self._first_offset()

    def _first_offset(self) -> int | None:
        offsets: list[int] = []
        missing: list[Missing] = []
        for queue in self._queues:
            if queue.end == queue.base:
                continue
            try:
                entries = self._store.queues.entries(queue.topic, queue.queue_id, queue.base, 1)
            except NotInMemoryError as error:
                missing += error.missing  # of all queues, for one fetch
            else:
                offsets += [entry.physical_offset for entry in entries]
        if missing:
            raise NotInMemoryError(missing)
        return min(offsets, default=None)

    def _trim(self) -> None:
        durable = self._store.durable_offset
        while self._undurable and self._undurable[0].log_end <= durable:
            done = self._undurable.popleft()
            for place in done.places:
                self._queue(place).mark(queue_offset_of(place), done.state, durable=True)
        for queue in self._queues:
            queue.trim()

    def positions(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the first message of each level that waits, and the version of that table."""
        self._trim()
        table = {str(one.number): one.base for one in self._queues[1:] if one.end}
        return table, self._positions.data_version

    def persist_job(self) -> Callable[[], None] | None:
        """Return a function that writes the files, on any thread; None if nothing is due."""
        is_far = self._store.durable_offset - self._saved_to > LOG_BYTES_MAX
        if is_far and any(one.end > one.base for one in self._queues):
            self._saves.dirty = True  # or a start would read all that was sent since then
        return self._job() if self._saves.is_due() else None

    def persist(self) -> None:
        """Write the files now; call it at a stop, after the last flush."""
        if self._saves.dirty:
            self._job()()

    def _job(self) -> Callable[[], None]:
        positions, _ = self.positions()
        states = [(str(one.number), *one.saved_states()) for one in self._queues if one.end]
        log_offset = self._undurable[0].log_start if self._undurable else self._store.durable_offset
        self._saved_to = log_offset
        checkpoint = timer_checkpoint(self._now_ms(), self._queues[TIMER_QUEUE].base)

        def content() -> JsonObject:
            queues = {number: packed(base, done) for number, base, done in states}
            return {"delays": {"logOffset": log_offset, "queues": queues}}

        self._file.next_version()
        self._positions.next_version()
        writes = (
            self._file.prepare(content),
            self._positions.prepare(lambda: {"offsetTable": positions}),
        )

        def write() -> None:
            for one in writes:
                one()
            disk.write_file(self._checkpoint_path, checkpoint)

        return self._saves.job(write, self._file)
