"""A broker for tests of check-back."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmq.broker.config import TransactionConfig
from halfmq.broker.transaction.checks import checker
from tests.support.transactions import Broker


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Broker:
    """A broker without messages, whose checks have no jitter."""
    monkeypatch.setattr(checker, "JITTER", 0.0)
    return Broker(tmp_path, config=TransactionConfig(check_max=3))
