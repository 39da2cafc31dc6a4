"""Putting fillers where the log is damaged, so that nothing behind is ever cut or moved.

A damaged stretch is one that no record begins in, between two that are whole. Its records are lost,
but mostly it is known which they were: the head of one may be legible, an entry that a queue had
may name it, and a queue that goes on behind the stretch lacks the queue offset. Each becomes a
filler (``format/filler.py``) that keeps its place in log and queue. What is left over becomes a
filler of no queue or, where the stretch reaches the end of a file, the blank that ends it.

RocketMQ would end its scan at the stretch and cut off everything behind, so leaving the bytes as
they are would lose most. They are put aside first, in ``damaged/`` below the root, one file per
stretch, named by its physical offset. A crash between the two leaves a stretch that is repaired by
the next start.
"""

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice, takewhile
from pathlib import Path
from typing import Final

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
from ..log.log_scan import QueuePlace, legible
from ..log.resync import Damage
from .queue_rebuild import Gap, LastEntries, QueueScan

logger = logging.getLogger(__name__)

DAMAGED: Final = "damaged"  # directory below the root
ASIDE_SIZE_MAX: Final = 64 << 20  # bytes of damaged stretches that are kept, all together
_COPY_SIZE: Final = 1 << 20  # bytes
_FILLER_SIZE: Final = 1 << 20  # bytes
_NO_END: Final = 1 << 63  # behind every record


class Stretch:
    """A damaged part of one file of the log, and what will be written there."""

    def __init__(self, start: int, end: int, *, ends_file: bool, timestamp: int) -> None:
        self.start = start
        self.end = end
        self.free = start  # up to here it is taken by fillers
        self._rest_min = BLANK_SIZE if ends_file else FILLER_SIZE_MIN
        self._ends_file = ends_file
        self._timestamp = timestamp  # ms; when the record before it was stored
        self._fillers: list[tuple[QueuePlace, int, int]] = []  # with physical offset and size

    def take(self, lost: QueuePlace) -> QueueEntry | None:
        """Give a lost record a filler; return its queue entry, or None if there is no room."""
        offset, size = self.free, filler_size(lost.topic)
        rest = self.end - offset - size
        if not self._ends_file and 0 <= rest < self._rest_min:
            size += rest  # too little for another filler
        elif rest < self._rest_min:
            return None
        self._fillers.append((lost, offset, size))
        self.free = offset + size
        return QueueEntry(offset, size, FILLER_TAGS_CODE)

    def content(self) -> Iterator[tuple[int, bytes]]:
        """Give what is to be written, with the physical offsets."""
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
            # No larger than a record is, since readers take each into memory.
            size = rest if rest < 2 * _FILLER_SIZE else _FILLER_SIZE
            yield offset, anonymous_filler(size, offset, self._timestamp)
            offset += size


class Repair:
    """Decides what is to be written where the log is damaged; ``write`` does it."""

    def __init__(
        self,
        files: MappedFileQueue,
        damages: Iterable[tuple[Damage, int]],
    ) -> None:
        """Damages are in order; each comes with the time, in ms, of the record before it."""
        self._files = files
        self._stretches = [
            stretch
            for damage, timestamp in damages
            for stretch in _stretches(damage, files, timestamp)
        ]
        # What heads in the stretches say, although the records are not whole.
        self._legible = {
            place: stretch
            for stretch in self._stretches
            for place in legible(files, stretch.start, stretch.end)
        }

    def fill_gaps(self, gaps: Iterable[Gap]) -> int:
        """Put fillers into the places that queues lack; return how many stay blank."""
        blank_count = 0
        for gap in gaps:
            entry = self._fill(gap)
            if entry is None:
                blank_count += 1
            else:
                gap.queue.replace(gap.queue_offset, entry)
        return blank_count

    def mend_end(self, scan: QueueScan) -> None:
        """Add what a queue had behind its last record, as far as it lies in a damaged stretch."""
        queue = scan.queue
        known_end = self._known_end(scan.before)
        while True:
            gap = Gap(queue, queue.next_offset, queue.last_end, _NO_END)
            legible = self._legible.get(_place(gap))
            if gap.queue_offset >= known_end and (legible is None or legible.start < gap.after):
                return
            entry = self._fill(gap)
            if entry is None:
                return
            queue.extend(entry.pack(), entry.physical_offset + entry.size)

    def _known_end(self, before: LastEntries) -> int:
        """Return the queue offset behind the last entry that led into a damaged stretch."""
        for number in range(len(before.entries) - 1, -1, -1):
            offset = before.entries[number].physical_offset
            at = bisect_right(self._stretches, offset, key=lambda one: one.start)
            if at and offset < self._stretches[at - 1].end:
                return before.first + number + 1
        return 0

    def _fill(self, gap: Gap) -> QueueEntry | None:
        """Put a filler into a stretch between the records around the gap."""
        lost = _place(gap)
        named = self._legible.get(lost)
        first = bisect_left(self._stretches, gap.after, key=lambda stretch: stretch.start)
        between = takewhile(
            lambda stretch: stretch.end <= gap.before, islice(self._stretches, first, None)
        )
        for stretch in sorted(between, key=lambda stretch: stretch is not named):
            entry = stretch.take(lost)
            if entry is not None:
                return entry
        return None

    # Writing --------------------------------------------------------------------------------

    def write(self, aside: Path) -> None:
        """Write it all, durably; the damaged bytes go to files in the directory ``aside``."""
        for stretch in self._stretches:
            with self._opened(stretch.start) as (fd, base):
                _put_aside(fd, stretch.start - base, stretch, aside)
                for offset, content in stretch.content():
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


def _place(gap: Gap) -> QueuePlace:
    return QueuePlace(gap.queue.topic, gap.queue.queue_id, gap.queue_offset)


def _stretches(damage: Damage, files: MappedFileQueue, timestamp: int) -> Iterator[Stretch]:
    """Give the parts of a damage, one for each file it reaches into."""
    start = damage.offset
    while start < damage.end:
        file_end = files.base_of(start) + files.file_size
        end = min(damage.end, file_end)
        yield Stretch(start, end, ends_file=end == file_end, timestamp=timestamp)
        start = end


def _put_aside(fd: int, position: int, stretch: Stretch, directory: Path) -> None:
    """Keep damaged bytes for whoever wants to look at them, if there is room."""
    size = stretch.end - stretch.start
    target = directory / f"{stretch.start:020d}"
    try:
        make_directory(directory)
        kept = sum(disk.size_of(path) for path in disk.entries(directory))
        if disk.exists(target) or kept + size > ASIDE_SIZE_MAX:
            logger.warning("event=damage_not_kept offset=%d length=%d", stretch.start, size)
            return
        with disk.NewFile(target) as file:
            for at in range(0, size, _COPY_SIZE):
                file.write(disk.pread(fd, min(_COPY_SIZE, size - at), position + at))
            file.sync()
        disk.sync_directory(directory)
    except (OSError, DiskFullError) as error:
        # The messages behind are worth more than the evidence.
        logger.warning("event=damage_not_kept offset=%d error=%r", stretch.start, str(error))
