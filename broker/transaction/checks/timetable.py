"""Transactions ordered by the time of their next check, which ``checker`` sends.

Each has one array entry, in buckets of ``BUCKET_MS``. An entry is not removed if its transaction is
decided or rescheduled: it is returned at its old time as well, and the caller recognises a stale
entry by the bucket's number. Most transactions are decided long before their check is due, so stale
entries with times far in the future would accumulate; ``sweep`` drops them.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

BUCKET_MS: Final = 50
"""Due times are kept to this precision; a check is up to this much late and never early."""

ENTRIES_PER_STEP: Final = 100
"""Offsets of a bucket tested in one step of a sweep, at less than half a microsecond each."""


class Bucket(NamedTuple):
    """The offsets due at one time."""

    number: int  # an object that its transactions share
    offsets: array[int]  # not visited by garbage collection


class Timetable:
    """Offsets by their due time."""

    def __init__(self) -> None:
        # A single offset, as most are far in the future; else a bucket.
        self._buckets: dict[int, int | Bucket] = {}
        self._order: list[int] = []  # heap of the buckets that exist, and of some that do not
        self.size = 0  # how many offsets there are

    def add(self, due_ms: int, offset: int) -> int:
        """Add an offset to be returned at its due time or up to ``BUCKET_MS`` later.

        Returns the number of its bucket, above 0, as an object that nearly all offsets in the
        bucket share.
        """
        number = max(-(-due_ms // BUCKET_MS), 1)
        self.size += 1
        bucket = self._buckets.get(number)
        if bucket is None:
            self._buckets[number] = offset
            heapq.heappush(self._order, number)
            return number
        if isinstance(bucket, int):
            self._buckets[number] = Bucket(number, array("q", (bucket, offset)))
            return number
        bucket.offsets.append(offset)
        return bucket.number

    def pop_due(self, now_ms: int) -> Bucket | None:
        """Remove and return one bucket that is due; None if there is none."""
        while self._order and self._order[0] * BUCKET_MS <= now_ms:
            number = heapq.heappop(self._order)
            bucket = self._buckets.pop(number, None)
            if bucket is None:  # removed by a sweep
                continue
            if isinstance(bucket, int):
                bucket = Bucket(number, array("q", (bucket,)))
            self.size -= len(bucket.offsets)
            return bucket
        return None

    def sweep(self, is_current: Callable[[int, int], bool]) -> Iterator[None]:
        """Drop stale offsets, step by step; others may be added meanwhile.

        Args:
            is_current: Returns for an offset and its bucket's number whether to keep it.
        """
        for number in list(self._buckets):
            yield from self._sweep_bucket(number, is_current)
        if len(self._order) > 2 * len(self._buckets):
            self._order = list(self._buckets)
            heapq.heapify(self._order)

    def _sweep_bucket(self, number: int, is_current: Callable[[int, int], bool]) -> Iterator[None]:
        bucket = self._buckets.get(number)
        if isinstance(bucket, int):
            if not is_current(bucket, number):
                del self._buckets[number]
                self.size -= 1
        elif bucket is not None:
            offsets, kept = bucket.offsets, array("q")
            at = 0
            while at < len(offsets):
                part = offsets[at : at + ENTRIES_PER_STEP]
                kept.extend(offset for offset in part if is_current(offset, number))
                at += len(part)
                yield
                if self._buckets.get(number) is not bucket:
                    return  # it became due meanwhile
            self.size -= at - len(kept)
            if kept:
                self._buckets[number] = Bucket(bucket.number, kept)
            else:
                del self._buckets[number]
        yield

    @property
    def next_due_ms(self) -> int | None:
        """Earliest time at which an offset may be due."""
        return self._order[0] * BUCKET_MS if self._order else None
