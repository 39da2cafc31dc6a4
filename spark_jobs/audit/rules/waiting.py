"""Rules about what should have gone on: halves that nobody decides, or nobody asks about."""

from collections.abc import Iterable
from typing import Final

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
