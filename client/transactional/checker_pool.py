"""CheckerPool: run a checker with limited concurrency and a timeout.

A plain function runs on a thread of its own. Checkers query databases, and some of them hang. A
thread that hangs cannot be ended, so

* it is not one of asyncio's own threads, which are few and which the rest of the program needs;
* it is a daemon thread, or the process could not exit before it ends;
* it keeps its slot until it ends, so that there are never more threads than slots.

When calls that hang hold all slots, the pool is ``exhausted`` and accepts no further calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ..daemon_thread import DaemonThread

T = TypeVar("T")

logger = logging.getLogger(__name__)

RunInThread: TypeAlias = Callable[..., Awaitable[Any]]
"""Runs a function on a thread and returns its result, as ``asyncio.to_thread`` does."""


class CheckerPool:
    """The calls of one producer's checker: running, or waiting for a slot."""

    def __init__(self, concurrency: int, seconds: float) -> None:
        """Allow ``concurrency`` calls at a time, of ``seconds`` each."""
        self._concurrency = concurrency
        self._seconds = seconds
        self._running = 0
        self._hanging = 0  # running calls that have exceeded their time
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def exhausted(self) -> bool:
        """Whether no further call can be made, because hanging calls hold all slots."""
        return self._hanging >= self._concurrency

    async def run(self, call: Callable[[RunInThread], Awaitable[T]]) -> T:
        """Wait for a slot and make the call, which gets a function to run code on a thread.

        Raises:
            TimeoutError: The call took too long, or the pool is exhausted.
        """
        await self._acquire_slot()
        threads: list[DaemonThread] = []

        def in_thread(function: Callable[..., Any], *args: object) -> asyncio.Future[Any]:
            threads.append(DaemonThread(partial(function, *args), name="halfmq-checker"))
            return threads[-1].result

        try:
            async with asyncio.timeout(self._seconds):
                return await call(in_thread)
        finally:
            if any(thread.is_running for thread in threads):
                self._mark_hanging(threads[-1])
            else:
                self._release_slot()

    async def _acquire_slot(self) -> None:
        if self._running < self._concurrency:
            self._running += 1
            return
        if self.exhausted:
            raise TimeoutError
        slot = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled() and slot.exception() is None:
                self._release_slot()  # it had just been granted
            raise

    def _release_slot(self) -> None:
        while self._waiting:
            slot = self._waiting.popleft()
            if not slot.done():
                slot.set_result(None)
                return
        self._running -= 1

    def _mark_hanging(self, thread: DaemonThread) -> None:
        self._hanging += 1
        thread.on_end = self._hanging_call_ended
        if not self.exhausted:
            return
        logger.error(
            "event=checker_hangs calls=%d longer_than_seconds=%g note='checks are rejected'",
            self._hanging,
            self._seconds,
        )
        while self._waiting:
            slot = self._waiting.popleft()
            if not slot.done():
                slot.set_exception(TimeoutError())

    def _hanging_call_ended(self) -> None:
        self._hanging -= 1
        self._release_slot()
