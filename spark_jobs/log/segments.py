"""Find the segments of a commit log and walk the records in them; no Spark in here.

A segment is one file of the log, named by the offset of its first byte in 20 digits. Records
follow each other without a gap up to a blank that ends the file. Three things make reading more
than a walk:

*Splits.* A segment of a gigabyte is read by several workers. A record belongs to the split it
starts in. A split that begins inside a segment looks for the next place that is a record beyond
doubt: right magic, lengths that add up, and its own physical offset at this very place. The
consume queue is not needed, and a body that happens to contain the magic is not taken for one.

*Damage.* Bytes that are no record, followed by something that is one again, are one ``Hole``;
the walk goes on behind it. The same search that starts a split finds where.

*The end.* Only the last segment may end without a blank. ``survey`` finds where its whole records
end, once, so that all workers agree on it even while a broker appends:

* what lies behind the last whole record and before unwritten space was never finished, and is
  not reported as damage; a last record whose body fails its CRC is such a one;
* of a group that is being copied into the log the first bytes may arrive last (memcpy does so);
  a hole near the end of a store that is open, or was not closed, is given a second to fill;
* a log that was cut (RocketMQ cuts without zeroing) and then written on can have old whole
  records behind its true end. They are all older, by the broker's clock and by the producers', than
  what precedes them. Clocks are set back, too, so that alone proves nothing. What does: the rest of
  an overwritten record in front of them; a queue that has an offset again; or times that go on from
  the last record before a pause, in which the broker was down, while the pause ends before them.

Source: RocketMQ ``CommitLog.java``; sizes and magics from ``halfmq.store.format.record``.
"""

import re
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from halfmq.store.format.crc import crc32
from halfmq.store.format.record import (
    CRC_MASK,
    MAGIC_AT,
    MAGIC_BLANK,
    MAGIC_START,
    MAGIC_V1,
    MAGIC_V2,
    PREFIX,
    RECORD_SIZE_MIN,
)

from ..errors import LogDirectoryError
from .arrays import Ints
from .files import WINDOW, child, entries, exists, is_folder, open_content, parent
from .rows import Rows, SegmentBytes
from .walk import LANE_BYTES, record_bounds

BATCH_ROWS: Final = 65_536  # records decoded at once: enough to make numpy's fixed cost vanish
BATCH_BYTES: Final = 32 << 20  # and at most so many bytes: bounds a worker's memory
_REACH_GROWTH: Final = 4  # times as far as the last walk came, the next one may come
STALE_STEP_MIN: Final = 1_000  # ms; a restart takes longer, a clock correction is mostly smaller
CRASH_PACE_MAX: Final = 1_000  # ms; between two records of a broker that was busy when it fell
APPEND_SIZE_MAX: Final = 16 << 20  # bytes that a broker may be copying into the log in one go
SETTLE_PAUSE: Final = 0.02  # seconds
SETTLE_PAUSES: Final = 50  # a second in all, in which the broker gets its turn on a busy machine
RECORD_SIZE_MAX: Final = (4 << 20) + (64 << 10)  # bytes; RocketMQ's default limit for a record

_SEGMENT_NAME: Final = re.compile(r"\d{20}")
_OFFSET_END: Final = 1 << 62  # physical offsets have 64 bits, and are added to
_BLANK: Final = MAGIC_BLANK.to_bytes(4, "big")
UNWRITTEN: Final = "unwritten space where a record should be"
NOT_A_RECORD: Final = "bytes that are no record"
TORN: Final = "a record that was not written completely"


class Segment(NamedTuple):
    """One file of the log."""

    base: int  # physical offset of its first byte
    path: str
    size: int  # bytes

    @property
    def end(self) -> int:
        """The physical offset behind its last byte."""
        return self.base + self.size


class Hole(NamedTuple):
    """A range of a segment that holds no record; positions count from the segment's start."""

    position: int
    size: int
    reason: str | None  # None: the blank that properly ends the segment


