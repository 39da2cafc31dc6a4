"""Snapshots: a faster start, with the table that the whole log would give."""

import os
import threading
from pathlib import Path

import pytest

from halfmq.broker.loop import slices
from halfmq.broker.transaction.replay import snapshot
from halfmq.broker.transaction.replay.snapshot_file import (
    PENDING,
    Anchor,
    SnapshotHeader,
    SnapshotWriter,
    load_snapshot,
)
from halfmq.broker.transaction.state.pending import PendingTable
from halfmq.broker.transaction.state.state_machine import State, TransactionEvent
from halfmq.store.files import disk
from halfmq.store.files.page_cache import NotInMemoryError, waiting
from halfmq.store.format.transaction_snapshot import FOOTER
from halfmq.store.log.append_request import AppendResult
from tests.support.broker_doubles import as_store
from tests.support.patience import PATIENCE_S
from tests.support.transactions import Broker, Connected, MemoryLog


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    """A broker that takes a snapshot whenever the interval is over."""
    return Broker(tmp_path)


def take(broker: Broker) -> None:
    """Take a snapshot while the broker runs."""
    broker.log.flush()
    while broker.is_taking_snapshot:  # one begun earlier covers less
        broker.service.tick()
    before = broker.service.metrics()["snapshots_taken"]
    broker.clock.now += snapshot.INTERVAL_MS
    while broker.service.metrics()["snapshots_taken"] == before:
        broker.service.tick()
        broker.log.flush()


