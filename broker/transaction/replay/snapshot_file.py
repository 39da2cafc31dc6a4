"""The file of a snapshot: written in rows, checked against the log, and read at a start.

**It depends on the end of the log.** A decision after ``position`` may have removed its row before
the row was written. If a power cut then removed that decision from the log's end, neither would
have the transaction. So a snapshot is valid only for a log that reaches ``log_end``, and it
replaces the older one only when the log is durable up to there. If the log is shorter, the snapshot
is deleted at once, because the log will grow beyond that offset with other records. The anchor, one
record by position and checksum, detects a log that was replaced.

File: a stream of msgpack objects, first the header, then any number of row groups, then a fixed
footer with the checksum of everything before it.
"""

import io
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

import msgpack
import msgspec

from halfmq.store.files import disk
from halfmq.store.format.crc import crc32
from halfmq.store.format.transaction_snapshot import CRC_SIZE, FOOTER
from halfmq.store.message_store import MessageStore

from ..state.pending import CheckProgress, MemberHalf, Pending, PendingOrigin, PendingTable, shared
from ..state.state_machine import ParkedReason, State

logger = logging.getLogger(__name__)

MAGIC: Final = "halfmq-transactions"
VERSION: Final = 3

_BLOCK_SIZE: Final = 1 << 20  # bytes read at a time while the checksum is taken

PENDING: Final = "pending"
GROUPS: Final = "groups"
COPIES: Final = "copies"
OPS: Final = "ops"


class SnapshotHeader(NamedTuple):
    """The first object of a snapshot."""

    magic: str
    version: int
    position: int  # replay continues here
    newest_final: int  # position of the last final message before it, 0 for none


class Anchor(NamedTuple):
    """A record that must be in the log."""

    offset: int  # -1 for none
    crc: int  # CRC-32 of its bytes


class PendingRow(NamedTuple):
    """One undecided transaction; the fields of ``Pending`` that outlive the process."""

    offset: int
    queue_offset: int
    store_timestamp: int
    group: str
    topic: str
    state: int
    checks: int
    immunity_s: int
    sent: int
    answered: int
    parked_reason: int


class GroupRow(NamedTuple):
    """The further halves of one undecided transaction."""

    leader: int
    members: tuple[MemberHalf, ...]


class CopyRow(NamedTuple):
    """One check copy of Apache RocketMQ."""

    offset: int
    first: int
    queue_offset: int


def load_snapshot(path: Path, log: MessageStore, table: PendingTable, ops: list[int]) -> int | None:
    """Fill an empty table; return the position where replay continues, or None without filling it.

    A snapshot that does not match this log is deleted, so that it cannot match by accident later.
    """
    try:
        with disk.read_stream(path) as file:
            header, rows = _open(file)
            reason = _mismatch(header, rows, log)
            if reason is None:
                _fill(rows, table, ops)
                table.decided.assume_forgotten(header.newest_final)
                return header.position
    except FileNotFoundError:
        return None
    except (OSError, _DefectError, msgspec.ValidationError, ValueError) as error:
        reason = str(error)
        table.clear()
        ops.clear()
    logger.warning("event=snapshot_ignored file=%s reason=%r", path, reason)
    remove_snapshot(path)
    return None


def remove_snapshot(path: Path) -> None:
    """Delete the file so that no later start finds it, not even after a power cut."""
    if disk.exists(path):
        disk.unlink(path)
        disk.sync_directory(path.parent)


class _DefectError(Exception):
    """The file is not a whole snapshot."""


class _Rows(NamedTuple):
    groups: Iterator[object]
    log_end: int
    anchor: Anchor
    total: int


def _open(file: IO[bytes]) -> tuple[SnapshotHeader, _Rows]:
    size = file.seek(0, io.SEEK_END)
    if size < FOOTER.size:
        raise _DefectError(f"only {size} bytes")
    file.seek(size - FOOTER.size)
    log_end, anchor_offset, anchor_crc, total, crc = FOOTER.unpack(file.read(FOOTER.size))
    if _checksum(file, size - CRC_SIZE) != crc:
        raise _DefectError("wrong checksum")
    file.seek(0)
    stream = _objects(file, size - FOOTER.size)
    header = msgspec.convert(next(stream, None), SnapshotHeader)
    if (header.magic, header.version) != (MAGIC, VERSION):
        raise _DefectError(f"a {header.magic} of version {header.version}")
    return header, _Rows(stream, log_end, Anchor(anchor_offset, anchor_crc), total)


def _checksum(file: IO[bytes], size: int) -> int:
    file.seek(0)
    crc = 0
    while size > 0:
        block = file.read(min(size, _BLOCK_SIZE))
        if not block:
            raise _DefectError("shorter than it was")
        crc = crc32(block, crc)
        size -= len(block)
    return crc


def _objects(file: IO[bytes], size: int) -> Iterator[object]:
    """Yield the msgpack objects of the first ``size`` bytes."""
    unpacker = msgpack.Unpacker(use_list=False)
    while size > 0:
        block = file.read(min(size, _BLOCK_SIZE))
        size -= len(block)
        unpacker.feed(block)
        yield from unpacker


