"""Follow a log that is being written: up to where can it be read by now? No Spark in here.

A stream asks again and again, every few milliseconds when there is nothing new. So the end that was
found last is kept, with what the search learned of the clocks on the way, and the next search
begins there; where nothing has been written since, eight bytes are read and that is all.

All offsets that are given out are borders of records, so that no record is ever in two batches.
"""

from itertools import pairwise
from typing import Final

from halfmq.store.format.record import PREFIX

from ..errors import DataLossError
from .files import is_remote, open_remote
from .rows import Rows
from .segments import (
    APPEND_SIZE_MAX,
    NOTHING_KNOWN,
    LogEnd,
    LogExtent,
    Segment,
    SegmentReader,
    find_end,
    find_segments,
)

_UNWRITTEN: Final = bytes(PREFIX.size)


class LogFollower:
    """Says how far a log goes; one per reader, because it remembers."""

    def __init__(self, path: str, *, memory_map: bool = True) -> None:
        self._path = path
        self._memory_map = memory_map
        self._known: dict[Segment, LogEnd] = {}

    def extent(self) -> LogExtent:
        """Find the segments and the end of the log, as ``survey`` does, by what was added.

        Raises:
            LogDirectoryError: There is no segment, or one cannot be read.
        """
        segments = find_segments(self._path)
        first = segments[0].base if segments else 0
        known, self._known = self._known, {}
        while segments:
            last = segments[-1]
            found = self._known[last] = self._end(last, known.get(last))
            if found.position:
                return LogExtent(tuple(segments), last.base + found.position, found.tail)
            segments.pop()  # pre-allocated, or just begun
        return LogExtent((), first, None)

    def _end(self, segment: Segment, known: LogEnd | None) -> LogEnd:
        if known is not None and self._is_unchanged(segment, known.position):
            return known
        # Who is writing leaves no wide holes; a search through all that is reserved would take
        # longer than to read what is new.
        reader = SegmentReader(
            segment,
            segment.size,
            memory_map=self._memory_map,
            keep=True,
            search_max=APPEND_SIZE_MAX,
        )
        return find_end(reader, known or NOTHING_KNOWN, may_be_live=True)

    def _is_unchanged(self, segment: Segment, position: int) -> bool:
        if position == segment.size or is_remote(segment.path):
            return True  # what is remote is replaced by something of another size, if at all
        with open_remote(segment.path) as file:
            return bytes(file.read_at(PREFIX.size, position)) == _UNWRITTEN

    def _reader(self, segment: Segment, limit: int) -> SegmentReader:
        return SegmentReader(segment, limit, memory_map=self._memory_map)

    def border(self, offset: int) -> int:
        """Return the first border between records at or behind ``offset``; it may be the end."""
        extent = self.extent()
        if offset >= extent.end_offset or offset <= extent.first_offset:
            return offset
        segment = _segment_of(extent, offset)
        limit = extent.limit(segment)
        position = offset - segment.base
        if position >= limit:  # between two segments, of which there are others
            return offset
        return segment.base + self._reader(segment, limit).next_start(position)

    def end(self, start: int, bytes_max: int | None = None) -> int:
        """Return how far can be read from the border ``start`` on: about ``bytes_max`` bytes.

        At least one record, if there is one.
        """
        extent = self.extent()
        if bytes_max is None or extent.end_offset - start <= bytes_max:
            return max(start, extent.end_offset)
        # What lies between two segments cannot be read, and does not count.
        begin = max(start, _first_behind(extent, start).base)
        target = begin + bytes_max
        if target >= extent.end_offset:
            return extent.end_offset
        segment = _segment_of(extent, target)
        if segment.base <= begin:
            return self._border_at(extent, segment, begin, target)
        behind = self._border_at(extent, segment, segment.base, target)
        # The first record of the segment may be too large for what is left.
        return behind if behind <= target else segment.base

    def _border_at(self, extent: LogExtent, segment: Segment, start: int, target: int) -> int:
        """Return the last border up to ``target``, or the first behind ``start``."""
        limit = extent.limit(segment)
        border = position = start - segment.base
        reader = self._reader(segment, limit)
        for item in reader.scan(position, target - segment.base, aligned=True):
            ends = item.ends.tolist() if isinstance(item, Rows) else [item.position + item.size]
            within = [end for end in ends if segment.base + end <= target]
            border = within[-1] if within else border
            if len(within) < len(ends):
                border = ends[0] if border == position else border
                break
        # A blank reaches to the end of its file, which may be behind the next one's beginning.
        return segment.base + min(border, limit)

    def demand(self, start: int, end: int | None = None) -> None:
        """Check that the log has what a stream needs: [start, end), or all from ``start`` on.

        Raises:
            DataLossError: It has not.
        """
        extent = self.extent()
        stop = extent.end_offset if end is None else end
        if start < extent.first_offset:
            reason = f"the log begins at {extent.first_offset}: older segments have been deleted"
            raise DataLossError(self._path, start, extent.first_offset, reason)
        if max(start, stop) > extent.end_offset:
            reason = f"the log ends at {extent.end_offset}: it was cut, or it is another log"
            raise DataLossError(self._path, start, max(start, stop), reason)
        for segment, following in pairwise(extent.segments):
            if segment.end < following.base and segment.end < stop and following.base > start:
                reason = f"no segment has the bytes from {segment.end} to {following.base}"
                raise DataLossError(self._path, segment.end, following.base, reason)

    def demand_border(self, offset: int) -> None:
        """Check that an offset which once was a border between records still is one.

        A log that was cut after a power loss and written on has other borders. This reads the
        segment up to there.

        Raises:
            DataLossError: A record lies across it.
        """
        extent = self.extent()
        if not extent.first_offset < offset < extent.end_offset:
            return
        segment = _segment_of(extent, offset)
        position = offset - segment.base
        reader = self._reader(segment, extent.limit(segment))
        for item in reader.scan(0, position):
            if isinstance(item, Rows) and int(item.ends[-1]) > position:
                behind = segment.base + int(item.ends[-1])
                reason = f"a record lies across {offset}: the log was cut there and written anew"
                raise DataLossError(self._path, offset, behind, reason)


def _segment_of(extent: LogExtent, offset: int) -> Segment:
    """Return the segment that holds an offset, or the last one that begins before it."""
    return next(one for one in reversed(extent.segments) if one.base <= offset)


def _first_behind(extent: LogExtent, offset: int) -> Segment:
    """Return the first segment with something behind an offset that is not the log's end."""
    return next(one for one in extent.segments if one.base + extent.limit(one) > offset)


def part_of(extent: LogExtent, start: int, end: int) -> LogExtent:
    """Cut a log down to the segments that hold [start, end), as if it ended there."""
    segments = tuple(one for one in extent.segments if one.base < end and one.end > start)
    return LogExtent(segments, end, None)
