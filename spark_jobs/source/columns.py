"""The columns of the source ``rocketmq-commitlog``: name, type and how it is made from records.

One table, ``COLUMNS``, says all three; schemas and the reader are derived from it. Names that
Spark's Kafka source has too mean the same as there.
"""

import ipaddress
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from halfmq.store.format.properties import (
    PROPERTY_DELAY,
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
from halfmq.store.format.topics import SCHEDULE_TOPIC, TIMER_TOPIC

from ..log.arrays import Bools, Ints, cut, whole_numbers
from ..log.checksums import sound_records
from ..log.rows import Rows
from ..log.segment_reader import SkippedRange
from ..log.segments import Segment
from ..log.transaction_parts import decision_parts
from .bodies import unpacked
from .options import ReadOptions

LOG_APPEND_TIME: Final = 1  # Kafka's timestampType for "set by the broker"
_TIME_MIN: Final = -62_135_596_800_000  # ms, year 1: what Python and Spark can show;
_TIME_MAX: Final = 253_402_300_799_999  # year 9999: a producer's clock may say anything
_INT_MAX: Final = 2**31 - 1

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


_HEADER: Final = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
_HEADERS: Final = pa.list_(pa.field("element", _HEADER))
# The types of all sources, in DDL and for Arrow.
ARROW_TYPES: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "array<struct<key:string,value:binary>>": _HEADERS,
}

Make = Callable[[Rows, ReadOptions], pa.Array]
MakeOfRange = Callable[[Segment, SkippedRange], int | str | None]


class Column(NamedTuple):
    """One column; ``of_range`` fills it for blanks and corrupt ranges, where it can."""

    spark_type: str  # as in DDL
    make: Make
    of_range: MakeOfRange = lambda _segment, _range: None


