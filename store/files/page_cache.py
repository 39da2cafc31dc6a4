"""Reads that do not wait for the disk.

``preadv`` with ``RWF_NOWAIT`` returns only what is in the page cache. On systems without it (macOS,
some file systems), reads may wait for the disk.
"""

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from ..format.record import PREFIX
from . import disk

_REFUSED: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL})
_PIECE: Final = 1 << 20  # bytes; the memory that one fetch uses
# Bytes read of a record before its size is known; enough for most.
RECORD_FIRST: Final = 2_048
# Most bytes that a fetch reads of a record, the longest frame: invalid data may claim any size.
_RECORD_MAX: Final = 16 << 20


class CachedReads:
    """Reads of cached data from files of one file system."""

    __slots__ = ("_flags",)

    def __init__(self) -> None:
        self._flags = disk.NO_WAIT

    def read_into(self, fd: int, targets: Sequence[memoryview | bytearray], position: int) -> int:
        """Read from ``position`` of a file into targets, as far as the file is in memory.

        Return the number of bytes read; -1 if the first is not in memory.
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


class Missing(NamedTuple):
    """A part of a file that is not in memory."""

    path: Path
    position: int
    size: int  # bytes; 0: the size of the record that begins there


class NotInMemoryError(Exception):
    """The data to read is only on disk; call ``fetch`` and try again."""

    def __init__(self, missing: Sequence[Missing]) -> None:
        """``missing`` may include data that the caller will read next."""
        super().__init__(missing)
        self.missing = missing

    def __str__(self) -> str:
        return f"not in memory: {', '.join(f'{at.path}:{at.position}' for at in self.missing)}"

    def fetch(self) -> None:
        """Read the data into memory, waiting for the disk; for a helper thread.

        Raises:
            OSError: A file cannot be read, or is gone; the others have been read.
        """
        failure: OSError | None = None
        for one in self.missing:
            try:
                _fetch(one)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure


def _fetch(missing: Missing) -> None:
    path, position, size = missing
    with disk.opened(path) as fd:
        if not size:
            first = disk.pread(fd, RECORD_FIRST, position)
            if len(first) < RECORD_FIRST:
                return
            size = min(PREFIX.unpack_from(first)[0], _RECORD_MAX)
        for start in range(position, position + size, _PIECE):
            disk.pread(fd, min(_PIECE, position + size - start), start)


class _Waiting(threading.local):
    is_allowed = True


waiting: Final = _Waiting()
"""Whether ``read`` may wait for the disk, on this thread. The event loop sets ``is_allowed`` to
False while it serves requests: a helper thread calls ``fetch``, and the request is tried again."""


@contextmanager
def allowed_to_wait(is_allowed: bool) -> Iterator[None]:
    """Allow or forbid ``read`` to wait for the disk, within a ``with`` block."""
    before, waiting.is_allowed = waiting.is_allowed, is_allowed
    try:
        yield
    finally:
        waiting.is_allowed = before


def read(path: Path, fd: int, size: int, position: int, *, of_record: bool = False) -> bytes:
    """Return at most ``size`` bytes of a file that is open as ``fd``; fewer at its end.

    With ``of_record`` they are the beginning of a record; a fetch then reads the whole record.

    Raises:
        NotInMemoryError: The read would wait for the disk, which is not allowed on this thread.
    """
    if waiting.is_allowed:
        return disk.pread(fd, size, position)
    target = bytearray(size)
    view = memoryview(target)
    filled = 0
    while filled < size:
        got = _cached.read_into(fd, (view[filled:],), position + filled)
        if got < 0:
            raise NotInMemoryError([Missing(path, position, 0 if of_record else size)])
        if got == 0:
            break
        filled += got
    return bytes(view[:filled])


_cached: Final = CachedReads()
