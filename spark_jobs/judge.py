"""What became of one transaction, told from its records in the log alone; no Spark in here.

Two dialects leave different traces, and one log may hold both, one after the other:

========== ============================================== =====================================
           Apache RocketMQ                                halfmq
========== ============================================== =====================================
prepare    half record; each check appends a copy of it   half record, once
commit     final record, and up to 6 s later an op        final record, and lazily an op
rollback   an op, nothing else                            rollback record, and lazily an op
giving up  a record in TRANS_CHECK_MAX_TIME_TOPIC         the same, naming its half
========== ============================================== =====================================

Final and rollback records name their half (original or copy) by its physical offset. An op names
it by its offset in the half queue and does not say what was decided: an op that no final or
rollback record accounts for *is* a rollback. RocketMQ writes ops of several seconds in one
record, so the order of a commit and a rollback that share one is not known; since it can only
matter when both were accepted, that is reported as a commit after a rollback.

Nothing is held against a record for naming what the log no longer holds: what lies below its
first offset is expired, what lies in a damaged range is lost.

Source: RocketMQ ``EndTransactionProcessor``, ``TransactionalMessageServiceImpl``.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple


class Part(IntEnum):
    """Which part of a transaction a record is."""

    HALF = 1
    OP = 2
    COMMIT = 3
    ROLLBACK = 4
    DISCARD = 5


class State(StrEnum):
    """What became of a transaction."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    PENDING = "pending"
    PARKED = "parked"  # the broker has given up asking; can still be decided
    EXPIRED = "expired"  # decided here, but its half is no longer in the log
    UNFOUNDED = "unfounded"  # decided here, and never prepared


class Kind(StrEnum):
    """What an audit can hold against a log."""

    COMMITTED_TWICE = "committed_twice"
    COMMIT_AFTER_ROLLBACK = "commit_after_rollback"
    ROLLBACK_AFTER_COMMIT = "rollback_after_commit"
    DECISION_WITHOUT_HALF = "decision_without_half"
    OP_WITHOUT_HALF = "op_without_half"
    DUPLICATE_PREPARE = "duplicate_prepare"
    CORRUPT_RECORD = "corrupt_record"
    CRC = "crc"
    GAP = "gap"
    OVERLAP = "overlap"


class Event(NamedTuple):
    """One record of a transaction."""

    part: Part
    offset: int  # physical, of the record itself
    reference: int  # physical offset of the half that it names; of a half, nothing
    check_times: int | None = None  # of a half: None for an original, else a copy


class Finding(NamedTuple):
    """One thing that is wrong; ``offsets`` are physical, of the records that show it."""

    kind: Kind
    offsets: list[int]
    detail: str


class Verdict(NamedTuple):
    """The state of a transaction and what is wrong with it."""

    state: State
    findings: list[Finding]


class LogBounds(NamedTuple):
    """Which part of the log can be read."""

    first_offset: int
    damage: tuple[tuple[int, int], ...] = ()  # ranges [start, end) that could not be read

    def is_unreadable(self, offset: int) -> bool:
        """Tell whether a record at this offset may well have existed."""
        if offset < self.first_offset:
            return True
        return any(start <= offset < end for start, end in self.damage)


class _Decision(NamedTuple):
    """One accepted decision: where it shows, on which half, and the op that mirrors it."""

    offset: int
    half: int
    op: int | None


def judge(events: Iterable[Event], bounds: LogBounds) -> Verdict:
    """Say what became of the transaction that has these records."""
    by_part: dict[Part, list[Event]] = {part: [] for part in Part}
    for event in sorted(events, key=lambda event: event.offset):
        by_part[event.part].append(event)
    halves = by_part[Part.HALF]
    known = {half.offset for half in halves}
    findings = [
        *_without_half(by_part[Part.COMMIT] + by_part[Part.ROLLBACK], known, bounds),
        *_early_ops(by_part[Part.OP]),
        *_twins(halves),
    ]
    commits, rollbacks = _decisions(by_part)
    findings += _twice(commits)
    findings += _conflicts(commits, rollbacks, across_halves=len(_originals(halves)) < 2)
    state = _state(halves, commits, rollbacks, by_part[Part.DISCARD], findings)
    return Verdict(state, findings)


def _state(
    halves: Sequence[Event],
    commits: Sequence[_Decision],
    rollbacks: Sequence[_Decision],
    discards: Sequence[Event],
    findings: Sequence[Finding],
) -> State:
    if not halves and (commits or rollbacks):
        unfounded = any(finding.kind is Kind.DECISION_WITHOUT_HALF for finding in findings)
        return State.UNFOUNDED if unfounded else State.EXPIRED
    if commits:
        return State.COMMITTED
    if rollbacks:
        return State.ROLLED_BACK
    # An operator can resume a parked transaction; that appends a half again.
    if discards and not (halves and halves[-1].offset > discards[-1].offset):
        return State.PARKED
    return State.PENDING


