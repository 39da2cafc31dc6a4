"""Saves a table on a thread, while connections wait whose next request needs it saved.

A topic must be in its file before the log has a record of it: otherwise this broker after a kill,
or an auditor, could not tell where the record belongs. The event loop must not wait for the disk
either. So a connection whose request creates a topic is not served until the file is on disk, and
its requests stay in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ..errors import RequestRefusedError
from ..loop.slices import Slice

Resume = Callable[[RequestRefusedError | None], None]
"""Serves a connection again; its next request gets the refusal, if there is one."""


class AwaitedSave:
    """Runs one save at a time, as long as connections wait for one."""

    def __init__(
        self,
        begin: Callable[[], Callable[[], None]],
        end: Callable[[OSError | None], RequestRefusedError | None],
    ) -> None:
        """Wire it.

        Args:
            begin: Captures the state to save; returns a function that a thread calls to write it.
            end: Called on the event loop with the error of the write, if any; returns the refusal
                of the requests that waited.
        """
        self._begin = begin
        self._end = end
        self._waiting: list[Resume] = []
        self._saving = False

    def wait(self, resume: Resume) -> None:
        """Call ``resume`` on the event loop when the current state, or a later one, is saved."""
        self._waiting.append(resume)
        if not self._saving:
            self._saving = True
            future = asyncio.get_running_loop().run_in_executor(None, self._begin())
            future.add_done_callback(self._saved)

    def _saved(self, future: asyncio.Future[None]) -> None:
        self._saving = False
        if future.cancelled():
            return
        error = future.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        refusal = self._end(error)
        # A connection that came during the save may need another one, and asks for it then.
        waiting, self._waiting = deque(self._waiting), []
        self._resume(waiting, refusal)

    def _resume(self, waiting: deque[Resume], refusal: RequestRefusedError | None) -> None:
        """Resume connections in slices; each may have a read full of requests."""
        time_slice = Slice()
        while waiting:
            waiting.popleft()(refusal)
            if time_slice.is_over and waiting:
                asyncio.get_running_loop().call_soon(self._resume, waiting, refusal)
                return
