"""All access of the store to files and directories.

No other module of the store uses ``os``, ``mmap`` or the methods of a ``Path`` that access a disk,
nor do the broker's tables and snapshots. So tests can put a simulated disk in place of the real one
by replacing a few names of this module: one that loses unsynced data, becomes full or fails
(``tests/simulation``).

The names in the first part are the system's own functions and not wrappers, so that an append pays
for one name look-up, as with ``os``. The rest is built from them.
"""

import ctypes
import errno
import fcntl
import io
import mmap
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

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
"""None if the system has no call that allocates blocks of a file."""
sendfile: Callable[[int, int, int, int], int] | None = (
    os.sendfile if sys.platform == "linux" else None
)
"""None if the system cannot send from a file to a socket, or does so differently."""
fstat = os.fstat
fstatvfs = os.fstatvfs
statvfs = os.statvfs
mkdir = os.mkdir
unlink = os.unlink
replace = os.replace
link = os.link
remove_tree = shutil.rmtree
Map = mmap.mmap

READ: Final = os.O_RDONLY | os.O_CLOEXEC
WRITE: Final = os.O_RDWR | os.O_CLOEXEC
CREATE: Final = WRITE | os.O_CREAT
CREATE_NEW: Final = CREATE | os.O_EXCL
CREATE_EMPTY: Final = CREATE | os.O_TRUNC | os.O_NOFOLLOW  # a link may lead to a foreign file
MODE: Final = 0o640  # of a file that is created: messages are not for everyone on the machine
DIRECTORY_MODE: Final = 0o750
PRIVATE_MODE: Final = 0o600  # of one that holds secrets
PAGE_SIZE: Final = mmap.PAGESIZE  # bytes
NO_WAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)  # flag of preadv; 0 if not supported
SEEK_DATA: int | None = getattr(os, "SEEK_DATA", None)
"""None if the system does not report holes."""
SEEK_HOLE: int | None = getattr(os, "SEEK_HOLE", None)
KNOWS_OTHER_USERS: Final = hasattr(fcntl, "F_SETLEASE")

_PIECE: Final = 1 << 20  # bytes of one call of ``write_zeros``
_PIPE_SIZE: Final = 64 << 10  # bytes; of the pipe that Linux uses for one ``sendfile``
_NOT_BETWEEN_FILES: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})

_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})


def exists(path: Path) -> bool:
    """Return whether a path exists."""
    return path.exists()


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory."""
    return path.is_dir()


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file."""
    return path.is_file()


def may_write(directory: Path) -> bool:
    """Return whether this process may create files in a directory."""
    effective = os.access in os.supports_effective_ids
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=effective)


