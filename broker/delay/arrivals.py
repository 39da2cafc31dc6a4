"""Times at which the messages of a delay level were stored, on the monotonic clock.

Store timestamps do not suffice: they use the wall clock, which may step, and they do not advance
while that clock is earlier than the last of them. So each append to a level is recorded here, and
the age of a message is that of the record that covers it. For messages stored before this process
began only the store timestamp is known.

Appends close to each other share one record, with the time of the last message: a message may seem
younger than it is, by at most 1/65,536 of the delay, and never older.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Final

RECORDS_MAX: Final = 65_536
"""Records within one delay, 16 bytes each; up to twice as many until expired ones are dropped: 2
MiB for a level that always gets messages."""


class Arrivals:
    """Times of the appends to one level."""

    def __init__(self, log_end: int, delay_ms: int, *, now_ms: int, monotonic_ms: int) -> None:
        """Begin with the log at a start.

        Args:
            log_end: Physical offset at which this process continues writing.
            delay_ms: Delay of the level; older records are dropped.
            now_ms: Time by the wall clock.
            monotonic_ms: The same moment on the monotonic clock.
        """
        self._start_end = log_end
        self._start_wall_ms, self._start_ms = now_ms, monotonic_ms
        self._delay_ms = delay_ms
        self._grain_ms = max(delay_ms // RECORDS_MAX, 1)
        self._ends = array("q")  # physical offsets; messages before the first one
        self._times = array("q")  # were stored by the first time, and so on
        self._began_ms = 0  # time of the first append of the last record

    def add(self, log_end: int, monotonic_ms: int) -> None:
        """Record an append to the level that has just ended at `log_end`."""
        if self._times and monotonic_ms - self._began_ms < self._grain_ms:
            self._ends[-1], self._times[-1] = log_end, monotonic_ms
            return
        overdue = bisect_right(self._times, monotonic_ms - self._delay_ms) - 1
        if overdue > len(self._times) // 2:  # their messages are due
            del self._ends[:overdue], self._times[:overdue]
        self._ends.append(log_end)
        self._times.append(monotonic_ms)
        self._began_ms = monotonic_ms

    def stored_ms(self, physical_offset: int, store_timestamp: int) -> int:
        """Return when the message at an offset of the log was stored, on the monotonic clock.

        The age of one stored before the start is taken from its store timestamp; a timestamp in
        the future counts as age 0, because the wall clock may have been set back.
        """
        if physical_offset < self._start_end:
            return self._start_ms - max(self._start_wall_ms - store_timestamp, 0)
        return self._times[bisect_right(self._ends, physical_offset)]
