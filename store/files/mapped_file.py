"""Files of fixed size: created, reserved, zeroed ahead; and the one the log is appended to.

A store into a mapped page that has no block behind it kills the process with SIGBUS when the
disk is full. So space is reserved, or written, before a store through a map can reach it, and
it is there that a full disk shows, as ``DiskFullError``. Queue and index files are mapped.

Reserved but unwritten space is still slow: the first touch of each page goes through the file
system, 2.8 us per 1 KiB record against 0.17 us where it was made ready. ``LogFile`` therefore keeps
a mark, ``ready_end``. A helper thread moves it ahead of the appender; an appender that reaches it
moves it itself. Records are written only below the mark, so the two never touch the same bytes.
Two things make space ready. Neither holds the interpreter, as ``mmap.flush`` or ``madvise`` would:

* Its pages are brought into memory. A virtual machine whose host gives memory as it is first
  touched waits 8 to 30 us for each. The helper does this, and needs no lock of the file. It reads
  on in order, with one descriptor, so that the system reads ahead of it, in large pages where the
  file system has them (ext4 as of Linux 6.16, xfs): to write 38 KB takes 7 us then instead of 15,
  and large answers to pulls come 6 % faster.
* Zeros are written to it, if senders wait for flushes. The first flush of space that was never
  written goes through the journal of the file system; where zeros were written, that has been paid
  for. Where nobody waits, as under ASYNC_FLUSH, zeros would only make the machine write everything
  twice: batches came to 90 % of the rate. A new file reads as zeros without.

Zeros share the file's lock with the records, so the call that writes them gives it away after each
sixteen pages. Both calls take a mebibyte, because each costs the helper a wait for the interpreter,
which an appender at full load gives away rarely. With 256 KiB it fell behind at 150 MB/s, and the
appender made a third of the log ready itself.

Records get into the log by pwrite and not through a map. A flush write-protects the pages of a
map, and the fault of the next write costs more than pwrite does: durable producers gain a third
by pwrite, transactions under ASYNC_FLUSH, whose records are flushed all the same, 40 % (13 -> 17
k/s). A single record that nobody flushes loses 0.7 us; but appends come in groups when it matters.

The zeros also end the log: behind the last record stand at least eight of them, so that a scan
after a crash cannot run on into what an earlier life of the file left there.
"""

import errno
import time
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

from ..errors import DiskFullError, UnusableFileError
from . import disk

READY_PIECE: Final = 64 << 10  # bytes the appender makes ready at once, new memory included
AHEAD_PIECE: Final = 1 << 20  # bytes that the helper makes ready at once, in 200 us
# Bytes of a disk that the reservation of a whole file leaves to queues, tables and all others.
ROOM_LEFT: Final = 64 << 20
_BLOCK: Final = 512  # bytes; what st_blocks counts, on any file system
_PIECE: Final = 1 << 20  # bytes of all else that is read or written in pieces
_ZEROS: Final = bytes(_PIECE)
_URGENT_PAUSE: Final = 0.0005  # seconds; how long the helper steps aside for the appender
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


def make_directory(path: Path) -> None:
    """Create a directory with its parents, durably; it may exist."""
    if disk.is_directory(path):
        return
    make_directory(path.parent)
    try:
        disk.mkdir(path)
    except FileExistsError as error:
        if not disk.is_directory(path):
            raise UnusableFileError(path, "is not a directory") from error
    except OSError as error:
        raise _translated(error, path) from error
    disk.sync_directory(path.parent)


def _translated(error: OSError, path: Path) -> Exception:
    """Turn out-of-space errors into ours; everything else is nobody's promise."""
    if error.errno in _NO_SPACE:
        return DiskFullError(path, error.strerror or str(error))
    return error


def lacks_space(error: OSError) -> bool:
    """Tell whether a call has failed because the disk, or a quota, is full."""
    return error.errno in _NO_SPACE


def create_file(path: Path, size: int) -> None:
    """Create a file of full size at once, all holes; a crash leaves it whole or not at all.

    Raises:
        DiskFullError: Not even the name could be stored.
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
    """Give every byte of ``start`` to ``end`` a block on disk; what is there stays.

    Raises:
        DiskFullError: The disk or the user's quota has no space for it.
    """
    if not try_reserve(fd, start, end, path):
        try:
            _rewrite(fd, start, end, path)
        except OSError as error:
            raise _translated(error, path) from error


def try_reserve(fd: int, start: int, end: int, path: Path) -> bool:
    """Do the same where the system has a call for it; elsewhere return False.

    That is enough for space that is written before it is mapped into reach.

    Raises:
        DiskFullError: As above.
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
    """Reserve where the system has no call for it: write back what is there, holes as zeros."""
    for position in range(start, end, _PIECE):
        size = min(_PIECE, end - position)
        write_fully(fd, disk.pread(fd, size, position).ljust(size, b"\0"), position, path)


def write_zeros(fd: int, start: int, end: int, path: Path) -> None:
    """Fill ``start`` to ``end``, at most a mebibyte, with zeros that have blocks.

    Raises:
        DiskFullError: There is no space for them.
    """
    write_fully(fd, _ZEROS[: end - start], start, path)


