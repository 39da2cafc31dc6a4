"""What is due of each producer group, and whose turn it is.

Groups take turns, so that one with very many due delays no other. A group whose members take
nothing at the moment is *blocked* until there is news or its retry comes. Single transactions that
nobody took, or about which nobody was there to ask, are put *aside* until the same.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Final

from ...loop.slices import Slice
from ..pending import Producer
from .offset_queue import OffsetQueue

BUSY_RETRY_MS: Final = 1_000
"""How soon a group is tried again when none of its members could be written to, or a question that
none of them took; the latter pause doubles while it goes on."""

FULL_RETRY_MS: Final = 250
"""How soon the rest of a group is tried again after refusals in a row, when questions were taken
shortly before: then its members are willing and have their hands full."""

REFUSED_RETRY_MS_MAX: Final = 30_000
"""Longest pause until a question that no member took is asked again."""

REFUSALS_MAX: Final = 8
"""Questions in a row that no member took before the rest of the group's waits for the pause. Fewer
may be the fault of single messages, which must not stop the others."""

ABSENT_SWEEP_MS: Final = 5_000
"""How often groups that are away are looked for, should the news of a connection have been lost."""

GONE_LOOKS: Final = 200
"""How many of a group that stays away are looked at for decided ones, each time."""


class Group:
    """What is due of one producer group."""

    __slots__ = (
        "absent",
        "aside",
        "aside_until_ms",
        "blocked",
        "in_turn",
        "name",
        "pause_ms",
        "refusals",
        "retry_ms",
        "took",
        "tried",
        "waiting",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting = OffsetQueue()  # to be asked about, in this order
        self.aside = OffsetQueue()  # nobody was there, or nobody took it: later
        self.tried: dict[int, tuple[Producer, ...]] = {}  # of those waiting, who took it not
        self.in_turn = False
        self.blocked = False  # no member takes anything at the moment
        self.absent = False  # there was no member when it was looked for
        self.refusals = 0  # questions in a row that no member took
        self.took = False  # whether some question was taken since it was last blocked
        self.pause_ms = BUSY_RETRY_MS
        self.aside_until_ms = 0  # when what nobody took is asked again
        self.retry_ms = 0  # when something is tried again; 0: not planned


class GroupQueues:
    """The groups with something due. One that has nothing and needs no memory is forgotten."""

    def __init__(self, is_away: Callable[[str], bool], is_gone: Callable[[int], bool]) -> None:
        """Tell by ``is_away`` if a group has no member, by ``is_gone`` if a half needs no check."""
        self._is_away = is_away
        self._is_gone = is_gone
        self._groups: dict[str, Group] = {}
        self._turns: deque[Group] = deque()
        self._retries: list[tuple[int, str]] = []  # heap
        self.get = self._groups.get

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def has_turns(self) -> bool:
        """Whether some group can be asked something now."""
        return bool(self._turns)

    @property
    def next_retry_ms(self) -> int | None:
        """When some group is to be tried again, by ``run_retries``."""
        return self._retries[0][0] if self._retries else None

    @property
    def away(self) -> int:
        """How many are due of groups that are away; some may have been decided meanwhile."""
        return sum(len(one.aside) + len(one.waiting) for one in self._groups.values() if one.absent)

    # --- what is due

    def add(self, name: str, offset: int, *, first: bool = False) -> Group:
        """Put a transaction at the end of its group's queue, or at the front; return the group."""
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
        """Return the group whose turn it is; give it back by ``end_turn``."""
        return self._turns.popleft()

    def end_turn(self, group: Group, now_ms: int) -> None:
        """Let the next group have its turn."""
        group.in_turn = False
        if group.waiting:
            self._give_turn(group)
        elif not group.aside:
            if group.pause_ms == BUSY_RETRY_MS:
                del self._groups[group.name]
            else:  # its pause may be needed again
                self._plan_retry(group, now_ms + REFUSED_RETRY_MS_MAX)

    def _give_turn(self, group: Group) -> None:
        if group.waiting and not group.in_turn and not group.blocked:
            group.in_turn = True
            self._turns.append(group)

    # --- why something has to wait

    def refused(self, group: Group, offset: int, now_ms: int) -> None:
        """Put aside what every member has been asked about, and none took."""
        if not group.aside:
            group.aside_until_ms = now_ms + group.pause_ms
        group.aside.append(offset)
        group.refusals += 1
        if group.refusals >= REFUSALS_MAX:
            group.blocked = True
            if group.took:
                group.took = False
                self._plan_retry(group, now_ms + FULL_RETRY_MS)
        self._plan_retry(group, group.aside_until_ms)

    def away_from(self, group: Group, offset: int, now_ms: int) -> None:
        """Put aside what nobody is there to be asked about."""
        if not group.aside:
            group.aside_until_ms = now_ms
        group.aside.append(offset)
        group.absent = True
        self._plan_retry(group, now_ms + ABSENT_SWEEP_MS)

    def busy(self, group: Group, offset: int, now_ms: int) -> None:
        """Stop: no member can be written to."""
        self.block(group, offset)
        self._plan_retry(group, now_ms + BUSY_RETRY_MS)

    def block(self, group: Group, offset: int) -> None:
        """Stop until ``unblock``; what was looked at stays the first."""
        group.waiting.appendleft(offset)
        group.blocked = True

    # --- why it need not wait any more

    def taken(self, name: str) -> None:
        """Take note that a member took a question; so there is room for more."""
        group = self._groups.get(name)
        if group is not None:
            group.refusals = 0
            group.took = True
            self.unblock(group)

    def not_taken(self, name: str) -> None:
        """Take note that a member did not; there is room for another question all the same."""
        group = self._groups.get(name)
        if group is not None and group.refusals < REFUSALS_MAX:
            self.unblock(group)

    def unblock(self, group: Group) -> None:
        """Go on with a group."""
        group.blocked = False
        self._give_turn(group)

    def come(self, name: str) -> None:
        """Try everything of a group at once; a member has connected."""
        group = self._groups.get(name)
        if group is not None:
            group.pause_ms = BUSY_RETRY_MS
            self._try_again(group)

    def run_retries(self, now_ms: int, time_slice: Slice) -> None:
        """Try the groups again whose time has come, as many as a slice holds."""
        retries = self._retries
        while retries and retries[0][0] <= now_ms:
            at_ms, name = heapq.heappop(retries)
            group = self._groups.get(name)
            if group is not None and group.retry_ms == at_ms:  # else it was planned anew
                group.retry_ms = 0
                self._retry(group, now_ms)
            if time_slice.is_over:
                return

    def _retry(self, group: Group, now_ms: int) -> None:
        if group.aside and not group.absent and now_ms < group.aside_until_ms:
            group.refusals = 0
            group.tried.clear()  # another round begins, for those that wait
            self.unblock(group)
            self._plan_retry(group, group.aside_until_ms)
            return
        away = group.absent and self._is_away(group.name)
        if away:
            self._forget_gone(group)
        elif group.aside and not group.absent:
            group.pause_ms = min(group.pause_ms * 2, REFUSED_RETRY_MS_MAX)
        else:
            group.pause_ms = BUSY_RETRY_MS
        if not (group.waiting or group.aside):
            del self._groups[group.name]
        elif away:
            self._plan_retry(group, now_ms + ABSENT_SWEEP_MS)
        else:
            self._try_again(group)

    def _try_again(self, group: Group) -> None:
        group.absent = False
        group.refusals = 0
        group.tried.clear()
        group.waiting.take_all(group.aside)
        self.unblock(group)

    def _forget_gone(self, group: Group) -> None:
        """Drop what was decided, or deleted by age, while the group is away; some at a time."""
        aside = group.aside
        for _ in range(min(len(aside), GONE_LOOKS)):
            offset = aside.popleft()
            if not self._is_gone(offset):
                aside.append(offset)  # the order does not matter

    def _plan_retry(self, group: Group, at_ms: int) -> None:
        if not group.retry_ms or at_ms < group.retry_ms:
            group.retry_ms = at_ms
            heapq.heappush(self._retries, (at_ms, group.name))
