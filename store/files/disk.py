"""The one door to the operating system: what is done to files and directories is done here.

No other module of the store touches ``os``, ``mmap`` or the methods of a ``Path`` that reach a
disk, nor do the broker's tables and snapshots. So whoever replaces a few names of this module
stands between the store and the disk: a simulated one that loses what was not synced, that gets
full, or that fails (``tests/simulation``).

The calls in the first part are those of the system themselves and no wrappers: an append pays for
one look-up of a name, as it would with ``os``. What follows is made of them.
"""

import errno
import fcntl
import io
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

# Calls of the system --------------------------------------------------------------------------

open_file = os.open
close = os.close
pread = os.pread
preadv = os.preadv
lseek = os.lseek
pwrite = os.pwrite
ftruncate = os.ftruncate
truncate = os.truncate
fsync = os.fsync
fdatasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
posix_fallocate: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
"""None where there is no call that gives a file its blocks."""
sendfile: Callable[[int, int, int, int], int] | None = (
    os.sendfile if sys.platform == "linux" else None
)
"""None where the system does not send from a file to a socket, or in another way."""
fstat = os.fstat
fstatvfs = os.fstatvfs
statvfs = os.statvfs
mkdir = os.mkdir
unlink = os.unlink
replace = os.replace
link = os.link
remove_tree = shutil.rmtree
walk = os.walk
Map = mmap.mmap

READ: Final = os.O_RDONLY | os.O_CLOEXEC
WRITE: Final = os.O_RDWR | os.O_CLOEXEC
CREATE: Final = WRITE | os.O_CREAT
CREATE_NEW: Final = CREATE | os.O_EXCL
CREATE_EMPTY: Final = CREATE | os.O_TRUNC
MODE: Final = 0o644  # of a file that is created
PRIVATE_MODE: Final = 0o600  # of one that holds secrets
MAP_READ: Final = mmap.ACCESS_READ
PAGE_SIZE: Final = mmap.PAGESIZE  # bytes
NO_WAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)  # of preadv; 0 where it cannot be asked for
SEEK_DATA: int | None = getattr(os, "SEEK_DATA", None)
"""None where the system does not tell where holes are."""
SEEK_HOLE: int | None = getattr(os, "SEEK_HOLE", None)
KNOWS_OTHER_USERS: Final = hasattr(fcntl, "F_SETLEASE")

_PIECE: Final = 1 << 20  # bytes of one call of ``write_zeros``
_PIPE_SIZE: Final = 64 << 10  # bytes; of a pipe that Linux makes for one ``sendfile``
_NOT_BETWEEN_FILES: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})

# Questions ------------------------------------------------------------------------------------


def exists(path: Path) -> bool:
    """Tell whether there is anything at a path."""
    return path.exists()


def is_directory(path: Path) -> bool:
    """Tell whether a directory is at a path."""
    return path.is_dir()


def is_file(path: Path) -> bool:
    """Tell whether a plain file is at a path."""
    return path.is_file()


def may_write(directory: Path) -> bool:
    """Tell whether this process may create files in a directory."""
    effective = os.access in os.supports_effective_ids
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=effective)


def size_of(path: Path) -> int:
    """Return how many bytes a file has.

    Raises:
        FileNotFoundError: There is none.
    """
    return path.stat().st_size


def device_of(path: Path) -> int:
    """Return a number that two paths share if they lie in one file system."""
    return path.stat().st_dev


def entries(directory: Path) -> list[Path]:
    """Return what a directory holds, sorted by name.

    Raises:
        FileNotFoundError: There is no such directory.
    """
    return sorted(directory.iterdir())


def files(directory: Path) -> list[Path]:
    """Return the plain files in a directory, sorted by name.

    Raises:
        FileNotFoundError: There is no such directory.
    """
    return [path for path in entries(directory) if path.is_file()]


def directories(directory: Path) -> list[Path]:
    """Return the directories in a directory, sorted by name; none where there is no such one."""
    return [path for path in entries(directory) if path.is_dir()] if directory.is_dir() else []


def below(directory: Path) -> list[Path]:
    """Return all that lies in a directory, in its directories and so on, sorted."""
    return sorted(directory.rglob("*"))


# Reading --------------------------------------------------------------------------------------


@contextmanager
def opened(path: Path, flags: int = READ) -> Iterator[int]:
    """Open a file, and close it in the end."""
    fd = open_file(path, flags, MODE)
    try:
        yield fd
    finally:
        close(fd)


def will_need(path: Path, position: int, size: int) -> None:
    """Have a part of a file read into memory soon; no wait, and no promise."""
    if hasattr(os, "posix_fadvise"):
        with opened(path) as fd:
            os.posix_fadvise(fd, position, size, os.POSIX_FADV_WILLNEED)


def has_other_users(fd: int) -> bool:
    """Tell whether somebody else has a file open that this one may write; True if nobody knows.

    Who asks for a lease to write is told. Source: Linux ``fcntl(2)``.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    return False


def disable_readahead(fd: int) -> None:
    """Let the system read what it is asked for, and no guess about what may be wanted next.

    It guesses as much as a device may read ahead, and who asks prepares all of that: 8 MiB take
    30 ms of processor time, even of one who does not wait.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def prefetch(fd: int, position: int, size: int) -> None:
    """Have a part of an open file read, and let the system guess nothing about what follows it."""
    if hasattr(os, "posix_fadvise"):
        disable_readahead(fd)
        os.posix_fadvise(fd, position, size, os.POSIX_FADV_WILLNEED)


