"""The simulated disk keeps what was synced, and promises nothing else."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmq.broker.config import BrokerConfig, NetworkConfig, StoreSettings
from halfmq.broker.service import Broker
from halfmq.broker.store_service import TABLES_TICK_S
from halfmq.broker.tables.table_file import TableFile
from halfmq.store.config import FlushMode
from halfmq.store.files import disk as door
from halfmq.store.files.json_table import save_table
from halfmq.store.files.mapped_file import make_directory
from halfmq.store.format.queue_entry import ENTRY_SIZE
from halfmq.store.message_store import MessageStore
from tests.support.broker_parts import tables_of
from tests.support.stores import draft, small_config
from tests.support.tables import load_table

from .disk import PAGE, Disk
from .loop import Killed, Process, SimulatedWorker, SimulationLoop
from .network import Network
from .patches import installed


class Machine:
    """A disk, and a process that uses it."""

    def __init__(self, base: Path) -> None:
        self.loop = SimulationLoop(random.Random(1))
        Network(self.loop)
        self.disk = Disk(self.loop, random.Random(2), base)
        self.process = self.started()

    def started(self) -> Process:
        process = Process("process", "10.0.0.1", self.loop)
        process.disk = self.disk
        return process

    def does(self, work: Callable[[], object]) -> None:
        """Run a call in the process."""
        self.process.call_at(self.loop.now, work)
        self.loop.run_for(0.001)

    def worker(
        self, _name: str, work: Callable[[bool], float | None], pause: float
    ) -> SimulatedWorker:
        """Make the helper threads of a store."""
        return SimulatedWorker(self.loop, self.process, work, pause)

    def kill(self) -> None:
        self.loop.mark_dead(self.process)
        self.disk.process_killed()
        self.disk.release(self.process)
        self.process = self.started()

    def power_cut(self) -> None:
        self.loop.mark_dead(self.process)
        self.disk.power_cut(worst=True)
        self.disk.release(self.process)
        self.process = self.started()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    with installed(machine.loop, machine.disk, random.Random(3)):
        yield machine
    assert machine.loop.failures == []


def opened(machine: Machine, **changes: Any) -> MessageStore:
    """Open the store on the disk."""
    store = MessageStore(
        small_config(machine.disk.root, **changes),
        now_ms=lambda: int(machine.loop.now * 1_000),
        worker=machine.worker,
    )
    machine.does(store.open)
    return store


def _write(path: Path, content: bytes) -> int:
    fd = door.open_file(path, door.CREATE, door.MODE)
    door.pwrite(fd, content, 0)
    return fd


def test_a_power_cut_removes_what_was_not_synced(machine: Machine) -> None:
    """Content needs a sync of its file, a name one of its directory."""

    def work() -> None:
        root = machine.disk.root
        fd = _write(root / "synced", b"first")
        door.fsync(fd)
        door.pwrite(fd, b"later", 0)
        _write(root / "content-only", b"x")
        door.fsync(_write(root / "nameless", b"x"))
        door.sync_directory(root)
        door.replace(root / "synced", root / "renamed")
        door.fsync(_write(root / "nameless-too", b"x"))

    machine.does(work)
    machine.power_cut()

    root = machine.disk.root
    assert (root / "synced").read_bytes() == b"first"
    assert (root / "content-only").read_bytes() in {b"", b"\0"}
    assert (root / "nameless").read_bytes() == b"x"
    assert not (root / "renamed").exists()
    assert not (root / "nameless-too").exists()


def test_a_saved_table_survives_a_power_cut(machine: Machine) -> None:
    """The store's way of replacing a table loses neither the old one nor the new one."""

    def work(number: int) -> None:
        directory = machine.disk.root / "config"
        make_directory(directory)
        save_table(directory / "t.json", {"number": number})

    for number in range(3):
        machine.does(lambda: work(number))  # noqa: B023 -- called before the next number
        machine.power_cut()
        assert load_table(machine.disk.root / "config" / "t.json") == {"number": number}


def test_a_dead_process_changes_nothing(machine: Machine) -> None:
    """It dies during a write, and its exception handlers have no effect."""
    path = machine.disk.root / "file"

    def work() -> None:
        fd = _write(path, b"one")
        machine.disk.die_at_write = machine.disk.writes + 1
        machine.disk.on_write_of_death = lambda: machine.loop.mark_dead(machine.process)
        try:
            door.pwrite(fd, b"two", 0)
        except BaseException:
            door.ftruncate(fd, 0)
            raise

    machine.does(work)

    assert machine.process.dead
    assert path.read_bytes() in {b"one", b"two"}
    machine.loop.process = machine.process
    with pytest.raises(Killed):
        door.unlink(path)
    machine.loop.process = None


def test_a_failed_sync_leaves_pages_that_no_later_one_writes(machine: Machine) -> None:
    """The kernel marks them as clean: they can be read until the power fails."""
    size = 100 * PAGE

    def work() -> None:
        fd = _write(machine.disk.root / "file", bytes(size))
        door.fsync(fd)
        door.sync_directory(machine.disk.root)
        door.pwrite(fd, b"x" * size, 0)
        machine.disk.fail_at_sync = machine.disk.syncs + 1
        with pytest.raises(OSError, match="Input/output"):
            door.fdatasync(fd)
        door.pwrite(fd, b"y", 0)
        door.fdatasync(fd)
        assert door.pread(fd, size, 0) == b"y" + b"x" * (size - 1)

    machine.does(work)
    machine.power_cut()

    left = (machine.disk.root / "file").read_bytes()
    assert left[:PAGE] == b"y" + b"x" * (PAGE - 1), "it was written to again"
    pages = {left[start : start + PAGE] for start in range(PAGE, size, PAGE)}
    assert pages == {bytes(PAGE), b"x" * PAGE}


