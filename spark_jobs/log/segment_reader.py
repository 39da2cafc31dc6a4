"""Read the records of one segment, in parts and past damage; no Spark in here.

*Splits.* Several workers read a segment of a gigabyte. A record belongs to the split it starts in.
A split that begins inside a segment searches for the next place that is a record beyond doubt:
right magic, lengths that add up, and its own physical offset at this very place. A body that
contains the magic is not taken for a record, and the consume queue is not needed.

*Damage.* Bytes that are no record, up to the next record, are one ``SkippedRange``. The same search
finds where it ends.

Source: RocketMQ ``CommitLog.java``; sizes and magics from ``halfmq.store.format.record``.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.record import (
    MAGIC_AT,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PREFIX,
    RECORD_SIZE_MIN,
    Record,
    decode_record,
)
from halfmq.store.format.record_fields import FIELDS

from ..errors import LogDirectoryError
from .arrays import Ints
from .files import WINDOW, FileContent, readable
from .rows import Rows, SegmentBytes
from .segments import OFFSET_END, Segment

BATCH_ROWS: Final = 65_536  # records decoded at once: enough to make numpy's fixed cost vanish
BATCH_BYTES: Final = 32 << 20  # and at most so many bytes: bounds a worker's memory
SEARCH_BYTES: Final = 64 << 10  # at first: damage is mostly small, and rarely alone
_REACH_GROWTH: Final = 4  # times as far as the last walk or search came, the next one may come

_MAGIC: Final = np.dtype(FIELDS["magic"].dtype)
_MAGICS: Final = np.array([MAGIC_V1, MAGIC_V2, MAGIC_BLANK], dtype=np.uint32)
UNWRITTEN: Final = "unwritten space where a record should be"
NOT_A_RECORD: Final = "bytes that are no record"


class SkippedRange(NamedTuple):
    """A range of a segment that holds no record; positions count from the segment's start."""

    position: int
    size: int
    reason: str | None  # None: the blank that properly ends the segment

    @property
    def end(self) -> int:
        return self.position + self.size


