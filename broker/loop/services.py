"""Services start in order and stop in the opposite order; a failed start stops what has started."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from attrs import define, field

logger = logging.getLogger(__name__)


class Service(Protocol):
    """A part of the broker that runs between `start` and `stop`; a subclass may need only one."""

    async def start(self) -> None:
        """Return when the part is ready; raise if it cannot start."""
        return

    async def stop(self) -> None:
        """Return when the part has stopped; do nothing if it was stopped already."""
        return


class ServiceStack:
    """Runs services in order and stops them in the opposite order."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services
        self._running = AsyncExitStack()

    async def start(self) -> None:
        """Return when every service is ready; if one fails, stop those already started."""
        async with AsyncExitStack() as started:
            for service in self._services:
                await service.start()
                started.push_async_callback(service.stop)
            self._running = started.pop_all()  # all have started: do not stop them here

    async def stop(self) -> None:
        """Stop all of them; a second call does nothing."""
        await self._running.aclose()


@define(eq=False, repr=False)
class Periodic:
    """Looks for work every so many seconds, and does it on a thread, one piece after the other."""

    _seconds: float
    _due: Sequence[Callable[[], Callable[[], object] | None]]  # each returns work, or None
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _working: asyncio.Future[object] | None = field(default=None, init=False)

    async def start(self) -> None:
        """Look for the first time after so many seconds."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Wait for running work."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._working is not None:
            await asyncio.gather(self._working, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            for due in self._due:
                work = due()
                if work is None:
                    continue
                self._working = asyncio.ensure_future(asyncio.to_thread(work))
                try:
                    await asyncio.shield(self._working)
                except Exception:
                    logger.exception("event=periodic_work_failed work=%r", work)
