"""Has a table saved by a thread while the requests that need it saved wait.

A topic must be in its file before the log has a record of it: whoever reads the log, this broker
after a kill or an auditor, could not tell else where the record belongs. And the event loop must
not wait for the disk. So the request that makes a topic is put aside, and served from its beginning
when the file is on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from ..errors import RequestRefusedError

WAITING_MAX: Final = 1_024
"""Requests that wait at once, since they are served together: some 10 ms for the event loop."""

WAITING_BYTES_MAX: Final = 16 << 20
"""Bytes of their bodies, which are held in memory."""

Again = Callable[[RequestRefusedError | None], None]
"""Serves a request that has waited, or answers it with why it cannot be served."""


class AwaitedSave:
    """Saves as often as there is somebody who waits for it, one after the other."""

    def __init__(
        self,
        begin: Callable[[], Callable[[], None]],
        end: Callable[[OSError | None], RequestRefusedError | None],
    ) -> None:
        """`begin` takes what is to be saved and returns what a thread has to do for it.

        `end` is told on the event loop whether that went well; if not, it says how those are
        refused who have waited.
        """
        self._begin = begin
        self._end = end
        self._waiting: list[Again] = []
        self._bytes = 0
        self._saving = False

    @property
    def is_full(self) -> bool:
        """Whether no more requests can wait."""
        return len(self._waiting) >= WAITING_MAX or self._bytes >= WAITING_BYTES_MAX

    def wait(self, again: Again, size: int) -> None:
        """Call `again` when what there is to save now is saved; `size` is that of its request."""
        self._waiting.append(again)
        self._bytes += size
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
        # Who came meanwhile needs another save, and asks for it when it is served.
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        for again in waiting:
            again(refusal)