def fill_with_zeros(fd: int, start: int, end: int, path: Path) -> None:
    """Do the same with any number of them, and let others write to the file meanwhile.

    Raises:
        DiskFullError: There is no space for them; some may be written.
    """
    try:
        disk.write_zeros(fd, start, end)
    except OSError as error:
        raise _translated(error, path) from error


def write_fully(fd: int, content: bytes, position: int, path: Path) -> None:
    """Write all of it. A disk that gets full takes a part first, and says so only then.

    Raises:
        DiskFullError: There is no space for the rest.
    """
    try:
        disk.write_all(fd, content, position)
    except OSError as error:
        raise _translated(error, path) from error


def write_again(path: Path, start: int, end: int) -> None:
    """Write back what a file holds from ``start`` to ``end``, so that the next flush writes it."""
    with disk.opened(path, disk.WRITE) as fd:
        for position in range(start, end, _PIECE):
            piece = disk.pread(fd, min(_PIECE, end - position), position)
            disk.write_all(fd, piece, position)


def zero_tail(path: Path, start: int, *, anew: int = 0) -> int:
    """Zero what a file holds from byte ``start`` on; return how many bytes that cut.

    Holes and reserved space are skipped, so an untouched tail costs nothing. In the first ``anew``
    bytes zeros are written as well: those of an earlier try may be in memory alone.
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
                if position < start + anew:
                    disk.write_all(fd, _ZEROS[: len(piece)], position)
                elif cut_end > position:
                    disk.write_all(fd, _ZEROS[: cut_end - position], position)
                position += len(piece)
    return cut_end - start


def data_ranges(fd: int, start: int, size: int) -> list[tuple[int, int]]:
    """Return begin and end of what may hold more than zeros, from ``start`` on and in order.

    All of it before anything is read: what the kernel then reads ahead counts as data, so that one
    would follow it to the end of the file.
    """
    stretches: list[tuple[int, int]] = []
    end = start
    while (begin := _seek(fd, end, size, data=True)) < size:
        end = min(_seek(fd, begin, size, data=False), size)
        stretches.append((begin, end))
    return stretches


def _seek(fd: int, position: int, size: int, *, data: bool) -> int:
    """Return where the next written byte at or behind ``position`` may be, or the next hole."""
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


def _leaves_room(fd: int, size: int) -> bool:
    """Tell whether others still have room when all of a file is reserved."""
    lacking = size - disk.fstat(fd).st_blocks * _BLOCK
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
        """Open an existing file; from ``written_end`` on it will be zeroed before it is used.

        A file that ``is_new`` was never written to, and reads as zeros without.

        Its holes are filled at once, unless that would leave next to nothing to others. Then the
        file gets its blocks as it is zeroed, so that the last megabyte of a disk can be used.

        Raises:
            DiskFullError: They could not be filled.
        """
        self.path = path
        self.base = base
        self.size = size
        self.ready_end = written_end
        self._lock = Lock()
        self._urgent = False
        self._is_new = is_new
        self._ahead_fd = -1  # the helper's own; while it is at work, it alone may close it
        self._is_helped = False  # the helper is at work
        self._fd = disk.open_file(path, disk.WRITE)
        self.reserved_end = 0  # up to where it has blocks, as far as that was asked for
        try:
            # make_ready writes it before it is used
            if _leaves_room(self._fd, size) and try_reserve(self._fd, 0, size, path):
                self.reserved_end = size
        except BaseException:
            disk.close(self._fd)
            raise

    def write(self, position: int, content: bytes) -> None:
        """Put bytes below ``ready_end`` into the file; they are in the page cache then."""
        try:
            written = disk.pwrite(self._fd, content, position)
        except OSError as error:
            raise _translated(error, self.path) from error
        if written < len(content):
            write_fully(self._fd, content[written:], position + written, self.path)

    def make_ready(self, end: int, *, zeros: bool) -> None:
        """Let records be written up to byte ``end``; called by the appender.

        With ``zeros``, or where it is necessary, zeros are written first.
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
        """Do the same from the helper thread, never in the appender's way for long.

        The system may bring in more than that, as much as it reads ahead of the disk.
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
                    return  # who deletes the log's files will find out
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
            is_there = False
            with suppress(OSError):  # what cannot be read may still be written
                is_there = disk.load_pages(fd, start, self._piece_end(start, AHEAD_PIECE))
            while self._urgent:
                time.sleep(_URGENT_PAUSE)
            with self._lock:
                if self._fd < 0:
                    return
                start = self.ready_end
                if start < end:
                    piece_end = self._piece_end(start, AHEAD_PIECE)
                    if zeros or not is_there or not self._holds_zeros:
                        fill_with_zeros(fd, start, piece_end, self.path)
                    self.ready_end = piece_end

    @property
    def _holds_zeros(self) -> bool:
        """Whether there are zeros behind ``ready_end``, with blocks of the disk under them."""
        return self._is_new and self.reserved_end == self.size

    def _piece_end(self, start: int, size: int) -> int:
        """Return the next multiple of a piece's size, so that all but the first are whole pages."""
        return min(start - start % size + size, self.size)

    def close(self) -> None:
        """Unmap the file; what was written stays in the page cache until it is flushed."""
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
