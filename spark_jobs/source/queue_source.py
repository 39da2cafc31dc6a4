"""``spark.read.format("rocketmq-consumequeue")``: a store's consume queues as a DataFrame.

Each row is an entry, or what stands where an entry should be (``entryType`` tells). Names that the
source ``rocketmq-commitlog`` has too mean the same, so that the two can be joined: by
``physicalOffset``, or by ``topic``, ``partition`` and ``offset``. Options are ``QueueOptions``.

A queue that is being written is read up to the last entry of each file when its turn comes.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from halfmq.store.format.queue_entry import ENTRY_SIZE

from ..errors import CorruptLogError, in_one_sentence
from ..log.queue_entries import (
    EntryBatch,
    EntryKind,
    QueueFile,
    find_queue_files,
    read_entries,
)
from ..log.segments import OFFSET_END
from .options import QueueOptions
from .schema import arrow_schema, as_asked, ddl
from .splits import packed, parts_of

QUEUE_FORMAT: Final = "rocketmq-consumequeue"
# The columns entryType and error, by EntryKind.
_KINDS: Final = ("entry", "preBlank", "blank", "corrupt", "corrupt", "corrupt")
_ERRORS: Final = (
    None,
    None,
    None,
    "no record can be at this offset or have this size",
    "the file ends within an entry",
    "the file's name is not the place of an entry",
)
_READ: Final = (EntryKind.ENTRY, EntryKind.NO_ENTRY)  # of which the fields are shown


class QueueColumn(NamedTuple):
    """One column and how it is made of entries."""

    spark_type: str
    make: Callable[[EntryBatch], pa.Array]


def _field(name: str, kind: pa.DataType) -> Callable[[EntryBatch], pa.Array]:
    """Return a field of the entries; null where there is no entry."""
    return lambda batch: pa.array(
        batch.content[name].astype(np.int64), mask=~np.isin(batch.kinds, _READ)
    ).cast(kind)


def _by_kind(texts: Sequence[str | None]) -> Callable[[EntryBatch], pa.Array]:
    return lambda batch: pa.array(texts).take(pa.array(batch.kinds))


QUEUE_COLUMNS: Final[dict[str, QueueColumn]] = {
    "topic": QueueColumn("string", lambda batch: pa.repeat(batch.file.topic, len(batch.kinds))),
    "partition": QueueColumn(
        "int", lambda batch: pa.array(np.full(len(batch.kinds), batch.file.queue, np.int32))
    ),
    "offset": QueueColumn("bigint", lambda batch: pa.array(batch.slots, mask=batch.slots < 0)),
    "physicalOffset": QueueColumn("bigint", _field("physical_offset", pa.int64())),
    "size": QueueColumn("int", _field("size", pa.int32())),
    "tagsCode": QueueColumn("bigint", _field("tags_code", pa.int64())),
    "file": QueueColumn("string", lambda batch: pa.repeat(batch.file.path, len(batch.kinds))),
    "entryType": QueueColumn("string", _by_kind(_KINDS)),
    "error": QueueColumn("string", _by_kind(_ERRORS)),
}


class ConsumeQueueDataSource(DataSource):
    """What Spark asks first: the name, the schema and a reader."""

    @classmethod
    def name(cls) -> str:
        return QUEUE_FORMAT

    def schema(self) -> str:
        return ddl(*QUEUE_COLUMNS, columns=QUEUE_COLUMNS)

    @in_one_sentence
    def reader(self, schema: StructType) -> "ConsumeQueueReader":
        return ConsumeQueueReader(schema, QueueOptions.parse(self.options))


class ConsumeQueueReader(DataSourceReader):
    """Lists files on the driver and reads them on the executors."""

    def __init__(self, schema: StructType, options: QueueOptions) -> None:
        self._schema = arrow_schema(schema, QUEUE_COLUMNS)
        self._names = schema.names
        self._options = options

    @in_one_sentence
    def partitions(self) -> Sequence[InputPartition]:
        files = [
            file
            for place in self._options.places
            for file in find_queue_files(place, self._options.subscribe)
        ]
        size = self._options.partition_size(sum(file.size for file in files))
        return packed(((file, file.size) for file in files), size)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return as_asked(chain.from_iterable(map(self._read, parts_of(partition))), self._names)

    def _read(self, file: QueueFile) -> Iterator[pa.RecordBatch]:
        first, end = self._options.starting_offsets or 0, self._options.ending_offsets
        for batch in read_entries(file, first, OFFSET_END if end is None else end):
            if self._options.fail_fast:
                _demand_entries(batch)
            arrays = [QUEUE_COLUMNS[name].make(batch) for name in self._schema.names]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _demand_entries(batch: EntryBatch) -> None:
    """Raise CorruptLogError at the first that is none."""
    for place in np.flatnonzero(batch.kinds >= EntryKind.NO_ENTRY)[:1].tolist():
        slot, reason = int(batch.slots[place]), _ERRORS[batch.kinds[place]]
        at = slot * ENTRY_SIZE if slot >= 0 else batch.file.begin
        raise CorruptLogError(batch.file.path, f"{ENTRY_SIZE} bytes at offset {at}: {reason}")
