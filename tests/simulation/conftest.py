"""Collect the objects of a simulated world in the test that created them."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Killed programs leave coroutines that never started; these would fail other tests.

    When one that has started is collected, its ``finally`` may begin tasks. Outside of a simulated
    loop these go to the thread's current loop, so that is one which ends with the test.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
        loop.close()
        asyncio.set_event_loop(None)
        del loop
        gc.collect()
