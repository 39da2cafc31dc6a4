"""What a simulated world leaves behind is collected in the test that made it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A killed program leaves coroutines that never began; elsewhere they would be a failure."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
