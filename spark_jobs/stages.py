"""Says on standard error how far a job is, where that is no terminal.

On a terminal Spark draws a bar. In a file its carriage returns would make one endless line, so
there each step of a job is one line, written when the step begins: a log shows where a job hangs.
"""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .log.segments import LogExtent


def reading(extent: "LogExtent") -> str:
    """Name the step that reads a log, the longest of most jobs."""
    return f"reading {extent.size:,} bytes of log"


class Stages:
    """Writes one line for each step; nothing at all to a terminal."""

    def __init__(self, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._job = job
        self._clock = clock
        self._began = clock()

    def __call__(self, step: str) -> None:
        """Say what begins."""
        if not sys.stderr.isatty():
            after = self._clock() - self._began
            sys.stderr.write(f"{self._job}: {after:.1f} s: {step}\n")
            sys.stderr.flush()
