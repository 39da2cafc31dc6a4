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

_CACHESTAT: Final = ctypes.c_long(451)  # number of the system call
_NO_FLAGS: Final = ctypes.c_uint(0)


# What a call asks, `struct cachestat_range`, and what it is told, `struct cachestat`, in words of
# eight bytes. Of the second the first is looked at, the pages that are cached.
_RANGE_WORDS: Final = 2  # offset and length
_PAGES_WORDS: Final = 5


def _words(count: int) -> tuple[memoryview, ctypes.c_void_p]:
    """Return memory for a call, and its address."""
    memory = bytearray(8 * count)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memoryview(memory).cast("Q"), ctypes.c_void_p(address)


class Residence:
    """The question to the kernel; one thread."""

    is_known: bool
    """Whether the kernel answers, as far as it has been asked."""

    def __init__(self) -> None:
        self._range, self._range_at = _words(_RANGE_WORDS)
        self._pages, self._pages_at = _words(_PAGES_WORDS)
        self.is_known = sys.platform == "linux"
        if self.is_known:
            # One that keeps the interpreter: to give it up would take longer than the answer. The
            # arguments are of C's own types, so that nothing is converted: half of the time.
            self._syscall = ctypes.PyDLL(None).syscall
            self._syscall.restype = ctypes.c_long

    def lacks(self, fd: int, position: int, length: int) -> bool:
        """Tell whether some of a file's range is known not to be there."""
        page = disk.PAGE_SIZE
        pages = (position + length - 1) // page - position // page + 1
        return self._ask(fd, position, length) and self._pages[0] < pages

    def cached(self, fd: int, position: int, length: int) -> int | None:
        """Return how many bytes of a file's range are there, in whole pages; None: not known."""
        if not self._ask(fd, position, length):
            return None
        return self._pages[0] * disk.PAGE_SIZE

    def _ask(self, fd: int, position: int, length: int) -> bool:
        """Have the kernel fill in its answer; say whether it could."""
        if not self.is_known:
            return False
        asked = self._range
        asked[0], asked[1] = position, length
        if self._syscall(_CACHESTAT, fd, self._range_at, self._pages_at, _NO_FLAGS):
            self.is_known = False  # an older kernel, or a file system that cannot tell
        return self.is_known