def test_faults_of_the_disk_are_temporary(machine: Machine) -> None:
    """Space is missing for a while, and another error occurs once."""
    refused: list[int | None] = []

    def attempt(work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            refused.append(error.errno)

    def work() -> None:
        fd = _write(machine.disk.root / "file", b"x")
        machine.disk.fail_at_write = machine.disk.writes + 2
        for _ in range(3):
            attempt(lambda: door.pwrite(fd, b"x", 0))
        machine.disk.full_until = machine.loop.now + 1.0
        for _ in range(10):
            attempt(lambda: door.pwrite(fd, b"x", 0))
            attempt(lambda: door.ftruncate(fd, 1))
        machine.disk.full_until = machine.loop.now
        door.pwrite(fd, b"x", 0)

    machine.does(work)

    assert refused[0] == errno.EIO
    assert set(refused[1:]) == {errno.ENOSPC}


def test_what_a_failed_flush_left_in_memory_is_written_again(machine: Machine) -> None:
    """A start reads it as if it were on disk, and appends more after it."""

    def stored(store: MessageStore, *queue_ids: int) -> None:
        machine.does(lambda: store.append([draft(queue_id=number) for number in queue_ids]))
        machine.does(store.request_flush)
        machine.loop.run_for(0.5)

    store = opened(machine)
    stored(store, 0)
    machine.disk.fail_at_sync = machine.disk.syncs + 1
    stored(store, *[1] * 100)
    assert store.durable_offset < store.write_offset
    machine.kill()
    store = opened(machine)
    stored(store, 2)
    assert store.durable_offset == store.write_offset
    machine.power_cut()

    store = opened(machine)
    assert [store.queues.bounds("T", number) for number in range(3)] == [(0, 1), (0, 100), (0, 1)]


def test_a_queue_that_the_checkpoint_covers_survives_a_power_cut(machine: Machine) -> None:
    """A start does not search entries older than the checkpoint, so their file needs a name."""
    store = opened(machine)
    machine.does(lambda: store.append([draft()]))
    machine.loop.run_for(3.0)  # the maintenance thread has run
    machine.power_cut()

    (queue,) = (machine.disk.root / "consumequeue" / "T" / "0").iterdir()
    assert any(queue.read_bytes()[:ENTRY_SIZE])


def test_a_table_that_a_start_has_read_survives_a_power_cut(machine: Machine) -> None:
    """Also if its writer was killed before its name was on disk."""

    def table() -> Path:
        return machine.disk.root / "config" / "topics.json"

    def renamed() -> None:
        path = table()
        door.make_directories(path.parent)
        door.write_file(path.with_suffix(".tmp"), b'{"topicConfigTable": {}}', sync=True)
        door.replace(path.with_suffix(".tmp"), path)

    machine.does(renamed)
    machine.kill()
    machine.does(lambda: TableFile(table(), lambda: 0, table_key="topicConfigTable").load())
    machine.power_cut()

    assert load_table(table()) is not None


@pytest.mark.parametrize("killed", [False, True])
def test_an_entry_that_a_start_has_removed_does_not_come_back(
    machine: Machine, *, killed: bool
) -> None:
    """Its record is lost in a power cut; the next record must not find the old entry."""
    queue = Path("consumequeue", "T", "1")

    def written() -> None:
        """The kernel writes the entry, and not the record."""
        (entries,) = (machine.disk.root / queue).iterdir()
        door.sync_data(door.open_file(entries, door.WRITE))
        door.sync_directory(entries.parent)
        door.sync_directory(entries.parent.parent)

    store = opened(machine, flush_mode=FlushMode.ASYNC_FLUSH)
    machine.does(lambda: store.append([draft(queue_id=0)]))
    machine.loop.run_for(3.0)
    machine.does(lambda: store.append([draft(queue_id=1)]))
    machine.does(written)
    machine.power_cut()
    (entries,) = (machine.disk.root / queue).iterdir()
    assert any(entries.read_bytes())

    opened(machine)
    if killed:
        machine.kill()
        opened(machine)
    machine.loop.run_for(3.0)  # the maintenance thread has run
    machine.power_cut()

    (entries,) = (machine.disk.root / queue).iterdir()
    assert not any(entries.read_bytes())


def test_a_topic_that_was_written_survives_a_power_cut(machine: Machine) -> None:
    """The directory of the broker's tables has a durable name itself."""
    config = BrokerConfig(
        network=NetworkConfig(bind_address="10.0.0.1"),
        store=StoreSettings(
            root=machine.disk.root, commit_log_file_size=8_192, max_hash_slots=8, max_index_items=8
        ),
    )

    async def main() -> None:
        broker = Broker(config, worker=machine.worker)
        await broker.start()
        tables_of(broker).topics.ensure("orders")
        await asyncio.sleep(TABLES_TICK_S)

    task = machine.process.run(main())
    machine.loop.run_for(TABLES_TICK_S + 0.1)
    task.result()
    machine.power_cut()

    table = load_table(machine.disk.root / "config" / "topics.json")
    assert table is not None
    assert "orders" in table["topicConfigTable"]
