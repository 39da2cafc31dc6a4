"""Helper threads: one piece of work, done when it is asked for and now and then by itself.

Who owns the work hands it over as a *round*: a function that does what there is to do now and
returns how long the thread may sleep until the next one. Since a round knows nothing of threads,
whatever else calls it, a simulation for one, drives the same code.
"""

from collections.abc import Callable
from threading import Event, Thread
from typing import Protocol, TypeAlias

Round: TypeAlias = Callable[[bool], float | None]
"""``woken`` → seconds until the next round unless woken earlier; None: there is none any more.

``woken`` tells whether somebody asked for this round. A round never raises."""


class Worker(Protocol):
    """Calls a round again and again, one at a time, beside the thread that made the worker."""

    def start(self) -> None:
        """Begin; the first round is due at once if ``wake`` was called before."""
        ...

    def wake(self) -> None:
        """Have a round soon, one that sees everything done before this; any thread, never waits."""
        ...

    def stop(self) -> bool:
        """Return when no round runs and none will; tell whether there was any use of that."""
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
        """Have a round soon; see ``Worker``."""
        if not self._wake.is_set():
            self._wake.set()

    def stop(self) -> bool:
        """End the thread, after the round it is in; False if it was never started."""
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
            # Cleared before looking, so that what is done from here on wakes us again.
            self._wake.clear()
            if self._stopping:
                return
            pause = self._work(woken)
