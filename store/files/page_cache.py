"""Reads that do not wait for the disk.

``preadv`` with ``RWF_NOWAIT`` returns only what is in the page cache. Where the system cannot tell
(macOS, some file systems), what is asked for is read in any case.
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
_PIECE: Final = 1 << 20  # bytes of memory that a fetch uses, whatever it reads
# Bytes of a record that are read before its size is known, which does for most.
RECORD_FIRST: Final = 2_048
# Bytes of a record that a fetch reads at most, the longest frame: what is no record has any size.
_RECORD_MAX: Final = 16 << 20


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


class Missing(NamedTuple):
    """A part of a file that is not in memory."""

    path: Path
    position: int
    size: int  # bytes; 0: as many as the record has that begins there


class NotInMemoryError(Exception):
    """What is to be read lies on the disk only; after ``fetch`` it can be read."""

    def __init__(self, missing: Sequence[Missing]) -> None:
        """``missing`` may hold more than was looked for, of what will be looked for next."""
        super().__init__(missing)
        self.missing = missing

    def __str__(self) -> str:
        return f"not in memory: {', '.join(f'{at.path}:{at.position}' for at in self.missing)}"

    def fetch(self) -> None:
        """Bring it into memory, waiting for the disk; for a helper thread.

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
False while it serves requests: it has somebody ``fetch`` what is missing, and tries once more."""


@contextmanager
def allowed_to_wait(is_allowed: bool) -> Iterator[None]:
    """Within it ``read`` waits for the disk, or does not, whatever was set before."""
    before, waiting.is_allowed = waiting.is_allowed, is_allowed
    try:
        yield
    finally:
        waiting.is_allowed = before


def read(path: Path, fd: int, size: int, position: int, *, of_record: bool = False) -> bytes:
    """Return at most ``size`` bytes of a file, which is open as ``fd``; fewer at its end.

    With ``of_record`` they are the first ones of a record, all of which will be needed.

    Raises:
        NotInMemoryError: It would have to wait, and may not.
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
