"""Services start in order and stop in the opposite order; a failed start stops what has started."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Protocol


class Service(Protocol):
    """A part of the broker that runs between `start` and `stop`."""

    async def start(self) -> None:
        """Return when the part is ready; raise if it cannot start."""
        ...

    async def stop(self) -> None:
        """Return when the part has stopped; do nothing if it was stopped already."""
        ...


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
