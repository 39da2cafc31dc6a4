"""A helper thread of the store that is none: it works when the test says so."""

from halfmq.store.files.worker import Round

SOON = 1.0  # seconds; a helper that wants its next round later has nothing left to do


class SteppedWorker:
    """Does a round at each step."""

    def __init__(self, work: Round) -> None:
        self._work = work

    def start(self) -> None:
        """Nothing runs by itself."""

    def wake(self) -> None:
        """Nor when it is asked for."""

    def stop(self) -> bool:
        return True

    def step(self) -> bool:
        """Do one round; return whether it wants another one soon."""
        pause = self._work(True)
        return pause is not None and pause < SOON
