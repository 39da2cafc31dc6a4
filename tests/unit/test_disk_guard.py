"""The looks at the disk, and what follows from them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.broker.config import DiskConfig
from halfmq.broker.disk_guard import LOOK_CLOSELY_S, LOOK_S, TOLD_EVERY_S, DiskGuard, decides
from halfmq.broker.disk_stages import Stage
from halfmq.broker.store_service import ObservedStore
from halfmq.store import disk
from halfmq.store.errors import DiskFullError
from halfmq.store.format.topics import OP_TOPIC
from halfmq.store.message_store import MessageStore
from halfmq.store.space import RESERVE_NAME, Space, SpaceReserve, reserve_path, space_of
from tests.support.stores import Clock, draft, flush, small_config

MIB = 1 << 20
SIZE = 100 * MIB  # stages below 25, 15 and 10 MiB; a reserve of 5 MiB


class FakeReserve(SpaceReserve):
    """A reserve that takes from a number."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = False

    def hold(self, size: int) -> bool:
        if self.refuses:
            return False
        self.held = size
        return True

    def release(self, size: int) -> int:
        given = min(size, self.held)
        self.held -= given
        return given


class FakeGate:
    """Notes how messages are to be taken."""

    def __init__(self) -> None:
        self.refused = 3
        self.slowed = 4
        self.state = "open"

    def open(self) -> None:
        self.state = "open"

    def slow(self, rate: int) -> None:
        self.state = f"slow {rate}"

    def close(self, reason: str) -> None:
        self.state = f"closed {reason}"


class Guarded:
    """A guard and all it sees."""

    def __init__(self) -> None:
        self.size = SIZE
        self.free = 90 * MIB
        self.ahead = 0
        self.now = 0.0
        self.unknown = False
        self.reserve = FakeReserve()
        self.gate = FakeGate()
        self.guard = DiskGuard(
            DiskConfig(),
            self.reserve,
            self.gate,
            path=Path("/data/commitlog"),
            reserved_ahead=lambda: self.ahead,
            space_of=self.space_of,
            clock=lambda: self.now,
        )

    def space_of(self, _path: Path) -> Space:
        if self.unknown:
            raise OSError(errno.EIO, "no idea")
        return Space(self.free, self.size)

    def only_decisions(self) -> bool:
        return self.guard.only_decisions

    def is_scarce(self) -> bool:
        return self.guard.is_scarce

    async def look(self, free: int) -> Stage:
        """Have this much free, apart from the reserve, and let a look be done."""
        self.free = free
        self.now += 1
        self.guard.tick()
        await self.guard.stop()  # waits for the reserve
        return self.guard.stage


async def test_stages_follow_what_is_left() -> None:
    """And are taken back one by one."""
    one = Guarded()

    assert await one.look(90 * MIB) is Stage.PLENTY
    assert one.gate.state == "open"
    assert one.reserve.held == 0
    assert await one.look(28 * MIB) is Stage.WARN  # 5 of them are for the reserve
    assert one.is_scarce()
    assert one.reserve.held == 5 * MIB
    assert await one.look(14 * MIB) is Stage.SLOW
    assert one.gate.state == f"slow {64 << 10}"
    assert one.guard.tick() == LOOK_CLOSELY_S
    assert await one.look(9 * MIB) is Stage.REFUSE
    assert one.gate.state.startswith(f"closed [DISK]{9 * MIB} bytes are left")
    assert await one.look(13 * MIB) is Stage.SLOW
    assert await one.look(20 * MIB) is Stage.WARN
    assert one.gate.state == "open"
    assert await one.look(50 * MIB) is Stage.PLENTY
    assert not one.is_scarce()
    assert one.reserve.held == 5 * MIB  # it is kept: a disk that was scarce may be so again


async def test_a_large_disk_with_room_is_looked_at_rarely() -> None:
    """A small one can be full before the next look."""
    one = Guarded()
    assert one.guard.tick() == LOOK_CLOSELY_S
    one.size = 1 << 40
    one.free = one.size // 2
    assert one.guard.tick() == LOOK_S
    one.free = one.size // 20
    assert one.guard.tick() == LOOK_CLOSELY_S


async def test_what_the_log_has_reserved_counts_as_left() -> None:
    """A new file of a gigabyte changes nothing for whoever sends."""
    one = Guarded()
    one.ahead = 40 * MIB

    assert await one.look(30 * MIB) is Stage.PLENTY
    one.ahead = 15 * MIB
    assert await one.look(30 * MIB) is Stage.PLENTY
    one.ahead = 0
    assert await one.look(28 * MIB) is Stage.WARN


