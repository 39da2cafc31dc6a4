"""Periodic housekeeping in small slices on the event loop."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from attrs import define

logger = logging.getLogger(__name__)

RETRY_AFTER_ERROR_S: Final = 1.0
"""Seconds until a task that failed is tried again; its error is logged each time."""


LATENESS_FACTOR: Final = 4
"""The pause grows by this factor times the loop's lateness: a busy loop does less housekeeping."""

EXTRA_PAUSE_S_MAX: Final = 0.1
"""Longest such extension in seconds: the lateness of a suspended process is not load."""


QUIET_S: Final = 0.05
"""Seconds without traffic after which slices follow each other without a pause. It is many times
the duration of a flush, so a producer that sends one message at a time counts as traffic."""


@define(eq=False, repr=False, slots=False)
class Ticker:
    """Calls ``work`` repeatedly; ``work`` returns the seconds until its next call.

    If ``work`` returns 0, it is not done: the next slice follows after ``pause`` seconds, also
    after a ``wake``, so that requests are served in between. If the loop was late for a slice, the
    pause is longer. ``traffic`` counts served reads; if it has not changed for ``QUIET_S``, slices
    follow each other without a pause, and only sockets are polled in between.
    """

    _name: str
    work: Callable[[], float] = lambda: 0.0
    _pause: float = 0.0
    _traffic: Callable[[], int] | None = None

    def __attrs_post_init__(self) -> None:
        self._served = -1  # traffic at the last tick
        self._quiet_from = 0.0  # loop time, if there is no traffic until then
        self._without_pause = False  # the next slice, unless there is traffic until then
        self._paused_until = 0.0  # loop time
        self._due = 0.0  # loop time of the next call
        self._handle: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = False

    async def start(self) -> None:
        """Schedule the first call after this pass of the loop."""
        self._loop = asyncio.get_running_loop()
        self._plan(0.0)

    async def stop(self) -> None:
        """Cancel the next call."""
        self._loop = None
        if self._handle is not None:
            self._handle.cancel()

    def wake(self) -> None:
        """Run the next slice now instead of when it is due; the work itself may call this."""
        if self._woken or self._loop is None or self._handle is None:
            return
        self._woken = True
        self._handle.cancel()
        self._plan(0.0)

    def _tick(self) -> None:
        self._woken = False
        if self._without_pause and self._loop is not None and not self._is_quiet():
            self._without_pause = False
            self._paused_until = self._loop.time() + self._pause
            self._plan(0.0)
            return
        late = 0.0 if self._loop is None else self._loop.time() - self._due
        try:
            delay = self.work()
        except Exception:
            logger.exception("event=tick_failed task=%s", self._name)
            delay = RETRY_AFTER_ERROR_S
        if self._loop is None:
            return
        self._without_pause = delay <= 0 and self._is_quiet()
        if delay <= 0 and not self._without_pause:
            extra = min(LATENESS_FACTOR * late, EXTRA_PAUSE_S_MAX) if self._pause else 0.0
            self._paused_until = self._loop.time() + self._pause + extra
        if self._woken and self._handle is not None:  # by the work itself
            self._handle.cancel()
            delay = 0.0
        self._plan(delay)

    def _is_quiet(self) -> bool:
        """Return whether nothing has been served for ``QUIET_S``."""
        if self._traffic is None or self._loop is None:
            return False
        now = self._loop.time()
        before, self._served = self._served, self._traffic()
        if before != self._served:
            self._quiet_from = now + QUIET_S
        return now >= self._quiet_from

    def _plan(self, delay: float) -> None:
        assert self._loop is not None
        now = self._loop.time()
        delay = max(delay, self._paused_until - now)
        self._due = now + delay
        self._handle = self._loop.call_later(delay, self._tick)