def spy_on_scan(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the positions from which the log is read from now on."""
    starts: list[int] = []
    scan = MemoryLog.scan

    def spied(log: MemoryLog, start: int, end: int | None = None) -> object:
        starts.append(start)
        return scan(log, start, end)

    monkeypatch.setattr(MemoryLog, "scan", spied)
    return starts


def state_of(broker: Broker) -> list[object]:
    """Return the part of the table that a start must restore."""
    return [
        (
            entry.offset,
            entry.queue_offset,
            entry.store_timestamp,
            entry.group,
            entry.state,
            entry.immunity_s,
            entry.parked_reason,
            broker.table.groups.get(entry.offset),
        )
        for entry in broker.table
    ]


def fill(broker: Broker) -> list[AppendResult]:
    """Create transactions in every state; return the undecided ones."""
    broker.producers.join("parked", Connected())
    parked = broker.prepare(group="parked")
    for _ in range(20):
        broker.wait(700_000)  # longer than the longest pause between two checks
    assert broker.service.metrics()["pending_parked"] == 1
    broker.end(broker.prepare(), TransactionEvent.COMMIT)
    broker.end(broker.prepare(), TransactionEvent.ROLLBACK)
    return [parked, broker.prepare(), broker.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS="60")]


@pytest.mark.parametrize("drained", [True, False])
def test_a_start_reads_the_log_from_the_snapshot_on(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, drained: bool
) -> None:
    """The table is the same as before, counts of checks included."""
    fill(broker)
    take(broker)
    position = broker.log.write_offset
    before = state_of(broker)
    asking = [entry.progress for entry in broker.table]
    assert asking[0].delivered
    starts = spy_on_scan(broker, monkeypatch)

    broker.restart(drained=drained)

    assert starts[0] >= position - 1_000 > 0
    assert state_of(broker) == before
    assert [entry.progress for entry in broker.table] == asking


def test_changes_after_the_snapshot_are_read_from_the_log(broker: Broker) -> None:
    """Decisions, new halves and op messages."""
    parked, first, second = fill(broker)
    take(broker)
    broker.end(first, TransactionEvent.COMMIT)
    broker.end(parked, TransactionEvent.ROLLBACK, group="parked")
    third = broker.prepare()
    broker.log.flush()

    broker.restart()

    assert [entry.offset for entry in broker.table] == [
        second.physical_offset,
        third.physical_offset,
    ]
    assert set(broker.ops.waiting) >= {first.queue_offset, parked.queue_offset}


def test_the_table_may_change_while_it_is_written(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slice sees another table; with the log they give the right one."""
    monkeypatch.setattr(snapshot, "ROWS_PER_STEP", 1)
    monkeypatch.setattr(slices, "SLICE_S", 0.0)  # one step each
    halves = [broker.prepare() for _ in range(20)]
    broker.log.flush()
    broker.clock.now += snapshot.INTERVAL_MS
    pending = {half.physical_offset for half in halves}
    turn = 0
    while not broker.service.metrics()["snapshots_taken"]:
        broker.service.tick()
        for index, event in (
            (turn, TransactionEvent.COMMIT),
            (19 - turn, TransactionEvent.ROLLBACK),
        ):
            if turn < 6:
                broker.end(halves[index], event)
                pending.discard(halves[index].physical_offset)
        pending.add(broker.prepare().physical_offset)
        broker.log.flush()
        turn += 1
    assert turn > 6
    broker.log.flush()

    broker.restart()

    assert {entry.offset for entry in broker.table} == pending
    decided = {half.queue_offset for half in halves if half.physical_offset not in pending}
    assert set(broker.ops.waiting) == decided
    for half in halves[:6]:
        broker.end(half, TransactionEvent.COMMIT)
        assert len(broker.finals_of(half)) == 1


def test_a_snapshot_beyond_a_shortened_log_is_deleted(broker: Broker) -> None:
    """A power cut removed a decision whose transaction is no longer in the snapshot."""
    half = broker.prepare()
    broker.log.flush()
    broker.end(half, TransactionEvent.COMMIT)
    broker.service.drain()  # never durable: the power goes before the flush
    assert broker.snapshot_path.exists()

    broker.restart()

    assert not broker.snapshot_path.exists()
    assert [entry.offset for entry in broker.table] == [half.physical_offset]
    for _ in range(5):  # the log grows past the snapshot's position, with other records
        broker.prepare()
    broker.log.flush()
    broker.restart()
    assert broker.service.metrics()["pending"] == 6


def test_a_snapshot_waits_until_the_log_is_durable(broker: Broker) -> None:
    """Until then the older one stays."""
    broker.prepare()
    take(broker)
    older = broker.snapshot_path.read_bytes()
    broker.prepare()
    broker.clock.now += snapshot.INTERVAL_MS
    for _ in range(50):
        broker.service.tick()
    for thread in threading.enumerate():
        if thread.name == "halfmq-snapshot":
            thread.join()
    assert broker.snapshot_path.read_bytes() == older

    broker.log.flush()
    while broker.service.metrics()["snapshots_taken"] < 2:
        broker.service.tick()
    assert broker.snapshot_path.read_bytes() != older


def test_the_snapshot_file_is_created_on_a_thread(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that flushes can block the creation of a file."""
    broker.prepare()
    creators: list[str] = []
    create = disk.NewFile

    def created(path: Path) -> disk.NewFile:
        creators.append(threading.current_thread().name)
        return create(path)

    monkeypatch.setattr(disk, "NewFile", created)
    take(broker)

    assert creators == ["halfmq-snapshot"]


def test_only_the_event_loop_reads_the_log(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are kept open for this thread, which may close them at any time."""
    half = broker.prepare()
    read = broker.log.record_bytes
    readers: list[str] = []
    fetchers: list[str] = []

    class ColdError(NotInMemoryError):
        def fetch(self) -> None:
            fetchers.append(threading.current_thread().name)

    def cold(physical_offset: int) -> bytes | None:
        readers.append(threading.current_thread().name)
        if not waiting.is_allowed:
            raise ColdError([])
        return read(physical_offset)

    monkeypatch.setattr(broker.log, "record_bytes", cold)
    take(broker)

    loop = threading.current_thread().name
    assert (readers, fetchers) == ([loop, loop], ["halfmq-snapshot"])
    with broker.snapshot_path.open("rb") as file:
        file.seek(-FOOTER.size, os.SEEK_END)
        anchor = FOOTER.unpack(file.read())[1]
    assert anchor == half.physical_offset


def test_an_ordered_stop_replaces_an_unfinished_snapshot(broker: Broker) -> None:
    """The snapshot of the stop is complete."""
    half = broker.prepare()
    broker.clock.now += snapshot.INTERVAL_MS
    broker.service.tick()

    broker.restart(drained=True)

    assert broker.service.oldest_pending_offset == half.physical_offset
    assert not list(broker.snapshot_path.parent.glob("*.tmp"))


def test_a_dropped_broker_may_be_collected_by_the_thread_of_its_snapshot(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector may run on that thread, which cannot join itself."""
    begun, dropped, over = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def fsync(_descriptor: int) -> None:
        begun.set()
        assert dropped.wait(PATIENCE_S)
        try:
            broker.abandon_snapshot()  # as the collector does
        except RuntimeError as error:
            errors.append(error)
        over.set()

    monkeypatch.setattr(disk, "fsync", fsync)
    broker.prepare()
    broker.log.flush()
    broker.clock.now += snapshot.INTERVAL_MS
    while not begun.is_set():
        broker.service.tick()
        broker.log.flush()
    dropped.set()
    assert over.wait(PATIENCE_S)
    assert errors == []


def test_a_clock_set_back_delays_no_snapshot(broker: Broker) -> None:
    """The next one is due after an interval, not after an hour more."""
    broker.prepare()
    take(broker)
    broker.clock.step(-3_600_000)
    broker.prepare()
    broker.clock.now += snapshot.INTERVAL_MS
    broker.service.tick()
    assert broker.is_taking_snapshot


def test_no_snapshot_is_taken_for_little_log(broker: Broker) -> None:
    """Replaying it at a start costs less than writing the table every half minute."""
    broker.snapshot_log_bytes = 1 << 20
    broker.restart()
    broker.prepare()
    broker.log.flush()
    for _ in range(5):
        broker.wait(snapshot.INTERVAL_MS)
    assert not broker.snapshot_path.exists()


def test_a_snapshot_is_taken_for_counted_checks_alone(broker: Broker) -> None:
    """The log does not hold their counts; a kill must not restart the checks."""
    broker.snapshot_log_bytes = 1 << 20
    broker.restart()
    broker.producers.join("pg", Connected())
    broker.prepare()
    broker.log.flush()
    for count in (1, 2):
        broker.clock.now += snapshot.INTERVAL_MS * 2  # more than the pause between two checks
        while broker.service.metrics()["snapshots_taken"] < count:
            broker.service.tick()
    (entry,) = broker.table
    asking = entry.progress
    assert asking.delivered == 2
    broker.clock.now += snapshot.INTERVAL_MS
    broker.service.tick()
    assert not broker.is_taking_snapshot  # nothing was counted since

    broker.restart()

    (entry,) = broker.table
    assert entry.progress == asking


@pytest.mark.parametrize("position", [0, 5, 30, -30, -1])
@pytest.mark.parametrize("damage", ["cut", "flip", "append"])
def test_a_damaged_snapshot_is_ignored(broker: Broker, damage: str, position: int) -> None:
    """The log alone gives the same table."""
    fill(broker)
    broker.service.drain()
    broker.log.flush()
    before = state_of(broker)
    data = bytearray(broker.snapshot_path.read_bytes())
    if damage == "cut":
        del data[position:]
    elif damage == "flip":
        data[position] ^= 0x40
    else:
        data += b"\0" * (position % 7)
        data[position] ^= 0x01
    broker.snapshot_path.write_bytes(data)

    broker.restart()

    assert state_of(broker) == before
    assert not broker.snapshot_path.exists()


@pytest.mark.parametrize(
    ("header", "anchor", "reason"),
    [
        (SnapshotHeader("something else", 1, 0, 0), Anchor(-1, 0), "something else of version 1"),
        (SnapshotHeader("halfmq-transactions", 2, 0, 0), Anchor(-1, 0), "of version 2"),
        (
            SnapshotHeader("halfmq-transactions", 3, 7, 0),
            Anchor(-1, 0),
            "no record begins at 7",
        ),
        (
            SnapshotHeader("halfmq-transactions", 3, 0, 0),
            Anchor(0, 1),
            "another record stands at 0",
        ),
        (
            SnapshotHeader("halfmq-transactions", 3, 0, 0),
            Anchor(7, 1),
            "another record stands at 7",
        ),
    ],
)
def test_a_snapshot_of_another_log_is_ignored(
    broker: Broker,
    header: SnapshotHeader,
    anchor: Anchor,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its rows would be checked and delivered although this log has no such halves."""
    broker.prepare()
    writer = SnapshotWriter(broker.snapshot_path, header)
    writer.open()
    writer.add(PENDING, [(0, 0, 1, "pg", "t", 0, 0, 0, 0, 0, 0)])
    writer.finish(0, anchor)
    writer.publish()
    table, ops = PendingTable(), [1]

    assert load_snapshot(broker.snapshot_path, as_store(broker.log), table, ops[:0]) is None

    assert (len(table), reason in caplog.text) == (0, True)
    assert not broker.snapshot_path.exists()


def test_a_snapshot_beyond_the_logs_end_is_ignored(broker: Broker) -> None:
    """Even if its position and its anchor are in the log."""
    broker.prepare()
    writer = SnapshotWriter(broker.snapshot_path, SnapshotHeader("halfmq-transactions", 3, 0, 0))
    writer.open()
    writer.finish(broker.log.write_offset + 1, Anchor(-1, 0))
    writer.publish()

    assert load_snapshot(broker.snapshot_path, as_store(broker.log), PendingTable(), []) is None
    assert not broker.snapshot_path.exists()


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 2)],
        [(0, 0, 1, "pg", "t", 9, 0, 0, 0, 0, 0)],
        [("a", 0, 1, "pg", "t", 0, 0, 0, 0, 0, 0)],
        ["no row"],
    ],
)
def test_a_snapshot_with_invalid_rows_fills_nothing(broker: Broker, rows: list[object]) -> None:
    """Also if its checksum is valid."""
    broker.prepare()
    writer = SnapshotWriter(broker.snapshot_path, SnapshotHeader("halfmq-transactions", 3, 0, 0))
    writer.open()
    writer.add(PENDING, [(0, 0, 1, "pg", "t", 0, 0, 0, 0, 0, 0)])
    writer.add(PENDING, rows)
    writer.finish(0, Anchor(-1, 0))
    writer.publish()
    table, ops = PendingTable(), list[int]()

    assert load_snapshot(broker.snapshot_path, as_store(broker.log), table, ops) is None
    assert (len(table), ops) == (0, [])


def test_a_snapshot_keeps_the_check_copies_of_rocketmq(broker: Broker) -> None:
    """An answer that names a copy must find its transaction after the second start, too."""
    half = broker.prepare()
    table = broker.table
    table.add_copy(half.physical_offset + 1, half.physical_offset, 40)

    broker.restart(drained=True)

    entry = broker.table.get(half.physical_offset)
    assert entry is not None
    assert entry.state is State.PREPARED
    assert broker.table.transaction_of(half.physical_offset + 1) == half.physical_offset
    assert list(broker.table.op_offsets_of(entry)) == [half.queue_offset, 40]


def test_a_full_disk_prevents_only_the_snapshot(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker continues; the next start replays more of the log."""

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    broker.prepare()
    monkeypatch.setattr(SnapshotWriter, "finish", no_room)
    broker.log.flush()
    broker.wait(snapshot.INTERVAL_MS)
    for _ in range(5):
        broker.service.tick()
    broker.service.drain()

    assert "event=snapshot_failed" in caplog.text
    assert not list(broker.snapshot_path.parent.iterdir())
