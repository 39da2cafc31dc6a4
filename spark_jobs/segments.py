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
  records behind its true end. They are told by their clocks: the records behind the cut are all
  older, by the broker's clock and by the producers', than those before it.

Source: RocketMQ ``CommitLog.java``; sizes and magics from ``halfmq.store.format.record``.
"""

import mmap
import re
import struct
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from halfmq.store.format.record import CRC_MASK, MAGIC_BLANK, MAGIC_V1, MAGIC_V2, PREFIX

from .errors import LogDirectoryError
from .rows import RECORD_SIZE_MIN, Rows, SegmentBytes

BATCH_ROWS: Final = 65_536  # records decoded at once: enough to make numpy's fixed cost vanish
BATCH_BYTES: Final = 32 << 20  # and at most so many bytes: bounds a worker's memory
STALE_STEP_MIN: Final = 1_000  # ms; a restart takes longer, a clock correction is mostly smaller
APPEND_SIZE_MAX: Final = 16 << 20  # bytes that a broker may be copying into the log in one go
SETTLE_TIME: Final = 1.0  # seconds that it may take, not running for most of them
SETTLE_PAUSE: Final = 0.02  # seconds
RECORD_SIZE_MAX: Final = (4 << 20) + (64 << 10)  # bytes; RocketMQ's default limit for a record

_SEGMENT_NAME: Final = re.compile(r"\d{20}")
_OFFSET_END: Final = 1 << 62  # physical offsets have 64 bits, and are added to
_MAGIC_START: Final = MAGIC_V1.to_bytes(4, "big")[:3]  # what the magics of V1 and V2 share
_BLANK: Final = MAGIC_BLANK.to_bytes(4, "big")
_PREFIX_SIZE: Final = PREFIX.size  # total size and magic
UNWRITTEN: Final = "unwritten space where a record should be"
NOT_A_RECORD: Final = "bytes that are no record"

assert MAGIC_V2.to_bytes(4, "big")[:3] == _MAGIC_START


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
    root = Path(directory)
    try:
        if not root.is_dir():
            reason = "is not a directory" if root.exists() else "no such directory"
            raise LogDirectoryError(str(root), reason)
        folder = root / "commitlog" if (root / "commitlog").is_dir() else root
        files = [path for path in folder.iterdir() if _is_segment(path)]
        segments = [Segment(int(path.name), str(path), path.stat().st_size) for path in files]
    except OSError as error:
        place = str(error.filename or root)
        raise LogDirectoryError(place, error.strerror or str(error)) from error
    if not segments:
        reason = f"no commit-log segment (a file named by 20 digits) in {folder}"
        raise LogDirectoryError(str(root), reason)
    return sorted(segment for segment in segments if segment.size)


def _is_segment(path: Path) -> bool:
    """Tell by its name; folders do not count, nor do numbers that are no offset."""
    named = bool(_SEGMENT_NAME.fullmatch(path.name)) and int(path.name) < _OFFSET_END
    return named and not path.is_dir()


def survey(directory: str | Path) -> LogExtent:
    """Find the segments and the end of the log, by a walk through the last segment.

    Raises:
        LogDirectoryError: There is no segment, or one cannot be read.
    """
    segments = find_segments(directory)
    while segments:
        last = segments[-1]
        live = Path(last.path).parent.with_name("abort").exists()
        end, tail = _find_end(SegmentReader(last, last.size), may_be_live=live)
        if end:
            return LogExtent(tuple(segments), last.base + end, tail)
        segments.pop()  # pre-allocated, or just begun
    return LogExtent((), 0, None)


class SegmentReader:
    """Walks one segment, of which the first ``limit`` bytes belong to the log."""

    def __init__(self, segment: Segment, limit: int) -> None:
        self.segment = segment
        self._limit = limit
        try:
            with Path(segment.path).open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise LogDirectoryError(segment.path, str(error)) from error
        if len(self._map) < limit:
            raise LogDirectoryError(segment.path, "has become shorter while it was read")
        self._bytes = SegmentBytes(self._map, segment.base)

    def scan(
        self, start: int, stop: int, *, end: int | None = None, batch_rows: int = BATCH_ROWS
    ) -> Iterator[Rows | Hole]:
        """Give the records that start in [start, stop), and the holes between them, in order.

        A hole belongs to the record before it: a reader that starts behind the record's end
        searches, and cannot tell how far back the hole reaches. ``end`` is where the range of all
        splits ends, if not with the segment; no hole is looked for behind it. Each ``Rows`` has at
        most ``batch_rows`` records and about ``BATCH_BYTES`` bytes.
        """
        stop = min(stop, self._limit)
        end = self._limit if end is None else min(end, self._limit)
        position = self._next_start(start) if start else 0
        if position >= stop:
            return
        while position < stop:
            rows, position = self._rows(position, stop, batch_rows)
            if rows:
                yield rows
                continue
            hole = self._hole(position)
            if hole is not None:
                yield hole
                position += hole.size
        if stop <= position < end and not self._is_start(position):
            hole = self._hole(position)
            if hole is not None:
                yield hole

    def _rows(self, position: int, stop: int, batch_rows: int) -> tuple[Rows | None, int]:
        """Read whole records from here; None when here is none."""
        positions, end = self._walk(position, stop, batch_rows)
        if not positions:
            return None, position
        bounds = np.array([*positions, end], dtype=np.int64)
        rows = Rows(self._bytes, bounds[:-1], bounds[1:])
        sound = rows.sound_count()
        if sound < len(rows):
            end = int(bounds[sound])
            rows = Rows(self._bytes, bounds[:sound], bounds[1 : sound + 1])
        return (rows if sound else None), end

    def _walk(self, position: int, stop: int, batch_rows: int) -> tuple[list[int], int]:
        """Step from size to size; this loop is the only one in Python that sees every record."""
        unpack = struct.Struct(">iI").unpack_from  # local: a module's Struct cannot be shipped
        buffer, limit = self._map, self._limit
        last = min(stop, position + BATCH_BYTES, limit - _PREFIX_SIZE + 1)
        positions: list[int] = []
        add = positions.append
        for _ in range(batch_rows):
            if position >= last:
                break
            size, magic = unpack(buffer, position)
            if magic not in (MAGIC_V1, MAGIC_V2):
                break
            if size < RECORD_SIZE_MIN or position + size > limit:
                break
            add(position)
            position += size
        return positions, position

    def _hole(self, position: int) -> Hole | None:
        """Describe what is here instead of a record; None when it has just become one.

        A broker may be writing. It writes in order: if something further on is whole by now,
        then so is what stands here, unless it is damaged.
        """
        if self._is_blank(position):
            return Hole(position, self.segment.size - position, None)
        prefix = self._map[position : position + _PREFIX_SIZE]
        reason = NOT_A_RECORD if any(prefix) else UNWRITTEN
        following = self._next_start(position + 1)
        if self._is_start(position):
            return None
        return Hole(position, following - position, reason)

    def _is_start(self, position: int) -> bool:
        return self._is_record(position) or self._is_blank(position)

    def _next_start(self, position: int) -> int:
        """Find the first record or blank at or behind ``position``, else the limit."""
        record = self._find_record(position)
        return self._find_blank(position, record)

    def _find_record(self, position: int) -> int:
        at = position + 4
        while True:
            at = self._find(_MAGIC_START, at, self._limit)
            if at < 0:
                return self._limit
            if self._is_record(at - 4):
                return at - 4
            at += 1

    def _find_blank(self, position: int, before: int) -> int:
        at = position + 4
        while True:
            at = self._find(_BLANK, at, before)
            if at < 0:
                return before
            if self._is_blank(at - 4):
                return at - 4
            at += 1

    def _find(self, wanted: bytes, start: int, end: int) -> int:
        """Return what ``find`` of the map does, which must not be let to the map's last byte.

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
        if position + _PREFIX_SIZE > self._limit:
            return False
        size, magic = struct.unpack_from(">iI", self._map, position)
        return bool(magic == MAGIC_BLANK and position + size >= self.segment.size)

    def _is_record(self, position: int) -> bool:
        return self.record_at(position) is not None

    def record_at(self, position: int) -> Rows | None:
        """Return the record that begins at a position; None when none does."""
        positions, end = self._walk(position, position + 1, 1)
        if not positions:
            return None
        bounds = np.array([position, end], dtype=np.int64)
        rows = Rows(self._bytes, bounds[:1], bounds[1:])
        return rows if rows.sound_count() else None

    def head(self, position: int) -> tuple[int, int]:
        """Read the size and magic at ``position``, zeros behind the end of the segment."""
        prefix = self._map[position : position + _PREFIX_SIZE].ljust(_PREFIX_SIZE, b"\0")
        size, magic = struct.unpack(">iI", prefix)
        return size, magic


