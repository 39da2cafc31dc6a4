"""What a store with tens of thousands of queues costs at a start and at a stop: counted calls."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfmq.store import message_store
from halfmq.store.files import disk
from halfmq.store.message_store import MessageStore
from halfmq.store.queue.queue_table import SYNCED_SINGLY_MAX
from tests.support.stores import Clock, append_durably, draft, everything, maintain, small_config

QUEUES = SYNCED_SINGLY_MAX + 72
CALLS = ["open_file", "mkdir", "fdatasync", "fsync", "sync_file_system", "pread"]


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count calls of the system by name from now on."""
    calls = Counter[str]()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            calls[name] += 1
            return call(*args)

        return count

    for name in CALLS:
        monkeypatch.setattr(disk, name, counted(name, getattr(disk, name)))
    return calls


def opened(root: Path) -> MessageStore:
    """Open a store whose own upkeep does not run."""
    config = small_config(root, flush_interval_consume_queue_ms=3_600_000)
    store = MessageStore(config, now_ms=Clock())
    store.open()
    return store


def filled(root: Path) -> MessageStore:
    """Return an open store with a message in each of many queues."""
    store = opened(root)
    append_durably(store, *(draft(topic=f"topic-{number}") for number in range(QUEUES)))
    return store


@pytest.mark.skipif(disk.sync_file_system is None, reason="this system flushes files one by one")
def test_a_stop_flushes_many_queues_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes no file and no directory for each of them either."""
    store = filled(tmp_path)
    calls = count_calls(monkeypatch)
    store.close()

    assert calls["sync_file_system"] == 1
    assert calls["fdatasync"] + calls["fsync"] + calls["mkdir"] < QUEUES / 4
    assert calls["open_file"] < QUEUES * 1.5  # each is read for its digest


@pytest.mark.skipif(disk.sync_file_system is None, reason="this system flushes files one by one")
def test_many_queues_are_flushed_as_rarely_as_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their flush includes the index, and each key would then cost a page fault again."""
    store = filled(tmp_path)
    calls = count_calls(monkeypatch)
    maintain(store)
    append_durably(store, *(draft(topic=f"topic-{number}") for number in range(QUEUES)))
    maintain(store)
    assert calls["sync_file_system"] == 1

    monkeypatch.setattr(message_store, "FLUSH_EVERY", 0.0)
    maintain(store)
    assert calls["sync_file_system"] == 2
    store.close()


def test_a_clean_start_opens_each_queue_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads its end and the record there, and a digest if it has one."""
    filled(tmp_path).close()
    calls = count_calls(monkeypatch)
    store = opened(tmp_path)

    assert calls["open_file"] < QUEUES * 2.5  # the start compares as many with their digests
    assert calls["pread"] < QUEUES * 4
    assert len(everything(store)) == QUEUES
    store.close()


def test_an_unchanged_store_stops_without_touching_its_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their digests are kept."""
    filled(tmp_path).close()
    store = opened(tmp_path)
    maintain(store)
    calls = count_calls(monkeypatch)
    store.close()

    assert calls.total() < QUEUES / 4
