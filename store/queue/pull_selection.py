"""Select the messages of a pull: from queue entries to ranges of the log.

Entries are read once and neighbours in the log become one range, so that a pull of messages that
were stored together is one read. Source: RocketMQ ``DefaultMessageStore.java``
(``getMessage``).
"""

from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate, compress
from operator import add, ne, sub
from typing import Final

import msgspec
import numpy as np

from ..format.filler import FILLER_TAGS_CODE, FILLER_TAGS_CODE_LOW
from ..format.queue_entry import (
    ENTRY_SIZE,
    FILTERED,
    FILTERED_DTYPE,
    PHYSICAL_OFFSET,
    PRE_BLANK,
    offsets_of,
    sizes_of,
    tags_codes_of,
    unpack_entry,
)
from ..format.record import Range
from .consume_queue import ConsumeQueue

SCAN_COUNT_MAX: Final = 800  # entries examined in one pull; RocketMQ's limit of 16 000 bytes
_FAST_COUNT_MAX: Final = 64  # entries unpacked in one step; twice what clients request
# Bytes of entries from which on numpy is faster than a loop; few follow in a caught-up queue.
_BULK_SIZE_MIN: Final = 100 * ENTRY_SIZE
_TABLE: Final = np.dtype(list(FILTERED_DTYPE))

# Marks a filler if it is a tags code; elsewhere it may occur by chance, which only costs time.
_FILLER_MARK: Final = FILLER_TAGS_CODE.to_bytes(8, "big")


