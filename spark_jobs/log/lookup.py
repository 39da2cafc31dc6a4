"""Look up single records of a log: those that a report names, and the first and the last."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from halfmq.store.format.properties import PROPERTY_PGROUP, PROPERTY_REAL_TOPIC, PROPERTY_UNIQ_KEY
from halfmq.store.format.record import Record

from ..errors import LogDirectoryError
from .rows import Rows, store_times
from .segment_reader import SegmentReader
from .segments import LogExtent, Segment

_TAIL: Final = 10 << 20  # bytes of the last segment that are read; two of the largest records fit


class Place(NamedTuple):
    """A range of bytes in a file."""

    file: str
    position: int  # from the file's start
    size: int  # bytes; 0: no record begins here


class Names(NamedTuple):
    """The unique key, topic and producer group of a record; None if it has none."""

    unique_key: str | None
    topic: str | None  # the real one
    group: str | None  # of the producer


class LogLookup:
    """Finds records by their physical offsets."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments  # in log order
        self._readers: dict[Segment, SegmentReader] = {}

    def record(self, offset: int) -> Record | None:
        """Return the record that begins at an offset; None when none does."""
        segment = self._segment(offset)
        if segment is None:
            return None
        try:
            reader = self._readers.get(segment)
            if reader is None:
                reader = self._readers[segment] = SegmentReader(segment, segment.size)
        except LogDirectoryError:  # deleted since
            return None
        return reader.decoded(offset - segment.base)

    def names(self, offset: int | None) -> Names:
        """Return the names in the record at an offset."""
        record = None if offset is None else self.record(offset)
        if record is None:
            return Names(None, None, None)
        known = record.property_map
        topic = known.get(PROPERTY_REAL_TOPIC) or record.topic
        return Names(known.get(PROPERTY_UNIQ_KEY), topic, known.get(PROPERTY_PGROUP))

    def place(self, offset: int, *, end: int | None = None) -> Place | None:
        """Return the file and position of an offset; None if no segment holds it.

        ``end`` is where a range ends that is no record.
        """
        segment = self._segment(offset)
        if segment is None:
            return None
        position = offset - segment.base
        if end is not None:
            return Place(segment.path, position, min(end, segment.end) - offset)
        record = self.record(offset)
        return Place(segment.path, position, 0 if record is None else record.total_size)

    def _segment(self, offset: int) -> Segment | None:
        place = bisect_right(self._segments, offset, key=lambda segment: segment.base) - 1
        segment = self._segments[place] if place >= 0 else None
        return segment if segment is not None and offset < segment.end else None


class LogTimes(NamedTuple):
    """When the first and the last record of a log were stored, ms."""

    first: int | None  # None: the log still has the very first record
    last: int


def log_times(extent: LogExtent) -> LogTimes | None:
    """Read the store times at both ends of a log; None if it has no record.

    Raises:
        LogDirectoryError: A segment cannot be read.
    """
    if not extent.segments:
        return None
    first = _stored(extent, 0, 0) if extent.first_offset else []
    for place in reversed(range(len(extent.segments))):
        limit = extent.limit(extent.segments[place])
        last = _stored(extent, place, max(0, limit - _TAIL)) or _stored(extent, place, 0)
        if last:
            return LogTimes(first[0] if first else None, max(last))
    return None


def _stored(extent: LogExtent, place: int, start: int) -> list[int]:
    """Return the store times in a segment from a position on."""
    limit = extent.limit(extent.segments[place])
    items = SegmentReader(extent.segments[place], limit).scan(start, limit)
    return [int(time) for rows in items if isinstance(rows, Rows) for time in store_times(rows)]
