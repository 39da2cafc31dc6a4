"""Send from the page cache to a socket without a copy and without waiting for the disk.

``sendfile(2)`` reads data that is not in memory from the disk, and the caller waits. So the kernel
is asked first: ``cachestat(2)`` (Linux 6.5) returns within a microsecond how many pages of a range
of a file are in memory. The answer for a block is cached for a tenth of a second, because a call
for each pull would add 7 %. If the kernel evicts a page of a block within that time, the event loop
waits for the disk once; pages in use are almost never evicted.

Until the peer has received it, the data in the socket is the page of the file itself. It must not
be overwritten, even when the file is deleted: ``deferred_delete`` cuts files at multiples of a huge
page, which is two mebibytes if pages have four kibibytes. With other page sizes this is not used.

Source: Linux ``mm/filemap.c`` and ``include/uapi/linux/mman.h``; the number of the call is the same
on all architectures but alpha.
"""

import ctypes
import sys
from time import monotonic
from typing import Final

import msgspec

from . import disk

# Bytes of one question to the kernel. A block holds seven large answers, and counting its 64 pages
# takes little longer than counting the nine of one answer.
BLOCK_SIZE: Final = 256 << 10
ANSWER_AGE_MAX: Final = 0.1  # seconds for which an answer is used
BLOCKS_MAX: Final = 4096  # cached answers, for a gibibyte of log; above it all are dropped
CACHESTAT: Final = ctypes.c_long(451)  # number of the system call
_PAGE_SIZE: Final = 4096  # bytes
_NO_FLAGS: Final = ctypes.c_uint(0)
# Words of eight bytes: `struct cachestat_range` (offset, length) and `struct cachestat`, of which
# only the first word is used, the number of cached pages.
_RANGE_WORDS: Final = 2
_PAGES_WORDS: Final = 5


class FilePart(msgspec.Struct, frozen=True, gc=False):
    """A range of an open file; valid until the store is called again, which may close the file."""

    fd: int
    position: int
    length: int

    def send(self, connected: int, sent: int = 0) -> int:
        """Send from byte ``sent`` of the range on; return how many bytes the socket accepted.

        Raises:
            BlockingIOError: The socket accepts none now.
            OSError: The connection is closed, or the file system does not support sendfile.
        """
        assert disk.sendfile is not None  # otherwise the store returns no part
        return disk.sendfile(connected, self.fd, self.position + sent, self.length - sent)

    def rest(self, sent: int = 0) -> bytes:
        """Return the range from byte ``sent`` on; less if the file ends before it.

        Raises:
            OSError: The file cannot be read.
        """
        return disk.read_fully(self.fd, self.length - sent, self.position + sent)


class PageResidency:
    """Which parts of open files are in the page cache, according to the kernel; one thread."""

    is_known: bool
    """Whether the kernel supports the call, as far as known."""

    def __init__(self) -> None:
        self._range, self._range_at = _words(_RANGE_WORDS)
        self._pages, self._pages_at = _words(_PAGES_WORDS)
        self._last_byte = (bytearray(1),)
        self._cached_until: dict[int, float] = {}  # by the physical offset of a block
        self.is_known = sys.platform == "linux"
        if self.is_known:
            # PyDLL does not release the interpreter, which would take longer than the call. The
            # arguments are C types, because converting them would double the time.
            self._syscall = ctypes.PyDLL(None).syscall
            self._syscall.restype = ctypes.c_long

    @property
    def may_send(self) -> bool:
        """Whether the system supports sendfile and reports which pages are in memory."""
        return self.is_known and disk.sendfile is not None and disk.PAGE_SIZE == _PAGE_SIZE

    def cached(self, fd: int, position: int, length: int) -> int | None:
        """Return how many bytes of a range are cached, in whole pages; None if unknown."""
        if not self.is_known:
            return None
        self._range[0], self._range[1] = position, length
        if self._syscall(CACHESTAT, fd, self._range_at, self._pages_at, _NO_FLAGS):
            self.is_known = False  # an older kernel, or a file system without support
            return None
        return self._pages[0] * disk.PAGE_SIZE

    def lacks(self, fd: int, position: int, length: int) -> bool:
        """Return whether a part of a range is known not to be cached."""
        cached = self.cached(fd, position, length)
        return cached is not None and cached < length + position % disk.PAGE_SIZE

    def has(self, fd: int, base: int, position: int, length: int) -> bool:
        """Return whether a range of the file at ``base`` is, or was a moment ago, cached."""
        now = monotonic()
        for start in range(position - position % BLOCK_SIZE, position + length, BLOCK_SIZE):
            if self._cached_until.get(base + start, 0.0) <= now:
                if not self._is_cached(fd, start, BLOCK_SIZE):
                    return self._is_cached(fd, position, length)
                if len(self._cached_until) >= BLOCKS_MAX:
                    self._cached_until.clear()
                self._cached_until[base + start] = now + ANSWER_AGE_MAX
        return True

    def _is_cached(self, fd: int, position: int, length: int) -> bool:
        """Ask the kernel whether a range is cached.

        It counts pages that are still being read. It reads in order, so if the last page can be
        read without waiting, all can.
        """
        if self.lacks(fd, position, length) or not self.is_known:
            return False
        try:
            last = position + length - 1
            return disk.preadv(fd, self._last_byte, last, disk.NO_WAIT) == 1
        except BlockingIOError:
            return False


def _words(count: int) -> tuple[memoryview, ctypes.c_void_p]:
    """Return memory for the arguments of a call, and its address."""
    memory = bytearray(8 * count)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memoryview(memory).cast("Q"), ctypes.c_void_p(address)
