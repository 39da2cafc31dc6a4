"""Collect the objects of a simulated world in the test that created them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Killed programs leave coroutines that never started; these would fail other tests."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
