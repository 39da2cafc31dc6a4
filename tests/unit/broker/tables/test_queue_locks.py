"""Queue locks of orderly consumers."""

from __future__ import annotations

import pytest

from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.tables.queue_locks import CLIENT_EXPIRY_MS, LOCK_EXPIRY_MS, QueueLocks
from halfmq.remoting.bodies import QueueKey
from tests.support.broker_doubles import Clock


def queue(queue_id: int) -> QueueKey:
    return QueueKey(topic="orders", broker_name="broker-a", queue_id=queue_id)


def test_a_queue_belongs_to_who_locked_it_first() -> None:
    """Two consumers of one queue would consume out of order."""
    locks = QueueLocks(now_ms=Clock())

    assert locks.lock("g", "a", [queue(0)]) == [queue(0)]
    assert locks.lock("g", "b", [queue(0), queue(1)]) == [queue(1)]
    assert locks.lock("other", "b", [queue(0)]) == [queue(0)]


def test_a_lock_must_be_renewed() -> None:
    """A consumer that died holds its queues no longer than a minute."""
    clock = Clock()
    locks = QueueLocks(now_ms=clock)
    locks.lock("g", "a", [queue(0)])
    clock.now += LOCK_EXPIRY_MS
    assert locks.lock("g", "b", [queue(0)]) == []
    locks.lock("g", "a", [queue(0)])
    clock.now += LOCK_EXPIRY_MS + 1

    assert not locks.any_held("g")
    assert locks.lock("g", "b", [queue(0)]) == [queue(0)]


def test_a_client_that_is_gone_holds_its_queues_for_half_as_long() -> None:
    """As long as it might consume by itself: it may have lost its connection only."""
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
    """A late unlock of the former owner must not take the queue from the new one."""
    locks = QueueLocks(now_ms=Clock())
    locks.lock("g", "a", [queue(0)])
    locks.unlock("g", "b", [queue(0)])
    assert locks.any_held("g")
    locks.unlock("g", "a", [queue(0), queue(1)])

    assert not locks.any_held("g")
    assert locks.lock("g", "b", [queue(0)]) == [queue(0)]


def test_void_locks_make_room() -> None:
    """The limit counts what is held, not what was."""
    clock = Clock()
    locks = QueueLocks(now_ms=clock, locks_max=2)
    locks.lock("gone", "a", [queue(0), queue(1)])
    with pytest.raises(RequestRefusedError, match="the limit is 2"):
        locks.lock("g", "a", [queue(0)])
    clock.now += LOCK_EXPIRY_MS + 1

    assert locks.lock("g", "a", [queue(0)]) == [queue(0)]
