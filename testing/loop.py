"""The event loop of a test: its clock can be advanced, and its network is in memory.

A test runs on asyncio's own loop, so that database drivers and web frameworks run there as well.
Four of the loop's methods are replaced on that one object; ``time``, ``threading`` and all other
loops stay as they are. ``asyncio.sleep``, ``asyncio.timeout`` and ``anyio`` follow the advanced
clock; ``time.time`` and threads do not.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from .network import ADDRESSES, Network

OURS: Final[contextvars.ContextVar[bool]] = contextvars.ContextVar("halfmq_broker", default=False)
"""Set in what a broker of a test runs: the clock waits for its threads, not for those of others."""

PASSES_MAX: Final = 10_000
"""Passes of the loop at one time of the clock: callbacks that go on for longer call each other
without end."""


class VirtualLoop:
    """A running loop whose clock is advanced by tests."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Replace the methods of the loop.

        Raises:
            TypeError: It is no loop of asyncio.
        """
        if not isinstance(loop, asyncio.BaseEventLoop):
            raise TypeError(
                f"halfmq.testing needs a loop of asyncio, this is {type(loop).__module__}."
                f"{type(loop).__qualname__}: run these tests without uvloop"
            )
        self._loop: Any = loop
        self._time = loop.time
        self._connect: Callable[..., Any] = loop.create_connection
        self._listen: Callable[..., Any] = loop.create_server
        self._execute: Callable[..., Any] = loop.run_in_executor
        self._ahead_s = 0.0
        self._jobs: set[asyncio.Future[Any]] = set()
        self.network = Network(loop)
        vars(loop).update(
            time=self.time,
            create_connection=self._create_connection,
            create_server=self._create_server,
            run_in_executor=self._run_in_executor,
        )

    def time(self) -> float:
        """Return the loop's time in seconds, as far ahead as tests have advanced it."""
        return self._time() + self._ahead_s

    async def advance(self, seconds: float) -> None:
        """Let time pass: what is due meanwhile happens in its order, without waiting for it."""
        end = self.time() + seconds
        while True:
            await self._settle()
            timers = self._loop._scheduled  # noqa: SLF001 -- asyncio tells no other way what is due
            due = min(timers[0].when(), end) if timers else end
            now = self.time()
            if now >= end and due >= end:
                return
            self._ahead_s += max(0.0, due - now)

    async def _settle(self) -> None:
        """Return when nothing is left to do at this time of the clock."""
        for _ in range(PASSES_MAX):
            await asyncio.sleep(0)
            if self._jobs:
                await asyncio.wait(list(self._jobs))
            elif not self._loop._ready:  # noqa: SLF001 -- as above
                return

    # --- methods of the loop

    async def _create_connection(
        self, factory: Callable[[], Any], host: Any = None, port: Any = None, **named: Any
    ) -> Any:
        if host in ADDRESSES:
            return await self.network.connect(factory, host, port)
        return await self._connect(factory, host, port, **named)

    async def _create_server(
        self, factory: Callable[[], Any], host: Any = None, port: Any = None, **named: Any
    ) -> Any:
        if host in ADDRESSES:
            return self.network.listen(factory, host, port)
        return await self._listen(factory, host, port, **named)

    def _run_in_executor(
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        job: asyncio.Future[Any] = self._execute(executor, function, *args)
        if OURS.get():
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)
        return job


_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, VirtualLoop] = WeakKeyDictionary()


def virtual_loop() -> VirtualLoop:
    """Return what a test can do with the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _loops:
        _loops[loop] = VirtualLoop(loop)
    return _loops[loop]


class LoopWorker:
    """A worker of the store (``halfmq.store.files.worker``) whose rounds are callbacks."""

    def __init__(self, _name: str, work: Callable[[bool], float | None], pause: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._pause: float | None = pause
        self._handle: asyncio.TimerHandle | None = None
        self._started = self._woken = False

    def start(self) -> None:
        """Plan the first round."""
        self._started = True
        self._plan()

    def wake(self) -> None:
        """Run a round in the next pass of the loop."""
        if not self._woken:
            self._woken = True
            if self._started:
                self._plan()

    def stop(self) -> bool:
        """Run no more rounds; return whether it was started."""
        self._pause, was_started = None, self._started
        self._plan()
        return was_started

    def _plan(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._pause is not None:
            self._handle = self._loop.call_later(0 if self._woken else self._pause, self._round)

    def _round(self) -> None:
        woken, self._woken = self._woken, False
        pause = self._work(woken)
        if self._pause is not None:  # not stopped by the round
            self._pause = pause
            self._plan()
