"""Records for the key index, and the expected results of look-ups."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from halfmq.store.format.flags import TransactionType, transaction_type
from halfmq.store.format.index import KeyedRecord, index_key, index_key_hash, index_keys
from halfmq.store.format.properties import encode_properties
from halfmq.store.index.index_service import IndexService

TOPIC = "orders"
START_MS = 1_700_000_000_000
LOG_END = 1 << 40  # after all records
FOREVER = (1 << 63) - 1


class IndexedRecord(NamedTuple):
    topic: str
    properties: bytes
    physical_offset: int
    store_timestamp: int
    sys_flag: int

    @property
    def keys(self) -> set[str]:
        if transaction_type(self.sys_flag) is TransactionType.ROLLBACK:
            return set()
        return {key.decode() for key in index_keys(self.properties)}


def record(
    physical_offset: int,
    *,
    unique_key: str = "",
    keys: str = "",
    topic: str = TOPIC,
    after_ms: int = 0,
    sys_flag: int = 0,
) -> IndexedRecord:
    properties = encode_properties({"WAIT": "true", "UNIQ_KEY": unique_key, "KEYS": keys})
    return IndexedRecord(topic, properties, physical_offset, START_MS + after_ms, sys_flag)


def service(
    directory: Path,
    *,
    slots: int = 7,
    items: int = 10,
    now_ms: Callable[[], int] = lambda: START_MS,
) -> IndexService:
    return IndexService(directory, slots, items, now_ms=now_ms)


def opened(
    directory: Path, *, slots: int = 7, items: int = 10, records: Sequence[KeyedRecord] = ()
) -> IndexService:
    """Return a service that is new or was stopped cleanly, after putting ``records``."""
    index = service(directory, slots=slots, items=items)
    index.recover(clean=True, log_end=LOG_END, index_timestamp=0)
    index.put_group(records)
    return index


def found(index: IndexService, key: str, topic: str = TOPIC) -> list[int]:
    return index.query(topic, key, 64, 0, FOREVER)


def assert_finds_exactly(
    index: IndexService, records: Iterable[IndexedRecord], *, log_start: int = 0
) -> None:
    """Check that every key leads to its records, each once per occurrence of the key.

    Keys with equal hashes lead to the records of both.
    """
    names: dict[int, tuple[str, str]] = {}
    expected: dict[int, list[int]] = {}
    for one in records:
        if transaction_type(one.sys_flag) is TransactionType.ROLLBACK:
            continue
        for raw in index_keys(one.properties):
            key = raw.decode()
            key_hash = index_key_hash(index_key(one.topic, key))
            names[key_hash] = one.topic, key
            expected.setdefault(key_hash, []).append(one.physical_offset)
    for key_hash, offsets in expected.items():
        topic, key = names[key_hash]
        hits = [hit for hit in found(index, key, topic) if hit >= log_start]
        assert hits == sorted(offsets)[-64:], (topic, key)


def contents(directory: Path) -> list[bytes]:
    """Return the content of each file of an index, oldest first."""
    return [path.read_bytes() for path in sorted(directory.iterdir())]
