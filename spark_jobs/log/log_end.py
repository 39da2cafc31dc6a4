"""Find where the whole records of a log end; no Spark in here.

Only the last segment may end without a blank. ``survey`` finds the end once, so that all workers
agree on it even while a broker appends:

* what follows the last whole record and precedes unwritten space was never finished, and is not
  reported as damage; a last record whose body fails its CRC is such a one;
* of a group that is being copied into the log the first bytes may arrive last (memcpy does so);
  bytes that are no record near the end of a store that is open, or was not closed, are given a
  second to fill;
* a log that was cut (RocketMQ cuts without zeroing) and then written on can have old whole
  records after its true end. They are all older, by the broker's clock and by the producers', than
  what precedes them. Clocks are set back, too, so that alone proves nothing. What does: the rest of
  an overwritten record in front of them; a queue that has an offset again; or times that go on from
  the last record before a pause, in which the broker was down, while the pause ends before them.

Source: RocketMQ ``CommitLog.java``.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from halfmq.store.format.crc import crc32
from halfmq.store.format.record import CRC_MASK, MAGIC_V1, MAGIC_V2, PREFIX

from ..errors import LogDirectoryError
from .arrays import Ints
from .files import child, exists, is_folder, parent
from .rows import Rows
from .segment_reader import NOT_A_RECORD, SegmentReader, SkippedRange
from .segments import LogExtent, Segment, find_logs, find_segments

STALE_STEP_MIN: Final = 1_000  # ms; a restart takes longer, a clock correction is mostly smaller
CRASH_PACE_MAX: Final = 1_000  # ms; between two records of a broker that was busy when it fell
APPEND_SIZE_MAX: Final = 16 << 20  # bytes that a broker may be copying into the log in one go
SETTLE_PAUSE: Final = 0.02  # seconds
SETTLE_PAUSES: Final = 50  # a second in all, in which the broker gets its turn on a busy machine
RECORD_SIZE_MAX: Final = (4 << 20) + (64 << 10)  # bytes; RocketMQ's default limit for a record
TORN: Final = "a record that was not written completely"
_NONE: Final = np.zeros(0, dtype=np.int64)


def survey(directory: str | Path, *, memory_map: bool = True) -> LogExtent:
    """Find the segments and the end of a log by a walk through its last segment.

    The log of a store root may be empty: a broker that has just been started has one file of zeros.
    Its end is then where its first segment begins. A folder of segments without any record is more
    likely a copy that failed.

    Raises:
        LogDirectoryError: There is no segment, or one cannot be read; or there is no record in a
            directory that is no store root.
    """
    root = str(directory)
    extent = extent_of(find_segments(root), _ends(memory_map=memory_map))
    if not extent.segments and not is_folder(child(root, "commitlog")):
        reason = "its segments hold no record; of a broker without messages, name the store root"
        raise LogDirectoryError(root, reason)
    return extent


def surveys(paths: Iterable[str], *, memory_map: bool = True) -> list[LogExtent]:
    """Find the segments and the ends of several logs, as ``find_logs`` and ``survey`` do.

    Raises:
        LogDirectoryError: As of these.
    """
    known = list(paths)
    if len(known) == 1 and is_folder(known[0]):
        return [survey(known[0], memory_map=memory_map)]
    end_of = _ends(memory_map=memory_map)
    return [extent_of(segments, end_of) for segments in find_logs(known)]


def _ends(*, memory_map: bool) -> "Callable[[Segment], LogEnd]":
    return lambda segment: find_end(SegmentReader(segment, segment.size, memory_map=memory_map))


def extent_of(segments: list[Segment], end_of: "Callable[[Segment], LogEnd]") -> LogExtent:
    """Find the segments up to the last one in which ``end_of`` finds a record.

    Raises:
        LogDirectoryError: One cannot be read.
    """
    first = segments[0].base if segments else 0
    while segments:
        last = segments[-1]
        found = end_of(last)
        if found.position:
            return LogExtent(tuple(segments), last.base + found.position, found.tail)
        segments.pop()  # pre-allocated, or just begun
    return LogExtent((), first, None)


class Clocks(NamedTuple):
    """The store time and the highest born time up to some place."""

    stored: int  # ms, of the last one
    born: int  # ms, the highest


NO_CLOCKS: Final = Clocks(-(1 << 63), -(1 << 63))


class LogEnd(NamedTuple):
    """Where a segment's complete records end."""

    position: int  # after the last of them
    tail: str | None = None  # what follows, unless it is unwritten
    clocks: Clocks = NO_CLOCKS  # up to there


NOTHING_KNOWN: Final = LogEnd(0)


def find_end(
    reader: SegmentReader, known: LogEnd = NOTHING_KNOWN, *, may_be_live: bool | None = None
) -> LogEnd:
    """Find where the last segment's whole records end.

    ``known`` is what an earlier search has said; what is in front of it is not looked at again.
    By default a broker may be writing if its ``abort`` file is there.
    """
    if may_be_live is None:
        folder = parent(reader.segment.path)
        may_be_live = exists(child(parent(folder), "abort"))
    rows, skipped = _read_from(reader, known.position)
    pauses = SETTLE_PAUSES if may_be_live else 0  # counted: the reads may take longer than a second
    while pauses and _is_unsettled(rows, skipped):
        time.sleep(SETTLE_PAUSE)
        pauses -= 1
        rows, skipped = _read_from(reader, known.position)
    if known.position and len(_steps_back(rows, known.clocks)):
        # Whether these records are left over depends on all that precedes them.
        return find_end(reader, may_be_live=False)
    return _end_of(reader, rows, skipped, known)


