"""Follow a log that is being written: find how far it can be read by now. No Spark in here.

A stream looks every few milliseconds when there is nothing new. So the end that was found last is
kept, with the clocks up to there, and the next search begins there; if nothing has been written
since, it reads eight bytes.

All returned offsets are borders of records, so that no record is in two batches.
"""

import json
from pathlib import Path
from typing import Final

from halfmq.store.format.record import PREFIX

from ..errors import DataLossError
from .files import is_remote, open_file
from .log_end import APPEND_SIZE_MAX, NOTHING_KNOWN, LogEnd, extent_of, find_end
from .segment_reader import SegmentReader
from .segments import LogExtent, Segment, find_segments

OFFSET: Final = "physicalOffset"  # the key in checkpoints of streams; it must never change
_UNWRITTEN: Final = bytes(PREFIX.size)


class LogFollower:
    """Finds how far a log goes; one per reader, because it remembers the last end."""

    def __init__(self, path: str, *, memory_map: bool = True) -> None:
        self._path = path
        self._memory_map = memory_map
        self._known: dict[Segment, LogEnd] = {}

    def extent(self) -> LogExtent:
        """Find the segments and the end of the log, as ``survey`` does, by what was added.

        Raises:
            LogDirectoryError: There is no segment, or one cannot be read.
        """
        known, self._known = self._known, {}

        def end_of(segment: Segment) -> LogEnd:
            self._known[segment] = found = self._end(segment, known.get(segment))
            return found

        return extent_of(find_segments(self._path), end_of)

    def _end(self, segment: Segment, known: LogEnd | None) -> LogEnd:
        if known is not None and self._is_unchanged(segment, known.position):
            return known
        # A broker that writes leaves no wide ranges without records; a search through all reserved
        # space would take longer than reading what is new.
        reader = SegmentReader(
            segment,
            segment.size,
            memory_map=self._memory_map,
            search_max=APPEND_SIZE_MAX,
        )
        return find_end(reader, known or NOTHING_KNOWN, may_be_live=True)

    def _is_unchanged(self, segment: Segment, position: int) -> bool:
        if position == segment.size or is_remote(segment.path):
            return True  # what is remote is replaced by something of another size, if at all
        with open_file(segment.path) as file:
            return bytes(file.read_at(PREFIX.size, position)) == _UNWRITTEN

    def border(self, offset: int) -> int:
        """Return the first border between records at or after ``offset``; it may be the end.

        This reads the segment up to there.
        """
        extent = self.extent()
        return self._border(extent, extent.first_offset, offset)

    def _border(self, extent: LogExtent, known: int, offset: int) -> int:
        """Search from the border ``known`` on, or from the segment's beginning."""
        if not extent.first_offset < offset < extent.end_offset:
            return offset
        segment = extent.segment_at(offset)
        limit = extent.limit(segment)
        border = max(known - segment.base, 0)
        stop = offset - segment.base
        reader = SegmentReader(segment, limit, memory_map=self._memory_map)
        for item in reader.scan(border, stop, end=stop, aligned=True):
            border = item.end
        # A blank reaches to the end of its file, which may be after the next one's beginning.
        return segment.base + min(border, limit)

    def end(self, start: int, bytes_max: int | None = None) -> int:
        """Return how far can be read from the border ``start`` on: ``bytes_max`` bytes.

        The last record may reach beyond that, so that there is at least one.
        """
        extent = self.extent()
        if bytes_max is None or extent.end_offset - start <= bytes_max:
            return max(start, extent.end_offset)
        # What lies between two segments cannot be read, and does not count.
        first = next(one for one in extent.segments if one.base + extent.limit(one) > start)
        begin = max(start, first.base)
        return min(self._border(extent, begin, begin + bytes_max), extent.end_offset)

    def demand(self, start: int, stop: int | None = None) -> None:
        """Check that the log has what a stream needs: [start, stop), or all from ``start`` on.

        Raises:
            DataLossError: It has not.
        """
        extent = self.extent()
        stop = extent.end_offset if stop is None else stop
        if start < extent.first_offset:
            reason = f"the log begins at {extent.first_offset}: older segments have been deleted"
            raise self._loss(start, extent.first_offset, reason)
        if max(start, stop) > extent.end_offset:
            reason = f"the log ends at {extent.end_offset}: it was cut, or it is another log"
            raise self._loss(start, max(start, stop), reason)
        for first, end in extent.gaps(start, stop):
            reason = f"no segment has the bytes from {first} to {end}"
            raise self._loss(first, end, reason)

    def demand_border(self, offset: int) -> None:
        """Check that an offset which once was a border between records still is one.

        A log that was cut after a power loss and written on has other borders.

        Raises:
            DataLossError: A record lies across it.
        """
        border = self.border(offset)
        if border != offset:
            reason = f"a record lies across {offset}: the log was cut there and written anew"
            raise self._loss(offset, border, reason)

    def _loss(self, start: int, end: int, reason: str) -> DataLossError:
        needed = f"the stream needs offsets {start} to {end}, but {reason}"
        remedy = "failOnDataLoss=false continues with the next record in the log"
        return DataLossError(self._path, f"{needed}; {remedy}")


def batch_end(checkpoint: Path, number: int) -> int:
    """Return the offset up to which a micro-batch reads, as the checkpoint of its stream says it.

    Raises:
        OSError: There is no such batch.
    """
    note = (checkpoint / "offsets" / str(number)).read_text("utf-8")
    return int(json.loads(note.splitlines()[-1])[OFFSET])
