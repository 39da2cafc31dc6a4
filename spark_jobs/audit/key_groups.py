"""What became of the transactions of a log, as functions from DataFrame to DataFrame.

All records with one producer group and one unique key are a *key group* and have one ``key``.
Nearly all groups are usual: one half record, and about it either nothing, or one record that
decides and perhaps an op after it. ``grouped`` makes one row of a group, and ``settled`` says what
became of the usual ones. The records of the others go to ``judge``, which knows all the rules; what
is said here is what it would say.

``events`` are rows of the source ``rocketmq-transactions`` with the columns ``COLUMNS``.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from ..log.transaction_parts import SLOT_BITS, Part
from ..source.events import WITH_CONTENT
from .rules.finals import CLOCK_STEP_MIN
from .rules.judge import judge
from .rules.model import (
    AuditedState,
    KeyGroupVerdict,
    Kind,
    LogBounds,
    LogEvent,
    MessageContent,
    TimeLimits,
)

COLUMNS: Final = (
    "key",
    "part",
    "physicalOffset",
    "halfOffset",
    "halfQueueOffset",
    "checkTimes",
    "number",
    "total",
    "time",
    "dueTime",
    "crcOk",
    "topicHash",
    "partition",
    "contentHash",
    "bodySize",
    "halfId",
    "label",
)
_CONTENT: Final = ("topicHash", "partition", "contentHash")
_RANGES_MAX: Final = 100  # compared in a query; of more, ``judge`` looks at what they may concern
_UNDECIDED: Final = (AuditedState.PENDING, AuditedState.PARKED, AuditedState.UNDETERMINED)
_BROADCAST_MAX: Final = 1_000_000  # keys that are sent to all tasks; some 16 MB

TRANSACTION_COLUMNS: Final = (
    "state",
    "at",  # physical offset of its half, else of its first record
    "half",
    "decided",
    "took",  # ms
    "time",  # ms, when it was prepared
    "checks",
    "halves",
    "label",
)
VERDICT_DDL: Final = (  # of a transaction; or with ``at``, ``kind`` and what follows, of a finding
    "state string, at bigint, half bigint, decided bigint, took bigint, time bigint, checks int,"
    " halves int, label bigint, kind string, offsets array<bigint>, detail string, isOpen boolean"
)


def _is(*parts: Part) -> Column:
    return F.col("part").isin(*(int(part) for part in parts))


def grouped(events: DataFrame) -> DataFrame:
    """Make one row of each key group: how many records of which part, and where they are."""
    is_half, is_op = _is(Part.HALF), _is(Part.OP)
    decides = _is(Part.COMMIT, Part.ROLLBACK)
    at, time = F.col("physicalOffset"), F.col("time")
    is_usual = is_half | is_op | decides
    is_usual &= F.col("checkTimes").isNull() & (F.col("total") == 1) & (F.col("number") == 0)
    is_usual &= F.coalesce("crcOk", F.expr("true"))
    is_usual &= F.coalesce(F.col("halfId") == F.col("halfOffset"), F.expr("true"))
    return events.groupBy("key").agg(
        F.count_if(~is_usual).alias("unusual"),
        F.count_if(is_half).alias("halves"),
        F.count_if(decides).alias("decisions"),
        F.count_if(is_op).alias("ops"),
        F.max(F.when(is_half, at)).alias("half"),
        F.max(F.when(is_half, time)).alias("halfTime"),
        F.max(F.when(is_half, F.col("halfQueueOffset"))).alias("slot"),
        F.max(F.when(is_half, F.col("label"))).alias("label"),
        F.max(F.when(decides, F.col("part"))).alias("decision"),
        F.max(F.when(decides, at)).alias("decided"),
        F.max(F.when(decides, time)).alias("decidedTime"),
        F.max(F.when(decides, F.col("halfOffset"))).alias("link"),
        F.max(F.when(is_op, at)).alias("op"),
        F.max(F.when(is_op, time)).alias("opTime"),
        # Of a half and a final that are alike, nothing is left.
        F.bit_xor(F.when(is_half | _is(Part.COMMIT), F.xxhash64(*_CONTENT))).alias("difference"),
    )


def settled(groups: DataFrame, bounds: LogBounds, limits: TimeLimits) -> DataFrame:
    """Say what became of the usual groups; the ``state`` of the others is null.

    The columns are ``TRANSACTION_COLUMNS`` and ``key``.
    """
    half, decided, op = F.col("half"), F.col("decided"), F.col("op")
    is_usual = (F.col("unusual") == 0) & (F.col("halves") == 1)
    is_usual &= F.col("slot") < 1 << SLOT_BITS
    by_record = is_usual & (F.col("decisions") == 1) & (F.col("link") == half) & (decided > half)
    by_record &= (F.col("ops") == 0) | ((F.col("ops") == 1) & (op > decided))
    by_record &= F.col("halfTime") - F.col("decidedTime") <= CLOCK_STEP_MIN
    is_commit = F.col("decision") == int(Part.COMMIT)
    undecided = is_usual & (F.col("decisions") == 0)
    by_op = undecided & (F.col("ops") == 1) & (op > half)
    by_op &= ~_touches(op, op, bounds.records_rollbacks) & ~_touches(half, op, bounds.damage)
    is_young = F.col("slot") >= limits.passed_slot
    if limits.overdue_before_ms is not None:
        is_young &= F.col("halfTime") >= limits.overdue_before_ms
    state = (
        F.when(by_record & is_commit & (F.col("difference") == 0), str(AuditedState.COMMITTED))
        .when(by_record & ~is_commit, str(AuditedState.ROLLED_BACK))
        .when(by_op, str(AuditedState.ROLLED_BACK))
        .when(undecided & (F.col("ops") == 0) & is_young, str(AuditedState.PENDING))
    )
    return groups.select(
        "key",
        state.alias("state"),
        half.alias("at"),
        "half",
        F.coalesce(decided, op).alias("decided"),
        (F.coalesce("decidedTime", "opTime") - F.col("halfTime")).alias("took"),
        F.col("halfTime").alias("time"),
        F.lit(0).alias("checks"),
        F.lit(1).alias("halves"),
        "label",
    )


def _touches(start: Column, end: Column, ranges: Sequence[tuple[int, int]]) -> Column:
    """Tell whether [start, end] touches one of the ranges [first, last)."""
    if len(ranges) > _RANGES_MAX:
        ranges = [(ranges[0][0], ranges[-1][1])]
    touches = F.expr("false")
    for first, last in ranges:
        touches |= (start < last) & (end >= first)
    return touches


# --- records that name a half


def linked(keyless: DataFrame, halves: DataFrame) -> DataFrame:
    """Give events without a key that of the half they name; where there is none, it stays null."""
    others = [name for name in keyless.columns if name not in {"key", "halfOffset"}]
    by_slot = halves.select(
        "halfQueueOffset", F.col("key").alias("found"), F.col("physicalOffset").alias("place")
    )
    ops = (
        keyless.where(_is(Part.OP))
        .join(by_slot, "halfQueueOffset", "left")
        .select(F.col("found").alias("key"), F.col("place").alias("halfOffset"), *others)
    )
    by_offset = halves.select(
        F.col("physicalOffset").alias("halfOffset"), F.col("key").alias("found")
    )
    bare = (
        keyless.where(~_is(Part.OP))
        .join(by_offset, "halfOffset", "left")
        .select(F.col("found").alias("key"), "halfOffset", *others)
    )
    return ops.unionByName(bare).select(*keyless.columns)


def orphans(ops: DataFrame, half_ranges: DataFrame, bounds: LogBounds) -> DataFrame:
    """Find op entries that mark what was never prepared.

    ``ops`` are entries without a half. Offsets in the half queue rise with the offsets in the log,
    so that its neighbours tell where a missing half should lie: in what cannot be read?
    ``half_ranges`` are the notes ``QUEUE`` about the half topic.
    """
    ranges = [(0, bounds.first_offset)] if bounds.first_offset else []
    ranges += bounds.damage
    if len(ranges) > _RANGES_MAX:
        ranges = [(ranges[0][0], ranges[-1][1])]
    at = F.col("physicalOffset")
    queue = F.shiftright("halfQueueOffset", SLOT_BITS).cast("int").alias("partition")
    slot = F.col("halfQueueOffset").bitwiseAND(F.lit((1 << SLOT_BITS) - 1)).alias("slot")
    found = ops.groupBy(queue, slot).agg(F.min(at).alias("first"), F.max(at).alias("last"))
    if ranges:
        around = [
            F.struct(
                F.max(F.when(F.col("lastPhysicalOffset") < start, F.col("endOffset"))).alias("low"),
                F.min(F.when(at >= end, F.col("offset"))).alias("high"),
            )
            for start, end in ranges
        ]
        # A queue without any half that can be read may have held all of them.
        lost = half_ranges.groupBy("partition").agg(F.array(*around).alias("lost"))
        found = found.join(F.broadcast(lost), "partition").where(
            "not exists(lost, one -> (one.low is null or one.low <= slot)"
            " and (one.high is null or slot < one.high))"
        )
    detail = F.format_string(
        "an op message marks offset %d of half queue %d as decided, where there is no half message",
        "slot",
        "partition",
    )
    return found.select(
        F.lit(str(Kind.OP_WITHOUT_HALF)).alias("kind"),
        F.array_distinct(F.array("first", "last")).alias("offsets"),
        detail.alias("detail"),
        F.lit(None).cast("bigint").alias("at"),
    )


# --- groups that are not usual


def judged(
    events: DataFrame, unsettled: DataFrame, bounds: LogBounds, limits: TimeLimits, *, count: int
) -> DataFrame:
    """Apply the rules to groups that are not usual: their key, and columns as in ``VERDICT_DDL``.

    ``unsettled`` are their ``count`` keys.
    """
    chosen = F.broadcast(unsettled) if count <= _BROADCAST_MAX else unsettled

    def verdict(history: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return list(_verdict(history, bounds, limits))

    udf = F.udf(verdict, f"array<struct<{VERDICT_DDL}>>", useArrow=False)
    return (
        events.join(chosen, "key", "left_semi")
        .groupBy("key")
        .agg(F.collect_list(F.struct(*COLUMNS[1:])).alias("history"))
        .select("key", F.inline(udf("history")))
    )


def event_of(
    part: int,
    offset: int,
    half: int | None,
    slot: int | None,
    checks: int | None,
    number: int,
    total: int,
    time: int,
    due: int,
    sound: bool | None,
    topic: int,
    queue: int,
    rest: int,
    body_size: int,
    half_id: int | None,
) -> LogEvent:
    """Make an event of a row with ``COLUMNS``, without its key and label."""
    reference = slot if part == Part.HALF else half
    return LogEvent(
        Part(part),
        offset,
        -1 if reference is None else reference,
        checks,
        number,
        total,
        time,
        MessageContent(topic, queue, rest, body_size) if part in WITH_CONTENT else None,
        due,
        sound is not False,
        half_id,
    )


def _verdict(
    history: Sequence[tuple[Any, ...]], bounds: LogBounds, limits: TimeLimits
) -> Iterator[tuple[Any, ...]]:
    """Judge a key group; yield rows of ``VERDICT_DDL``."""
    events = [event_of(*row[:-1]) for row in history]
    labels = {event.offset: row[-1] for event, row in zip(events, history, strict=True)}
    first = min(labels)
    times = {event.offset: event.time_ms for event in events if event.part is Part.HALF}
    verdict = judge(events, bounds, limits)
    is_open = _is_open(events, verdict, bounds)
    for one in verdict.transactions:
        at = first if one.half is None else one.half
        numbers = one.half, one.decided, one.took_ms, times.get(at), one.checks, one.halves
        yield (str(one.state), at, *numbers, labels.get(at), None, None, None, is_open)
    for finding in verdict.findings:
        found = str(finding.kind), finding.offsets, finding.detail
        yield (None, first, *[None] * 7, *found, is_open)


def _is_open(events: Sequence[LogEvent], verdict: KeyGroupVerdict, bounds: LogBounds) -> bool:
    """Tell whether the rules may say otherwise once the log is longer, without a further event."""
    if verdict.findings or any(one.state in _UNDECIDED for one in verdict.transactions):
        return True
    if any(event.offset == bounds.last_offset for event in events):
        return True  # more of several final messages may follow
    waiting = {event.number for event in events if event.part is Part.WAITING}
    if waiting - {event.number for event in events if event.part is Part.DELIVERED}:
        return True
    return is_moved(events)


def is_moved(events: Sequence[LogEvent]) -> bool:
    """Tell whether a message is in several queues: a later record tells whether it may be."""
    queues = {(event.number, event.content.queue) for event in events if event.content}
    return len(queues) > len({number for number, _ in queues})
