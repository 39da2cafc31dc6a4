"""The helper thread for what has time: space ahead of the appender, queues, the checkpoint.

It only makes calls that release the interpreter, so the loop thread runs on beside it.
"""

import logging
import time
from collections.abc import Callable
from threading import Event, Thread

from .errors import StoreError

logger = logging.getLogger(__name__)


class Janitor:
    """The thread: ``prepare`` whenever it is woken, ``maintain`` once per interval."""

    def __init__(
        self, *, prepare: Callable[[], None], maintain: Callable[[], None], interval_ms: int
    ) -> None:
        self._prepare = prepare
        self._maintain = maintain
        self._interval = interval_ms / 1000
        self._wake = Event()
        self._stopping = False
        self._thread = Thread(target=self._run, name="store-janitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._wake.set()
        self._thread.start()

    def wake(self) -> None:
        """Have ``prepare`` called soon; any thread, never waits."""
        if not self._wake.is_set():
            self._wake.set()

    def stop(self) -> None:
        """End the thread; its owner does the last maintenance itself."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + self._interval
        while True:
            woken = self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            if self._stopping:
                return
            if woken:
                self._attempt(self._prepare)
            if time.monotonic() >= due:
                self._attempt(self._maintain)
                due = time.monotonic() + self._interval

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do the work; a failure is told and tried again, since nobody waits for the result.

        A full disk becomes an error of the append that needs the space.
        """
        try:
            work()
        except (OSError, StoreError) as error:
            logger.warning("event=store_upkeep_failed error=%r", str(error))
