"""Sending from the page cache to a socket without a copy, as long as nobody waits for the disk.

What ``sendfile(2)`` does not find in memory it reads from the disk, and whoever calls it waits. So
the kernel is asked first: ``cachestat(2)``, Linux 6.5, tells within a microsecond how many pages of
a file's range are in memory. The answer for a block is believed for a tenth of a second, since to
ask for each pull would take 7 % of it. Should the kernel give away a page of a block within that
time, the loop waits once for the disk to bring it back; of pages in use that is nearly never asked.

Until the peer has taken it, what was sent is the page of the file itself. Nothing may be written
over it, not even when the file is deleted: ``leaving`` spares whole huge pages, of two mebibytes
where pages have four kibibytes. Elsewhere nothing is sent in this way.

Source: Linux ``mm/filemap.c`` and ``include/uapi/linux/mman.h``; the number of the call is the same
on all architectures but alpha.
"""

import ctypes
import sys
from time import monotonic
from typing import Final

import msgspec

from . import disk

# Bytes that are asked for at once. A block holds seven large answers, and to count its 64 pages
# takes little longer than to count the nine of one answer.
BLOCK_SIZE: Final = 256 << 10
BELIEVED_S: Final = 0.1  # seconds
BLOCKS_MAX: Final = 4096  # remembered, a gibibyte of log; then all are forgotten
_CACHESTAT: Final = ctypes.c_long(451)  # number of the system call
_PAGE_SIZE: Final = 4096  # bytes
_NO_FLAGS: Final = ctypes.c_uint(0)
# In words of eight bytes: `struct cachestat_range`, which is offset and length, and `struct
# cachestat`, of which the first is looked at, the pages that are cached.
_RANGE_WORDS: Final = 2
_PAGES_WORDS: Final = 5


class FilePart(msgspec.Struct, frozen=True, gc=False):
    """A range of an open file; of use until the store is called again, which may close it."""

    fd: int
    position: int
    length: int

    def send(self, connected: int, sent: int = 0) -> int:
        """Send what follows the first ``sent`` bytes; return how many the socket has taken.

        Raises:
            BlockingIOError: It takes none now.
            OSError: The connection is gone, or the file system sends nothing in this way.
        """
        assert disk.sendfile is not None  # or there would be no part
        return disk.sendfile(connected, self.fd, self.position + sent, self.length - sent)

    def rest(self, sent: int = 0) -> bytes:
        """Return what follows the first ``sent`` bytes; less if the file ends before it.

        Raises:
            OSError: It cannot be read.
        """
        return disk.read_fully(self.fd, self.length - sent, self.position + sent)


class PageResidency:
    """What of open files is in the page cache, as the kernel tells it; one thread."""

    is_known: bool
    """Whether the kernel answers, as far as it has been asked."""

    def __init__(self) -> None:
        self._range, self._range_at = _words(_RANGE_WORDS)
        self._pages, self._pages_at = _words(_PAGES_WORDS)
        self._last_byte = (bytearray(1),)
        self._believed_until: dict[int, float] = {}  # by where a block begins in the log
        self.is_known = sys.platform == "linux"
        if self.is_known:
            # One that keeps the interpreter: to give it up would take longer than the answer. The
            # arguments are of C's own types, so that nothing is converted: half of the time.
            self._syscall = ctypes.PyDLL(None).syscall
            self._syscall.restype = ctypes.c_long

    @property
    def may_send(self) -> bool:
        """Whether the system sends from a file, and tells what of it is in memory."""
        return self.is_known and disk.sendfile is not None and disk.PAGE_SIZE == _PAGE_SIZE

    def cached(self, fd: int, position: int, length: int) -> int | None:
        """Return how many bytes of a file's range are there, in whole pages; None: not known."""
        if not self.is_known:
            return None
        asked = self._range
        asked[0], asked[1] = position, length
        if self._syscall(_CACHESTAT, fd, self._range_at, self._pages_at, _NO_FLAGS):
            self.is_known = False  # an older kernel, or a file system that cannot tell
            return None
        return self._pages[0] * disk.PAGE_SIZE

    def lacks(self, fd: int, position: int, length: int) -> bool:
        """Tell whether some of a file's range is known not to be there."""
        cached = self.cached(fd, position, length)
        return cached is not None and cached < length + position % disk.PAGE_SIZE

    def has(self, fd: int, base: int, position: int, length: int) -> bool:
        """Tell whether a range of the file that begins at ``base`` is there, now or just now."""
        now = monotonic()
        for start in range(position - position % BLOCK_SIZE, position + length, BLOCK_SIZE):
            if self._believed_until.get(base + start, 0.0) <= now:
                if not self._is_there(fd, start, BLOCK_SIZE):
                    return self._is_there(fd, position, length)
                if len(self._believed_until) >= BLOCKS_MAX:
                    self._believed_until.clear()
                self._believed_until[base + start] = now + BELIEVED_S
        return True

    def _is_there(self, fd: int, position: int, length: int) -> bool:
        """Ask the kernel.

        To it a page that is being read counts as there; it reads in order, so when the last one can
        be had, the others can.
        """
        if self.lacks(fd, position, length) or not self.is_known:
            return False
        try:
            last = position + length - 1
            return disk.preadv(fd, self._last_byte, last, disk.NO_WAIT) == 1
        except BlockingIOError:
            return False


def _words(count: int) -> tuple[memoryview, ctypes.c_void_p]:
    """Return memory for a call, and its address."""
    memory = bytearray(8 * count)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memoryview(memory).cast("Q"), ctypes.c_void_p(address)
