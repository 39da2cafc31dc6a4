"""A bounded map of integers that evicts the oldest entries a generation at a time.

Growing or freeing a dictionary of a hundred thousand entries takes up to five milliseconds, so
there are several small ones.
"""

from __future__ import annotations

from collections import deque
from typing import Final

GENERATION_MAX: Final = 20_000
"""Entries of a generation: a dictionary of 32,768 slots takes a millisecond to grow or to free."""


class Generations:
    """Keeps at least the latest ``limit`` entries, and at most one generation more."""

    __slots__ = ("limit", "maps")

    def __init__(self, limit: int) -> None:
        self.limit = min(limit, GENERATION_MAX)  # of one generation
        self.maps: deque[dict[int, int]] = deque([{}], limit // self.limit + 1)  # newest first

    def __len__(self) -> int:
        return sum(map(len, self.maps))

    def put(self, key: int, value: int) -> bool:
        """Set a value; return whether it completes a generation, so that a new one begins."""
        young = self.maps[0]
        young[key] = value
        if len(young) < self.limit:
            return False
        self.maps.appendleft({})
        return True

    def get(self, key: int) -> int | None:
        """Return the latest value; None if it was evicted or never set."""
        for known in self.maps:
            if key in known:
                return known[key]
        return None

    def clear(self) -> None:
        """Remove all entries."""
        self.maps.clear()
        self.maps.append({})
