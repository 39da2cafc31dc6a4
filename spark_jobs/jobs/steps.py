"""Report on standard error what a job is doing, one line when each step begins.

A log file so shows where a job hangs. On a terminal Spark's own progress bar stands below it.
"""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..log.segments import LogExtent

Report = Callable[[str], None]


def reading(extent: "LogExtent") -> str:
    """Name the step that reads a log, the longest of most jobs."""
    return f"reading {extent.size:,} bytes of log"


def step_reporter(job: str) -> Report:
    """Return a function that writes the name of a step after the seconds since now."""
    began = time.monotonic()

    def report(step: str) -> None:
        sys.stderr.write(f"{job}: {time.monotonic() - began:.1f} s: {step}\n")
        sys.stderr.flush()

    return report
