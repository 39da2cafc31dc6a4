"""Transactions by the time at which something is due about them.

One list entry each, whatever their number, in buckets of ``BUCKET_MS``. Nothing is ever taken out
before its time: what has been planned anew meanwhile comes back at its old time as well, and the
caller sees by the bucket's number that it is not meant any more.
"""

from __future__ import annotations

import heapq
from typing import Final

BUCKET_MS: Final = 50
"""Due times are kept to this precision; a check is up to this much late and never early."""


class Timetable:
    """What is due when."""

    def __init__(self) -> None:
        # A lone offset, for far in the future most are; else the number and then the offsets.
        self._buckets: dict[int, int | list[int]] = {}
        self._order: list[int] = []  # heap of the buckets that exist

    def add(self, due_ms: int, offset: int) -> int:
        """Have an offset returned at its due time or up to ``BUCKET_MS`` later.

        Returns the number of its bucket, above 0: one object for nearly all that are in it.
        """
        number = max(-(-due_ms // BUCKET_MS), 1)
        bucket = self._buckets.get(number)
        if bucket is None:
            self._buckets[number] = offset
            heapq.heappush(self._order, number)
            return number
        if isinstance(bucket, int):
            self._buckets[number] = [number, bucket, offset]
            return number
        bucket.append(offset)
        return bucket[0]

    def take_due(self, now_ms: int) -> tuple[int, list[int]] | None:
        """Remove and return number and offsets of one bucket that is due; None when none is."""
        if not self._order or self._order[0] * BUCKET_MS > now_ms:
            return None
        number = heapq.heappop(self._order)
        bucket = self._buckets.pop(number)
        if isinstance(bucket, int):
            return number, [bucket]
        del bucket[0]
        return number, bucket

    @property
    def next_due_ms(self) -> int | None:
        """When something may be due next."""
        return self._order[0] * BUCKET_MS if self._order else None
