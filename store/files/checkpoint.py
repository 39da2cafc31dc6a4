"""The checkpoint and the abort marker: how far the next start can trust the files.

The checkpoint holds store times up to which log and queues are on disk; after a kill, recovery
scans from the file that was begun before the older of the two. halfmq and RocketMQ read each
other's checkpoints: five int64 in a file of 4096 bytes. In the part that RocketMQ does not use,
halfmq stores a physical offset, so that recovery scans a few seconds of log instead of a file, and
where the queues began and ended below it, so that every start detects lost queue files. A clean
stop also stores where the log ended.

The abort marker exists while the store is open. If it exists when a store is opened, the previous
run did not stop cleanly. Source: RocketMQ ``StoreCheckpoint.java``, ``DefaultMessageStore.java``.

The durable mark says up to which offset the log is on disk, for a start after a kill or power cut.
Below the mark no record can be torn by a power cut: an invalid record there is damage, and records
after it were acknowledged. Above the mark any sector may be missing, and the log ends at the first
record that is not whole. Without the mark the two cases look the same. It is written after each
flush of the log and is not flushed itself: if it did not reach the disk, the previous one is there,
which is lower but true. It lies in a sector of its own in the checkpoint file, and is valid only if
halfmq wrote that file last: RocketMQ may have cut the log below it.

The confirmed mark, in another sector, says up to which offset a slave had the log. It may be older
than the truth, too: then consumers wait for the slave before they see the rest again.
"""

import logging
import os
from dataclasses import astuple, dataclass
from pathlib import Path
from struct import Struct
from typing import Final

from ..format.crc import crc32
from . import disk

_LAYOUT: Final = Struct(">qqqqq")
FILE_SIZE: Final = 4096  # bytes; RocketMQ maps a page of the system
assert _LAYOUT.size == 40
_CLOSED_AT: Final = 64
_CLOSED_MAGIC: Final = b"hmqc"
_CLOSED: Final = Struct(">4sq4x")  # magic, closed offset
_CRC: Final = Struct(">I")
# After the note, a CRC of everything before it: RocketMQ changes its five numbers, not the note.
_OURS_AT: Final = _CLOSED_AT + _CLOSED.size + _CRC.size
_DERIVED_AT: Final = _OURS_AT + _CRC.size
# Fields about queues and index, then a CRC of everything before; earlier versions wrote others.
_DERIVED: Final = Struct(">qQqq16x")  # earlier versions had two more fields


_MARK_AT: Final = 512  # bytes; the checkpoint's notes end at 140
CONFIRMED_AT: Final = 1024
_MARK: Final = Struct(">4sqI")  # magic, offset, CRC of both
_MARK_MAGIC: Final = b"hmqd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The content of the ``checkpoint`` file; times are store timestamps in ms."""

    log_timestamp: int = 0  # physicMsgTimestamp: records up to here are on disk
    queues_timestamp: int = 0  # logicsMsgTimestamp: so are the queue entries
    index_timestamp: int = 0  # indexMsgTimestamp: newest key of the last full index file
    master_flushed_offset: int = 0  # used by RocketMQ's replication
    confirm_offset: int = 0  # confirmPhyOffset: where the last record that recovery saw begins
    closed_offset: int = -1  # ours: where the log ended at a clean stop; -1 without one
    queues_offset: int = -1  # ours: begin of a record; it and all before are in queues on disk
    queue_ends: int = 0  # ours: checksum of where all queues end below that record
    log_start: int = -1  # ours: where a log begins to which ``queue_begins`` belongs
    queue_begins: int = 0  # ours: sum of the queue offsets at which all queues begin
    is_ours: bool = True  # RocketMQ has not written the file since

    def save(self, path: Path) -> None:
        """Write the file and flush it. The content lies in one sector, so it cannot be torn."""
        fd = disk.open_file(path, disk.CREATE, disk.MODE)
        try:
            created = disk.fstat(fd).st_size < FILE_SIZE
            if created:
                disk.ftruncate(fd, FILE_SIZE)
            fields = astuple(self)
            rocketmqs, closed_offset, derived = fields[:5], fields[5], fields[6:-1]
            closed = _CLOSED.pack(_CLOSED_MAGIC, closed_offset)
            content = _LAYOUT.pack(*rocketmqs).ljust(_CLOSED_AT, b"\0") + closed
            content += _CRC.pack(crc32(closed))
            content += _CRC.pack(crc32(content)) + _DERIVED.pack(*derived)
            disk.pwrite(fd, content + _CRC.pack(crc32(content)), 0)
            disk.fsync(fd)
        finally:
            disk.close(fd)
        if created:
            disk.sync_directory(path.parent)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the file; if it is missing or too short, return a checkpoint that claims nothing."""
    try:
        content = disk.read_bytes(path)
    except FileNotFoundError:
        return Checkpoint(is_ours=False)
    if len(content) < _LAYOUT.size:
        return Checkpoint(is_ours=False)
    log, queues, index, master, confirm = _LAYOUT.unpack_from(content)
    is_ours = content[_OURS_AT:][: _CRC.size] == _CRC.pack(crc32(content[:_OURS_AT]))
    if not is_ours and _note_is_damaged(content):
        return Checkpoint(is_ours=False)
    offset, ends, log_start, begins = _derived_in(content) if is_ours else _UNKNOWN
    return Checkpoint(
        log_timestamp=log,
        queues_timestamp=queues,
        index_timestamp=index,
        master_flushed_offset=master,
        confirm_offset=confirm,
        closed_offset=_closed_in(content) if is_ours else -1,
        queues_offset=offset,
        queue_ends=ends,
        log_start=log_start,
        queue_begins=begins,
        is_ours=is_ours,
    )


def _closed_in(content: bytes) -> int:
    """Return where the log ended at halfmq's last clean stop; -1 if there is no valid note."""
    closed = content[_CLOSED_AT : _CLOSED_AT + _CLOSED.size]
    check = content[_CLOSED_AT + _CLOSED.size :][: _CRC.size]
    if len(check) < _CRC.size or check != _CRC.pack(crc32(closed)):
        return -1
    magic, closed_offset = _CLOSED.unpack(closed)
    return int(closed_offset) if magic == _CLOSED_MAGIC else -1


