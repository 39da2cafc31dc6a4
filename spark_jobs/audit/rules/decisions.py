"""Rules about what was decided: the state of a transaction, and decisions that contradict.

An op does not say what was decided. Where rollbacks write records (``LogBounds.records_rollbacks``)
an op says only that there was a decision; elsewhere one that no final or rollback record accounts
for *is* a rollback. RocketMQ writes ops of several seconds in one record, so the order of a commit
and a rollback that share one is not known; since it can only matter when both were accepted, that
is reported as a commit after a rollback.
"""

from collections.abc import Sequence
from typing import NamedTuple

from halfmq.store.format.record import RECORD_SIZE_MIN

from ...log.transaction_parts import Part
from .histories import History, MessageHistory
from .model import AuditedState, Finding, Kind, LogBounds, LogEvent

Range = tuple[int, int]


class AcceptedDecision(NamedTuple):
    """One accepted decision: where it shows, and the op that mirrors it."""

    offset: int
    op: int | None
    time_ms: int


class Outcome(NamedTuple):
    """What became of one transaction."""

    history: History
    state: AuditedState
    commits: list[AcceptedDecision]
    rollbacks: list[AcceptedDecision]
    decided: AcceptedDecision | None = None  # the first that counts
    lost: Range | None = None  # of an undetermined one: where its decision may have been
    findings: Sequence[Finding] = ()


def outcome(history: History, bounds: LogBounds, *, unfounded: bool) -> Outcome:
    """Say what became of a transaction; ``unfounded``: something names a half that never was."""
    settled = _settled(history, bounds)
    is_open = bool(history.discards) and settled.state in {
        AuditedState.PARKED,
        AuditedState.PENDING,
    }
    if history.leader.halves or is_open:
        return settled
    return settled._replace(state=AuditedState.UNFOUNDED if unfounded else AuditedState.EXPIRED)


def _decisions(
    message: MessageHistory, bounds: LogBounds
) -> tuple[list[AcceptedDecision], list[AcceptedDecision], list[LogEvent]]:
    """Return commits, rollbacks, and the ops that belong to neither."""
    ops = list(message.ops)
    own = {half.offset for half in message.halves}
    commits: list[AcceptedDecision] = []
    rollbacks: list[AcceptedDecision] = []
    for event in sorted(message.decided, key=lambda event: event.reference not in own):
        # A decision whose link is broken may have any of the ops.
        op = _take_after(event, ops, any_half=event.reference not in own)
        kept = rollbacks if event.part is Part.ROLLBACK else commits
        kept.append(AcceptedDecision(event.offset, op.offset if op else None, event.time_ms))
    for event in (*message.unmarked, *message.damaged):
        _take_after(event, ops, any_half=True)
    idle = [op for op in ops if bounds.records_rollback(op.offset)]
    rollbacks += [
        AcceptedDecision(op.offset, op.offset, op.time_ms) for op in ops if op not in idle
    ]
    return sorted(commits, key=_place), sorted(rollbacks, key=_place), idle


def _take_after(event: LogEvent, ops: list[LogEvent], *, any_half: bool) -> LogEvent | None:
    """Take the first op after a decision: ops are written in the order of the decisions."""
    for index, op in enumerate(ops):
        if op.offset > event.offset and (any_half or op.reference == event.reference):
            return ops.pop(index)
    return None


# --- states


def _settled(history: History, bounds: LogBounds) -> Outcome:
    """Say what became of a transaction, as if its half were in the log."""
    leader = history.leader
    commits, rollbacks, idle = _decisions(leader, bounds)
    pending = Outcome(history, _undecided(history), commits, rollbacks)
    by_record = [decision for decision in rollbacks if decision.op != decision.offset]
    if first := (commits or by_record)[:1]:
        state = AuditedState.COMMITTED if commits else AuditedState.ROLLED_BACK
        hasty = _hasty(leader, [*commits, *by_record], idle, bounds)
        return pending._replace(state=state, decided=first[0], findings=hasty)
    if shown := leader.unmarked or _commits_of_followers(history, bounds):
        return pending._replace(state=AuditedState.COMMITTED, decided=_shown_by(shown[0]))
    if rollbacks:
        if lost := _where_lost(leader, rollbacks[0].offset, bounds):
            return pending._replace(state=AuditedState.UNDETERMINED, lost=lost)
        return pending._replace(state=AuditedState.ROLLED_BACK, decided=rollbacks[0])
    if leader.damaged:
        lost = (leader.damaged[0].offset, leader.damaged[0].offset + RECORD_SIZE_MIN)
        return pending._replace(state=AuditedState.UNDETERMINED, lost=lost)
    ops = [
        op
        for message in history.messages.values()
        for op in message.ops
        if bounds.records_rollback(op.offset)
    ]
    if not ops:
        return pending
    if shown := leader.delivered or leader.waiting:
        return pending._replace(state=AuditedState.COMMITTED, decided=_shown_by(shown[0]))
    if lost := _where_lost(leader, min(ops, key=_place).offset, bounds):
        return pending._replace(state=AuditedState.UNDETERMINED, lost=lost)
    return pending._replace(findings=[_missing_decision(ops)])