class SegmentReader:
    """Walks one segment, of which the first ``limit`` bytes belong to the log.

    ``memory_map`` is for local files; what is not mapped is read in windows. A search for the next
    record gives up after ``search_max`` bytes.
    """

    def __init__(
        self,
        segment: Segment,
        limit: int,
        *,
        memory_map: bool = True,
        search_max: int = OFFSET_END,
    ) -> None:
        self.segment = segment
        self._limit = limit
        self._search_max = search_max
        with readable(segment.path):
            self._content = FileContent(segment.path, limit, memory_map=memory_map)
        self._map = self._content.mapped
        if len(self._map) < limit:
            raise LogDirectoryError(segment.path, "has become shorter while it was read")
        self.bytes = SegmentBytes(self._map, segment.base)

    def scan(
        self,
        start: int,
        stop: int,
        *,
        end: int | None = None,
        batch_rows: int = BATCH_ROWS,
        aligned: bool = False,
    ) -> Iterator[Rows | SkippedRange]:
        """Yield the records that start in [start, stop), and the skipped ranges, in order.

        A skipped range belongs to the record before it: a reader that starts in it searches for
        the next record, and cannot tell how far back the range reaches. With ``aligned``, a record
        ends at ``start``, and nothing is searched. ``end`` is where the range of all splits ends,
        if not with the segment; nothing after it is looked at. Each ``Rows`` has at most
        ``batch_rows`` records and about ``BATCH_BYTES`` bytes.
        """
        stop = min(stop, self._limit)
        end = self._limit if end is None else min(end, self._limit)
        position = start if aligned or not start else self.next_start(start)
        if position >= stop:
            return
        reach = BATCH_BYTES
        while position < stop:
            for rows in self._rows(position, stop, batch_rows, reach):
                yield rows
                position = rows.end
            if position >= stop:
                break
            skipped = self._skipped(position)
            if skipped is not None:
                yield skipped
                position = skipped.end
            reach = SEARCH_BYTES
        if position < end and not self._is_start(position):
            skipped = self._skipped(position)
            if skipped is not None:
                yield skipped

    def _rows(self, position: int, stop: int, batch_rows: int, reach: int) -> Iterator[Rows]:
        """Read the whole records from here to ``stop``, or to something that is none.

        ``reach`` is how many bytes are walked through at first.
        """
        while position < stop:
            walked = self._walk(position, min(stop, position + reach))
            for first in range(0, len(walked) - 1, batch_rows):
                bounds = walked[first : first + batch_rows + 1]
                rows = Rows(self.bytes, bounds[:-1], bounds[1:])
                sound = rows.sound_count()
                if sound < len(rows):
                    if sound:
                        yield Rows(self.bytes, bounds[:sound], bounds[1 : sound + 1])
                    return
                yield rows
            if len(walked) == 1:
                return
            # A walk that ended early would end there again, had it begun a little later.
            came = int(walked[-1]) - position
            reach = min(max(_REACH_GROWTH * came, SEARCH_BYTES), BATCH_BYTES)
            position += came

    def _walk(self, position: int, stop: int) -> Ints:
        """Step from size to size; return where records begin, and where the last one ends.

        Magics and sizes are all that is looked at.
        """
        self._content.load(position, stop + RECORD_SIZE_MIN)
        content, limit, unpack = self._map, self._limit, PREFIX.unpack_from
        stop = min(stop, limit - RECORD_SIZE_MIN + 1)
        bounds = [position]
        while position < stop:
            size, magic = unpack(content, position)
            is_record = magic == MAGIC_V1 or magic == MAGIC_V2  # noqa: PLR1714  a set is slower
            if not is_record or not RECORD_SIZE_MIN <= size <= limit - position:
                break
            position += size
            bounds.append(position)
        self._content.load(bounds[0], position)
        return np.array(bounds, dtype=np.int64)

    def _skipped(self, position: int) -> SkippedRange | None:
        """Describe what is here instead of a record; None when it has just become one.

        A broker may be writing. It writes in order: if something further on is whole by now,
        then so is what stands here, unless it is damaged.
        """
        if self._is_blank(position):
            return SkippedRange(position, self.segment.size - position, None)
        self._content.load(position, position + PREFIX.size)
        prefix = self._map[position : position + PREFIX.size]
        reason = NOT_A_RECORD if any(prefix) else UNWRITTEN
        following = self.next_start(position + 1)
        if self._is_start(position):
            return None
        return SkippedRange(position, following - position, reason)

    def _is_start(self, position: int) -> bool:
        return self.record_at(position) is not None or self._is_blank(position)

    def next_start(self, position: int) -> int:
        """Find the first record or blank at or after ``position``, else the limit."""
        end = min(position + self._search_max, self._limit)
        reach = SEARCH_BYTES
        while position < end:
            stop = min(position + reach, end)
            for candidate in self._magics(position, stop):
                if self._is_start(candidate):
                    return candidate
            position, reach = stop, min(_REACH_GROWTH * reach, WINDOW)
        return self._limit

    def _magics(self, start: int, stop: int) -> list[int]:
        """List where in [start, stop) a record or blank may begin, by the magic in it."""
        begin, end = start + MAGIC_AT, min(stop + MAGIC_AT, len(self._map) - _MAGIC.itemsize + 1)
        self._content.load(begin, end + _MAGIC.itemsize)
        # Comparing single bytes is many times faster than comparing numbers at every place.
        first = self.bytes.view[begin:end]
        places = begin + np.flatnonzero(np.isin(first, _MAGICS >> 24))
        places = places[np.isin(self.bytes.read(_MAGIC, places), _MAGICS)]
        return (places - MAGIC_AT).tolist()

    def _is_blank(self, position: int) -> bool:
        # A copy may have been trimmed after the blank; its size still names the full segment.
        if position + PREFIX.size > self._limit:
            return False
        self._content.load(position, position + PREFIX.size)
        size, magic = PREFIX.unpack_from(self._map, position)
        return bool(magic == MAGIC_BLANK and position + size >= self.segment.size)

    def record_at(self, position: int) -> Rows | None:
        """Return the record that begins at a position; None when none does."""
        bounds = self._walk(position, position + 1)
        rows = Rows(self.bytes, bounds[:-1], bounds[1:])
        return rows if len(rows) and rows.sound_count() else None

    def decoded(self, position: int) -> Record | None:
        """Decode the record that begins at a position, which is faster for a single one."""
        if len(self._walk(position, position + 1)) == 1:  # loads it, too
            return None
        try:
            record = decode_record(self._map, position, check_crc=False)
        except CorruptRecordError:
            return None
        return record if record.physical_offset == self.segment.base + position else None

    def content(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end), as far as they belong to the file."""
        self._content.load(start, end)
        return memoryview(self._map)[start:end]
