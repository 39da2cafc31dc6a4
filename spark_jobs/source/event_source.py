"""``spark.read.format("rocketmq-transactions")``: what a log says about transactions.

Each row is a record that is about a transaction, or one entry of an op record; columns are those of
``EVENT_COLUMNS``. Texts are hashes of 64 bits, so that millions of them can be grouped and compared
as numbers; who it was is told by ``rocketmq-commitlog`` at the same ``physicalOffset``.

An op names a half by its place in the half queue, and some records of halfmq's name one by its
physical offset alone. If that half lies in the same part of the log, the reader knows the ``key``;
else it is null, and a join with the halves tells it.

The audit reads a log by ``read_scan``: the same rows, and between them others that have nothing but
``notes`` on what else there is in the log (``NOTE``). So a log is read once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from ..errors import in_one_sentence
from ..log.arrays import Bools, Ints, booleans, from_numpy, texts
from ..log.checksums import sound_records
from ..log.log_end import survey
from ..log.ranges import queue_ranges, smoothed, stretches
from ..log.rows import Rows
from ..log.segment_reader import SegmentReader
from ..log.segments import LogExtent
from .events import EVENT, NOTHING, Halves, Records, Told, read_events
from .options import PARTITION_BYTES, ReadOptions
from .parts import Part, all_parts
from .python import use_this_python
from .schema import arrow_schema, ddl
from .splits import LogPartition, SegmentSplit, plan_partitions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENT_FORMAT: Final = "rocketmq-transactions"


@dataclass(frozen=True, slots=True)
class EventColumn:
    """One column, made of a field of ``EVENT``; NOTHING in it is null."""

    spark_type: str
    arrow_type: pa.DataType
    field: str
    has_nulls: bool = False


_LONG: Final = ("bigint", pa.int64())
_INT: Final = ("int", pa.int32())
_BOOLEAN: Final = ("boolean", pa.bool_())

EVENT_COLUMNS: Final[dict[str, EventColumn]] = {
    "key": EventColumn(*_LONG, "key", has_nulls=True),
    "part": EventColumn("tinyint", pa.int8(), "part"),
    "physicalOffset": EventColumn(*_LONG, "at"),
    "halfOffset": EventColumn(*_LONG, "reference", has_nulls=True),
    "halfQueueOffset": EventColumn(*_LONG, "slot", has_nulls=True),
    "time": EventColumn(*_LONG, "time"),
    "dueTime": EventColumn(*_LONG, "due"),
    "checkTimes": EventColumn(*_INT, "checks", has_nulls=True),
    "number": EventColumn(*_INT, "number"),
    "total": EventColumn(*_INT, "total"),
    "crcOk": EventColumn(*_BOOLEAN, "sound", has_nulls=True),
    "size": EventColumn(*_INT, "size"),
    "topicHash": EventColumn(*_LONG, "topic"),
    "partition": EventColumn(*_INT, "queue"),
    "tagsHash": EventColumn(*_LONG, "tags"),
    "keysHash": EventColumn(*_LONG, "keys"),
    "bodyCrc": EventColumn(*_INT, "body_crc"),
    "bodySize": EventColumn(*_INT, "body_size"),
    "label": EventColumn(*_LONG, "label"),
}


class Note(NamedTuple):
    """Something that is in the log beside transactions; each kind uses some of the fields."""

    what: str  # a constant below
    topic: str | None = None
    text: str | None = None
    partition: int = 0
    offset: int = 0
    endOffset: int = 0  # noqa: N815  the names are those of columns
    physicalOffset: int = 0  # noqa: N815
    lastPhysicalOffset: int = 0  # noqa: N815
    records: int = 0
    sum: int = 0
    time: int = 0
    lastTime: int = 0  # noqa: N815


QUEUE: Final = "queue"  # a range of a queue, see ``log/ranges.py``
STRETCH: Final = "stretch"  # records in a row; ``sum`` are their bytes
HOLE: Final = "hole"  # [physicalOffset, lastPhysicalOffset) holds no record; ``text`` says what
UNSOUND: Final = "unsound"  # a record that does not match its CRC
UNREAD_OP: Final = "unread op"  # an op record with something that is no queue offset
MARK: Final = "mark"  # which broker wrote: ``records`` is 1 for halfmq, ``sum`` for a final
LABEL: Final = "label"  # ``offset`` stands for the producer group ``text`` and the topic
EVENTS: Final = "events"  # of a part of the log: ``records`` have no key; when they were stored

_NOTES_DDL: Final = (
    "notes array<struct<what: string, topic: string, text: string, partition: int, "
    + ", ".join(f"{name}: bigint" for name in Note._fields[4:])
    + ">>"
)
_NOTE: Final = pa.struct(
    [
        *(pa.field(name, pa.string()) for name in Note._fields[:3]),
        pa.field("partition", pa.int32()),
        *(pa.field(name, pa.int64()) for name in Note._fields[4:]),
    ]
)
_NOTES: Final = pa.list_(pa.field("element", _NOTE))


class TransactionDataSource(DataSource):
    """What Spark asks first: the name, the schema and a reader."""

    @classmethod
    def name(cls) -> str:
        return EVENT_FORMAT

    def schema(self) -> str:
        return ddl(*EVENT_COLUMNS, columns=EVENT_COLUMNS)

    @in_one_sentence
    def reader(self, schema: StructType) -> "EventReader":
        options = ReadOptions.parse_events(self.options)
        extent = survey(options.path, memory_map=options.memory_map)
        return EventReader(arrow_schema(schema, EVENT_COLUMNS), extent, options)


class EventReader(DataSourceReader):
    """Plans splits on the driver and reads them on the executors."""

    def __init__(
        self,
        schema: pa.Schema,
        extent: LogExtent,
        options: ReadOptions,
        *,
        with_notes: bool = False,
    ) -> None:
        self._schema = schema
        self._extent = extent
        self._options = options
        self._with_notes = with_notes

    def partitions(self) -> Sequence[InputPartition]:
        return plan_partitions(self._extent, self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark replaces an empty list of partitions by one that says nothing.
        for split in partition.splits if isinstance(partition, LogPartition) else ():
            yield from self._read(split)

    def _read(self, split: SegmentSplit) -> Iterator[pa.RecordBatch]:
        halves = Halves()
        left = [np.zeros(0, dtype=EVENT)]
        labels: set[int] = set()
        times: list[int] = []
        reader = SegmentReader(split.segment, split.limit, memory_map=self._options.memory_map)
        for item in reader.scan(split.start, split.stop, end=split.end):
            if not isinstance(item, Rows):
                if item.reason is not None:
                    start = split.segment.base + item.position
                    yield from self._notes([_hole(start, item.size, item.reason)])
                continue
            sound = sound_records(item) if self._options.verify_crc else None
            told = _told(item, sound)
            halves.add(told.events)
            times += _span(told.events["time"])
            events = halves.link(told.events)
            left.append(events[~events["is_known"]])
            yield self._events(events[events["is_known"]])
            if self._with_notes:
                yield from self._notes(_about_events(told, labels))
                yield from self._about_records(item, sound)
        events = halves.link(np.concatenate(left))  # some may precede their half
        yield self._events(events)
        if times:
            keyless = int((~events["is_known"]).sum())
            note = Note(EVENTS, records=keyless, time=min(times), lastTime=max(times))
            yield from self._notes([note])

    def _events(self, events: Records) -> pa.RecordBatch:
        arrays = []
        for field in self._schema:
            column = EVENT_COLUMNS.get(field.name)
            if column is None:
                arrays.append(pa.nulls(len(events), field.type))
            else:
                arrays.append(_column(column, events, verified=self._options.verify_crc))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _notes(self, notes: list[Note]) -> Iterator[pa.RecordBatch]:
        if notes and self._with_notes:
            columns = [
                _array(values, field.type)
                for values, field in zip(zip(*notes, strict=True), _NOTE, strict=True)
            ]
            yield self._batch_of_notes(pa.StructArray.from_arrays(columns, fields=list(_NOTE)))

    def _about_records(self, rows: Rows, sound: Bools | None) -> Iterator[pa.RecordBatch]:
        yield from self._notes(
            [
                Note(
                    STRETCH,
                    physicalOffset=one.at,
                    lastPhysicalOffset=one.last_at,
                    records=one.records,
                    sum=one.size,
                    time=one.time,
                    lastTime=one.last_time,
                )
                for one in stretches(rows)
            ]
        )
        if sound is not None and not sound.all():
            places = rows.physical_offsets[~sound].tolist()
            yield from self._notes([Note(UNSOUND, physicalOffset=at) for at in places])
        queued = rows.queued()
        if len(queued):
            yield self._queue_ranges(queued)

    def _queue_ranges(self, queued: Rows) -> pa.RecordBatch:
        found = queue_ranges(queued)
        zeros = np.zeros(len(found.codes), dtype=np.int64)
        numbers = (found.starts, found.ends, found.at, found.last_at, found.records, found.sums)
        columns = [
            texts([QUEUE]).take(from_numpy(zeros, pa.int64())),
            texts(queued.topic_names).take(from_numpy(found.codes, pa.int32())),
            pa.nulls(len(zeros), pa.string()),
            from_numpy(found.queues.astype(np.int32), pa.int32()),
            *(from_numpy(values, pa.int64()) for values in (*numbers, zeros, zeros)),
        ]
        return self._batch_of_notes(pa.StructArray.from_arrays(columns, fields=list(_NOTE)))

    def _batch_of_notes(self, notes: pa.StructArray) -> pa.RecordBatch:
        bounds = from_numpy(np.array([0, len(notes)], dtype=np.int32), pa.int32())
        listed = pa.ListArray.from_arrays(bounds, notes, type=_NOTES)
        arrays = [
            listed if field.type == _NOTES else pa.nulls(1, field.type) for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _told(rows: Rows, sound: Bools | None) -> Told:
    parts = all_parts(rows)
    is_op = parts == Part.OP
    sound_ops = sound_records(rows.select(is_op)) if sound is None else sound[is_op]
    whole = np.ones(len(rows), dtype=np.bool_) if sound is None else sound
    return read_events(rows, parts, whole, sound_ops)


def _column(column: EventColumn, events: Records, *, verified: bool) -> pa.Array:
    values: npt.NDArray[np.generic] = events[column.field].copy()
    if column.field == "key":
        return from_numpy(values, column.arrow_type, events["is_known"])
    if column.field == "sound":
        return booleans(values.astype(np.bool_)) if verified else pa.nulls(len(events), pa.bool_())
    valid = values != NOTHING if column.has_nulls else None
    return from_numpy(values, column.arrow_type, valid)


def _span(times: Ints) -> list[int]:
    """Say from when to when records were stored; a single one with a wrong time is not believed."""
    smooth = smoothed(times)
    return [int(smooth.min()), int(smooth.max())] if len(times) else []


def _hole(start: int, size: int, reason: str) -> Note:
    return Note(HOLE, text=reason, physicalOffset=start, lastPhysicalOffset=start + size)


def _about_events(told: Told, labels: set[int]) -> list[Note]:
    notes = [Note(UNREAD_OP, physicalOffset=at) for at in told.unread_ops.tolist()]
    notes += [
        Note(MARK, physicalOffset=at, records=is_ours, sum=is_final)
        for at, is_ours, is_final in told.marks.tolist()
    ]
    for label, (group, topic) in told.labels.items():
        if label not in labels:
            labels.add(label)
            signed = int(np.uint64(label).astype(np.int64))
            notes.append(Note(LABEL, topic=topic, text=group, offset=signed))
    return notes


def _array(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Make an array of texts or of numbers."""
    if kind == pa.string():
        return texts([None if value is None else str(value) for value in values])
    return from_numpy(np.array(values, dtype=np.int64), pa.int64()).cast(kind)


