"""What the audit makes of one transaction's records; neither Java nor Spark is needed here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from halfmq.spark_jobs.audit.dialects import END
from halfmq.spark_jobs.audit.rules.judge import judge
from halfmq.spark_jobs.audit.rules.model import (
    NO_TIME_LIMITS,
    AuditedState,
    AuditedTransaction,
    Kind,
    LogBounds,
    LogEvent,
    MessageContent,
    TimeLimits,
)
from halfmq.spark_jobs.log.transaction_parts import Part

WHOLE = LogBounds(first_offset=0)
OURS = LogBounds(first_offset=0, records_rollbacks=((0, END),))


def half(
    offset: int, check_times: int | None = None, *, number: int = 0, total: int = 1
) -> LogEvent:
    """A half at an offset, stored in that millisecond and at that place of its queue."""
    return LogEvent(Part.HALF, offset, offset, check_times, number, total, time_ms=offset)


def op(offset: int, of: int) -> LogEvent:
    return LogEvent(Part.OP, offset, of, time_ms=offset)


def commit(offset: int, of: int, *, number: int = 0, total: int = 1) -> LogEvent:
    return LogEvent(Part.COMMIT, offset, of, None, number, total, time_ms=offset)


def resume(offset: int, of: int) -> LogEvent:
    return LogEvent(Part.RESUME, offset, of)


def named(offset: int, *halves: int) -> list[LogEvent]:
    return [LogEvent(Part.NAMED, offset, half) for half in halves]


def group(*offsets: int) -> list[LogEvent]:
    """The halves of several messages, all of them or the first few."""
    return [half(offset, number=n, total=3) for n, offset in enumerate(offsets)]


def finals(start: int, *halves: int, total: int = 3) -> list[LogEvent]:
    """The final messages of several, with the names in the first."""
    messages = [commit(start + n, of, number=n, total=total) for n, of in enumerate(halves) if of]
    return messages + named(start, *filter(None, halves[1:]))


def rollback(offset: int, of: int) -> LogEvent:
    return LogEvent(Part.ROLLBACK, offset, of)


def discard(offset: int, of: int = 0) -> LogEvent:
    return LogEvent(Part.DISCARD, offset, of)


HEALTHY: dict[str, tuple[list[LogEvent], AuditedState | list[AuditedState]]] = {
    "prepared": ([half(10)], AuditedState.PENDING),
    "checked": ([half(10), half(20, 1), half(30, 2)], AuditedState.PENDING),
    "committed": ([half(10), commit(20, 10)], AuditedState.COMMITTED),
    "committed, with its op": ([half(10), commit(20, 10), op(30, 10)], AuditedState.COMMITTED),
    "rolled back by RocketMQ": ([half(10), op(30, 10)], AuditedState.ROLLED_BACK),
    "rolled back by halfmq": ([half(10), rollback(20, 10)], AuditedState.ROLLED_BACK),
    "rolled back by halfmq, mirrored": (
        [half(10), rollback(20, 10), op(30, 10)],
        AuditedState.ROLLED_BACK,
    ),
    "committed at a check": (
        [half(10), half(20, 1), commit(30, 20), op(40, 20)],
        AuditedState.COMMITTED,
    ),
    "rolled back at a check": ([half(10), half(20, 1), op(40, 20)], AuditedState.ROLLED_BACK),
    "committed late, on the original": (
        [half(10), half(20, 1), commit(30, 10), half(40, 2), op(50, 10)],
        AuditedState.COMMITTED,
    ),
    "rolled back twice": (
        [half(10), half(20, 1), op(30, 10), op(40, 20)],
        AuditedState.ROLLED_BACK,
    ),
    "discarded": ([half(10), half(20, 1), discard(30)], AuditedState.PARKED),
    "parked by halfmq": ([half(10), discard(30, 10)], AuditedState.PARKED),
    "parked, committed": ([half(10), discard(30, 10), commit(40, 10)], AuditedState.COMMITTED),
    "parked, rolled back": (
        [half(10), discard(30, 10), rollback(40, 10)],
        AuditedState.ROLLED_BACK,
    ),
    "discarded, resumed": ([half(10), discard(30), half(40, 0)], AuditedState.PENDING),
    "discarded, resumed, discarded": (
        [half(10), discard(30), half(40, 0), discard(50)],
        AuditedState.PARKED,
    ),
    "half of RocketMQ, decided by halfmq": (
        [half(10), half(20, 1), commit(30, 20), op(40, 20)],
        AuditedState.COMMITTED,
    ),
    "parked, resumed by halfmq": (
        [half(10), discard(30, 10), resume(40, 10)],
        AuditedState.PENDING,
    ),
    "parked, resumed, parked": (
        [half(10), discard(30, 10), resume(40, 10), discard(50, 10)],
        AuditedState.PARKED,
    ),
    "parked, resumed, committed": (
        [half(10), discard(30, 10), resume(40, 10), commit(50, 10)],
        AuditedState.COMMITTED,
    ),
    "several messages": (group(10, 11, 12), AuditedState.PENDING),
    "several messages, parked": ([*group(10, 11, 12), discard(20, 10)], AuditedState.PARKED),
    "several messages, committed": (
        [*group(10, 11, 12), *finals(20, 10, 11, 12), op(30, 10), op(30, 11), op(30, 12)],
        AuditedState.COMMITTED,
    ),
    "several messages, rolled back": (
        [*group(10, 11, 12), rollback(20, 10), *named(20, 11, 12), *(op(30, n) for n in (10, 11))],
        AuditedState.ROLLED_BACK,
    ),
    "several messages, cut off and rolled back": (
        [*group(10, 11), rollback(20, 10), *named(20, 11), op(30, 10), op(30, 11)],
        AuditedState.ROLLED_BACK,
    ),
    "several messages, cut off": (group(10, 11), AuditedState.PENDING),
    "several messages, rolled back by RocketMQ one by one": (
        [*group(10, 11, 12), op(30, 10), op(40, 11), op(50, 12)],
        AuditedState.ROLLED_BACK,
    ),
    "several messages, final messages made good at a start": (
        [*group(10, 11, 12), *finals(20, 10, 11), commit(40, 12, number=2, total=3)],
        AuditedState.COMMITTED,
    ),
    "prepared again after a rollback": (
        [half(10), rollback(20, 10), half(30), commit(40, 30)],
        [AuditedState.ROLLED_BACK, AuditedState.COMMITTED],
    ),
}


def states(expected: AuditedState | list[AuditedState]) -> list[AuditedState]:
    return expected if isinstance(expected, list) else [expected]


def outcome(
    events: Sequence[LogEvent], bounds: LogBounds = WHOLE, limits: TimeLimits = NO_TIME_LIMITS
) -> tuple[list[AuditedState], list[tuple[Kind, list[int]]]]:
    verdict = judge(events, bounds, limits)
    assert all(finding.detail for finding in verdict.findings)
    found = [(finding.kind, finding.offsets) for finding in verdict.findings]
    return [transaction.state for transaction in verdict.transactions], sorted(found)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_history_has_its_state_and_no_finding(name: str) -> None:
    """In either dialect, and in both at once."""
    events, expected = HEALTHY[name]

    for order in (events, events[::-1]):
        assert outcome(order) == (states(expected), [])


FAULTY: dict[
    str, tuple[list[LogEvent], AuditedState | list[AuditedState], list[tuple[Kind, list[int]]]]
] = {
    "committed twice on one half": (
        [half(10), commit(20, 10), commit(30, 10), op(40, 10), op(40, 10)],
        AuditedState.COMMITTED,
        [(Kind.COMMITTED_TWICE, [20, 30])],
    ),
    "committed twice, at the local transaction and at a check": (
        [half(10), half(20, 1), commit(30, 10), op(40, 10), commit(50, 20), op(60, 20)],
        AuditedState.COMMITTED,
        [(Kind.COMMITTED_TWICE, [30, 50])],
    ),
    "commit behind the op of a rollback": (
        [half(10), op(20, 10), commit(30, 10), op(40, 10)],
        AuditedState.COMMITTED,
        [(Kind.COMMIT_AFTER_ROLLBACK, [20, 30])],
    ),
    "commit and rollback whose ops share a record": (
        [half(10), commit(20, 10), op(30, 10), op(30, 10)],
        AuditedState.COMMITTED,
        [(Kind.COMMIT_AFTER_ROLLBACK, [20, 30])],
    ),
    "rolled back at a check, then committed late": (
        [half(10), half(20, 1), op(30, 20), commit(40, 10)],
        AuditedState.COMMITTED,
        [(Kind.COMMIT_AFTER_ROLLBACK, [30, 40])],
    ),
    "committed, and rolled back at a check minutes later": (
        [half(10), half(20, 1), commit(30, 10), op(40, 10), op(90, 20)],
        AuditedState.COMMITTED,
        [(Kind.ROLLBACK_AFTER_COMMIT, [30, 90])],
    ),
    "rollback record, then a commit": (
        [half(10), rollback(20, 10), commit(30, 10)],
        AuditedState.COMMITTED,
        [(Kind.COMMIT_AFTER_ROLLBACK, [20, 30])],
    ),
    "commit, then a rollback record": (
        [half(10), commit(20, 10), rollback(30, 10), op(40, 10), op(40, 10)],
        AuditedState.COMMITTED,
        [(Kind.ROLLBACK_AFTER_COMMIT, [20, 30])],
    ),
    "final message for nothing": (
        [commit(20, 10)],
        AuditedState.UNFOUNDED,
        [(Kind.DECISION_WITHOUT_HALF, [20])],
    ),
    "rollback record for nothing": (
        [rollback(20, 10)],
        AuditedState.UNFOUNDED,
        [(Kind.DECISION_WITHOUT_HALF, [20])],
    ),
    "a final message made from a final message": (
        [half(10), commit(20, 10), op(30, 10), commit(40, 20)],
        AuditedState.COMMITTED,
        [(Kind.DECISION_WITHOUT_HALF, [40]), (Kind.COMMITTED_TWICE, [20, 40])],
    ),
    "a decision before its half": (
        [commit(5, 10), half(10)],
        AuditedState.COMMITTED,
        [(Kind.DECISION_WITHOUT_HALF, [5])],
    ),
    "an op before its half": (
        [op(5, 10), half(10)],
        AuditedState.PENDING,
        [(Kind.OP_WITHOUT_HALF, [5])],
    ),
    "one message prepared twice": (
        [half(10), half(20)],
        [AuditedState.PENDING, AuditedState.PENDING],
        [(Kind.DUPLICATE_PREPARE, [10, 20])],
    ),
    "one message prepared twice, one committed and the other rolled back": (
        [half(10), half(20), commit(30, 10), rollback(40, 20)],
        [AuditedState.COMMITTED, AuditedState.ROLLED_BACK],
        [(Kind.DUPLICATE_PREPARE, [10, 20])],
    ),
    "one message prepared twice, one rolled back by an op first": (
        [half(10), half(20), op(30, 20), commit(40, 10)],
        [AuditedState.COMMITTED, AuditedState.ROLLED_BACK],
        [(Kind.DUPLICATE_PREPARE, [10, 20])],
    ),
    "one message prepared twice, both committed": (
        [half(10), half(20), commit(30, 10), commit(40, 20)],
        [AuditedState.COMMITTED, AuditedState.COMMITTED],
        [(Kind.DUPLICATE_PREPARE, [10, 20]), (Kind.COMMITTED_TWICE, [30, 40])],
    ),
    "prepared again after a commit": (
        [half(10), commit(20, 10), half(30), rollback(40, 30)],
        [AuditedState.COMMITTED, AuditedState.ROLLED_BACK],
        [(Kind.DUPLICATE_PREPARE, [10, 30])],
    ),
    "several messages, the last without its final": (
        [*group(10, 11, 12), *finals(20, 10, 11), *named(20, 12), half(99)],
        [AuditedState.COMMITTED, AuditedState.PENDING],
        [(Kind.DUPLICATE_PREPARE, [10, 99]), (Kind.MISSING_FINAL, [12, 20])],
    ),
    "several messages, one of them not there": (
        [*group(10, 11), *finals(20, 10, 11)],
        AuditedState.COMMITTED,
        [(Kind.SPLIT_GROUP, [10, 20])],
    ),
    "several messages, names of nothing": (
        [*group(10, 11, 12), *finals(20, 10, 11, 12), *named(20, 15)],
        AuditedState.COMMITTED,
        [(Kind.DECISION_WITHOUT_HALF, [20])],
    ),
    "several messages, one committed alone": (
        [*group(10, 11, 12), commit(30, 11, number=1, total=3)],
        AuditedState.PENDING,
        [(Kind.SPLIT_GROUP, [10, 30])],
    ),
    "several messages, one committed, the first rolled back": (
        [*group(10, 11, 12), op(20, 10), commit(30, 12, number=2, total=3), op(40, 12)],
        AuditedState.ROLLED_BACK,
        [(Kind.SPLIT_GROUP, [10, 30])],
    ),
    "several messages, one committed twice": (
        [*group(10, 11, 12), *finals(20, 10, 11, 12), commit(40, 12, number=2, total=3)],
        AuditedState.COMMITTED,
        [(Kind.COMMITTED_TWICE, [22, 40])],
    ),
    "several messages, the first not there": (
        group(10, 11, 12)[1:],
        AuditedState.EXPIRED,
        [(Kind.SPLIT_GROUP, [11, 12])],
    ),
    "parked without a half": (
        [discard(30, 10)],
        AuditedState.PARKED,
        [(Kind.PARKED_WITHOUT_HALF, [30])],
    ),
    "parked by RocketMQ without a half": (
        [discard(30)],
        AuditedState.PARKED,
        [(Kind.PARKED_WITHOUT_HALF, [30])],
    ),
    "resumed without a half": (
        [resume(30, 10)],
        AuditedState.UNFOUNDED,
        [(Kind.PARKED_WITHOUT_HALF, [30])],
    ),
    "resumed, though never parked": (
        [half(10), resume(30, 10)],
        AuditedState.PENDING,
        [(Kind.LOST_PARKING, [10, 30])],
    ),
    "put back by an operator of RocketMQ, though never discarded": (
        [half(10), half(20, 1), half(30, 0)],
        AuditedState.PENDING,
        [(Kind.LOST_PARKING, [10, 30])],
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_history_is_found_out_with_its_offsets(name: str) -> None:
    """Each fault by its kind, and nothing that is none."""
    events, expected, findings = FAULTY[name]

    for order in (events, events[::-1]):
        assert outcome(order) == (states(expected), sorted(findings))


CUT_SHORT = LogBounds(first_offset=100)
DAMAGED = LogBounds(first_offset=0, damage=((5, 12), (300, 400)))

UNREADABLE: dict[str, tuple[Sequence[LogEvent], LogBounds, AuditedState | list[AuditedState]]] = {
    "final message, half expired": ([commit(120, 10)], CUT_SHORT, AuditedState.EXPIRED),
    "rollback record, half expired": ([rollback(120, 10)], CUT_SHORT, AuditedState.EXPIRED),
    "original expired, copy committed": (
        [half(110, 1), commit(120, 110), op(130, 110)],
        CUT_SHORT,
        AuditedState.COMMITTED,
    ),
    "original expired, committed on it": (
        [half(110, 1), commit(120, 10)],
        CUT_SHORT,
        AuditedState.COMMITTED,
    ),
    "original expired, undecided": ([half(110, 1)], CUT_SHORT, AuditedState.PENDING),
    "half expired, rolled back, prepared again": (
        [rollback(105, 10), half(110), commit(120, 110)],
        CUT_SHORT,
        [AuditedState.EXPIRED, AuditedState.COMMITTED],
    ),
    "half expired, parked": ([discard(120, 10)], CUT_SHORT, AuditedState.PARKED),
    "half expired, parked, committed": (
        [discard(120, 10), commit(130, 10)],
        CUT_SHORT,
        AuditedState.EXPIRED,
    ),
    "half lost in damage": ([commit(20, 10)], DAMAGED, AuditedState.EXPIRED),
    "first of several lost": (group(4, 12, 13)[1:], DAMAGED, AuditedState.EXPIRED),
    "one of several lost": (
        [group(4, 11, 12)[0], group(4, 11, 12)[2], *finals(20, 4, 11, 12)],
        DAMAGED,
        AuditedState.COMMITTED,
    ),
    "final of one of several lost": (
        [*group(210, 211, 212), *finals(220, 210, 211), *named(220, 212)],
        DAMAGED,
        AuditedState.COMMITTED,
    ),
    "parked copy lost": ([half(210), resume(420, 210)], DAMAGED, AuditedState.PENDING),
    "parked by RocketMQ, half lost": ([discard(420)], DAMAGED, AuditedState.PARKED),
    "resumed, half lost": ([resume(20, 10)], DAMAGED, AuditedState.EXPIRED),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_can_no_longer_be_read_is_held_against_nobody(name: str) -> None:
    """Expired and damaged stretches may have held the half, or what followed it."""
    events, bounds, state = UNREADABLE[name]

    assert outcome(events, bounds) == (states(state), [])


def test_copies_whose_original_expired_may_have_been_decided_by_its_op() -> None:
    """RocketMQ's op of a rollback names the half that the producer knew, not its copies."""
    limits = TimeLimits(overdue_before_ms=300, passed_slot=200, newest_ms=600_400)
    copies = [half(110, 1), half(120, 15)]

    assert outcome(copies, CUT_SHORT, limits) == ([AuditedState.PENDING], [])
    assert outcome(copies, WHOLE, limits)[1]


