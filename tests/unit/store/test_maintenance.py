"""The maintenance thread of a store: space is prepared, and a failing disk is reported."""

import errno
import os
from pathlib import Path
from threading import Event

import pytest

from halfmq.store.config import FlushMode
from halfmq.store.errors import DiskFullError
from halfmq.store.files import disk, mapped_file
from halfmq.store.files.checkpoint import load_checkpoint
from halfmq.store.index import index_builder
from halfmq.store.message_store import MessageStore
from tests.support.patience import PATIENCE_S
from tests.support.stepped_worker import SteppedWorker
from tests.support.stores import (
    Clock,
    append_durably,
    draft,
    everything,
    maintain,
    small_config,
    wait_until,
)


def test_the_next_file_is_ready_before_it_is_needed(tmp_path: Path) -> None:
    """A roll uses the prepared file; a stop deletes it if it is still empty."""
    store = MessageStore(small_config(tmp_path, flush_interval_ms=3_600_000), now_ms=Clock())
    store.open()
    wait_until(lambda: store.reserved_ahead == 2 * 16_384)
    path = tmp_path / "commitlog" / "00000000000000016384"
    with path.open("rb") as prepared:
        append_durably(store, *(draft(body=bytes(8000)) for _ in range(3)))

        assert os.path.samestat(os.fstat(prepared.fileno()), path.stat())
    wait_until(lambda: len(list((tmp_path / "commitlog").iterdir())) == 3)
    store.close()
    assert {int(path.name) for path in (tmp_path / "commitlog").iterdir()} == {0, 16_384}


@pytest.mark.skipif(disk.sendfile is None, reason="space is always prepared with zeros here")
@pytest.mark.parametrize("mode", FlushMode)
def test_zeros_are_written_ahead_while_senders_wait_for_flushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: FlushMode
) -> None:
    """All senders wait under SYNC_FLUSH; under ASYNC_FLUSH only those of transactions."""
    zeroed: list[int] = []

    def fill(_fd: int, start: int, _end: int, path: Path) -> None:
        zeroed.append(int(path.name) + start)

    monkeypatch.setattr(mapped_file, "fill_with_zeros", fill)
    workers: dict[str, SteppedWorker] = {}
    store = MessageStore(
        small_config(tmp_path, flush_mode=mode),
        now_ms=Clock(),
        worker=lambda name, work, _pause: workers.setdefault(name, SteppedWorker(work)),
    )
    store.open()

    def make_a_file_ready() -> bool:
        zeroed.clear()
        store.append([draft(body=bytes(8000)) for _ in range(2)])
        workers["store-maintenance"].step()
        return bool(zeroed)

    assert make_a_file_ready() is (mode is FlushMode.SYNC_FLUSH)
    store.request_flush()
    assert make_a_file_ready()
    assert make_a_file_ready() is (mode is FlushMode.SYNC_FLUSH)
    store.close()


def test_maintenance_continues_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is logged and tried again; an append that needs the space fails itself."""
    failed, allowed = Event(), Event()
    real = os.posix_fallocate

    def fallocate(fd: int, offset: int, length: int) -> None:
        if offset == 0 and length == 16_384 and not allowed.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(disk, "posix_fallocate", fallocate)
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    assert failed.wait(PATIENCE_S)

    with pytest.raises(DiskFullError):
        store.append([draft()])
    allowed.set()
    append_durably(store, draft())

    assert store.queues.bounds("T", 0) == (0, 1)
    assert "no space" in caplog.text.lower().replace("_", " ")
    store.close()


def test_missing_descriptors_delay_flushes_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that could not be opened has lost nothing: log, queues and checkpoint follow later."""
    config = small_config(
        tmp_path, flush_interval_ms=3_600_000, flush_interval_consume_queue_ms=3_600_000
    )
    store = MessageStore(config, now_ms=Clock())
    store.open()
    append_durably(store, draft(body=bytes(8_500)))
    maintain(store)
    before = load_checkpoint(tmp_path / "checkpoint")
    open_file = disk.open_file
    refused = Event()

    def opened(path: Path, flags: int, mode: int = disk.MODE) -> int:
        if path.parent.name == "commitlog" or "consumequeue" in path.parts:
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return open_file(path, flags, mode)

    (second,) = store.append([draft(body=bytes(8_500))])  # rolls to the second file
    with monkeypatch.context() as patched:
        patched.setattr(disk, "open_file", opened)
        store.request_flush()
        assert refused.wait(PATIENCE_S)
        with pytest.raises(OSError, match="Too many open files"):
            maintain(store)
    wait_until(lambda: store.durable_offset == second.end)
    maintain(store)

    assert not [one for one in caplog.records if one.levelname == "CRITICAL"]
    assert load_checkpoint(tmp_path / "checkpoint") != before
    store.close()
    assert not (tmp_path / "abort").exists()


@pytest.mark.parametrize("directory", ["consumequeue", "index"])
def test_a_failed_flush_of_queues_or_index_is_tried_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    directory: str,
) -> None:
    """Its pages may be lost although later flushes succeed, so the next start rebuilds all."""
    monkeypatch.setattr(index_builder, "FLUSH_EVERY", 0.0)
    config = small_config(tmp_path, flush_interval_consume_queue_ms=3_600_000)
    store = MessageStore(config, now_ms=Clock())
    store.open()
    append_durably(store, draft(properties={"KEYS": "k"}))
    before = load_checkpoint(tmp_path / "checkpoint")
    sync_data = disk.sync_data

    def broken(fd: int) -> None:
        if f"/{directory}/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.EIO, "Input/output error")
        sync_data(fd)

    store.tick()
    with monkeypatch.context() as patched:
        patched.setattr(disk, "sync_data", broken)
        with pytest.raises(OSError, match="Input/output"):
            maintain(store)
    assert load_checkpoint(tmp_path / "checkpoint") == before
    maintain(store)
    assert load_checkpoint(tmp_path / "checkpoint") != before
    append_durably(store, draft(properties={"KEYS": "k"}))
    store.close()
    assert not (tmp_path / "abort").exists()

    for path in (tmp_path / directory).rglob("*"):
        if path.is_file() and directory == "consumequeue":
            path.write_bytes(bytes(20) + path.read_bytes()[20:])
        elif path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
    store = MessageStore(config, now_ms=Clock())
    store.open()
    assert len(everything(store)) == 2
    while store.tick():
        pass
    assert len(store.index.query("T", "k", 9, 0, 1 << 62)) == 2
    store.close()
    assert f"event=rebuilt_at_next_start directory={directory}" in caplog.text
