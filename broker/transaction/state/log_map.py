"""A map from log offsets that stays fast with a million entries.

One dictionary of a million entries would block the event loop: growing beyond 700,000 takes 40 ms,
and finding its first key skips all deleted ones. It also cannot be iterated while it changes. So
the map consists of many small dictionaries, each for a range of the log. Garbage collection visits
none of them, because it tracks nothing that they hold.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from typing import Final, Generic, TypeVar

BLOCK_COUNT: Final = 2_730
"""Entries of a block: what a dictionary of 4,096 slots holds. Copying one takes a tenth of a
millisecond."""

Entry = TypeVar("Entry")


class LogMap(Generic[Entry]):
    """Entries by offset, in ascending order."""

    def __init__(self) -> None:
        self._starts = [0]  # of the range of each block
        self._blocks: list[dict[int, Entry]] = [{}]  # only the last may be empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        for block in self._blocks:
            yield from block.values()

    def __contains__(self, offset: int) -> bool:
        return offset in self._blocks[bisect_right(self._starts, offset) - 1]

    def get(self, offset: int) -> Entry | None:
        return self._blocks[bisect_right(self._starts, offset) - 1].get(offset)

    def add(self, offset: int, entry: Entry) -> None:
        """Add an entry; its offset must be above all others."""
        assert offset >= self._starts[-1]
        newest = self._blocks[-1]
        if len(newest) >= BLOCK_COUNT:
            newest = {}
            self._blocks.append(newest)
            self._starts.append(offset)
        newest[offset] = entry
        self._count += 1

    def remove(self, offset: int) -> None:
        """Remove an entry.

        Raises:
            KeyError: There is none at this offset.
        """
        at = bisect_right(self._starts, offset) - 1
        block = self._blocks[at]
        del block[offset]
        self._count -= 1
        left = len(block)
        if not left & (left - 1) and at < len(self._blocks) - 1:
            self._shrink(at)

    def clear(self) -> None:
        self._starts, self._blocks, self._count = [0], [{}], 0

    def after(self, offset: int, count: int = BLOCK_COUNT) -> list[Entry]:
        """Return up to ``count`` entries with larger offsets, in order; [] if there are no more."""
        at = max(bisect_right(self._starts, offset) - 1, 0)
        for block in self._blocks[at : at + 2]:  # the block may hold none after it
            first = bisect_right(list(block), offset)
            if first < len(block):
                return list(islice(block.values(), first, first + count))
        return []

    def _shrink(self, at: int) -> None:
        """Free memory of a block that has lost half of its entries, or all.

        A dictionary does not shrink by itself.
        """
        block = self._blocks[at]
        if at and len(self._blocks[at - 1]) + len(block) <= BLOCK_COUNT // 2:
            self._blocks[at - 1].update(block)
        elif block:
            self._blocks[at] = dict(block)
            return
        del self._blocks[at], self._starts[at]
