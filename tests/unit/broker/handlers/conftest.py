"""A store for handlers, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.store.message_store import MessageStore
from tests.support.broker_doubles import Clock
from tests.support.stores import small_config


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[MessageStore]:
    opened = MessageStore(
        small_config(tmp_path / "store", commit_log_file_size=65_536), now_ms=clock
    )
    opened.open()
    yield opened
    opened.close()