def _end_of(
    reader: SegmentReader, rows: Rows, skipped: list[SkippedRange], known: LogEnd
) -> LogEnd:
    size = reader.segment.size
    has_blank = bool(skipped) and skipped[-1].reason is None
    if not len(rows):
        if has_blank or (not known.position and _is_garbage(reader)):
            return LogEnd(size, None, known.clocks)
        return known._replace(tail=_torn_at(known.position, skipped))
    stored, born = rows.field("store_timestamp"), rows.field("born_timestamp")

    def end_after(count: int, tail: str | None) -> LogEnd:
        if not count:
            return LogEnd(known.position or int(rows.starts[0]), tail, known.clocks)
        highest = max(known.clocks.born, int(born[:count].max()))
        return LogEnd(int(rows.ends[count - 1]), tail, Clocks(int(stored[count - 1]), highest))

    for place in _steps_back(rows, known.clocks).tolist():
        follows = rows.starts[place] == (rows.ends[place - 1] if place else known.position)
        if not follows or _goes_back(rows, place) or _goes_on_before_a_pause(stored, place):
            return end_after(place, "older records, left from before the log was cut")
    kept = len(rows)
    if has_blank:
        return end_after(kept, None)._replace(position=size)
    while kept and not _is_whole(rows.at(np.array([kept - 1]))):
        kept -= 1
    found = end_after(kept, TORN)
    # What was seen in passing counts: a broker may have written more since.
    is_torn = kept < len(rows) or _torn_at(found.position, skipped) is not None
    return found if is_torn else found._replace(tail=None)


def _torn_at(position: int, skipped: list[SkippedRange]) -> str | None:
    is_torn = any(one.position == position and one.reason == NOT_A_RECORD for one in skipped)
    return TORN if is_torn else None


def _read_from(reader: SegmentReader, position: int) -> tuple[Rows, list[SkippedRange]]:
    bounds: list[tuple[Ints, Ints]] = [(_NONE, _NONE)]
    skipped: list[SkippedRange] = []
    for item in reader.scan(position, reader.segment.size, aligned=True):
        if isinstance(item, Rows):
            bounds.append((item.starts, item.ends))
        else:
            skipped.append(item)
    starts, ends = map(np.concatenate, zip(*bounds, strict=True))
    return Rows(reader.bytes, starts, ends), skipped


def _is_unsettled(rows: Rows, skipped: list[SkippedRange]) -> bool:
    """Tell whether a range near the end may be one that a broker is filling right now."""
    if not len(rows):
        return False
    return any(one.reason and 0 < rows.end - one.position <= APPEND_SIZE_MAX for one in skipped)


def _is_garbage(reader: SegmentReader) -> bool:
    """Tell whether a segment holds other data, and not a first record that is being written."""
    prefix = bytes(reader.content(0, PREFIX.size)).ljust(PREFIX.size, b"\0")
    size, magic = PREFIX.unpack(prefix)
    begun = magic in {0, MAGIC_V1, MAGIC_V2} and 0 <= size <= RECORD_SIZE_MAX
    return not begun or (magic != 0 and _is_followed(reader, size))


def _is_followed(reader: SegmentReader, size: int) -> bool:
    """Tell whether one record follows another: then these are whole, and of another log."""
    prefix = bytes(reader.content(size, size + PREFIX.size)).ljust(PREFIX.size, b"\0")
    return bool(PREFIX.unpack(prefix)[1] in {MAGIC_V1, MAGIC_V2})


def _steps_back(rows: Rows, before: Clocks) -> Ints:
    """Find the places after which every record is older than those before, by both clocks."""
    if not len(rows):
        return _NONE
    stored, born = rows.field("store_timestamp"), rows.field("born_timestamp")
    stored_later, born_later = _highest_after(stored), _highest_after(born)
    stored_before = np.concatenate([[before.stored], stored[:-1]])
    born_before = np.maximum.accumulate(np.concatenate([[before.born], born[:-1]]))
    return np.flatnonzero(
        (stored_later + STALE_STEP_MIN <= stored_before)
        & (born_later + STALE_STEP_MIN <= born_before)
    )


def _goes_back(rows: Rows, place: int) -> bool:
    """Tell whether a queue has an offset again after ``place``: its first one there is known.

    Offset 0 proves nothing: a topic that was deleted and created anew begins with it.
    """
    before, after = np.split(np.arange(len(rows)), [place])
    highest = {queue: slots.max() for queue, slots in _slots_by_queue(rows.at(before))}
    return any(
        0 < slots[0] <= highest.get(queue, 0) for queue, slots in _slots_by_queue(rows.at(after))
    )


def _goes_on_before_a_pause(stored: Ints, place: int) -> bool:
    """Tell whether the records after ``place`` were stored right before the broker was down."""
    first, last = stored[place:].min(), stored[place:].max()
    begins, ends = stored[: place - 1], stored[1:place]  # of what lies between two records
    return bool(
        (
            (begins <= first) & (first <= begins + CRASH_PACE_MAX) & (last + STALE_STEP_MIN <= ends)
        ).any()
    )


def _slots_by_queue(rows: Rows) -> Iterator[tuple[tuple[str, int], Ints]]:
    """Yield the queue offsets of each queue, in log order."""
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


def _highest_after(values: Ints) -> Ints:
    """For each place, the highest value from there to the end."""
    highest: Ints = np.maximum.accumulate(values[::-1])[::-1]
    return highest


def _is_whole(record: Rows) -> bool:
    """Tell whether a record at the end of the log was written to its last byte.

    Its lengths fit already. Properties and topic have no CRC, but neither ends in a zero.
    """
    stored = int(record.field("body_crc")[0])
    return record.ends_written(0) and crc32(record.body(0)) & CRC_MASK == stored
