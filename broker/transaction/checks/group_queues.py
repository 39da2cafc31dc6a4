"""Queue the due transactions of each producer group, and give the groups turns.

With turns, a group with very many due checks delays no other. A group whose members accept nothing
is *blocked* until an event or its next retry. A transaction whose check no member accepted, or
whose group has no member, is set *aside* until then.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable
from typing import Final

from attrs import define, field

from ...loop.slices import Slice
from ...ports import Connection

BUSY_RETRY_MS: Final = 1_000
"""Time until a group is retried after none of its members could be written to, or a check after
none of them accepted it; the latter pause doubles each time."""

FULL_RETRY_MS: Final = 250
"""Time until the rest of a group is retried after refusals in a row, if checks were accepted
shortly before: then its members are only busy."""

REFUSED_RETRY_MS_MAX: Final = 30_000
"""Longest pause until a check that no member accepted is sent again."""

REFUSALS_MAX: Final = 8
"""Checks in a row that no member accepted before the whole group waits. Fewer may be the fault of
single messages, which must not stop the others."""

NO_MEMBER_RETRY_MS: Final = 5_000
"""Pause between two lookups of the members of a group without any, in case a connection event was
missed."""

DECIDED_LOOKUPS: Final = 200
"""Transactions of such a group that are tested at each lookup; decided ones are dropped."""


@define(eq=False, repr=False)
class OffsetQueue:
    """A FIFO queue of log offsets that can also be pushed back to the front.

    Garbage collection does not visit it. In a deque of a million numbers each full collection
    visits all of them, which takes 20 ms or more; it visits nothing in an array.
    """

    # The first offsets, in reverse order.
    _front: array[int] = field(factory=lambda: array("q"), init=False)
    _parts: deque[array[int]] = field(factory=deque, init=False)  # the following ones

    def __len__(self) -> int:
        return len(self._front) + sum(map(len, self._parts))

    def __bool__(self) -> bool:
        return bool(self._front or self._parts)

    def append(self, offset: int) -> None:
        parts = self._parts
        if not parts or len(parts[-1]) >= PART_COUNT:
            parts.append(array("q"))
        parts[-1].append(offset)

    def appendleft(self, offset: int) -> None:
        self._front.append(offset)

    def popleft(self) -> int:
        """Remove and return the first offset; the queue must not be empty."""
        if not self._front:
            self._front = self._parts.popleft()
            self._front.reverse()
        return self._front.pop()

    def take_all(self, other: OffsetQueue) -> None:
        if other._front:
            other._front.reverse()
            self._parts.append(other._front)
            other._front = array("q")
        self._parts.extend(other._parts)
        other._parts.clear()


@define(eq=False, repr=False)
class Group:
    """The due transactions of one producer group."""

    name: str
    waiting: OffsetQueue = field(factory=OffsetQueue, init=False)  # to be checked, in this order
    # No member was connected, or none accepted the check.
    aside: OffsetQueue = field(factory=OffsetQueue, init=False)
    # By waiting transaction.
    tried: dict[int, tuple[Connection, ...]] = field(factory=dict, init=False)
    in_turn: bool = field(default=False, init=False)
    blocked: bool = field(default=False, init=False)  # no member accepts anything now
    without_member: bool = field(default=False, init=False)  # at the last lookup
    refusals: int = field(default=0, init=False)  # checks in a row that no member accepted
    # Whether a check was accepted since it was last blocked.
    has_accepted: bool = field(default=False, init=False)
    pause_ms: int = field(default=BUSY_RETRY_MS, init=False)
    # When checks that no member accepted are sent again.
    aside_until_ms: int = field(default=0, init=False)
    retry_ms: int = field(default=0, init=False)  # when the group is retried; 0: not scheduled


@define(eq=False, repr=False, slots=False)
class GroupQueues:
    """The groups with due transactions; a group without any is removed."""

    _has_member: Callable[[str], bool]  # whether a producer of a group is connected
    _is_undecided: Callable[[int], bool]  # whether the transaction at an offset still needs checks

    def __attrs_post_init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._turns: deque[Group] = deque()
        self._retries: list[tuple[int, str]] = []  # heap
        self.get = self._groups.get

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def has_turns(self) -> bool:
        """Whether a check of some group can be sent now."""
        return bool(self._turns)

    @property
    def next_retry_ms(self) -> int | None:
        """When ``run_retries`` has the next group to retry."""
        return self._retries[0][0] if self._retries else None

    @property
    def without_members(self) -> int:
        """Due transactions of groups without members; some may have been decided meanwhile."""
        return sum(
            len(one.aside) + len(one.waiting) for one in self._groups.values() if one.without_member
        )

    def add(self, name: str, offset: int, *, first: bool = False) -> Group:
        """Add a transaction at the end of its group's queue, or at the front; return the group."""
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name)
        if first:
            group.waiting.appendleft(offset)
        else:
            group.waiting.append(offset)
        self._give_turn(group)
        return group

    def next_turn(self) -> Group:
        """Return the group whose turn it is; call ``end_turn`` afterwards."""
        return self._turns.popleft()

    def end_turn(self, group: Group, now_ms: int) -> None:
        """End the turn of a group, so that the next one follows."""
        group.in_turn = False
        if group.waiting:
            self._give_turn(group)
        elif not group.aside:
            if group.pause_ms == BUSY_RETRY_MS:
                del self._groups[group.name]
            else:  # remember its pause for a while
                self._plan_retry(group, now_ms + REFUSED_RETRY_MS_MAX)

    def _give_turn(self, group: Group) -> None:
        if group.waiting and not group.in_turn and not group.blocked:
            group.in_turn = True
            self._turns.append(group)

    def not_accepted_by_any(self, group: Group, offset: int, now_ms: int) -> None:
        """Set a transaction aside: no member accepted its check."""
        if not group.aside:
            group.aside_until_ms = now_ms + group.pause_ms
        group.aside.append(offset)
        group.refusals += 1
        if group.refusals >= REFUSALS_MAX:
            group.blocked = True
            if group.has_accepted:
                group.has_accepted = False
                self._plan_retry(group, now_ms + FULL_RETRY_MS)
        self._plan_retry(group, group.aside_until_ms)

    def no_member(self, group: Group, offset: int, now_ms: int) -> None:
        """Set a transaction aside: its group has no member."""
        if not group.aside:
            group.aside_until_ms = now_ms
        group.aside.append(offset)
        group.without_member = True
        self._plan_retry(group, now_ms + NO_MEMBER_RETRY_MS)

    def not_writable(self, group: Group, offset: int, now_ms: int) -> None:
        """Block a group: no member can be written to."""
        self.block(group, offset)
        self._plan_retry(group, now_ms + BUSY_RETRY_MS)

    def block(self, group: Group, offset: int) -> None:
        """Block a group until ``unblock``; the given transaction stays the first."""
        group.waiting.appendleft(offset)
        group.blocked = True

    def accepted(self, name: str) -> None:
        """Unblock a group after one of its members accepted a check."""
        group = self._groups.get(name)
        if group is not None:
            group.refusals = 0
            group.has_accepted = True
            self.unblock(group)

    def not_accepted(self, name: str) -> None:
        """Unblock a group after a member did not accept a check: it has room for another."""
        group = self._groups.get(name)
        if group is not None and group.refusals < REFUSALS_MAX:
            self.unblock(group)

    def unblock(self, group: Group) -> None:
        """End the blocking of a group; its waiting transactions get their turn."""
        group.blocked = False
        self._give_turn(group)

    def on_connected(self, name: str) -> None:
        """Retry all transactions of a group now; a member has connected."""
        group = self._groups.get(name)
        if group is not None:
            group.pause_ms = BUSY_RETRY_MS
            self._try_again(group)

    def run_retries(self, now_ms: int, time_slice: Slice) -> None:
        """Retry the groups whose time has come, as many as fit into the slice."""
        retries = self._retries
        while retries and retries[0][0] <= now_ms:
            at_ms, name = heapq.heappop(retries)
            group = self._groups.get(name)
            if group is not None and group.retry_ms == at_ms:  # else it was rescheduled
                group.retry_ms = 0
                self._retry(group, now_ms)
            if time_slice.is_over:
                return

    def _retry(self, group: Group, now_ms: int) -> None:
        if group.aside and not group.without_member and now_ms < group.aside_until_ms:
            group.refusals = 0
            group.tried.clear()  # waiting checks may go to all members again
            self.unblock(group)
            self._plan_retry(group, group.aside_until_ms)
            return
        still_without = group.without_member and not self._has_member(group.name)
        if still_without:
            self._drop_decided(group)
        elif group.aside and not group.without_member:
            group.pause_ms = min(group.pause_ms * 2, REFUSED_RETRY_MS_MAX)
        else:
            group.pause_ms = BUSY_RETRY_MS
        if not (group.waiting or group.aside):
            del self._groups[group.name]
        elif still_without:
            self._plan_retry(group, now_ms + NO_MEMBER_RETRY_MS)
        else:
            self._try_again(group)

    def _try_again(self, group: Group) -> None:
        group.without_member = False
        group.refusals = 0
        group.tried.clear()
        group.waiting.take_all(group.aside)
        self.unblock(group)

    def _drop_decided(self, group: Group) -> None:
        """Drop some transactions that were decided, or deleted by age, meanwhile."""
        aside = group.aside
        for _ in range(min(len(aside), DECIDED_LOOKUPS)):
            offset = aside.popleft()
            if self._is_undecided(offset):
                aside.append(offset)  # the order does not matter

    def _plan_retry(self, group: Group, at_ms: int) -> None:
        if not group.retry_ms or at_ms < group.retry_ms:
            group.retry_ms = at_ms
            heapq.heappush(self._retries, (at_ms, group.name))


PART_COUNT: Final = 1_024
"""Offsets in one array, of eight bytes each."""
