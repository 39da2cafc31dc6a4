"""The table's snapshot: a file that spares a start the reading of the whole log.

**It is never needed.** A snapshot that is missing, damaged, of another version or of another log is
passed over, and the table is folded from the log's minimum, with the same result.

**It may be taken while the table changes.** ``position`` is the log's end when the writing begins
and ``log_end`` when it is over. Whatever changed in between is in the log behind ``position``,
where a start goes on reading, and a record that the table already reflects changes nothing. So rows
are written in slices between which the broker works.

**It alone has the counts of checks.** Checks write nothing to the log, so one is taken as well when
some were counted since the last. A broker that is killed has forgotten those of the last interval.

**It holds only while the log does.** A decision behind ``position`` may have taken its row off
before it was written. If a power cut took that decision off the log's end, neither would know of
the transaction. So a snapshot counts only for a log that reaches ``log_end``, and it replaces the
older one only when the log is durable up to there. One that the log has fallen short of is deleted
at once, for the log will grow past it again with other records. The anchor, one record by position
and checksum, recognises a log that was exchanged behind our back.

File: a stream of msgpack objects, first the header, then any number of row groups, then a fixed
footer with the checksum of everything before it.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Final, NamedTuple, Protocol

import msgpack
import msgspec

from halfmq.store.files import disk
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.crc import crc32
from halfmq.store.format.transaction_snapshot import CRC_SIZE, FOOTER

from ...loop.slices import Slice
from ..pending import CheckProgress, Member, ParkedReason, Pending, PendingTable, State, shared

logger = logging.getLogger(__name__)

MAGIC: Final = "halfmq-transactions"
VERSION: Final = 2

INTERVAL_MS: Final = 30_000
"""Shortest time between two snapshots."""

LOG_BYTES_MIN: Final = 64 << 20
"""Log written since the last snapshot that makes another one worth its while: reading so much again
at a start takes well under a second."""

ROWS_PER_STEP: Final = 100
"""Rows of a group in the file, written in one step: a tenth of a millisecond."""

WAIT_MS: Final = 5
"""Time between two looks whether the disk has done what a snapshot waits for."""

_BLOCK_SIZE: Final = 1 << 20  # bytes read at a time while the checksum is taken

PENDING: Final = "pending"
GROUPS: Final = "groups"
COPIES: Final = "copies"
OPS: Final = "ops"


class Header(NamedTuple):
    """What a snapshot says about itself."""

    magic: str
    version: int
    position: int  # read the log from here on
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
    state: int
    checks: int
    immunity_s: int
    sent: int
    answered: int
    parked_reason: int


class GroupRow(NamedTuple):
    """The further halves of one undecided transaction."""

    leader: int
    members: tuple[Member, ...]


class CopyRow(NamedTuple):
    """One check copy of Apache RocketMQ."""

    offset: int
    first: int
    queue_offset: int


class Log(Protocol):
    """What snapshots need of the store."""

    @property
    def min_offset(self) -> int: ...

    @property
    def write_offset(self) -> int: ...

    @property
    def durable_offset(self) -> int: ...

    def request_flush(self) -> None: ...

    def record_bytes(self, physical_offset: int) -> bytes | None: ...


# --- reading


def load_snapshot(path: Path, log: Log, table: PendingTable, ops: list[int]) -> int | None:
    """Fill an empty table; return the log position to read on from, or None and fill nothing.

    A snapshot that does not fit this log is deleted, so that it cannot fit by accident later.
    """
    try:
        with disk.read_stream(path) as file:
            header, rows = _open(file)
            reason = _misfit(header, rows, log)
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
    """Make sure that no later start finds the file, not even after a power cut."""
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


def _open(file: IO[bytes]) -> tuple[Header, _Rows]:
    size = file.seek(0, io.SEEK_END)
    if size < FOOTER.size:
        raise _DefectError(f"only {size} bytes")
    file.seek(size - FOOTER.size)
    log_end, anchor_offset, anchor_crc, total, crc = FOOTER.unpack(file.read(FOOTER.size))
    if _checksum(file, size - CRC_SIZE) != crc:
        raise _DefectError("wrong checksum")
    file.seek(0)
    stream = _objects(file, size - FOOTER.size)
    header = msgspec.convert(next(stream, None), Header)
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


def _misfit(header: Header, rows: _Rows, log: Log) -> str | None:
    """Say why this snapshot is not of this log; None when it is."""
    if rows.log_end > log.write_offset:
        return f"taken at log end {rows.log_end}, the log ends at {log.write_offset}"
    if header.position < log.min_offset:
        return f"continues at {header.position}, the log begins at {log.min_offset}"
    if header.position < log.write_offset and log.record_bytes(header.position) is None:
        return f"no record begins at {header.position}"
    anchor = rows.anchor
    if anchor.offset >= log.min_offset and _anchor(anchor.offset, log) != anchor:
        return f"another record stands at {anchor.offset}"
    return None


def _anchor(offset: int, log: Log) -> Anchor:
    record = log.record_bytes(offset) if offset >= 0 else None
    return Anchor(-1, 0) if record is None else Anchor(offset, crc32(record))


def _fetched_anchor(offset: int, log: Log) -> Anchor:
    """Read the anchor on a thread: after hours without traffic it is not in memory."""
    while True:
        try:
            return _anchor(offset, log)
        except NotInMemoryError as missing:  # the event loop must not wait at this moment
            missing.fetch()


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
    """Make entries of rows, a million of them within a few seconds.

    How far the asking has come is said by the last six columns, in few combinations: each is
    looked at once.
    """
    known: dict[tuple[object, ...], tuple[State, CheckProgress]] = {}
    for row in rows:
        columns = row[4:]
        standing = known.get(columns)
        if standing is None:
            standing = known[columns] = _standing(row)
        yield Pending(row[0], row[1], row[2], row[3], *standing)


def _standing(row: PendingRow) -> tuple[State, CheckProgress]:
    reason = ParkedReason(row.parked_reason)
    progress = CheckProgress(row.sent, row.checks, row.answered, reason, row.immunity_s)
    return State(row.state), shared(progress)


# --- writing


class SnapshotWriter:
    """Writes one snapshot, group of rows by group of rows, into a temporary file."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._packer = msgpack.Packer()
        self._crc = 0
        self._rows = 0
        self._header = header
        self._file: disk.NewFile | None = None

    def open(self) -> None:
        """Create the file; that may wait for what the file system has under way."""
        disk.make_directories(self._path.parent)
        self._file = disk.NewFile(self._temporary)
        self._write(self._packer.pack(self._header))

    def add(self, kind: str, rows: Sequence[object]) -> None:
        """Write a group of rows of one kind."""
        if rows:
            self._write(self._packer.pack((kind, rows)))
            self._rows += len(rows)

    def finish(self, log_end: int, anchor: Anchor) -> None:
        """Write the footer; the file is whole, and not yet in place."""
        footer = FOOTER.pack(log_end, *anchor, self._rows, 0)[:-CRC_SIZE]
        self._write(footer)
        assert self._file is not None
        self._file.write(self._crc.to_bytes(CRC_SIZE, "big"))
        self._file.flush()

    def publish(self) -> None:
        """Put the file in the place of the older one; blocks until it is on disk."""
        assert self._file is not None
        self._file.sync()
        self._file.close()
        disk.replace(self._temporary, self._path)
        disk.sync_directory(self._path.parent)

    def abandon(self) -> None:
        """Leave the older file in place."""
        if self._file is not None:
            self._file.close()
        disk.remove(self._temporary)

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._crc = crc32(data, self._crc)


