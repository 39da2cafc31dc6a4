"""The table of undecided half messages, and the state machine of a transaction.

A transaction is known by the physical offset of its first half record, for as long as the log
keeps that record. It is PREPARED until the producer decides; the first decision makes it COMMITTED
or ROLLED_BACK for good. PARKED is PREPARED without further questions: it waits for a late decision
or an operator.

``RESULTS`` holds every rule, state by event. Three kinds of event drive it. Requests of producers
and operators (COMMIT to RESUME) ask for something, and the verdict says what to do about it. Steps
of the asking (DUE to EXPIRED) move the counters and end in PARKED. Findings (…_FOUND) are facts
read back from the log, which have happened whatever the table thought; so a final record makes any
transaction COMMITTED, because its consumers may have it.

The table keeps undecided transactions whole, in log order. Of decided ones it remembers the last
few hundred thousand, and that suffices: **a half that is not in the table cannot be decided**, so
no memory is needed to refuse a second final record. What the bounded memory serves is the answer to
a request that is repeated; for one repeated later than that, the service asks the log.

A transaction of several messages has one half per message. The first of them, its leader, stands
for all: it alone has an entry. The others are *members*, kept in two side tables that few
transactions need; every way of naming a member leads to its leader.

Stores written by Apache RocketMQ hold check copies of undecided halves. Those are other names of
the same transaction, kept in ``copies``; we write none.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

import msgspec

from halfmq.remoting.headers import CheckTransactionStateRequestHeader

from ..asks import OnAnswer
from .generations import Generations
from .log_map import BLOCK_COUNT, LogMap

DECIDED_REMEMBERED: Final = 100_000
"""Decided transactions that are kept: at the rate of the fastest machine several seconds, in which
a client repeats a request whose answer was lost. About 150 bytes each."""


class Producer(Protocol):
    """The connection of a producer, as far as transactions are concerned."""

    name: str  # the peer, "127.0.0.1:54321"

    @property
    def subject(self) -> object:
        """Who signed its latest request; None without access control."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the peer is gone."""
        ...

    @property
    def writable(self) -> bool:
        """Whether the peer reads what it is sent."""
        ...

    def send_request(
        self, code: int, header: CheckTransactionStateRequestHeader, body: bytes = b""
    ) -> bool:
        """Send a one-way request; False when it was not written."""
        ...

    @property
    def acknowledges(self) -> bool:
        """Whether the peer answers a request at once: "I have it"."""
        ...

    def ask(
        self,
        code: int,
        header: CheckTransactionStateRequestHeader,
        body: bytes,
        on_answer: OnAnswer,
    ) -> bool:
        """Send a request that the peer answers; False when it was not written."""
        ...


class State(IntEnum):
    """Where a transaction stands."""

    PREPARED = 0
    COMMITTED = 1
    ROLLED_BACK = 2
    PARKED = 3


class Event(IntEnum):
    """What can happen to a transaction."""

    COMMIT = 0  # the producer says so, by itself or when asked
    ROLLBACK = 1
    UNKNOWN = 2  # the producer cannot say yet
    OPERATOR_COMMIT = 3  # an operator decides in the producer's place
    OPERATOR_ROLLBACK = 4
    RESUME = 5  # an operator wants the producer to be asked again
    DUE = 6  # the time of its next check has come
    DELIVERED = 7  # a check has reached a producer
    ANSWERED = 8  # a producer has answered a check, be it with UNKNOWN
    GIVE_UP = 9  # asked often enough without a decision
    EXPIRED = 10  # its half is old enough to be deleted
    FINAL_FOUND = 11  # in the log: the final message
    ROLLBACK_FOUND = 12  # in the log: our rollback record
    OP_FOUND = 13  # in the log: an op message, which says "decided" and not which way
    PARKED_FOUND = 14  # in the log: the copy for operators
    RESUMED_FOUND = 15  # in the log: our record, or a parked half put back by Apache RocketMQ
    DELETED_FOUND = 16  # the log begins behind its half


