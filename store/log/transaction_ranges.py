"""Log ranges of transaction records, collected while recovery scans.

The table of transactions is filled from the log after recovery. With these ranges it reads only
transaction records, and the log is scanned once. The ranges are dropped when the table is filled.
If there are too many, the rest of the log is scanned a second time.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from ..format.flags import TRANSACTION_MASK
from ..format.topics import HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC

# Twelve bytes each, 48 MB: enough for two gigabytes of log of small transactions only.
RANGES_MAX: Final = 4_000_000
TRANSACTION_TOPICS: Final = frozenset({HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC})


def is_about_transactions(topic: str, sys_flag: int) -> bool:
    """Return whether a record may belong to a transaction."""
    return bool(sys_flag & TRANSACTION_MASK) or topic in TRANSACTION_TOPICS


class TransactionRanges:
    """The records between ``start`` and ``end`` that may belong to a transaction."""

    def __init__(self, start: int = 0) -> None:
        self.start = self.end = start  # physical offsets
        self._offsets = array("q")
        self._sizes = array("i")

    def add(self, physical_offset: int, size: int) -> None:
        """Add a record; it lies after all that were added."""
        self._offsets.append(physical_offset)
        self._sizes.append(size)

    def reach(self, end: int) -> bool:
        """Mark all records up to ``end`` as added; return False if no more can be added."""
        self.end = end
        return len(self._offsets) < RANGES_MAX

    def ranges(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield physical offset and size of the records that begin at or after ``start``."""
        first = bisect_left(self._offsets, start)
        return zip(self._offsets[first:], self._sizes[first:], strict=True)
