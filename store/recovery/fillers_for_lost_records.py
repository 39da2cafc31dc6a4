"""Write fillers into damaged ranges of the log, so that later records keep their positions.

A damaged range lies between two valid records and holds none. Its records are lost, but usually
their queue offsets are known: a queue continues after the range and misses an offset, or an old
queue entry refers to the range. Each lost record is replaced by a filler (``format/filler.py``)
that takes its place in log and queue. The rest of the range becomes a filler of no queue or, if the
range ends with its file, the blank at the end of the file.

RocketMQ would end its scan at the damage and cut off all later records, so the bytes cannot stay as
they are. They are first copied to ``damaged/`` below the root, one file per range, named by its
physical offset. If a crash interrupts this, the next start repairs the range.
"""

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice, takewhile
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import DiskFullError
from ..files import disk
from ..files.mapped_file import make_directory
from ..files.mapped_file_queue import MappedFileQueue
from ..format.filler import (
    FILLER_SIZE_MIN,
    FILLER_TAGS_CODE,
    anonymous_filler,
    filler_size,
    queue_filler,
)
from ..format.queue_entry import QueueEntry
from ..format.record import BLANK_SIZE, blank
from ..integrity.expected_entries import MissingEntries
from ..log.resync import Damage
from ..queue.consume_queue import ConsumeQueue
from .queue_rebuild import LastEntries

logger = logging.getLogger(__name__)

DAMAGED: Final = "damaged"  # directory below the root
COPIES_SIZE_MAX: Final = 64 << 20  # bytes of all copies of damaged ranges
_COPY_SIZE: Final = 1 << 20  # bytes
_FILLER_SIZE: Final = 1 << 20  # bytes
_NO_END: Final = 1 << 63  # after every record


class QueuePlace(NamedTuple):
    """The position of a record in its queue."""

    topic: str
    queue_id: int
    queue_offset: int


class FilledRange:
    """A damaged range of one log file, and the fillers to write there."""

    def __init__(self, start: int, end: int, *, ends_file: bool, timestamp: int) -> None:
        self.start = start
        self.end = end
        self.free = start  # fillers take the range up to here
        self._rest_min = BLANK_SIZE if ends_file else FILLER_SIZE_MIN
        self._ends_file = ends_file
        self._timestamp = timestamp  # ms; store time of the record before it
        self._fillers: list[tuple[QueuePlace, int, int]] = []  # with physical offset and size

    def take(self, lost: QueuePlace) -> QueueEntry | None:
        """Add a filler for a lost record; return its queue entry, or None if there is no room."""
        offset, size = self.free, filler_size(lost.topic)
        rest = self.end - offset - size
        if not self._ends_file and 0 <= rest < self._rest_min:
            size += rest  # too small for another filler
        elif rest < self._rest_min:
            return None
        self._fillers.append((lost, offset, size))
        self.free = offset + size
        return QueueEntry(offset, size, FILLER_TAGS_CODE)

    def content(self) -> Iterator[tuple[int, bytes]]:
        """Yield physical offset and bytes of everything to write."""
        for lost, offset, size in self._fillers:
            yield (
                offset,
                queue_filler(
                    *lost, size=size, physical_offset=offset, store_timestamp=self._timestamp
                ),
            )
        rest = self.end - self.free
        if self._ends_file:
            yield self.free, blank(rest)
            return
        offset = self.free
        while (rest := self.end - offset) > 0:
            # No larger than a record, because readers load a record into memory.
            size = rest if rest < 2 * _FILLER_SIZE else _FILLER_SIZE
            yield offset, anonymous_filler(size, offset, self._timestamp)
            offset += size


