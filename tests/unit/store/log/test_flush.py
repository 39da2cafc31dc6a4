"""Group commit: records that are reported as durable are on disk."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from threading import Event, get_ident

import pytest

from halfmq.store.config import FlushMode
from halfmq.store.errors import FlushFailedError
from halfmq.store.files.disk import sync_data
from halfmq.store.message_store import MessageStore
from tests.support.patience import PATIENCE_S
from tests.support.stores import Clock, crash, draft, everything, flush, small_config, wait_until

NEVER = 3_600_000  # ms


class Disk:
    """Records which files are flushed, and can be slow or broken."""

    def __init__(self) -> None:
        self.synced: list[str] = []  # names of files, in order
        self.may_continue = Event()
        self.may_continue.set()
        self.entered = Event()
        self.broken = False

    def fdatasync(self, fd: int) -> None:
        self.entered.set()
        assert self.may_continue.wait(PATIENCE_S)
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")
        sync_data(fd)
        self.synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)


@pytest.fixture
def disk() -> Disk:
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to name descriptors")
    return Disk()


def open_store(
    root: Path,
    disk: Disk,
    *,
    on_durable: Callable[[int], None] = lambda offset: None,
    on_failure: Callable[[Exception], None] = lambda error: None,
    mode: FlushMode = FlushMode.SYNC_FLUSH,
    interval_ms: int = NEVER,
) -> MessageStore:
    store = MessageStore(
        small_config(root, flush_mode=mode, flush_interval_ms=interval_ms),
        now_ms=Clock(),
        on_durable=on_durable,
        on_failure=on_failure,
        fdatasync=disk.fdatasync,
    )
    store.open()
    return store


def test_on_durable_is_called_after_the_flush_on_its_thread(tmp_path: Path, disk: Disk) -> None:
    """A record is on disk before the reply that it releases."""
    reported: list[tuple[int, int, int]] = []
    store = open_store(
        tmp_path,
        disk,
        on_durable=lambda offset: reported.append((offset, len(disk.synced), get_ident())),
    )
    (done,) = store.append([draft()])
    assert store.durable_offset == 0

    store.request_flush()

    wait_until(lambda: bool(reported))
    assert reported[0][:2] == (done.end, 1)
    assert reported[0][2] != get_ident()
    assert store.durable_offset == done.end
    store.close()


def test_records_appended_during_a_flush_are_covered_by_the_next(
    tmp_path: Path, disk: Disk
) -> None:
    """A flush covers what was written when it began; the rest shares the next one."""
    reported: list[int] = []
    store = open_store(tmp_path, disk, on_durable=reported.append)
    disk.may_continue.clear()
    (first,) = store.append([draft()])
    store.request_flush()
    assert disk.entered.wait(PATIENCE_S)
    for _ in range(10):
        (last,) = store.append([draft()])
        store.request_flush()
    assert reported == []

    disk.may_continue.set()

    wait_until(lambda: reported[-1:] == [last.end])
    assert len(disk.synced) == 2
    store.close()
    assert reported == [first.end, last.end]


def test_a_group_over_several_files_flushes_them_all(tmp_path: Path, disk: Disk) -> None:
    """The old file, every file in between and the new one."""
    store = open_store(tmp_path, disk)
    flush_of_first = store.append([draft(body=bytes(4000))])
    flush(store)

    done = store.append([draft(body=bytes(4000)) for _ in range(12)])
    flush(store)

    touched = range(flush_of_first[0].end // 16_384, done[-1].end // 16_384 + 1)
    assert len(touched) >= 4
    assert disk.synced[1:] == [f"{number * 16_384:020d}" for number in touched]
    store.close()


def test_async_flush_needs_no_request(tmp_path: Path, disk: Disk) -> None:
    """Records are flushed within the interval."""
    store = open_store(tmp_path, disk, mode=FlushMode.ASYNC_FLUSH, interval_ms=1)

    (done,) = store.append([draft()])

    wait_until(lambda: store.durable_offset == done.end)
    store.close()


def test_a_flush_can_be_requested_under_async_flush(tmp_path: Path, disk: Disk) -> None:
    """Decisions of transactions are made durable in every mode."""
    store = open_store(tmp_path, disk, mode=FlushMode.ASYNC_FLUSH)

    (done,) = store.append([draft()])
    store.request_flush()

    wait_until(lambda: store.durable_offset == done.end)
    store.close()


def test_nothing_new_is_not_flushed(tmp_path: Path, disk: Disk) -> None:
    """An idle broker does not write to the disk."""
    store = open_store(tmp_path, disk, interval_ms=1)
    store.append([draft()])
    flush(store)

    store.request_flush()
    store.close()

    assert len(disk.synced) == 1


def test_after_a_failed_flush_the_store_refuses_appends(tmp_path: Path, disk: Disk) -> None:
    """The kernel may drop pages that it could not write, so a second flush proves nothing."""
    failures: list[Exception] = []
    durable: list[int] = []
    store = open_store(
        tmp_path, disk, on_failure=failures.append, on_durable=durable.append, interval_ms=1
    )
    (first,) = store.append([draft()])
    wait_until(lambda: store.durable_offset == first.end)
    disk.broken = True

    store.append([draft(body=b"lost")])
    wait_until(lambda: bool(failures))
    disk.broken = False
    store.request_flush()

    with pytest.raises(FlushFailedError, match="Input/output error") as caught:
        store.append([draft()])
    assert isinstance(failures[0], FlushFailedError)
    assert caught.value.durable_offset == first.end
    assert [record.body for record in everything(store)] == [b"body"]
    store.close()
    assert len(disk.synced) == 1, "a failed flush is never tried again"
    assert durable == [first.end]
    assert (tmp_path / "abort").exists(), "the next start must not trust this store"


def test_a_listener_that_fails_does_not_stop_the_flusher(tmp_path: Path, disk: Disk) -> None:
    """Other senders wait for the next flush."""

    def on_durable(offset: int) -> None:
        raise RuntimeError("event loop is closed")

    store = open_store(tmp_path, disk, on_durable=on_durable)

    for _ in range(3):
        store.append([draft()])
        flush(store)

    assert len(disk.synced) == 3
    store.close()


def test_close_flushes_records_without_waiting_senders(tmp_path: Path, disk: Disk) -> None:
    """A clean stop loses nothing, also under ASYNC_FLUSH."""
    store = open_store(tmp_path, disk, mode=FlushMode.ASYNC_FLUSH)
    store.append([draft(), draft()])

    store.close()

    assert disk.synced == ["0" * 20]
    assert not (tmp_path / "abort").exists()


def test_names_of_new_files_are_flushed_first(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut removes a file whose name is not on disk."""
    store = open_store(tmp_path, disk)
    synced: list[tuple[Path, int]] = []

    def record(path: Path) -> None:
        if threading.current_thread().name == "store-flush":
            synced.append((path, len(disk.synced)))

    monkeypatch.setattr("halfmq.store.files.disk.sync_directory", record)

    store.append([draft(body=bytes(8000)) for _ in range(4)])
    flush(store)

    directory = tmp_path / "commitlog"
    assert synced[:2] == [(directory, 0), (directory, 1)]
    store.close()


