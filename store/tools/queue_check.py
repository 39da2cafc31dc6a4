"""Compare consume queues with the log, in both directions.

The log is read once, from its beginning to its end. What each record says of its queue entry is
collected by queue in runs of consecutive entries, and a run is compared with the file of the queue
as one piece of bytes. So checking an intact store takes little longer than reading it, and the size
of the runs bounds the memory.

This checks the entry of each record. In the other direction, ``finish`` examines all entries
without a record: those before the first record of the log, which must refer to earlier offsets;
those between two runs, which must be blank; and those after the last run.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from ..config import DELAY_LEVELS_MS
from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..format.filler import FILLER_BIT, is_filler
from ..format.flags import NO_QUEUE_ENTRY
from ..format.queue_entry import ENTRY_SIZE, LAYOUT, PRE_BLANK, QueueEntry, unpack_entries
from ..format.record import RECORD_SIZE_MIN, decode_record, store_timestamp
from ..format.topics import LIGHT_QUEUE_PREFIX, SCHEDULE_TOPIC
from ..log.dispatch import entry_code
from ..queue.queue_extension import is_extension
from .data_files import list_files, list_queues
from .findings import Findings
from .log_walk import SETTLE_PAUSE, SETTLE_TIME, Chunk, DamagedRange
from .state import StoreState

ENTRIES_HELD: Final = 1 << 16  # collected before they are compared: about 6 MB
_ENTRIES_READ: Final = 1 << 12  # unclaimed entries examined at once
_UNUSUAL: Final = NO_QUEUE_ENTRY | FILLER_BIT
_SECOND: Final = 1000  # ms; delay levels are whole seconds

# Why a run of entries is wrong. Each run becomes one finding.
MISSING: Final = "entry_missing"
WRONG: Final = "entry_wrong"


class Unclaimed(NamedTuple):
    """What is known about a store when entries without a record are judged."""

    log_start: int
    log_end: int
    state: StoreState


@dataclass(slots=True)
class _Run:
    """A queue, and its collected entries that are not compared yet."""

    files: MappedFileQueue
    start: int = 0  # queue offset of the first of them
    next_offset: int = 0  # after the last of them
    entries: list[bytes] = field(default_factory=list)
    times: list[int] = field(default_factory=list)  # their records' store times, of delayed ones
    claimed: list[tuple[int, int]] = field(default_factory=list)  # compared so far, merged
    is_schedule: bool = False
    skipped: bool = False


class QueueCheck:
    """All queues of a store; ``take`` every chunk of the log, then ``finish``."""

    def __init__(
        self,
        root: Path,
        findings: Findings,
        state: StoreState,
        damaged_ranges: list[DamagedRange],
        *,
        unsettled_from: int | None = None,
    ) -> None:
        """From physical offset ``unsettled_from`` on, the next start rewrites entries.

        ``damaged_ranges`` gets the ranges of lost records that were replaced by fillers.
        """
        self._root = root
        self._directory = root / "consumequeue"
        self._batch_directory = root / "batchconsumequeue"
        self._findings = findings
        self._state = state
        self._damaged_ranges = damaged_ranges
        self._unsettled_from = unsettled_from
        self._runs: dict[tuple[bytes, int], _Run] = {}
        self._held = 0
        self.entries = 0
        self.file_size = self._usual_file_size()

    # Records to entries -----------------------------------------------------------------------

    def take(self, chunk: Chunk) -> None:
        """Collect the queue entries of the records in a chunk."""
        offset, content, found = chunk
        runs, pack = self._runs, LAYOUT.pack
        for record in found:
            position, size, sys_flag, queue_id, queue_offset, topic_at, topic_end, _ = record
            if sys_flag & _UNUSUAL and is_filler(content, position, sys_flag):
                self._report_filler(chunk, position, size)
            if sys_flag & NO_QUEUE_ENTRY:
                continue
            key = (content[topic_at:topic_end], queue_id)
            run = runs.get(key) or self._meet(key, offset + position)
            if queue_offset != run.next_offset and (
                run.skipped or not self._go_to(run, key, queue_offset, offset + position)
            ):
                continue
            if run.is_schedule:
                run.times.append(store_timestamp(content, position, sys_flag))
            code = entry_code(content, record, DELAY_LEVELS_MS)
            run.entries.append(pack(offset + position, size, code))
            run.next_offset = queue_offset + 1
        self._held += len(found)
        if self._held >= ENTRIES_HELD:
            self._compare_all()

    def _report_filler(self, chunk: Chunk, position: int, size: int) -> None:
        """Report a lost record that a start has replaced with a filler."""
        offset = chunk.offset + position
        self._damaged_ranges.append(DamagedRange(offset, offset + size, "a filler"))
        record = decode_record(chunk.content, position, check_crc=False)
        self._findings.add(
            "record_lost",
            self._directory,
            f"{size} bytes at offset {offset} stand for a damaged record, perhaps queue offset "
            f"{record.queue_offset} of {record.topic}:{record.queue_id}",
            offset=offset,
            harmless=True,
        )

    def _meet(self, key: tuple[bytes, int], offset: int) -> _Run:
        """Prepare a queue for its first record."""
        topic, queue_id = key[0].decode(errors="replace"), key[1]
        directory = self._directory / topic / str(queue_id)
        files = MappedFileQueue(directory, self.file_size)
        run = self._runs[key] = _Run(files, is_schedule=topic == SCHEDULE_TOPIC)
        if "\0" in topic or "/" in topic or queue_id < 0:
            self._findings.add(
                "record_wrong",
                self._directory,
                f"a record of topic {topic!r}, queue {queue_id}",
                offset=offset,
            )
            run.skipped, run.next_offset = True, -1
        elif disk.is_directory(self._batch_directory / topic):
            run.skipped, run.next_offset = (
                True,
                -1,
            )  # its entries have another format, in another place
        else:
            run.files = self._files_of(directory)
        return run

    def _go_to(self, run: _Run, key: tuple[bytes, int], queue_offset: int, offset: int) -> bool:
        """Begin a new run at a queue offset; False if an earlier record has that offset."""
        if run.next_offset and queue_offset < run.next_offset:
            self._findings.add(
                "queue_offset_repeated",
                run.files.directory,
                f"the record at {offset} has queue offset {queue_offset} of "
                f"{key[0].decode(errors='replace')}:{key[1]}, as an earlier one has",
                position=queue_offset * ENTRY_SIZE,
                offset=offset,
            )
            return False
        self._compare(run)
        run.start = run.next_offset = queue_offset
        return True

    def _compare_all(self) -> None:
        for run in self._runs.values():
            self._compare(run)
        self._held = 0

    def _compare(self, run: _Run) -> None:
        """Compare the collected entries of a queue with its files."""
        if not run.entries:
            return
        expected = b"".join(run.entries)
        if (found := self._found(run, expected)) != expected:
            self._report_differences(run, expected, found)
        if run.claimed and run.claimed[-1][1] == run.start:
            run.claimed[-1] = (run.claimed[-1][0], run.next_offset)
        else:
            run.claimed.append((run.start, run.next_offset))
        self.entries += len(run.entries)
        run.entries.clear()
        run.times.clear()
        run.start = run.next_offset

    def _found(self, run: _Run, expected: bytes) -> bytes:
        """Read the entries; RocketMQ writes entries a moment after their records."""
        deadline = time.monotonic() + SETTLE_TIME
        while True:
            found = _read_entries(run.files, run.start, len(run.entries))
            done = found == expected or self._state is not StoreState.OPEN
            if done or time.monotonic() > deadline:
                return found
            time.sleep(SETTLE_PAUSE)

    def _report_differences(self, run: _Run, expected: bytes, found: bytes) -> None:
        """Report the entries that differ, consecutive ones in one finding."""
        previous = ""
        first = count = 0
        for index, (wanted, there) in enumerate(
            zip(unpack_entries(expected), unpack_entries(found), strict=True)
        ):
            kind = self._difference(run, index, wanted, there)
            if kind != previous and count:
                self._report(run, previous, first, count, expected, found)
                count = 0
            if kind:
                first = first if count else index
                count += 1
            previous = kind
        if count:
            self._report(run, previous, first, count, expected, found)

    def _difference(self, run: _Run, index: int, wanted: QueueEntry, there: QueueEntry) -> str:
        """Return what is wrong with an entry; nothing if it is equivalent to the expected one."""
        if there == wanted:
            return ""
        if not any(there):
            return MISSING
        if there[:2] != wanted[:2]:
            return WRONG
        if run.is_schedule:
            # The levels are a setting, and may have changed since. One flipped bit makes no whole
            # seconds of whole seconds: no power of two is a multiple of a thousand.
            delay = there.tags_code - run.times[index]
            return "" if delay > 0 and delay % _SECOND == 0 else WRONG
        topic, queue_id = run.files.directory.parts[-2:]
        codes = there.tags_code, wanted.tags_code
        return "" if is_extension(self._root, topic, int(queue_id), *codes) else WRONG

    def _report(
        self, run: _Run, kind: str, first: int, count: int, expected: bytes, found: bytes
    ) -> None:
        at = first * ENTRY_SIZE
        wanted = QueueEntry._make(LAYOUT.unpack_from(expected, at))
        there = QueueEntry._make(LAYOUT.unpack_from(found, at))
        queue_offset = run.start + first
        path, position = _place(run.files, queue_offset)
        last = f" to {queue_offset + count - 1}" if count > 1 else ""
        is_or_are = "is" if count == 1 else "are"
        detail = (
            f"queue offset {queue_offset}{last} {is_or_are} missing"
            if kind == MISSING
            else f"queue offset {queue_offset}{last}: {tuple(there)} instead of {tuple(wanted)}"
        )
        self._findings.add(
            kind,
            path,
            detail,
            position=position,
            count=count,
            offset=wanted.physical_offset,
            harmless=self._is_unsettled(wanted.physical_offset),
        )

    def _is_unsettled(self, offset: int) -> bool:
        return self._unsettled_from is not None and offset >= self._unsettled_from

    # Entries to records -----------------------------------------------------------------------

    def finish(self, known: Unclaimed) -> None:
        """Compare the remaining entries, then judge those without a record."""
        self._compare_all()
        claimed = {run.files.directory: run for run in self._runs.values()}
        for directory in self._queue_directories():
            run = claimed.get(directory)
            if run is None:
                run = _Run(self._files_of(directory))
            if not run.skipped:
                self._judge_unclaimed(run, known)

    def _judge_unclaimed(self, run: _Run, known: Unclaimed) -> None:
        bases = run.files.bases
        if not bases:
            return
        at = bases[0] // ENTRY_SIZE
        for start, end in run.claimed:
            self._judge(run, range(at, start), known, between=True)
            at = max(at, end)
        self._judge(run, range(at, (bases[-1] + run.files.file_size) // ENTRY_SIZE), known)

    def _judge(self, run: _Run, offsets: range, known: Unclaimed, *, between: bool = False) -> None:
        """Judge entries without a record; after the last record they end with a zero."""
        for part, has_file in _file_ranges(run.files, offsets):
            step = _ENTRIES_READ if has_file else part.stop - part.start
            for start in range(part.start, part.stop, step):
                count = min(step, part.stop - start)
                content = _read_entries(run.files, start, count) if has_file else b""
                if not any(content):
                    if between:
                        self._report_unclaimed(run, start, MISSING, "no entry", count)
                        continue
                    return
                for queue_offset, entry in enumerate(unpack_entries(content), start):
                    if not between and not entry.is_valid:
                        return
                    self._judge_one(run, queue_offset, entry, known)
                self.entries += count

    def _judge_one(self, run: _Run, queue_offset: int, entry: QueueEntry, known: Unclaimed) -> None:
        physical_offset, size, _ = entry
        if entry == PRE_BLANK:
            return
        end = physical_offset + size
        if physical_offset >= 0 and size >= RECORD_SIZE_MIN and end <= known.log_start:
            return  # retention has deleted its record
        if any(damaged.start <= physical_offset < damaged.end for damaged in self._damaged_ranges):
            kind, harmless = "entry_of_damaged_record", True
        elif physical_offset < known.log_end:
            kind, harmless = "entry_without_record", self._is_unsettled(physical_offset)
        elif known.state is StoreState.OPEN:
            return  # its record was written since
        else:
            kind, harmless = "entry_behind_log", known.state is StoreState.NOT_CLOSED
        self._report_unclaimed(run, queue_offset, kind, str(tuple(entry)), harmless=harmless)

    def _report_unclaimed(
        self,
        run: _Run,
        queue_offset: int,
        kind: str,
        what: str,
        count: int = 1,
        *,
        harmless: bool = False,
    ) -> None:
        path, position = _place(run.files, queue_offset)
        self._findings.add(
            kind,
            path,
            f"queue offset {queue_offset}: {what}",
            position=position,
            count=count,
            harmless=harmless,
        )

    # Files ------------------------------------------------------------------------------------

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
        run = self._runs.get((topic.encode(), queue_id))
        return None if run is None or not run.claimed else run.claimed[-1][1]

    @property
    def queues(self) -> int:
        """The number of queues with records."""
        return len(list(self._queue_directories()))


def _place(files: MappedFileQueue, queue_offset: int) -> tuple[Path, int]:
    position = queue_offset * ENTRY_SIZE
    base = files.base_of(position)
    return files.path(base), position - base


def _file_ranges(files: MappedFileQueue, offsets: range) -> Iterator[tuple[range, bool]]:
    """Split queue offsets into ranges with a file and ranges without.

    A flipped bit in a queue offset may skip more entries than could ever be read.
    """
    start, per_file = offsets.start, files.file_size // ENTRY_SIZE
    for base in files.bases:
        first = base // ENTRY_SIZE
        if first >= offsets.stop:
            break
        if first + per_file <= start:
            continue
        if start < first:
            yield range(start, first), False
            start = first
        end = min(first + per_file, offsets.stop)
        yield range(start, end), True
        start = end
    if start < offsets.stop:
        yield range(start, offsets.stop), False


def _read_entries(files: MappedFileQueue, start: int, count: int) -> bytes:
    """Read consecutive entries; zeros for a missing file."""
    position, end = start * ENTRY_SIZE, (start + count) * ENTRY_SIZE
    pieces: list[bytes] = []
    while position < end:
        base = files.base_of(position)
        wanted = min(end, base + files.file_size) - position
        pieces.append(_read(files.path(base), position - base, wanted).ljust(wanted, b"\0"))
        position += wanted
    return b"".join(pieces)


def _read(path: Path, position: int, size: int) -> bytes:
    try:
        fd = disk.open_file(path, disk.READ)
    except FileNotFoundError:
        return b""
    try:
        return disk.pread(fd, size, position)
    finally:
        disk.close(fd)
