"""Halves read by threads: the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from halfmq.broker.transaction.cold_halves import ColdHalves, read_half
from halfmq.broker.transaction.half import StoredHalf
from tests.support.loops import LOOPS, LoopFactory, run_on
from tests.support.patience import PATIENCE_S
from tests.support.transactions import Broker, Connected, message


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    """A broker without messages."""
    return Broker(tmp_path)


@pytest.mark.parametrize("size", [1, 1_700, 1_800, 5_000, 100_000])
def test_a_half_is_read_whole_whatever_its_size(broker: Broker, size: int) -> None:
    """Its size is not known before."""
    body = bytes(size)
    (half,) = broker.service.prepare_group([(message(body=body), "K" * 32)], "pg", Connected())
    found = read_half(broker.log.read_cold, half.physical_offset)
    assert found is not None
    assert found.body == body


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_the_loop_goes_on_while_the_disk_is_slow(tmp_path: Path, loop_factory: LoopFactory) -> None:
    """A page fault in the loop would stop every connection."""
    broker = Broker(tmp_path)
    half = broker.prepare()

    async def main() -> None:
        may_end = threading.Event()
        found: list[StoredHalf | None] = []
        came = asyncio.Event()

        def slow(ranges: Iterable[tuple[int, int]]) -> bytes:
            assert may_end.wait(PATIENCE_S)
            return broker.log.read_cold(ranges)

        def on_read(one: StoredHalf | None) -> None:
            assert threading.current_thread() is threading.main_thread()
            found.append(one)
            came.set()

        halves = ColdHalves(slow)
        await halves.start()
        halves.read(half.physical_offset, on_read)
        await asyncio.sleep(0)
        assert not found
        may_end.set()
        await came.wait()
        await halves.stop()
        assert found[0] is not None
        assert found[0].physical_offset == half.physical_offset

    run_on(loop_factory, main())


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), OSError(5, "I/O")])
async def test_what_cannot_be_read_is_told(error: Exception) -> None:
    """Its file was deleted, or the disk refuses it."""

    def fails(_ranges: Iterable[tuple[int, int]]) -> bytes:
        raise error

    found: asyncio.Queue[StoredHalf | None] = asyncio.Queue()
    halves = ColdHalves(fails)
    halves.read(0, found.put_nowait)
    assert await found.get() is None
    await halves.stop()