def _originals(halves: Sequence[Event]) -> list[Event]:
    return [half for half in halves if half.check_times is None]


def _without_half(
    decisions: Sequence[Event], known: set[int], bounds: LogBounds
) -> Iterable[Finding]:
    for decision in decisions:
        named = decision.reference
        if named < decision.offset and (named in known or bounds.is_unreadable(named)):
            continue
        what = "final message" if decision.part is Part.COMMIT else "rollback record"
        detail = f"the {what} names a half message at {named}, where there is none of its own"
        yield Finding(Kind.DECISION_WITHOUT_HALF, [decision.offset], detail)


def _early_ops(ops: Sequence[Event]) -> Iterable[Finding]:
    for op in ops:
        if op.offset <= op.reference:
            detail = f"the op message precedes its half message at {op.reference}"
            yield Finding(Kind.OP_WITHOUT_HALF, [op.offset], detail)


def _twins(halves: Sequence[Event]) -> Iterable[Finding]:
    originals = _originals(halves)
    if len(originals) > 1:
        detail = f"{len(originals)} half messages of one transaction, none of them a check's copy"
        yield Finding(Kind.DUPLICATE_PREPARE, [half.offset for half in originals], detail)


def _twice(commits: Sequence[_Decision]) -> Iterable[Finding]:
    if len(commits) > 1:
        detail = f"{len(commits)} final messages: consumers see every one of them"
        yield Finding(Kind.COMMITTED_TWICE, [commit.offset for commit in commits], detail)


def _decisions(by_part: dict[Part, list[Event]]) -> tuple[list[_Decision], list[_Decision]]:
    """Give commits and rollbacks, those included that only an op tells of."""
    commits: list[_Decision] = []
    rollbacks: list[_Decision] = []
    recorded: dict[int, list[Event]] = {}
    for event in by_part[Part.COMMIT] + by_part[Part.ROLLBACK]:
        recorded.setdefault(event.reference, []).append(event)
    ops: dict[int, list[int]] = {}
    for event in by_part[Part.OP]:
        if event.offset > event.reference:
            ops.setdefault(event.reference, []).append(event.offset)
    for half in recorded.keys() | ops.keys():
        mirrors = ops.get(half, [])
        for event in sorted(recorded.get(half, []), key=lambda event: event.offset):
            decision = _Decision(event.offset, half, _take_behind(event.offset, mirrors))
            (commits if event.part is Part.COMMIT else rollbacks).append(decision)
        rollbacks += [_Decision(op, half, op) for op in mirrors]
    return sorted(commits), sorted(rollbacks)


def _take_behind(offset: int, ops: list[int]) -> int | None:
    """Take the first op behind a decision: ops are written in the order of the decisions."""
    for index, op in enumerate(ops):
        if op > offset:
            return ops.pop(index)
    return None


def _conflicts(
    commits: Sequence[_Decision], rollbacks: Sequence[_Decision], *, across_halves: bool
) -> list[Finding]:
    """Find opposite decisions; with twin halves, only those about the same half are opposite."""
    found: dict[Kind, Finding] = {}
    for rollback in rollbacks:
        opposite = [commit for commit in commits if across_halves or commit.half == rollback.half]
        if not opposite:
            continue
        kind = _order(opposite, rollback)
        first = "rolled back" if kind is Kind.COMMIT_AFTER_ROLLBACK else "committed"
        known = kind is Kind.ROLLBACK_AFTER_COMMIT or opposite[-1].offset > rollback.offset
        order = f"{first} first" if known else "the ops do not tell which came first"
        detail = f"both decisions were accepted; {order}"
        offsets = sorted({rollback.offset, *(commit.offset for commit in opposite)})
        found.setdefault(kind, Finding(kind, offsets, detail))
    return list(found.values())


def _order(commits: Sequence[_Decision], rollback: _Decision) -> Kind:
    if any(commit.offset > rollback.offset for commit in commits):
        return Kind.COMMIT_AFTER_ROLLBACK
    if rollback.op != rollback.offset:  # a rollback record: it stands where it was decided
        return Kind.ROLLBACK_AFTER_COMMIT
    # An op stands up to seconds behind its decision. It came later for certain only if the ops
    # of all commits were already written.
    settled = all(commit.op is not None and commit.op < rollback.offset for commit in commits)
    return Kind.ROLLBACK_AFTER_COMMIT if settled else Kind.COMMIT_AFTER_ROLLBACK
