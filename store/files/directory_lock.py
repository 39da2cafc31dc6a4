"""The directory lock: one broker per store root.

RocketMQ locks byte 0 of the file ``lock``, whose content is the four letters of its name. halfmq
locks the same byte, so that each refuses to start beside the other. After the four letters halfmq
writes its process id and start time, which the second broker prints. The system releases the lock
when the process ends in any way, and also when the process closes *any* descriptor of the file. So
a second lock of one root by this process is refused without opening the file.
Source: RocketMQ ``DefaultMessageStore.java``.
"""

import contextlib
import fcntl
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from struct import Struct
from typing import Final

from ..errors import DirectoryInUseError
from . import disk
from .mapped_file import make_directory

_CONTENT: Final = b"lock"  # what RocketMQ writes
_HOLDER_SIZE_MAX: Final = 200  # bytes
_held: set[Path] = set()  # by this process
# struct flock in C's layout, as F_GETLK fills it in.
if sys.platform == "darwin":
    _FLOCK: Final = Struct("qqihh")  # start, length, pid, type, whence
    _TYPE_FIELD: Final = 3
    _QUESTION: Final = (0, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)
else:
    _FLOCK = Struct("hhqqi4x")  # type, whence, start, length, pid
    _TYPE_FIELD = 0
    _QUESTION = (fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)


def is_held(root: Path) -> bool:
    """Return whether a broker uses a store root; does not take the lock or write anything."""
    if root.resolve() in _held:
        return True  # closing a descriptor of the file would release the lock
    try:
        fd = disk.open_file(root / "lock", disk.READ)
    except FileNotFoundError:
        return False
    try:
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(*_QUESTION))
    finally:
        disk.close(fd)
    return bool(_FLOCK.unpack(answer)[_TYPE_FIELD] != fcntl.F_UNLCK)


class DirectoryLock:
    """Exclusive use of a store root, from ``acquire`` to ``release``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fd = -1

    def acquire(self, now_ms: int) -> None:
        """Take the lock without waiting.

        Raises:
            DirectoryInUseError: Another store holds it; the error says which.
        """
        make_directory(self._root)
        root = self._root.resolve()
        if root in _held:
            raise DirectoryInUseError(self._root, f"pid {os.getpid()}, this very process")
        fd = disk.open_file(root / "lock", disk.CREATE, disk.MODE)
        since = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="seconds")
        try:
            self._lock(fd)
            disk.ftruncate(fd, 0)
            disk.pwrite(fd, _CONTENT + f"\npid {os.getpid()}, started {since}\n".encode(), 0)
        except BaseException:
            disk.close(fd)  # also releases the lock
            raise
        self._fd = fd
        _held.add(root)

    def _lock(self, fd: int) -> None:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except (BlockingIOError, PermissionError) as error:  # others: no locks on this file system
            holder = disk.pread(fd, _HOLDER_SIZE_MAX, len(_CONTENT)).decode(errors="replace")
            raise DirectoryInUseError(self._root, holder.strip() or "it left no name") from error

    def is_intact(self) -> bool:
        """Return whether the locked file is still the one that another broker would lock."""
        return disk.is_at(self._root / "lock", self._fd)

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # harmless if the text stays
                disk.ftruncate(self._fd, len(_CONTENT))
            disk.close(self._fd)
            self._fd = -1
            _held.discard(self._root.resolve())