def test_the_checkpoint_follows_the_flushes(tmp_path: Path, disk: Disk) -> None:
    """A start after a kill does not scan what is known to be on disk."""
    config = small_config(tmp_path / "store", flush_interval_consume_queue_ms=1)
    clock = Clock()
    store = MessageStore(config, now_ms=clock)
    store.open()
    for _ in range(20):
        store.append([draft(body=bytes(4000))])
        clock.now += 1000
    flush(store)
    wanted = store.reader.record_at(store.min_offset)
    assert wanted is not None
    newest = [record.store_timestamp for record in store.reader.scan(0)][-1]
    checkpoint = tmp_path / "store" / "checkpoint"
    wait_until(
        lambda: (
            checkpoint.exists() and checkpoint.read_bytes()[:16] == newest.to_bytes(8, "big") * 2
        )
    )

    copy = crash(tmp_path / "store", tmp_path / "copy")
    store.close()

    reopened = MessageStore(small_config(copy), now_ms=clock)
    report = reopened.open()
    assert not report.clean
    assert report.start_offset > 0
    assert not report.queues_rebuilt
    assert len(everything(reopened)) == 20
    reopened.close()


def test_many_unflushed_bytes_start_a_flush_early(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise fast producers would have to wait for the interval of ASYNC_FLUSH."""
    monkeypatch.setattr("halfmq.store.message_store.FLUSH_BYTES", 2_000)
    monkeypatch.setattr("halfmq.store.log.commit_log.WAKE_EVERY", 1_000)
    flushed = Event()
    store = open_store(
        tmp_path, disk, mode=FlushMode.ASYNC_FLUSH, on_durable=lambda offset: flushed.set()
    )
    while store.write_offset < 10_000:
        store.append([draft()])

    assert flushed.wait(PATIENCE_S)
    store.close()
