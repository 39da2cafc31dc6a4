"""Reads that do not wait for the disk.

``preadv`` with ``RWF_NOWAIT`` returns only what is in the page cache. Where the system cannot tell
(macOS, some file systems), what is asked for is read in any case.
"""

import errno
from typing import Final

from . import disk

_REFUSED: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL})


class CachedReads:
    """Reads files of one file system."""

    __slots__ = ("_flags",)

    def __init__(self) -> None:
        self._flags = disk.NO_WAIT

    def fill(self, fd: int, target: memoryview | bytearray, position: int) -> bool:
        """Read a file from ``position`` on; False if not all of that is in memory."""
        try:
            got = disk.preadv(fd, (target,), position, self._flags)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _REFUSED or not self._flags:
                raise
            self._flags = 0
            got = disk.preadv(fd, (target,), position)
        return got == len(target)
