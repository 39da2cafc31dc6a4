"""Stretches of the log in which no record is about a transaction, as a start comes by them.

Recovery looks at every record of what it scans. Whoever then fills the table of transactions needs
few of them, mostly none, and would take as long once more to find that out. So the scan notes where
nothing is to be found. Only long stretches are kept: to leave out a short one gains nothing.
"""

from collections.abc import Iterator
from typing import Final

from .format.flags import TRANSACTION_MASK
from .format.topics import HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC

QUIET_BYTES_MIN: Final = 4 << 20  # what is read in a millisecond, and opened in a tenth of one
TRANSACTION_TOPICS: Final = frozenset({HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC})


def is_about_transactions(topic: str, sys_flag: int) -> bool:
    """Tell whether a record may say something about a transaction."""
    return bool(sys_flag & TRANSACTION_MASK) or topic in TRANSACTION_TOPICS


class QuietStretches:
    """Where no transactions are, in ascending order."""

    def __init__(self, bytes_min: int = QUIET_BYTES_MIN) -> None:
        self._bytes_min = bytes_min
        self._stretches: list[tuple[int, int]] = []  # start, end
        self._start = self._end = 0  # the one that is growing

    def note(self, start: int, end: int, *, is_quiet: bool) -> None:
        """Take in the records from ``start`` to ``end``, which lie behind all that came before."""
        if is_quiet and start == self._end:
            self._end = end
        else:
            self._keep()
            self._start, self._end = (start, end) if is_quiet else (end, end)

    def _keep(self) -> None:
        if self._end - self._start >= self._bytes_min:
            self._stretches.append((self._start, self._end))

    def between(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Give what has to be read from ``start`` to ``end``: all but the quiet stretches."""
        stretches = [*self._stretches, (self._start, self._end)]
        for quiet_start, quiet_end in stretches:
            if quiet_end - quiet_start < self._bytes_min or quiet_end <= start:
                continue
            if quiet_start >= end:
                break
            if start < quiet_start:
                yield start, quiet_start
            start = quiet_end
        if start < end:
            yield start, end
