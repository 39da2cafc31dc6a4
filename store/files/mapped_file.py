"""Files of fixed size: create, reserve and zero them; and the log file that is appended to.

If the disk is full, a store into a mapped page without a disk block kills the process with SIGBUS.
So space is reserved or written before it is used through a map, and a full disk is reported at that
point as ``DiskFullError``. Queue and index files are mapped.

Reserved but unwritten space is still slow: the first touch of each page goes through the file
system, 2.8 us per 1 KiB record instead of 0.17 us in prepared space. ``LogFile`` therefore keeps a
mark, ``ready_end``. A helper thread moves it ahead of the appender; an appender that reaches it
moves it itself. Records are written only below the mark, so the two never touch the same bytes.
Space is prepared in two steps that release the interpreter, unlike ``mmap.flush`` or ``madvise``:

* Load its pages into memory. In a virtual machine whose host allocates memory on first touch, each
  page costs 8 to 30 us. The helper does this without the lock of the file. It reads sequentially
  with one descriptor, so that the system reads ahead, in large pages if the file system has them
  (ext4 as of Linux 6.16, xfs): writing 38 KB then takes 7 us instead of 15, and large answers to
  pulls are 6 % faster.
* Write zeros, if senders wait for flushes. The first flush of space that was never written goes
  through the journal of the file system; zeros move this cost to the helper. Under ASYNC_FLUSH,
  when nobody waits, zeros would only double the writes: batches reached 90 % of the rate. A new
  file reads as zeros anyway.

Zeros and records share the lock of the file, which the call that writes zeros releases after every
sixteen pages. Both steps work on a mebibyte at a time, because each call makes the helper wait for
the interpreter, which an appender at full load rarely releases. With 256 KiB the helper was too
slow at 150 MB/s, and the appender prepared a third of the log itself.

Records are written by pwrite and not through a map. A flush write-protects the pages of a map, and
the page fault of the next write costs more than pwrite: durable producers gain a third by pwrite,
transactions under ASYNC_FLUSH, whose records are flushed as well, 40 % (13 -> 17 k/s). A single
record that nobody flushes loses 0.7 us, but under load appends come in groups.

At least eight zero bytes follow the last record and end the log, so that a scan after a crash
cannot continue into data that the file held before.
"""

import errno
import time
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

from ..errors import DiskFullError, UnusableFileError
from . import disk

READY_PIECE: Final = 64 << 10  # bytes the appender prepares at once, new memory included
AHEAD_PIECE: Final = 1 << 20  # bytes that the helper prepares at once, in 200 us
# Bytes that must stay free for queues, tables and others when a whole file is reserved.
ROOM_LEFT: Final = 64 << 20
_BLOCK: Final = 512  # bytes; what st_blocks counts, on any file system
_PIECE: Final = 1 << 20  # bytes of one read or write in all other cases
_ZEROS: Final = bytes(_PIECE)
_URGENT_PAUSE: Final = 0.0005  # seconds; the helper's sleep while the appender needs the lock
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


def make_directory(path: Path) -> None:
    """Create a directory and its parents, durably; it may exist."""
    if disk.is_directory(path):
        return
    make_directory(path.parent)
    try:
        disk.mkdir(path, disk.DIRECTORY_MODE)
    except FileExistsError as error:
        if not disk.is_directory(path):
            raise UnusableFileError(path, "is not a directory") from error
    except OSError as error:
        raise _translated(error, path) from error
    disk.sync_directory(path.parent)


def _translated(error: OSError, path: Path) -> Exception:
    """Translate out-of-space errors into ``DiskFullError``; return others unchanged."""
    if error.errno in _NO_SPACE:
        return DiskFullError(path, error.strerror or str(error))
    return error


def lacks_space(error: OSError) -> bool:
    """Return whether a call failed because the disk or a quota is full."""
    return error.errno in _NO_SPACE


def create_file(path: Path, size: int) -> None:
    """Create a sparse file of full size; a crash leaves the whole file or none.

    Raises:
        DiskFullError: There is no space for its name.
    """
    try:
        fd = disk.open_file(path, disk.CREATE_NEW, disk.MODE)
        try:
            disk.ftruncate(fd, size)
        except OSError:
            disk.unlink(path)
            raise
        finally:
            disk.close(fd)
    except OSError as error:
        raise _translated(error, path) from error


def reserve(fd: int, start: int, end: int, path: Path) -> None:
    """Allocate disk blocks for ``start`` to ``end``; the content does not change.

    Raises:
        DiskFullError: The disk or the user's quota has no space for it.
    """
    if not try_reserve(fd, start, end, path):
        try:
            _rewrite(fd, start, end, path)
        except OSError as error:
            raise _translated(error, path) from error