def _pending_rows(entries: Iterable[Pending]) -> list[PendingRow]:
    return [
        PendingRow(
            entry.offset,
            entry.queue_offset,
            entry.store_timestamp,
            entry.group,
            int(entry.state),
            entry.checks,
            entry.immunity_s,
            entry.sent,
            entry.answered,
            int(entry.parked_reason),
        )
        for entry in entries
    ]


class Snapshots:
    """Takes snapshots of a table: in slices while the broker runs, at once when it stops."""

    def __init__(
        self,
        path: Path,
        log: Log,
        table: PendingTable,
        ops: Callable[[], Sequence[int]],
        *,
        counted: Callable[[], int] = lambda: 0,
        log_bytes_min: int = LOG_BYTES_MIN,
    ) -> None:
        """Wire it; ``counted`` tells how many checks were counted since the start."""
        self._path, self._log, self._table, self._ops = path, log, table, ops
        self._counted = counted
        self._noted = 0  # of these, how many the latest snapshot has
        self._log_bytes_min = log_bytes_min
        self._covered = 0  # log position of the latest snapshot
        self._next_ms = 0
        self._work: Generator[bool] | None = None  # yields whether it waits for something
        self.taken = 0

    def covered(self, position: int) -> None:
        """Tell up to where a start has just read the log."""
        self._covered = position

    def tick(self, now_ms: int, time_slice: Slice) -> int:
        """Do the next slice of work; return the milliseconds until there is more to do."""
        if self._work is None:
            if now_ms < self._next_ms:
                return self._next_ms - now_ms
            is_short = self._log.write_offset - self._covered < self._log_bytes_min
            if is_short and self._counted() == self._noted:
                return INTERVAL_MS
            self._next_ms = now_ms + INTERVAL_MS
            self._work = self._take(background=True)
        try:
            for is_waiting in self._work:
                if is_waiting:
                    return WAIT_MS
                if time_slice.is_over:
                    return 0
        except OSError as error:  # a full disk, say: the log alone suffices
            logger.warning("event=snapshot_failed file=%s error=%r", self._path, str(error))
        self._work = None
        return INTERVAL_MS

    def take_now(self) -> None:
        """Take a snapshot without a pause; for the end of the broker's work."""
        if self._work is not None:
            self._work.close()
            self._work = None
        try:
            for _ in self._take(background=False):
                pass
        except OSError as error:
            logger.warning("event=snapshot_failed file=%s error=%r", self._path, str(error))

    def _take(self, *, background: bool) -> Generator[bool]:
        log = self._log
        position, newest = log.write_offset, self._table.newest_offset
        counted = self._counted()
        newest_final = self._table.decided.newest_final
        writer = SnapshotWriter(self._path, Header(MAGIC, VERSION, position, newest_final))
        try:
            if background:
                yield from _in_background(writer.open)
            else:
                writer.open()
            yield from self._write_rows(writer, position)
            log_end = log.write_offset
            if background:
                log.request_flush()  # a quiet broker has nobody else who asks
                while log.durable_offset < log_end:
                    yield True
            if background:
                anchors: list[Anchor] = []
                yield from _in_background(lambda: anchors.append(_fetched_anchor(newest, log)))
                writer.finish(log_end, anchors[0])
                yield from _in_background(writer.publish)
            else:
                writer.finish(log_end, _anchor(newest, log))
                writer.publish()
        except BaseException:  # closed in the middle of it, too
            writer.abandon()
            raise
        self._covered, self._noted = position, counted
        self.taken += 1
        logger.info("event=snapshot_taken position=%d log_end=%d", position, log_end)

    def _write_rows(self, writer: SnapshotWriter, end: int) -> Iterator[bool]:
        """Write what the table holds of the log before ``end``, and all copies."""
        table = self._table
        last = -1
        while entries := [one for one in table.after(last, ROWS_PER_STEP) if one.offset < end]:
            last = entries[-1].offset
            writer.add(PENDING, _pending_rows(entries))
            if table.groups:
                leaders = [entry.offset for entry in entries if entry.offset in table.groups]
                writer.add(GROUPS, [GroupRow(leader, table.groups[leader]) for leader in leaders])
            yield False
        copies = iter(table.copies.items())  # only a start finds any
        while part := list(islice(copies, ROWS_PER_STEP)):
            writer.add(COPIES, [CopyRow(at, one.first, one.queue_offset) for at, one in part])
            yield False
        # Last, so that every decision taken off the table meanwhile is among them or has its op
        # message behind `position`.
        writer.add(OPS, list(self._ops()))


def _in_background(step: Callable[[], None]) -> Iterator[bool]:
    """Do a step on a thread: it lets others run, and may take as long as the disk likes."""
    failures: list[OSError] = []

    def attempt() -> None:
        try:
            step()
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=attempt, name="halfmq-snapshot", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            yield True
    finally:
        if thread is not threading.current_thread():  # which may drop the last reference to us
            thread.join()  # the file must not change hands under it
    if failures:
        raise failures[0]
