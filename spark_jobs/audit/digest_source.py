"""The source of the audit: reads splits of a log and gives their digests instead of their records.

Inside only: ``digested`` is the way in. The options carry what the driver has already found out, so
that no worker has to look for the end of the log again.

With a cache (``audit_cache.py``) full segments are cut at fixed places, so that an entry fits
however long the log has become, and only those without an entry are read.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from halfmq.store.format.topics import HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC

from ..log.follow import part_of
from ..log.rows import Rows
from ..log.segments import LogExtent, Segment, SegmentReader
from ..source.columns import COLUMNS, Wanted, record_batch
from ..source.options import PARTITION_BYTES, ReadOptions
from ..source.schema import NAME_COLUMNS
from ..source.splits import LogPartition, SegmentSplit, cuts, plan_partitions
from .audit_cache import AuditCache, Cached, Part
from .digest import DDL, Plan, Seen, Watch, digest

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
        if self._plan.cache is None:
            return plan_partitions(self._extent, self._options)
        full, rest = full_segments(self._extent)
        return [*_whole(full, self._extent, self._options), *plan_partitions(rest, self._options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark replaces an empty list of partitions by one that says nothing.
        for split in partition.splits if isinstance(partition, LogPartition) else ():
            yield from self._digest(split)

    def _digest(self, split: SegmentSplit) -> Iterator[pa.RecordBatch]:
        plan = self._plan
        if plan.cache is None or split.segment not in full_segments(self._extent)[0]:
            seen, _ = self._scan(split)
            yield from digest(seen, plan, scanned=split.stop - split.start)
            return
        cache = AuditCache(plan.cache)
        part = Part(split.segment, split.start, split.stop, split.limit)
        known = cache.load(part, verify_crc=plan.verify_crc)
        scanned = 0
        if known is None:
            known = self._scan_for(cache, part, split)
            scanned = split.stop - split.start
        yield from digest(known.seen, plan, scanned=scanned, names=known.names)

    def _scan_for(self, cache: AuditCache, part: Part, split: SegmentSplit) -> Cached:
        seen, names = self._scan(split, with_names=True)
        return cache.store(part, seen, names, verify_crc=self._plan.verify_crc)

    def _scan(self, split: SegmentSplit, *, with_names: bool = False) -> tuple[Seen, pa.Table]:
        """Read a split; return what was seen, and the names of halves as a table."""
        watch = Watch(
            split.segment,
            verify_crc=self._plan.verify_crc,
            # What is kept may be compared with consume queues by a later audit.
            with_tags=with_names or self._plan.queues is not None,
        )
        names = []
        reader = SegmentReader(split.segment, split.limit)
        for item in reader.scan(split.start, split.stop, end=split.end):
            if isinstance(item, Rows):
                watch.take(item)
                if with_names:
                    names.append(record_batch(NAMES, item.in_topics(NAMED_TOPICS), Wanted()))
            else:
                watch.take_hole(item)
        return watch.seen(), pa.Table.from_batches(names, schema=NAMES)


NAMES: Final = pa.schema([pa.field(name, COLUMNS[name].arrow_type) for name in NAME_COLUMNS])
NAMED_TOPICS: Final = frozenset({HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC})


def full_segments(extent: LogExtent) -> tuple[tuple[Segment, ...], LogExtent]:
    """Divide a log into the segments that nothing can be added to, and the rest."""
    segments = extent.segments
    if not segments or extent.end_offset >= segments[-1].end:
        return segments, part_of(extent, extent.end_offset, extent.end_offset)
    return segments[:-1], part_of(extent, segments[-1].base, extent.end_offset)


def _whole(
    segments: Sequence[Segment], extent: LogExtent, options: ReadOptions
) -> Iterator[LogPartition]:
    """Cut full segments at places that depend on nothing but themselves."""
    limits = [extent.limit(segment) for segment in segments]
    share = min(PARTITION_BYTES, -(-sum(limits) // options.min_partitions))
    splits: list[SegmentSplit] = []
    room = share
    for segment, limit in zip(segments, limits, strict=True):
        for start, stop in cuts(0, limit, PARTITION_BYTES):
            if splits and stop - start > room:
                yield LogPartition(splits)
                splits, room = [], share
            splits.append(SegmentSplit(segment, start, stop, limit, limit))
            room -= stop - start
    if splits:
        yield LogPartition(splits)
