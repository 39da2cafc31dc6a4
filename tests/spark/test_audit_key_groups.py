"""What queries say of transactions is what the rules say of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from halfmq.spark_jobs.audit import key_groups
from halfmq.spark_jobs.audit.dialects import END
from halfmq.spark_jobs.audit.rules.judge import judge
from halfmq.spark_jobs.audit.rules.model import LogBounds, LogEvent, MessageContent, TimeLimits
from halfmq.spark_jobs.log.transaction_parts import Part
from halfmq.spark_jobs.source.event_source import EVENT_COLUMNS
from halfmq.spark_jobs.source.schema import ddl

TIME_LIMITS = TimeLimits(overdue_before_ms=30, passed_slot=5)
BOUNDS = {
    "of RocketMQ": LogBounds(0, last_offset=10**6),
    "of halfmq": LogBounds(0, last_offset=10**6, records_rollbacks=((0, END),)),
    "of both, with damage": LogBounds(
        100, ((300, 420), (700, 720)), 10**6, records_rollbacks=((500, 600), (800, END))
    ),
}
ALIKE = MessageContent(1, 2, 3, 4)

parts = st.sampled_from(
    [Part.OP, Part.COMMIT, Part.ROLLBACK, Part.DISCARD, Part.RESUME, Part.DELIVERED, Part.WAITING]
)


@st.composite
def histories(draw: st.DrawFn) -> list[LogEvent]:
    """Records of one key group: mostly what brokers write, sometimes anything."""
    total = draw(st.sampled_from([1, 1, 1, 1, 2, 3]))
    start = draw(st.integers(0, 99))
    written = draw(st.sampled_from([total, total, total, max(total - 1, 1)]))
    offsets_of_halves = [start + number for number in range(written)]
    checks = draw(st.sampled_from([None, None, None, None, 0, 2, 15]))
    sound = draw(st.sampled_from([True] * 9 + [False]))
    events = [
        LogEvent(
            Part.HALF, at, at, checks if at == start else None, number, total, at, ALIKE,
            sound=sound,
        )
        for number, at in enumerate(offsets_of_halves)
    ]  # fmt: skip
    at = start + draw(st.sampled_from([10, 10, 10, 0, -3]))
    kind = draw(st.sampled_from(["commit", "rollback", "op", "none", "any"]))
    if kind == "commit":
        content = ALIKE._replace(**draw(st.sampled_from([{}, {}, {}, {"queue": 9}, {"rest": 0}])))
        sound = draw(st.sampled_from([True] * 9 + [False]))
        events += [
            LogEvent(
                Part.COMMIT, at + number, half, None, number, total, at + number, content,
                sound=sound,
            )
            for number, half in enumerate(offsets_of_halves)
        ]  # fmt: skip
    elif kind == "rollback":
        events.append(LogEvent(Part.ROLLBACK, at, start, None, 0, total, at))
    elif kind == "any":
        offsets, named = st.integers(0, 130), st.sampled_from([*offsets_of_halves, 3])
        for part, offset, half in draw(st.lists(st.tuples(parts, offsets, named), max_size=4)):
            if part is not Part.OP or half in offsets_of_halves:  # else it is in no group
                known = ALIKE if part in (Part.COMMIT, Part.DELIVERED, Part.WAITING) else None
                events.append(LogEvent(part, offset, half, time_ms=offset, content=known))
    if kind in {"commit", "rollback"} and draw(st.integers(0, 9)):
        events += [LogEvent(Part.NAMED, at, h, None, 0, total, at) for h in offsets_of_halves[1:]]
    if kind in {"commit", "rollback", "op"} and draw(st.booleans()):
        later = at + draw(st.sampled_from([20, 20, 20, -1]))
        events += [LogEvent(Part.OP, later, half, time_ms=later) for half in offsets_of_halves]
    ops = [event for event in events if event.part is Part.OP]
    if ops and draw(st.integers(0, 9)) == 0:
        events.append(ops[0])  # an op record may list a half twice
    deciding = Part.ROLLBACK if kind == "rollback" else Part.COMMIT
    return [apart(event, deciding) for event in events]


def apart(event: LogEvent, deciding: Part) -> LogEvent:
    """Spread offsets by part, so that no two records have one; references go with their halves."""
    part = deciding if event.part is Part.NAMED else event.part
    reference = event.reference if event.part is Part.HALF else event.reference * 10 + Part.HALF
    return event._replace(offset=event.offset * 10 + part, reference=reference)


def row(key: int, event: LogEvent) -> tuple[Any, ...]:
    is_half = event.part is Part.HALF
    return (
        key, int(event.part), event.offset,
        None if is_half else event.reference, event.reference if is_half else None,
        event.check_times, event.number, event.total, event.time_ms, event.due_ms, event.sound,
        *(event.content or [0] * 4), event.half_id, key if is_half else 0,
    )  # fmt: skip


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(logs=st.lists(histories(), min_size=100, max_size=300))
def test_queries_say_what_the_rules_say(
    bounds: LogBounds, spark: SparkSession, logs: list[list[LogEvent]]
) -> None:
    """State, place, times, decision and findings of every key group."""
    rows = [row(key + 1, event) for key, history in enumerate(logs) for event in history]
    schema = ddl(*key_groups.COLUMNS, columns=EVENT_COLUMNS)
    events = spark.createDataFrame(rows, schema)

    settled = key_groups.settled(key_groups.grouped(events), bounds, TIME_LIMITS).collect()
    unsettled = [one["key"] for one in settled if one["state"] is None]
    keys = spark.createDataFrame([(key,) for key in unsettled], "key bigint")
    judged = key_groups.judged(events, keys, bounds, TIME_LIMITS, count=len(unsettled)).collect()

    told = [one for one in (*settled, *judged) if one["state"] is not None]
    verdicts = [judge(history, bounds, TIME_LIMITS) for history in logs]
    assert Counter(tuple(one[n] for n in key_groups.TRANSACTION_COLUMNS[:-1]) for one in told) == (
        Counter(
            (
                str(one.state),
                min(event.offset for event in history) if one.half is None else one.half,
                one.half,
                one.decided,
                one.took_ms,
                stored(history, one.half),
                one.checks,
                one.halves,
            )
            for history, verdict in zip(logs, verdicts, strict=True)
            for one in verdict.transactions
        )
    )
    assert sorted(
        (one["kind"], one["offsets"], one["detail"]) for one in judged if one["kind"]
    ) == (sorted((str(f.kind), f.offsets, f.detail) for one in verdicts for f in one.findings))
    assert len(unsettled) < len(logs)


def stored(history: list[LogEvent], half: int | None) -> int | None:
    """When a half was stored."""
    times = (e.time_ms for e in history if e.part is Part.HALF and e.offset == half)
    return next(times, None)
