"""Services start bottom-up and stop top-down; a failed start undoes what ran."""

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
        """Return when the part has stopped; do not raise if it was stopped already."""
        ...


class ServiceStack:
    """Runs services in order and stops them in the opposite order."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services
        self._running = AsyncExitStack()

    async def start(self) -> None:
        """Return when every service is ready; if one fails, stop those already up and re-raise."""
        async with AsyncExitStack() as started:
            for service in self._services:
                await service.start()
                started.push_async_callback(service.stop)
            self._running = started.pop_all()  # all are up: keep them up

    async def stop(self) -> None:
        """Stop all of them; a second call does nothing."""
        await self._running.aclose()
