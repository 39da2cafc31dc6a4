"""Compare consume queues with the log, in both directions.

The log is read once, from its beginning to its end. The entries that its records should have are
those that a start would write (``integrity/expected_entries.py``). They are compared with the files
of their queue, many as one piece of bytes, so that checking an intact store takes little longer
than reading it.

In the other direction, ``finish`` examines all entries without a record: those before the first
record of the log, which must refer to earlier offsets; those of missing records, which must be
blank; and those after the last record.
"""

import time
from collections.abc import Callable, Iterator
from itertools import groupby, takewhile
from pathlib import Path
from typing import Final

from attrs import define

from ..config import DELAY_LEVELS_MS
from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..format.filler import FILLER_BIT, is_filler
from ..format.queue_entry import ENTRY_SIZE, PRE_BLANK, QueueEntry, unpack_entries
from ..format.record import RECORD_SIZE_MIN, decode_record
from ..format.timers import entry_time
from ..format.topics import LIGHT_QUEUE_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC
from ..integrity.expected_entries import ExpectedEntries, find_batch_queues
from ..log.resync import Damage
from ..queue.consume_queue import is_directory_name
from ..queue.deleted_topics import load_deleted_topics
from ..queue.queue_extension import is_extension
from .data_files import list_files, list_queues
from .findings import Findings
from .log_walk import SETTLE_PAUSE, SETTLE_TIME, Chunk
from .state import StoreState

_ENTRIES_READ: Final = 1 << 12  # unclaimed entries examined at once
_SECOND: Final = 1000  # ms; delay levels are whole seconds

RIGHT: Final = ""
MISSING: Final = "entry_missing"
WRONG: Final = "entry_wrong"

Verdict = tuple[str, bool]
"""The kind of a finding about an entry, and whether it is harmless; consecutive ones are one."""


@define(eq=False, repr=False, slots=False)
class _CheckedQueue:
    """A queue whose expected entries are compared with its files."""

    files: MappedFileQueue
    next_offset: int
    _compare: Callable[["_CheckedQueue", bytes], None]

    def __attrs_post_init__(self) -> None:
        self.topic = self.files.directory.parent.name
        self.queue_id = int(self.files.directory.name)
        self.last_end = 0
        self.gaps: list[range] = []  # queue offsets without a record

    def extend(self, entries: bytes, physical_end: int) -> None:
        """Compare the next entries; the record of the last one ends at ``physical_end``."""
        self._compare(self, entries)
        self.next_offset += len(entries) // ENTRY_SIZE
        self.last_end = physical_end

    def skip_to(self, queue_offset: int) -> None:
        """Continue at a higher offset; the records in between are missing in the log."""
        self.gaps.append(range(self.next_offset, queue_offset))
        self.next_offset = queue_offset