class LogExtent(NamedTuple):
    """Which segments hold the log, and where its whole records end."""

    segments: tuple[Segment, ...]  # without a pre-allocated next one
    end_offset: int  # physical offset behind the last whole record
    tail: str | None  # what follows there, unless it is unwritten

    @property
    def first_offset(self) -> int:
        """The lowest offset that the log still holds."""
        return self.segments[0].base if self.segments else self.end_offset

    @property
    def size(self) -> int:
        """The bytes between the log's ends, with what may be missing between them."""
        return self.end_offset - self.first_offset

    def limit(self, segment: Segment) -> int:
        """Say how many bytes of the segment belong to the log: not what the next one has too."""
        following = bisect_right(self.segments, segment.base, key=lambda one: one.base)
        end = segment.end if following < len(self.segments) else self.end_offset
        if following < len(self.segments):
            end = min(end, self.segments[following].base)
        return end - segment.base


def find_segments(directory: str | Path) -> list[Segment]:
    """List the segments of a store root or of a folder of segments, in log order.

    Raises:
        LogDirectoryError: The directory cannot be read, or there is no segment in it.
    """
    root = str(directory)
    try:
        if not is_folder(root):
            reason = "is not a directory" if exists(root) else "no such directory"
            raise LogDirectoryError(root, reason)
        folder = child(root, "commitlog")
        folder = folder if is_folder(folder) else root
        segments = [
            Segment(int(entry.name), entry.path, entry.size)
            for entry in entries(folder, _SEGMENT_NAME)
            if not entry.is_folder and int(entry.name) < _OFFSET_END
        ]
    except OSError as error:
        place = str(error.filename or root)
        raise LogDirectoryError(place, error.strerror or str(error)) from error
    if not segments:
        reason = f"no commit-log segment (a file named by 20 digits) in {folder}"
        raise LogDirectoryError(root, reason)
    return sorted(segment for segment in segments if segment.size)


def survey(directory: str | Path, *, memory_map: bool = True) -> LogExtent:
    """Find the segments and the end of the log, by a walk through the last segment.

    The log of a store root may be empty: a broker that has just been started has one file of zeros.
    Its end is then where its first segment begins. A folder of segments without any record is more
    likely a copy that failed.

    Raises:
        LogDirectoryError: There is no segment, or one cannot be read; or there is no record in a
            directory that is no store root.
    """
    segments = find_segments(directory)
    first = segments[0].base if segments else 0
    while segments:
        last = segments[-1]
        reader = SegmentReader(last, last.size, memory_map=memory_map, keep=True)
        found = find_end(reader)
        if found.position:
            return LogExtent(tuple(segments), last.base + found.position, found.tail)
        segments.pop()  # pre-allocated, or just begun
    root = str(directory)
    if not is_folder(child(root, "commitlog")):
        reason = "its segments hold no record; of a broker without messages, name the store root"
        raise LogDirectoryError(root, reason)
    return LogExtent((), first, None)