class GetStatus(Enum):
    """The result of a pull, with RocketMQ's names."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"  # only messages that the filter excludes
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"  # only messages that retention has deleted
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"  # a file of the queue is gone
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"  # greater than the next offset
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"  # nothing new
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"  # before the first offset
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"  # there is no such queue
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"  # the queue is empty
    NOT_IN_MEMORY = "NOT_IN_MEMORY"  # only internal: the entries must be read from disk
    ARCHIVED = "ARCHIVED"  # only internal: the first message is not here, but in the archive


_FOUND: Final = GetStatus.FOUND  # looking up an enum member takes 70 ns


class GetResult(msgspec.Struct, gc=False):
    """The messages of a pull as ranges of the log."""

    status: GetStatus
    next_offset: int  # queue offset of the next pull
    min_offset: int
    max_offset: int  # queue offset after the last visible message
    ranges: list[Range]  # in queue order; neighbours in the log are one
    count: int  # messages
    size: int  # bytes


def select(
    queue: ConsumeQueue | None,
    offset: int,
    *,
    readable_offset: int,
    log_start: int,
    max_count: int,
    max_bytes: int,
    tag_codes: frozenset[int] | None,
    wait: bool = True,
    archived_from: int | None = None,
) -> GetResult:
    """Select up to ``max_count`` messages from a queue offset on; at least one if there is one.

    Without ``wait`` nothing is read from disk. ``archived_from`` is the queue offset from which on
    an archive has what is not here.
    """
    if queue is None:
        return GetResult(GetStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0, [], 0, 0)
    low, high = queue.min_offset, queue.visible_end(readable_offset)
    if archived_from is not None:
        if archived_from <= offset < low:
            return GetResult(GetStatus.ARCHIVED, offset, archived_from, high, [], 0, 0)
        low = archived_from
    if not low <= offset < high:
        status, following = _outside(offset, low, high, queue.next_offset)
        return GetResult(status, following, low, high, [], 0, 0)
    max_count = max(max_count, 1)
    count = min(max_count, high - offset, SCAN_COUNT_MAX)
    read = queue.entries if wait else queue.cached_entries
    try:
        if count <= _FAST_COUNT_MAX:
            found = read(offset, count)
            if found is None:
                return GetResult(GetStatus.NOT_IN_MEMORY, offset, low, high, [], 0, 0)
            sizes = sizes_of(count).unpack(found)
            size = sum(sizes)
            (start,) = PHYSICAL_OFFSET.unpack_from(found)
            # The fast path: all entries pass. A blank entry has a size above any limit, or zero.
            # Other fields are unpacked only if needed, because creating the numbers takes as
            # long as everything else here.
            if (
                size <= max_bytes
                and start >= log_start
                and (tag_codes is None or tag_codes.issuperset(tags_codes_of(count).unpack(found)))
                and all(sizes)
                and _FILLER_MARK not in found
            ):
                (last,) = PHYSICAL_OFFSET.unpack_from(found, (count - 1) * ENTRY_SIZE)
                if last + sizes[-1] - start == size:
                    ranges = [(start, size)]  # the sizes fill the span, so all are neighbours
                else:
                    ranges = _merged(offsets_of(count).unpack(found), sizes)
                return GetResult(_FOUND, offset + count, low, high, ranges, count, size)
        entries = read(offset, min(high - offset, SCAN_COUNT_MAX))
    except FileNotFoundError:
        following = queue.next_file_offset(offset)
        return GetResult(GetStatus.OFFSET_FOUND_NULL, following, low, high, [], 0, 0)
    if entries is None:
        return GetResult(GetStatus.NOT_IN_MEMORY, offset, low, high, [], 0, 0)
    # The queue begins a little later than the log when old files are deleted.
    if archived_from is not None and PHYSICAL_OFFSET.unpack_from(entries)[0] < log_start:
        return GetResult(GetStatus.ARCHIVED, offset, low, high, [], 0, 0)
    limits = offset, low, high, log_start, max_count, max_bytes
    if tag_codes and len(entries) >= _BULK_SIZE_MIN:
        result = _with_tags(entries, *limits, tag_codes)
        if result is not None:
            return result
    return walk(entries, *limits, tag_codes)


def _with_tags(
    entries: bytes,
    offset: int,
    low: int,
    high: int,
    log_start: int,
    max_count: int,
    max_bytes: int,
    tag_codes: frozenset[int],
) -> GetResult | None:
    """Select the entries with one of the tags in bulk, as ``walk`` does one by one.

    None if there is none, or some of them are of lost or deleted messages.
    """
    table = np.frombuffer(entries, _TABLE)
    codes = table["tags_code"]
    wanted = codes == next(iter(tag_codes)) if len(tag_codes) == 1 else np.isin(codes, [*tag_codes])
    numbers = np.flatnonzero(wanted)
    if not len(numbers) or FILLER_TAGS_CODE_LOW in tag_codes:
        return None
    chosen = table[numbers[:max_count]]
    sizes = chosen["size"].tolist()
    starts = chosen["physical_offset"].tolist()
    if starts[0] < log_start or min(sizes) <= 0 or max(sizes) >= PRE_BLANK.size:
        return None
    count = bisect_right(list(accumulate(sizes)), max_bytes) or 1
    following = offset + int(numbers[count]) if count < len(numbers) else offset + len(table)
    sizes = sizes[:count]
    ranges = _merged(starts[:count], sizes)
    return GetResult(_FOUND, following, low, high, ranges, count, sum(sizes))


def _merged(starts: Sequence[int], sizes: Sequence[int]) -> list[Range]:
    """Return the ranges of messages at ascending offsets.

    Without a loop in Python, which would take as long as everything else here.
    """
    ends = tuple(map(add, starts, sizes))
    following = starts[1:]
    breaks = tuple(map(ne, following, ends))
    begins = (starts[0], *compress(following, breaks))
    lengths = map(sub, (*compress(ends, breaks), ends[-1]), begins)
    return list(zip(begins, lengths, strict=True))


def _is_filler(entries: bytes, number: int) -> bool:
    """Return whether an entry is a filler; the hash of a tag may equal its lower half."""
    return unpack_entry(entries, number * ENTRY_SIZE).tags_code == FILLER_TAGS_CODE


def _outside(offset: int, low: int, high: int, stored: int) -> tuple[GetStatus, int]:
    """Return the status of a queue offset without a message, and the next offset.

    Messages from ``high`` to ``stored`` are not visible yet. A consumer may have seen them already,
    if the broker was restarted and waits for its slave; it waits, too.
    """
    if high < offset <= stored:
        return GetStatus.OFFSET_OVERFLOW_ONE, offset
    if high == 0:
        return GetStatus.NO_MESSAGE_IN_QUEUE, 0
    if offset < low:
        return GetStatus.OFFSET_TOO_SMALL, low
    if offset == high:
        return GetStatus.OFFSET_OVERFLOW_ONE, offset
    return GetStatus.OFFSET_OVERFLOW_BADLY, high


def walk(
    entries: bytes,
    offset: int,
    low: int,
    high: int,
    log_start: int,
    max_count: int,
    max_bytes: int,
    tag_codes: frozenset[int] | None,
) -> GetResult:
    """Select messages one by one, of the entries from a queue offset on."""
    ranges: list[Range] = []
    count = size = 0
    start = end = -1
    removed = 0
    looked_at = 0
    for physical_offset, message_size, code in FILTERED.iter_unpack(entries):
        if code == FILLER_TAGS_CODE_LOW and _is_filler(entries, looked_at):
            pass  # the message is lost
        elif physical_offset < log_start or message_size <= 0 or message_size == PRE_BLANK.size:
            removed += 1
        elif tag_codes is None or code in tag_codes:
            if count and (size + message_size > max_bytes or count >= max_count):
                break
            if physical_offset != end:
                if count:
                    ranges.append((start, end - start))
                start = physical_offset
            end = physical_offset + message_size
            count += 1
            size += message_size
        looked_at += 1
    following = offset + looked_at
    if count:
        ranges.append((start, end - start))
        return GetResult(_FOUND, following, low, high, ranges, count, size)
    all_removed = removed == looked_at
    status = GetStatus.MESSAGE_WAS_REMOVING if all_removed else GetStatus.NO_MATCHED_MESSAGE
    return GetResult(status, following, low, high, [], 0, 0)
