"""An open store with small files, for the tests of the store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.store.message_store import MessageStore
from tests.support.stores import Clock, small_config


@pytest.fixture
def clock() -> Clock:
    """Return the clock of ``store``."""
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[MessageStore]:
    """Return an open store in ``tmp_path``."""
    opened = MessageStore(small_config(tmp_path), now_ms=clock)
    opened.open()
    yield opened
    opened.close()
