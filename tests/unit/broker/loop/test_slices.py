"""Background work occupies the event loop for one slice at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfmq.broker.loop import slices
from halfmq.broker.loop.slices import PeriodicWork, Slice


@pytest.fixture(autouse=True)
def _one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """End every slice after its first step."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)


def test_each_slice_takes_at_least_a_step_and_continues_the_last() -> None:
    """However long the work, some is done each time, and none twice."""
    done: list[int] = []

    def work() -> Iterator[None]:
        for number in range(3):
            done.append(number)
            yield

    steps = work()
    assert [Slice().advance(steps) for _ in range(4)] == [False, False, False, True]
    assert done == [0, 1, 2]


def test_a_round_begins_again_when_all_its_work_is_done() -> None:
    """Until then the next slice is requested at once."""
    done: list[str] = []

    def work(name: str) -> Iterator[None]:
        for number in range(2):
            done.append(f"{name}{number}")
            yield

    rounds = PeriodicWork(10.0, lambda: work("a"), lambda: work("b"))

    assert [rounds.tick() for _ in range(10)] == [0, 0, 0, 0, 10.0] * 2
    assert done == ["a0", "a1", "b0", "b1"] * 2


def test_a_round_that_failed_is_followed_by_a_whole_one() -> None:
    """The ticker gets the error, and no work is skipped."""
    failing = [True]
    done: list[int] = []

    def work() -> Iterator[None]:
        done.append(1)
        yield
        if failing:
            raise OSError(failing.pop())
        done.append(2)

    rounds = PeriodicWork(10.0, work)
    rounds.tick()
    with pytest.raises(OSError, match="True"):
        rounds.tick()
    while done[-1] != 2:
        rounds.tick()
    assert done == [1, 1, 2]
