"""Filling the table at a start: snapshot, then the log behind it, or the log alone.

A record that the disk has damaged must not hide those behind it: a half that is missing from the
table counts as decided, so its message would be lost. The walk therefore goes on at the next place
where a whole record says that it lies there. What the damaged record itself said is lost, and told.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from halfmq.store.format.properties import get_property
from halfmq.store.format.record import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, PREFIX, Record

from .fold import Fold, ForeignRecordError
from .pending import PendingTable
from .snapshot import Log as SnapshotLog
from .snapshot import load_snapshot, remove_snapshot

logger = logging.getLogger(__name__)

_SEARCH_SIZE: Final = 1 << 20  # bytes read at once in search of the next record
_MAGIC_AT: Final = 4  # in a record, behind its size
_MAGICS: Final = tuple(magic.to_bytes(4, "big") for magic in (MAGIC_V1, MAGIC_V2))


class ReplayLog(SnapshotLog, Protocol):
    """What filling the table needs of the store."""

    def record_at(self, physical_offset: int) -> Record | None: ...

    def read_cold(self, ranges: Iterable[tuple[int, int]]) -> bytes: ...

    def scan(self, start: int, end: int | None = None) -> Iterator[Record]: ...


class Replayed(NamedTuple):
    """What filling the table found besides."""

    position: int  # where reading the log began
    unmirrored: Sequence[int]  # half queue offsets of decided transactions without an op message
    incomplete: Sequence[int] = ()  # leaders of groups of which not all halves are there
    unfinished: Sequence[int] = ()  # halves whose leader is committed, without a final message


def replay(log: ReplayLog, table: PendingTable, snapshot_path: Path) -> Replayed:
    """Fill an empty table with what the log says."""
    ops: list[int] = []
    position = load_snapshot(snapshot_path, log, table, ops)
    if position is None:
        position = log.min_offset
    try:
        return _read(log, table, position, ops, by_key=False)
    except ForeignRecordError as error:
        logger.info("event=transactions_by_key reason=%r", str(error))
    table.clear()
    remove_snapshot(snapshot_path)
    position = log.min_offset
    return _read(log, table, position, (), by_key=True)


def _read(
    log: ReplayLog, table: PendingTable, position: int, ops: Iterable[int], *, by_key: bool
) -> Replayed:
    fold = Fold(table, by_key=by_key)
    fold.unmirrored.update(dict.fromkeys(ops))
    if 0 in table and (record := log.record_at(0)) is not None:
        key = get_property(record.properties, b"UNIQ_KEY")
        if key is not None:
            fold.note_key_at_zero(key)
    for record in records_from(log, position):
        fold.apply(record)
    return Replayed(position, list(fold.unmirrored), list(fold.incomplete), list(fold.unfinished))


def records_from(log: ReplayLog, position: int) -> Iterator[Record]:
    """Yield all whole records from a position on, also those behind a damaged place."""
    end = log.write_offset
    while True:
        for record in log.scan(position, end):
            yield record
            position = record.end
        if position >= end or _is_blank(log, position, end):
            return
        found = _next_record(log, position, end)
        logger.error(
            "event=log_damaged from=%d to=%d; what it said about transactions is lost",
            position,
            found if found is not None else end,
        )
        if found is None:
            return
        position = found


def _is_blank(log: ReplayLog, position: int, end: int) -> bool:
    """Tell whether all that is left is the end of a file, behind which nothing is written yet."""
    prefix = log.read_cold([(position, PREFIX.size)])
    return len(prefix) == PREFIX.size and PREFIX.unpack(prefix) == (end - position, MAGIC_BLANK)


def _next_record(log: ReplayLog, damaged: int, end: int) -> int | None:
    """Find the first whole record behind the one that should begin at ``damaged``."""
    start = damaged + _MAGIC_AT + 1
    while start < end:
        try:
            # Ends where a file does, so that no record begins in one chunk and ends in the next.
            chunk = log.read_cold([(start, min(_SEARCH_SIZE, end - start))])
        except OSError:
            logger.exception("event=log_unreadable offset=%d", start)
            return None
        for at in sorted(_positions(chunk)):
            candidate = start + at - _MAGIC_AT
            if log.record_bytes(candidate) is not None:
                return candidate
        start += max(len(chunk) - _MAGIC_AT + 1, 1) if len(chunk) >= _MAGIC_AT else _MAGIC_AT
    return None


def _positions(chunk: bytes) -> Iterator[int]:
    for magic in _MAGICS:
        at = chunk.find(magic)
        while at >= 0:
            yield at
            at = chunk.find(magic, at + 1)
