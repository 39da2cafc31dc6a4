"""What became of one transaction, told from its records in the log alone; no Spark in here.

Two dialects leave different traces, and one log may hold both, one after the other:

========== ============================================== =====================================
           Apache RocketMQ                                halfmq
========== ============================================== =====================================
prepare    half record; each check appends a copy of it   half record, once; of several messages
                                                          one each, the leader's first
commit     final record, and up to 6 s later an op        final record, and lazily an op; of
                                                          several, the leader's decides for all
rollback   an op, nothing else                            rollback record, and lazily an op
giving up  a record in TRANS_CHECK_MAX_TIME_TOPIC         the same, naming its half
asking on  a copy with zero checks                        a resume record
delay      the final waits in SCHEDULE_TOPIC_XXXX         the same; a long wait is several, by
                                                          copies without a link
========== ============================================== =====================================

A transaction is its first half record. Final and rollback records name their half (original or
copy) by its physical offset. An op names it by its offset in the half queue and does not say what
was decided.

Nothing is held against a record for naming what the log no longer holds: what lies below its
first offset is expired, what lies in a damaged range is lost.

The rules are in files beside this one, by subject; ``histories`` says which record is about which
transaction, ``model`` what a record is.

Source: RocketMQ ``EndTransactionProcessor``, ``TransactionalMessageServiceImpl``;
``broker/transaction/half.py``.
"""

from collections.abc import Iterable

from ...log.transaction_parts import Part
from . import decisions, finals, groups, waiting
from .decisions import Outcome
from .histories import divide
from .model import (
    NO_TIME_LIMITS,
    AuditedTransaction,
    KeyGroupVerdict,
    Kind,
    LogBounds,
    LogEvent,
    TimeLimits,
)


def judge(
    events: Iterable[LogEvent], bounds: LogBounds, limits: TimeLimits = NO_TIME_LIMITS
) -> KeyGroupVerdict:
    """Say what became of the transactions of a key group, given all its records."""
    histories, findings = divide(sorted(events, key=_log_order), bounds)
    missing = {Kind.DECISION_WITHOUT_HALF, Kind.PARKED_WITHOUT_HALF}
    unfounded = any(finding.kind in missing for finding in findings)
    outcomes = [decisions.outcome(one, bounds, unfounded=unfounded) for one in histories]
    for outcome in outcomes:
        findings += outcome.findings
        findings += decisions.conflicts(outcome)
        findings += groups.unlike_the_leader(outcome, bounds)
        findings += finals.faulty_deliveries(outcome, bounds, limits)
        if not outcome.findings:  # one whose decision is missing waits for nobody
            findings += waiting.left_undecided(outcome, bounds, limits)
        findings += waiting.resumed_from_nothing(outcome.history, bounds)
        findings += waiting.repeated_or_misplaced(outcome.history)
    for together in groups.overlapping(outcomes):
        findings += groups.repeated(together)
    return KeyGroupVerdict([_transaction(outcome) for outcome in outcomes], findings)


def _log_order(event: LogEvent) -> tuple[int, bool, int]:
    return event.offset, event.part is Part.NAMED, event.reference


def _transaction(outcome: Outcome) -> AuditedTransaction:
    messages = outcome.history.messages
    halves = messages[0].halves
    first, decided = messages[0].half, outcome.decided
    return AuditedTransaction(
        state=outcome.state,
        half=first.offset if first else None,
        decided=decided.offset if decided else None,
        checks=max((half.check_times or 0 for half in halves), default=0),
        halves=sum(len(message.halves) for message in messages.values()),
        took_ms=decided.time_ms - first.time_ms if decided and first else None,
        lost=outcome.lost,
    )
