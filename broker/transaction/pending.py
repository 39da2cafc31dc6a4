"""The table of undecided half messages, and the state machine of a transaction.

A transaction is known by the physical offset of its first half record, for as long as the log
keeps that record. It is PREPARED until the producer decides; the first decision makes it COMMITTED
or ROLLED_BACK for good. PARKED is PREPARED without further checks: it waits for a late decision or
an operator.

``RESULTS`` maps state and event to the new state and a verdict. There are three kinds of events.
Requests of producers and operators (COMMIT to RESUME) get a verdict that says how to serve them.
Steps of the check-back (DUE to EXPIRED) change the counters and end in PARKED. Findings (…_FOUND)
are read from the log and override the table: a final record makes any transaction
COMMITTED, because consumers may have received it.

The table keeps all undecided transactions, in log order, and the latest hundred thousand decisions.
That bound is safe: **a half that is not in the table cannot be decided**, so refusing a second
final record needs no memory of the first. The decisions kept answer repeated requests; later
repeats are answered from the log.

A transaction of several messages has one half per message. Only the first, its leader, has an
entry. The others are *members*, kept in two side tables that few transactions need; a member's
offset resolves to its leader.

Stores written by Apache RocketMQ contain check copies of undecided halves. They are aliases of the
same transaction, kept in ``copies``; halfmq writes none.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

import msgspec

from halfmq.remoting.headers import CheckTransactionStateRequestHeader

from ..ports import OnAnswer
from .generations import Generations
from .log_map import BLOCK_COUNT, LogMap

DECIDED_REMEMBERED: Final = 100_000
"""Decisions kept: several seconds on the fastest machine, within which a client repeats a request
whose answer was lost. About 150 bytes each."""


class Producer(Protocol):
    """The part of a producer's connection that transactions use."""

    name: str  # the peer, "127.0.0.1:54321"

    @property
    def subject(self) -> object:
        """The principal of its latest request; None without access control."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        ...

    @property
    def writable(self) -> bool:
        """Whether the peer reads what it is sent."""
        ...

    def send_request(
        self, code: int, header: CheckTransactionStateRequestHeader, body: bytes = b""
    ) -> bool:
        """Send a one-way request; return False if it was not written."""
        ...

    @property
    def acknowledges(self) -> bool:
        """Whether the peer acknowledges a request as soon as it has received it."""
        ...

    def ask(
        self,
        code: int,
        header: CheckTransactionStateRequestHeader,
        body: bytes,
        on_answer: OnAnswer,
    ) -> bool:
        """Send a request that the peer answers; return False if it was not written."""
        ...


class State(IntEnum):
    """The state of a transaction."""

    PREPARED = 0
    COMMITTED = 1
    ROLLED_BACK = 2
    PARKED = 3


class Event(IntEnum):
    """What can happen to a transaction: requests, steps of the check-back, findings in the log."""

    COMMIT = 0  # from the producer, on its own or in answer to a check
    ROLLBACK = 1
    UNKNOWN = 2  # the producer has not decided yet
    OPERATOR_COMMIT = 3  # an operator decides instead of the producer
    OPERATOR_ROLLBACK = 4
    RESUME = 5  # an operator resumes the checks
    DUE = 6  # its next check is due
    DELIVERED = 7  # a check has reached a producer
    ANSWERED = 8  # a producer has answered a check, perhaps with UNKNOWN
    GIVE_UP = 9  # no decision after the last check
    EXPIRED = 10  # its half is old enough to be deleted
    FINAL_FOUND = 11  # in the log: the final message
    ROLLBACK_FOUND = 12  # in the log: our rollback record
    OP_FOUND = 13  # in the log: an op message, the same for commit and rollback
    PARKED_FOUND = 14  # in the log: the copy for operators
    RESUMED_FOUND = 15  # in the log: our record, or a parked half put back by Apache RocketMQ
    DELETED_FOUND = 16  # the log begins after its half


class Verdict(IntEnum):
    """How an event is handled."""

    DECIDE = 0  # the first decision: append its record, answer when that is durable
    REPEAT = 1  # the same decision again: the same answer, and no record
    REFUSE = 2  # the opposite decision: an error that names the first
    NOTE = 3  # only set the new state
    IGNORE = 4  # keep the state
    ASK = 5  # send a check, or give up after the last
    COUNT = 6  # keep the state; count the event
    FORGET = 7  # remove the transaction undecided: its half was deleted


class ParkedReason(IntEnum):
    """Why no more checks are sent about a transaction."""

    NOT_PARKED = 0
    NO_ANSWER = 1  # no check was answered
    UNKNOWN = 2  # checks were answered, and never with a decision
    EXPIRED = 3  # its half is old enough to be deleted
    NOT_RECORDED = 4  # parked by Apache RocketMQ, which records no reason

    @property
    def text(self) -> str | None:
        """As shown in properties, metrics and tools; None without a reason."""
        return _REASON_TEXTS.get(self)


_REASON_TEXTS: Final = {
    ParkedReason.NO_ANSWER: "no-answer",
    ParkedReason.UNKNOWN: "unknown",
    ParkedReason.EXPIRED: "expired",
}
PARKING_REASONS: Final = tuple(_REASON_TEXTS)
"""The reasons that this broker records when it parks."""
_REASONS_BY_TEXT: Final = {text.encode(): reason for reason, text in _REASON_TEXTS.items()}


def parked_reason_of(text: bytes | None) -> ParkedReason:
    """Parse the reason in a parked copy's property."""
    return _REASONS_BY_TEXT.get(text or b"", ParkedReason.NOT_RECORDED)


