"""The columns of the source ``rocketmq-commitlog``: name, type and how it is made from records.

One table, ``COLUMNS``, says all three; the Spark schema, the Arrow schema and the reader are
derived from it. Names that Spark's Kafka source has too mean the same as there.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from halfmq.store.format.properties import (
    PROPERTY_KEYS,
    PROPERTY_PGROUP,
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_UNIQ_KEY,
    tag_hash,
)
from halfmq.store.format.record import CRC_MASK
from halfmq.store.format.topics import SCHEDULE_TOPIC

from ..log.arrays import Bools, Ints, cut, whole_numbers
from ..log.checksums import sound_records
from ..log.rows import Rows
from ..log.segment_reader import SkippedRange
from ..log.segments import Segment
from .bodies import error_column, unpacked
from .parts import decision_parts

LOG_APPEND_TIME: Final = 1  # Kafka's timestampType for "set by the broker"
_TIME_MIN: Final = -62_135_596_800_000  # ms, year 1: what Python and Spark can show;
_TIME_MAX: Final = 253_402_300_799_999  # year 9999: a producer's clock may say anything
_INT_MAX: Final = 2**31 - 1
_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

# Record types and transaction types as they stand in the columns.
MESSAGE: Final = "message"
BLANK: Final = "blank"
CORRUPT: Final = "corrupt"
NONE: Final = "none"
HALF: Final = "half"
OP: Final = "op"
COMMIT: Final = "commit"
ROLLBACK: Final = "rollback"
DISCARD: Final = "discard"
RESUME: Final = "resume"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the reader was asked to add to the columns that cost extra."""

    value_topics: frozenset[str] | None = None  # bodies of these topics; None: of all
    verify_crc: bool = False
    decompress: bool = False


Make = Callable[[Rows, Wanted], pa.Array]
MakeOfRange = Callable[[Segment, SkippedRange], int | str | None]


@dataclass(frozen=True, slots=True)
class Column:
    """One column; ``of_range`` fills it for blanks and corrupt ranges, where it can."""

    spark_type: str  # as in DDL
    arrow_type: pa.DataType
    make: Make
    of_range: MakeOfRange = field(default=lambda _segment, _range: None)


