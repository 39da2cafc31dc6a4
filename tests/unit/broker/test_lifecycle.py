"""Services start bottom-up, stop top-down, and a failed start leaves nothing running."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from halfmq.broker.config_file import load_config
from halfmq.broker.loop.services import ServiceStack
from halfmq.broker.service import Broker
from halfmq.broker.store_service import StoreService
from halfmq.store.errors import StoreError, UnusableFileError
from halfmq.store.files import disk
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
    """A port in use must not leave the directory locked."""
    events: list[str] = []
    stack = ServiceStack([Part("store", events), Part("server", events, fails=True)])

    with pytest.raises(RuntimeError, match="server"):
        await stack.start()

    assert events == ["+store", "-store"]


@pytest.mark.parametrize("killed", [False, True])
async def test_a_start_that_fails_after_recovery_keeps_the_store_unclean(
    tmp_path: Path, *, killed: bool
) -> None:
    """The next start must still restore tables that were lost by a kill."""

    def refuse() -> None:
        raise OSError(errno.EIO, "the test says no")

    def opened_by(load: Sequence[Callable[[], None]]) -> StoreService:
        store = MessageStore(small_config(root), now_ms=Clock())
        return StoreService(store, root=root, load=load, before_close=[], after_close=[])

    first = MessageStore(small_config(tmp_path / "first"), now_ms=Clock())
    first.open()
    first.append([draft()])
    root = tmp_path / "first"
    if killed:
        root = tmp_path / "crashed"
        crash(tmp_path / "first", root)
    first.close()
    for _ in range(2):
        with pytest.raises(UnusableFileError, match="the test says no"):
            await opened_by([refuse]).start()

    service = opened_by([])
    await service.start()
    await service.stop()

    assert service.report is not None
    assert service.report.clean is not killed


CALLS: Final = (
    *("open_file", "pread", "pwrite", "ftruncate", "posix_fallocate", "fsync", "fdatasync"),
    *("mkdir", "replace", "unlink", "statvfs", "Map", "walk", "size_of", "entries"),
)


@pytest.mark.parametrize("call", CALLS)
async def test_a_failed_system_call_at_the_start_is_a_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Each call fails once: the broker starts without it, or reports what failed."""
    config = load_config(None, _settings(tmp_path / "store")).config
    ended = 0
    for turn in range(CALLS_MAX):
        number = ERRORS[turn % len(ERRORS)]
        failing = FailingCall(getattr(disk, call), number, turn)
        broker = Broker(config)
        with monkeypatch.context() as patched:
            patched.setattr(disk, call, failing)
            error = await _refusal(broker)
        if error is not None:
            ended += 1
            assert os.strerror(number) in str(error)
        await broker.stop()
        if not failing.failed:
            break
    print(f"{call}: {turn} calls, {ended} of which a start needs")


async def _refusal(broker: Broker) -> StoreError | None:
    try:
        await broker.start()
    except StoreError as error:
        return error
    return None


CALLS_MAX: Final = 40
"""Of one kind that fail in turn; a start makes fewer of most."""
ERRORS: Final = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO)


class FailingCall:
    """A call of the system of which one fails."""

    def __init__(self, real: Callable[..., Any], number: int, turn: int) -> None:
        self._real, self._number, self._left = real, number, turn
        self.failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left == -1:
            self.failed = True
            raise OSError(self._number, os.strerror(self._number))
        return self._real(*args, **kwargs)


def _settings(root: Path) -> list[str]:
    return [
        f"storePathRootDir={root}",
        "listenPort=0",
        "namesrvListenPort=0",
        f"mappedFileSizeCommitLog={1 << 20}",
        "mappedFileSizeConsumeQueue=20000",
        "maxHashSlotNum=1000",
        "maxIndexNum=4000",
    ]
