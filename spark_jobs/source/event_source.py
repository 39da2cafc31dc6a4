"""``spark.read.format("rocketmq-transactions")``: what a log says about transactions.

Each row is a record that is about a transaction, or one entry of an op record; columns are those of
``EVENT_COLUMNS``. Texts are hashes of 64 bits, so that millions of them can be grouped and compared
as numbers; who it was is told by ``rocketmq-commitlog`` at the same ``physicalOffset``.

An op names a half by its place in the half queue, and some records of halfmq's name one by its
physical offset alone. If that half lies in the same part of the log, the reader knows the ``key``;
else it is null, and a join with the halves tells it.

The audit reads the same rows by ``scan.py``, together with notes on what else there is in the log.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from ..errors import in_one_sentence
from ..log.arrays import Bools
from ..log.checksums import sound_records
from ..log.log_end import survey
from ..log.rows import Rows
from ..log.segment_reader import SegmentReader, SkippedRange
from ..log.segments import LogExtent
from ..log.transaction_parts import Part, all_parts
from .events import EVENT, HAS_KEY, NOTHING, BatchEvents, Halves, Records, read_events
from .options import EventOptions
from .schema import arrow_schema, as_asked, ddl
from .splits import SegmentSplit, parts_of, plan_partitions

EVENT_FORMAT: Final = "rocketmq-transactions"


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
        options = EventOptions.parse(self.options)
        extent = survey(options.path, memory_map=options.memory_map)
        return EventReader(schema, extent, options)


class EventReader(DataSourceReader):
    """Plans splits on the driver and reads them on the executors."""

    def __init__(self, schema: StructType, extent: LogExtent, options: EventOptions) -> None:
        self._schema = arrow_schema(schema, EVENT_COLUMNS)
        self._names = schema.names
        self._extent = extent
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return plan_partitions(self._extent, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return as_asked(self._read(partition), self._names)

    def _read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for split in parts_of(partition):
            for chunk in read_chunks(split, self._options):
                yield event_batch(self._schema, chunk.events, self._options)


class EventChunk(NamedTuple):
    """What a split holds in one place: records, or a range without; the last chunk has neither."""

    events: Records  # those whose half has been read; in the last chunk all others
    rows: Rows | None = None
    sound: Bools | None = None  # which of the rows match their CRC; None: not checked
    found: BatchEvents | None = None  # in the rows
    skipped: SkippedRange | None = None


def read_chunks(split: SegmentSplit, options: EventOptions) -> Iterator[EventChunk]:
    """Read the events of a split, each with its key if its half lies in the split."""
    halves = Halves()
    none = np.zeros(0, dtype=EVENT)
    waiting = [none]
    reader = SegmentReader(split.segment, split.limit, memory_map=options.memory_map)
    for item in reader.scan(split.start, split.stop, end=split.end):
        if not isinstance(item, Rows):
            yield EventChunk(none, skipped=item)
            continue
        sound = sound_records(item) if options.verify_crc else None
        found = _read_events(item, sound, options)
        halves.add(found.events)
        events = halves.link(found.events)
        waiting.append(events[~events[HAS_KEY]])
        yield EventChunk(events[events[HAS_KEY]], item, sound, found)
    yield EventChunk(halves.link(np.concatenate(waiting)))  # some may precede their half


def _read_events(rows: Rows, sound: Bools | None, options: EventOptions) -> BatchEvents:
    parts = all_parts(rows)
    if sound is None:  # op records are checked all the same
        is_op = parts == Part.OP
        sound = np.ones(len(rows), dtype=np.bool_)
        sound[is_op] = sound_records(rows.select(is_op))
    return read_events(rows, parts, sound, options.delay_levels)


def event_batch(schema: pa.Schema, events: Records, options: EventOptions) -> pa.RecordBatch:
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
