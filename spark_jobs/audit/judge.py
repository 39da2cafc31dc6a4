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
========== ============================================== =====================================

A transaction is its first half record. Final and rollback records name their half (original or
copy) by its physical offset. An op names it by its offset in the half queue and does not say what
was decided: an op that no final or rollback record accounts for *is* a rollback. RocketMQ writes
ops of several seconds in one record, so the order of a commit and a rollback that share one is not
known; since it can only matter when both were accepted, that is reported as a commit after a
rollback.

What is judged together is a *family*: all records with one producer group and one unique key (of
several messages the leader's). Mostly it is one transaction. When a producer sent its message twice
there are two, twins, unless the first had been rolled back before.

Nothing is held against a record for naming what the log no longer holds: what lies below its
first offset is expired, what lies in a damaged range is lost.

Source: RocketMQ ``EndTransactionProcessor``, ``TransactionalMessageServiceImpl``;
``broker/transaction/half.py``.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

CHECKS_MAX: Final = 15  # RocketMQ's transactionCheckMax: it gives up after so many copies


class Part(IntEnum):
    """Which part of a transaction a record is."""

    HALF = 1
    OP = 2
    COMMIT = 3
    ROLLBACK = 4
    DISCARD = 5
    RESUME = 6
    NAMED = 7  # no record: a decision at ``offset`` names one more half, at ``reference``
    DELIVERED = 8  # the message in an application's topic, by a record that is no final of it
    WAITING = 9  # a final, or a copy of it without a link, in SCHEDULE_TOPIC_XXXX
    ARRIVED = 10  # a message that waited, in its real topic; a DELIVERED may be one as well


class State(StrEnum):
    """What became of a transaction."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    PENDING = "pending"
    PARKED = "parked"  # the broker has given up asking; can still be decided
    EXPIRED = "expired"  # decided here, but its half is no longer in the log
    UNFOUNDED = "unfounded"  # decided here, and never prepared
    UNDETERMINED = "undetermined"  # an op says decided; what would say how cannot be read


class Kind(StrEnum):
    """What an audit can hold against a log."""

    COMMITTED_TWICE = "committed_twice"
    COMMIT_AFTER_ROLLBACK = "commit_after_rollback"
    ROLLBACK_AFTER_COMMIT = "rollback_after_commit"
    DECISION_WITHOUT_HALF = "decision_without_half"
    OP_WITHOUT_HALF = "op_without_half"
    PARKED_WITHOUT_HALF = "parked_without_half"
    DUPLICATE_PREPARE = "duplicate_prepare"
    MISSING_FINAL = "missing_final"  # committed, and a message of it has no final
    MISSING_DECISION = "missing_decision"  # an op, where rollbacks are records, and no decision
    ALTERED_FINAL = "altered_final"  # it differs from its half
    UNMARKED_FINAL = "unmarked_final"  # it names its half, and lacks the bits of a commit
    UNLINKED_DELIVERY = (
        "unlinked_delivery"  # the message was delivered by a record that is no final
    )
    OVERDUE_DELIVERY = "overdue_delivery"  # a delayed commit is due, and was never delivered
    DELIVERED_TWICE = "delivered_twice"  # a delayed commit
    SPLIT_GROUP = "split_group"  # some of several messages decided otherwise than the rest
    OVERDUE_HALF = "overdue_half"
    LOST_PARKING = "lost_parking"
    OUT_OF_ORDER = "out_of_order"
    QUEUE_GAP = "queue_gap"
    WRONG_QUEUE_ENTRY = "wrong_queue_entry"
    MISSING_QUEUE_ENTRY = "missing_queue_entry"
    UNKNOWN_QUEUE = "unknown_queue"
    CORRUPT_RECORD = "corrupt_record"
    CRC = "crc"
    GAP = "gap"
    OVERLAP = "overlap"


class Content(NamedTuple):
    """What a half and its final have in common; texts as hashes of 64 bits."""

    topic: int  # the real one
    queue: int  # the real one
    tags: int
    keys: int
    body_crc: int  # as the record's head says
    body_size: int  # bytes


class Event(NamedTuple):
    """One record of a family."""

    part: Part
    offset: int  # physical, of the record itself
    reference: int  # physical offset of the half that it names; of a half, its place in its queue
    check_times: int | None = None  # of a half: None for an original, else a copy
    number: int = 0  # which of several messages it is about; 0 is the leader
    total: int = 1  # how many messages the transaction has
    time_ms: int = 0  # when it was stored
    content: Content | None = None  # of halves and what delivers them; None: not known
    due_ms: int = 0  # of WAITING: when it is to be delivered
    sound: bool = True  # matches its CRC; a final that does not decides nothing


class Finding(NamedTuple):
    """One thing that is wrong; ``offsets`` are physical, of the records that show it."""

    kind: Kind
    offsets: list[int]
    detail: str


class Transaction(NamedTuple):
    """One transaction of a family."""

    state: State
    half: int | None  # physical offset of its first half; None when that is not in the log
    decided: int | None = None  # physical offset of the record or op that decided it
    checks: int = 0  # as often the log shows that its producer was asked
    halves: int = 1  # records that it takes up as a half: copies, and several messages
    took_ms: int | None = None  # from its first half to the decision


class Verdict(NamedTuple):
    """What became of a family, and what is wrong with it."""

    transactions: list[Transaction]
    findings: list[Finding]


class LogBounds(NamedTuple):
    """Which part of the log can be read."""

    first_offset: int
    damage: tuple[tuple[int, int], ...] = ()  # ranges [start, end) that could not be read, sorted
    last_offset: int | None = None  # of the last record
    # Ranges [start, end) written by brokers whose rollbacks are records, sorted: see ``dialects``.
    records_rollbacks: tuple[tuple[int, int], ...] = ()
    write_queues: Mapping[int, int] | None = None  # by hash of the topic, where a store tells

    def is_unreadable(self, offset: int) -> bool:
        """Tell whether a record at this offset may well have existed."""
        return self.hides(offset, offset + 1)

    def hides(self, start: int, end: int | None = None) -> bool:
        """Tell whether part of [start, end) cannot be read; no end: all that follows."""
        if start < self.first_offset:
            return True
        at = bisect_right(self.damage, start, key=lambda damaged: damaged[1])
        return at < len(self.damage) and (end is None or self.damage[at][0] < end)


class Terms(NamedTuple):
    """From when on being undecided is held against a transaction."""

    overdue_before_ms: int | None = None  # prepared earlier: it should have been decided
    passed_slot: int = 0  # RocketMQ's checks will not come back to half queue offsets below
    checks_max: int = CHECKS_MAX
    given_up_before_ms: int | None = None  # its last check was earlier: it should be parked
    due_before_ms: int | None = None  # of delayed commits: due earlier, it should be delivered


NO_TERMS: Final = Terms()


class _Decision(NamedTuple):
    """One accepted decision: where it shows, on which half, and the op that mirrors it."""

    offset: int
    half: int
    op: int | None
    time_ms: int


@dataclass(slots=True)
class _Thread:
    """One transaction: its first half, and every record that is about it."""

    half: Event | None = None
    copies: list[Event] = field(default_factory=list)
    decided: list[Event] = field(default_factory=list)  # final and rollback records
    ops: list[Event] = field(default_factory=list)
    discards: list[Event] = field(default_factory=list)
    resumes: list[Event] = field(default_factory=list)
    # Of the further messages of several, by their number:
    members: dict[int, list[Event]] = field(default_factory=dict)  # halves and their copies
    member_decided: dict[int, list[Event]] = field(default_factory=dict)
    member_ops: dict[int, list[Event]] = field(default_factory=dict)

    @property
    def halves(self) -> list[Event]:
        """Its own half, if that can be read, and the copies."""
        return [self.half, *self.copies] if self.half else self.copies

    @property
    def is_decided(self) -> bool:
        return bool(self.decided or self.ops)

    @property
    def total(self) -> int:
        """How many messages it has."""
        return self.half.total if self.half else 1


class _Outcome(NamedTuple):
    """What became of one transaction."""

    thread: _Thread
    state: State
    commits: list[_Decision]
    rollbacks: list[_Decision]


def judge(events: Iterable[Event], bounds: LogBounds, terms: Terms = NO_TERMS) -> Verdict:
    """Say what became of the family that has these records."""
    family = _Family(sorted(events, key=_log_order), bounds)
    findings = family.findings
    outcomes = [_outcome(thread, findings) for thread in family.threads]
    for outcome in outcomes:
        findings += _conflicts(outcome.commits, outcome.rollbacks)
        findings += _unlike_the_leader(outcome, bounds)
        findings += _left_undecided(outcome, terms)
        findings += _resumed_from_nothing(outcome.thread, bounds)
    for together in _overlapping(outcomes):
        findings += _twins(together)
        findings += _twice([commit for outcome in together for commit in outcome.commits])
    return Verdict([_transaction(outcome) for outcome in outcomes], findings)


def _log_order(event: Event) -> tuple[int, bool, int]:
    return event.offset, event.part is Part.NAMED, event.reference


def _transaction(outcome: _Outcome) -> Transaction:
    thread = outcome.thread
    first = next(iter(thread.halves), None)
    decision = next(iter(outcome.commits or outcome.rollbacks), None)
    return Transaction(
        state=outcome.state,
        half=first.offset if first else None,
        decided=decision.offset if decision else None,
        checks=max((half.check_times or 0 for half in thread.halves), default=0),
        halves=len(thread.halves) + sum(map(len, thread.members.values())),
        took_ms=decision.time_ms - first.time_ms if decision and first else None,
    )


# --- which record is about which transaction


class _Family:
    """Divides the records of a family by transaction; they come in log order."""

    def __init__(self, events: Sequence[Event], bounds: LogBounds) -> None:
        self._bounds = bounds
        self._owners: dict[int, tuple[_Thread, int]] = {}  # by half; the number of its message
        self._named_by: dict[int, _Thread] = {}  # by the offset of a decision
        self.findings: list[Finding] = []
        self.threads = [_Thread(event) for event in events if _is_first(event)] or [_Thread()]
        for event in events:
            if event.part is Part.HALF:
                self._half(event)
            elif event.part is Part.NAMED:
                self._named(event)
            else:
                self._about(event)

    def _half(self, event: Event) -> None:
        if event.number:  # the halves of several messages lie side by side, the leader first
            thread = self._begun(event.offset)[-1]
            thread.members.setdefault(event.number, []).append(event)
        elif event.check_times is not None:
            thread = self._latest(event.offset)
            thread.copies.append(event)
        else:
            thread = next(thread for thread in self.threads if thread.half is event)
        self._owners[event.offset] = thread, event.number

    def _about(self, event: Event) -> None:
        """Take a record that names a half."""
        owner = self._owners.get(event.reference)
        if owner is None:
            self.findings += self._without_half(event)
            if event.part is Part.OP:
                return
            owner = self._latest(event.offset), event.number
        thread, number = owner
        if event.part is Part.OP:
            kept = thread.member_ops.setdefault(number, []) if number else thread.ops
        elif event.part in _PARKING:
            # RocketMQ parks further messages one by one, which says nothing about the first.
            kept = thread.discards if event.part is Part.DISCARD else thread.resumes
            if number:
                return
        else:
            kept = thread.member_decided.setdefault(number, []) if number else thread.decided
            self._named_by[event.offset] = thread
        kept.append(event)

    def _named(self, event: Event) -> None:
        if event.reference not in self._owners and not self._bounds.is_unreadable(event.reference):
            detail = (
                f"the decision names one more half message, at {event.reference}: none is there"
            )
            self.findings.append(Finding(Kind.DECISION_WITHOUT_HALF, [event.offset], detail))

    def _without_half(self, event: Event) -> Iterable[Finding]:
        named = event.reference
        if event.part is Part.OP:
            detail = f"the op message precedes its half message at {named}"
            yield Finding(Kind.OP_WITHOUT_HALF, [event.offset], detail)
        elif event.part is Part.DISCARD and not named:  # RocketMQ's, known by its key
            if not self._owners and not self._bounds.hides(0, event.offset):
                detail = "a message was parked whose half message is not there"
                yield Finding(Kind.PARKED_WITHOUT_HALF, [event.offset], detail)
        elif named >= event.offset or not self._bounds.is_unreadable(named):
            what = _RECORD_NAMES[event.part]
            detail = f"the {what} names a half message at {named}, where there is none of its own"
            kind = (
                Kind.PARKED_WITHOUT_HALF if event.part in _PARKING else Kind.DECISION_WITHOUT_HALF
            )
            yield Finding(kind, [event.offset], detail)

    def _begun(self, offset: int) -> list[_Thread]:
        begun = [thread for thread in self.threads if thread.half and thread.half.offset <= offset]
        return begun or self.threads[:1]

    def _latest(self, offset: int) -> _Thread:
        """The transaction that a record is about which names none: one that is still undecided."""
        begun = self._begun(offset)
        return ([thread for thread in begun if not thread.is_decided] or begun)[-1]


_PARKING: Final = (Part.DISCARD, Part.RESUME)
_RECORD_NAMES: Final = {
    Part.COMMIT: "final message",
    Part.ROLLBACK: "rollback record",
    Part.DISCARD: "parked copy",
    Part.RESUME: "resume record",
}


def _is_first(event: Event) -> bool:
    return event.part is Part.HALF and event.check_times is None and not event.number


# --- what became of one transaction


def _outcome(thread: _Thread, findings: Sequence[Finding]) -> _Outcome:
    commits, rollbacks = _decisions(thread.decided, thread.ops)
    return _Outcome(thread, _state(thread, commits, rollbacks, findings), commits, rollbacks)


def _state(
    thread: _Thread,
    commits: Sequence[_Decision],
    rollbacks: Sequence[_Decision],
    findings: Sequence[Finding],
) -> State:
    halves = thread.halves
    if not halves and (commits or rollbacks or not thread.discards):
        known_to_be_missing = {Kind.DECISION_WITHOUT_HALF, Kind.PARKED_WITHOUT_HALF}
        unfounded = any(finding.kind in known_to_be_missing for finding in findings)
        return State.UNFOUNDED if unfounded else State.EXPIRED
    if commits:
        return State.COMMITTED
    if rollbacks:
        return State.ROLLED_BACK
    # What an operator resumes gets a half again by RocketMQ, and a record of its own by halfmq.
    asked_again = [event.offset for event in (*halves[-1:], *thread.resumes[-1:])]
    if thread.discards and max(asked_again, default=-1) < thread.discards[-1].offset:
        return State.PARKED
    return State.PENDING


def _decisions(
    decided: Sequence[Event], ops: Sequence[Event]
) -> tuple[list[_Decision], list[_Decision]]:
    """Give commits and rollbacks, those included that only an op tells of."""
    commits: list[_Decision] = []
    rollbacks: list[_Decision] = []
    for half in {event.reference for event in (*decided, *ops)}:
        mirrors = [op for op in ops if op.reference == half]
        for event in (event for event in decided if event.reference == half):
            op = _take_behind(event.offset, mirrors)
            kept = commits if event.part is Part.COMMIT else rollbacks
            kept.append(_Decision(event.offset, half, op, event.time_ms))
        rollbacks += [_Decision(op.offset, half, op.offset, op.time_ms) for op in mirrors]
    return sorted(commits, key=_position), sorted(rollbacks, key=_position)


def _position(decision: _Decision) -> tuple[int, int]:
    return decision.offset, decision.half


def _take_behind(offset: int, ops: list[Event]) -> int | None:
    """Take the first op behind a decision: ops are written in the order of the decisions."""
    for index, op in enumerate(ops):
        if op.offset > offset:
            return ops.pop(index).offset
    return None


def _conflicts(commits: Sequence[_Decision], rollbacks: Sequence[_Decision]) -> list[Finding]:
    """Find opposite decisions about one transaction."""
    found: dict[Kind, Finding] = {}
    for rollback in rollbacks if commits else ():
        kind = _order(commits, rollback)
        first = "rolled back" if kind is Kind.COMMIT_AFTER_ROLLBACK else "committed"
        known = kind is Kind.ROLLBACK_AFTER_COMMIT or commits[-1].offset > rollback.offset
        order = f"{first} first" if known else "the ops do not tell which came first"
        detail = f"both decisions were accepted; {order}"
        offsets = sorted({rollback.offset, *(commit.offset for commit in commits)})
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


# --- several messages


def _unlike_the_leader(outcome: _Outcome, bounds: LogBounds) -> Iterable[Finding]:
    """Find further messages that were not decided like the first."""
    thread = outcome.thread
    if thread.half is None:
        yield from _without_leader(thread, bounds)
        return
    for number in sorted({*range(1, thread.total), *thread.members, *thread.member_decided}):
        finals = [e for e in thread.member_decided.get(number, ()) if e.part is Part.COMMIT]
        if outcome.commits:
            yield from _unlike_a_commit(outcome, number, finals, bounds)
        elif finals:
            state = "rolled back" if outcome.rollbacks else "undecided"
            detail = f"message {number} of {thread.total} was committed, the first is {state}"
            yield Finding(Kind.SPLIT_GROUP, [thread.half.offset, finals[0].offset], detail)
        if len(finals) > 1:
            detail = f"{len(finals)} final messages of message {number} of {thread.total}"
            yield Finding(Kind.COMMITTED_TWICE, [final.offset for final in finals], detail)


def _unlike_a_commit(
    outcome: _Outcome, number: int, finals: Sequence[Event], bounds: LogBounds
) -> Iterable[Finding]:
    thread, decision = outcome.thread, outcome.commits[0].offset
    half = next(iter(thread.members.get(number, ())), None)
    assert thread.half is not None
    if half is None and not finals:
        if not bounds.hides(thread.half.offset, decision):
            detail = f"committed, though half message {number} of {thread.total} is not there"
            yield Finding(Kind.SPLIT_GROUP, [thread.half.offset, decision], detail)
    elif not finals and not bounds.hides(decision) and not _ends_the_log(outcome, bounds):
        detail = f"committed, but message {number} of {thread.total} has no final message"
        offsets = [half.offset if half else thread.half.offset, decision]
        yield Finding(Kind.MISSING_FINAL, offsets, detail)


def _ends_the_log(outcome: _Outcome, bounds: LogBounds) -> bool:
    """Tell whether the log ends amid the final messages, so that the next start adds the rest."""
    thread = outcome.thread
    finals = [commit.offset for commit in outcome.commits]
    finals += [event.offset for events in thread.member_decided.values() for event in events]
    return max(finals) == bounds.last_offset


def _without_leader(thread: _Thread, bounds: LogBounds) -> Iterable[Finding]:
    halves = [half for member in thread.members.values() for half in member]
    first = min((half.offset for half in halves), default=None)
    if first is not None and not bounds.hides(0, first):
        detail = "half messages of several, without the first, which decides for them"
        yield Finding(Kind.SPLIT_GROUP, sorted(half.offset for half in halves), detail)


# --- what should have gone on


def _left_undecided(outcome: _Outcome, terms: Terms) -> Iterable[Finding]:
    """Find halves that wait too long, and those that nobody will ask about."""
    halves = outcome.thread.halves
    if outcome.state is not State.PENDING or not halves:
        return
    first, newest = halves[0], halves[-1]
    if terms.overdue_before_ms is not None and first.time_ms < terms.overdue_before_ms:
        late = terms.overdue_before_ms - first.time_ms
        detail = f"undecided {late} ms longer than is taken for normal"
        yield Finding(Kind.OVERDUE_HALF, [half.offset for half in halves], detail)
    asked = newest.check_times or 0
    given_up = terms.given_up_before_ms
    if newest.reference < terms.passed_slot:
        detail = (
            f"undecided and not parked, though RocketMQ's checks have passed it: it lies at"
            f" {newest.reference} of the half queue, they have come to {terms.passed_slot}"
        )
        yield Finding(Kind.LOST_PARKING, [half.offset for half in halves], detail)
    elif given_up is not None and asked >= terms.checks_max and newest.time_ms < given_up:
        detail = f"asked about {asked} times, then neither decided nor parked"
        yield Finding(Kind.LOST_PARKING, [half.offset for half in halves], detail)


def _resumed_from_nothing(thread: _Thread, bounds: LogBounds) -> Iterable[Finding]:
    """Find resumed transactions whose parking is not in the log."""
    resumes = [*thread.resumes, *(copy for copy in thread.copies if copy.check_times == 0)]
    if not resumes or not thread.halves:
        return
    first = min(resumes, key=_log_order)
    start = thread.halves[0].offset
    parked = any(discard.offset < first.offset for discard in thread.discards)
    if thread.half and not parked and not bounds.hides(start, first.offset):
        detail = "resumed by an operator, though no parked copy is in the log"
        yield Finding(Kind.LOST_PARKING, [start, first.offset], detail)


# --- twins


def _overlapping(outcomes: Sequence[_Outcome]) -> list[list[_Outcome]]:
    """Put transactions together that were there at the same time.

    What is prepared once more after a rollback is no twin: the producer began anew.
    """
    groups: list[list[_Outcome]] = []
    for outcome in outcomes:
        half = outcome.thread.half
        if half and groups and not all(_was_rolled_back(o, half.offset) for o in groups[-1]):
            groups[-1].append(outcome)
        else:
            groups.append([outcome])
    return groups


def _was_rolled_back(outcome: _Outcome, before: int) -> bool:
    rollbacks = [rollback for rollback in outcome.rollbacks if rollback.offset < before]
    return bool(rollbacks) and not any(commit.offset < before for commit in outcome.commits)


def _twins(together: Sequence[_Outcome]) -> Iterable[Finding]:
    if len(together) > 1:
        detail = f"{len(together)} half messages of one transaction, none of them a check's copy"
        offsets = [outcome.thread.half.offset for outcome in together if outcome.thread.half]
        yield Finding(Kind.DUPLICATE_PREPARE, offsets, detail)


def _twice(commits: Sequence[_Decision]) -> Iterable[Finding]:
    if len(commits) > 1:
        offsets = sorted(commit.offset for commit in commits)
        detail = f"{len(commits)} final messages: consumers see every one of them"
        yield Finding(Kind.COMMITTED_TWICE, offsets, detail)
