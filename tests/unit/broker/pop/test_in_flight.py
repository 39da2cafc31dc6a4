"""The table of messages in flight, against a plain model; and what a message in flight costs."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfmq.broker.pop.in_flight import CHUNK, InFlight, Lapsed, PopCheckpoint, PopQueue

QUEUES = [PopQueue(group, "orders", queue_id) for group in "gh" for queue_id in (0, 1)]


def checkpoint(due_ms: int, start: int, span: int, *, record: int = 0) -> PopCheckpoint:
    return PopCheckpoint(due_ms, 0, 1_700_000_000_000 + record, 60_000, 3, record, start, span)


class Model(RuleBasedStateMachine):
    """Adds, acknowledges, and lets time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.table = InFlight()
        self.model: dict[tuple[PopQueue, int], PopCheckpoint] = {}
        self.now = 0
        self.records = 0

    @rule(
        queue=st.sampled_from(QUEUES),
        offsets=st.sets(st.integers(0, 40), min_size=1),
        wait=st.integers(0, 50),
        before=st.integers(0, 3),
    )
    def pop(self, queue: PopQueue, offsets: set[int], wait: int, before: int) -> None:
        start = max(min(offsets) - before, 0)
        self.records += CHUNK // 3
        made = checkpoint(self.now + wait, start, max(offsets) - start + 1, record=self.records)
        self.table.add(queue, made, sorted(offsets))
        self.model |= {(queue, offset): made for offset in offsets}

    @rule(queue=st.sampled_from(QUEUES), offset=st.integers(0, 40))
    def acknowledge(self, queue: PopQueue, offset: int) -> None:
        assert self.table.remove(queue, offset) is (
            self.model.pop((queue, offset), None) is not None
        )

    @rule(passed=st.integers(0, 40))
    def wait(self, passed: int) -> None:
        self.now += passed
        due: list[Lapsed] = []
        while (one := self.table.take_due(self.now)) is not None:
            due.append(one)
        taken = {(one.queue, offset): one.checkpoint for one in due for offset in one.offsets}
        expected = {key: one for key, one in self.model.items() if one.due_ms <= self.now}
        assert taken.keys() == expected.keys()
        assert sum(len(one.offsets) for one in due) == len(taken)
        self.model = {key: one for key, one in self.model.items() if key not in taken}

    @invariant()
    def holds(self) -> None:
        assert self.table.count == len(self.model)
        for group in "gh":
            assert self.table.of_group(group) == sum(key[0].group == group for key in self.model)
        chunks = [one.revive_offset // CHUNK for one in self.model.values()]
        assert self.table.first_chunk(3) == min(chunks, default=None)
        for queue, offset in self.model:
            found = self.table.get(queue, offset)
            expected = self.model[queue, offset]
            assert found is not None
            assert found._replace(number=0) == expected
        soonest = self.table.next_due_ms()
        assert all(soonest is not None and soonest <= one.due_ms for one in self.model.values())


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("batch", [1, 32])
def test_a_message_in_flight_takes_at_most_200_bytes(batch: int) -> None:
    """Popped one by one, or 32 at a time."""
    count = 40_000
    table = InFlight()
    tracemalloc.start()
    try:
        for start in range(10**6, 10**6 + count, batch):
            one = checkpoint(10**9 + start, start, batch, record=start)
            table.add(QUEUES[0], one, range(start, start + batch))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table.count == count
    assert taken / count <= 200


def test_acknowledged_checkpoints_are_forgotten_before_they_are_due() -> None:
    """Otherwise a long invisible time would keep all of them in memory."""
    table = InFlight()
    tracemalloc.start()
    try:
        for start in range(20_000):
            table.add(QUEUES[0], checkpoint(10**9, start, 1, record=start), [start])
            table.remove(QUEUES[0], start)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table.count == 0
    assert taken < 20_000 * 20


def test_queues_with_nothing_in_flight_are_forgotten() -> None:
    """A peer may pop from millions of them, one after the other."""
    table = InFlight()
    tracemalloc.start()
    try:
        for number in range(5_000):
            queue = PopQueue(f"group-{number}", "orders", 0)
            table.add(queue, checkpoint(10**9 + number, 0, 2, record=number), [0, 1])
            if number % 2:
                table.remove(queue, 0)
                table.remove(queue, 1)
            else:
                assert [one.offsets for one in table.take_queue(queue)] == [[0, 1]]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table.count == 0
    assert table.take_due(10**12) is None
    assert taken < 5_000 * 40