def _shown_by(event: LogEvent) -> AcceptedDecision:
    return AcceptedDecision(event.offset, None, event.time_ms)


def _undecided(history: History) -> AuditedState:
    # What an operator resumes gets a half again by RocketMQ, and a record of its own by halfmq.
    asked_again = [event.offset for event in (*history.leader.halves[-1:], *history.resumes[-1:])]
    if history.discards and max(asked_again, default=-1) < history.discards[-1].offset:
        return AuditedState.PARKED
    return AuditedState.PENDING


def _commits_of_followers(history: History, bounds: LogBounds) -> list[LogEvent]:
    """Give the finals of further messages that halfmq wrote: it did so after the leader's."""
    finals = [
        final
        for number, message in history.messages.items()
        for final in message.commits
        if number and bounds.records_rollback(final.offset)
    ]
    return sorted(finals, key=_place)


def _where_lost(message: MessageHistory, before: int, bounds: LogBounds) -> Range | None:
    """Find what cannot be read between the half and an op, and may hold the decision."""
    half = message.half
    if half is None:
        return None
    size = RECORD_SIZE_MIN
    if half.content and not bounds.records_rollback(before):  # the body of a final message
        size += half.content.body_size
    return bounds.lost(size, half.offset, before)


def _missing_decision(ops: Sequence[LogEvent]) -> Finding:
    detail = (
        "an op message marks it as decided, but the log has neither a final message nor a"
        " rollback record"
    )
    halves = {op.reference for op in ops}
    return Finding(Kind.MISSING_DECISION, sorted({*halves, min(ops, key=_place).offset}), detail)


def _hasty(
    leader: MessageHistory,
    decisions: Sequence[AcceptedDecision],
    idle: Sequence[LogEvent],
    bounds: LogBounds,
) -> list[Finding]:
    """Find ops of halfmq's that were there before any decision was."""
    first = min(decision.offset for decision in decisions)
    return [
        Finding(
            Kind.MISSING_DECISION,
            [leader.half.offset, op.offset],
            f"an op message marks it as decided, before its first decision at {first}",
        )
        for op in idle[:1]
        if leader.half and op.offset < first and not _where_lost(leader, op.offset, bounds)
    ]


def _place(one: LogEvent | AcceptedDecision) -> int:
    return one.offset


# --- opposite decisions


def conflicts(outcome: Outcome) -> list[Finding]:
    """Find opposite decisions about one transaction."""
    commits = outcome.commits
    found: dict[Kind, Finding] = {}
    for rollback in outcome.rollbacks if commits else ():
        kind = _order(commits, rollback)
        first = "rolled back" if kind is Kind.COMMIT_AFTER_ROLLBACK else "committed"
        known = kind is Kind.ROLLBACK_AFTER_COMMIT or commits[-1].offset > rollback.offset
        order = f"{first} first" if known else "the op messages do not tell which came first"
        detail = f"both a commit and a rollback were accepted; {order}"
        offsets = sorted({rollback.offset, *(commit.offset for commit in commits)})
        found.setdefault(kind, Finding(kind, offsets, detail))
    return list(found.values())


def _order(commits: Sequence[AcceptedDecision], rollback: AcceptedDecision) -> Kind:
    if any(commit.offset > rollback.offset for commit in commits):
        return Kind.COMMIT_AFTER_ROLLBACK
    if rollback.op != rollback.offset:  # a rollback record: it stands where it was decided
        return Kind.ROLLBACK_AFTER_COMMIT
    # An op is written up to seconds after its decision. It came later for certain only if the ops
    # of all commits were already written.
    settled = all(commit.op is not None and commit.op < rollback.offset for commit in commits)
    return Kind.ROLLBACK_AFTER_COMMIT if settled else Kind.COMMIT_AFTER_ROLLBACK
