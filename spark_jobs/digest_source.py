"""The source of the audit: reads splits of a log and gives their digests instead of their records.

Inside only: ``digested`` is the way in. The options carry what the driver has already found out, so
that no worker has to look for the end of the log again.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from .datasource import LogPartition, SegmentSplit, plan_partitions
from .digest import DDL, Digest, Plan
from .options import PARTITION_BYTES, ReadOptions
from .rows import Rows
from .segments import LogExtent, Segment, SegmentReader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT: Final = "rocketmq-commitlog-digest"


def digested(
    spark: "SparkSession",
    extent: LogExtent,
    plan: Plan,
    *,
    partitions: int = 1,
    partition_bytes: int = PARTITION_BYTES,
) -> "DataFrame":
    """Read a log as the rows of its splits' digests; columns as in ``digest.SCHEMA``.

    ``partitions`` is how many there should be at least.
    """
    spark.dataSource.register(DigestDataSource)
    return (
        spark.read.format(FORMAT)
        .option("extent", json.dumps(extent))
        .option("plan", json.dumps(plan))
        .option("partitions", str(partitions))
        .option("partitionBytes", str(partition_bytes))
        .load()
    )


class DigestDataSource(DataSource):
    """What Spark asks first: the name, the schema and a reader."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return DDL

    def reader(self, schema: StructType) -> "DigestReader":
        return DigestReader(self.options)


class DigestReader(DataSourceReader):
    """Plans splits on the driver and digests them on the executors."""

    def __init__(self, options: Mapping[str, str]) -> None:
        segments, *rest = json.loads(options["extent"])
        self._extent = LogExtent(tuple(Segment(*segment) for segment in segments), *rest)
        self._plan = Plan(*json.loads(options["plan"]))
        self._options = ReadOptions(
            path="",
            min_partitions=int(options["partitions"]),
            max_partition_bytes=int(options["partitionBytes"]),
        )

    def partitions(self) -> Sequence[InputPartition]:
        return plan_partitions(self._extent, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark replaces an empty list of partitions by one that says nothing.
        for split in partition.splits if isinstance(partition, LogPartition) else ():
            yield from self._digest(split)

    def _digest(self, split: SegmentSplit) -> Iterator[pa.RecordBatch]:
        digest = Digest(split.segment, self._plan)
        reader = SegmentReader(split.segment, split.limit)
        for item in reader.scan(split.start, split.stop, end=split.end):
            if isinstance(item, Rows):
                digest.take(item)
            else:
                digest.take_hole(item)
        yield from digest.batches()