_UNKNOWN: Final = (-1, 0, -1, 0)


def _derived_in(content: bytes) -> tuple[int, int, int, int]:
    """Return the fields about queues and index; no offsets if an earlier version wrote them."""
    end = _DERIVED_AT + _DERIVED.size
    if content[end:][: _CRC.size] != _CRC.pack(crc32(content[:end])):
        return _UNKNOWN
    offset, ends, log_start, begins = _DERIVED.unpack_from(content, _DERIVED_AT)
    return offset, ends, log_start, begins


def closed_note_is_damaged(path: Path) -> bool:
    """Return whether the note of a clean stop is present but invalid."""
    try:
        return _note_is_damaged(disk.read_bytes(path))
    except FileNotFoundError:
        return False


def _note_is_damaged(content: bytes) -> bool:
    note = content[_CLOSED_AT:][: _CLOSED.size]
    check = content[_CLOSED_AT + _CLOSED.size :][: _CRC.size]
    return any(note + check) and check != _CRC.pack(crc32(note))


class Marker:
    """A file whose existence is the information; durable."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def is_set(self) -> bool:
        return disk.exists(self._path)

    def create(self) -> None:
        """Create the file, durably. It holds the process id, as RocketMQ's ``abort`` does."""
        disk.write_file(self._path, str(os.getpid()).encode(), sync=True)
        disk.sync_directory(self._path.parent)

    def remove(self) -> None:
        """Remove the file, durably; all that the marker protects must be on disk."""
        disk.remove(self._path)
        disk.sync_directory(self._path.parent)


def abort_marker(root: Path) -> Marker:
    """Return the marker of an open store; if it is not set, the previous run stopped cleanly."""
    return Marker(root / "abort")


def rebuild_marker(root: Path, directory: str) -> Marker:
    """Return the marker that makes a start rebuild a directory of the store from the log.

    It is set if a block is damaged, and while queues are rebuilt, in case that start is killed.
    """
    return Marker(root / f"{directory}.rebuild")


logger = logging.getLogger(__name__)


class DurableMark:
    """A mark in the checkpoint file; one thread at a time."""

    def __init__(self, path: Path, at: int = _MARK_AT) -> None:
        self._path = path
        self._at = at
        self._fd = -1

    def load(self) -> int:
        """Return the offset of the mark; -1 if there is none."""
        try:
            content = disk.read_bytes(self._path)[self._at :][: _MARK.size]
        except FileNotFoundError:
            return -1
        if len(content) < _MARK.size:
            return -1
        magic, offset, _ = _MARK.unpack(content)
        return int(offset) if magic == _MARK_MAGIC and content == _encoded_mark(offset) else -1

    def start(self, offset: int) -> None:
        """Write the first mark of this run; the checkpoint file exists."""
        known = self.load()
        self._fd = disk.open_file(self._path, disk.WRITE)
        disk.pwrite(self._fd, _encoded_mark(offset), self._at)
        if not 0 <= known <= offset:
            disk.fsync(self._fd)  # the mark on disk is too high, or there is none

    def move(self, offset: int) -> None:
        """Record that everything below an offset is on disk, or on a slave.

        A mark that was not started stays away.
        """
        if self._fd < 0:
            return
        try:
            disk.pwrite(self._fd, _encoded_mark(offset), self._at)
        except OSError as error:
            # An old mark is as true as a new one.
            logger.warning("event=durable_mark_not_written error=%r", str(error))

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            disk.close(self._fd)
            self._fd = -1


def _encoded_mark(offset: int) -> bytes:
    crc = crc32(_MARK_MAGIC + offset.to_bytes(8, "big", signed=True))
    return _MARK.pack(_MARK_MAGIC, offset, crc)
