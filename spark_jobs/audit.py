"""Classify every transaction of a commit log, as functions from DataFrame to DataFrame.

One pass over the log keeps a few numbers of its transactional records (``transaction_events``);
everything else works on those. Only the names of transactions need a second pass.

1. ``link_ops`` joins halves with the ops that name them, by half queue and queue offset.
2. ``fold`` groups halves and decisions by transaction and keeps numbers only: how many of each,
   the lowest and the highest offset. That is enough to be sure about a transaction with nothing
   unusual in it, which is nearly every one.
3. The rest, a transaction with check copies or with two decisions say, goes record by record
   through ``judge``, which knows all the rules. The shortcuts of step 2 say what it would say.

A transaction is known by the UNIQ_KEY of its message, as 64 bits of hash; two of a hundred
million have equal hashes with a probability of 1 in 4000.

What expired (it lies below the log's first offset) or got lost (it lies in a damaged range) is
not held against the records that name it. Offsets in the half queue rise with the offsets in the
log, so the range of queue offsets that such a stretch held is known from its neighbours.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from . import columns
from .judge import Event, Kind, LogBounds, Part, State, judge
from .segments import UNWRITTEN

_PARTS: Final = {
    columns.HALF: Part.HALF,
    columns.OP: Part.OP,
    columns.COMMIT: Part.COMMIT,
    columns.ROLLBACK: Part.ROLLBACK,
    columns.DISCARD: Part.DISCARD,
}
ORPHAN: Final = "orphan"  # in the column ``state``: an op that names no half
_CORRUPT: Final = 0  # in the column ``part``: bytes that are no record
RANGES_MAX: Final = 100  # unreadable ranges handled apart; more are taken for one wide range

# Offsets in the half queue that an unreadable stretch of the log may have held.
_SLOT_MIN: Final = -1
_SLOT_MAX: Final = 2**63 - 1

FINDING: Final = StructType(
    [
        StructField("kind", StringType()),
        StructField("offsets", ArrayType(LongType())),  # physical
        StructField("detail", StringType()),
        StructField("told", LongType()),  # physical offset of a record that names the transaction
    ]
)
_JUDGED: Final = StructType(FINDING.fields[:3])
_VERDICT: Final = StructType(
    [StructField("state", StringType()), StructField("findings", ArrayType(_JUDGED))]
)


class LostSlots(NamedTuple):
    """Queue offsets strictly between ``after`` and ``before`` of a half queue are unreadable."""

    queue: int
    after: int
    before: int


def transaction_events(log: DataFrame) -> DataFrame:
    """Keep what an audit needs, in numbers: transactions, corrupt ranges, failed CRCs.

    ``log`` has the columns ``schema.AUDIT_COLUMNS``. Columns of the result:

    * ``part`` says what the record is, ``at`` where it is, ``key`` stands for the transaction;
    * ``reference`` is a half's offset in its ``queue``, the physical offset of the half that a
      decision names, the end of a corrupt range;
    * ``text`` is what an op record lists, and why a range is corrupt.
    """
    kind, record = F.col("transactionType"), F.col("recordType")
    is_corrupt = record == columns.CORRUPT
    anchor = F.when(kind == columns.HALF, F.col("physicalOffset")).otherwise(
        F.col("preparedTransactionOffset")
    )
    parts = (F.when(kind == name, int(part)) for name, part in _PARTS.items())
    return log.where((kind != columns.NONE) | is_corrupt | ~F.col("crcOk")).select(
        F.coalesce(F.when(is_corrupt, _CORRUPT), *parts).cast("tinyint").alias("part"),
        F.col("physicalOffset").alias("at"),
        F.col("partition").alias("queue"),
        F.when(kind == columns.HALF, F.col("offset"))
        .when(is_corrupt, F.col("physicalOffset") + F.col("size"))
        .otherwise(F.col("preparedTransactionOffset"))
        .alias("reference"),
        # A half without the key, which brokers always add, is known by its place.
        F.when(F.col("uniqKey").isNull(), F.xxhash64(F.lit("@"), anchor))
        .otherwise(F.xxhash64("uniqKey"))
        .alias("key"),
        F.col("checkTimes"),
        F.col("crcOk"),
        F.coalesce("error", F.when(kind == columns.OP, F.col("value").cast("string"))).alias(
            "text"
        ),
    )


def op_entries(events: DataFrame) -> DataFrame:
    """Give one row for each half that an op record marks as done: queue, slot, at.

    A slot is null where the record holds something that is no queue offset.
    """
    return (
        _of(events, Part.OP)
        .select("queue", "at", F.explode(F.split("text", ",")).alias("entry"))
        .where(F.col("entry") != "")
        .select("queue", F.expr("try_cast(entry AS BIGINT)").alias("slot"), "at")
    )


def link_ops(events: DataFrame) -> DataFrame:
    """Join each half with the ops that name it; ops that name no half come without one."""
    halves = _of(events, Part.HALF).select(
        "queue", F.col("reference").alias("slot"), "at", "key", "checkTimes"
    )
    ops = (
        op_entries(events)
        .groupBy("queue", "slot")
        .agg(F.count("*").alias("ops"), F.min("at").alias("firstOp"), F.max("at").alias("lastOp"))
    )
    return halves.join(ops, ["queue", "slot"], "full_outer")


def fold(events: DataFrame) -> DataFrame:
    """Give one row per transaction, with its state where numbers alone make it certain.

    ``at`` is its first half, ``decidedAt`` the record or op that decided it. An op that names no
    half has a row of its own, in state ``ORPHAN``: ``checks`` is then the half queue, ``slot``
    the offset in it, ``decidedAt`` and ``at`` the first and the last op that name it.
    """
    linked = link_ops(events)
    nothing = F.lit(None).cast("bigint")
    halves = linked.where(F.col("at").isNotNull()).select(
        "key", _part(Part.HALF), "at", nothing.alias("reference"), "checkTimes", "ops", "firstOp"
    )
    orphans = linked.where(F.col("at").isNull()).select(
        F.xxhash64(F.lit("op"), "queue", "slot").alias("key"),
        _part(Part.OP),
        F.col("lastOp").alias("at"),
        F.col("slot").alias("reference"),
        F.col("queue").alias("checkTimes"),  # an op has none, and the column travels anyway
        "ops",
        "firstOp",
    )
    decisions = _of(events, Part.COMMIT, Part.ROLLBACK, Part.DISCARD).select(
        "key",
        "part",
        "at",
        "reference",
        F.lit(None).cast("int").alias("checkTimes"),
        nothing.alias("ops"),
        nothing.alias("firstOp"),
    )
    grouped = (
        halves.unionByName(orphans)
        .unionByName(decisions)
        .groupBy("key")
        .agg(
            *_numbers("half", Part.HALF),
            F.count(F.when(_is(Part.HALF) & F.col("checkTimes").isNull(), 1)).alias("originals"),
            F.max("checkTimes").alias("checks"),
            F.coalesce(F.sum("ops"), F.lit(0)).alias("ops"),
            F.min("firstOp").alias("opAt"),
            *_numbers("orphan", Part.OP),
            *_numbers("commit", Part.COMMIT),
            *_numbers("rollback", Part.ROLLBACK),
            *_numbers("discard", Part.DISCARD),
        )
    )
    return grouped.select(
        "key",
        _certain_state().alias("state"),
        F.coalesce("halfAt", "discardAt", "orphanAt").alias("at"),
        F.coalesce("commitAt", "rollbackAt", "opAt").alias("decidedAt"),
        "checks",
        F.col("halfs").alias("halfMessages"),
        F.col("orphanOf").alias("slot"),
    )


def _numbers(name: str, part: Part) -> list[Column]:
    here = _is(part)
    return [
        F.count(F.when(here, 1)).alias(f"{name}s"),
        F.min(F.when(here, F.col("at"))).alias(f"{name}At"),
        F.max(F.when(here, F.col("reference"))).alias(f"{name}Of"),
    ]


def _certain_state() -> Column:
    """The state of a transaction in which nothing is unusual; null for any other."""
    count = {name: F.col(name) for name in ("halfs", "originals", "commits", "rollbacks", "ops")}
    undecided = (count["commits"] + count["rollbacks"] + count["ops"] + F.col("discards")) == 0
    plain = (count["halfs"] == 1) & (count["originals"] == 1) & (F.col("discards") == 0)
    committed = (
        (count["commits"] == 1)
        & (count["rollbacks"] == 0)
        & (F.col("commitOf") == F.col("halfAt"))
        & (F.col("commitAt") > F.col("halfAt"))
        & ((count["ops"] == 0) | ((count["ops"] == 1) & (F.col("opAt") > F.col("commitAt"))))
    )
    rolled_back = (
        (count["commits"] == 0)
        & (count["rollbacks"] == 1)
        & (F.col("rollbackOf") == F.col("halfAt"))
        & (F.col("rollbackAt") > F.col("halfAt"))
        & ((count["ops"] == 0) | ((count["ops"] == 1) & (F.col("opAt") > F.col("rollbackAt"))))
    )
    rolled_back_by_op = (
        (count["commits"] == 0)
        & (count["rollbacks"] == 0)
        & (count["ops"] == 1)
        & (F.col("opAt") > F.col("halfAt"))
    )
    return (
        F.when(F.col("orphans") > 0, ORPHAN)
        .when(undecided & (count["halfs"] >= 1) & (count["originals"] <= 1), State.PENDING)
        .when(plain & committed, State.COMMITTED)
        .when(plain & (rolled_back | rolled_back_by_op), State.ROLLED_BACK)
    )


def judged(events: DataFrame, folded: DataFrame, log: LogBounds) -> DataFrame:
    """Judge the transactions that ``fold`` left open: key, told, state, findings."""
    open_keys = folded.where(F.col("state").isNull()).select("key")
    opened = _of(events, Part.HALF, Part.COMMIT, Part.ROLLBACK, Part.DISCARD).join(
        open_keys, "key", "left_semi"
    )
    slots = _of(opened, Part.HALF).select(
        "key", "queue", F.col("reference").alias("slot"), F.col("at").alias("reference")
    )
    ops = slots.join(op_entries(events), ["queue", "slot"]).select(
        "key", _part(Part.OP), "at", "reference", F.lit(None).cast("int").alias("checkTimes")
    )
    parts = opened.select("key", "part", "at", "reference", "checkTimes").unionByName(ops)

    def verdict(rows: list[Row]) -> tuple[str, list[tuple[str, list[int], str]]]:
        history = (Event(Part(row[0]), row[1], row[2], row[3]) for row in rows)
        state, findings = judge(history, log)
        return str(state), [(str(f.kind), f.offsets, f.detail) for f in findings]

    # Without Arrow: converting nested rows through it needs pandas, which is not required.
    ask = F.udf(verdict, _VERDICT, useArrow=False)
    return (
        parts.groupBy("key")
        .agg(
            F.min(F.when(~_is(Part.OP), F.col("at"))).alias("told"),
            F.collect_list(F.struct("part", "at", "reference", "checkTimes")).alias("parts"),
        )
        .select("key", "told", ask("parts").alias("verdict"))
        .select("key", "told", "verdict.state", "verdict.findings")
    )


def transactions(folded: DataFrame, verdicts: DataFrame, names: DataFrame) -> DataFrame:
    """Describe every transaction that the log can tell about, one row each.

    ``names`` is the log with the columns ``schema.NAME_COLUMNS``, read once more: to carry the
    texts through ``fold`` would make it sort instead of hash.
    """
    settled = (
        folded.join(verdicts.select("key", F.col("state").alias("judged")), "key", "left")
        .withColumn("state", F.coalesce("state", "judged"))
        .where(~F.col("state").isin(State.EXPIRED, State.UNFOUNDED, ORPHAN))
        .withColumnRenamed("at", "physicalOffset")
    )
    return settled.join(names, "physicalOffset").select(
        F.col("uniqKey").alias("transactionId"),
        "producerGroup",
        F.col("realTopic").alias("topic"),
        "state",
        F.when(F.col("halfMessages") > 0, F.col("physicalOffset")).alias("halfOffset"),
        F.col("decidedAt").alias("decisionOffset"),
        F.col("timestamp").alias("preparedAt"),
        F.coalesce("checks", F.lit(0)).alias("checks"),
        "halfMessages",
    )


def named(findings: DataFrame, names: DataFrame) -> DataFrame:
    """Say of each finding which transaction it is about: kind, transactionId, offsets, detail."""
    texts = names.select(
        F.col("physicalOffset").alias("told"), F.col("uniqKey").alias("transactionId")
    )
    return findings.join(texts, "told", "left").select("kind", "transactionId", "offsets", "detail")


def lost_slots(events: DataFrame, log: LogBounds) -> list[LostSlots] | None:
    """Say which offsets of the half queues lie in what cannot be read; None if all can be."""
    ranges = _unreadable(log)
    if not ranges:
        return None
    at, slot = F.col("at"), F.col("reference")
    bounds = [
        bound
        for start, end in ranges
        for bound in (F.max(F.when(at < start, slot)), F.min(F.when(at >= end, slot)))
    ]
    lost = []
    for row in _of(events, Part.HALF).groupBy("queue").agg(*bounds).collect():
        queue, *slots = row
        for after, before in zip(slots[::2], slots[1::2], strict=True):
            lost.append(
                LostSlots(
                    queue,
                    _SLOT_MIN if after is None else after,
                    _SLOT_MAX if before is None else before,
                )
            )
    return lost


def _unreadable(log: LogBounds) -> Sequence[tuple[int, int]]:
    ranges = [(0, log.first_offset)] if log.first_offset else []
    ranges += log.damage
    return ranges if len(ranges) <= RANGES_MAX else [(ranges[0][0], ranges[-1][1])]


def orphan_ops(folded: DataFrame, lost: list[LostSlots] | None) -> DataFrame:
    """Find ops that name a half which is not there, and was not lost either."""
    queue, slot = F.col("checks"), F.col("slot")  # see fold
    excused = F.lit(False)
    if lost is not None:
        # A queue without any half that can be read may have held all of them.
        excused = ~queue.isin([entry.queue for entry in lost])
        for entry in lost:
            excused |= (queue == entry.queue) & (slot > entry.after) & (slot < entry.before)
    named_slot = F.format_string(
        "an op message marks offset %d of half queue %d as done, where there is no half message",
        slot,
        queue,
    )
    unread = F.lit("an op message holds something that is no offset of the half queue")
    return folded.where((F.col("state") == ORPHAN) & (slot.isNull() | ~excused)).select(
        F.lit(Kind.OP_WITHOUT_HALF).alias("kind"),
        F.array_distinct(F.array("decidedAt", "at")).alias("offsets"),
        F.when(slot.isNull(), unread).otherwise(named_slot).alias("detail"),
        F.lit(None).cast("bigint").alias("told"),
    )


def damaged_records(events: DataFrame) -> DataFrame:
    """List corrupt ranges, and records whose body fails its CRC."""
    size = F.col("reference") - F.col("at")
    corrupt = _corrupt(events).select(
        F.when(F.col("text") == UNWRITTEN, Kind.GAP).otherwise(Kind.CORRUPT_RECORD).alias("kind"),
        F.array("at", "reference").alias("offsets"),
        F.format_string("%d bytes: %s", size, "text").alias("detail"),
        F.lit(None).cast("bigint").alias("told"),
    )
    failed = events.where(~F.col("crcOk")).select(
        F.lit(Kind.CRC).alias("kind"),
        F.array("at").alias("offsets"),
        F.lit("the body does not match its CRC").alias("detail"),
        F.when(F.col("part").isNotNull(), F.col("at")).alias("told"),
    )
    return corrupt.unionByName(failed)


def damaged_ranges(events: DataFrame) -> list[tuple[int, int]]:
    """List the ranges [start, end) that hold no record and are no blank."""
    rows = _corrupt(events).select("at", "reference")
    return [(row[0], row[1]) for row in rows.collect()]


def _corrupt(events: DataFrame) -> DataFrame:
    return events.where(F.col("part") == _CORRUPT)


def faulty_transactions(verdicts: DataFrame) -> DataFrame:
    """List what ``judge`` found, one row per finding."""
    return verdicts.select("told", F.explode("findings").alias("finding")).select(
        "finding.kind", "finding.offsets", "finding.detail", "told"
    )


def _of(events: DataFrame, *parts: Part) -> DataFrame:
    return events.where(F.col("part").isin([int(part) for part in parts]))


def _is(part: Part) -> Column:
    return F.col("part") == int(part)


def _part(part: Part) -> Column:
    return F.lit(int(part)).cast("tinyint").alias("part")
