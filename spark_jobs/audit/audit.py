"""The audit as functions from DataFrame to DataFrame, over the digests of a log's splits.

The log is read once, by ``digest_source``: each split becomes a few rows of packed numbers, where
a record of a transaction takes 45 bytes. Everything after that moves those rows and unpacks them
with numpy, so that a healthy transaction never becomes a row or an object of its own:

1. ``linked`` takes op messages to halves of other splits, and makes events of them.
2. ``judged`` brings the events of a family together and says what became of it.
3. ``transactions`` and ``named`` are for details: they look up names in the log.

A family is known by 64 bits of hash of its producer group and unique key.

What expired (it lies below the log's first offset) or got lost (it lies in a damaged range) is
not held against the records that name it. Offsets in the half queue rise with the offsets in the
log, so the range of queue offsets that such a stretch held is known from its neighbours.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from ..log.arrays import from_numpy
from ..log.lookup import LogLookup
from ..log.segments import Segment
from .digest import DDL, What, buckets_of, link_ops
from .events import EVENT, OP_ENTRY, SLOT, SLOT_BITS, Records, by_bucket
from .families import ABSENT, STATES, TRANSACTION, judge_families
from .judge import Kind, LogBounds, Terms
from .overview import LostPlaces, Overview, is_lost
from .timeline import NO_SCALE, Scale

FINDING: Final = StructType(
    [
        StructField("kind", StringType()),
        StructField("offsets", ArrayType(LongType())),  # physical
        StructField("detail", StringType()),
        StructField("told", LongType()),  # physical offset of a record that names the transaction
    ]
)
JUDGED: Final = StructType(
    [
        StructField("states", ArrayType(LongType())),  # how many, in the order of STATES
        StructField("findings", ArrayType(FINDING)),
        StructField("transactions", BinaryType()),  # TRANSACTION records
        StructField("latencies", BinaryType()),  # a Histogram
        StructField("checks", BinaryType()),  # a Histogram
        StructField("times", BinaryType()),  # what timeline.counted returns
    ]
)
# What a list of transactions tells of each before it is named; the names are those of TRANSACTION.
_LISTED: Final = ("at", "half", "decided", "took", "checks", "halves", "state")
_ROWS: Final = f"array<struct<{', '.join(f'{name}: bigint' for name in _LISTED)}>>"
_RANGES: Final = (Kind.GAP, Kind.OVERLAP, Kind.CORRUPT_RECORD)  # their offsets are start and end
_SEEN: Final = (
    "transactionId string, bytes array<struct<file: string, position: bigint, size: int>>"
)


Packed = bytes | bytearray
Row = tuple[object, ...]


def linked(digest: DataFrame, lost: Sequence[LostPlaces] | None, buckets: int) -> DataFrame:
    """Take op entries to halves of other splits: rows of a digest, events and faults.

    ``lost`` is what ``Overview.lost_places`` says.
    """

    def link(halves: list[bytearray], ops: list[bytearray]) -> list[Row]:
        return linked_rows(halves, ops, lost, buckets)

    udf = F.udf(link, f"array<struct<{DDL}>>", useArrow=False)
    return (
        digest.where(F.col("what").isin(int(What.HALVES), int(What.OPS)))
        .groupBy("bucket")
        .agg(*(_collected(what).alias(what.name) for what in (What.HALVES, What.OPS)))
        .where(F.size(What.OPS.name) > 0)
        .select(F.explode(udf(What.HALVES.name, What.OPS.name)).alias("row"))
        .select("row.*")
    )


def linked_rows(
    halves: Iterable[Packed],
    ops: Iterable[Packed],
    lost: Sequence[LostPlaces] | None,
    buckets: int,
) -> list[Row]:
    """Link the op entries of one bucket of places; those that name nothing become faults."""
    events, orphans = link_ops(_unpacked(ops, OP_ENTRY), _unpacked(halves, SLOT))
    rows = _event_rows(events, buckets)
    orphans = orphans[~is_lost(orphans["slot"], lost)]
    for slot in np.unique(orphans["slot"]):
        at = orphans["at"][orphans["slot"] == slot]
        queue, place = divmod(int(slot), 1 << SLOT_BITS)
        detail = (
            f"an op message marks offset {place} of half queue {queue} as done, where there is no"
            " half message"
        )
        offsets = sorted({int(at.min()), int(at.max())})
        fault = (str(Kind.OP_WITHOUT_HALF), offsets, detail, None, None)
        rows.append((int(What.FAULT), 0, None, *fault))
    return rows


def linked_by_hand(packed: Iterable[Packed], log: Overview, buckets: int) -> list[Row]:
    """Give events without a key the family of their half: rows of a digest."""
    return _event_rows(log.with_families(_unpacked(packed, EVENT)), buckets)


def _event_rows(events: Records, buckets: int) -> list[Row]:
    return [
        (int(What.EVENTS), bucket, packed, None, None, None, None, None)
        for bucket, packed in by_bucket(events, buckets_of(events, buckets))
    ]


def _collected(what: What) -> Column:
    return F.collect_list(F.when(F.col("what") == int(what), F.col("packed")))


def _unpacked(packed: Iterable[Packed], kind: np.dtype[np.void]) -> Records:
    return np.frombuffer(b"".join(packed), dtype=kind)


def judged(
    digest: DataFrame, bounds: LogBounds, terms: Terms, scale: Scale = NO_SCALE
) -> DataFrame:
    """Say what became of the transactions, one row per bucket: columns as in ``JUDGED``."""

    def judge(events: list[bytearray]) -> Row:
        return judged_row(events, bounds, terms, scale)

    udf = F.udf(judge, JUDGED, useArrow=False)
    return (
        digest.where(F.col("what") == int(What.EVENTS))
        .groupBy("bucket")
        .agg(F.collect_list("packed").alias("packed"))
        .select(udf("packed").alias("row"))
        .select("row.*")
    )


def judged_row(
    events: Iterable[Packed], bounds: LogBounds, terms: Terms, scale: Scale = NO_SCALE
) -> Row:
    """Judge the families of one bucket."""
    told = judge_families(_unpacked(events, EVENT), bounds, terms, scale)
    return (
        [told.states[state] for state in STATES],
        [(str(f.kind), f.offsets, f.detail, whose) for f, whose in told.findings],
        told.transactions.tobytes(),
        told.latencies.pack(),
        told.checks.pack(),
        told.times,
    )


def faults(rows: DataFrame, restarts: Mapping[str, int]) -> DataFrame:
    """List what is wrong with splits, from the rows of digests: columns as in ``FINDING``.

    ``restarts`` is what ``Overview.restarts`` says.
    """
    told = rows.where(F.col("what") == int(What.FAULT))
    for queue, at in restarts.items():
        is_older = (F.col("queue") == queue) & (F.col("offsets")[0] < at)
        is_entry = F.col("kind") == str(Kind.WRONG_QUEUE_ENTRY)
        told = told.where(~F.coalesce(is_older & is_entry, F.lit(False)))
    return told.select(*FINDING.names)


def found(judged: DataFrame) -> DataFrame:
    """List what is wrong with transactions: columns as in ``FINDING``."""
    return judged.select(F.explode("findings").alias("finding")).select("finding.*")


def transactions(judged: DataFrame, names: DataFrame) -> DataFrame:
    """Describe every transaction that was prepared in the log, one row each.

    ``names`` is the log with the columns ``schema.NAME_COLUMNS``, of the topics where halves and
    parked messages are.
    """
    # PySpark's own type hints lack it.
    unpack = F.arrow_udf(_transaction_rows, _ROWS)  # type: ignore[attr-defined]
    rows = judged.select(F.explode(unpack("transactions")).alias("row")).select("row.*")
    states = F.array(*(F.lit(str(state)) for state in STATES))
    absent = F.lit(ABSENT)
    return rows.join(names, F.col("at") == F.col("physicalOffset")).select(
        F.col("uniqKey").alias("transactionId"),
        "producerGroup",
        F.col("realTopic").alias("topic"),
        states[F.col("state")].alias("state"),
        F.nullif("half", absent).alias("halfOffset"),
        F.nullif("decided", absent).alias("decisionOffset"),
        F.col("timestamp").alias("preparedAt"),
        F.nullif("took", absent).alias("decidedAfterMs"),
        "checks",
        F.col("halves").alias("halfMessages"),
    )


def _transaction_rows(packed: pa.Array) -> pa.Array:
    """Unpack transactions, all columns at once."""
    parts = [np.frombuffer(content.as_buffer(), dtype=TRANSACTION) for content in packed]
    bounds = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)
    together = np.concatenate([np.zeros(0, dtype=TRANSACTION), *parts])
    columns = [from_numpy(together[name].astype(np.int64), pa.int64()) for name in _LISTED]
    rows = pa.StructArray.from_arrays(columns, names=list(_LISTED))
    return pa.ListArray.from_arrays(from_numpy(bounds, pa.int32()), rows)


def named(findings: DataFrame, segments: Sequence[Segment]) -> DataFrame:
    """Say of each finding whose it is, and where the bytes are that show it.

    ``findings`` has the columns ``FINDING``; the result ``kind``, ``transactionId``, ``offsets``,
    ``detail`` and ``bytes``.
    """
    lookup: list[LogLookup] = []  # made where it is used: it maps files

    def see(kind: str, offsets: list[int], told: int | None) -> tuple[object, object]:
        if not lookup:
            lookup.append(LogLookup(segments))
        if kind in _RANGES:
            places = [lookup[0].place(offsets[0], end=offsets[1])]
        else:
            places = [lookup[0].place(offset) for offset in offsets]
        return lookup[0].unique_key(told), [place for place in places if place is not None]

    seen = F.udf(see, _SEEN, useArrow=False)
    return findings.withColumn("seen", seen("kind", "offsets", "told")).select(
        "kind", "seen.transactionId", "offsets", "detail", "seen.bytes"
    )