# --- the scan of an audit


def read_scan(
    spark: "SparkSession",
    extent: LogExtent,
    columns: Sequence[str],
    *,
    verify_crc: bool,
    partitions: int = 1,
) -> "DataFrame":
    """Read a log as events, with these columns, and as rows of ``notes``.

    This is a table function and no source: Spark starts three more Python processes to plan a
    source, which takes as long as to read a small log.
    """
    use_this_python(spark)
    reader = scan_reader(extent, columns, verify_crc=verify_crc, partitions=partitions)
    planned = reader.partitions()

    class Scan:
        def eval(self, numbers: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
            for number in numbers.column(0).to_pylist():
                yield from reader.read(planned[number])

    rows = ", ".join([*(ddl(name, columns=EVENT_COLUMNS) for name in columns), _NOTES_DDL])
    scan: Any = F.arrow_udtf(Scan, returnType=rows)  # PySpark's hints know it as a decorator only
    one_each = spark.range(0, len(planned), 1, max(1, len(planned)))
    found: DataFrame = scan(one_each.asTable())
    return found


def scan_reader(
    extent: LogExtent,
    columns: Sequence[str],
    *,
    verify_crc: bool,
    partitions: int = 1,
    partition_bytes: int = PARTITION_BYTES,
) -> EventReader:
    """Make the reader of a scan."""
    asked = ReadOptions(
        path="",
        min_partitions=partitions,
        max_partition_bytes=partition_bytes,
        verify_crc=verify_crc,
    )
    fields = [pa.field(name, EVENT_COLUMNS[name].arrow_type) for name in columns]
    schema = pa.schema([*fields, pa.field("notes", _NOTES)])
    return EventReader(schema, extent, asked, with_notes=True)