def try_reserve(fd: int, start: int, end: int, path: Path) -> bool:
    """Reserve space as ``reserve`` does; return False if the system has no call for it.

    That is enough for space that is written before it is used through a map.

    Raises:
        DiskFullError: The disk or the user's quota has no space for it.
    """
    if start >= end:
        return True
    if disk.posix_fallocate is None:
        return False
    try:
        disk.posix_fallocate(fd, start, end - start)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise _translated(error, path) from error
    return True


def _rewrite(fd: int, start: int, end: int, path: Path) -> None:
    """Reserve space without a system call for it: rewrite the content, holes as zeros."""
    for position in range(start, end, _PIECE):
        size = min(_PIECE, end - position)
        write_fully(fd, disk.pread(fd, size, position).ljust(size, b"\0"), position, path)


def write_zeros(fd: int, start: int, end: int, path: Path) -> None:
    """Write zeros from ``start`` to ``end``, at most a mebibyte.

    Raises:
        DiskFullError: There is no space for them.
    """
    write_fully(fd, _ZEROS[: end - start], start, path)


def fill_with_zeros(fd: int, start: int, end: int, path: Path) -> None:
    """Write any number of zeros while other threads may write to the file.

    Raises:
        DiskFullError: There is no space for them; some may be written.
    """
    try:
        disk.write_zeros(fd, start, end)
    except OSError as error:
        raise _translated(error, path) from error


def write_fully(fd: int, content: bytes, position: int, path: Path) -> None:
    """Write all of ``content``; a disk that becomes full first accepts a part of it.

    Raises:
        DiskFullError: There is no space for the rest.
    """
    try:
        disk.write_all(fd, content, position)
    except OSError as error:
        raise _translated(error, path) from error


def write_again(path: Path, start: int, end: int) -> None:
    """Rewrite the content from ``start`` to ``end``, so that the next flush writes it to disk."""
    with disk.opened(path, disk.WRITE) as fd:
        for position in range(start, end, _PIECE):
            piece = disk.pread(fd, min(_PIECE, end - position), position)
            disk.write_all(fd, piece, position)


def zero_tail(path: Path, start: int, *, rewritten: int = 0) -> int:
    """Zero the content from byte ``start`` on; return the number of bytes removed.

    Holes and reserved space are skipped, so an unused tail costs nothing. In the first
    ``rewritten`` bytes zeros are written even over zeros: those of an earlier attempt may not be on
    disk.
    """
    cut_end = start
    with disk.opened(path, disk.WRITE) as fd:
        for begin, end in data_ranges(fd, start, disk.fstat(fd).st_size):
            position = begin
            while position < end:
                piece = disk.pread(fd, min(_PIECE, end - position), position)
                if not piece:
                    break  # another program cut the file meanwhile
                if piece != _ZEROS[: len(piece)]:
                    cut_end = position + len(piece.rstrip(b"\0"))
                if position < start + rewritten:
                    disk.write_all(fd, _ZEROS[: len(piece)], position)
                elif cut_end > position:
                    disk.write_all(fd, _ZEROS[: cut_end - position], position)
                position += len(piece)
    return cut_end - start


def data_ranges(fd: int, start: int, size: int) -> list[tuple[int, int]]:
    """Return begin and end of the ranges from ``start`` on that may hold more than zeros, in order.

    All ranges are found before the caller reads any: data that the kernel has read ahead counts as
    data, so that a search while reading would run to the end of the file.
    """
    ranges: list[tuple[int, int]] = []
    end = start
    while (begin := _seek(fd, end, size, data=True)) < size:
        end = min(_seek(fd, begin, size, data=False), size)
        ranges.append((begin, end))
    return ranges


