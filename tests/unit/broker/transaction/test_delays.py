"""Delivery after a delay from the commit: the decision takes effect at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmq.broker.transaction.errors import DecidedOtherwiseError
from halfmq.broker.transaction.state.state_machine import TransactionEvent
from halfmq.store.format.topics import TIMER_TOPIC
from halfmq.store.log.append_request import AppendResult
from tests.support.transactions import Broker


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    """A broker without messages, that remembers one decision."""
    return Broker(tmp_path, decided=1)


def _committed(broker: Broker, delay_ms: int) -> AppendResult:
    half = broker.prepare(TRANSACTION_DELAY_MS=str(delay_ms))
    broker.wait(2_000)  # the local transaction takes its time, and none of the delay
    broker.end(half, TransactionEvent.COMMIT)
    return half


def test_a_rollback_of_a_delayed_message_delivers_nothing(broker: Broker) -> None:
    """Nothing is stored in the timer topic."""
    half = broker.prepare(TRANSACTION_DELAY_MS="7000")
    broker.end(half, TransactionEvent.ROLLBACK)

    assert broker.records_of(TIMER_TOPIC) == broker.records_of("orders") == []


@pytest.mark.parametrize("restarted", [False, True])
def test_a_delayed_decision_is_found_again(broker: Broker, restarted: bool) -> None:
    """In memory, in the log after a crash, and in the index when it has left the cache."""
    half = _committed(broker, 60_000)
    (final,) = broker.finals_of(half)
    broker.log.flush()
    for _ in range(4):
        broker.end(broker.prepare(), TransactionEvent.COMMIT)
        if restarted:
            broker.log.flush()
            broker.restart()
        end = broker.log.write_offset

        broker.end(half, TransactionEvent.COMMIT)
        with pytest.raises(DecidedOtherwiseError):
            broker.end(half, TransactionEvent.ROLLBACK)

        assert broker.log.write_offset == end
    assert broker.finals_of(half) == [final]


def test_a_forgotten_decision_is_found_when_the_clock_was_set_back(broker: Broker) -> None:
    """Its time in the index is in the future."""
    half = broker.prepare()
    broker.end(half, TransactionEvent.COMMIT)
    broker.log.flush()
    broker.clock.step(-10 * 86_400_000)
    for _ in range(4):
        broker.end(broker.prepare(), TransactionEvent.COMMIT)

    with pytest.raises(DecidedOtherwiseError):
        broker.end(half, TransactionEvent.ROLLBACK)
