"""The source of the queue comparison: a log as ranges of queue offsets, see ``log/ranges.py``.

Inside only: ``read_ranges`` is the way in. The options carry what the driver has already found
out, so that no worker has to look for the end of the log again.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from ..log.arrays import Ints, from_numpy, texts
from ..log.ranges import queue_ranges, stretches
from ..log.rows import Rows
from ..log.segments import LogExtent, Segment, SegmentReader
from .options import ReadOptions
from .splits import LogPartition, plan_partitions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FORMAT: Final = "rocketmq-ranges"
# Without a topic, a row is a stretch of the log, and has times; else a range of a queue.
_NUMBERS: Final = (
    "offset",  # queue offset of the first record
    "endOffset",  # and behind the last one
    "physicalOffset",  # of the first record
    "lastPhysicalOffset",
    "records",
    "sum",  # over the entries that a consume queue should have
    "time",  # ms, when the first record was stored
    "lastTime",
)
_DDL: Final = "topic string, partition int, " + ", ".join(f"`{name}` bigint" for name in _NUMBERS)
_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        *(pa.field(name, pa.int64()) for name in _NUMBERS),
    ]
)


def read_ranges(spark: "SparkSession", extent: LogExtent, *, partitions: int = 1) -> "DataFrame":
    """Read a log as ranges of its queues, and as stretches of its own."""
    spark.dataSource.register(_RangeSource)
    return (
        spark.read.format(_FORMAT)
        .option("extent", json.dumps(extent))
        .option("partitions", str(partitions))
        .load()
    )


class _RangeSource(DataSource):
    """What Spark asks first: the name, the schema and a reader."""

    @classmethod
    def name(cls) -> str:
        return _FORMAT

    def schema(self) -> str:
        return _DDL

    def reader(self, schema: StructType) -> "_RangeReader":
        return _RangeReader(self.options)


class _RangeReader(DataSourceReader):
    """Plans splits on the driver and reads them on the executors."""

    def __init__(self, options: Mapping[str, str]) -> None:
        segments, *rest = json.loads(options["extent"])
        self._extent = LogExtent(tuple(Segment(*segment) for segment in segments), *rest)
        self._options = ReadOptions(path="", min_partitions=int(options["partitions"]))

    def partitions(self) -> Sequence[InputPartition]:
        return plan_partitions(self._extent, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark replaces an empty list of partitions by one that says nothing.
        for split in partition.splits if isinstance(partition, LogPartition) else ():
            reader = SegmentReader(split.segment, split.limit)
            for item in reader.scan(split.start, split.stop, end=split.end):
                if isinstance(item, Rows):
                    queued = item.queued()
                    if len(queued):
                        yield _of_queues(queued)
                    yield _of_log(item)


def _of_queues(queued: Rows) -> pa.RecordBatch:
    found = queue_ranges(queued)
    topics = texts(queued.topic_names).take(from_numpy(found.codes, pa.int32()))
    numbers = [found.starts, found.ends, found.at, found.last_at, found.records, found.sums]
    return _batch(topics, found.queues, numbers, [])


def _of_log(rows: Rows) -> pa.RecordBatch:
    found = np.array(stretches(rows), dtype=np.int64)
    at, last_at, records, time, last_time = found.T
    nothing = np.zeros(len(found), dtype=np.int64)
    topics = pa.nulls(len(found), pa.string())
    numbers = [nothing, nothing, at, last_at, records, nothing]
    return _batch(topics, nothing, numbers, [time, last_time])


def _batch(
    topics: pa.Array, queues: Ints, numbers: list[Ints], times: list[Ints]
) -> pa.RecordBatch:
    columns = [from_numpy(values, pa.int64()) for values in (*numbers, *times)]
    columns += [pa.nulls(len(queues), pa.int64())] * (2 - len(times))
    arrays = [topics, from_numpy(queues.astype(np.int32), pa.int32()), *columns]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
