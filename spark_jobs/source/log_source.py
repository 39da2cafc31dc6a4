"""``spark.read.format("rocketmq-commitlog")``: a RocketMQ commit log as a DataFrame.

``spark.readStream`` follows one that is being written; see ``stream.py``.

Each row is a message, or the blank that ends a segment, or a range of bytes that is no record
(``recordType`` tells). Columns are those of ``columns.py``; ask for few of them with
``.schema(ddl("topic", "physicalOffset"))``, because Spark does not tell a Python source which
columns a query uses. Options are those of ``options.py``.

The end of the log is looked for once per DataFrame, when Spark first plans it, so that a query
sees one state of a log that is being written; ``load`` again to see what was added.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.types import StructType

from ..errors import CorruptLogError, OptionError, in_one_sentence
from ..log.log_end import survey
from ..log.rows import Rows
from ..log.segment_reader import SegmentReader, SkippedRange
from ..log.segments import Segment
from .bodies import TooMuchError, unpacked
from .columns import range_batch, record_batch
from .options import ReadOptions
from .schema import arrow_schema, full_ddl
from .splits import SegmentSplit, in_times, parts_of, plan_partitions

FORMAT: Final = "rocketmq-commitlog"


class CommitLogDataSource(DataSource):
    """What Spark asks first: the name, the schema and a reader."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    @in_one_sentence
    def schema(self) -> str:
        return full_ddl(ReadOptions.parse(self.options))

    @in_one_sentence
    def reader(self, schema: StructType) -> "CommitLogReader":
        return CommitLogReader(schema, ReadOptions.parse_batch(self.options))

    @in_one_sentence
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        try:
            from .stream import CommitLogStreamReader  # noqa: PLC0415  from Spark 4.2 on
        except ImportError as error:
            raise OptionError("a stream of a commit log needs Spark 4.2 or newer") from error
        return CommitLogStreamReader(schema, ReadOptions.parse_stream(self.options))


class SplitReader:
    """Reads splits as rows; what batches and streams have in common."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._schema = arrow_schema(schema)
        has_bodies = "value" in self._schema.names
        self._options = options if has_bodies else replace(options, decompress=False)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return chain.from_iterable(map(self._read, parts_of(partition)))

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
                yield from self._skipped(item, split.segment)

    def _rows(self, rows: Rows, segment: Segment) -> Iterator[pa.RecordBatch]:
        rows = self._in_time(rows.select(rows.are_in(self._options.subscribe)))
        if not len(rows):
            return
        try:
            if self._options.decompress and self._options.fail_fast:
                self._demand_bodies(rows, segment)
            yield record_batch(self._schema, rows, self._options)
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
        for place, reason in unpacked(rows, self._options.bodies_of).errors.items():
            offset, size = int(rows.physical_offsets[place]), int(rows.sizes[place])
            raise CorruptLogError(segment.path, f"{size} bytes at offset {offset}: {reason}")

    def _skipped(self, skipped: SkippedRange, segment: Segment) -> Iterator[pa.RecordBatch]:
        is_chosen = self._options.subscribe is not None or self._options.has_times
        if skipped.reason is None and is_chosen:
            return  # whoever asks for topics or times does not ask where files end
        if skipped.reason is not None and self._options.fail_fast:
            offset = segment.base + skipped.position
            what = f"{skipped.size} bytes at offset {offset}"
            raise CorruptLogError(segment.path, what, skipped.reason)
        yield range_batch(self._schema, skipped, segment)


class CommitLogReader(SplitReader, DataSourceReader):
    """Plans splits on the driver and reads them on the executors."""

    @in_one_sentence
    def partitions(self) -> Sequence[InputPartition]:
        extent = survey(self._options.path, memory_map=self._options.memory_map)
        return plan_partitions(extent, self._options, chosen=in_times(extent, self._options))
