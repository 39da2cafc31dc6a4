"""The table of undecided half messages, and the state machine of a transaction.

A transaction is known by the physical offset of its first half record, for as long as the log
keeps that record. It is PREPARED until the producer decides; the first decision makes it COMMITTED
or ROLLED_BACK for good. PARKED is PREPARED without further questions: it waits for a late decision
or an operator.

``_TABLE`` holds every rule, state by event. Two kinds of event drive it. Requests (COMMIT,
ROLLBACK, UNKNOWN, GIVE_UP, RESUME) ask for something, and the verdict says what to do about it.
Findings (…_FOUND) are facts read back from the log, which have happened whatever the table thought;
so a final record makes any transaction COMMITTED, because its consumers may have it.

The table keeps undecided transactions whole, in log order. Of decided ones it remembers the last
few hundred thousand, and that suffices: **a half that is not in the table cannot be decided**, so
no memory is needed to refuse a second final record. What the bounded memory serves is the answer to
a request that is repeated; for one repeated later than that, the service asks the log.

Stores written by Apache RocketMQ hold check copies of undecided halves. Those are other names of
the same transaction, kept in ``copies``; we write none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

import msgspec

from halfmq.remoting.headers import CheckTransactionStateRequestHeader

from ..asks import OnAnswer

DECIDED_REMEMBERED: Final = 100_000
"""Decided transactions kept per generation, of which there are two: at the rate of the fastest
machine several seconds, in which a client repeats a request whose answer was lost. About 150 bytes
each."""


class Producer(Protocol):
    """The connection of a producer, as far as transactions are concerned."""

    name: str  # the peer, "127.0.0.1:54321"

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

    COMMIT = 0  # the producer says so
    ROLLBACK = 1
    UNKNOWN = 2  # the producer cannot say yet
    GIVE_UP = 3  # asked often enough without a decision
    RESUME = 4  # an operator wants the producer to be asked again
    FINAL_FOUND = 5  # in the log: the final message
    ROLLBACK_FOUND = 6  # in the log: our rollback record
    OP_FOUND = 7  # in the log: an op message, which says "decided" and not which way
    PARKED_FOUND = 8  # in the log: the copy for operators
    RESUMED_FOUND = 9  # in the log: a parked half put back by Apache RocketMQ's operator command


class Verdict(IntEnum):
    """What is to be done about an event."""

    DECIDE = 0  # the first decision: write its record, answer when that is durable
    REPEAT = 1  # the same decision again: the same answer, and no record
    REFUSE = 2  # the opposite of the first decision: an error that names the first
    NOTE = 3  # enter the new state; nothing follows
    IGNORE = 4  # the state stays; nothing follows


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
        _E.GIVE_UP: Result(_S.PARKED, _V.NOTE),
        _E.RESUME: Result(_S.PREPARED, _V.IGNORE),
        _E.FINAL_FOUND: Result(_S.COMMITTED, _V.NOTE),
        _E.ROLLBACK_FOUND: Result(_S.ROLLED_BACK, _V.NOTE),
        # RocketMQ writes the op behind the final message: no final so far means rolled back.
        _E.OP_FOUND: Result(_S.ROLLED_BACK, _V.NOTE),
        _E.PARKED_FOUND: Result(_S.PARKED, _V.NOTE),
        _E.RESUMED_FOUND: Result(_S.PREPARED, _V.IGNORE),
    },
    _S.PARKED: {
        # A decision that comes late is still the first one.
        _E.COMMIT: Result(_S.COMMITTED, _V.DECIDE),
        _E.ROLLBACK: Result(_S.ROLLED_BACK, _V.DECIDE),
        _E.UNKNOWN: Result(_S.PARKED, _V.IGNORE),
        _E.GIVE_UP: Result(_S.PARKED, _V.IGNORE),
        _E.RESUME: Result(_S.PREPARED, _V.NOTE),
        _E.FINAL_FOUND: Result(_S.COMMITTED, _V.NOTE),
        _E.ROLLBACK_FOUND: Result(_S.ROLLED_BACK, _V.NOTE),
        _E.OP_FOUND: Result(_S.ROLLED_BACK, _V.NOTE),
        _E.PARKED_FOUND: Result(_S.PARKED, _V.IGNORE),
        _E.RESUMED_FOUND: Result(_S.PREPARED, _V.NOTE),
    },
    _S.COMMITTED: {
        _E.COMMIT: Result(_S.COMMITTED, _V.REPEAT),
        _E.ROLLBACK: Result(_S.COMMITTED, _V.REFUSE),
        _E.UNKNOWN: Result(_S.COMMITTED, _V.IGNORE),
        _E.GIVE_UP: Result(_S.COMMITTED, _V.IGNORE),
        _E.RESUME: Result(_S.COMMITTED, _V.REFUSE),
        _E.FINAL_FOUND: Result(_S.COMMITTED, _V.IGNORE),  # RocketMQ commits twice; one is first
        _E.ROLLBACK_FOUND: Result(_S.COMMITTED, _V.IGNORE),
        _E.OP_FOUND: Result(_S.COMMITTED, _V.IGNORE),
        _E.PARKED_FOUND: Result(_S.COMMITTED, _V.IGNORE),
        _E.RESUMED_FOUND: Result(_S.COMMITTED, _V.IGNORE),
    },
    _S.ROLLED_BACK: {
        _E.COMMIT: Result(_S.ROLLED_BACK, _V.REFUSE),
        _E.ROLLBACK: Result(_S.ROLLED_BACK, _V.REPEAT),
        _E.UNKNOWN: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.GIVE_UP: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.RESUME: Result(_S.ROLLED_BACK, _V.REFUSE),
        # RocketMQ accepts a commit after a rollback. The message is out, so that is the truth.
        _E.FINAL_FOUND: Result(_S.COMMITTED, _V.NOTE),
        _E.ROLLBACK_FOUND: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.OP_FOUND: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.PARKED_FOUND: Result(_S.ROLLED_BACK, _V.IGNORE),
        _E.RESUMED_FOUND: Result(_S.ROLLED_BACK, _V.IGNORE),
    },
}
_PREPARED, _COMMITTED, _PARKED = State.PREPARED, State.COMMITTED, State.PARKED  # for the hot path
_TABLE: Final = tuple(tuple(_RULES[state][event] for event in Event) for state in State)


def outcome(state: State, event: Event) -> Result:
    """Look up what an event does to a transaction in this state."""
    return _TABLE[state][event]


class Pending(msgspec.Struct, gc=False):
    """One undecided transaction; PREPARED or PARKED."""

    offset: int  # physical offset of the first half record: the transaction's identity
    queue_offset: int  # of the same record in the half topic's queue 0
    store_timestamp: int  # ms, the broker's clock: ages count from here
    group: str  # the producers that can be asked
    state: State = State.PREPARED
    checks: int = 0  # checks that reached a producer
    immunity_s: int = 0  # seconds without a check that the producer asked for; 0 means the default
    owner: Producer | None = None  # the connection that prepared it, while it lives
    sent: int = 0  # checks written to a connection, received or not
    answered: int = 0  # checks that a producer answered with "not known yet"
    parked_reason: int = 0  # why it is PARKED
    due: int = 0  # when it is asked about, or where it waits for that: the checker's


class Copy(NamedTuple):
    """A check copy that Apache RocketMQ wrote: another name of a transaction."""

    first: int  # physical offset of the transaction's first half
    queue_offset: int  # of the copy


class Decision(NamedTuple):
    """How a transaction ended."""

    state: State  # COMMITTED or ROLLED_BACK
    position: int  # physical offset of the record that decided it


class DecidedMemory:
    """The latest decisions, in two generations, so that forgetting costs nothing per decision."""

    def __init__(self, limit: int = DECIDED_REMEMBERED) -> None:
        self._limit = limit
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self.newest_final = self._old_final = 0
        self.forgotten_final = 0  # no final message beyond this log position has been forgotten

    def __contains__(self, offset: int) -> bool:
        return offset in self._young or offset in self._old

    def clear(self) -> None:
        """Forget everything."""
        self._young.clear()
        self._old.clear()
        self.newest_final = self._old_final = self.forgotten_final = 0

    def assume_forgotten(self, newest_final: int) -> None:
        """Begin with finals up to this log position that are not remembered here."""
        self.newest_final = self._old_final = self.forgotten_final = newest_final

    def remember(self, offset: int, state: State, position: int) -> None:
        """Keep a decision; the position is that of the record that decided."""
        young = self._young
        young[offset] = position << 2 | state
        if state is _COMMITTED:
            self.newest_final = position
        if len(young) >= self._limit:
            self.forgotten_final = self._old_final
            self._old, self._young = young, {}
            self._old_final = self.newest_final

    def find(self, offset: int) -> Decision | None:
        """Return how the transaction ended, if that is still remembered."""
        packed = self._young.get(offset)
        if packed is None:
            packed = self._old.get(offset)
            if packed is None:
                return None
        return Decision(State(packed & 3), packed >> 2)


class PendingTable:
    """All undecided transactions, and the latest decided ones."""

    def __init__(self, decided_remembered: int = DECIDED_REMEMBERED) -> None:
        self._pending: dict[int, Pending] = {}  # by offset, in log order
        self.decided = DecidedMemory(decided_remembered)
        self.copies: dict[int, Copy] = {}  # by the copy's physical offset
        self._copies_of: dict[int, list[int]] = {}  # first half -> queue offsets of its copies
        self.parked = 0  # how many of the undecided are PARKED
        self.newest_offset = -1  # the newest record of ours that changed the table
        self.get = self._pending.get  # by the offset of the first half; the hot path's look-up

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending.values())

    def __contains__(self, offset: int) -> bool:
        return offset in self._pending

    def offsets(self) -> list[int]:
        """Return the identities of all undecided transactions, oldest first."""
        return list(self._pending)

    @property
    def oldest(self) -> Pending | None:
        """The undecided transaction that has been in the log longest."""
        return next(iter(self._pending.values()), None)

    def first_of(self, offset: int) -> int:
        """Return the identity of the transaction that a half record, or a copy of it, names."""
        copy = self.copies.get(offset) if self.copies else None
        return offset if copy is None else copy.first

    def names_of(self, entry: Pending) -> Iterable[int]:
        """Return the half queue offsets by which op messages know the transaction."""
        if not self._copies_of:
            return (entry.queue_offset,)
        return (entry.queue_offset, *self._copies_of.get(entry.offset, ()))

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
            checks,
            immunity_s,
            owner,
        )
        self._pending[offset] = entry
        self.newest_offset = offset
        return entry

    def restore(self, entry: Pending) -> None:
        """Enter a transaction as a snapshot describes it; snapshots come in log order."""
        entry.group = sys.intern(entry.group)
        self._pending[entry.offset] = entry
        self.parked += entry.state is State.PARKED
        self.newest_offset = max(self.newest_offset, entry.offset)

    def clear(self) -> None:
        """Forget everything, to be filled again."""
        self._pending.clear()
        self.decided.clear()
        self.copies.clear()
        self._copies_of.clear()
        self.parked = 0
        self.newest_offset = -1

    def decide(self, entry: Pending, state: State, position: int) -> None:
        """Take a transaction off the table; the record at ``position`` has decided it."""
        if entry.state is _PARKED:
            self.parked -= 1
        del self._pending[entry.offset]
        self.decided.remember(entry.offset, state, position)
        self.newest_offset = position

    def park(self, entry: Pending) -> None:
        """Ask about the transaction no more."""
        assert entry.state is State.PREPARED
        entry.state = State.PARKED
        entry.owner = None
        self.parked += 1

    def resume(self, entry: Pending) -> None:
        """Ask about a parked transaction again, from the first check on."""
        assert entry.state is State.PARKED
        entry.state = State.PREPARED
        entry.checks = 0
        self.parked -= 1

    def drop_before(self, min_offset: int) -> list[Pending]:
        """Forget transactions whose half the log no longer holds; return them."""
        gone = [entry for entry in self._pending.values() if entry.offset < min_offset]
        for entry in gone:
            self.discard(entry)
        return gone

    def discard(self, entry: Pending) -> None:
        """Forget an undecided transaction whose half can no longer be read."""
        if entry.state is State.PARKED:
            self.parked -= 1
        del self._pending[entry.offset]
