"""The timetable of checks: entries in time order, and sweeps of stale ones."""

from __future__ import annotations

import gc

from halfmq.broker.transaction.checks import timetable as timetable_module
from halfmq.broker.transaction.checks.timetable import BUCKET_MS, Timetable
from tests.support.broker_doubles import START_MS


def test_a_timetable_returns_everything_once_and_never_early() -> None:
    """Due times come in any order, also in the past."""
    timetable = Timetable()
    due = {offset: START_MS + (offset * 7_919) % 1_000 for offset in range(500)}
    for offset, due_ms in due.items():
        timetable.add(due_ms, offset)
    seen: list[int] = []
    for now_ms in range(START_MS, START_MS + 1_000 + BUCKET_MS + 1):
        while found := timetable.pop_due(now_ms):
            number, offsets = found
            for offset in offsets:
                assert due[offset] <= number * BUCKET_MS <= now_ms <= due[offset] + BUCKET_MS
            seen += offsets
    assert sorted(seen) == sorted(due)
    assert timetable.next_due_ms is None


def test_garbage_collection_does_not_visit_the_timetable() -> None:
    """With a million undecided it would repeatedly stop the broker for 20 ms or more."""
    timetable = Timetable()
    for offset in range(10_000):
        timetable.add(START_MS + offset % 3 * BUCKET_MS, offset)

    walked: list[object] = [timetable]
    for found in walked:
        walked += gc.get_referents(found) if not isinstance(found, type) else []
    assert len(walked) < 100


def test_a_sweep_drops_stale_entries_and_no_others() -> None:
    """In steps, between which time passes and entries are added."""
    timetable = Timetable()
    planned: dict[int, int] = {}
    for offset in range(3_000):
        planned[offset] = timetable.add(START_MS + (offset * 7_919) % 5_000, offset)
    meant = set(range(0, 3_000, 7))

    def is_meant(offset: int, number: int) -> bool:
        return offset in meant and planned[offset] == number

    seen: list[int] = []
    sweep = timetable.sweep(is_meant)
    for now_ms in range(START_MS, START_MS + 6_000, 100):
        for _ in range(3):
            next(sweep, None)
        while found := timetable.pop_due(now_ms):
            seen += [offset for offset in found[1] if is_meant(offset, found[0])]
        if now_ms % 300 == 0:
            meant.add(now_ms)
            planned[now_ms] = timetable.add(now_ms + 60, now_ms)
    assert sorted(seen) == sorted(meant)
    assert (timetable.size, timetable.next_due_ms) == (0, None)


def test_a_step_of_a_sweep_is_short_however_many_are_due_at_once() -> None:
    """After a restart all undecided transactions may be due at the same time."""
    timetable = Timetable()
    count = 10 * timetable_module.ENTRIES_PER_STEP
    for offset in range(count):
        number = timetable.add(START_MS, offset)
    looked: list[int] = []

    def is_meant(offset: int, _number: int) -> bool:
        looked.append(offset)
        return offset % 2 == 0

    steps = timetable.sweep(is_meant)
    for _ in range(10):
        before = len(looked)
        next(steps)
        assert len(looked) - before <= timetable_module.ENTRIES_PER_STEP
    assert timetable.add(START_MS, count) == number  # added during the sweep
    for _ in steps:
        pass

    assert timetable.size == count // 2 + 1
    left = timetable.pop_due(START_MS + BUCKET_MS)
    assert left is not None
    assert (left.number, list(left.offsets)) == (number, list(range(0, count + 1, 2)))
