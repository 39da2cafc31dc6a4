"""Fixtures for pytest; installed with halfmq, loaded by pytest itself.

They are plain fixtures: which loop a test runs on, pytest-asyncio or anyio decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # every pytest of the environment loads this module
    from halfmq.testing import BrokerProcess, InMemoryBroker


@pytest.fixture
def halfmq_broker() -> Iterator[InMemoryBroker]:
    """A broker in the event loop of the test, started at its first use."""
    from halfmq.testing import InMemoryBroker  # noqa: PLC0415 -- as above

    broker = InMemoryBroker()
    yield broker
    broker.discard()


@pytest.fixture
def halfmq_process() -> Iterator[BrokerProcess]:
    """A broker in a process of its own, for blocking clients."""
    from halfmq.testing import broker_process  # noqa: PLC0415 -- as above

    with broker_process() as broker:
        yield broker
