"""Waiting messages that are not in memory, or cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from halfmq.broker.delay import delivery
from halfmq.broker.delay.delivery import RETRY_AFTER_ERROR_MS
from halfmq.store.files.page_cache import Missing, NotInMemoryError, waiting
from halfmq.store.format.topics import SCHEDULE_TOPIC
from tests.support.delays import Rig
from tests.support.stores import flush


class ColdRig(Rig):
    """Some records are not in memory; fetching threads wait for the test."""

    def __init__(self, root: Path) -> None:
        self.fetches: list[tuple[NotInMemoryError, Callable[[bool], None]]] = []
        self.cold: set[int] = set()  # offsets of records that must be fetched
        self.broken: set[int] = set()  # that no fetch gets
        self.stays_cold = False  # whether what was fetched is evicted at once
        self.waits = 0  # reads that waited for the disk
        super().__init__(root, fetch=lambda *fetch: self.fetches.append(fetch))

    def start(self) -> None:
        super().start()
        read = self.store.reader.record_bytes

        def record_bytes(physical_offset: int, end: int | None = None) -> bytes | None:
            if physical_offset in self.broken and waiting.is_allowed:
                raise OSError("the disk gives nothing")
            if physical_offset in self.cold | self.broken:
                if not waiting.is_allowed:
                    raise NotInMemoryError([Missing(Path("log"), physical_offset, 0)])
                self.waits += 1
            return read(physical_offset, end)

        self.store.reader.record_bytes = record_bytes  # type: ignore[method-assign]

    def end_fetches(self) -> None:
        fetches, self.fetches = self.fetches, []
        for missing, on_fetched in fetches:
            wanted = {one.position for one in missing.missing}
            if not self.stays_cold:
                self.cold -= wanted
            on_fetched(not wanted & self.broken)

    def run(self) -> None:
        while self.delays.tick() == 0 or self.fetches:
            self.end_fetches()
            flush(self.store)
        flush(self.store)


@pytest.fixture
def rig(tmp_path: Path) -> ColdRig:
    return ColdRig(tmp_path / "store")


def _offsets(rig: ColdRig) -> list[int]:
    return [one.physical_offset for one in rig.records(SCHEDULE_TOPIC)]


def test_the_loop_does_not_wait_for_messages_that_are_not_in_memory(rig: ColdRig) -> None:
    """They are delivered in order after one fetch; those after them do not overtake them."""
    for number in range(5):
        rig.delay(str(number), 1)
    rig.cold = set(_offsets(rig)[1:3])
    rig.clocks.advance(1_000)
    woken = rig.wakes
    rig.delays.tick()
    assert rig.delays.tick() == pytest.approx(1.0)
    flush(rig.store)
    assert rig.bodies() == ["0"]
    assert len(rig.fetches) == 1

    rig.end_fetches()
    assert rig.wakes == woken + 1
    rig.run()

    assert rig.bodies() == ["0", "1", "2", "3", "4"]
    assert rig.waits == 0
    rig.stop()


def test_messages_that_are_evicted_after_each_fetch_are_read_from_the_disk(rig: ColdRig) -> None:
    """With very little memory they must not wait forever."""
    rig.delay("late", 1)
    rig.cold, rig.stays_cold = set(_offsets(rig)), True
    rig.clocks.advance(1_000)
    for _ in range(delivery.FETCHES_MAX):
        rig.delays.tick()
        assert len(rig.fetches) == 1
        rig.end_fetches()
    assert rig.waits == 0
    rig.delays.tick()
    flush(rig.store)

    assert rig.waits == 1
    assert not rig.fetches
    rig.cold = set()
    assert rig.bodies() == ["late"]
    rig.stop()


@pytest.mark.parametrize("stops", [False, True])
def test_an_unreadable_message_delays_no_other_and_is_not_lost(rig: ColdRig, stops: bool) -> None:
    """It is retried until it can be read, also after a stop; no other comes twice."""
    for number in range(5):
        rig.delay(str(number), 1)
    bad = _offsets(rig)[2]
    rig.broken = {bad}
    rig.after(1_000)
    assert rig.delivered().keys() == {"0", "1", "3", "4"}
    rig.delay("5", 1)
    rig.after(RETRY_AFTER_ERROR_MS)
    assert rig.delivered().keys() == {"0", "1", "3", "4", "5"}
    assert rig.delays.metrics() == {"waiting": 1, "put_off": 1, "undeliverable": 0}
    oldest = rig.delays.oldest_waiting_offset()
    assert oldest is not None
    assert oldest <= bad

    rig.broken = set()
    if stops:
        rig.restart()
    rig.after(RETRY_AFTER_ERROR_MS)

    assert rig.delivered().keys() == {"0", "1", "2", "3", "4", "5"}
    assert rig.delays.waiting == 0
    assert rig.delays.oldest_waiting_offset() is None
    rig.stop()
