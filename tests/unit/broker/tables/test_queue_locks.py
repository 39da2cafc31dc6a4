"""Queue locks of orderly consumers."""

from __future__ import annotations

import pytest

from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.tables.queue_locks import CLIENT_EXPIRY_MS, LOCK_EXPIRY_MS, QueueLocks
from halfmq.remoting.bodies import QueueKey
from tests.support.broker_doubles import Clock


def queue(queue_id: int) -> QueueKey:
    return QueueKey(topic="orders", broker_name="broker-a", queue_id=queue_id)


def test_the_first_client_that_locks_a_queue_owns_it() -> None:
    """Two consumers of one queue would consume out of order."""
    locks = QueueLocks(now_ms=Clock())

    assert locks.lock("g", "a", [queue(0)]) == [queue(0)]
    assert locks.lock("g", "b", [queue(0), queue(1)]) == [queue(1)]
    assert locks.lock("other", "b", [queue(0)]) == [queue(0)]


def test_a_lock_must_be_renewed() -> None:
    """A dead consumer holds its queues for at most a minute."""
    clock = Clock()
    locks = QueueLocks(now_ms=clock)
    locks.lock("g", "a", [queue(0)])
    clock.now += LOCK_EXPIRY_MS
    assert locks.lock("g", "b", [queue(0)]) == []
    locks.lock("g", "a", [queue(0)])
    clock.now += LOCK_EXPIRY_MS + 1

    assert not locks.any_held("g")
    assert locks.lock("g", "b", [queue(0)]) == [queue(0)]


def test_a_disconnected_client_holds_its_queues_for_half_as_long() -> None:
    """It may have lost only its connection, and continue to consume for that long."""
    clock = Clock()
    connected = {"a"}
    locks = QueueLocks(now_ms=clock, is_connected=lambda _group, client_id: client_id in connected)
    locks.lock("g", "a", [queue(0)])
    clock.now += CLIENT_EXPIRY_MS + 1
    assert locks.lock("g", "b", [queue(0)]) == []
    locks.lock("g", "a", [queue(0)])
    connected.remove("a")
    clock.now += CLIENT_EXPIRY_MS
    assert locks.lock("g", "b", [queue(0)]) == []
    clock.now += 1

    assert locks.lock("g", "b", [queue(0)]) == [queue(0)]


def test_only_the_owner_unlocks() -> None:
    """A late unlock of the previous owner must not unlock the queue of the new one."""
    locks = QueueLocks(now_ms=Clock())
    locks.lock("g", "a", [queue(0)])
    locks.unlock("g", "b", [queue(0)])
    assert locks.any_held("g")
    locks.unlock("g", "a", [queue(0), queue(1)])

    assert not locks.any_held("g")
    assert locks.lock("g", "b", [queue(0)]) == [queue(0)]


def test_expired_locks_do_not_count_towards_the_limit() -> None:
    """They are removed when the limit is reached."""
    clock = Clock()
    locks = QueueLocks(now_ms=clock, locks_max=2)
    locks.lock("gone", "a", [queue(0), queue(1)])
    with pytest.raises(RequestRefusedError, match="the limit is 2"):
        locks.lock("g", "a", [queue(0)])
    clock.now += LOCK_EXPIRY_MS + 1

    assert locks.lock("g", "a", [queue(0)]) == [queue(0)]
