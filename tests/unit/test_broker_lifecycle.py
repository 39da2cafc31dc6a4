"""Services start bottom-up, stop top-down, and a failed start leaves nothing running."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from halfmq.broker.lifecycle import ServiceStack
from halfmq.broker.store_service import StoreService
from halfmq.store.message_store import MessageStore
from tests.support.stores import Clock, crash, draft, small_config


class Part:
    """Notes its starts and stops in a shared list."""

    def __init__(self, name: str, events: list[str], *, fails: bool = False) -> None:
        self._name, self._events, self._fails = name, events, fails

    async def start(self) -> None:
        if self._fails:
            raise RuntimeError(self._name)
        self._events.append(f"+{self._name}")

    async def stop(self) -> None:
        self._events.append(f"-{self._name}")


async def test_services_stop_in_the_opposite_order() -> None:
    """The socket opens last and closes first, the store the other way round."""
    events: list[str] = []
    stack = ServiceStack([Part("store", events), Part("server", events)])

    await stack.start()
    await stack.stop()
    await stack.stop()

    assert events == ["+store", "+server", "-server", "-store"]


async def test_a_failed_start_stops_what_ran() -> None:
    """A port that is taken must not leave the directory locked."""
    events: list[str] = []
    stack = ServiceStack([Part("store", events), Part("server", events, fails=True)])

    with pytest.raises(RuntimeError, match="server"):
        await stack.start()

    assert events == ["+store", "-store"]


@pytest.mark.parametrize("killed", [False, True])
async def test_a_start_that_fails_behind_the_store_hides_no_kill(
    tmp_path: Path, *, killed: bool
) -> None:
    """The next one still has to make good what the kill took of the tables."""

    def refuse() -> None:
        raise OSError(errno.EIO, "the test says no")

    def opened_by(load: Sequence[Callable[[], None]]) -> StoreService:
        store = MessageStore(small_config(root), now_ms=Clock())
        return StoreService(store, load=load, before_close=[], after_close=[])

    first = MessageStore(small_config(tmp_path / "first"), now_ms=Clock())
    first.open()
    first.append([draft()])
    root = tmp_path / "first"
    if killed:
        root = tmp_path / "crashed"
        crash(tmp_path / "first", root)
    first.close()
    for _ in range(2):
        with pytest.raises(OSError, match="the test says no"):
            await opened_by([refuse]).start()

    service = opened_by([])
    await service.start()
    await service.stop()

    assert service.report is not None
    assert service.report.clean is not killed