def test_beside_the_damage_a_missing_half_still_counts() -> None:
    """A range excuses what lies in it, not what lies at its end."""
    assert outcome([commit(20, 12)], DAMAGED)[0] == [AuditedState.UNFOUNDED]
    assert outcome([commit(500, 400)], DAMAGED)[0] == [AuditedState.UNFOUNDED]
    assert outcome([commit(500, 399)], DAMAGED)[0] == [AuditedState.EXPIRED]


def test_a_log_that_ends_amid_final_messages_is_no_fault() -> None:
    """The next start of the broker makes good what the crash cut off."""
    events = [*group(10, 11, 12), *finals(20, 10, 11), *named(20, 12)]

    assert outcome(events, WHOLE._replace(last_offset=21)) == ([AuditedState.COMMITTED], [])
    assert outcome(events, WHOLE._replace(last_offset=30))[1] == [(Kind.MISSING_FINAL, [12, 20])]


UNDECIDED = {
    "old": ([half(100)], [(Kind.OVERDUE_HALF, [100])]),
    "young": ([half(500)], []),
    "old, asked about lately": (
        [half(100), half(600, 3)],
        [(Kind.OVERDUE_HALF, [100, 600])],
    ),
    "old and parked": ([half(100), discard(200, 100)], []),
    "old and committed": ([half(100), commit(700, 100)], []),
    "passed by the checks": ([half(20)], [(Kind.LOST_PARKING, [20]), (Kind.OVERDUE_HALF, [20])]),
    "passed, but its copy is not": ([half(20), half(500, 1)], [(Kind.OVERDUE_HALF, [20, 500])]),
    "asked for the last time long ago": (
        [half(301), half(310, 14), half(320, 15)],
        [(Kind.LOST_PARKING, [301, 310, 320])],
    ),
    "asked for the last time just now": ([half(301), half(600, 15)], []),
    "asked often, not for the last time": ([half(301), half(320, 14)], []),
    "asked for the last time, then parked": ([half(301), half(320, 15), discard(330)], []),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_should_have_gone_on_is_told_by_the_terms(name: str) -> None:
    """Undecided for too long, and given up without a trace."""
    limits = TimeLimits(overdue_before_ms=300, passed_slot=50, newest_ms=600_400)
    events, findings = UNDECIDED[name]

    assert outcome(events, WHOLE, limits)[1] == sorted(findings)


def test_what_is_told_of_a_transaction() -> None:
    """Where it begins and was decided, how often its producer was asked, how long it took."""
    events = [half(10), half(20, 1), half(30, 2), commit(45, 20), op(50, 20)]

    (told,) = judge(events, WHOLE).transactions

    assert told == AuditedTransaction(
        AuditedState.COMMITTED, 10, 45, checks=2, halves=3, took_ms=35
    )


# --- where rollbacks write records

TWO = MessageContent(topic=1, queue=2, rest=3, body_size=6)


def delivered(offset: int, of: int = 0, *, number: int = 0, total: int = 1) -> LogEvent:
    return LogEvent(Part.DELIVERED, offset, of, None, number, total, time_ms=offset)


def waiting(offset: int, of: int = 0, *, due: int = 0) -> LogEvent:
    return LogEvent(Part.WAITING, offset, of, time_ms=offset, due_ms=due)


def damaged(event: LogEvent) -> LogEvent:
    return event._replace(sound=False)


OF_OURS: dict[str, tuple[list[LogEvent], AuditedState, list[tuple[Kind, list[int]]]]] = {
    "the final is gone, its op is there": (
        [half(10), op(30, 10)],
        AuditedState.PENDING,
        [(Kind.MISSING_DECISION, [10, 30])],
    ),
    "parked, an op and no rollback record": (
        [half(10), discard(20, 10), op(30, 10)],
        AuditedState.PARKED,
        [(Kind.MISSING_DECISION, [10, 30])],
    ),
    "an op too early": (
        [half(10), op(30, 10), commit(40, 10), op(50, 10)],
        AuditedState.COMMITTED,
        [(Kind.MISSING_DECISION, [10, 30])],
    ),
    "an op names a half of several": (
        [*group(10, 11, 12), op(30, 11)],
        AuditedState.PENDING,
        [(Kind.MISSING_DECISION, [11, 30])],
    ),
    "an op lists a committed half twice": (
        [half(10), commit(20, 10), op(30, 10), op(30, 10)],
        AuditedState.COMMITTED,
        [],
    ),
    "ops of a half and of its copies": (
        [half(10), half(20, 1), commit(30, 20), op(40, 10), op(40, 20)],
        AuditedState.COMMITTED,
        [],
    ),
    "the final's link is broken": (
        [half(10), commit(20, 0), op(30, 10)],
        AuditedState.COMMITTED,
        [(Kind.DECISION_WITHOUT_HALF, [20])],
    ),
    "the final's bits are lost": (
        [half(10), delivered(20, 10), op(30, 10)],
        AuditedState.COMMITTED,
        [(Kind.UNMARKED_FINAL, [10, 20])],
    ),
    "the final's bits and link are lost": (
        [half(10), delivered(20), op(30, 10)],
        AuditedState.COMMITTED,
        [(Kind.UNLINKED_DELIVERY, [10, 20])],
    ),
    "delivered a second time": (
        [half(10), commit(20, 10), delivered(30), op(40, 10)],
        AuditedState.COMMITTED,
        [(Kind.UNLINKED_DELIVERY, [10, 30])],
    ),
    "delivered though rolled back": (
        [half(10), rollback(20, 10), delivered(30)],
        AuditedState.ROLLED_BACK,
        [(Kind.UNLINKED_DELIVERY, [10, 30])],
    ),
    "delivered though undecided": (
        [half(10), delivered(30)],
        AuditedState.PENDING,
        [(Kind.UNLINKED_DELIVERY, [10, 30])],
    ),
    "the leader of several has no final": (
        [*group(10, 11, 12), *finals(20, 10, 11, 12)[1:3], *(op(30, n) for n in (10, 11, 12))],
        AuditedState.COMMITTED,
        [(Kind.MISSING_FINAL, [10, 21])],
    ),
    "the leader's final of several is damaged": (
        [
            *group(10, 11, 12),
            damaged(finals(20, 10, 11, 12)[0]),
            *finals(20, 10, 11, 12)[1:3],
            *(op(30, n) for n in (10, 11, 12)),
        ],
        AuditedState.COMMITTED,
        [],
    ),
    "no final of several, their ops are there": (
        [*group(10, 11, 12), *(op(30, n) for n in (10, 11, 12))],
        AuditedState.PENDING,
        [(Kind.MISSING_DECISION, [10, 11, 12, 30])],
    ),
    "the final does not match its CRC": (
        [half(10), damaged(commit(20, 10)), op(30, 10)],
        AuditedState.UNDETERMINED,
        [],
    ),
    "delayed, delivered": (
        [half(10), waiting(20, 10, due=50), delivered(50), op(60, 10)],
        AuditedState.COMMITTED,
        [],
    ),
    "delayed, waited twice, delivered": (
        [half(10), waiting(20, 10, due=90), op(30, 10), waiting(50, due=90), delivered(90)],
        AuditedState.COMMITTED,
        [],
    ),
    "delayed, not due": ([half(10), waiting(20, 10, due=950)], AuditedState.COMMITTED, []),
    "delayed, due, not delivered": (
        [half(10), waiting(20, 10, due=90), waiting(50, due=90)],
        AuditedState.COMMITTED,
        [(Kind.OVERDUE_DELIVERY, [10, 50])],
    ),
    "delayed, delivered twice": (
        [half(10), waiting(20, 10, due=50), delivered(50), delivered(60)],
        AuditedState.COMMITTED,
        [(Kind.DELIVERED_TWICE, [50, 60])],
    ),
    "delayed, its final without a link": (
        [half(10), waiting(20, due=50), delivered(50), op(60, 10)],
        AuditedState.COMMITTED,
        [(Kind.UNLINKED_DELIVERY, [10, 20])],
    ),
    "delivered after the log was cut": ([delivered(50)], AuditedState.PENDING, []),
}


@pytest.mark.parametrize("name", OF_OURS)
def test_where_rollbacks_are_records_every_decision_has_one(name: str) -> None:
    """An op alone decides nothing, and what consumers got is told by the finals."""
    events, state, findings = OF_OURS[name]
    expected = [] if name == "delivered after the log was cut" else [state]

    for order in (events, events[::-1]):
        assert outcome(order, OURS, TimeLimits(newest_ms=5_900)) == (expected, sorted(findings))


@pytest.mark.parametrize("name", [name for name in HEALTHY if "RocketMQ" not in name])
def test_a_healthy_history_is_healthy_in_a_log_of_ours(name: str) -> None:
    """But for rollbacks that only an op tells of, which are RocketMQ's."""
    events, expected = HEALTHY[name]
    if name in {"rolled back at a check", "rolled back twice"}:
        return

    assert outcome(events, OURS) == (states(expected), [])


def test_a_log_may_change_its_broker_more_than_once() -> None:
    """An op is a rollback where RocketMQ wrote it, before halfmq or after."""
    bounds = WHOLE._replace(records_rollbacks=((0, 40), (60, END)))

    for at, state in (
        (30, AuditedState.PENDING),
        (50, AuditedState.ROLLED_BACK),
        (70, AuditedState.PENDING),
    ):
        assert outcome([half(10), op(at, 10)], bounds)[0] == [state]


def test_a_decision_that_cannot_be_read_leaves_it_open_what_was_decided() -> None:
    """The damage is tied to the transaction; too small a range cannot have held the record."""
    events = [half(10), op(900, 10)]
    for bounds in (WHOLE, OURS):
        lost = bounds._replace(damage=((2, 8), (300, 400)))
        (told,) = judge(events, lost).transactions
        assert (told.state, told.lost) == (AuditedState.UNDETERMINED, (300, 400))
        assert judge(events, lost).findings == []

        small = bounds._replace(damage=((300, 350), (950, 2000)))
        assert judge(events, small).transactions[0].state is not AuditedState.UNDETERMINED


def with_content(event: LogEvent, **changed: int) -> LogEvent:
    return event._replace(content=TWO._replace(**changed))


@pytest.mark.parametrize("what", ["rest", "topic", "queue"])
def test_a_final_that_differs_from_its_half_is_found(what: str) -> None:
    """In both dialects; a record that fails its CRC is not blamed twice."""
    events = [with_content(half(10)), with_content(commit(20, 10), **{what: 9})]
    for bounds in (WHOLE, OURS):
        assert outcome(events, bounds)[1] == [(Kind.ALTERED_FINAL, [10, 20])]

        harmed = [with_content(half(10)), damaged(events[1])]
        assert judge(harmed, bounds).findings == []


def test_a_final_with_the_id_of_another_half_is_found() -> None:
    """The id of a copy is that of its transaction only if it was decided on that copy."""
    two = [with_content(half(10)), with_content(half(20, 1))]
    final = with_content(commit(30, 20))

    assert outcome([*two, final._replace(half_id=20)], WHOLE)[1] == []
    for wrong in (10, 25):
        altered = [*two, final._replace(half_id=wrong)]
        assert outcome(altered, WHOLE)[1] == [(Kind.ALTERED_FINAL, [20, 30])]


def test_a_topic_may_have_lost_the_queue_of_a_final() -> None:
    """A broker of ours puts it into one that is left; RocketMQ never does."""
    events = [with_content(half(10), queue=7), with_content(commit(20, 10), queue=3)]

    assert outcome(events, OURS)[1] == []
    assert outcome(events, OURS._replace(write_queues={1: 4}))[1] == []
    assert outcome(events, OURS._replace(write_queues={1: 8}))[1]
    assert outcome(events, WHOLE)[1]
    # Without a table a later record in that queue, or in one above it, shows that it is there.
    assert outcome(events, OURS._replace(last_in_queues={1: [(3, 90), (7, 15)]}))[1] == []
    assert outcome(events, OURS._replace(last_in_queues={1: [(3, 90), (9, 25)]}))[1]
    events[1] = with_content(commit(20, 10), queue=4)  # 7 of five queues would be 2
    assert outcome(events, OURS)[1]


def test_a_delayed_commit_beside_a_lost_segment_is_no_other_delivery() -> None:
    """Its final may lie there; what waited once more is a copy of that."""
    events = [half(10), waiting(30), waiting(40), delivered(60), op(70, 10)]

    assert outcome(events, OURS)[1] == [(Kind.UNLINKED_DELIVERY, [10, 30])]
    assert outcome(events, OURS._replace(damage=((15, 25),)))[1] == []


def test_what_is_there_twice_or_in_the_wrong_place_is_told() -> None:
    """Parked and rolled back twice, a half where no check looks, and one stored too late."""
    late = half(10)._replace(time_ms=5_000)

    assert outcome([half(10), discard(20, 10), discard(30, 10)], OURS)[1] == [
        (Kind.PARKED_TWICE, [20, 30])
    ]
    assert outcome([half(10), rollback(20, 10), rollback(30, 10)], OURS)[1] == [
        (Kind.ROLLED_BACK_TWICE, [20, 30])
    ]
    assert outcome([half(10)._replace(reference=1 << 48), commit(20, 10)], OURS)[1] == [
        (Kind.MISPLACED_HALF, [10])
    ]
    assert outcome([late, commit(20, 10)], OURS)[1] == [(Kind.HALF_AFTER_FINAL, [10, 20])]
