"""Due times by two clocks, each with the place of its message.

A delay is counted on the monotonic clock, so that steps of the wall clock have no effect on it; a
time of delivery is a time by the wall clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

_PLACE_BITS: Final = 48
_PLACE_MASK: Final = (1 << _PLACE_BITS) - 1

# Due time and place in one number, which takes half the memory of a tuple. Messages that are due
# at the same time come in the order of their places.
_Heap = list[int]


class Due(NamedTuple):
    """A message that was taken out because it is due; `DueTimes.put_back` takes it."""

    place: int
    heap: _Heap
    entry: int


class DueTimes:
    """The places of messages in the order of their due times."""

    def __init__(self, now_ms: Callable[[], int], monotonic_ms: Callable[[], int]) -> None:
        """Wire it; `now_ms` is the wall clock."""
        self._by_wall_clock: _Heap = []
        self._by_monotonic_clock: _Heap = []
        self._clocks = (
            (self._by_wall_clock, now_ms),
            (self._by_monotonic_clock, monotonic_ms),
        )
        self._monotonic_ms = monotonic_ms

    def extend(self, at: Iterable[tuple[int, int]], after: Iterable[tuple[int, int]]) -> None:
        """Add many messages, as `add_at` and `add_after` do."""
        now = self._monotonic_ms()
        self._by_wall_clock += [due_ms << _PLACE_BITS | place for due_ms, place in at]
        self._by_monotonic_clock += [now + ms << _PLACE_BITS | place for ms, place in after]
        for heap, _ in self._clocks:
            heapq.heapify(heap)

    def add_at(self, due_ms: int, place: int) -> bool:
        """Add a message that is due at a time; return whether it is the next one."""
        return self._add(self._by_wall_clock, due_ms, place)

    def add_after(self, wait_ms: int, place: int) -> bool:
        """Add a message that is due after some time; return whether it is the next one."""
        return self._add(self._by_monotonic_clock, self._monotonic_ms() + wait_ms, place)

    @staticmethod
    def _add(heap: _Heap, due_ms: int, place: int) -> bool:
        heapq.heappush(heap, due_ms << _PLACE_BITS | place)
        return heap[0] & _PLACE_MASK == place

    def take_due(self, count: int) -> list[Due]:
        """Take out messages that are due, at most so many."""
        due: list[Due] = []
        self._clocks = self._clocks[::-1]  # many by one clock do not hold up those by the other
        for heap, clock_ms in self._clocks:
            end = clock_ms() + 1 << _PLACE_BITS
            while heap and heap[0] < end and len(due) < count:
                entry = heapq.heappop(heap)
                due.append(Due(entry & _PLACE_MASK, heap, entry))
        return due

    @staticmethod
    def put_back(due: Iterable[Due]) -> None:
        """Add messages again that were taken out, with their due times."""
        for one in due:
            heapq.heappush(one.heap, one.entry)

    def wait_s(self, most: float) -> float:
        """Return the seconds until the next message is due, at most so many."""
        for heap, clock_ms in self._clocks:
            if heap:
                most = min(most, ((heap[0] >> _PLACE_BITS) - clock_ms()) / 1_000)
        return max(most, 0)