def read_fully(fd: int, length: int, position: int) -> bytes:
    """Return so many bytes of a file, fewer at its end."""
    piece = pread(fd, length, position)
    while len(piece) < length:  # the kernel returns at most 2 GiB, and less when interrupted
        more = pread(fd, length - len(piece), position + len(piece))
        if not more:
            break
        piece += more
    return piece


def read_bytes(path: Path) -> bytes:
    """Return all that a file holds.

    Raises:
        FileNotFoundError: There is none.
    """
    return path.read_bytes()


def read_stream(path: Path) -> BinaryIO:
    """Open a file to be read piece by piece.

    Raises:
        FileNotFoundError: There is none.
    """
    return io.open(path, "rb")  # noqa: UP020 -- as a name that is not the builtin's


# Changing -------------------------------------------------------------------------------------


def map_scattered(fd: int, size: int) -> Map:
    """Map a file that is written here and there, without any look at what lies around.

    Else the first touch of a page brings in as many around it as a device may read ahead: of 8 MiB
    in which nothing is stored yet, the kernel fills two thousand pages with zeros, and the thread
    that touched the first one stands still for 4 to 30 ms.
    """
    mapped = Map(fd, size)
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return mapped


def write_all(fd: int, content: bytes, position: int) -> None:
    """Write all of it; a disk that gets full takes a part first, and says so only then."""
    written = pwrite(fd, content, position)
    while written < len(content):
        written += pwrite(fd, content[written:], position + written)


def write_zeros(fd: int, start: int, end: int) -> None:
    """Fill a part of an open file with zeros; the file's position may be another then.

    With one call for each mebibyte, which gives up the interpreter once, and in which others may
    write to the file after each 64 KiB: what Linux sends from file to file goes through a pipe of
    sixteen pages, and the target is locked anew for each pipe that is full.
    """
    if sendfile is not None and (zeros := _zeros()) is not None:
        lseek(fd, start, os.SEEK_SET)
        try:
            while start < end and (sent := sendfile(fd, zeros, 0, min(end - start, _PIECE))):
                start += sent
        except OSError as error:
            if error.errno not in _NOT_BETWEEN_FILES:
                raise
    while start < end:
        start += pwrite(fd, bytes(min(end - start, _PIPE_SIZE)), start)


def load_pages(fd: int, start: int, end: int) -> bool:
    """Have a part of an open file in memory, with one call that copies nothing; say if all is.

    Without ``sendfile`` nothing is done. What the system reads of a large part at once it reads in
    pieces of 64 KiB, and lets others have the processor in between.
    """
    if sendfile is not None:
        while start < end and (sent := sendfile(_nowhere(), fd, start, end - start)):
            start += sent
    return start >= end


@cache
def _zeros() -> int | None:
    """Return an open file of zeros that takes no space; None where none can be had.

    A Python built for an old C library does not know such files, and a sandbox may forbid them.
    """
    try:
        fd = os.memfd_create("zeros")
    except (AttributeError, OSError):
        return None
    os.ftruncate(fd, _PIECE)
    return fd


@cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def remove(path: Path) -> None:
    """Remove a file's name if it is there."""
    try:
        unlink(path)
    except FileNotFoundError:
        return


def make_directories(path: Path) -> None:
    """Create a directory with its parents; it may exist. Nothing is flushed."""
    try:
        mkdir(path)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_directories(path.parent)
        make_directories(path)
    except OSError:
        if not path.is_dir():
            raise


def sync_data(fd: int) -> None:
    """Return once the content of a file, and the size needed to read it, is on disk."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync there stops at the drive's cache
    else:
        fdatasync(fd)


def sync_directory(path: Path) -> None:
    """Make names that were created or removed in a directory survive a power cut."""
    with opened(path) as fd:
        fsync(fd)


class NewFile:
    """A file that is written once, from its beginning to its end; what was there is gone."""

    # Bytes handed to the system at once: a tenth of a millisecond. A snapshot is written on the
    # event loop, where a mebibyte takes three.
    _GATHERED_MAX: Final = 1 << 16

    def __init__(self, path: Path, flags: int = CREATE_EMPTY, *, mode: int = MODE) -> None:
        self._fd = open_file(path, flags, mode)
        self._end = 0
        self._gathered = bytearray()

    def write(self, content: bytes) -> None:
        """Add bytes; they are in the file after ``flush``."""
        self._gathered += content
        if len(self._gathered) >= self._GATHERED_MAX:
            self.flush()

    def flush(self) -> None:
        """Hand what was added to the system."""
        content = bytes(self._gathered)
        if content:
            write_all(self._fd, content, self._end)
        self._end += len(content)
        self._gathered.clear()

    def sync(self) -> None:
        """Return once all that was added is on disk."""
        self.flush()
        fsync(self._fd)

    def close(self) -> None:
        """Close the file; what was not flushed does not get into it."""
        if self._fd >= 0:
            close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()


def write_file(path: Path, content: bytes, *, sync: bool = False, mode: int = MODE) -> None:
    """Write a file anew, with ``sync`` durably; its name is not flushed.

    A file that is not there yet gets ``mode``.
    """
    with NewFile(path, mode=mode) as file:
        file.write(content)
        if sync:
            file.sync()
