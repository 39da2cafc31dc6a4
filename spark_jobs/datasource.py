"""``spark.read.format("rocketmq-commitlog")``: a RocketMQ commit log as a DataFrame.

Each row is a message, or the blank that ends a segment, or a range of bytes that is no record
(``recordType`` tells). Columns are those of ``columns.py``; ask for few of them with
``.schema(ddl("topic", "physicalOffset"))``, because Spark does not tell a Python source which
columns a query uses. Options are those of ``options.py``.

The end of the log is looked for once per DataFrame, when Spark first plans it, so that a query
sees one state of a log that is being written; ``load`` again to see what was added.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from .columns import hole_batch, record_batch
from .errors import CorruptLogError
from .options import ReadOptions
from .rows import Rows
from .schema import arrow_schema, full_ddl
from .segments import Hole, LogExtent, Segment, SegmentReader, survey

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMAT: Final = "rocketmq-commitlog"
# Bytes behind a blank are undefined, so that a split should not begin there. A blank is written
# when a record does not fit, hence within the size of the largest record from the end.
_LAST_SPLIT_MIN: Final = 8 << 20


def register(spark: "SparkSession") -> None:
    """Make ``format("rocketmq-commitlog")`` known to a session."""
    spark.dataSource.register(CommitLogDataSource)


class SegmentSplit(NamedTuple):
    """A part of one segment that is read in one go; positions count from the segment's start."""

    segment: Segment
    start: int
    stop: int
    end: int  # where what is wanted ends in this segment
    limit: int  # where the log ends in it


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
        return full_ddl(ReadOptions.parse(self.options))

    def reader(self, schema: StructType) -> "CommitLogReader":
        return CommitLogReader(schema, ReadOptions.parse(self.options))


class CommitLogReader(DataSourceReader):
    """Plans splits on the driver and reads them on the executors."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._schema = arrow_schema(schema)
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return plan_partitions(survey(self._options.path), self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark replaces an empty list of partitions by one that says nothing.
        splits = partition.splits if isinstance(partition, LogPartition) else ()
        return chain.from_iterable(map(self._read, splits))

    def _read(self, split: SegmentSplit) -> Iterator[pa.RecordBatch]:
        reader = SegmentReader(split.segment, split.limit)
        rows_max = self._options.batch_rows
        for item in reader.scan(split.start, split.stop, end=split.end, batch_rows=rows_max):
            batch = self._rows(item) if isinstance(item, Rows) else self._hole(item, split.segment)
            if batch is not None:
                yield batch

    def _rows(self, rows: Rows) -> pa.RecordBatch | None:
        topics = self._options.subscribe
        if topics is not None:
            rows = rows.in_topics(topics)
        return record_batch(self._schema, rows, self._options.wanted) if len(rows) else None

    def _hole(self, hole: Hole, segment: Segment) -> pa.RecordBatch | None:
        if hole.reason is None and self._options.subscribe is not None:
            return None  # whoever asks for topics does not ask where files end
        if hole.reason is not None and self._options.fail_fast:
            offset = segment.base + hole.position
            raise CorruptLogError(segment.path, offset, hole.size, hole.reason)
        return hole_batch(self._schema, hole, segment)


def plan_partitions(extent: LogExtent, options: ReadOptions) -> list[LogPartition]:
    """Divide the wanted range of the log into partitions of at most ``maxPartitionBytes``."""
    first = max(extent.first_offset, options.starting_offsets or 0)
    last = extent.end_offset
    if options.ending_offsets is not None:
        last = min(last, options.ending_offsets)
    step = min(options.max_partition_bytes, max(1, -(-(last - first) // options.min_partitions)))
    partitions: list[LogPartition] = []
    room = 0
    for segment in extent.segments:
        limit = extent.limit(segment)
        end = min(last - segment.base, limit)
        for start, stop in _cut(max(first - segment.base, 0), end, step):
            if stop - start > room:
                partitions.append(LogPartition([]))
                room = step
            partitions[-1].splits.append(SegmentSplit(segment, start, stop, end, limit))
            room -= stop - start
    return partitions


def _cut(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        end = start + step
        if stop - end < min(step, _LAST_SPLIT_MIN):
            end = stop  # the rest is too small for a split of its own
        yield start, end
        start = end
