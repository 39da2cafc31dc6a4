"""Where the scan of a start has met records about transactions.

The table of transactions is filled from the log as well. With their places known it reads these
records alone, and the log is walked once. The places are kept until the table is full; where there
are too many of them, the rest of the log is walked once more.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from ..format.flags import TRANSACTION_MASK
from ..format.topics import HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC

# Twelve bytes each, 48 MB: those of two gigabytes of log that hold nothing but small transactions.
RANGES_MAX: Final = 4_000_000
TRANSACTION_TOPICS: Final = frozenset({HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC})


def is_about_transactions(topic: str, sys_flag: int) -> bool:
    """Tell whether a record may say something about a transaction."""
    return bool(sys_flag & TRANSACTION_MASK) or topic in TRANSACTION_TOPICS


class TransactionRanges:
    """The records from ``start`` to ``end`` that may say something about a transaction."""

    def __init__(self, start: int = 0) -> None:
        self.start = self.end = start  # physical offsets
        self._offsets = array("q")
        self._sizes = array("i")

    def note(self, physical_offset: int, size: int) -> None:
        """Note a record; it lies behind all that were noted."""
        self._offsets.append(physical_offset)
        self._sizes.append(size)

    def reach(self, end: int) -> bool:
        """Say that all records up to ``end`` are noted; return False when no more can be."""
        self.end = end
        return len(self._offsets) < RANGES_MAX

    def ranges(self, start: int) -> Iterator[tuple[int, int]]:
        """Give physical offset and size of those that begin at ``start`` or behind it."""
        first = bisect_left(self._offsets, start)
        return zip(self._offsets[first:], self._sizes[first:], strict=True)
