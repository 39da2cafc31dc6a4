"""Stores for tests: small files, a clock that is an argument, and crashes by copying."""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from halfmq.store.config import StoreConfig
from halfmq.store.deletion import Deletion
from halfmq.store.format.properties import encode_properties, tags_code
from halfmq.store.format.record import Record, decode_records
from halfmq.store.log.append_request import AppendRequest, AppendResult
from halfmq.store.log.commit_log import CommitLog
from halfmq.store.message_store import GetStatus, MessageStore
from halfmq.store.queue.queue_table import QueueTable
from tests.support.golden_store import GoldenStore
from tests.support.patience import PATIENCE_S

HOST = bytes([127, 0, 0, 1, 0, 0, 42, 159])
HOST_V6 = bytes(15) + b"\x01" + bytes([0, 0, 42, 159])
BORN = 1_700_000_000_000  # ms


class Clock:
    """A clock that advances by one millisecond per call, and never by waiting."""

    def __init__(self, now: int = BORN) -> None:
        self.now = now

    def __call__(self) -> int:
        self.now += 1
        return self.now


def small_config(root: Path, **changes: Any) -> StoreConfig:
    """Return settings under which files roll after kilobytes."""
    settings: dict[str, Any] = {
        "root": root,
        "commit_log_file_size": 16_384,
        "consume_queue_file_size": 1000,
        "max_hash_slots": 100,
        "max_index_items": 400,
    }
    return StoreConfig(**(settings | changes))


def golden_config(golden: GoldenStore) -> StoreConfig:
    """Return the settings under which the broker that wrote a golden store ran."""
    keys = golden.truth["broker_config"]
    return StoreConfig(
        root=golden.root,
        commit_log_file_size=int(keys["mappedFileSizeCommitLog"]),
        consume_queue_file_size=int(keys["mappedFileSizeConsumeQueue"]),
        max_hash_slots=int(keys["maxHashSlotNum"]),
        max_index_items=int(keys["maxIndexNum"]),
        append_property_crc=keys.get("enabledAppendPropCRC") == "true",
    )


def draft(
    topic: str = "T", queue_id: int = 0, body: bytes = b"body", **fields: Any
) -> AppendRequest:
    """Return an append request; ``properties`` may be given as a map."""
    properties = fields.pop("properties", b"")
    if isinstance(properties, dict):
        properties = encode_properties(properties)
    settings: dict[str, Any] = {
        "tags_code": tags_code(properties),
        "born_timestamp": BORN,
        "born_host": HOST,
        "store_host": HOST,
    }
    return AppendRequest(
        topic=topic, queue_id=queue_id, body=body, properties=properties, **(settings | fields)
    )


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for another thread; fail if the condition does not become true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.0005)


def flush(store: MessageStore) -> None:
    """Wait until everything appended is on disk."""
    store.request_flush()
    wait_until(lambda: store.flushed_offset >= store.write_offset)


def append_durably(store: MessageStore, *drafts: AppendRequest) -> list[AppendResult]:
    """Append a group and wait until it is on disk."""
    done = store.append(drafts)
    flush(store)
    return done


def pulled(store: MessageStore, topic: str, queue_id: int, **limits: Any) -> Iterator[Record]:
    """Yield all messages of a queue as a consumer gets them, from its minimum on."""
    offset, end = store.queues.bounds(topic, queue_id)
    while offset < end:
        result = store.queues.get(topic, queue_id, offset, **limits)
        assert result.next_offset > offset, "a pull must make progress"
        if result.status is GetStatus.FOUND:
            encoded = store.reader.read_cold(result.ranges)
            records = decode_records(encoded)
            assert (len(records), len(encoded)) == (result.count, result.size)
            yield from records
        offset = result.next_offset


def everything(store: MessageStore) -> list[Record]:
    """Return all messages that consumers can get, in log order; check their positions."""
    records: list[Record] = []
    for topic, queue_id in store.queues.names():
        offset = store.queues.bounds(topic, queue_id)[0]
        for record in pulled(store, topic, queue_id):
            assert (record.topic, record.queue_id) == (topic, queue_id)
            assert record.queue_offset >= offset, "queue offsets must ascend"
            offset = record.queue_offset + 1
            records.append(record)
    return sorted(records, key=lambda record: record.physical_offset)


def bounds(store: MessageStore) -> dict[tuple[str, int], tuple[int, int]]:
    """Return minimum and maximum of every queue."""
    return {key: store.queues.bounds(*key) for key in store.queues.names()}


def crash(root: Path, copy: Path) -> Path:
    """Copy an open store; the copy is what a killed process leaves."""
    shutil.copytree(root, copy, copy_function=_copy_unless_renamed)
    return copy


def _copy_unless_renamed(source: str, target: str) -> None:
    """Copy a file; a temporary one may have been renamed meanwhile."""
    try:
        shutil.copy2(source, target)
    except FileNotFoundError:
        if not source.endswith(".tmp"):
            raise


# --- private parts of a store: tests act as its threads do, or look at its files


def maintain(store: MessageStore) -> None:
    """Do a round of the maintenance thread on this thread."""
    store._maintain()


def prepare(store: MessageStore) -> None:
    """Do what the maintenance thread does when it is woken."""
    store._prepare()


def stop_maintenance(store: MessageStore) -> None:
    """Stop the thread, so that the test decides when there is a round."""
    assert store._maintenance is not None
    store._maintenance.stop()


def queue_files(store: MessageStore) -> QueueTable:
    return store._queue_table


def log_of(store: MessageStore) -> CommitLog:
    return store._log


@contextlib.contextmanager
def unflushed(store: MessageStore) -> Iterator[None]:
    """Let nothing be flushed within a ``with`` block."""
    flusher = store._flusher
    request = flusher.request
    flusher.request = lambda: None
    try:
        yield
    finally:
        flusher.request = request


def work_off(deletion: Deletion) -> None:
    """Do all work of a stopped retention on this thread."""
    while deletion._jobs:
        deletion._round(True)
