"""The part of the store that transactions use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.record import Record

from ..ports import AppendLog


class FoundRanges(Protocol):
    """The records of a queue that `TransactionLog.get` has found."""

    @property
    def ranges(self) -> list[tuple[int, int]]: ...

    @property
    def size(self) -> int: ...


class TransactionLog(AppendLog, Protocol):
    """The log with its queues and its index; see ``MessageStore``."""

    @property
    def min_offset(self) -> int: ...

    @property
    def write_offset(self) -> int: ...

    @property
    def durable_offset(self) -> int: ...

    def request_flush(self) -> None: ...

    # --- records

    def record_at(self, physical_offset: int) -> Record | None: ...

    def record_bytes(self, physical_offset: int) -> bytes | None: ...

    def unchecked_bytes(self, physical_offset: int) -> bytes | None: ...

    def store_timestamp(self, physical_offset: int) -> int: ...

    def scan_transactions(self, start: int) -> Iterator[Record]: ...

    def read_cold(self, ranges: Iterable[tuple[int, int]]) -> bytes: ...

    def lacking(self, physical_offsets: Iterable[int]) -> NotInMemoryError: ...

    # --- queues and index

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[int, int]: ...

    def get(
        self, topic: str, queue_id: int, offset: int, *, max_count: int = ..., max_bytes: int = ...
    ) -> FoundRanges: ...

    @property
    def index_last_update(self) -> tuple[int, int]: ...

    def query_index(
        self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int
    ) -> list[int]: ...
