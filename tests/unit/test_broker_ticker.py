"""Work that comes back by itself."""

from __future__ import annotations

import asyncio

import pytest

from halfmq.broker import ticker as ticker_module
from halfmq.broker.ticker import Ticker
from tests.support.loops import LOOPS, LoopFactory, run_on


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_work_may_hurry_itself_and_stays_one_chain(loop_factory: LoopFactory) -> None:
    """News that come while it works make it come back at once, and only once."""

    async def main() -> None:
        rounds = 0
        done = asyncio.Event()

        def work() -> float:
            nonlocal rounds
            rounds += 1
            if rounds < 5:
                ticker.hurry()
                ticker.hurry()
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
        ticker.hurry()
        ticker.hurry()
        await done.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert rounds == 6
        await ticker.stop()
        ticker.hurry()
        for _ in range(20):
            await asyncio.sleep(0)
        assert rounds == 6

    run_on(loop_factory, main())


async def test_work_that_fails_is_told_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One defect must not end housekeeping for good."""
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
