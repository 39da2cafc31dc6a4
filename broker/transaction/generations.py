"""A bounded memory of numbers by number, in generations, so that the oldest need not be looked for.

A generation is forgotten as a whole, and it grows like any dictionary: with a hundred thousand
entries either takes up to five milliseconds. So there are several small ones.
"""

from __future__ import annotations

from collections import deque
from typing import Final

GENERATION_MAX: Final = 20_000
"""Entries of a generation, of a dictionary of 32,768 slots: a millisecond to grow or to forget."""


class Generations:
    """The latest ``limit`` entries at least, and at most one generation more."""

    __slots__ = ("limit", "maps")

    def __init__(self, limit: int) -> None:
        self.limit = min(limit, GENERATION_MAX)  # of one generation
        self.maps: deque[dict[int, int]] = deque([{}], limit // self.limit + 1)  # newest first

    def __len__(self) -> int:
        return sum(map(len, self.maps))

    def put(self, key: int, value: int) -> bool:
        """Remember a value; return whether a new generation begins after it."""
        young = self.maps[0]
        young[key] = value
        if len(young) < self.limit:
            return False
        self.maps.appendleft({})
        return True

    def get(self, key: int) -> int | None:
        """Return what was put last; None when that is not known any more."""
        for known in self.maps:
            if key in known:
                return known[key]
        return None

    def clear(self) -> None:
        """Forget everything."""
        self.maps.clear()
        self.maps.append({})