def _seek(fd: int, position: int, size: int, *, data: bool) -> int:
    """Return the position of the next data, or the next hole, at or after ``position``."""
    if position >= size:
        return size
    if disk.SEEK_DATA is None or disk.SEEK_HOLE is None:
        return position if data else size
    try:
        return disk.lseek(fd, position, disk.SEEK_DATA if data else disk.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        return position if data else size  # a file system without holes


def _leaves_room(fd: int, size: int, used: int | None = None) -> bool:
    """Return whether ``ROOM_LEFT`` stays free if a file gets ``size`` bytes; it has ``used``."""
    lacking = size - (disk.fstat(fd).st_blocks * _BLOCK if used is None else used)
    room = disk.fstatvfs(fd)
    return lacking <= 0 or room.f_bavail * room.f_frsize - lacking >= ROOM_LEFT


class LogFile:
    """One file of the commit log, open for appending."""

    __slots__ = (
        "_ahead_fd", "_fd", "_is_helped", "_is_new", "_lock", "_urgent",
        "base", "path", "ready_end", "reserved_end", "size",
    )  # fmt: skip

    def __init__(
        self, path: Path, base: int, size: int, *, written_end: int, is_new: bool = False
    ) -> None:
        """Open an existing file; from ``written_end`` on it is zeroed before it is used.

        A file that ``is_new`` was never written to and reads as zeros.

        The whole file is reserved at once, unless less than ``ROOM_LEFT`` would stay free. Then
        blocks are allocated as the file is zeroed, so that the whole disk can be used.

        Raises:
            DiskFullError: The space could not be reserved.
        """
        self.path = path
        self.base = base
        self.size = size
        self.ready_end = written_end
        self._lock = Lock()
        self._urgent = False
        self._is_new = is_new
        self._ahead_fd = -1  # the helper's own; only the helper may close it while it works
        self._is_helped = False  # the helper is working
        self._fd = disk.open_file(path, disk.WRITE)
        self.reserved_end = 0  # up to where blocks are reserved
        try:
            # make_ready writes the space before it is used
            if _leaves_room(self._fd, size) and try_reserve(self._fd, 0, size, path):
                self.reserved_end = size
        except BaseException:
            disk.close(self._fd)
            raise

    def write(self, position: int, content: bytes) -> None:
        """Write bytes below ``ready_end`` to the page cache of the file."""
        try:
            written = disk.pwrite(self._fd, content, position)
        except OSError as error:
            raise _translated(error, self.path) from error
        if written < len(content):
            write_fully(self._fd, content[written:], position + written, self.path)

    def make_ready(self, end: int, *, zeros: bool) -> None:
        """Prepare space up to byte ``end``; called by the appender.

        Zeros are written with ``zeros``, and if the space might hold old data.
        """
        self._urgent = True
        try:
            with self._lock:
                while (start := self.ready_end) < end:
                    piece_end = self._piece_end(start, READY_PIECE)
                    if zeros or not self._holds_zeros:
                        write_zeros(self._fd, start, piece_end, self.path)
                    self.ready_end = piece_end
        finally:
            self._urgent = False

    def make_ready_ahead(self, end: int, *, zeros: bool) -> None:
        """Prepare space from the helper thread, without blocking the appender for long.

        The system may load more pages than that, because it reads ahead.
        """
        if self.ready_end >= end:
            return
        with self._lock:
            if self._fd < 0:
                return
            if self._ahead_fd < 0:
                try:
                    self._ahead_fd = disk.open_file(self.path, disk.WRITE)
                except FileNotFoundError:
                    return  # the log's files were deleted; the next append reports it
            self._is_helped = True
        try:
            self._work_ahead(self._ahead_fd, end, zeros=zeros)
        finally:
            with self._lock:
                self._is_helped = False
                if self._fd < 0:
                    self._close_ahead()

    def _work_ahead(self, fd: int, end: int, *, zeros: bool) -> None:
        while (start := self.ready_end) < end:
            if self.reserved_end < self.size and not _leaves_room(fd, AHEAD_PIECE, used=0):
                return  # the rest of a full disk is for decisions, with their queue files
            is_loaded = False
            with suppress(OSError):  # a range that cannot be read may still be writable
                is_loaded = disk.load_pages(fd, start, self._piece_end(start, AHEAD_PIECE))
            while self._urgent:
                time.sleep(_URGENT_PAUSE)
            with self._lock:
                if self._fd < 0:
                    return
                start = self.ready_end
                if start < end:
                    piece_end = self._piece_end(start, AHEAD_PIECE)
                    if zeros or not is_loaded or not self._holds_zeros:
                        fill_with_zeros(fd, start, piece_end, self.path)
                    self.ready_end = piece_end

    @property
    def _holds_zeros(self) -> bool:
        """Whether the file reads as zeros from ``ready_end`` on and has its disk blocks."""
        return self._is_new and self.reserved_end == self.size

    def _piece_end(self, start: int, size: int) -> int:
        """Return the next multiple of ``size``, so that all pieces but one are whole pages."""
        return min(start - start % size + size, self.size)

    def close(self) -> None:
        """Close the file; written data stays in the page cache until it is flushed."""
        with self._lock:
            if self._fd >= 0:
                disk.close(self._fd)
                self._fd = -1
            if not self._is_helped:
                self._close_ahead()

    def _close_ahead(self) -> None:
        if self._ahead_fd >= 0:
            disk.close(self._ahead_fd)
            self._ahead_fd = -1
