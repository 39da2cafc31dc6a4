"""How tests wait, and for how long at most.

A test states what happens, and in which order; never how long it took. A busy machine stops any
process for seconds, so a test waits for what shall happen, with this guard against waiting for
ever, and hands in the clock, or a time limit that cannot pass, where time is what it is about.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 120.0
"""Seconds until a test gives up. Nothing takes as long; faulthandler's dump comes later still."""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return when it is so, seen from another process; fail with ``what`` if it never is."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


async def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> float:
    """Wait until it is so; return the seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + patience_s, "nothing happened"
        await asyncio.sleep(0.02)
    return time.monotonic() - began
