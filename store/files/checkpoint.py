"""The checkpoint and the abort marker: what the next start may trust.

The checkpoint names points in time up to which log and queues are known to be on disk; after a
kill, recovery scans from the file that was begun before the older of the two. RocketMQ reads
ours and we read RocketMQ's: five int64, in a file of 4096 bytes. The part of it that RocketMQ
leaves alone says more exactly what is on disk, by a physical offset, so that recovery scans a few
seconds of log instead of a file. There an ordered stop also notes how log and queues looked, so
that the next start sees when some of it was lost since.

The abort marker exists while the store is open. Who finds it on opening knows that the last stop
was none. Source: RocketMQ ``StoreCheckpoint.java``, ``DefaultMessageStore.java``.
"""

import os
from dataclasses import astuple, dataclass
from pathlib import Path
from struct import Struct
from typing import Final

from ..format.crc import crc32
from . import disk

_LAYOUT: Final = Struct(">qqqqq")
_FILE_SIZE: Final = 4096  # bytes; RocketMQ maps a page of the system
assert _LAYOUT.size == 40
_CLOSED_AT: Final = 64
_CLOSED_MAGIC: Final = b"hmqc"
_CLOSED: Final = Struct(">4sqI")  # magic, closed offset, queues digest
_CRC: Final = Struct(">I")
# Behind the note a CRC of all before it: RocketMQ writes its five numbers and leaves the note.
_OURS_AT: Final = _CLOSED_AT + _CLOSED.size + _CRC.size
_QUEUED_AT: Final = _OURS_AT + _CRC.size
# Queues' offset and entries, followed by a CRC of all before: earlier versions leave this note.
_QUEUED: Final = Struct(">qq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The content of the ``checkpoint`` file; times are store timestamps in ms."""

    log_timestamp: int = 0  # physicMsgTimestamp: records up to here are on disk
    queues_timestamp: int = 0  # logicsMsgTimestamp: so are the queue entries
    index_timestamp: int = 0  # indexMsgTimestamp: newest key of the last full index file
    master_flushed_offset: int = 0  # used by RocketMQ's replication
    confirm_offset: int = 0  # confirmPhyOffset: where the last record that recovery saw begins
    closed_offset: int = -1  # ours: where the log ended at an ordered stop; -1 without one
    queues_digest: int = 0  # ours: of all queues' ends at that stop
    queues_offset: int = -1  # ours: where a record begins; it and all before are in queues on disk
    queue_entries: int = 0  # ours: that all queues had on disk then
    is_ours: bool = True  # RocketMQ has not written it since

    def save(self, path: Path) -> None:
        """Write the file and flush it. All of it lies in one sector, so it cannot be torn."""
        fd = disk.open_file(path, disk.CREATE, disk.MODE)
        try:
            created = disk.fstat(fd).st_size < _FILE_SIZE
            if created:
                disk.ftruncate(fd, _FILE_SIZE)
            *rocketmqs, closed_offset, digest, queues_offset, queue_entries, _ = astuple(self)
            closed = _CLOSED.pack(_CLOSED_MAGIC, closed_offset, digest)
            content = _LAYOUT.pack(*rocketmqs).ljust(_CLOSED_AT, b"\0") + closed
            content += _CRC.pack(crc32(closed))
            content += _CRC.pack(crc32(content)) + _QUEUED.pack(queues_offset, queue_entries)
            disk.pwrite(fd, content + _CRC.pack(crc32(content)), 0)
            disk.fsync(fd)
        finally:
            disk.close(fd)
        if created:
            disk.sync_directory(path.parent)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the file; without one, or with a cut one, nothing is trusted."""
    try:
        content = disk.read_bytes(path)
    except FileNotFoundError:
        return Checkpoint(is_ours=False)
    if len(content) < _LAYOUT.size:
        return Checkpoint(is_ours=False)
    log, queues, index, master, confirm = _LAYOUT.unpack_from(content)
    is_ours = content[_OURS_AT:][: _CRC.size] == _CRC.pack(crc32(content[:_OURS_AT]))
    closed_offset, digest = _closed_in(content) if is_ours else (-1, 0)
    queues_offset, queue_entries = _queued_in(content) if is_ours else (-1, 0)
    return Checkpoint(
        log_timestamp=log,
        queues_timestamp=queues,
        index_timestamp=index,
        master_flushed_offset=master,
        confirm_offset=confirm,
        closed_offset=closed_offset,
        queues_digest=digest,
        queues_offset=queues_offset,
        queue_entries=queue_entries,
        is_ours=is_ours,
    )


def _closed_in(content: bytes) -> tuple[int, int]:
    """Return what the last ordered stop of ours noted; -1 and 0 where nothing valid stands."""
    closed = content[_CLOSED_AT : _CLOSED_AT + _CLOSED.size]
    check = content[_CLOSED_AT + _CLOSED.size :][: _CRC.size]
    if len(check) < _CRC.size or check != _CRC.pack(crc32(closed)):
        return -1, 0
    magic, closed_offset, digest = _CLOSED.unpack(closed)
    return (closed_offset, digest) if magic == _CLOSED_MAGIC else (-1, 0)


def _queued_in(content: bytes) -> tuple[int, int]:
    """Return offset and entries of the queues; -1 and 0 if an earlier version wrote the rest."""
    end = _QUEUED_AT + _QUEUED.size
    if content[end:][: _CRC.size] != _CRC.pack(crc32(content[:end])):
        return -1, 0
    offset, entries = _QUEUED.unpack_from(content, _QUEUED_AT)
    return offset, entries


def closed_note_is_damaged(path: Path) -> bool:
    """Tell whether something stands where an ordered stop of ours leaves its note, and is none."""
    try:
        content = disk.read_bytes(path)
    except FileNotFoundError:
        return False
    note = content[_CLOSED_AT:][: _CLOSED.size]
    check = content[_CLOSED_AT + _CLOSED.size :][: _CRC.size]
    return any(note + check) and check != _CRC.pack(crc32(note))


class Marker:
    """A file that says something by being there, also after a power cut."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def is_set(self) -> bool:
        """Tell whether it is there."""
        return disk.exists(self._path)

    def create(self) -> None:
        """Set it, durably. It holds the process id, as RocketMQ's ``abort`` does."""
        disk.write_file(self._path, str(os.getpid()).encode(), sync=True)
        disk.sync_directory(self._path.parent)

    def remove(self) -> None:
        """Clear it, durably. What it stands for must be on disk by now."""
        disk.remove(self._path)
        disk.sync_directory(self._path.parent)


def abort_marker(root: Path) -> Marker:
    """Return the marker of an open store: without it the last stop was an ordered one."""
    return Marker(root / "abort")


def rebuild_marker(root: Path, directory: str) -> Marker:
    """Return the marker that has a start rebuild what is in a directory of the store from the log.

    It is set if a block is damaged, and while queues are rebuilt, in case that start is killed.
    """
    return Marker(root / f"{directory}.rebuild")
