"""Classify every transaction of a commit log, as functions from DataFrame to DataFrame.

One pass over the log keeps the few columns of its transactional records (``transaction_events``);
everything else works on those:

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
_CORRUPT: Final = 0  # in the column ``part``: bytes that are no record
_OP_TAG: Final = "d"  # other op records mark nothing as done
RANGES_MAX: Final = 100  # unreadable ranges handled apart; more are taken for one wide range

# Offsets in the half queue that an unreadable stretch of the log may have held.
_SLOT_MIN: Final = -1
_SLOT_MAX: Final = 2**63 - 1

_FINDING: Final = StructType(
    [
        StructField("kind", StringType()),
        StructField("offsets", ArrayType(LongType())),
        StructField("detail", StringType()),
    ]
)
_VERDICT: Final = StructType(
    [StructField("state", StringType()), StructField("findings", ArrayType(_FINDING))]
)


class LostSlots(NamedTuple):
    """Queue offsets strictly between ``after`` and ``before`` of a half queue are unreadable."""

    queue: int
    after: int
    before: int


def transaction_events(log: DataFrame) -> DataFrame:
    """Keep what an audit needs: records of transactions, corrupt ranges, failed CRCs.

    ``log`` has the columns ``schema.AUDIT_COLUMNS``, and ``value`` for op records. Of a half,
    ``reference`` is its offset in the half queue; of a decision, the physical offset that it
    names. ``key`` stands for the transaction.
    """
    part = F.coalesce(*(F.when(F.col("transactionType") == k, v) for k, v in _PARTS.items()))
    is_half = F.col("transactionType") == columns.HALF
    anchor = F.when(is_half, F.col("physicalOffset")).otherwise(F.col("preparedTransactionOffset"))
    return log.where(
        (F.col("transactionType") != columns.NONE)
        | (F.col("recordType") == columns.CORRUPT)
        | ~F.col("crcOk")
    ).select(
        F.when(F.col("recordType") == columns.CORRUPT, _CORRUPT)
        .otherwise(part)
        .cast("tinyint")
        .alias("part"),
        F.col("physicalOffset").alias("at"),
        F.col("size"),
        F.col("partition").alias("queue"),
        F.when(is_half, F.col("offset"))
        .otherwise(F.col("preparedTransactionOffset"))
        .alias("reference"),
        F.coalesce(F.xxhash64("uniqKey"), F.xxhash64(F.lit("@"), anchor)).alias("key"),
        F.col("checkTimes"),
        F.col("timestamp"),
        F.col("crcOk"),
        F.col("uniqKey"),
        F.col("producerGroup"),
        F.col("realTopic"),
        F.col("error"),
        F.when(F.col("tags") == _OP_TAG, F.col("value").cast("string")).alias("done"),
    )


def op_entries(events: DataFrame) -> DataFrame:
    """Give one row for each half that an op record marks as done: queue, slot, at.

    A slot is null where the record holds something that is no queue offset.
    """
    return (
        _of(events, Part.OP)
        .select("queue", "at", F.explode(F.split("done", ",")).alias("text"))
        .where(F.col("text") != "")
        .select("queue", F.expr("try_cast(text AS BIGINT)").alias("slot"), "at")
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


def fold(events: DataFrame, linked: DataFrame) -> DataFrame:
    """Give one row per transaction, with its state where numbers alone make it certain."""
    halves = linked.where(F.col("at").isNotNull()).select(
        "key",
        F.lit(int(Part.HALF)).cast("tinyint").alias("part"),
        "at",
        F.lit(None).cast("bigint").alias("reference"),
        "checkTimes",
        "ops",
        "firstOp",
    )
    nothing = F.lit(None).cast("bigint")
    decisions = _of(events, Part.COMMIT, Part.ROLLBACK, Part.DISCARD).select(
        "key",
        "part",
        "at",
        "reference",
        F.lit(None).cast("int").alias("checkTimes"),
        nothing.alias("ops"),
        nothing.alias("firstOp"),
    )
    return (
        halves.unionByName(decisions)
        .groupBy("key")
        .agg(
            *_numbers("half", Part.HALF),
            F.count(F.when(_is(Part.HALF) & F.col("checkTimes").isNull(), 1)).alias("originals"),
            F.max("checkTimes").alias("checks"),
            F.coalesce(F.sum("ops"), F.lit(0)).alias("ops"),
            F.min("firstOp").alias("opAt"),
            *_numbers("commit", Part.COMMIT),
            *_numbers("rollback", Part.ROLLBACK),
            *_numbers("discard", Part.DISCARD),
        )
        .withColumn("state", _certain_state())
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
        F.when(undecided & (count["halfs"] >= 1) & (count["originals"] <= 1), State.PENDING)
        .when(plain & committed, State.COMMITTED)
        .when(plain & (rolled_back | rolled_back_by_op), State.ROLLED_BACK)
    )


def judged(events: DataFrame, linked: DataFrame, folded: DataFrame, log: LogBounds) -> DataFrame:
    """Judge the transactions that ``fold`` left open: key, state, findings."""
    open_keys = folded.where(F.col("state").isNull()).select("key")
    halves = linked.where(F.col("at").isNotNull()).join(open_keys, "key", "left_semi")
    ops = halves.select("queue", "slot", "key", F.col("at").alias("reference")).join(
        op_entries(events), ["queue", "slot"]
    )
    no_checks = F.lit(None).cast("int").alias("checkTimes")
    parts = (
        halves.select("key", _part(Part.HALF), "at", F.col("at").alias("reference"), "checkTimes")
        .unionByName(ops.select("key", _part(Part.OP), "at", "reference", no_checks))
        .unionByName(
            _of(events, Part.COMMIT, Part.ROLLBACK, Part.DISCARD)
            .join(open_keys, "key", "left_semi")
            .select("key", "part", "at", "reference", no_checks)
        )
    )

    def verdict(rows: list[Row]) -> tuple[str, list[tuple[str, list[int], str]]]:
        history = (Event(Part(row[0]), row[1], row[2], row[3]) for row in rows)
        state, findings = judge(history, log)
        return str(state), [(str(f.kind), f.offsets, f.detail) for f in findings]

    # Without Arrow: converting nested rows through it needs pandas, which is not required.
    ask = F.udf(verdict, _VERDICT, useArrow=False)
    return (
        parts.groupBy("key")
        .agg(F.collect_list(F.struct("part", "at", "reference", "checkTimes")).alias("parts"))
        .select("key", ask("parts").alias("verdict"))
        .select("key", "verdict.state", "verdict.findings")
    )


def transactions(events: DataFrame, folded: DataFrame, verdicts: DataFrame) -> DataFrame:
    """Describe every transaction that the log can tell about, one row each."""
    settled = (
        folded.join(verdicts.select("key", F.col("state").alias("judged")), "key", "left")
        .withColumn("state", F.coalesce("state", "judged"))
        .where(~F.col("state").isin(State.EXPIRED, State.UNFOUNDED))
        .withColumn("toldAt", F.coalesce("halfAt", "discardAt"))
    )
    # The strings are fetched now, from one record of each: carrying them through the grouping
    # above would make it sort instead of hash.
    told = _of(events, Part.HALF, Part.DISCARD).select(
        "key",
        F.col("at").alias("toldAt"),
        F.col("uniqKey").alias("transactionId"),
        "producerGroup",
        F.col("realTopic").alias("topic"),
        F.col("timestamp").alias("preparedAt"),
    )
    return settled.join(told, ["key", "toldAt"]).select(
        "transactionId",
        "producerGroup",
        "topic",
        "state",
        F.col("halfAt").alias("halfOffset"),
        F.coalesce("commitAt", "rollbackAt", "opAt").alias("decisionOffset"),
        "preparedAt",
        F.coalesce("checks", F.lit(0)).alias("checks"),
        F.col("halfs").alias("halfMessages"),
    )


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


def orphan_ops(linked: DataFrame, lost: list[LostSlots] | None) -> DataFrame:
    """Find ops that name a half which is not there, and was not lost either."""
    excused = F.lit(False)
    if lost is not None:
        # A queue without any half that can be read may have held all of them.
        excused = ~F.col("queue").isin([entry.queue for entry in lost])
        for entry in lost:
            between = (F.col("slot") > entry.after) & (F.col("slot") < entry.before)
            excused |= (F.col("queue") == entry.queue) & between
    named = F.format_string(
        "an op message marks offset %d of half queue %d as done, where there is no half message",
        "slot",
        "queue",
    )
    unread = F.lit("an op message holds something that is no offset of the half queue")
    return linked.where(F.col("at").isNull() & (F.col("slot").isNull() | ~excused)).select(
        F.lit(Kind.OP_WITHOUT_HALF).alias("kind"),
        F.lit(None).cast("string").alias("transactionId"),
        F.array_distinct(F.array("firstOp", "lastOp")).alias("offsets"),
        F.coalesce(named, unread).alias("detail"),
    )


def damaged_records(events: DataFrame) -> DataFrame:
    """List corrupt ranges, and records whose body fails its CRC."""
    end = F.col("at") + F.col("size")
    corrupt = events.where(F.col("part") == _CORRUPT).select(
        F.when(F.col("error") == UNWRITTEN, Kind.GAP).otherwise(Kind.CORRUPT_RECORD).alias("kind"),
        F.lit(None).cast("string").alias("transactionId"),
        F.array("at", end).alias("offsets"),
        F.format_string("%d bytes: %s", "size", "error").alias("detail"),
    )
    failed = events.where(~F.col("crcOk")).select(
        F.lit(Kind.CRC).alias("kind"),
        F.when(F.col("part").isNotNull(), F.col("uniqKey")).alias("transactionId"),
        F.array("at").alias("offsets"),
        F.lit("the body does not match its CRC").alias("detail"),
    )
    return corrupt.unionByName(failed)


def faulty_transactions(events: DataFrame, verdicts: DataFrame) -> DataFrame:
    """List what ``judge`` found, one row per finding."""
    faulty = verdicts.where(F.size("findings") > 0).select(
        "key", F.explode("findings").alias("finding")
    )
    names = (
        _of(events, Part.HALF, Part.COMMIT, Part.ROLLBACK, Part.DISCARD)
        .join(faulty.select("key"), "key", "left_semi")
        .groupBy("key")
        .agg(F.min("uniqKey").alias("transactionId"))
    )
    return faulty.join(names, "key", "left").select(
        "finding.kind", "transactionId", "finding.offsets", "finding.detail"
    )


def _of(events: DataFrame, *parts: Part) -> DataFrame:
    return events.where(F.col("part").isin([int(part) for part in parts]))


def _is(part: Part) -> Column:
    return F.col("part") == int(part)


def _part(part: Part) -> Column:
    return F.lit(int(part)).cast("tinyint").alias("part")
