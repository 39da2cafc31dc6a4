"""Calls of a checker: a few at a time, each on a thread of its own unless it is a coroutine.

Checkers look into databases, and some of them hang. A thread that hangs cannot be ended, so

* it is none of asyncio's own threads, which are few, and which the rest of the program needs;
* it is a daemon, or the process could not end before it does;
* it keeps its turn until it ends, so that there are never more of them than calls are allowed.

When all turns are held by calls that hang, nobody is asked here any more (``hangs``).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

InThread: TypeAlias = Callable[..., Awaitable[Any]]
"""Calls a function on a thread and returns what it returns, as ``asyncio.to_thread`` does."""


class CheckerCalls:
    """The calls of one producer's checker that are under way or wait for their turn."""

    def __init__(self, concurrency: int, seconds: float) -> None:
        """Allow so many at a time, and so many seconds each."""
        self._concurrency = concurrency
        self._seconds = seconds
        self._running = 0
        self._hanging = 0  # of those running, how many have taken longer than they may
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def hangs(self) -> bool:
        """Whether no further call can be made: all that may run at a time hang."""
        return self._hanging >= self._concurrency

    async def run(self, call: Callable[[InThread], Awaitable[T]]) -> T:
        """Make a call when it is its turn; it gets what runs functions on a thread.

        Raises:
            TimeoutError: It took too long, or all other calls do.
        """
        await self._turn()
        threads: list[_Thread] = []

        def in_thread(function: Callable[..., Any], *args: object) -> asyncio.Future[Any]:
            threads.append(_Thread(partial(function, *args)))
            return threads[-1].result

        try:
            async with asyncio.timeout(self._seconds):
                return await call(in_thread)
        finally:
            if any(thread.is_running for thread in threads):
                self._hang(threads[-1])
            else:
                self._end_turn()

    async def _turn(self) -> None:
        if self._running < self._concurrency:
            self._running += 1
            return
        if self.hangs:
            raise TimeoutError
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._end_turn()  # it had just been given
            raise

    def _end_turn(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._running -= 1

    def _hang(self, thread: _Thread) -> None:
        self._hanging += 1
        thread.on_end = self._hung_call_ended
        if not self.hangs:
            return
        logger.error(
            "event=checker_hangs calls=%d longer_than_seconds=%g; brokers are told to ask others",
            self._hanging,
            self._seconds,
        )
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(TimeoutError())

    def _hung_call_ended(self) -> None:
        self._hanging -= 1
        self._end_turn()


class _Thread:
    """A function on a thread of its own; its loop hears of its end."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self.is_running = True
        self.on_end: Callable[[], None] = lambda: None
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(self._run, function), name="halfmq-checker", daemon=True
        ).start()

    def _run(self, function: Callable[[], Any]) -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001 -- whatever it is, the one who waits is told
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._ended, result, error)

    def _ended(self, result: object, error: BaseException | None) -> None:
        self.is_running = False
        if not self.result.done():
            if error is None:
                self.result.set_result(result)
            else:
                self.result.set_exception(error)
        self.on_end()
