"""Rules about halves that nobody decides or asks about, and about records written twice."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from ...log.transaction_parts import SLOT_BITS, Part
from ...times import duration, full_moment
from .decisions import Outcome
from .histories import History
from .model import AuditedState, Finding, Kind, LogBounds, TimeLimits

_PARKED_WITHIN: Final = 600_000  # ms from the last check to the parking; RocketMQ needs a round


def left_undecided(outcome: Outcome, bounds: LogBounds, limits: TimeLimits) -> Iterable[Finding]:
    """Find halves that wait too long, and those that nobody will ask about."""
    halves = outcome.history.leader.halves
    if outcome.state is not AuditedState.PENDING or not halves:
        return
    if not outcome.history.half and bounds.hides(0, halves[0].offset):
        return  # only copies are left: an op of the original names it by a queue offset
    first, newest = halves[0], halves[-1]
    if limits.overdue_before_ms is not None and first.time_ms < limits.overdue_before_ms:
        late = duration(limits.overdue_before_ms - first.time_ms)
        detail = (
            f"prepared at {full_moment(first.time_ms)}, and undecided {late} longer than"
            " --pending-age allows"
        )
        yield Finding(Kind.OVERDUE_HALF, [half.offset for half in halves], detail)
    asked = newest.check_times or 0
    if newest.reference < limits.passed_slot:
        detail = (
            "neither decided nor parked, but RocketMQ's checks have passed it: it is at offset"
            f" {newest.reference} of the half queue, the next check is at {limits.passed_slot}"
        )
        yield Finding(Kind.LOST_PARKING, [half.offset for half in halves], detail)
    elif asked >= limits.checks_max and newest.time_ms < limits.newest_ms - _PARKED_WITHIN:
        detail = (
            f"its producer was asked {asked} times; after that it was neither decided nor parked"
        )
        yield Finding(Kind.LOST_PARKING, [half.offset for half in halves], detail)


def repeated_or_misplaced(history: History) -> Iterable[Finding]:
    """Find what a broker does once and is there twice, and halves where no check looks."""
    resumed = [*history.resumes, *(h for h in history.leader.halves if h.check_times == 0)]
    for before, after in pairwise(history.discards):
        if not any(before.offset < one.offset < after.offset for one in resumed):
            detail = "parked twice, and not resumed in between"
            yield Finding(Kind.PARKED_TWICE, [before.offset, after.offset], detail)
    for message in history.messages.values():
        rollbacks = [event.offset for event in message.decided if event.part is Part.ROLLBACK]
        if len(rollbacks) > 1:
            detail = f"{len(rollbacks)} rollback records"
            yield Finding(Kind.ROLLED_BACK_TWICE, rollbacks, detail)
        for half in message.halves:
            if queue := half.reference >> SLOT_BITS:
                detail = f"a half message in queue {queue} of its topic, which has only queue 0"
                yield Finding(Kind.MISPLACED_HALF, [half.offset], detail)


def resumed_from_nothing(history: History, bounds: LogBounds) -> Iterable[Finding]:
    """Find resumed transactions whose parking is not in the log."""
    halves = history.leader.halves
    resumes = [*history.resumes, *(half for half in halves if half.check_times == 0)]
    if not resumes or not halves:
        return
    first = min(resume.offset for resume in resumes)
    start = halves[0].offset
    parked = any(discard.offset < first for discard in history.discards)
    if history.half and not parked and not bounds.hides(start, first):
        detail = "resumed by an operator, but the log has no parked copy of it"
        yield Finding(Kind.LOST_PARKING, [start, first], detail)
