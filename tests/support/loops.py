"""Runs a coroutine on the loops the broker may run on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

LOOPS: list[Any] = [
    pytest.param(asyncio.new_event_loop, id="asyncio"),
    pytest.param(uvloop.new_event_loop, id="uvloop"),
]
"""Parameters for `@pytest.mark.parametrize("loop_factory", LOOPS)`."""

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run_on(loop_factory: LoopFactory, main: Coroutine[Any, Any, None]) -> None:
    """Run `main` on a fresh loop and close it."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main)
