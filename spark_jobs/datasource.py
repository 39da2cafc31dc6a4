"""``spark.read.format("rocketmq-commitlog")``: a RocketMQ commit log as a DataFrame.

``spark.readStream`` follows one that is being written; see ``stream.py``.

Each row is a message, or the blank that ends a segment, or a range of bytes that is no record
(``recordType`` tells). Columns are those of ``columns.py``; ask for few of them with
``.schema(ddl("topic", "physicalOffset"))``, because Spark does not tell a Python source which
columns a query uses. Options are those of ``options.py``.

The end of the log is looked for once per DataFrame, when Spark first plans it, so that a query
sees one state of a log that is being written; ``load`` again to see what was added.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.types import StructType

from .errors import CorruptLogError, OptionError
from .log.bodies import TooMuchError, unpacked
from .log.rows import Rows
from .log.segments import Hole, LogExtent, Segment, SegmentReader, survey
from .source.columns import hole_batch, record_batch
from .source.options import ReadOptions
from .source.queue_source import ConsumeQueueDataSource
from .source.schema import arrow_schema, full_ddl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMAT: Final = "rocketmq-commitlog"
# Bytes behind a blank are undefined, so that a split should not begin there. A blank is written
# when a record does not fit, hence within the size of the largest record from the end.
_LAST_SPLIT_MIN: Final = 8 << 20
_CLOCK_STEP_MAX: Final = 600_000  # ms by which a broker's clock may be set back or forth


def register(spark: "SparkSession") -> None:
    """Make the formats ``rocketmq-commitlog`` and ``rocketmq-consumequeue`` known to a session."""
    spark.dataSource.register(CommitLogDataSource)
    spark.dataSource.register(ConsumeQueueDataSource)


class SegmentSplit(NamedTuple):
    """A part of one segment that is read in one go; positions count from the segment's start."""

    segment: Segment
    start: int
    stop: int
    end: int  # where what is wanted ends in this segment
    limit: int  # where the log ends in it
    aligned: bool = False  # a record ends where this starts


@dataclass
class LogPartition(InputPartition):
    """What one task reads: a part of a large segment, or several small segments."""

    splits: list[SegmentSplit]


class CommitLogDataSource(DataSource):
    """What Spark asks first: the name, the schema and a reader."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return full_ddl(ReadOptions.parse_any(self.options))

    def reader(self, schema: StructType) -> "CommitLogReader":
        options = ReadOptions.parse(self.options)
        if options.filter_pushdown:
            # A reader that takes filters makes queries fail unless Spark was told to push them.
            from .source.pushdown import PushdownCommitLogReader  # noqa: PLC0415

            return PushdownCommitLogReader(schema, options)
        return CommitLogReader(schema, options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        try:
            from .source.stream import CommitLogStreamReader  # noqa: PLC0415  from Spark 4.2 on
        except ImportError as error:
            raise OptionError("a stream of a commit log needs Spark 4.2 or newer") from error
        return CommitLogStreamReader(schema, ReadOptions.parse_stream(self.options))


class SplitReader:
    """Reads splits as rows; what batches and streams have in common."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._schema = arrow_schema(schema)
        self._options = options
        wanted = options.wanted
        if "value" not in self._schema.names:
            wanted = replace(wanted, decompress=False)
        self._wanted = wanted

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark replaces an empty list of partitions by one that says nothing.
        splits = partition.splits if isinstance(partition, LogPartition) else ()
        return chain.from_iterable(map(self._read, splits))

    def _read(self, split: SegmentSplit) -> Iterator[pa.RecordBatch]:
        options = self._options
        reader = SegmentReader(split.segment, split.limit, memory_map=options.memory_map)
        for item in reader.scan(
            split.start,
            split.stop,
            end=split.end,
            batch_rows=options.batch_rows,
            aligned=split.aligned,
        ):
            if isinstance(item, Rows):
                yield from self._rows(item, split.segment)
            else:
                yield from self._hole(item, split.segment)

    def _rows(self, rows: Rows, segment: Segment) -> Iterator[pa.RecordBatch]:
        topics = self._options.subscribe
        if topics is not None:
            rows = rows.in_topics(topics)
        rows = self._in_time(rows)
        if not len(rows):
            return
        try:
            if self._wanted.decompress and self._options.fail_fast:
                self._demand_bodies(rows, segment)
            yield record_batch(self._schema, rows, self._wanted)
        except TooMuchError:
            for half in np.array_split(np.arange(len(rows)), 2):
                yield from self._rows(rows.at(half), segment)

    def _in_time(self, rows: Rows) -> Rows:
        if not self._options.has_times or not len(rows):
            return rows
        stored = rows.field("store_timestamp")
        start, end = self._options.starting_timestamp, self._options.ending_timestamp
        wanted = stored >= (0 if start is None else start)
        return rows.select(wanted if end is None else wanted & (stored < end))

    def _demand_bodies(self, rows: Rows, segment: Segment) -> None:
        for place, reason in unpacked(rows, self._wanted.value_topics).errors.items():
            offset, size = int(rows.physical_offsets[place]), int(rows.sizes[place])
            raise CorruptLogError(segment.path, offset, size, reason)

    def _hole(self, hole: Hole, segment: Segment) -> Iterator[pa.RecordBatch]:
        is_chosen = self._options.subscribe is not None or self._options.has_times
        if hole.reason is None and is_chosen:
            return  # whoever asks for topics or times does not ask where files end
        if hole.reason is not None and self._options.fail_fast:
            offset = segment.base + hole.position
            raise CorruptLogError(segment.path, offset, hole.size, hole.reason)
        yield hole_batch(self._schema, hole, segment)


class CommitLogReader(SplitReader, DataSourceReader):
    """Plans splits on the driver and reads them on the executors."""

    def partitions(self) -> Sequence[InputPartition]:
        extent = survey(self._options.path, memory_map=self._options.memory_map)
        return plan_partitions(extent, self._options, chosen=in_times(extent, self._options))


def plan_partitions(
    extent: LogExtent,
    options: ReadOptions,
    *,
    aligned: bool = False,
    chosen: Collection[Segment] | None = None,
) -> list[LogPartition]:
    """Divide the wanted range of the log into partitions of at most ``maxPartitionBytes``.

    ``aligned`` says that a record ends where the range starts; ``chosen`` are the segments that
    are needed, if not all are.
    """
    first = max(extent.first_offset, options.starting_offsets or 0)
    last = extent.end_offset
    if options.ending_offsets is not None:
        last = min(last, options.ending_offsets)
    step = min(options.max_partition_bytes, max(1, -(-(last - first) // options.min_partitions)))
    partitions: list[LogPartition] = []
    room = 0
    for segment in extent.segments:
        if chosen is not None and segment not in chosen:
            continue
        limit = extent.limit(segment)
        end = min(last - segment.base, limit)
        begin = max(first - segment.base, 0)
        for start, stop in cuts(begin, end, step):
            if stop - start > room:
                partitions.append(LogPartition([]))
                room = step
            is_aligned = aligned and start == begin
            split = SegmentSplit(segment, start, stop, end, limit, is_aligned)
            partitions[-1].splits.append(split)
            room -= stop - start
    return partitions


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
    for segment, first, behind in zip(extent.segments, times, [*times[1:], None], strict=True):
        if start is not None and behind is not None and behind + _CLOCK_STEP_MAX < start:
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
