"""Work that comes back by itself: housekeeping in small slices on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

RETRY_AFTER_ERROR_S: Final = 1.0
"""Seconds until a task that failed is tried again; its error is logged each time."""


class Ticker:
    """Calls `work` again and again; it returns the seconds until it wants to be called next."""

    def __init__(self, name: str, work: Callable[[], float]) -> None:
        self._name = name
        self._work = work
        self._handle: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurried = False

    async def start(self) -> None:
        """Do the first piece of work after this pass of the loop."""
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(0, self._tick)

    async def stop(self) -> None:
        """Do no more."""
        self._loop = None
        if self._handle is not None:
            self._handle.cancel()

    def hurry(self) -> None:
        """Do the next piece now rather than when it was due; the work itself may call this."""
        if self._hurried or self._loop is None or self._handle is None:
            return
        self._hurried = True
        self._handle.cancel()
        self._handle = self._loop.call_later(0, self._tick)

    def _tick(self) -> None:
        self._hurried = False
        try:
            delay = self._work()
        except Exception:
            logger.exception("event=tick_failed task=%s", self._name)
            delay = RETRY_AFTER_ERROR_S
        if self._loop is not None and not self._hurried:
            self._handle = self._loop.call_later(delay, self._tick)
