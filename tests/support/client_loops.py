"""Runs a client test on asyncio's loop and on uvloop, with a fake broker if it asks for one.

A test about a time limit of a client runs `in_steady_time`; all others have limits that do not
pass.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import pytest

from tests.support.fake_broker import fake_broker
from tests.support.loops import LOOPS, LoopFactory, run_on

TURN_S: Final = 0.005
"""Seconds that one turn of a steady loop counts at most."""


class _Turns(selectors.DefaultSelector):
    """Waits for a turn at most, and counts no more for it, however long it was."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._looked_at = time.monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(None if timeout is None else min(timeout, TURN_S))
        now = time.monotonic()
        self.now += min(now - self._looked_at, TURN_S)
        self._looked_at = now
        return events


class SteadyLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while its process is stopped, or waits for a core.

    What a fake broker on the same loop has to do takes some turns; so a limit of some dozens passes
    only where an answer is missing, whatever the machine does meanwhile.
    """

    def __init__(self) -> None:
        self._turns = _Turns()
        super().__init__(self._turns)

    def time(self) -> float:
        return self._turns.now


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make an ordinary test of an async one, once per kind of loop.

    A parameter named ``broker`` is a running fake broker with a topic ``orders`` of four queues;
    all others are fixtures as usual.
    """
    run = _ordinary(test, inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY))
    decorated: Callable[..., None] = pytest.mark.parametrize("loop_factory", LOOPS)(run)
    return decorated


def in_steady_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make an ordinary test of an async one that is about time; parameters as for both loops."""
    return _ordinary(test)


def _ordinary(
    test: Callable[..., Coroutine[Any, Any, None]], *further: inspect.Parameter
) -> Callable[..., None]:
    signature = inspect.signature(test)

    async def main(arguments: dict[str, Any]) -> None:
        if "broker" not in signature.parameters:
            await test(**arguments)
            return
        async with fake_broker() as broker:
            broker.create_topic("orders")
            await test(broker=broker, **arguments)

    @functools.wraps(test)
    def run(*, loop_factory: LoopFactory = SteadyLoop, **arguments: Any) -> None:
        run_on(loop_factory, main(arguments))

    others = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != "broker"
    ]
    run.__signature__ = inspect.Signature([*others, *further])  # type: ignore[attr-defined]
    del run.__wrapped__  # or pytest sees a coroutine function
    return run
