"""Read splits of the commit log as rows: what batches and streams have in common."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from ..errors import CorruptLogError
from ..log.rows import Rows
from ..log.segment_reader import SegmentReader, SkippedRange
from ..log.segments import Segment
from .bodies import TooMuchError, unpacked
from .columns import range_batch, record_batch
from .options import ReadOptions
from .schema import arrow_schema, as_asked
from .splits import SegmentSplit, parts_of


class SplitReader:
    """Reads the splits that were planned for one partition."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._schema = arrow_schema(schema)
        self._names = schema.names
        has_bodies = "value" in self._schema.names
        self._options = options if has_bodies else replace(options, decompress=False)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return as_asked(chain.from_iterable(map(self._read, parts_of(partition))), self._names)

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
