"""The part of the store that transactions use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.record import Record
from halfmq.store.queue.pull_selection import GetResult

from ..ports import AppendLog, StoredKeys


class TransactionQueues(Protocol):
    """The queues of the log."""

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]: ...

    def get(
        self, topic: str, queue_id: int, offset: int, *, max_count: int = ..., max_bytes: int = ...
    ) -> GetResult: ...

    def has_record(
        self, topic: str, queue_id: int, offset: int, physical_offset: int, size: int
    ) -> bool: ...


class TransactionRecords(Protocol):
    """The records of the log."""

    def record_at(self, physical_offset: int) -> Record | None: ...

    def record_bytes(self, physical_offset: int) -> bytes | None: ...

    def unchecked_bytes(self, physical_offset: int) -> bytes | None: ...

    def store_timestamp(self, physical_offset: int) -> int: ...

    def scan_transactions(self, start: int) -> Iterator[Record]: ...

    def read_cold(self, ranges: Iterable[tuple[int, int]]) -> bytes: ...

    def lacking(self, physical_offsets: Iterable[int]) -> NotInMemoryError: ...


class TransactionLog(AppendLog, Protocol):
    """The log with its queues and its index; see ``MessageStore``."""

    @property
    def min_offset(self) -> int: ...

    @property
    def write_offset(self) -> int: ...

    @property
    def durable_offset(self) -> int: ...

    def request_flush(self) -> None: ...

    @property
    def reader(self) -> TransactionRecords: ...

    @property
    def queues(self) -> TransactionQueues: ...

    @property
    def index(self) -> StoredKeys: ...

    def named_record(self, physical_offset: int) -> bytes | None: ...