class Verdict(IntEnum):
    """What is to be done about an event."""

    DECIDE = 0  # the first decision: write its record, answer when that is durable
    REPEAT = 1  # the same decision again: the same answer, and no record
    REFUSE = 2  # the opposite of the first decision: an error that names the first
    NOTE = 3  # enter the new state; nothing follows
    IGNORE = 4  # the state stays; nothing follows
    ASK = 5  # send a check, or give up when there were enough
    COUNT = 6  # the state stays; a counter moves
    FORGET = 7  # take it off the table undecided: nobody can decide it any more


class ParkedReason(IntEnum):
    """Why nobody is asked about a transaction any more."""

    NOT_PARKED = 0
    NO_ANSWER = 1  # no check was answered
    UNKNOWN = 2  # checks were answered, and never with a decision
    EXPIRED = 3  # its half is old enough to be deleted
    UNSAID = 4  # parked by Apache RocketMQ, which does not say

    @property
    def text(self) -> str | None:
        """As properties, metrics and operators have it; None when there is nothing to say."""
        return _REASON_TEXTS.get(self)


_REASON_TEXTS: Final = {
    ParkedReason.NO_ANSWER: "no-answer",
    ParkedReason.UNKNOWN: "unknown",
    ParkedReason.EXPIRED: "expired",
}
PARKING_REASONS: Final = tuple(_REASON_TEXTS)
"""Why this broker parks."""
_REASONS_BY_TEXT: Final = {text.encode(): reason for reason, text in _REASON_TEXTS.items()}


def parked_reason_of(text: bytes | None) -> ParkedReason:
    """Return the reason that the property of a parked copy gives."""
    return _REASONS_BY_TEXT.get(text or b"", ParkedReason.UNSAID)


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
        # RocketMQ writes the op behind the final message: no final so far means rolled back.
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
        # RocketMQ accepts a commit after a rollback. The message is out, so that is the truth.
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
"""The table by state and event, for those who cannot afford a call to ``outcome``."""


def outcome(state: State, event: Event) -> Result:
    """Look up what an event does to a transaction in this state."""
    return RESULTS[state][event]


class Asking(NamedTuple):
    """How the asking about a transaction goes."""

    sent: int = 0  # checks written to a connection, received or not
    delivered: int = 0  # of them, those that reached a producer
    answered: int = 0  # of them, those that a producer answered
    parked_reason: ParkedReason = ParkedReason.NOT_PARKED
    immunity_s: int = 0  # seconds without a check that the producer asked for; 0: the default


NOT_ASKED: Final = Asking()
_SHARED_MAX: Final = 4_096
"""Different values that are shared; with the default settings there are some dozens."""
_shared: Final[dict[Asking, Asking]] = {NOT_ASKED: NOT_ASKED}


def shared(asking: Asking) -> Asking:
    """Return an equal value that others have too: a million transactions need few of them."""
    known = _shared.get(asking)
    if known is None:
        if len(_shared) >= _SHARED_MAX:
            return asking
        known = _shared[asking] = asking
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
    asking: Asking = NOT_ASKED
    owner: Producer | None = None  # the connection that prepared it, while it lives
    due: int = 0  # when it is asked about, or where it waits for that: the checker's

    @property
    def sent(self) -> int:
        """Checks written to a connection, received or not."""
        return self.asking.sent

    @sent.setter
    def sent(self, count: int) -> None:
        self.asking = shared(self.asking._replace(sent=count))

    @property
    def checks(self) -> int:
        """Checks that reached a producer: the count that is limited."""
        return self.asking.delivered

    @checks.setter
    def checks(self, count: int) -> None:
        self.asking = shared(self.asking._replace(delivered=count))

    @property
    def answered(self) -> int:
        """Checks that a producer answered."""
        return self.asking.answered

    @answered.setter
    def answered(self, count: int) -> None:
        self.asking = shared(self.asking._replace(answered=count))

    @property
    def immunity_s(self) -> int:
        """Seconds without a check that the producer asked for; 0 means the default."""
        return self.asking.immunity_s

    @property
    def parked_reason(self) -> ParkedReason:
        """Why it is PARKED; NOT_PARKED while it is not."""
        return self.asking.parked_reason


