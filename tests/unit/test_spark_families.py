"""The shortcuts of the audit say what ``judge`` says; neither Java nor Spark is needed here."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmq.spark_jobs.audit.events import EVENT, NO_CHECKS, Records
from halfmq.spark_jobs.audit.families import STATES, judge_families
from halfmq.spark_jobs.audit.histograms import Histogram
from halfmq.spark_jobs.audit.judge import Event, LogBounds, Part, State, Terms, judge

BOUNDS = LogBounds(first_offset=0, last_offset=10**6)
TERMS = Terms(overdue_before_ms=30, passed_slot=5)

parts = st.sampled_from([Part.OP, Part.COMMIT, Part.ROLLBACK, Part.DISCARD, Part.RESUME])


@st.composite
def families(draw: st.DrawFn) -> list[Event]:
    """Records of one family: mostly what brokers write, sometimes anything."""
    total = draw(st.sampled_from([1, 1, 1, 2, 3]))
    start = draw(st.integers(0, 99))
    written = draw(st.sampled_from([total, total, total, max(total - 1, 1)]))
    halves = [start + number for number in range(written)]
    checks = draw(st.sampled_from([None, None, None, None, 0, 2, 15]))
    events = [
        Event(Part.HALF, at, at, checks if at == start else None, number, total, time_ms=at)
        for number, at in enumerate(halves)
    ]
    at = start + draw(st.sampled_from([10, 10, 10, 0, -3]))
    kind = draw(st.sampled_from(["commit", "rollback", "op", "none", "any"]))
    if kind == "commit":
        for number, half in enumerate(halves):
            events.append(Event(Part.COMMIT, at + number, half, None, number, total, at + number))
    elif kind == "rollback":
        events.append(Event(Part.ROLLBACK, at, start, None, 0, total, at))
    elif kind == "any":
        offsets, named = st.integers(0, 130), st.sampled_from([*halves, 3])
        for part, offset, half in draw(st.lists(st.tuples(parts, offsets, named), max_size=4)):
            if part is not Part.OP or half in halves:  # an op is in the family of its half
                events.append(Event(part, offset, half, time_ms=offset))
    if kind in {"commit", "rollback"} and draw(st.integers(0, 9)):
        events += [Event(Part.NAMED, at, half, None, 0, total, at) for half in halves[1:]]
    if kind in {"commit", "rollback", "op"} and draw(st.booleans()):
        behind = at + draw(st.sampled_from([20, 20, 20, -1]))
        events += [Event(Part.OP, behind, half, time_ms=behind) for half in halves]
    ops = [event for event in events if event.part is Part.OP]
    if ops and draw(st.integers(0, 9)) == 0:
        events.append(ops[0])  # an op record may list a half twice
    deciding = Part.ROLLBACK if kind == "rollback" else Part.COMMIT
    return [apart(event, deciding) for event in events]


def apart(event: Event, deciding: Part) -> Event:
    """Spread offsets by part, so that no two records have one; references go with their halves."""
    part = deciding if event.part is Part.NAMED else event.part
    reference = event.reference if event.part is Part.HALF else event.reference * 8 + Part.HALF
    return event._replace(offset=event.offset * 8 + part, reference=reference)


def packed(histories: list[list[Event]]) -> Records:
    rows = [
        (key, e.offset, e.reference, e.time_ms, key,
         NO_CHECKS if e.check_times is None else e.check_times, e.part, e.number, e.total)
        for key, history in enumerate(histories)
        for e in history
    ]  # fmt: skip
    return np.array(rows, dtype=EVENT)


@settings(max_examples=300)
@given(histories=st.lists(families(), min_size=1, max_size=6))
def test_what_is_settled_at_once_is_what_judge_would_say(histories: list[list[Event]]) -> None:
    """State, place, time, decision and findings of every family, and how long each took."""
    judged = judge_families(packed(histories), BOUNDS, TERMS)

    verdicts = [judge(history, BOUNDS, TERMS) for history in histories]
    transactions = [t for verdict in verdicts for t in verdict.transactions]
    assert judged.states == Counter(t.state for t in transactions)
    assert sorted(told.finding for told in judged.findings) == sorted(
        finding for verdict in verdicts for finding in verdict.findings
    )
    void = {State.EXPIRED, State.UNFOUNDED}
    expected = [
        (-1 if t.half is None else t.half, stored(history, t.half),
         -1 if t.decided is None else t.decided,
         -1 if t.took_ms is None else t.took_ms, t.checks, t.halves, t.state)
        for history, verdict in zip(histories, verdicts, strict=True)
        for t in verdict.transactions
        if t.state not in void
    ]  # fmt: skip
    assert sorted(expected) == sorted(
        (*row, STATES[state])
        for *row, state in judged.transactions[
            ["half", "time", "decided", "took", "checks", "halves", "state"]
        ].tolist()
    )


def stored(history: list[Event], half: int | None) -> int:
    """When a half was stored; -1 without one."""
    times = (e.time_ms for e in history if e.part is Part.HALF and e.offset == half)
    return next(times, -1)


@given(values=st.lists(st.integers(0, 2**40), min_size=1), cut=st.integers(0, 5))
def test_percentiles_are_off_by_less_than_one_percent(values: list[int], cut: int) -> None:
    """However the numbers were divided before they were added up."""
    histogram = Histogram()
    for part in (values[:cut], values[cut:]):
        other = Histogram()
        other.add(np.full(len(part), 7, dtype=np.uint64), np.array(part, dtype=np.int64))
        histogram.merge(other.pack())

    told = histogram.percentiles(7, [0.0, 0.5, 1.0])

    ordered = sorted(values)
    exact = [ordered[0], ordered[(len(values) - 1) // 2], ordered[-1]]
    for number, percentile in zip(exact, told, strict=True):
        assert number <= percentile <= number * 1.01 + (number >= 256)
    assert (histogram.labels(), histogram.count(7)) == ([7], len(values))
