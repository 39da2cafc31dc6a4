"""DaemonThread: run a plain function of the user on a thread that keeps no process from its end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any


class DaemonThread:
    """Runs a function on a thread of its own and reports its end to the event loop.

    The function has the context variables of the caller.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self.is_running = True
        self.on_end: Callable[[], None] = lambda: None
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(self._run, function), name=name, daemon=True
        ).start()

    def _run(self, function: Callable[[], Any]) -> None:
        result: object = None
        error: BaseException | None = None
        try:
            result = function()
        except StopIteration as raised:  # a future takes any exception but this one
            error = RuntimeError(f"{function} raised StopIteration")
            error.__cause__ = raised
        except BaseException as raised:  # noqa: BLE001 -- raised again to the waiting caller
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(self._ended, result, error)

    def _ended(self, result: object, error: BaseException | None) -> None:
        self.is_running = False
        if not self.result.done():
            if error is None:
                self.result.set_result(result)
            else:
                self.result.set_exception(error)
        self.on_end()