async def test_decisions_get_the_reserve_piece_by_piece() -> None:
    """Nobody else does, until there is room for all of it again."""
    one = Guarded()
    await one.look(9 * MIB)
    commit, message = draft(sys_flag=0x8), draft()

    assert not one.guard.make_room([message])
    assert one.reserve.held == 5 * MIB
    assert not one.only_decisions()
    assert one.guard.make_room([commit])
    assert one.only_decisions()
    assert await one.look(4 * MIB) is Stage.RESERVE
    assert one.reserve.held == 3 * MIB
    assert one.gate.state.startswith("closed")
    assert one.guard.make_room([commit])
    assert one.guard.make_room([commit])
    assert one.reserve.held == 0
    assert not one.guard.make_room([commit])

    assert await one.look(6 * MIB) is Stage.RESERVE  # room for the reserve, and for nothing else
    assert one.reserve.held == 0
    await one.look(20 * MIB)
    assert one.reserve.held == 5 * MIB
    assert not one.only_decisions()
    assert await one.look(10 * MIB + 1) is Stage.REFUSE
    assert await one.look(20 * MIB) is Stage.WARN
    assert one.gate.state == "open"


async def test_next_to_nothing_free_is_as_good_as_full() -> None:
    """Tables and queues need some; one piece of the reserve is for them."""
    one = Guarded()
    await one.look(9 * MIB)

    assert await one.look(MIB) is Stage.RESERVE
    assert one.reserve.held == 3 * MIB
    await one.look(0)
    assert one.reserve.held == 3 * MIB  # whoever fills the disk would only take more


async def test_a_message_that_finds_no_space_closes_the_gate() -> None:
    """Others may fill a disk between two looks."""
    one = Guarded()
    await one.look(90 * MIB)

    assert not one.guard.make_room([draft(), draft(sys_flag=0x8)])
    assert one.guard.stage is Stage.REFUSE
    assert one.gate.state.startswith("closed")
    assert await one.look(90 * MIB) is Stage.PLENTY


async def test_a_reserve_that_cannot_be_held_is_tried_again() -> None:
    """Without it decisions are on their own, but messages are refused earlier."""
    one = Guarded()
    one.reserve.refuses = True
    assert await one.look(28 * MIB) is Stage.WARN
    assert one.reserve.held == 0
    assert await one.look(14 * MIB) is Stage.REFUSE
    one.reserve.refuses = False
    await one.look(14 * MIB)
    assert one.reserve.held == 5 * MIB


