"""Helper threads that call a function when they are woken, and after a pause it chooses.

The function, a *round*, does the work that is due now and returns how long the thread may sleep
until the next round. A round knows nothing of threads, so that a simulation can call it as well.
"""

import logging
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Protocol, TypeAlias

from ..errors import StoreError

Round: TypeAlias = Callable[[bool], float | None]
"""``woken`` → seconds until the next round unless woken earlier; None ends the thread.

``woken`` says whether ``wake`` was called before this round. A round never raises."""


class Worker(Protocol):
    """Calls a round repeatedly, one at a time, on a thread of its own."""

    def start(self) -> None:
        """Start; the first round is due at once if ``wake`` was called before."""
        ...

    def wake(self) -> None:
        """Run a round soon that sees everything done before this call; any thread, never waits."""
        ...

    def stop(self) -> bool:
        """Return when no round runs and none will; False if the worker was never started."""
        ...


WorkerFactory: TypeAlias = Callable[[str, Round, float], Worker]
"""``name, round, seconds until the first round`` → a worker that has not been started."""


class ThreadWorker:
    """A worker that is a daemon thread."""

    def __init__(self, name: str, work: Round, first_pause: float) -> None:
        self._work = work
        self._first_pause = first_pause
        self._wake = Event()
        self._stopping = False
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Run a round soon; see ``Worker``."""
        if not self._wake.is_set():
            self._wake.set()

    def stop(self) -> bool:
        """End the thread after its current round; False if it was never started."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is None:
            return False
        self._thread.join()
        return True

    def _run(self) -> None:
        pause: float | None = self._first_pause
        while pause is not None:
            woken = self._wake.wait(pause)
            # Cleared before the round, so that a later wake causes another round.
            self._wake.clear()
            if self._stopping:
                return
            pause = self._work(woken)


logger = logging.getLogger(__name__)


class Maintenance:
    """Calls ``prepare`` when it is woken and ``maintain`` once per interval, on its own thread.

    These only make calls that release the interpreter, so that the loop thread keeps running.
    """

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