def record_batch(schema: pa.Schema, rows: Rows, options: ReadOptions) -> pa.RecordBatch:
    """Decode the columns of ``schema``, and nothing else, from some records."""
    arrays = [COLUMNS[name].make(rows, options) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def range_batch(schema: pa.Schema, skipped: SkippedRange, segment: Segment) -> pa.RecordBatch:
    """Make the one row that stands for a blank or a corrupt range."""
    values = {name: [COLUMNS[name].of_range(segment, skipped)] for name in schema.names}
    return pa.RecordBatch.from_pydict(values, schema=schema)


def _int32(values: Ints) -> pa.Array:
    return pa.array(values.astype(np.int32))


def _int(name: str) -> Make:
    return lambda rows, _: _int32(rows.field(name))


def _long(name: str) -> Make:
    return lambda rows, _: pa.array(rows.field(name))


def _time(name: str) -> Make:
    def make(rows: Rows, _: ReadOptions) -> pa.Array:
        return pa.array(
            np.clip(rows.field(name), _TIME_MIN, _TIME_MAX) * 1000, ARROW_TYPES["timestamp"]
        )

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


def _property_number(name: str) -> Make:
    """Read a property as a whole number; null where there is none or it is not one."""

    def make(rows: Rows, _: ReadOptions) -> pa.Array:
        numbers = whole_numbers(rows.property_values(name))
        values = numbers.fill_null(_INT_MAX + 1).to_numpy()
        return pa.array(values, mask=values > _INT_MAX).cast(pa.int32())

    return make


def tags_codes(rows: Rows, levels_ms: Sequence[int]) -> tuple[Ints, Bools]:
    """Compute the tags code of each record as in its queue entry; tell where it is known.

    Of a message that waits by a delay level it says when it is due. Of one that waits in the topic
    of timers, halfmq writes that too, and RocketMQ does not.
    """
    starts, ends, _ = rows.property_places(PROPERTY_TAGS)
    tags = cut(rows.property_block.buffer, starts, ends).dictionary_encode()
    hashes = [tag_hash(str(tag, "utf-8", "replace")) for tag in tags.dictionary.to_pylist()]
    codes = np.array(hashes, dtype=np.int64)[tags.indices.to_numpy()]
    in_timer, in_levels = (
        rows.of_topics(np.array([name == topic for name in rows.topic_names], dtype=np.bool_))
        for topic in (TIMER_TOPIC, SCHEDULE_TOPIC)
    )
    if in_levels.any():
        levels = whole_numbers(rows.property_values(PROPERTY_DELAY)).fill_null(0).to_numpy()
        by_level = in_levels & (levels > 0)
        delays = np.array(levels_ms, dtype=np.int64)[np.minimum(levels, len(levels_ms)) - 1]
        codes[by_level] = (rows.field("store_timestamp") + delays)[by_level]
    codes[in_timer] = 0
    return codes, ~in_timer


def _tags_code(rows: Rows, options: ReadOptions) -> pa.Array:
    codes, known = tags_codes(rows, options.delay_levels)
    return pa.array(codes, mask=~known)


def _topic(rows: Rows, _: ReadOptions) -> pa.Array:
    return pa.array(rows.topic_names, pa.string()).take(pa.array(rows.topic_codes))


def _host(name: str) -> Make:
    def make(rows: Rows, _: ReadOptions) -> pa.Array:
        packed = rows.hosts(name).dictionary_encode()
        texts = [_host_text(host) for host in packed.dictionary.to_pylist()]
        return pa.array(texts, pa.string()).take(packed.indices)

    return make


def _host_text(packed: bytes) -> str:
    address = ipaddress.ip_address(packed[:-4])
    port = int.from_bytes(packed[-4:], "big")
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _value(rows: Rows, options: ReadOptions) -> pa.Array:
    if options.decompress:
        return unpacked(rows, options.bodies_of).values
    return rows.bodies(rows.are_in(options.bodies_of))


def _error(rows: Rows, options: ReadOptions) -> pa.Array:
    """Return why a body cannot be unpacked; null if it can, or need not be."""
    errors = unpacked(rows, options.bodies_of).errors if options.decompress else {}
    return pa.array(map(errors.get, range(len(rows))), pa.string())


def _headers(rows: Rows, _: ReadOptions) -> pa.Array:
    counts, names, values = rows.property_pairs()
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    pairs = pa.StructArray.from_arrays([_text(names), values], fields=list(_HEADER))
    return pa.ListArray.from_arrays(pa.array(offsets), pairs, type=_HEADERS)


def _crc_ok(rows: Rows, options: ReadOptions) -> pa.Array:
    if not options.verify_crc:
        return pa.nulls(len(rows), pa.bool_())
    return pa.array(sound_records(rows))


def _transaction_type(rows: Rows, _: ReadOptions) -> pa.Array:
    return pa.array(_KINDS).take(pa.array(decision_parts(rows)))


_KINDS: Final = (NONE, HALF, OP, COMMIT, ROLLBACK, DISCARD, RESUME)  # by Part


COLUMNS: Final[dict[str, Column]] = {
    "key": Column("binary", lambda rows, _: rows.property_values(PROPERTY_KEYS)),
    "value": Column("binary", _value),
    "topic": Column("string", _topic),
    "partition": Column("int", _int("queue_id")),
    "offset": Column("bigint", _long("queue_offset")),
    "timestamp": Column("timestamp", _time("store_timestamp")),
    "timestampType": Column("int", lambda rows, _: _int32(np.full(len(rows), LOG_APPEND_TIME))),
    "headers": Column("array<struct<key:string,value:binary>>", _headers),
    "physicalOffset": Column(
        "bigint",
        lambda rows, _: pa.array(rows.physical_offsets),
        lambda segment, skipped: segment.base + skipped.position,
    ),
    "size": Column(
        "int",
        lambda rows, _: _int32(rows.sizes),
        # A corrupt range can be larger than an int tells; the next row's offset tells its end.
        lambda _, skipped: min(skipped.size, _INT_MAX),
    ),
    "bodySize": Column("int", _int("body_size")),
    "bodyCrc": Column("int", lambda rows, _: _int32(rows.field("body_crc") & CRC_MASK)),
    "crcOk": Column("boolean", _crc_ok),
    "flag": Column("int", _int("flag")),
    "sysFlag": Column("int", _int("sys_flag")),
    "bornTimestamp": Column("timestamp", _time("born_timestamp")),
    "bornHost": Column("string", _host("born_host")),
    "storeHost": Column("string", _host("store_host")),
    "reconsumeTimes": Column("int", _int("reconsume_times")),
    "preparedTransactionOffset": Column("bigint", _long("prepared_transaction_offset")),
    "properties": Column("string", lambda rows, _: _text(rows.properties)),
    "uniqKey": Column("string", _property(PROPERTY_UNIQ_KEY)),
    "tags": Column("string", _property(PROPERTY_TAGS)),
    "tagsCode": Column("bigint", _tags_code),
    "producerGroup": Column("string", _property(PROPERTY_PGROUP)),
    "realTopic": Column("string", _property(PROPERTY_REAL_TOPIC)),
    "realPartition": Column("int", _property_number(PROPERTY_REAL_QID)),
    "checkTimes": Column("int", _property_number(PROPERTY_TRANSACTION_CHECK_TIMES)),
    "transactionType": Column("string", _transaction_type),
    "segment": Column(
        "bigint",
        lambda rows, _: pa.repeat(rows.segment.base, len(rows)),
        lambda segment, _: segment.base,
    ),
    "recordType": Column(
        "string",
        lambda rows, _: pa.repeat(MESSAGE, len(rows)),
        lambda _, skipped: BLANK if skipped.reason is None else CORRUPT,
    ),
    "error": Column("string", _error, lambda _, skipped: skipped.reason),
}
