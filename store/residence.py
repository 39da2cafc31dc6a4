"""Asking the kernel what of a file is in the page cache.

``cachestat(2)``, Linux 6.5, tells it of a range of an open file within a microsecond, and reads
nothing. The standard library has no name for it yet. Where it is missing nobody knows, and the
answer is no.

Source: Linux ``mm/filemap.c`` and ``include/uapi/linux/mman.h``; the number is the same on all
architectures but alpha.
"""

import ctypes
import sys
from typing import Final

from . import disk

_CACHESTAT: Final = 451  # number of the system call


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("written_back", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


class Residence:
    """The question to the kernel; one thread."""

    is_known: bool
    """Whether the kernel answers, as far as it has been asked."""

    def __init__(self) -> None:
        self._range = _Range()
        self._pages = _Pages()
        self.is_known = sys.platform == "linux"
        if self.is_known:
            # One that keeps the interpreter: to give it up would take longer than the answer.
            self._syscall = ctypes.PyDLL(None).syscall
            self._syscall.argtypes = (
                *(ctypes.c_long, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
            )
            self._syscall.restype = ctypes.c_long
            self._where = ctypes.addressof(self._range)
            self._answer = ctypes.addressof(self._pages)

    def lacks(self, fd: int, position: int, length: int) -> bool:
        """Tell whether some of a file's range is known not to be there."""
        page = disk.PAGE_SIZE
        pages = (position + length - 1) // page - position // page + 1
        return self._ask(fd, position, length) and bool(self._pages.cached < pages)

    def cached(self, fd: int, position: int, length: int) -> int | None:
        """Return how many bytes of a file's range are there, in whole pages; None: not known."""
        if not self._ask(fd, position, length):
            return None
        return int(self._pages.cached) * disk.PAGE_SIZE

    def _ask(self, fd: int, position: int, length: int) -> bool:
        """Have the kernel fill in its answer; say whether it could."""
        if not self.is_known:
            return False
        asked = self._range
        asked.offset, asked.length = position, length
        if self._syscall(_CACHESTAT, fd, self._where, self._answer, 0):
            self.is_known = False  # an older kernel, or a file system that cannot tell
        return self.is_known
