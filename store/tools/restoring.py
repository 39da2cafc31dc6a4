"""``halfmq store restore``: make a store of an archive, as a whole or up to a time.

Log files and digests are fetched into another directory, which gets the name of the target when
everything is there and on disk; each block is compared with its digest. The last file ends with the
last record of the range, as in a copy. The first start rebuilds queues and index from the log.
"""

from bisect import bisect_right
from datetime import datetime
from pathlib import Path

from ..archive.archiver import digest_name, log_name
from ..archive.objects import Objects
from ..errors import ArchiveFailedError, UnusableFileError
from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..format.record import HEAD_SIZE_MAX, store_timestamp
from ..format.record_fields import struct_of
from ..integrity.file_digest import Digest, unpacked
from .copying import Copied, Progress, filled, find_stop

_PIECE = 1 << 20  # bytes of one request
_SYS_FLAG = struct_of("sys_flag")


def restore(
    url: str,
    target: Path,
    *,
    end: datetime | None = None,
    progress: Progress = lambda done, total: None,
) -> Copied:
    """Fetch the log up to its end, or to the last record stored until a time.

    Raises:
        ArchiveFailedError: The archive cannot be read, or is damaged.
        UnusableFileError: It has nothing of that time, or the target exists.
        OSError: The target cannot be written.
    """
    objects = Objects(url)
    with filled(target) as partial:
        bases = [int(name) for name in objects.names("commitlog")]
        if end is not None:
            end_ms = int(end.timestamp() * 1000)
            reached = bisect_right(bases, end_ms, key=lambda base: _first_time(objects, base))
            bases = bases[:reached]
        if not bases:
            raise UnusableFileError(target, f"{url} has no log file of this range")
        return _restore(objects, bases, partial, end, progress)


def _restore(
    objects: Objects, bases: list[int], root: Path, end: datetime | None, progress: Progress
) -> Copied:
    for folder in ("commitlog", "digests/commitlog"):
        disk.make_directories(root / folder)
    for number, base in enumerate(bases):
        packed = objects.get(digest_name(log_name(base)))
        digest = unpacked(packed)
        if digest is None:
            raise ArchiveFailedError(digest_name(log_name(base)), "is damaged")
        progress(number * digest.end, len(bases) * digest.end)
        _fetch(objects, log_name(base), root / log_name(base), digest)
        disk.write_file(root / digest_name(log_name(base)), packed)
        files = MappedFileQueue(root / "commitlog", digest.end)
    files.bases = bases
    if files.missing() is not None:
        raise ArchiveFailedError(log_name(files.missing() or 0), "is missing")
    last, size = bases[-1], files.file_size
    if end is None:
        return Copied(first_offset=bases[0], end_offset=last + size, files=len(bases), damaged=0)
    stop = find_stop(files, last, end, live=False)
    if stop.size < size:
        path = files.path(last)
        disk.truncate(path, stop.size)
        disk.truncate(path, size)
        disk.remove(root / digest_name(log_name(last)))
    return Copied(
        first_offset=bases[0], end_offset=stop.end_offset, files=len(bases), damaged=stop.damaged
    )


def _fetch(objects: Objects, name: str, path: Path, digest: Digest) -> None:
    with disk.opened(path, disk.CREATE_NEW) as fd:
        for start in range(0, digest.end, _PIECE):
            piece = objects.get_range(name, start, min(start + _PIECE, digest.end))
            if not digest.covers(start, piece):
                raise ArchiveFailedError(name, f"differs from its digest after byte {start}")
            disk.write_all(fd, piece, start)
        disk.fsync(fd)


def _first_time(objects: Objects, base: int) -> int:
    """Return the store time in ms of the first record of a log file."""
    head = objects.get_range(log_name(base), 0, HEAD_SIZE_MAX)
    (sys_flag,) = _SYS_FLAG.unpack_from(head)
    return store_timestamp(head, 0, sys_flag)