class SegmentReader:
    """Walks one segment, of which the first ``limit`` bytes belong to the log.

    ``memory_map`` is for local files. What is not mapped is read in windows, and forgotten behind
    the walk unless ``keep``. A hole of more than ``search_max`` bytes is taken to reach to the end.
    """

    def __init__(
        self,
        segment: Segment,
        limit: int,
        *,
        memory_map: bool = True,
        keep: bool = False,
        search_max: int = _OFFSET_END,
    ) -> None:
        self.segment = segment
        self._limit = limit
        self._keep = keep
        self._search_max = search_max
        try:
            self._content = open_content(segment.path, limit, memory_map=memory_map)
        except (OSError, ValueError) as error:
            raise LogDirectoryError(segment.path, str(error)) from error
        self._map = self._content.mapped
        if len(self._map) < limit:
            raise LogDirectoryError(segment.path, "has become shorter while it was read")
        self._bytes = SegmentBytes(self._map, segment.base)

    def scan(
        self,
        start: int,
        stop: int,
        *,
        end: int | None = None,
        batch_rows: int = BATCH_ROWS,
        aligned: bool = False,
    ) -> Iterator[Rows | Hole]:
        """Give the records that start in [start, stop), and the holes between them, in order.

        A hole belongs to the record before it: a reader that starts behind the record's end
        searches, and cannot tell how far back the hole reaches. One that is told that ``start`` is
        where a record ends (``aligned``) need not search. ``end`` is where the range of all splits
        ends, if not with the segment; no hole is looked for behind it. Each ``Rows`` has at most
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
                position = int(rows.ends[-1])
            if position >= stop:
                break
            hole = self._hole(position)
            if hole is not None:
                yield hole
                position += hole.size
            reach = LANE_BYTES  # where one hole is there may be more
        if position < end and not self._is_start(position):
            hole = self._hole(position)
            if hole is not None:
                yield hole

    def _rows(self, position: int, stop: int, batch_rows: int, reach: int) -> Iterator[Rows]:
        """Read the whole records from here to ``stop``, or to something that is none.

        ``reach`` is how many bytes are walked through at first.
        """
        while position < stop:
            if not self._keep:
                self._content.release(position)
            walked = self._walk(position, min(stop, position + reach))
            for first in range(0, len(walked) - 1, batch_rows):
                bounds = walked[first : first + batch_rows + 1]
                rows = Rows(self._bytes, bounds[:-1], bounds[1:])
                sound = rows.sound_count()
                if sound < len(rows):
                    if sound:
                        yield Rows(self._bytes, bounds[:sound], bounds[1 : sound + 1])
                    return
                yield rows
            if len(walked) == 1:
                return
            # A walk that ended early would end there again, had it begun a little later.
            came = int(walked[-1]) - position
            reach = min(max(_REACH_GROWTH * came, LANE_BYTES), BATCH_BYTES)
            position += came

    def _walk(self, position: int, stop: int) -> Ints:
        """Step from size to size; see ``record_bounds``."""
        self._content.load(position, stop + RECORD_SIZE_MIN)
        bounds = record_bounds(self._bytes, position, stop, self._limit)
        self._content.load(position, int(bounds[-1]))
        return bounds

    def _hole(self, position: int) -> Hole | None:
        """Describe what is here instead of a record; None when it has just become one.

        A broker may be writing. It writes in order: if something further on is whole by now,
        then so is what stands here, unless it is damaged.
        """
        if self._is_blank(position):
            return Hole(position, self.segment.size - position, None)
        self._content.load(position, position + PREFIX.size)
        prefix = self._map[position : position + PREFIX.size]
        reason = NOT_A_RECORD if any(prefix) else UNWRITTEN
        following = self.next_start(position + 1)
        if self._is_start(position):
            return None
        return Hole(position, following - position, reason)

    def _is_start(self, position: int) -> bool:
        return self._is_record(position) or self._is_blank(position)

    def next_start(self, position: int) -> int:
        """Find the first record or blank at or behind ``position``, else the limit."""
        end = min(position + self._search_max, self._limit)
        found = self._find_blank(position, self._find_record(position, end))
        return found if found < end else self._limit

    def _find_record(self, position: int, end: int) -> int:
        at = position + MAGIC_AT
        while True:
            at = self._find(MAGIC_START, at, end)
            if at < 0:
                return end
            if self._is_record(at - MAGIC_AT):
                return at - MAGIC_AT
            at += 1

    def _find_blank(self, position: int, before: int) -> int:
        at = position + MAGIC_AT
        while True:
            at = self._find(_BLANK, at, before)
            if at < 0:
                return before
            if self._is_blank(at - MAGIC_AT):
                return at - MAGIC_AT
            at += 1

    def _find(self, wanted: bytes, start: int, end: int) -> int:
        """Return what ``find`` of the map does, loading what is looked at."""
        while start < end:
            stop = min(start + WINDOW, end)
            self._content.load(start, stop)
            at = self._find_loaded(wanted, start, stop)
            if at >= 0 or stop == end:
                return at
            start = stop - len(wanted) + 1
        return -1

    def _find_loaded(self, wanted: bytes, start: int, end: int) -> int:
        """Search without ``find`` being let to the map's last byte.

        Before CPython 3.11.5 it reads the byte behind what it is told, which may be no memory
        (python/cpython#105235).
        """
        last = len(self._map) - 1
        at = self._map.find(wanted, start, min(end, last))
        behind = last + 1 - len(wanted)
        if at < 0 and start <= behind and end > last and self._map[behind:] == wanted:
            return behind
        return at

    def _is_blank(self, position: int) -> bool:
        # A copy may have been trimmed behind the blank; its size still names the full segment.
        if position + PREFIX.size > self._limit:
            return False
        self._content.load(position, position + PREFIX.size)
        size, magic = PREFIX.unpack_from(self._map, position)
        return bool(magic == MAGIC_BLANK and position + size >= self.segment.size)

    def _is_record(self, position: int) -> bool:
        return self.record_at(position) is not None

    def record_at(self, position: int) -> Rows | None:
        """Return the record that begins at a position; None when none does."""
        bounds = self._walk(position, position + 1)
        rows = Rows(self._bytes, bounds[:-1], bounds[1:])
        return rows if len(rows) and rows.sound_count() else None

    def content(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end), as far as they belong to the file."""
        self._content.load(start, end)
        return memoryview(self._map)[start:end]

    def head(self, position: int) -> tuple[int, int]:
        """Read the size and magic at ``position``, zeros behind the end of the segment."""
        self._content.load(position, position + PREFIX.size)
        prefix = self._map[position : position + PREFIX.size].ljust(PREFIX.size, b"\0")
        size, magic = PREFIX.unpack(prefix)
        return size, magic


class Clocks(NamedTuple):
    """What the records up to some place say of the time."""

    stored: int  # ms, of the last one
    born: int  # ms, the highest


NO_CLOCKS: Final = Clocks(-(1 << 63), -(1 << 63))


class LogEnd(NamedTuple):
    """How far a segment's whole records go."""

    position: int  # behind the last of them
    tail: str | None = None  # what follows, unless it is unwritten
    clocks: Clocks = NO_CLOCKS  # up to there


NOTHING_KNOWN: Final = LogEnd(0)


def find_end(
    reader: SegmentReader, known: LogEnd = NOTHING_KNOWN, *, may_be_live: bool | None = None
) -> LogEnd:
    """Find where the last segment's whole records end.

    ``known`` is what an earlier search has said; what is in front of it is not looked at again.
    Whether a broker may be writing is told by its ``abort`` file, unless the caller knows.
    """
    if may_be_live is None:
        folder = parent(reader.segment.path)
        may_be_live = exists(child(parent(folder), "abort"))
    chunks, holes = _read_from(reader, known.position)
    pauses = SETTLE_PAUSES if may_be_live else 0  # counted: the reads may take longer than a second
    while pauses and _is_unsettled(chunks, holes):
        time.sleep(SETTLE_PAUSE)
        pauses -= 1
        chunks, holes = _read_from(reader, known.position)
    if known.position and chunks and len(_steps_back(chunks, known.clocks)):
        # Whether these records are left over is told by all that precedes them.
        return find_end(reader, may_be_live=False)
    return _end_of(reader, chunks, holes, known)


def _end_of(reader: SegmentReader, chunks: list[Rows], holes: list[Hole], known: LogEnd) -> LogEnd:
    size = reader.segment.size
    has_blank = bool(holes) and holes[-1].reason is None
    if not chunks:
        if has_blank or (not known.position and _is_garbage(reader)):
            return LogEnd(size, None, known.clocks)
        return known._replace(tail=_torn_at(known.position, holes))
    starts = np.concatenate([rows.starts for rows in chunks])
    ends = np.concatenate([rows.ends for rows in chunks])
    stored, born = _times(chunks)

    def end_behind(count: int, tail: str | None) -> LogEnd:
        if not count:
            return LogEnd(known.position or int(starts[0]), tail, known.clocks)
        highest = max(known.clocks.born, int(born[:count].max()))
        return LogEnd(int(ends[count - 1]), tail, Clocks(int(stored[count - 1]), highest))

    kept = len(starts)
    for place in _steps_back(chunks, known.clocks).tolist():
        follows = starts[place] == (ends[place - 1] if place else known.position)
        if not follows or _goes_back(chunks, place) or _goes_on_before_a_pause(stored, place):
            return end_behind(place, "older records, left from before the log was cut")
    if has_blank:
        return end_behind(kept, None)._replace(position=size)
    while kept and not _is_whole(chunks, kept - 1):
        kept -= 1
    found = end_behind(kept, TORN)
    # What was seen in passing counts: a broker may have written more since.
    is_torn = kept < len(starts) or _torn_at(found.position, holes) is not None
    return found if is_torn else found._replace(tail=None)


def _torn_at(position: int, holes: list[Hole]) -> str | None:
    is_torn = any(hole.position == position and hole.reason == NOT_A_RECORD for hole in holes)
    return TORN if is_torn else None


def _read_from(reader: SegmentReader, position: int) -> tuple[list[Rows], list[Hole]]:
    chunks: list[Rows] = []
    holes: list[Hole] = []
    for item in reader.scan(position, reader.segment.size, aligned=True):
        if isinstance(item, Rows):
            chunks.append(item)
        else:
            holes.append(item)
    return chunks, holes


def _is_unsettled(chunks: list[Rows], holes: list[Hole]) -> bool:
    """Tell whether a hole lies so near the end that a broker may be filling it right now."""
    if not chunks:
        return False
    end = int(chunks[-1].ends[-1])
    return any(h.reason and 0 < end - h.position <= APPEND_SIZE_MAX for h in holes)


def _is_garbage(reader: SegmentReader) -> bool:
    """Tell a segment full of something else from one whose first record is not yet whole."""
    size, magic = reader.head(0)
    begun = magic in {0, MAGIC_V1, MAGIC_V2} and 0 <= size <= RECORD_SIZE_MAX
    return not begun


def _times(chunks: list[Rows]) -> tuple[Ints, Ints]:
    """Return when records were stored and born, ms."""
    names = ("store_timestamp", "born_timestamp")
    stored, born = (np.concatenate([rows.field(name) for rows in chunks]) for name in names)
    return stored, born


def _steps_back(chunks: list[Rows], before: Clocks) -> Ints:
    """Find the records from which on all are older than what precedes them, by both clocks."""
    stored, born = _times(chunks)
    stored_later, born_later = _highest_behind(stored), _highest_behind(born)
    stored_before = np.concatenate([[before.stored], stored[:-1]])
    born_before = np.maximum.accumulate(np.concatenate([[before.born], born[:-1]]))
    return np.flatnonzero(
        (stored_later + STALE_STEP_MIN <= stored_before)
        & (born_later + STALE_STEP_MIN <= born_before)
    )


def _goes_back(chunks: list[Rows], place: int) -> bool:
    """Tell whether a queue has an offset again behind ``place``, counted over all chunks.

    Offset 0 proves nothing: a topic that was deleted and created anew begins with it.
    """
    highest: dict[tuple[str, int], int] = {}
    for rows in chunks:
        before, behind = np.split(np.arange(len(rows)), [max(place, 0)])
        for queue, slots in _slots_by_queue(rows.at(before)):
            highest[queue] = max(highest.get(queue, 0), int(slots.max()))
        for queue, slots in _slots_by_queue(rows.at(behind)):
            if 0 < slots[0] <= highest.pop(queue, 0):  # only the first one behind it counts
                return True
        place -= len(rows)
    return False


def _goes_on_before_a_pause(stored: Ints, place: int) -> bool:
    """Tell whether the records behind ``place`` were stored right before the broker was down."""
    first, last = stored[place:].min(), stored[place:].max()
    begins, ends = stored[: place - 1], stored[1:place]  # of what lies between two records
    return bool(
        (
            (begins <= first) & (first <= begins + CRASH_PACE_MAX) & (last + STALE_STEP_MIN <= ends)
        ).any()
    )


def _slots_by_queue(rows: Rows) -> Iterator[tuple[tuple[str, int], Ints]]:
    """Give the queue offsets of each queue, in log order."""
    rows = rows.queued()
    if not len(rows):
        return
    queue_ids, slots = rows.field("queue_id"), rows.field("queue_offset")
    numbers = rows.queue_numbers()
    order = np.argsort(numbers, kind="stable")
    bounds = np.flatnonzero(numbers[order][1:] != numbers[order][:-1]) + 1
    for own in np.split(order, bounds):
        topic = rows.topic_names[rows.topic_codes[own[0]]]
        yield (topic, int(queue_ids[own[0]])), slots[own]


def _highest_behind(values: Ints) -> Ints:
    """For each place, the highest value from there to the end."""
    highest: Ints = np.maximum.accumulate(values[::-1])[::-1]
    return highest


def _is_whole(chunks: list[Rows], index: int) -> bool:
    """Tell whether a record at the end of the log was written to its last byte.

    Its lengths fit already. Properties and topic have no CRC, but neither ends in a zero.
    """
    for rows in chunks:
        if index < len(rows):
            stored = int(rows.field("body_crc")[index])
            return rows.ends_written(index) and crc32(rows.body(index)) & CRC_MASK == stored
        index -= len(rows)
    raise IndexError(index)