class Result(NamedTuple):
    """The entry of the state table for one state and one event."""

    state: State
    verdict: Verdict


_S, _E, _V = State, Event, Verdict
_RULES: Final[dict[State, dict[Event, Result]]] = {
    _S.PREPARED: {
        _E.COMMIT: Result(_S.COMMITTED, _V.DECIDE),
        _E.ROLLBACK: Result(_S.ROLLED_BACK, _V.DECIDE),
        _E.UNKNOWN: Result(_S.PREPARED, _V.IGNORE),
        _E.OPERATOR_COMMIT: Result(_S.COMMITTED, _V.DECIDE),
        _E.OPERATOR_ROLLBACK: Result(_S.ROLLED_BACK, _V.DECIDE),
        _E.RESUME: Result(_S.PREPARED, _V.IGNORE),
        _E.DUE: Result(_S.PREPARED, _V.ASK),
        _E.DELIVERED: Result(_S.PREPARED, _V.COUNT),
        _E.ANSWERED: Result(_S.PREPARED, _V.COUNT),
        _E.GIVE_UP: Result(_S.PARKED, _V.NOTE),
        _E.EXPIRED: Result(_S.PARKED, _V.NOTE),
        _E.FINAL_FOUND: Result(_S.COMMITTED, _V.NOTE),
        _E.ROLLBACK_FOUND: Result(_S.ROLLED_BACK, _V.NOTE),
        # RocketMQ writes the op after the final message: no final so far means rolled back.
        _E.OP_FOUND: Result(_S.ROLLED_BACK, _V.NOTE),
        _E.PARKED_FOUND: Result(_S.PARKED, _V.NOTE),
        _E.RESUMED_FOUND: Result(_S.PREPARED, _V.IGNORE),
        _E.DELETED_FOUND: Result(_S.PREPARED, _V.FORGET),
    },
    _S.PARKED: {
        # A decision that comes late is still the first one.
        _E.COMMIT: Result(_S.COMMITTED, _V.DECIDE),
        _E.ROLLBACK: Result(_S.ROLLED_BACK, _V.DECIDE),
        _E.UNKNOWN: Result(_S.PARKED, _V.IGNORE),
        _E.OPERATOR_COMMIT: Result(_S.COMMITTED, _V.DECIDE),
        _E.OPERATOR_ROLLBACK: Result(_S.ROLLED_BACK, _V.DECIDE),
        _E.RESUME: Result(_S.PREPARED, _V.NOTE),
        _E.DUE: Result(_S.PARKED, _V.IGNORE),
        _E.DELIVERED: Result(_S.PARKED, _V.COUNT),  # the acknowledgement came late
        _E.ANSWERED: Result(_S.PARKED, _V.COUNT),
        _E.GIVE_UP: Result(_S.PARKED, _V.IGNORE),
        _E.EXPIRED: Result(_S.PARKED, _V.IGNORE),
        _E.FINAL_FOUND: Result(_S.COMMITTED, _V.NOTE),
        _E.ROLLBACK_FOUND: Result(_S.ROLLED_BACK, _V.NOTE),
        _E.OP_FOUND: Result(_S.ROLLED_BACK, _V.NOTE),
        _E.PARKED_FOUND: Result(_S.PARKED, _V.IGNORE),
        _E.RESUMED_FOUND: Result(_S.PREPARED, _V.NOTE),
        _E.DELETED_FOUND: Result(_S.PARKED, _V.FORGET),
    },
    _S.COMMITTED: {
        _E.COMMIT: Result(_S.COMMITTED, _V.REPEAT),
        _E.ROLLBACK: Result(_S.COMMITTED, _V.REFUSE),
        _E.UNKNOWN: Result(_S.COMMITTED, _V.IGNORE),
        _E.OPERATOR_COMMIT: Result(_S.COMMITTED, _V.REPEAT),
        _E.OPERATOR_ROLLBACK: Result(_S.COMMITTED, _V.REFUSE),
        _E.RESUME: Result(_S.COMMITTED, _V.REFUSE),
        _E.DUE: Result(_S.COMMITTED, _V.IGNORE),
        _E.DELIVERED: Result(_S.COMMITTED, _V.IGNORE),
        _E.ANSWERED: Result(_S.COMMITTED, _V.IGNORE),
        _E.GIVE_UP: Result(_S.COMMITTED, _V.IGNORE),
        _E.EXPIRED: Result(_S.COMMITTED, _V.IGNORE),
        _E.FINAL_FOUND: Result(_S.COMMITTED, _V.IGNORE),  # RocketMQ commits twice; one is first
        _E.ROLLBACK_FOUND: Result(_S.COMMITTED, _V.IGNORE),
        _E.OP_FOUND: Result(_S.COMMITTED, _V.IGNORE),
        _E.PARKED_FOUND: Result(_S.COMMITTED, _V.IGNORE),
        _E.RESUMED_FOUND: Result(_S.COMMITTED, _V.IGNORE),
        _E.DELETED_FOUND: Result(_S.COMMITTED, _V.IGNORE),
    },
    _S.ROLLED_BACK: {
        _E.COMMIT: Result(_S.ROLLED_BACK, _V.REFUSE),
        _E.ROLLBACK: Result(_S.ROLLED_BACK, _V.REPEAT),
        _E.UNKNOWN: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.OPERATOR_COMMIT: Result(_S.ROLLED_BACK, _V.REFUSE),
        _E.OPERATOR_ROLLBACK: Result(_S.ROLLED_BACK, _V.REPEAT),
        _E.RESUME: Result(_S.ROLLED_BACK, _V.REFUSE),
        _E.DUE: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.DELIVERED: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.ANSWERED: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.GIVE_UP: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.EXPIRED: Result(_S.ROLLED_BACK, _V.IGNORE),
        # RocketMQ accepts a commit after a rollback. The message was delivered, so it counts.
        _E.FINAL_FOUND: Result(_S.COMMITTED, _V.NOTE),
        _E.ROLLBACK_FOUND: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.OP_FOUND: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.PARKED_FOUND: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.RESUMED_FOUND: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.DELETED_FOUND: Result(_S.ROLLED_BACK, _V.IGNORE),
    },
}
_PREPARED, _COMMITTED, _PARKED = State.PREPARED, State.COMMITTED, State.PARKED  # for the hot path
RESULTS: Final = tuple(tuple(_RULES[state][event] for event in Event) for state in State)
"""The table by state and event, for the hot path, which saves the call of ``outcome``."""


