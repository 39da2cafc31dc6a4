"""Helper threads that call a function when they are woken, and after a pause it chooses.

The function, a *round*, does the work that is due now and returns how long the thread may sleep
until the next round. A round knows nothing of threads, so that a simulation can call it as well.
"""

from collections.abc import Callable
from threading import Event, Thread
from typing import Protocol, TypeAlias

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
        """Start the thread."""
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