class Repair:
    """Plans fillers for damaged ranges of the log; ``write`` writes them."""

    def __init__(self, files: MappedFileQueue, damages: Iterable[tuple[Damage, int]]) -> None:
        """``damages`` are in order, each with the store time in ms of the record before it."""
        self._files = files
        self._filled_ranges = [
            part
            for damage, timestamp in damages
            for part in _filled_ranges(damage, files, timestamp)
        ]

    def fill_missing(self, entries: Iterable[MissingEntries[ConsumeQueue]]) -> int:
        """Add fillers for missing queue entries; return how many entries stay blank."""
        blank_count = 0
        for queue, queue_offsets, after, before in entries:
            for queue_offset in queue_offsets:
                entry = self._fill(_place(queue, queue_offset), after, before)
                if entry is None:
                    blank_count += 1
                else:
                    queue.replace(queue_offset, entry)
        return blank_count

    def repair_end(self, queue: ConsumeQueue, before: LastEntries) -> None:
        """Add fillers for entries that a queue had after its last record, in damaged ranges."""
        known_end = self._known_end(before)
        while queue.next_offset < known_end:
            entry = self._fill(_place(queue, queue.next_offset), queue.last_end, _NO_END)
            if entry is None:
                return
            queue.extend(entry.pack(), entry.physical_offset + entry.size)

    def _known_end(self, before: LastEntries) -> int:
        """Return the queue offset after the last entry that referred to a damaged range."""
        for number in range(len(before.entries) - 1, -1, -1):
            offset = before.entries[number].physical_offset
            at = bisect_right(self._filled_ranges, offset, key=lambda one: one.start)
            if at and offset < self._filled_ranges[at - 1].end:
                return before.first + number + 1
        return 0

    def _fill(self, lost: QueuePlace, after: int, before: int) -> QueueEntry | None:
        """Add a filler to a damaged range between two physical offsets."""
        first = bisect_left(self._filled_ranges, after, key=lambda part: part.start)
        between = takewhile(
            lambda part: part.end <= before, islice(self._filled_ranges, first, None)
        )
        for part in between:
            entry = part.take(lost)
            if entry is not None:
                return entry
        return None

    def write(self, copies: Path) -> None:
        """Write all fillers durably; copy the damaged bytes to files in ``copies`` first."""
        for part in self._filled_ranges:
            with self._opened(part.start) as (fd, base):
                _keep_copy(fd, part.start - base, part, copies)
                for offset, content in part.content():
                    disk.pwrite(fd, content, offset - base)

    @contextmanager
    def _opened(self, offset: int) -> Iterator[tuple[int, int]]:
        base = self._files.base_of(offset)
        fd = disk.open_file(self._files.path(base), disk.WRITE)
        try:
            yield fd, base
            disk.sync_data(fd)
        finally:
            disk.close(fd)


def _place(queue: ConsumeQueue, queue_offset: int) -> QueuePlace:
    return QueuePlace(queue.topic, queue.queue_id, queue_offset)


def _filled_ranges(damage: Damage, files: MappedFileQueue, timestamp: int) -> Iterator[FilledRange]:
    """Yield the ranges of a damage, one per log file."""
    start = damage.offset
    while start < damage.end:
        file_end = files.base_of(start) + files.file_size
        end = min(damage.end, file_end)
        yield FilledRange(start, end, ends_file=end == file_end, timestamp=timestamp)
        start = end


def _keep_copy(fd: int, position: int, part: FilledRange, directory: Path) -> None:
    """Keep a copy of damaged bytes for inspection, if there is room."""
    size = part.end - part.start
    target = directory / f"{part.start:020d}"
    try:
        make_directory(directory)
        kept = sum(disk.size_of(path) for path in disk.entries(directory))
        if disk.exists(target) or kept + size > COPIES_SIZE_MAX:
            logger.warning("event=damage_not_kept offset=%d length=%d", part.start, size)
            return
        with disk.NewFile(target) as file:
            for at in range(0, size, _COPY_SIZE):
                file.write(disk.pread(fd, min(_COPY_SIZE, size - at), position + at))
            file.sync()
        disk.sync_directory(directory)
    except (OSError, DiskFullError) as error:
        # Repairing the log is more important than the copy.
        logger.warning("event=damage_not_kept offset=%d error=%r", part.start, str(error))