def outcome(state: State, event: Event) -> Result:
    """Return the new state and the verdict for an event in this state."""
    return RESULTS[state][event]


class CheckProgress(NamedTuple):
    """The progress of the checks of one transaction."""

    sent: int = 0  # checks written to a connection, received or not
    delivered: int = 0  # checks that reached a producer
    answered: int = 0  # checks that a producer answered
    parked_reason: ParkedReason = ParkedReason.NOT_PARKED
    immunity_s: int = 0  # requested seconds until the first check; 0: the default


NOT_CHECKED: Final = CheckProgress()
_SHARED_MAX: Final = 4_096
"""Distinct values shared; the default settings produce some dozens."""
_shared: Final[dict[CheckProgress, CheckProgress]] = {NOT_CHECKED: NOT_CHECKED}


def shared(progress: CheckProgress) -> CheckProgress:
    """Return an equal instance that many transactions share, to save memory."""
    known = _shared.get(progress)
    if known is None:
        if len(_shared) >= _SHARED_MAX:
            return progress
        known = _shared[progress] = progress
    return known


class Pending(msgspec.Struct, gc=False):
    """One undecided transaction; PREPARED or PARKED.

    Eight fields: one more would cost sixteen bytes, and there may be a million of these.
    """

    offset: int  # physical offset of the first half record: the transaction's identity
    queue_offset: int  # of the same record in the half topic's queue 0
    store_timestamp: int  # ms, the broker's clock: ages count from here
    group: str  # the producers that can be asked
    state: State = State.PREPARED
    progress: CheckProgress = NOT_CHECKED
    owner: Producer | None = None  # the connection that prepared it, while it is open
    due: int = 0  # bucket of its next check, or its stage in the check-back; see `checker`

    @property
    def sent(self) -> int:
        """Checks written to a connection, received or not."""
        return self.progress.sent

    @sent.setter
    def sent(self, count: int) -> None:
        self.progress = shared(self.progress._replace(sent=count))

    @property
    def checks(self) -> int:
        """Checks that reached a producer; this count is limited."""
        return self.progress.delivered

    @checks.setter
    def checks(self, count: int) -> None:
        self.progress = shared(self.progress._replace(delivered=count))

    @property
    def answered(self) -> int:
        """Checks that a producer answered."""
        return self.progress.answered

    @answered.setter
    def answered(self, count: int) -> None:
        self.progress = shared(self.progress._replace(answered=count))

    @property
    def immunity_s(self) -> int:
        """Requested seconds until the first check; 0 means the default."""
        return self.progress.immunity_s

    @property
    def parked_reason(self) -> ParkedReason:
        """Why it is parked; NOT_PARKED if it is not."""
        return self.progress.parked_reason


