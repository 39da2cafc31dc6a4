"""The directory lock: one broker per store root.

RocketMQ locks byte 0 of the file ``lock``, which holds the four letters of its name; so do we,
and either refuses the other. Behind the four letters we write who we are, for the message that
the second one prints. The system drops the lock when the process dies, however it dies.

It also drops it when the process closes *any* descriptor of the file. So a root that this
process already holds is refused from memory, without touching the file.
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
# struct flock, in C's own layout: who holds what, as F_GETLK tells it.
if sys.platform == "darwin":
    _FLOCK: Final = Struct("qqihh")  # start, length, pid, type, whence
    _TYPE_FIELD: Final = 3
    _QUESTION: Final = (0, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)
else:
    _FLOCK = Struct("hhqqi4x")  # type, whence, start, length, pid
    _TYPE_FIELD = 0
    _QUESTION = (fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)


def is_held(root: Path) -> bool:
    """Tell whether a broker works in a store root; neither takes the lock nor writes anything."""
    if root.resolve() in _held:
        return True  # to open the file would drop the lock
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
        """Take the lock, at once or not at all.

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
            disk.close(fd)  # which drops the lock
            raise
        self._fd = fd
        _held.add(root)

    def _lock(self, fd: int) -> None:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except (BlockingIOError, PermissionError) as error:  # others: no locks on this file system
            holder = disk.pread(fd, _HOLDER_SIZE_MAX, len(_CONTENT)).decode(errors="replace")
            raise DirectoryInUseError(self._root, holder.strip() or "it left no name") from error

    def release(self) -> None:
        """Let others in; harmless when the lock is not held."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # a name that stays is of no consequence
                disk.ftruncate(self._fd, len(_CONTENT))
            disk.close(self._fd)
            self._fd = -1
            _held.discard(self._root.resolve())
