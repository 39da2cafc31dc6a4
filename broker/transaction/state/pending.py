"""The table of undecided half messages.

A transaction is known by the physical offset of its first half record, for as long as the log
keeps that record.

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

import sys
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from ...ports import Connection
from .caches import DECIDED_REMEMBERED, DecisionCache
from .log_map import BLOCK_COUNT, LogMap
from .state_machine import ParkedReason, State, TransactionEvent, Verdict, outcome

_PREPARED, _PARKED = State.PREPARED, State.PARKED  # for the hot path


class CheckProgress(NamedTuple):
    """The progress of the checks of one transaction."""

    sent: int = 0  # checks written to a connection, received or not
    delivered: int = 0  # checks that reached a producer
    answered: int = 0  # checks that a producer answered
    parked_reason: ParkedReason = ParkedReason.NOT_PARKED
    immunity_s: int = 0  # requested seconds until the first check; 0: the default


ORIGINS_FREE: Final = 1_000
"""Pairs of producer group and topic with undecided transactions that take no noticeable memory."""

ORIGIN_WEIGHT: Final = 4
"""Halves that take as much memory as one more pair: names of up to 255 characters, and for a group
its own queue of checks."""

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


class PendingOrigin(msgspec.Struct, gc=False):
    """Where undecided transactions come from; one object for all of a group and topic."""

    group: str  # producer group, whose members get the checks
    topic: str  # of the first message
    count: int = 0  # undecided transactions, parked ones included


class Pending(msgspec.Struct, gc=False):
    """One undecided transaction; PREPARED or PARKED.

    Eight fields: one more would cost sixteen bytes, and there may be a million of these.
    """

    offset: int  # physical offset of the first half record: the transaction's identity
    queue_offset: int  # of the same record in the half topic's queue 0
    store_timestamp: int  # ms, the broker's clock: ages count from here
    origin: PendingOrigin
    state: State = State.PREPARED
    progress: CheckProgress = NOT_CHECKED
    owner: Connection | None = None  # the connection that prepared it, while it is open
    due: int = 0  # bucket of its next check, or its stage in the check-back; see `checker`

    @property
    def group(self) -> str:
        """The producer group, whose members get the checks."""
        return self.origin.group

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
        # By group, then by topic; some of them have no undecided transaction now.
        self._origins: dict[str, dict[str, PendingOrigin]] = {}
        self._origin_count = 0
        self.parked = 0  # how many of the undecided are PARKED
        self.newest_offset = -1  # the newest record by halfmq that changed the table
        self.get = self._pending.get  # by the offset of the first half; the hot path's lookup

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def halves(self) -> int:
        """Number of undecided halves: leaders and members."""
        return len(self._pending) + len(self._leader_of)

    @property
    def weight(self) -> int:
        """Memory in halves, of which a million take 300 MB.

        A producer may invent a group for each of its transactions, so many groups count too.
        """
        weight = len(self._pending) + len(self._leader_of)
        if self._origin_count > ORIGINS_FREE:
            weight += ORIGIN_WEIGHT * (self._origin_count - ORIGINS_FREE)
        return weight

    def count_of(self, group: str) -> int:
        """Return the number of undecided transactions of a producer group, parked ones included."""
        return sum(origin.count for origin in self._origins.get(group, {}).values())

    def origins(self) -> list[PendingOrigin]:
        """Return the producer groups and topics that have undecided transactions, with counts."""
        of_groups = self._origins.values()
        return [origin for of_group in of_groups for origin in of_group.values() if origin.count]

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

    def transaction_of(self, offset: int) -> int:
        """Resolve the offset of a half, a copy or a member to its transaction's."""
        copy = self.copies.get(offset) if self.copies else None
        if copy is not None:
            offset = copy.first
        return self._leader_of.get(offset, offset) if self._leader_of else offset

    def is_member(self, offset: int) -> bool:
        """Return whether the half at an offset is a member of an undecided transaction."""
        return offset in self._leader_of

    def op_offsets_of(self, entry: Pending) -> Iterable[int]:
        """Return the half queue offsets by which op messages refer to the transaction."""
        if not self._copies_of and not self.groups:
            return (entry.queue_offset,)
        names = [entry.queue_offset, *self._copies_of.get(entry.offset, ())]
        for member in self.groups.get(entry.offset, ()):
            names += self.op_offsets_of_member(member)
        return names

    def op_offsets_of_member(self, member: MemberHalf) -> list[int]:
        """Return the half queue offsets by which op messages refer to one member."""
        return [member.queue_offset, *self._copies_of.get(member.offset, ())]

    def add_member(self, leader: int, member: MemberHalf) -> None:
        """Add a further half to the undecided transaction of ``leader``."""
        self.groups[leader] = (*self.groups.get(leader, ()), member)
        self._leader_of[member.offset] = leader
        self.newest_offset = max(self.newest_offset, member.offset)

    def decide_member(self, offset: int, state: State, position: int) -> MemberHalf | None:
        """Remove a member that Apache RocketMQ decided alone, since it has no groups."""
        leader = self._leader_of.pop(offset, None)
        if leader is None:
            return None
        (decided,) = (member for member in self.groups[leader] if member.offset == offset)
        self.groups[leader] = tuple(one for one in self.groups[leader] if one is not decided)
        self.decided.add(offset, state, position)
        return decided

    def add_copy(self, offset: int, first: int, queue_offset: int) -> None:
        if offset not in self.copies:
            self.copies[offset] = Copy(first, queue_offset)
            self._copies_of.setdefault(first, []).append(queue_offset)

    def add(
        self,
        offset: int,
        queue_offset: int,
        store_timestamp: int,
        group: str,
        topic: str,
        *,
        immunity_s: int = 0,
        checks: int = 0,
        owner: Connection | None = None,
    ) -> Pending:
        """Add a transaction whose half has been appended."""
        try:
            origin = self._origins[group][topic]
        except KeyError:
            origin = self._new_origin(group, topic)
        origin.count += 1
        entry = Pending(
            offset,
            queue_offset,
            store_timestamp,
            origin,
            _PREPARED,
            shared(CheckProgress(checks, checks, immunity_s=immunity_s))
            if checks or immunity_s
            else NOT_CHECKED,
            owner,
        )
        self._pending.add(offset, entry)
        self.newest_offset = offset
        return entry

    def _new_origin(self, group: str, topic: str) -> PendingOrigin:
        origin = PendingOrigin(sys.intern(group), sys.intern(topic))
        self._origins.setdefault(origin.group, {})[origin.topic] = origin
        self._origin_count += 1
        return origin

    def restore(self, entries: Iterable[Pending]) -> None:
        """Add transactions from a snapshot, which lists them in log order."""
        pending, newest = self._pending, self.newest_offset
        for entry in entries:
            group, topic = entry.origin.group, entry.origin.topic
            known = self._origins.get(group, {}).get(topic)
            entry.origin = known or self._new_origin(group, topic)
            entry.origin.count += 1
            pending.add(entry.offset, entry)
            if entry.state is _PARKED:
                self.parked += 1
            newest = max(newest, entry.offset)
        self.newest_offset = newest

    def clear(self) -> None:
        """Remove everything, including the decisions."""
        self._pending.clear()
        self._origins.clear()
        self._origin_count = 0
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
        origin = entry.origin
        origin.count -= 1
        if not origin.count and self._origin_count > ORIGINS_FREE:
            self._origin_count -= 1
            of_group = self._origins[origin.group]
            del of_group[origin.topic]
            if not of_group:
                del self._origins[origin.group]

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
        expired: list[Pending] = []
        for entry in self._pending:  # in log order
            if entry.offset >= min_offset:
                break
            if outcome(entry.state, TransactionEvent.DELETED_FOUND).verdict is Verdict.FORGET:
                expired.append(entry)
        for entry in expired:
            self.discard(entry)
        return expired

    def discard(self, entry: Pending) -> None:
        """Remove an undecided transaction whose half can no longer be read."""
        self._remove(entry)
        self._disband(entry.offset)