class MemberHalf(NamedTuple):
    """A half of a several-message transaction that is not its leader."""

    offset: int  # physical
    queue_offset: int  # in the half topic


class Copy(NamedTuple):
    """A check copy written by Apache RocketMQ: an alias of a transaction."""

    first: int  # physical offset of the transaction's first half
    queue_offset: int  # of the copy


class Decision(NamedTuple):
    """How a transaction ended."""

    state: State  # COMMITTED or ROLLED_BACK
    position: int  # physical offset of the record that decided it


class DecisionCache:
    """A bounded cache of the latest decisions."""

    def __init__(self, limit: int = DECIDED_REMEMBERED) -> None:
        self._latest = Generations(limit)
        # ``newest_final`` at the end of each generation except the newest; oldest first.
        self._finals: deque[int] = deque(maxlen=limit // self._latest.limit)
        self.newest_final = 0
        self.forgotten_final = 0  # all finals at higher log positions are cached

    def __contains__(self, offset: int) -> bool:
        return self._latest.get(offset) is not None

    def clear(self) -> None:
        """Remove all decisions."""
        self._latest.clear()
        self._finals.clear()
        self.newest_final = self.forgotten_final = 0

    def assume_forgotten(self, newest_final: int) -> None:
        """Start with an empty cache: finals up to this log position are not in it."""
        self.newest_final = self.forgotten_final = newest_final

    def add(self, offset: int, state: State, position: int) -> None:
        """Add a decision; ``position`` is the log position of the record that decided."""
        if state is _COMMITTED:
            self.newest_final = position
        if self._latest.put(offset, position << 2 | state):
            finals = self._finals
            if len(finals) == finals.maxlen:
                self.forgotten_final = finals[0]
            finals.append(self.newest_final)

    def find(self, offset: int) -> Decision | None:
        """Return the decision; None if it is not cached."""
        packed = self._latest.get(offset)
        return None if packed is None else Decision(State(packed & 3), packed >> 2)


class PendingTable:
    """All undecided transactions, and the latest decisions."""

    def __init__(self, decided_remembered: int = DECIDED_REMEMBERED) -> None:
        self._pending = LogMap[Pending]()
        self.decided = DecisionCache(decided_remembered)
        self.copies: dict[int, Copy] = {}  # by the copy's physical offset
        self._copies_of: dict[int, list[int]] = {}  # first half -> queue offsets of its copies
        self.groups: dict[
            int, tuple[MemberHalf, ...]
        ] = {}  # by the leader's offset, in index order
        self._leader_of: dict[int, int] = {}  # by the member's offset
        self._of_group: dict[str, int] = {}  # undecided transactions by producer group, none of 0
        self.parked = 0  # how many of the undecided are PARKED
        self.newest_offset = -1  # the newest record by halfmq that changed the table
        self.get = self._pending.get  # by the offset of the first half; the hot path's look-up

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def halves(self) -> int:
        """Number of undecided halves: leaders and members."""
        return len(self._pending) + len(self._leader_of)

    def count_of(self, group: str) -> int:
        """Return the number of undecided transactions of a producer group, parked ones included."""
        return self._of_group.get(group, 0)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending)

    def __contains__(self, offset: int) -> bool:
        return offset in self._pending

    def after(self, offset: int, count: int = BLOCK_COUNT) -> list[Pending]:
        """Return up to ``count`` transactions with larger offsets, oldest first; [] at the end.

        Call it repeatedly to iterate over a table that changes meanwhile.
        """
        return self._pending.after(offset, count)

    @property
    def oldest(self) -> Pending | None:
        """The undecided transaction with the lowest offset; None if there is none."""
        return next(iter(self._pending), None)

    def first_of(self, offset: int) -> int:
        """Resolve the offset of a half, a copy or a member to its transaction's."""
        copy = self.copies.get(offset) if self.copies else None
        if copy is not None:
            offset = copy.first
        return self._leader_of.get(offset, offset) if self._leader_of else offset

    def is_member(self, offset: int) -> bool:
        """Return whether the half at an offset is a member of an undecided transaction."""
        return offset in self._leader_of

    def names_of(self, entry: Pending) -> Iterable[int]:
        """Return the half queue offsets by which op messages refer to the transaction."""
        if not self._copies_of and not self.groups:
            return (entry.queue_offset,)
        names = [entry.queue_offset, *self._copies_of.get(entry.offset, ())]
        for member in self.groups.get(entry.offset, ()):
            names += self.names_of_member(member)
        return names

    def names_of_member(self, member: MemberHalf) -> list[int]:
        """Return the half queue offsets by which op messages refer to one member."""
        return [member.queue_offset, *self._copies_of.get(member.offset, ())]

    def add_member(self, leader: int, member: MemberHalf) -> None:
        """Add a further half to the undecided transaction of ``leader``."""
        self.groups[leader] = (*self.groups.get(leader, ()), member)
        self._leader_of[member.offset] = leader
        self.newest_offset = max(self.newest_offset, member.offset)

    def settle_member(self, offset: int, state: State, position: int) -> MemberHalf | None:
        """Remove a member that Apache RocketMQ decided alone, since it has no groups."""
        leader = self._leader_of.pop(offset, None)
        if leader is None:
            return None
        (settled,) = (member for member in self.groups[leader] if member.offset == offset)
        self.groups[leader] = tuple(one for one in self.groups[leader] if one is not settled)
        self.decided.add(offset, state, position)
        return settled

    def add_copy(self, offset: int, first: int, queue_offset: int) -> None:
        """Add an alias of a transaction."""
        if offset not in self.copies:
            self.copies[offset] = Copy(first, queue_offset)
            self._copies_of.setdefault(first, []).append(queue_offset)

    def add(
        self,
        offset: int,
        queue_offset: int,
        store_timestamp: int,
        group: str,
        *,
        immunity_s: int = 0,
        checks: int = 0,
        owner: Producer | None = None,
    ) -> Pending:
        """Add a transaction whose half has been appended."""
        entry = Pending(
            offset,
            queue_offset,
            store_timestamp,
            sys.intern(group),
            _PREPARED,
            shared(CheckProgress(checks, checks, immunity_s=immunity_s))
            if checks or immunity_s
            else NOT_CHECKED,
            owner,
        )
        self._pending.add(offset, entry)
        self._of_group[entry.group] = self._of_group.get(entry.group, 0) + 1
        self.newest_offset = offset
        return entry

    def restore(self, entries: Iterable[Pending]) -> None:
        """Add transactions from a snapshot, which lists them in log order."""
        pending, intern, newest = self._pending, sys.intern, self.newest_offset
        of_group = self._of_group
        for entry in entries:
            entry.group = group = intern(entry.group)
            of_group[group] = of_group.get(group, 0) + 1
            pending.add(entry.offset, entry)
            if entry.state is _PARKED:
                self.parked += 1
            newest = max(newest, entry.offset)
        self.newest_offset = newest

    def clear(self) -> None:
        """Remove everything, including the decisions."""
        self._pending.clear()
        self._of_group.clear()
        self.decided.clear()
        self.copies.clear()
        self._copies_of.clear()
        self.groups.clear()
        self._leader_of.clear()
        self.parked = 0
        self.newest_offset = -1

    def decide(self, entry: Pending, state: State, position: int) -> None:
        """Remove a transaction that the record at ``position`` has decided."""
        offset = entry.offset
        self._remove(entry)
        self.decided.add(offset, state, position)
        self.newest_offset = position
        if self.groups:
            for member in self._disband(offset):
                self.decided.add(member.offset, state, position)

    def _remove(self, entry: Pending) -> None:
        if entry.state is _PARKED:
            self.parked -= 1
        self._pending.remove(entry.offset)
        left = self._of_group[entry.group] - 1
        if left:
            self._of_group[entry.group] = left
        else:
            del self._of_group[entry.group]

    def _disband(self, leader: int) -> tuple[MemberHalf, ...]:
        members = self.groups.pop(leader, ())
        for member in members:
            del self._leader_of[member.offset]
        return members

    def park(self, entry: Pending, reason: ParkedReason) -> None:
        """Mark a transaction as parked: no more checks are sent."""
        assert entry.state is State.PREPARED
        entry.state = State.PARKED
        entry.progress = shared(entry.progress._replace(parked_reason=reason))
        entry.owner = None
        self.parked += 1

    def resume(self, entry: Pending) -> None:
        """Mark a parked transaction as prepared; its checks start again from the first."""
        assert entry.state is State.PARKED
        entry.state = State.PREPARED
        entry.progress = shared(CheckProgress(immunity_s=entry.immunity_s))
        self.parked -= 1

    def drop_before(self, min_offset: int) -> list[Pending]:
        """Remove and return transactions whose half the log no longer contains."""
        gone: list[Pending] = []
        for entry in self._pending:  # in log order
            if entry.offset >= min_offset:
                break
            if outcome(entry.state, Event.DELETED_FOUND).verdict is Verdict.FORGET:
                gone.append(entry)
        for entry in gone:
            self.discard(entry)
        return gone

    def discard(self, entry: Pending) -> None:
        """Remove an undecided transaction whose half can no longer be read."""
        self._remove(entry)
        self._disband(entry.offset)
