"""What the audit makes of one transaction's records; neither Java nor Spark is needed here."""

from __future__ import annotations

import pytest

from halfmq.spark_jobs.judge import Event, Kind, LogBounds, Part, State, judge

WHOLE = LogBounds(first_offset=0)


def half(offset: int, check_times: int | None = None) -> Event:
    return Event(Part.HALF, offset, -1, check_times)


def op(offset: int, of: int) -> Event:
    return Event(Part.OP, offset, of)


def commit(offset: int, of: int) -> Event:
    return Event(Part.COMMIT, offset, of)


def rollback(offset: int, of: int) -> Event:
    return Event(Part.ROLLBACK, offset, of)


def discard(offset: int, of: int = 0) -> Event:
    return Event(Part.DISCARD, offset, of)


HEALTHY = {
    "prepared": ([half(10)], State.PENDING),
    "checked": ([half(10), half(20, 1), half(30, 2)], State.PENDING),
    "committed": ([half(10), commit(20, 10)], State.COMMITTED),
    "committed, with its op": ([half(10), commit(20, 10), op(30, 10)], State.COMMITTED),
    "rolled back by RocketMQ": ([half(10), op(30, 10)], State.ROLLED_BACK),
    "rolled back by halfmq": ([half(10), rollback(20, 10)], State.ROLLED_BACK),
    "rolled back by halfmq, mirrored": (
        [half(10), rollback(20, 10), op(30, 10)],
        State.ROLLED_BACK,
    ),
    "committed at a check": (
        [half(10), half(20, 1), commit(30, 20), op(40, 20)],
        State.COMMITTED,
    ),
    "rolled back at a check": ([half(10), half(20, 1), op(40, 20)], State.ROLLED_BACK),
    "committed late, on the original": (
        [half(10), half(20, 1), commit(30, 10), half(40, 2), op(50, 10)],
        State.COMMITTED,
    ),
    "rolled back twice": ([half(10), half(20, 1), op(30, 10), op(40, 20)], State.ROLLED_BACK),
    "discarded": ([half(10), half(20, 1), discard(30)], State.PARKED),
    "parked by halfmq": ([half(10), discard(30, 10)], State.PARKED),
    "parked, committed": ([half(10), discard(30, 10), commit(40, 10)], State.COMMITTED),
    "parked, rolled back": ([half(10), discard(30, 10), rollback(40, 10)], State.ROLLED_BACK),
    "discarded, resumed": ([half(10), discard(30), half(40, 0)], State.PENDING),
    "discarded, resumed, discarded": (
        [half(10), discard(30), half(40, 0), discard(50)],
        State.PARKED,
    ),
    "half of RocketMQ, decided by halfmq": (
        [half(10), half(20, 1), commit(30, 20), op(40, 20)],
        State.COMMITTED,
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_history_has_its_state_and_no_finding(name: str) -> None:
    """In either dialect, and in both at once."""
    events, state = HEALTHY[name]

    for order in (events, events[::-1]):
        assert judge(order, WHOLE) == (state, [])


FAULTY = {
    "committed twice on one half": (
        [half(10), commit(20, 10), commit(30, 10), op(40, 10), op(40, 10)],
        State.COMMITTED,
        [(Kind.COMMITTED_TWICE, [20, 30])],
    ),
    "committed twice, at the local transaction and at a check": (
        [half(10), half(20, 1), commit(30, 10), op(40, 10), commit(50, 20), op(60, 20)],
        State.COMMITTED,
        [(Kind.COMMITTED_TWICE, [30, 50])],
    ),
    "commit behind the op of a rollback": (
        [half(10), op(20, 10), commit(30, 10), op(40, 10)],
        State.COMMITTED,
        [(Kind.COMMIT_AFTER_ROLLBACK, [20, 30])],
    ),
    "commit and rollback whose ops share a record": (
        [half(10), commit(20, 10), op(30, 10), op(30, 10)],
        State.COMMITTED,
        [(Kind.COMMIT_AFTER_ROLLBACK, [20, 30])],
    ),
    "rolled back at a check, then committed late": (
        [half(10), half(20, 1), op(30, 20), commit(40, 10)],
        State.COMMITTED,
        [(Kind.COMMIT_AFTER_ROLLBACK, [30, 40])],
    ),
    "committed, and rolled back at a check minutes later": (
        [half(10), half(20, 1), commit(30, 10), op(40, 10), op(90, 20)],
        State.COMMITTED,
        [(Kind.ROLLBACK_AFTER_COMMIT, [30, 90])],
    ),
    "rollback record, then a commit": (
        [half(10), rollback(20, 10), commit(30, 10)],
        State.COMMITTED,
        [(Kind.COMMIT_AFTER_ROLLBACK, [20, 30])],
    ),
    "commit, then a rollback record": (
        [half(10), commit(20, 10), rollback(30, 10), op(40, 10), op(40, 10)],
        State.COMMITTED,
        [(Kind.ROLLBACK_AFTER_COMMIT, [20, 30])],
    ),
    "final message for nothing": (
        [commit(20, 10)],
        State.UNFOUNDED,
        [(Kind.DECISION_WITHOUT_HALF, [20])],
    ),
    "rollback record for nothing": (
        [rollback(20, 10)],
        State.UNFOUNDED,
        [(Kind.DECISION_WITHOUT_HALF, [20])],
    ),
    "a final message made from a final message": (
        [half(10), commit(20, 10), op(30, 10), commit(40, 20)],
        State.COMMITTED,
        [(Kind.DECISION_WITHOUT_HALF, [40]), (Kind.COMMITTED_TWICE, [20, 40])],
    ),
    "a decision before its half": (
        [commit(5, 10), half(10)],
        State.COMMITTED,
        [(Kind.DECISION_WITHOUT_HALF, [5])],
    ),
    "an op before its half": (
        [op(5, 10), half(10)],
        State.PENDING,
        [(Kind.OP_WITHOUT_HALF, [5])],
    ),
    "twins": ([half(10), half(20)], State.PENDING, [(Kind.DUPLICATE_PREPARE, [10, 20])]),
    "twins, one committed and the other rolled back": (
        [half(10), half(20), commit(30, 10), rollback(40, 20)],
        State.COMMITTED,
        [(Kind.DUPLICATE_PREPARE, [10, 20])],
    ),
    "twins, one rolled back by an op first": (
        [half(10), half(20), op(30, 20), commit(40, 10)],
        State.COMMITTED,
        [(Kind.DUPLICATE_PREPARE, [10, 20])],
    ),
    "twins, both committed": (
        [half(10), half(20), commit(30, 10), commit(40, 20)],
        State.COMMITTED,
        [(Kind.DUPLICATE_PREPARE, [10, 20]), (Kind.COMMITTED_TWICE, [30, 40])],
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_history_is_found_out_with_its_offsets(name: str) -> None:
    """Each fault by its kind, and nothing that is none."""
    events, state, findings = FAULTY[name]

    for order in (events, events[::-1]):
        verdict = judge(order, WHOLE)
        assert verdict.state == state
        assert [(finding.kind, finding.offsets) for finding in verdict.findings] == findings
        assert all(finding.detail for finding in verdict.findings)


CUT_SHORT = LogBounds(first_offset=100)
DAMAGED = LogBounds(first_offset=0, damage=((5, 12), (300, 400)))

UNREADABLE = {
    "final message, half expired": ([commit(120, 10)], CUT_SHORT, State.EXPIRED),
    "rollback record, half expired": ([rollback(120, 10)], CUT_SHORT, State.EXPIRED),
    "original expired, copy committed": (
        [half(110, 1), commit(120, 110), op(130, 110)],
        CUT_SHORT,
        State.COMMITTED,
    ),
    "original expired, committed on it": (
        [half(110, 1), commit(120, 10)],
        CUT_SHORT,
        State.COMMITTED,
    ),
    "original expired, undecided": ([half(110, 1)], CUT_SHORT, State.PENDING),
    "half expired, parked": ([discard(120, 10)], CUT_SHORT, State.PARKED),
    "half expired, parked, committed": (
        [discard(120, 10), commit(130, 10)],
        CUT_SHORT,
        State.EXPIRED,
    ),
    "half lost in damage": ([commit(20, 10)], DAMAGED, State.EXPIRED),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_can_no_longer_be_read_is_held_against_nobody(name: str) -> None:
    """Expired and damaged stretches may have held the half."""
    events, bounds, state = UNREADABLE[name]

    assert judge(events, bounds) == (state, [])


def test_beside_the_damage_a_missing_half_still_counts() -> None:
    """A range excuses what lies in it, not what lies at its end."""
    assert judge([commit(20, 12)], DAMAGED).state is State.UNFOUNDED
    assert judge([commit(500, 400)], DAMAGED).state is State.UNFOUNDED
    assert judge([commit(500, 399)], DAMAGED).state is State.EXPIRED
