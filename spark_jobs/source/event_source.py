"""``spark.read.format("rocketmq-transactions")``: what a log says about transactions.

Each row is a record that is about a transaction, or one entry of an op record; columns are those of
``EVENT_COLUMNS``. Texts are hashes of 64 bits, so that millions of them can be grouped and compared
as numbers; who it was is told by ``rocketmq-commitlog`` at the same ``physicalOffset``.

An op names a half by its place in the half queue, and some records of halfmq's name one by its
physical offset alone. If that half lies in the same part of the log, the reader knows the ``key``;
else it is null, and a join with the halves tells it.

With the column ``notes``, which only ``.schema`` names, there are also rows that have nothing but
notes on what else there is in the log: see ``scan.py``. So an audit reads a log once.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from ..errors import in_one_sentence
from ..log.log_end import surveys
from .events import EVENT, HAS_KEY, NOTHING, Records
from .options import LogOptions
from .pushdown import narrowed
from .scan import NOTES_TYPE, Note, notes_of, read_chunks
from .schema import arrow_schema, as_asked, ddl
from .splits import SegmentSplit, parts_of, plan_partitions

EVENT_FORMAT: Final = "rocketmq-transactions"
NOTES: Final = "notes"


class EventColumn(NamedTuple):
    """A field of ``EVENT`` as a column."""

    spark_type: str


_TYPES: Final = {"u8": "bigint", "i8": "bigint", "i4": "int", "i1": "tinyint", "b1": "boolean"}
EVENT_COLUMNS: Final = {
    name: EventColumn(_TYPES[EVENT[name].str[1:]]) for name in EVENT.names or () if name != HAS_KEY
}
_NULLABLE: Final = (
    "halfOffset",
    "halfQueueOffset",
    "checkTimes",
    "halfId",
)  # NOTHING in it is null


class TransactionDataSource(DataSource):
    """What Spark asks first: the name, the schema and a reader."""

    @classmethod
    def name(cls) -> str:
        return EVENT_FORMAT

    def schema(self) -> str:
        return ddl(*EVENT_COLUMNS, columns=EVENT_COLUMNS)

    @in_one_sentence
    def reader(self, schema: StructType) -> "EventReader":
        return EventReader(schema, LogOptions.parse_batch(self.options))

    @in_one_sentence
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        from .stream import EventStreamReader  # noqa: PLC0415  from Spark 4.2 on

        return EventStreamReader(schema, LogOptions.parse_stream(self.options))


class EventSplitReader:
    """Reads the splits that were planned for one partition."""

    def __init__(self, schema: StructType, options: LogOptions) -> None:
        self._schema = arrow_schema(schema, {**EVENT_COLUMNS, NOTES: EventColumn(NOTES_TYPE)})
        self._names = schema.names
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for split in parts_of(partition):
            yield from as_asked(self._read(split), self._names)

    def _read(self, split: SegmentSplit) -> Iterator[pa.RecordBatch]:
        has_notes = NOTES in self._schema.names
        for chunk in read_chunks(split, self._options):
            yield event_batch(self._schema, chunk.events, self._options)
            if not has_notes:
                continue
            notes = [*notes_of(chunk, split.segment.base, self._options.delay_levels)]
            if notes:
                yield self._notes_batch(notes)

    def _notes_batch(self, notes: list[Note]) -> pa.RecordBatch:
        values = {name: [notes if name == NOTES else None] for name in self._schema.names}
        return pa.RecordBatch.from_pydict(values, schema=self._schema)


class EventReader(EventSplitReader, DataSourceReader):
    """Plans splits on the driver and reads them on the executors."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        if NOTES not in self._schema.names:  # notes are about the log as a whole
            self._options = narrowed(self._options, filters)
        return filters

    @in_one_sentence
    def partitions(self) -> Sequence[InputPartition]:
        extents = surveys(self._options.places, memory_map=self._options.memory_map)
        return [one for extent in extents for one in plan_partitions(extent, self._options)]


def event_batch(schema: pa.Schema, events: Records, options: LogOptions) -> pa.RecordBatch:
    """Return the columns of ``schema``; null where it has a column that events do not."""
    arrays = [
        _column(field.name, events, verified=options.verify_crc)
        if field.name in EVENT_COLUMNS
        else pa.nulls(len(events), field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(name: str, events: Records, *, verified: bool) -> pa.Array:
    if name == "crcOk" and not verified:
        return pa.nulls(len(events), pa.bool_())
    values: npt.NDArray[np.generic] = events[name].copy()
    if values.dtype == np.uint64:
        values = values.view(np.int64)
    is_null = ~events[HAS_KEY] if name == "key" else None
    if name in _NULLABLE:
        is_null = values == NOTHING
    return pa.array(values, mask=is_null)