def _find_end(reader: SegmentReader, *, may_be_live: bool) -> tuple[int, str | None]:
    """Find where the last segment's whole records end, and what follows unless it is unwritten."""
    size = reader.segment.size
    deadline = time.monotonic() + SETTLE_TIME
    chunks, holes = _read_segment(reader)
    while may_be_live and _is_unsettled(chunks, holes) and time.monotonic() < deadline:
        time.sleep(SETTLE_PAUSE)
        chunks, holes = _read_segment(reader)
    if holes and holes[-1].reason is None and not chunks:
        return size, None
    if not chunks:
        return (size, None) if _is_garbage(reader) else (0, None)
    starts = np.concatenate([rows.starts for rows in chunks])
    ends = np.concatenate([rows.ends for rows in chunks])
    kept = _count_before_stale(chunks)
    if kept < len(starts):
        return int(ends[kept - 1]), "older records, left from before the log was cut"
    if holes and holes[-1].reason is None:
        return size, None
    while kept and not _is_whole(chunks, kept - 1):
        kept -= 1
    end = int(ends[kept - 1]) if kept else int(starts[0])
    # What was seen in passing counts: a broker may have written more since.
    torn = kept < len(starts) or any(
        hole.position == end and hole.reason == NOT_A_RECORD for hole in holes
    )
    return end, "a record that was not written completely" if torn else None


def _read_segment(reader: SegmentReader) -> tuple[list[Rows], list[Hole]]:
    chunks: list[Rows] = []
    holes: list[Hole] = []
    for item in reader.scan(0, reader.segment.size):
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


def _count_before_stale(chunks: list[Rows]) -> int:
    """Count the records before the place from which on all are older than what precedes them."""
    stored = np.concatenate([rows.field("store_timestamp") for rows in chunks])
    born = np.concatenate([rows.field("born_timestamp") for rows in chunks])
    stored_later = _highest_behind(stored)
    born_later = _highest_behind(born)
    born_before = np.maximum.accumulate(born)
    steps = np.flatnonzero(
        (stored_later[1:] + STALE_STEP_MIN <= stored[:-1])
        & (born_later[1:] + STALE_STEP_MIN <= born_before[:-1])
    )
    return int(steps[0]) + 1 if len(steps) else len(stored)


def _highest_behind(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each place, the highest value from there to the end."""
    highest: npt.NDArray[np.int64] = np.maximum.accumulate(values[::-1])[::-1]
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
