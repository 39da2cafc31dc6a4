"""Reads that do not wait for the disk.

``preadv`` with ``RWF_NOWAIT`` returns only what is in the page cache. Where the system cannot tell
(macOS, some file systems), what is asked for is read in any case.
"""

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from . import disk

_REFUSED: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL})


class CachedReads:
    """Reads files of one file system."""

    __slots__ = ("_flags",)

    def __init__(self) -> None:
        self._flags = disk.NO_WAIT

    def read_into(self, fd: int, targets: Sequence[memoryview | bytearray], position: int) -> int:
        """Fill targets with what follows ``position`` of a file, as far as it is in memory.

        Return how many bytes that are, -1 if the first is not.
        """
        try:
            return disk.preadv(fd, targets, position, self._flags)
        except BlockingIOError:
            return -1
        except OSError as error:
            if error.errno not in _REFUSED or not self._flags:
                raise
            self._flags = 0
            return disk.preadv(fd, targets, position)


class NotInMemoryError(Exception):
    """What is to be read lies on the disk only; after ``fetch`` it can be read."""

    def __init__(self, path: Path, position: int, size: int) -> None:
        super().__init__(path, position, size)
        self.path, self.position, self.size = path, position, size

    def __str__(self) -> str:
        return f"{self.size} bytes at {self.position} of {self.path} are not in memory"

    def fetch(self) -> None:
        """Bring it into memory, waiting for the disk; for a helper thread.

        Raises:
            OSError: The file cannot be read, or is gone.
        """
        with disk.opened(self.path) as fd:
            disk.pread(fd, self.size, self.position)


class _Manner(threading.local):
    waits = True


_manner = _Manner()
_cached = CachedReads()


@contextmanager
def without_waiting() -> Iterator[None]:
    """Within it ``read`` raises ``NotInMemoryError`` rather than to wait, on this thread.

    For the event loop, which has somebody ``fetch`` what is missing, and does its work once more.
    """
    _manner.waits = False
    try:
        yield
    finally:
        _manner.waits = True


def read(path: Path, fd: int, size: int, position: int) -> bytes:
    """Return at most ``size`` bytes of a file, which is open as ``fd``; fewer at its end.

    Raises:
        NotInMemoryError: It would have to wait, and may not.
    """
    if _manner.waits:
        return disk.pread(fd, size, position)
    target = bytearray(size)
    view = memoryview(target)
    filled = 0
    while filled < size:
        got = _cached.read_into(fd, (view[filled:],), position + filled)
        if got < 0:
            raise NotInMemoryError(path, position, size)
        if got == 0:
            break
        filled += got
    return bytes(view[:filled])
