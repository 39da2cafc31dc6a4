"""Background work in slices of limited duration on the event loop.

Requests are served by the same thread as housekeeping, so long work must not occupy the loop until
it is done. It is written as a generator that yields after each small step; a slice runs as many
steps as fit, and the next slice continues from there.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

SLICE_S: Final = 0.0005
"""Seconds of a slice. Its last step, and one step of each other kind of work that shares it, take
some tenths of a millisecond more: background work occupies the loop for about a millisecond."""


class Slice:
    """A slice that begins at its creation; several kinds of work may share it."""

    def __init__(self) -> None:
        self._end = time.perf_counter() + SLICE_S

    @property
    def is_over(self) -> bool:
        """Whether the next step must wait for another slice."""
        return time.perf_counter() >= self._end

    def advance(self, work: Iterator[object]) -> bool:
        """Run steps of the work, at least one; return whether all work is done."""
        end, clock = self._end, time.perf_counter
        return all(clock() < end for _ in work)


PAUSE_S: Final = 0.002
"""Seconds between two slices of background work while requests come: a fifth of the loop's time."""


class PeriodicWork:
    """Work repeated at a fixed interval, each time in slices; for a `Ticker`."""

    def __init__(self, seconds: float, *work: Callable[[], Iterator[object]]) -> None:
        self._seconds = seconds
        self._work = work
        self._round: Iterator[object] | None = None

    def tick(self) -> float:
        """Run the next slice; return the seconds until the one after it, 0 if work is left."""
        if self._round is None:
            self._round = chain.from_iterable(one() for one in self._work)
        if not Slice().advance(self._round):
            return 0.0
        self._round = None
        return self._seconds


async def in_slices(work: Iterator[object]) -> None:
    """Do work in slices; requests are served in the pauses."""
    while True:
        if Slice().advance(work):
            return
        await asyncio.sleep(PAUSE_S)