def record_batch(schema: pa.Schema, rows: Rows, wanted: Wanted) -> pa.RecordBatch:
    """Decode the columns of ``schema``, and nothing else, from some records."""
    arrays = [COLUMNS[name].make(rows, wanted) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def range_batch(schema: pa.Schema, skipped: SkippedRange, segment: Segment) -> pa.RecordBatch:
    """Make the one row that stands for a blank or a corrupt range."""
    columns = (COLUMNS[name] for name in schema.names)
    arrays = [pa.array([one.of_range(segment, skipped)], one.arrow_type) for one in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _int32(values: Ints) -> pa.Array:
    return pa.array(values.astype(np.int32))


def _int(name: str) -> Make:
    return lambda rows, _: _int32(rows.field(name))


def _long(name: str) -> Make:
    return lambda rows, _: pa.array(rows.field(name))


def _time(name: str) -> Make:
    def make(rows: Rows, _: Wanted) -> pa.Array:
        return pa.array(np.clip(rows.field(name), _TIME_MIN, _TIME_MAX) * 1000, _TIMESTAMP)

    return make


def _text(values: pa.BinaryArray) -> pa.Array:
    """Read as UTF-8; what is not is shown with replacement characters instead of failing."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        raw = values.to_pylist()
        decoded = [None if value is None else str(value, "utf-8", "replace") for value in raw]
        return pa.array(decoded, pa.string())


def _property(name: str) -> Make:
    return lambda rows, _: _text(rows.property_values(name))


def _property_bytes(name: str) -> Make:
    return lambda rows, _: rows.property_values(name)


def _property_number(name: str) -> Make:
    """Read a property as a whole number; null where there is none or it is not one."""

    def make(rows: Rows, _: Wanted) -> pa.Array:
        numbers = whole_numbers(rows.property_values(name))
        values = numbers.fill_null(_INT_MAX + 1).to_numpy()
        return pa.array(values, mask=values > _INT_MAX).cast(pa.int32())

    return make


def tags_codes(rows: Rows) -> tuple[Ints, Bools]:
    """Compute what the consume queue says of the tags of each record; tell where that is known.

    Of a delayed message it says when it is due, which only the broker knew.
    """
    block = rows.property_block
    row, starts, ends = block.find(PROPERTY_TAGS)
    tags = cut(block.buffer, starts, ends).dictionary_encode()
    hashes = [tag_hash(str(tag, "utf-8", "replace")) for tag in tags.dictionary.to_pylist()]
    codes = np.zeros(len(rows), dtype=np.int64)
    codes[row] = np.array(hashes, dtype=np.int64)[tags.indices.to_numpy()]
    waits = np.array([name == SCHEDULE_TOPIC for name in rows.topic_names], dtype=np.bool_)
    waiting = rows.of_topics(waits)
    codes[waiting] = 0
    return codes, ~waiting


def _tags_code(rows: Rows, _: Wanted) -> pa.Array:
    codes, known = tags_codes(rows)
    return pa.array(codes, mask=~known)


def _topic(rows: Rows, _: Wanted) -> pa.Array:
    return pa.array(rows.topic_names, pa.string()).take(rows.topics.indices)


def _host(name: str) -> Make:
    def make(rows: Rows, _: Wanted) -> pa.Array:
        packed = rows.hosts(name).dictionary_encode()
        texts = [_host_text(host) for host in packed.dictionary.to_pylist()]
        return pa.array(texts, pa.string()).take(packed.indices)

    return make


def _host_text(packed: bytes) -> str:
    address = ipaddress.ip_address(packed[:-4])
    port = int.from_bytes(packed[-4:], "big")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _value(rows: Rows, wanted: Wanted) -> pa.Array:
    if wanted.decompress:
        return unpacked(rows, wanted.value_topics).values
    if wanted.value_topics is None:
        return rows.bodies()
    of_interest = np.array([name in wanted.value_topics for name in rows.topic_names])
    return rows.bodies(rows.of_topics(of_interest))


def _error(rows: Rows, wanted: Wanted) -> pa.Array:
    if wanted.decompress:
        return error_column(rows, wanted.value_topics)
    return pa.nulls(len(rows), pa.string())


def _headers(rows: Rows, _: Wanted) -> pa.Array:
    counts, names, values = rows.property_pairs()
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    pairs = pa.StructArray.from_arrays([_text(names), values], fields=list(_HEADER))
    return pa.ListArray.from_arrays(pa.array(offsets), pairs, type=_HEADERS)


def _crc_ok(rows: Rows, wanted: Wanted) -> pa.Array:
    if not wanted.verify_crc:
        return pa.nulls(len(rows), pa.bool_())
    return pa.array(sound_records(rows))


def _transaction_type(rows: Rows, _: Wanted) -> pa.Array:
    return pa.array(_KINDS).take(pa.array(decision_parts(rows)))


_KINDS: Final = (NONE, HALF, OP, COMMIT, ROLLBACK, DISCARD, RESUME)  # by Part


def _record_type(_: Segment, skipped: SkippedRange) -> str:
    return BLANK if skipped.reason is None else CORRUPT


def _repeated(value: int | str, kind: pa.DataType) -> Make:
    return lambda rows, _: pa.repeat(pa.scalar(value, kind), len(rows))


_HEADER: Final = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
_HEADERS: Final = pa.list_(pa.field("element", _HEADER))

COLUMNS: Final[dict[str, Column]] = {
    "key": Column("binary", pa.binary(), _property_bytes(PROPERTY_KEYS)),
    "value": Column("binary", pa.binary(), _value),
    "topic": Column("string", pa.string(), _topic),
    "partition": Column("int", pa.int32(), _int("queue_id")),
    "offset": Column("bigint", pa.int64(), _long("queue_offset")),
    "timestamp": Column("timestamp", _TIMESTAMP, _time("store_timestamp")),
    "timestampType": Column("int", pa.int32(), _repeated(LOG_APPEND_TIME, pa.int32())),
    "headers": Column("array<struct<key:string,value:binary>>", _HEADERS, _headers),
    "physicalOffset": Column(
        "bigint",
        pa.int64(),
        lambda rows, _: pa.array(rows.physical_offsets),
        lambda segment, skipped: segment.base + skipped.position,
    ),
    "size": Column(
        "int",
        pa.int32(),
        lambda rows, _: _int32(rows.sizes),
        # A corrupt range can be larger than an int tells; the next row's offset tells its end.
        lambda _, skipped: min(skipped.size, _INT_MAX),
    ),
    "bodySize": Column("int", pa.int32(), _int("body_size")),
    "bodyCrc": Column("int", pa.int32(), lambda rows, _: _int32(rows.field("body_crc") & CRC_MASK)),
    "crcOk": Column("boolean", pa.bool_(), _crc_ok),
    "flag": Column("int", pa.int32(), _int("flag")),
    "sysFlag": Column("int", pa.int32(), _int("sys_flag")),
    "bornTimestamp": Column("timestamp", _TIMESTAMP, _time("born_timestamp")),
    "bornHost": Column("string", pa.string(), _host("born_host")),
    "storeHost": Column("string", pa.string(), _host("store_host")),
    "reconsumeTimes": Column("int", pa.int32(), _int("reconsume_times")),
    "preparedTransactionOffset": Column("bigint", pa.int64(), _long("prepared_transaction_offset")),
    "properties": Column("string", pa.string(), lambda rows, _: _text(rows.properties)),
    "uniqKey": Column("string", pa.string(), _property(PROPERTY_UNIQ_KEY)),
    "tags": Column("string", pa.string(), _property(PROPERTY_TAGS)),
    "tagsCode": Column("bigint", pa.int64(), _tags_code),
    "producerGroup": Column("string", pa.string(), _property(PROPERTY_PGROUP)),
    "realTopic": Column("string", pa.string(), _property(PROPERTY_REAL_TOPIC)),
    "realPartition": Column("int", pa.int32(), _property_number(PROPERTY_REAL_QID)),
    "checkTimes": Column("int", pa.int32(), _property_number(PROPERTY_TRANSACTION_CHECK_TIMES)),
    "transactionType": Column("string", pa.string(), _transaction_type),
    "segment": Column(
        "bigint",
        pa.int64(),
        lambda rows, _: pa.repeat(rows.segment.base, len(rows)),
        lambda segment, _: segment.base,
    ),
    "recordType": Column("string", pa.string(), _repeated(MESSAGE, pa.string()), _record_type),
    "error": Column(
        "string",
        pa.string(),
        _error,
        lambda _, skipped: skipped.reason,
    ),
}
