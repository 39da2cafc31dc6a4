"""A queue of log offsets that a million of them do not make slow.

Garbage collection walks through all that is in a deque, and for a million numbers that takes 20 ms
or more, again and again. In an array it sees nothing.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Final

PART_COUNT: Final = 1_024
"""Offsets in one array, of eight bytes each."""


class OffsetQueue:
    """Offsets in the order in which they are to be taken."""

    __slots__ = ("_front", "_parts")

    def __init__(self) -> None:
        self._front = array("q")  # the next ones, last one first
        self._parts: deque[array[int]] = deque()  # what follows them

    def __len__(self) -> int:
        return len(self._front) + sum(map(len, self._parts))

    def __bool__(self) -> bool:
        return bool(self._front or self._parts)

    def append(self, offset: int) -> None:
        """Put an offset behind all others."""
        parts = self._parts
        if not parts or len(parts[-1]) >= PART_COUNT:
            parts.append(array("q"))
        parts[-1].append(offset)

    def appendleft(self, offset: int) -> None:
        """Put an offset before all others."""
        self._front.append(offset)

    def popleft(self) -> int:
        """Take the first offset; not when empty."""
        if not self._front:
            self._front = self._parts.popleft()
            self._front.reverse()
        return self._front.pop()

    def take_all(self, other: OffsetQueue) -> None:
        """Move all of another queue behind what is here."""
        if other._front:
            other._front.reverse()
            self._parts.append(other._front)
            other._front = array("q")
        self._parts.extend(other._parts)
        other._parts.clear()