def _mismatch(header: SnapshotHeader, rows: _Rows, log: MessageStore) -> str | None:
    """Return why this snapshot does not match this log; None if it does."""
    if rows.log_end > log.write_offset:
        return f"taken at log end {rows.log_end}, the log ends at {log.write_offset}"
    if header.position < log.min_offset:
        return f"continues at {header.position}, the log begins at {log.min_offset}"
    if header.position < log.write_offset and log.reader.record_bytes(header.position) is None:
        return f"no record begins at {header.position}"
    anchor = rows.anchor
    if anchor.offset >= log.min_offset and anchor_at(anchor.offset, log) != anchor:
        return f"another record stands at {anchor.offset}"
    return None


def anchor_at(offset: int, log: MessageStore) -> Anchor:
    """Return the anchor for the record at an offset; an empty one if there is none.

    Raises:
        NotInMemoryError: The record must be read from the disk first.
    """
    record = log.reader.record_bytes(offset) if offset >= 0 else None
    return Anchor(-1, 0) if record is None else Anchor(offset, crc32(record))


def _fill(rows: _Rows, table: PendingTable, ops: list[int]) -> None:
    count = 0
    for group in rows.groups:
        kind, members = msgspec.convert(group, tuple[str, tuple[object, ...]])
        count += len(members)
        if kind == PENDING:
            table.restore(_entries(msgspec.convert(members, list[PendingRow])))
        elif kind == GROUPS:
            for leader, halves in msgspec.convert(members, list[GroupRow]):
                for member in halves:
                    table.add_member(leader, member)
        elif kind == COPIES:
            for copy in msgspec.convert(members, list[CopyRow]):
                table.add_copy(copy.offset, copy.first, copy.queue_offset)
        elif kind == OPS:
            ops.extend(msgspec.convert(members, list[int]))
        else:
            raise _DefectError(f"rows of an unknown kind {kind!r}")
    if count != rows.total:
        raise _DefectError(f"{count} rows instead of {rows.total}")


def _entries(rows: Iterable[PendingRow]) -> Iterator[Pending]:
    """Convert rows to entries, a million within a few seconds.

    The columns after the time have few distinct combinations; each is converted once.
    """
    known: dict[tuple[object, ...], tuple[PendingOrigin, State, CheckProgress]] = {}
    for row in rows:
        columns = row[3:]
        shared_columns = known.get(columns)
        if shared_columns is None:
            shared_columns = known[columns] = _shared_columns(row)
        yield Pending(row[0], row[1], row[2], *shared_columns)


def _shared_columns(row: PendingRow) -> tuple[PendingOrigin, State, CheckProgress]:
    reason = ParkedReason(row.parked_reason)
    progress = CheckProgress(row.sent, row.checks, row.answered, reason, row.immunity_s)
    return PendingOrigin(row.group, row.topic), State(row.state), shared(progress)


class SnapshotWriter:
    """Writes one snapshot into a temporary file, one group of rows at a time."""

    def __init__(self, path: Path, header: SnapshotHeader) -> None:
        self._path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._packer = msgpack.Packer()
        self._crc = 0
        self._rows = 0
        self._header = header
        self._file: disk.NewFile | None = None

    def open(self) -> None:
        """Create the file; this may wait for other operations of the file system."""
        disk.make_directories(self._path.parent)
        self._file = disk.NewFile(self._temporary)
        self._write(self._packer.pack(self._header))

    def add(self, kind: str, rows: Sequence[object]) -> None:
        """Write a group of rows of one kind."""
        if rows:
            self._write(self._packer.pack((kind, rows)))
            self._rows += len(rows)

    def finish(self, log_end: int, anchor: Anchor) -> None:
        """Write the footer; the file is complete, but still has its temporary name."""
        footer = FOOTER.pack(log_end, *anchor, self._rows, 0)[:-CRC_SIZE]
        self._write(footer)
        assert self._file is not None
        self._file.write(self._crc.to_bytes(CRC_SIZE, "big"))
        self._file.flush()

    def publish(self) -> None:
        """Replace the older file; blocks until the new one is on disk."""
        assert self._file is not None
        self._file.sync()
        self._file.close()
        disk.replace(self._temporary, self._path)
        disk.sync_directory(self._path.parent)

    def abandon(self) -> None:
        """Discard the temporary file and keep the older one."""
        if self._file is not None:
            self._file.close()
        disk.remove(self._temporary)

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._crc = crc32(data, self._crc)


def pending_rows(entries: Iterable[Pending]) -> list[tuple[object, ...]]:
    """Return the fields of each ``PendingRow``, as plain tuples: these take a third of the time."""
    return [
        (
            entry.offset,
            entry.queue_offset,
            entry.store_timestamp,
            entry.origin.group,
            entry.origin.topic,
            int(entry.state),
            (progress := entry.progress).delivered,
            progress.immunity_s,
            progress.sent,
            progress.answered,
            int(progress.parked_reason),
        )
        for entry in entries
    ]
