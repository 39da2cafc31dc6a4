"""Periodic work on the event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from halfmq.broker.loop import ticker as ticker_module
from halfmq.broker.loop.ticker import Ticker
from tests.support.client_loops import in_steady_time
from tests.support.loops import LOOPS, LoopFactory, run_on


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_work_may_wake_itself_and_is_scheduled_only_once(loop_factory: LoopFactory) -> None:
    """Events during its run make it run again at once, and only once."""

    async def main() -> None:
        rounds = 0
        done = asyncio.Event()

        def work() -> float:
            nonlocal rounds
            rounds += 1
            if rounds < 5:
                ticker.wake()
                ticker.wake()
                return 3_600
            done.set()
            return 3_600

        ticker = Ticker("test", work)
        await ticker.start()
        await done.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert rounds == 5

        done.clear()
        ticker.wake()
        ticker.wake()
        await done.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert rounds == 6
        await ticker.stop()
        ticker.wake()
        for _ in range(20):
            await asyncio.sleep(0)
        assert rounds == 6

    run_on(loop_factory, main())


@in_steady_time
async def test_unfinished_work_pauses_for_other_callbacks() -> None:
    """However much is left, and whoever wakes it; wakes do not extend the pause."""
    loop = asyncio.get_running_loop()
    began: list[float] = []
    done = asyncio.Event()

    def work() -> float:
        began.append(loop.time())
        if len(began) == 4:
            done.set()
            return 3_600
        ticker.wake()
        loop.call_soon(ticker.wake)
        return 0

    ticker = Ticker("test", work, pause=0.02)
    await ticker.start()
    await done.wait()
    await ticker.stop()
    pauses = [after - before for before, after in itertools.pairwise(began)]
    assert min(pauses) >= 0.019


class ManualLoop:
    """A loop whose time the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> Mock:
        self.calls.append((self.now + delay, call))
        return Mock()

    def run_next(self, *, late: float) -> float:
        """Run the last planned call, late by so many seconds; return when it was due."""
        due, call = self.calls.pop()
        self.now = due + late
        call()
        return due


@pytest.mark.parametrize(
    ("late", "pause"), [(0.0, 0.004), (0.002, 0.012), (0.010, 0.044), (5.0, 0.104)]
)
async def test_a_loop_that_is_late_gets_longer_pauses(
    late: float, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand due checks then do not delay the sends that keep the loop busy."""
    loop = ManualLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    ticker = Ticker("test", lambda: 0.0, pause=0.004)
    await ticker.start()
    monkeypatch.undo()

    loop.run_next(late=late)
    began = loop.now

    assert loop.run_next(late=0.0) - began == pytest.approx(pause)


async def test_work_goes_on_without_a_pause_in_a_quiet_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop is quiet if no request has arrived for a while; after one, pauses begin again."""
    loop, served, slices = ManualLoop(), [0], list[float]()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)

    def work() -> float:
        slices.append(loop.now)
        loop.now += 0.0005
        return 0.0

    ticker = Ticker("test", work, pause=0.004, traffic=lambda: served[0])
    await ticker.start()
    monkeypatch.undo()
    quiet_s = ticker_module.QUIET_S
    while loop.now < 100.0 + 3 * quiet_s:
        if loop.now < 100.0 + quiet_s:
            served[0] += 1
        loop.run_next(late=0.0)
    steps = [after - before for before, after in itertools.pairwise(slices)]
    paused = [step for step in steps if step >= 0.004]
    assert steps[: len(paused)] == paused
    assert sum(paused) == pytest.approx(2 * quiet_s, abs=0.01)
    assert steps[len(paused) :]
    assert max(steps[len(paused) :]) == pytest.approx(0.0005)

    served[0] += 1
    before, began = len(slices), loop.now
    loop.run_next(late=0.0)
    assert len(slices) == before
    assert loop.run_next(late=0.0) - began == pytest.approx(0.004)
    assert len(slices) == before + 1

    served[0] += 1  # in the midst of the pause
    began = loop.now
    loop.run_next(late=0.0)
    assert slices[-1] - began == pytest.approx(0.004)


async def test_work_that_fails_is_logged_and_runs_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One defect must not end housekeeping."""
    monkeypatch.setattr(ticker_module, "RETRY_AFTER_ERROR_S", 0.0)
    done = asyncio.Event()
    fails = [True]

    def work() -> float:
        if fails.pop() if fails else False:
            raise ZeroDivisionError
        done.set()
        return 3_600

    ticker = Ticker("test", work)
    await ticker.start()
    await done.wait()
    await ticker.stop()
    assert "event=tick_failed task=test" in caplog.text