def size_of(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        FileNotFoundError: There is no such file.
    """
    return path.stat().st_size


def is_at(path: Path, fd: int) -> bool:
    """Return whether a path still leads to an open file; True if the system does not tell."""
    try:
        return os.path.samestat(path.stat(), fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def entries(directory: Path) -> list[Path]:
    """Return all entries of a directory, sorted by name.

    Raises:
        FileNotFoundError: There is no such directory.
    """
    return sorted(directory.iterdir(), key=lambda path: path.name)


def files(directory: Path) -> list[Path]:
    """Return the regular files in a directory, sorted by name.

    Raises:
        FileNotFoundError: There is no such directory.
    """
    return [path for path in entries(directory) if path.is_file()]


def directories(directory: Path) -> list[Path]:
    """Return the subdirectories sorted by name; an empty list if there is no such directory."""
    return [path for path in entries(directory) if path.is_dir()] if directory.is_dir() else []


def directory_names(directory: str) -> list[str]:
    """Return the names of the subdirectories, sorted; links are none. Empty if it is gone."""
    try:
        with os.scandir(directory) as found:
            return sorted(one.name for one in found if one.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def file_sizes(directory: str) -> dict[str, int]:
    """Return the sizes in bytes of the regular files by name, sorted; empty if it is gone."""
    try:
        with os.scandir(directory) as found:
            sizes = {one.name: one.stat().st_size for one in found if one.is_file()}
    except FileNotFoundError:
        return {}
    return dict(sorted(sizes.items()))


def below(directory: Path) -> list[Path]:
    """Return all paths below a directory, recursively and sorted."""
    return sorted(directory.rglob("*"))


def walk(directory: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each directory below one, and itself, with its directories and files, as ``os.walk``.

    Raises:
        OSError: One cannot be read.
    """
    return os.walk(directory, onerror=_raise_unless_gone)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def lacks_descriptors(error: OSError) -> bool:
    """Return whether a file could not be opened because too many are open; that may change."""
    return error.errno in _NO_DESCRIPTOR


@contextmanager
def opened(path: Path, flags: int = READ) -> Iterator[int]:
    """Open a file for the duration of a ``with`` block."""
    fd = open_file(path, flags, MODE)
    try:
        yield fd
    finally:
        close(fd)


def will_need(path: Path, position: int, size: int) -> None:
    """Ask the system to read a part of a file into memory soon, without waiting."""
    if hasattr(os, "posix_fadvise"):
        with opened(path) as fd:
            os.posix_fadvise(fd, position, size, os.POSIX_FADV_WILLNEED)


def has_other_users(fd: int) -> bool:
    """Return whether others have a file open that is open here for writing; True if unknown.

    The system grants a write lease only if nobody else does. Source: Linux ``fcntl(2)``.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    return False


def disable_readahead(fd: int) -> None:
    """Disable read-ahead for a file.

    The calling thread prepares all that the system reads ahead: 8 MiB take 30 ms of its processor
    time, even if it does not wait for the disk.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def read_fully(fd: int, length: int, position: int) -> bytes:
    """Return ``length`` bytes of a file from ``position`` on; fewer at its end."""
    piece = pread(fd, length, position)
    while len(piece) < length:  # the kernel returns at most 2 GiB, and less when interrupted
        more = pread(fd, length - len(piece), position + len(piece))
        if not more:
            break
        piece += more
    return piece


def read_bytes(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        FileNotFoundError: There is no such file.
    """
    return path.read_bytes()


def read_stream(path: Path) -> BinaryIO:
    """Open a file as a stream.

    Raises:
        FileNotFoundError: There is no such file.
    """
    return io.open(path, "rb")  # noqa: UP020 -- a name that differs from the builtin


def map_scattered(fd: int, size: int) -> Map:
    """Map a file that is written at random positions, without read-ahead.

    With read-ahead the first touch of a page loads as many pages around it as the device reads
    ahead. For 8 MiB that hold nothing yet, the kernel zeroes two thousand pages, and the thread
    that touched the first one waits 4 to 30 ms.
    """
    mapped = Map(fd, size)
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return mapped


def write_all(fd: int, content: bytes, position: int) -> None:
    """Write all of ``content``; a disk that becomes full first accepts a part of it."""
    written = pwrite(fd, content, position)
    while written < len(content):
        written += pwrite(fd, content[written:], position + written)


def write_zeros(fd: int, start: int, end: int) -> None:
    """Fill a part of an open file with zeros; may change the position of the file.

    Each mebibyte takes one call, which releases the interpreter once. Other threads may write to
    the file after each 64 KiB: between files Linux sends through a pipe of sixteen pages and locks
    the target again for each full pipe.
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
    """Load a part of an open file into memory without copying; return whether all is loaded.

    Does nothing without ``sendfile``. The system reads in steps of 64 KiB and lets other threads
    run in between.
    """
    if sendfile is not None:
        while start < end and (sent := sendfile(_nowhere(), fd, start, end - start)):
            start += sent
    return start >= end


@cache
def _zeros() -> int | None:
    """Return an open file of zeros that takes no space; None if the system has no such file.

    A Python built for an old C library lacks the call, and a sandbox may forbid it.
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
    """Remove a file if it exists."""
    try:
        unlink(path)
    except FileNotFoundError:
        return


def make_directories(path: Path) -> None:
    """Create a directory and its parents; it may exist. Nothing is flushed."""
    try:
        mkdir(path, DIRECTORY_MODE)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_directories(path.parent)
        make_directories(path)
    except OSError:
        if not path.is_dir():
            raise


def sync_data(fd: int) -> None:
    """Flush the content of a file, and the size needed to read it, to disk."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync there stops at the drive's cache
    else:
        fdatasync(fd)


def sync_directory(path: Path) -> None:
    """Flush names that were created or removed in a directory to disk."""
    with opened(path) as fd:
        fsync(fd)


def _file_system_sync() -> Callable[[int], None] | None:
    """Return ``syncfs`` of the C library, which reports errors since Linux 5.8."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if sys.platform != "linux" or version is None or (*map(int, version.groups()),) < (5, 8):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if call is None:
        return None

    def sync(fd: int) -> None:
        if call(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    return sync


sync_file_system = _file_system_sync()
"""Flushes all that has changed in the file system of an open file, by others too; raises OSError if
something could not be written since the file was opened. None if the system cannot."""


class NewFile:
    """A file that is written once from beginning to end; replaces an existing one."""

    # Bytes of one write, which takes a tenth of a millisecond. A snapshot is written on the event
    # loop, where a mebibyte would take three milliseconds.
    _GATHERED_MAX: Final = 1 << 16

    def __init__(self, path: Path, flags: int = CREATE_EMPTY, *, mode: int = MODE) -> None:
        self._fd = open_file(path, flags, mode)
        self._end = 0
        self._gathered = bytearray()

    def write(self, content: bytes) -> None:
        """Buffer bytes; they are in the file after ``flush``."""
        self._gathered += content
        if len(self._gathered) >= self._GATHERED_MAX:
            self.flush()

    def flush(self) -> None:
        """Write buffered bytes to the file."""
        content = bytes(self._gathered)
        if content:
            write_all(self._fd, content, self._end)
        self._end += len(content)
        self._gathered.clear()

    def sync(self) -> None:
        """Write buffered bytes and flush the file to disk."""
        self.flush()
        fsync(self._fd)

    def close(self) -> None:
        """Close the file; buffered bytes are dropped."""
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
    """Replace the content of a file, with ``sync`` durably; its name is not flushed.

    A new file gets ``mode``.
    """
    with NewFile(path, mode=mode) as file:
        file.write(content)
        if sync:
            file.sync()
