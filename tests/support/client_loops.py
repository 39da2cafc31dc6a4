"""Runs a client test on asyncio's loop and on uvloop, with a fake broker if it asks for one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.fake_broker import fake_broker
from tests.support.loops import LOOPS, LoopFactory, run_on


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make an ordinary test of an async one, once per kind of loop.

    A parameter named ``broker`` is a running fake broker with a topic ``orders`` of four queues;
    all others are fixtures as usual.
    """
    signature = inspect.signature(test)

    async def main(arguments: dict[str, Any]) -> None:
        if "broker" not in signature.parameters:
            await test(**arguments)
            return
        async with fake_broker() as broker:
            broker.create_topic("orders")
            await test(broker=broker, **arguments)

    @functools.wraps(test)
    def run(loop_factory: LoopFactory, **arguments: Any) -> None:
        run_on(loop_factory, main(arguments))

    factory = inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    others = [p for name, p in signature.parameters.items() if name != "broker"]
    run.__signature__ = inspect.Signature([factory, *others])  # type: ignore[attr-defined]
    del run.__wrapped__  # or pytest sees a coroutine function
    decorated: Callable[..., None] = pytest.mark.parametrize("loop_factory", LOOPS)(run)
    return decorated
