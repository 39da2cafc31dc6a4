"""Divides a log among tasks, and leaves out segments that no task needs."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from pyspark.sql.datasource import InputPartition

from ..log.segment_reader import SegmentReader
from ..log.segments import LogExtent, Segment
from .options import LogOptions, ReadOptions

# Bytes after a blank are undefined, so that a split should not begin there. A blank is written
# when a record does not fit, hence within the size of the largest record from the end.
_LAST_SPLIT_MIN: Final = 8 << 20
_CLOCK_STEP_MAX: Final = 600_000  # ms by which a broker's clock may be set back or forth


_Part = TypeVar("_Part")


class SegmentSplit(NamedTuple):
    """A part of one segment that is read in one go; positions count from the segment's start."""

    segment: Segment
    start: int
    stop: int
    end: int  # where what is wanted ends in this segment
    limit: int  # where the log ends in it
    aligned: bool = False  # a record ends where this starts


@dataclass
class Partition(InputPartition, Generic[_Part]):
    """What one task reads, in order."""

    parts: list[_Part]


def packed(parts: Iterable[tuple[_Part, int]], size_max: int) -> list[Partition[_Part]]:
    """Pack parts, of which the sizes are given, into partitions: a large one, or several."""
    partitions: list[Partition[_Part]] = []
    room = 0
    for part, size in parts:
        if size > room:
            partitions.append(Partition([]))
            room = size_max
        partitions[-1].parts.append(part)
        room -= size
    return partitions


def parts_of(partition: InputPartition) -> list[Any]:
    """Return what to read; Spark replaces an empty list of partitions by one that says nothing."""
    return partition.parts if isinstance(partition, Partition) else []


def plan_partitions(
    extent: LogExtent,
    options: LogOptions,
    *,
    aligned: bool = False,
    chosen: Collection[Segment] | None = None,
) -> list[Partition[SegmentSplit]]:
    """Divide the wanted range of the log into partitions of at most ``maxPartitionBytes``.

    ``aligned`` says that a record ends where the range starts; ``chosen`` are the segments that
    are needed, if not all are.
    """
    first = max(extent.first_offset, options.starting_offsets or 0)
    last = extent.end_offset
    if options.ending_offsets is not None:
        last = min(last, options.ending_offsets)
    step = options.partition_size(last - first)
    splits: list[tuple[SegmentSplit, int]] = []
    for segment in extent.segments:
        if chosen is not None and segment not in chosen:
            continue
        limit = extent.limit(segment)
        end = min(last - segment.base, limit)
        begin = max(first - segment.base, 0)
        for start, stop in cuts(begin, end, step):
            is_aligned = aligned and start == begin
            split = SegmentSplit(segment, start, stop, end, limit, is_aligned)
            splits.append((split, stop - start))
    return packed(splits, step)


def in_times(extent: LogExtent, options: ReadOptions) -> Collection[Segment] | None:
    """Choose the segments that may have records of the wanted time; None for all.

    Told by the first record of each segment: a log is written in the order of time, but for
    corrections of the broker's clock.
    """
    if not options.has_times:
        return None
    times = [_first_time(extent, segment, options) for segment in extent.segments]
    start, end = options.starting_timestamp, options.ending_timestamp
    chosen = set()
    for segment, first, following in zip(extent.segments, times, [*times[1:], None], strict=True):
        if start is not None and following is not None and following + _CLOCK_STEP_MAX < start:
            continue
        if end is not None and first is not None and first - _CLOCK_STEP_MAX >= end:
            continue
        chosen.add(segment)
    return chosen


def _first_time(extent: LogExtent, segment: Segment, options: ReadOptions) -> int | None:
    reader = SegmentReader(segment, extent.limit(segment), memory_map=options.memory_map)
    record = reader.record_at(0)
    return None if record is None else int(record.field("store_timestamp")[0])


def cuts(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut a range of a segment into splits of about ``step`` bytes."""
    while start < stop:
        end = start + step
        if stop - end < min(step, _LAST_SPLIT_MIN):
            end = stop  # the rest is too small for a split of its own
        yield start, end
        start = end
