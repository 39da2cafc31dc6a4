"""Measured durations, as Prometheus histograms."""

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds for what should take milliseconds."""

LONG_BOUNDS_S: Final = (0.01, 0.1, 1.0, 6.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 86400.0)
"""Upper bounds in seconds for what programs and people take part in."""


class Histogram:
    """Counts durations by bucket; one thread observes, any thread reads."""

    def __init__(self, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self._bounds = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Return ``(upper bound, count of durations up to it)`` of each bucket, and the sum."""
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), list(self._counts), strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return buckets, self._sum

    def timed(self, call: Callable[[int], None]) -> Callable[[int], None]:
        """Return the call with its durations observed."""

        def observed(argument: int) -> None:
            started = time.perf_counter()
            call(argument)
            self.observe(time.perf_counter() - started)

        return observed