async def test_each_stage_is_told_with_a_forecast(caplog: pytest.LogCaptureFixture) -> None:
    """When it begins, once an hour while it goes on, and when it ends."""
    one = Guarded()
    caplog.set_level("INFO", "halfmq")
    for second in range(100):
        await one.look(26 * MIB - second * MIB // 30)
    assert caplog.text.count("event=disk_warn") == 1
    one.now += TOLD_EVERY_S
    await one.look(22 * MIB)
    assert caplog.text.count("event=disk_warn") == 2
    await one.look(90 * MIB)
    assert caplog.text.count("event=disk_plenty") == 1
    assert [record.levelname for record in caplog.records][-1] == "INFO"
    metrics = one.guard.metrics()
    assert metrics["stage"] == 0
    assert metrics["left_bytes"] == 90 * MIB
    assert metrics["seconds_until_refusal"] == -1
    assert (metrics["messages_refused"], metrics["messages_slowed"]) == (3, 4)
    assert all(isinstance(value, int) for value in metrics.values())


async def test_a_disk_that_cannot_be_asked_changes_nothing() -> None:
    """The stage stays what it was."""
    one = Guarded()
    await one.look(14 * MIB)
    one.unknown = True
    assert await one.look(90 * MIB) is Stage.REFUSE


def test_decisions_are_known_by_their_flag() -> None:
    """Commits, rollbacks, and the op messages that tell RocketMQ of them."""
    assert decides([draft(sys_flag=0x8), draft(sys_flag=0xC), draft(OP_TOPIC)])
    assert not decides([draft(sys_flag=0x4)])
    assert not decides([draft(sys_flag=0x8), draft()])


# --- the reserve on a disk


def test_the_reserve_has_blocks(tmp_path: Path) -> None:
    """Space that is only promised could be taken by others."""
    reserve = SpaceReserve()
    reserve.open(tmp_path / RESERVE_NAME)
    status = tmp_path / RESERVE_NAME

    assert reserve.hold(4 * MIB)
    assert status.stat().st_blocks * 512 >= 4 * MIB
    assert reserve.hold(MIB)
    assert reserve.held == 4 * MIB
    assert reserve.release(MIB) == MIB
    assert status.stat().st_size == 3 * MIB
    assert status.stat().st_blocks * 512 < 4 * MIB
    assert reserve.hold(4 * MIB)
    assert reserve.release(100 * MIB) == 4 * MIB
    assert reserve.release(1) == 0
    assert status.stat().st_blocks == 0


def test_a_reserve_for_which_there_is_no_room_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the part that fitted."""
    reserve = SpaceReserve()
    reserve.open(tmp_path / RESERVE_NAME)
    assert reserve.hold(MIB)
    real = os.posix_fallocate

    def half(fd: int, offset: int, length: int) -> None:
        real(fd, offset, length // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "posix_fallocate", half)
    assert not reserve.hold(4 * MIB)
    assert reserve.held == MIB
    assert (tmp_path / RESERVE_NAME).stat().st_blocks * 512 < 2 * MIB


def test_a_start_gives_the_reserve_back(tmp_path: Path) -> None:
    """Recovery may need the space."""
    for _ in range(2):
        store = MessageStore(small_config(tmp_path), now_ms=Clock())
        store.open()
        assert store.reserve.held == 0
        assert not (tmp_path / RESERVE_NAME).exists()
        assert store.reserve.hold(MIB)
        store.close()
        assert (tmp_path / RESERVE_NAME).stat().st_size == MIB


def test_the_reserve_lies_on_the_disk_of_the_log(tmp_path: Path) -> None:
    """In a directory of its own there: a file beside those of the log would stop RocketMQ."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is only one file system to be used here")
    log = shared / f"halfmq-{os.getpid()}"
    log.mkdir()
    try:
        config = small_config(tmp_path, commit_log_path=log)
        assert reserve_path(config) == log / "halfmq" / RESERVE_NAME
        store = MessageStore(config, now_ms=Clock())
        store.open()
        assert store.reserve.hold(MIB)
        store.close()
        store = MessageStore(config, now_ms=Clock())
        store.open()
        store.close()
    finally:
        for path in sorted(log.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        log.rmdir()


def test_space_is_counted_as_df_does(tmp_path: Path) -> None:
    """What is kept for the administrator is neither free nor in use."""
    space = space_of(tmp_path)
    found = os.statvfs(tmp_path)

    assert 0 < space.free <= space.size
    assert space.size <= found.f_blocks * found.f_frsize


# --- the store on a full disk


class FullDisk:
    """Space in numbers: what files reserve is taken off, what the reserve frees is added."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1 << 40
        self._real = os.posix_fallocate
        monkeypatch.setattr(disk, "posix_fallocate", self.fallocate)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        lacking = max(offset + length - os.fstat(fd).st_blocks * 512, 0)
        if lacking > self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= lacking
        self._real(fd, offset, length)


class Room:
    """Gives pieces of space to decisions."""

    def __init__(self, disk: FullDisk, pieces: int) -> None:
        self.only_decisions: bool = False
        self._disk = disk
        self._pieces = pieces

    def make_room(self, group: object) -> bool:
        if not decides(group):  # type: ignore[arg-type]
            return False
        self.only_decisions = True
        if not self._pieces:
            return False
        self._pieces -= 1
        self._disk.left += 10_000
        return True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObservedStore]:
    store = ObservedStore(
        small_config(tmp_path),
        now_ms=Clock(),
        on_durable=lambda _offset: None,
        on_failure=lambda _error: None,
        on_append=lambda _group: None,
    )
    store.open()
    yield store
    store.close()


def test_a_full_disk_still_takes_decisions(
    store: ObservedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many pieces of the reserve as it takes; nothing else may use them."""
    store.append([draft()])
    flush(store)
    assert store._janitor is not None
    store._janitor.stop()
    disk = FullDisk(monkeypatch)
    disk.left = 0
    store.room = room = Room(disk, pieces=20)
    big = bytes(7_000)

    with pytest.raises(DiskFullError):
        store.append([draft(body=big) for _ in range(10)])
    assert [room.only_decisions] == [False]
    end = store.write_offset
    store.append([draft("U", body=big, sys_flag=0x8) for _ in range(3)])
    assert store.write_offset > end
    assert room.only_decisions
    with pytest.raises(DiskFullError, match="kept for decisions"):
        store.append([draft(body=b"small")])
    with pytest.raises(DiskFullError):
        store.append([draft("U", body=big, sys_flag=0x8) for _ in range(100)])
    disk.left = 1 << 40
    room.only_decisions = False
    store.append([draft(body=big) for _ in range(10)])
    flush(store)
