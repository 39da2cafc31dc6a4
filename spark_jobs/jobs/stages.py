"""Says on standard error how far a job is.

In a file each step is one line, written when the step begins: a log shows where a job hangs. On a
terminal one line is rewritten, with the share of the tasks that Spark has done in this step.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ..log.segments import LogExtent

_PAUSE: Final = 0.5  # seconds between two looks at Spark
_CLEAR: Final = "\r\x1b[K"  # back to the start of the line, which is erased


def reading(extent: "LogExtent") -> str:
    """Name the step that reads a log, the longest of most jobs."""
    return f"reading {extent.size:,} bytes of log"


class Stages:
    """Tells the steps of one job."""

    def __init__(self, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._job = job
        self._clock = clock
        self._began = clock()
        self._step = ""

    def __call__(self, step: str) -> None:
        """Say what begins."""
        self._step = step
        if sys.stderr.isatty():
            self.show()
        else:
            self._write(f"{self._line()}\n")

    @contextmanager
    def following(self, spark: "SparkSession") -> Iterator[None]:
        """Show on a terminal, as long as this lasts, how many tasks are done."""
        if not sys.stderr.isatty():
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._follow, args=(spark, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._write(_CLEAR)

    def show(self, done: int = 0, tasks: int = 0) -> None:
        """Rewrite the line of a terminal; ``tasks`` is how many the running stages have."""
        share = f", {done * 100 // tasks}% of {tasks} tasks" if tasks else ""
        self._write(f"{_CLEAR}{self._line()}{share}")

    def _follow(self, spark: "SparkSession", ended: threading.Event) -> None:
        tracker = spark.sparkContext.statusTracker()
        while not ended.wait(_PAUSE):
            found = map(tracker.getStageInfo, tracker.getActiveStageIds())
            stages = [stage for stage in found if stage is not None]
            done = sum(stage.numCompletedTasks for stage in stages)
            self.show(done, sum(stage.numTasks for stage in stages))

    def _line(self) -> str:
        return f"{self._job}: {self._clock() - self._began:.1f} s: {self._step}"

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