class Member(NamedTuple):
    """A half of a several-message transaction that is not its leader."""

    offset: int  # physical
    queue_offset: int  # in the half topic


class Copy(NamedTuple):
    """A check copy that Apache RocketMQ wrote: another name of a transaction."""

    first: int  # physical offset of the transaction's first half
    queue_offset: int  # of the copy


class Decision(NamedTuple):
    """How a transaction ended."""

    state: State  # COMMITTED or ROLLED_BACK
    position: int  # physical offset of the record that decided it


class DecidedMemory:
    """The latest decisions."""

    def __init__(self, limit: int = DECIDED_REMEMBERED) -> None:
        self._latest = Generations(limit)
        # What ``newest_final`` was at the end of each generation but the newest, oldest first.
        self._finals: deque[int] = deque(maxlen=limit // self._latest.limit)
        self.newest_final = 0
        self.forgotten_final = 0  # no final message beyond this log position has been forgotten

    def __contains__(self, offset: int) -> bool:
        return self._latest.get(offset) is not None

    def clear(self) -> None:
        """Forget everything."""
        self._latest.clear()
        self._finals.clear()
        self.newest_final = self.forgotten_final = 0

    def assume_forgotten(self, newest_final: int) -> None:
        """Begin with finals up to this log position that are not remembered here."""
        self.newest_final = self.forgotten_final = newest_final

    def remember(self, offset: int, state: State, position: int) -> None:
        """Keep a decision; the position is that of the record that decided."""
        if state is _COMMITTED:
            self.newest_final = position
        if self._latest.put(offset, position << 2 | state):
            finals = self._finals
            if len(finals) == finals.maxlen:
                self.forgotten_final = finals[0]
            finals.append(self.newest_final)

    def find(self, offset: int) -> Decision | None:
        """Return how the transaction ended, if that is still remembered."""
        packed = self._latest.get(offset)
        return None if packed is None else Decision(State(packed & 3), packed >> 2)


class PendingTable:
    """All undecided transactions, and the latest decided ones."""

    def __init__(self, decided_remembered: int = DECIDED_REMEMBERED) -> None:
        self._pending = LogMap[Pending]()
        self.decided = DecidedMemory(decided_remembered)
        self.copies: dict[int, Copy] = {}  # by the copy's physical offset
        self._copies_of: dict[int, list[int]] = {}  # first half -> queue offsets of its copies
        self.groups: dict[int, tuple[Member, ...]] = {}  # by the leader's offset, in index order
        self._leader_of: dict[int, int] = {}  # by the member's offset
        self._of_group: dict[str, int] = {}  # undecided transactions by producer group, none of 0
        self.parked = 0  # how many of the undecided are PARKED
        self.newest_offset = -1  # the newest record of ours that changed the table
        self.get = self._pending.get  # by the offset of the first half; the hot path's look-up

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def halves(self) -> int:
        """How many halves are undecided: one per transaction, and the further ones of groups."""
        return len(self._pending) + len(self._leader_of)

    def count_of(self, group: str) -> int:
        """Return how many transactions of a producer group are undecided, parked ones included."""
        return self._of_group.get(group, 0)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending)

    def __contains__(self, offset: int) -> bool:
        return offset in self._pending

    def behind(self, offset: int, count: int = BLOCK_COUNT) -> list[Pending]:
        """Return so many transactions behind an offset, or fewer, oldest first; none at the end.

        So the table can be gone through while it changes.
        """
        return self._pending.behind(offset, count)

    @property
    def oldest(self) -> Pending | None:
        """The undecided transaction that has been in the log longest."""
        return next(iter(self._pending), None)

    def first_of(self, offset: int) -> int:
        """Return the identity of the transaction that a half, a copy or a member names."""
        copy = self.copies.get(offset) if self.copies else None
        if copy is not None:
            offset = copy.first
        return self._leader_of.get(offset, offset) if self._leader_of else offset

    def is_member(self, offset: int) -> bool:
        """Tell whether the half there belongs to an undecided transaction led by another."""
        return offset in self._leader_of

    def names_of(self, entry: Pending) -> Iterable[int]:
        """Return the half queue offsets by which op messages know the transaction."""
        if not self._copies_of and not self.groups:
            return (entry.queue_offset,)
        names = [entry.queue_offset, *self._copies_of.get(entry.offset, ())]
        for member in self.groups.get(entry.offset, ()):
            names += self.names_of_member(member)
        return names

    def names_of_member(self, member: Member) -> list[int]:
        """Return the half queue offsets by which op messages know one member."""
        return [member.queue_offset, *self._copies_of.get(member.offset, ())]

    def add_member(self, leader: int, member: Member) -> None:
        """Enter a further half of the undecided transaction of ``leader``."""
        self.groups[leader] = (*self.groups.get(leader, ()), member)
        self._leader_of[member.offset] = leader
        self.newest_offset = max(self.newest_offset, member.offset)

    def settle_member(self, offset: int, state: State, position: int) -> Member | None:
        """Take off a member that was decided alone: by Apache RocketMQ, which knows no groups."""
        leader = self._leader_of.pop(offset, None)
        if leader is None:
            return None
        (settled,) = (member for member in self.groups[leader] if member.offset == offset)
        self.groups[leader] = tuple(one for one in self.groups[leader] if one is not settled)
        self.decided.remember(offset, state, position)
        return settled

    def add_copy(self, offset: int, first: int, queue_offset: int) -> None:
        """Enter another name of a transaction."""
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
        """Enter a transaction whose half has been appended."""
        entry = Pending(
            offset,
            queue_offset,
            store_timestamp,
            sys.intern(group),
            _PREPARED,
            shared(Asking(checks, checks, immunity_s=immunity_s))
            if checks or immunity_s
            else NOT_ASKED,
            owner,
        )
        self._pending.add(offset, entry)
        self._of_group[entry.group] = self._of_group.get(entry.group, 0) + 1
        self.newest_offset = offset
        return entry

    def restore(self, entries: Iterable[Pending]) -> None:
        """Enter transactions as a snapshot describes them; snapshots come in log order."""
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
        """Forget everything, to be filled again."""
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
        """Take a transaction off the table; the record at ``position`` has decided it."""
        offset = entry.offset
        self._take_off(entry)
        self.decided.remember(offset, state, position)
        self.newest_offset = position
        if self.groups:
            for member in self._disband(offset):
                self.decided.remember(member.offset, state, position)

    def _take_off(self, entry: Pending) -> None:
        if entry.state is _PARKED:
            self.parked -= 1
        self._pending.remove(entry.offset)
        left = self._of_group[entry.group] - 1
        if left:
            self._of_group[entry.group] = left
        else:
            del self._of_group[entry.group]

    def _disband(self, leader: int) -> tuple[Member, ...]:
        members = self.groups.pop(leader, ())
        for member in members:
            del self._leader_of[member.offset]
        return members

    def park(self, entry: Pending, reason: ParkedReason) -> None:
        """Ask about the transaction no more."""
        assert entry.state is State.PREPARED
        entry.state = State.PARKED
        entry.asking = shared(entry.asking._replace(parked_reason=reason))
        entry.owner = None
        self.parked += 1

    def resume(self, entry: Pending) -> None:
        """Ask about a parked transaction again, from the first check on."""
        assert entry.state is State.PARKED
        entry.state = State.PREPARED
        entry.asking = shared(Asking(immunity_s=entry.immunity_s))
        self.parked -= 1

    def drop_before(self, min_offset: int) -> list[Pending]:
        """Forget transactions whose half the log no longer holds; return them."""
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
        """Forget an undecided transaction whose half can no longer be read."""
        self._take_off(entry)
        self._disband(entry.offset)
