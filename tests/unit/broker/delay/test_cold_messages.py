"""Delayed messages that are not in memory, or cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from halfmq.broker.delay import delivery
from halfmq.broker.delay.delivery import RETRY_AFTER_ERROR_MS, DelayService
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.topics import SCHEDULE_TOPIC
from halfmq.store.log.append_request import AppendRequest
from tests.support.broker_doubles import (
    Clock,
    FakeLog,
)
from tests.support.delays import (
    delayed,
    service,
)


class Threads:
    """Fetching threads that wait for the test; counts how often they wake the delivery."""

    def __init__(self, log: FakeLog) -> None:
        self._log = log
        self.fetches: list[tuple[NotInMemoryError, Callable[[bool], None]]] = []
        self.wakes = 0

    def fetch(self, missing: NotInMemoryError, on_fetched: Callable[[bool], None]) -> None:
        self.fetches.append((missing, on_fetched))

    def wake(self) -> None:
        self.wakes += 1

    def end(self) -> None:
        """End all fetches; those that the disk refuses have failed."""
        fetches, self.fetches = self.fetches, []
        for missing, on_fetched in fetches:
            on_fetched(not self._log.refused & {one.position for one in missing.missing})

    def deliver(self, delays: DelayService) -> None:
        """Deliver everything that can be delivered at this time."""
        while delays.tick() == 0 or self.fetches:
            self.end()


def numbered(clock: Clock, level: int, number: int) -> AppendRequest:
    return replace(delayed(clock, level), body=b"%d" % number)


def bodies(log: FakeLog) -> list[bytes]:
    return [record.body for record in log.queue("orders", 3)]


def test_the_loop_does_not_wait_for_messages_that_are_not_in_memory(tmp_path: Path) -> None:
    """They are delivered in order after a fetch; other levels continue meanwhile."""
    clock = Clock()
    log = FakeLog(clock)
    threads = Threads(log)
    delays = service(tmp_path, log, clock, fetch=threads.fetch, wake=threads.wake)
    log.append([numbered(clock, 2, n) for n in range(3)])
    clock.now += 4_000
    log.append([numbered(clock, 1, n) for n in range(3, 5)])
    clock.now += 1_000
    log.refused = {record.physical_offset for record in log.queue(SCHEDULE_TOPIC, 1)}
    before = log.cold_reads
    delays.tick()
    delays.tick()
    assert bodies(log) == [b"3", b"4"]
    assert len(threads.fetches) == 1
    assert threads.wakes == 0

    log.refused = set()
    threads.end()
    assert threads.wakes == 1
    log.append([numbered(clock, 2, 5)])
    delays.tick()
    clock.now += 5_000
    delays.tick()

    assert bodies(log) == [b"3", b"4", b"0", b"1", b"2", b"5"]
    assert log.cold_reads == before


def test_messages_that_are_evicted_after_each_fetch_are_read_from_the_disk(tmp_path: Path) -> None:
    """With very little memory a level must not wait forever."""
    clock = Clock()
    log = FakeLog(clock)
    threads = Threads(log)
    delays = service(tmp_path, log, clock, fetch=threads.fetch)
    log.append([delayed(clock, 1)])
    before = log.cold_reads
    clock.now += 1_000
    log.cold = True
    for _ in range(delivery.FETCHES_MAX):
        delays.tick()
        assert len(threads.fetches) == 1
        threads.end()
    assert log.cold_reads == before
    delays.tick()

    assert len(log.queue("orders", 3)) == 1
    assert log.cold_reads == before + 1
    assert not threads.fetches


@pytest.mark.parametrize("stops", [False, True])
def test_an_unreadable_message_delays_no_other_and_is_not_lost(tmp_path: Path, stops: bool) -> None:
    """It is retried until it can be read, also after a stop."""
    clock = Clock()
    log = FakeLog(clock)
    threads = Threads(log)
    delays = service(tmp_path, log, clock, fetch=threads.fetch)
    log.append([numbered(clock, 1, n) for n in range(5)])
    clock.now += 1_000
    bad = log.queue(SCHEDULE_TOPIC, 0)[2].physical_offset
    log.refused = {bad}
    threads.deliver(delays)
    assert bodies(log) == [b"0", b"1", b"3", b"4"]
    log.append([numbered(clock, 1, 5)])
    clock.now += RETRY_AFTER_ERROR_MS
    threads.deliver(delays)
    assert bodies(log) == [b"0", b"1", b"3", b"4", b"5"]
    assert delays.waiting == 1
    oldest = delays.oldest_waiting_offset()
    assert oldest is not None
    assert oldest <= bad

    log.refused = set()
    if stops:
        delays.persist()
        delays = service(tmp_path, log, clock, fetch=threads.fetch)
    clock.now += RETRY_AFTER_ERROR_MS
    threads.deliver(delays)

    assert set(bodies(log)) == {b"0", b"1", b"2", b"3", b"4", b"5"}
    assert bodies(log).count(b"2") == 1
    assert len(bodies(log)) == 6 or stops
    assert delays.waiting == 0
    assert delays.oldest_waiting_offset() is None


def test_the_number_of_deferred_messages_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more the level waits; all are delivered when the disk can be read again."""
    monkeypatch.setattr(delivery, "DEFERRED_MAX", 4)
    clock = Clock()
    log = FakeLog(clock)
    threads = Threads(log)
    delays = service(tmp_path, log, clock, fetch=threads.fetch)
    log.append([numbered(clock, 1, n) for n in range(10)])
    clock.now += 1_000
    log.refused = {record.physical_offset for record in log.queue(SCHEDULE_TOPIC, 0)}
    for _ in range(5):
        threads.deliver(delays)
        clock.now += RETRY_AFTER_ERROR_MS
    assert bodies(log) == []
    # Nothing public shows how many messages are deferred.
    assert len(delays._queues[0].deferred) == 4
    log.refused = set()
    threads.deliver(delays)

    assert sorted(bodies(log)) == [b"%d" % n for n in range(10)]
