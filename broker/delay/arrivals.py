"""When the messages of a delay level were stored, on the monotonic clock.

Store timestamps cannot tell: they are by the wall clock, which steps, and they stand still while
that clock is behind the last of them. So each append to a level is noted here, and a message is as
old as the note that covers it. What was stored before this process began has nothing but its store
timestamp.

Notes close to each other are one, with the time of the last message: a message may seem younger
than it is, by 1/65,536 of the delay at most, and never older.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Final

NOTES_MAX: Final = 65_536
"""Notes in the time of one delay, of 16 bytes each; twice as many until those that are over are
dropped: 2 MiB for a level that gets messages all the time."""


class Arrivals:
    """Notes of the appends to one level."""

    def __init__(self, log_end: int, delay_ms: int, *, now_ms: int, monotonic_ms: int) -> None:
        """Begin with the log as a start finds it.

        Args:
            log_end: Physical offset at which this process goes on writing.
            delay_ms: How long the messages wait; older notes are dropped.
            now_ms: Time by the wall clock.
            monotonic_ms: The same moment on the monotonic clock.
        """
        self._start_end = log_end
        self._start_wall_ms, self._start_ms = now_ms, monotonic_ms
        self._delay_ms = delay_ms
        self._grain_ms = max(delay_ms // NOTES_MAX, 1)
        self._ends = array("q")  # physical offsets; what lies before the first one, and so on
        self._times = array("q")  # was stored by this time
        self._began_ms = 0  # time of the first append that the last note covers

    def note(self, log_end: int, monotonic_ms: int) -> None:
        """Take note of an append to the level, just now; the log ends at `log_end`."""
        if self._times and monotonic_ms - self._began_ms < self._grain_ms:
            self._ends[-1], self._times[-1] = log_end, monotonic_ms
            return
        overdue = bisect_right(self._times, monotonic_ms - self._delay_ms) - 1
        if overdue > len(self._times) // 2:  # what these cover is due, as by the note after them
            del self._ends[:overdue], self._times[:overdue]
        self._ends.append(log_end)
        self._times.append(monotonic_ms)
        self._began_ms = monotonic_ms

    def stored_ms(self, physical_offset: int, store_timestamp: int) -> int:
        """Return when the message at an offset of the log was stored, on the monotonic clock.

        One from before the start is as old as its store timestamp says; not less than nothing, for
        the wall clock may have been set back.
        """
        if physical_offset < self._start_end:
            return self._start_ms - max(self._start_wall_ms - store_timestamp, 0)
        return self._times[bisect_right(self._ends, physical_offset)]
