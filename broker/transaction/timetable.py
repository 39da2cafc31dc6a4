"""Transactions by the time at which something is due about them.

One list entry each, whatever their number, in buckets of ``BUCKET_MS``. Nothing is taken out when
it is decided or planned anew: it comes back at its old time as well, and the caller sees by the
bucket's number that it is not meant any more. Most are decided long before they are due; where that
is far away, what is not meant any more would pile up, so it is dropped now and then (``sweep``).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

BUCKET_MS: Final = 50
"""Due times are kept to this precision; a check is up to this much late and never early."""


class Timetable:
    """What is due when."""

    def __init__(self) -> None:
        # A lone offset, for far in the future most are; else the number and then the offsets.
        self._buckets: dict[int, int | list[int]] = {}
        self._order: list[int] = []  # heap of the buckets that exist, and of some that do not
        self._to_sweep: list[int] = []  # buckets that this sweep has not looked at
        self.size = 0  # how many offsets there are

    def add(self, due_ms: int, offset: int) -> int:
        """Have an offset returned at its due time or up to ``BUCKET_MS`` later.

        Returns the number of its bucket, above 0: one object for nearly all that are in it.
        """
        number = max(-(-due_ms // BUCKET_MS), 1)
        self.size += 1
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
        while self._order and self._order[0] * BUCKET_MS <= now_ms:
            number = heapq.heappop(self._order)
            bucket = self._buckets.pop(number, None)
            if bucket is None:  # swept away
                continue
            if isinstance(bucket, int):
                self.size -= 1
                return number, [bucket]
            del bucket[0]
            self.size -= len(bucket)
            return number, bucket
        return None

    @property
    def sweeping(self) -> bool:
        """Whether a sweep is not over."""
        return bool(self._to_sweep)

    def sweep(self, is_meant: Callable[[int, int], bool], looks: int) -> None:
        """Drop offsets that are not meant any more: a slice of a sweep, or the first of a new one.

        Args:
            is_meant: Tells by the offset and its bucket's number whether to keep it.
            looks: About how many to look at; a bucket is swept as a whole.
        """
        if not self._to_sweep:
            self._to_sweep = list(self._buckets)
        while self._to_sweep and looks > 0:
            looks -= self._sweep_bucket(self._to_sweep.pop(), is_meant)
        if not self._to_sweep and len(self._order) > 2 * len(self._buckets):
            self._order = list(self._buckets)
            heapq.heapify(self._order)

    def _sweep_bucket(self, number: int, is_meant: Callable[[int, int], bool]) -> int:
        """Return how many offsets were looked at."""
        bucket = self._buckets.get(number)
        if bucket is None:  # it was due meanwhile
            return 1
        offsets = [bucket] if isinstance(bucket, int) else bucket[1:]
        kept = [offset for offset in offsets if is_meant(offset, number)]
        self.size -= len(offsets) - len(kept)
        if not kept:
            del self._buckets[number]
        elif not isinstance(bucket, int):
            bucket[1:] = kept
        return len(offsets)

    @property
    def next_due_ms(self) -> int | None:
        """When something may be due next."""
        return self._order[0] * BUCKET_MS if self._order else None