@define(eq=False, repr=False, slots=False)
class QueueCheck:
    """All queues of a store; ``take`` every chunk of the log, then ``finish``."""

    _root: Path
    _findings: Findings
    _state: StoreState
    _damaged_ranges: list[Damage]  # ranges of lost records that were replaced by fillers
    _log_start: int
    # From this physical offset on, the next start rewrites entries.
    _unsettled_from: int | None = None

    def __attrs_post_init__(self) -> None:
        self._directory = self._root / "consumequeue"
        self._queues: dict[tuple[str, int], _CheckedQueue] = {}  # with records
        self._batch_queues = find_batch_queues(self._root)
        self._expected = ExpectedEntries(
            self._begin,
            log_start=self._log_start,
            delay_levels_ms=DELAY_LEVELS_MS,
            batch_queues=self._batch_queues,
            deleted_topics=load_deleted_topics(self._root),
            on_left_out=self._report_record,
        )
        self.entries = 0
        self.file_size = self._usual_file_size()

    def take(self, chunk: Chunk) -> None:
        """Collect the queue entries of the records in a chunk, and compare many at a time."""
        for position, size, sys_flag, *_ in chunk.found:
            if sys_flag & FILLER_BIT and is_filler(chunk.content, position, sys_flag):
                self._report_filler(chunk, position, size)
        self._expected.take(*chunk)

    def _report_filler(self, chunk: Chunk, position: int, size: int) -> None:
        """Report a lost record that a start has replaced with a filler."""
        offset = chunk.offset + position
        self._damaged_ranges.append(Damage(offset, size, "a filler"))
        record = decode_record(chunk.content, position, check_crc=False)
        self._findings.add(
            "record_lost",
            self._directory,
            f"{size} bytes at offset {offset} stand for a damaged record, perhaps queue offset "
            f"{record.queue_offset} of {record.topic}:{record.queue_id}",
            offset=offset,
            harmless=True,
        )

    def _report_record(self, offset: int, reason: str) -> None:
        """Report a record without an entry, which cannot be consumed."""
        detail = f"the record at {offset} has {reason}"
        self._findings.add("record_wrong", self._directory, detail, offset=offset)

    def _begin(self, topic: str, queue_id: int, queue_offset: int) -> _CheckedQueue:
        """Return a queue for its first record.

        Raises:
            ValueError: No queue can have such a name.
        """
        if not is_directory_name(topic) or queue_id < 0:
            raise ValueError(f"topic {topic!r}, queue {queue_id} cannot name a directory")
        files = self._files_of(self._directory / topic / str(queue_id))
        first = min([max(queue_offset, 0), *(base // ENTRY_SIZE for base in files.bases[:1])])
        queue = self._queues[topic, queue_id] = _CheckedQueue(files, first, self._compare)
        return queue

    def _compare(self, queue: _CheckedQueue, expected: bytes) -> None:
        """Compare the next entries of a queue with its files."""
        if not queue.files.bases and (queue.topic, queue.queue_id) in self._batch_queues:
            return  # only RocketMQ has written it, in another format
        self.entries += len(expected) // ENTRY_SIZE
        found = self._found(queue, expected)
        if found == expected:
            return
        wanted, there = [*unpack_entries(expected)], [*unpack_entries(found)]
        judged = [self._difference(queue, *pair) for pair in zip(wanted, there, strict=True)]
        self._report(queue, queue.next_offset, judged, there, wanted)

    def _found(self, queue: _CheckedQueue, expected: bytes) -> bytes:
        """Read the entries; RocketMQ writes entries a moment after their records."""
        deadline = time.monotonic() + SETTLE_TIME
        while True:
            found = _read_entries(queue.files, queue.next_offset, len(expected) // ENTRY_SIZE)
            done = found == expected or self._state is not StoreState.OPEN
            if done or time.monotonic() > deadline:
                return found
            time.sleep(SETTLE_PAUSE)

    def _difference(self, queue: _CheckedQueue, wanted: QueueEntry, there: QueueEntry) -> Verdict:
        """Judge an entry; one that is equivalent to the expected one is right."""
        kind = MISSING if not any(there) else WRONG
        if there == wanted:
            kind = RIGHT
        elif there[:2] == wanted[:2] and queue.topic == SCHEDULE_TOPIC:
            # The levels are a setting, and may have changed since. A flipped bit changes a time
            # by no whole seconds: no power of two is a multiple of a thousand.
            kind = WRONG if (there.tags_code - wanted.tags_code) % _SECOND else RIGHT
        elif there[:2] == wanted[:2] and queue.topic == TIMER_TOPIC:
            # RocketMQ's entries hold the tag.
            kind = RIGHT if entry_time(there.tags_code) is None else WRONG
        elif there[:2] == wanted[:2]:
            codes = there.tags_code, wanted.tags_code
            if is_extension(self._root, queue.topic, queue.queue_id, *codes):
                kind = RIGHT
        return kind, self._is_unsettled(wanted.physical_offset)

    def _is_unsettled(self, offset: int) -> bool:
        return self._unsettled_from is not None and offset >= self._unsettled_from

    def _report(
        self,
        queue: _CheckedQueue,
        start: int,
        judged: list[Verdict],
        there: list[QueueEntry],
        wanted: list[QueueEntry],
    ) -> None:
        """Report entries from queue offset ``start`` on; ``wanted`` is empty without records."""
        for (kind, harmless), run in groupby(range(len(judged)), key=judged.__getitem__):
            if kind == RIGHT:
                continue
            first, *more = run
            position = (start + first) * ENTRY_SIZE
            base = queue.files.base_of(position)
            detail = f"queue offset {start + first}"
            detail += f" to {start + more[-1]}" if more else ""
            detail += ": no entry" if kind == MISSING else f": {tuple(there[first])}"
            self._findings.add(
                kind,
                queue.files.path(base),
                f"{detail} instead of {tuple(wanted[first])}" if wanted else detail,
                position=position - base,
                count=1 + len(more),
                offset=wanted[first].physical_offset if wanted else None,
                harmless=harmless,
            )

    def finish(self, log_start: int, log_end: int) -> None:
        """Compare the remaining entries, then judge those without a record in the log."""
        self._expected.finish()
        log = range(log_start, log_end)
        for directory in self._queue_directories():
            queue = self._queues.get((directory.parent.name, int(directory.name)))
            if queue is None:
                files = self._files_of(directory)
                first = files.bases[0] // ENTRY_SIZE if files.bases else 0
                queue = _CheckedQueue(files, first, self._compare)
            if queue.files.bases:
                for gap in queue.gaps:
                    self._judge(queue, gap, log, between=True)
                end = (queue.files.bases[-1] + queue.files.file_size) // ENTRY_SIZE
                self._judge(queue, range(queue.next_offset, end), log)

    def _judge(
        self, queue: _CheckedQueue, offsets: range, log: range, *, between: bool = False
    ) -> None:
        """Judge entries without a record; after the last record they end with a zero."""
        for start in range(offsets.start, offsets.stop, _ENTRIES_READ):
            count = min(_ENTRIES_READ, offsets.stop - start)
            there = [*unpack_entries(_read_entries(queue.files, start, count))]
            if not between:
                there = [*takewhile(lambda entry: entry.is_valid, there)]
            self.entries += len(there)
            self._report(queue, start, [self._verdict(entry, log) for entry in there], there, [])
            if len(there) < count:
                return

    def _verdict(self, entry: QueueEntry, log: range) -> Verdict:
        """Judge an entry without a record."""
        offset, size, _ = entry
        is_deleted = offset >= 0 and size >= RECORD_SIZE_MIN and offset + size <= log.start
        if entry == PRE_BLANK or is_deleted:
            return RIGHT, True
        if not any(entry):
            return MISSING, False
        if any(damaged.offset <= offset < damaged.end for damaged in self._damaged_ranges):
            return "entry_of_damaged_record", True
        if offset < log.stop:
            return "entry_without_record", self._is_unsettled(offset)
        if self._state is StoreState.OPEN:
            return RIGHT, True  # its record was written since
        return "entry_behind_log", self._state is StoreState.NOT_CLOSED

    def _queue_directories(self) -> Iterator[Path]:
        """Yield all directories but those of light queues, whose offsets are in properties."""
        for directory in list_queues(self._directory):
            if not directory.parent.name.startswith(LIGHT_QUEUE_PREFIX):
                yield directory

    def _usual_file_size(self) -> int:
        """Return the size of the store's queue files, taken from the first queue that has any."""
        for directory in self._queue_directories():
            files = list_files(directory).files
            if files.bases:
                return files.file_size
        return 300_000 * ENTRY_SIZE

    def _files_of(self, directory: Path) -> MappedFileQueue:
        """List the files of a queue, and report invalid ones."""
        if not disk.is_directory(directory):
            return MappedFileQueue(directory, self.file_size)
        found = list_files(directory, self.file_size)
        for path, reason in found.unusable:
            self._findings.add("file_unusable", path, reason)
        return found.files

    def end_of(self, topic: str, queue_id: int) -> int | None:
        """Return the queue offset after the last record of a queue; None without a record."""
        queue = self._queues.get((topic, queue_id))
        return None if queue is None else queue.next_offset

    @property
    def queues(self) -> int:
        return len(list(self._queue_directories()))


def _read_entries(files: MappedFileQueue, start: int, count: int) -> bytes:
    """Read consecutive entries; zeros for a missing file."""
    position, end = start * ENTRY_SIZE, (start + count) * ENTRY_SIZE
    pieces: list[bytes] = []
    while position < end:
        base = files.base_of(position)
        size = min(end, base + files.file_size) - position
        try:
            with disk.opened(files.path(base)) as fd:
                piece = disk.pread(fd, size, position - base)
        except FileNotFoundError:
            piece = b""
        pieces.append(piece.ljust(size, b"\0"))
        position += size
    return b"".join(pieces)
