"""The identities of undecided transactions in log order.

The table is a dictionary, which cannot be gone through while it changes, and the keys of a million
entries take dozens of milliseconds to copy. So its keys are kept here as well, in blocks, which are
read one by one. Decided transactions stay in their block for a while: for each block that has been
filled, two others are cleared of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

BLOCK_COUNT: Final = 2_048
"""Identities in a block, of eight bytes each. To clear one takes a tenth of a millisecond."""


class LogOrder:
    """Offsets in ascending order, of which some may not be pending any more."""

    def __init__(self, is_pending: Callable[[int], bool]) -> None:
        self._is_pending = is_pending
        self._newest = array("q")  # the last block: what is added goes to its end
        self._blocks = [self._newest]  # none but the last is empty
        self._cleared = 0  # how many blocks this round has cleared

    def add(self, offset: int) -> None:
        """Add an offset above all others."""
        if len(self._newest) >= BLOCK_COUNT:
            self._clear_block()
            self._clear_block()
            self._newest = array("q")
            self._blocks.append(self._newest)
        self._newest.append(offset)

    def behind(self, offset: int) -> Sequence[int]:
        """Return the offsets behind one, as far as a block goes; none when there are no more."""
        blocks = self._blocks
        at = bisect_right(blocks, offset, hi=len(blocks) - 1, key=lambda block: block[-1])
        return blocks[at][bisect_right(blocks[at], offset) :]

    def forget_all(self) -> None:
        """Begin anew, without any."""
        self._newest = array("q")
        self._blocks = [self._newest]
        self._cleared = 0

    def _clear_block(self) -> None:
        """Clear the next block, and join it with the one before if they fit into one."""
        blocks = self._blocks
        at = self._cleared if self._cleared < len(blocks) else 0
        if not blocks:
            return
        kept = array("q", filter(self._is_pending, blocks[at]))
        if at and len(blocks[at - 1]) + len(kept) <= BLOCK_COUNT:
            blocks[at - 1].extend(kept)
            del blocks[at]
        elif kept:
            blocks[at] = kept
            at += 1
        else:
            del blocks[at]
        self._cleared = at
