"""The maintenance thread: prepare space ahead of the appender, flush queues, save the checkpoint.

It only makes calls that release the interpreter, so that the loop thread keeps running.
"""

import logging
import time
from collections.abc import Callable

from ..errors import StoreError
from .worker import ThreadWorker, WorkerFactory

logger = logging.getLogger(__name__)


class Maintenance:
    """Calls ``prepare`` when it is woken and ``maintain`` once per interval, on its own thread."""

    def __init__(
        self,
        *,
        prepare: Callable[[], None],
        maintain: Callable[[], None],
        interval_ms: int,
        worker: WorkerFactory = ThreadWorker,
    ) -> None:
        self._prepare = prepare
        self._maintain = maintain
        self._interval = interval_ms / 1000
        self._failing: dict[Callable[[], None], str] = {}  # and the latest error
        self._due = 0.0  # when to maintain next, by the monotonic clock
        self._worker = worker("store-maintenance", self._round, self._interval)
        self.wake = self._worker.wake  # call ``prepare`` soon; any thread, never waits

    def start(self) -> None:
        """Start the thread."""
        self._due = time.monotonic() + self._interval
        self._worker.wake()
        self._worker.start()

    def stop(self) -> None:
        """End the thread; the caller does the last maintenance itself."""
        self._worker.stop()

    def _round(self, woken: bool) -> float:
        if woken:
            self._attempt(self._prepare)
        if time.monotonic() >= self._due:
            self._attempt(self._maintain)
            self._due = time.monotonic() + self._interval
        return max(0.0, self._due - time.monotonic())

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do the work and log a failure; the next round tries again.

        No caller waits for the result. If the disk is full, the append that needs the space fails.
        """
        try:
            work()
        except (OSError, StoreError) as error:
            if str(error) != self._failing.get(work):  # once, as long as it is the same
                logger.warning("event=store_upkeep_failed error=%r", str(error))
            self._failing[work] = str(error)
        else:
            if self._failing.pop(work, None) is not None:
                logger.warning("event=store_upkeep_resumed")
