"""When a log begins and ends; no Spark in here."""

from typing import Final, NamedTuple

from .rows import Rows, store_times
from .segments import LogExtent, SegmentReader

_TAIL: Final = 10 << 20  # bytes of the last segment that are read; two of the largest records fit


class LogTimes(NamedTuple):
    """When the first and the last record of a log were stored, ms."""

    first: int | None  # None: the log still has the very first record
    last: int


def log_times(extent: LogExtent) -> LogTimes | None:
    """Look at both ends of a log; None when it has no record.

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
    segment = extent.segments[place]
    limit = extent.limit(segment)
    items = SegmentReader(segment, limit).scan(start, limit)
    return [int(time) for rows in items if isinstance(rows, Rows) for time in store_times(rows)]
