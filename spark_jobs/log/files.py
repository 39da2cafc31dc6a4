"""Where the bytes of a store come from: local files, or a file system that ``pyarrow.fs`` knows.

A path with a scheme (``s3://bucket/store``, ``hdfs://…``, ``gs://…``, ``abfs://…``, or
``fsspec+…://`` where fsspec is installed) is remote; everything else is local. Settings of a remote
file system are those of its URI, for example ``s3://bucket/store?region=eu-west-1``.

The parser wants a file as one piece of memory. A local file is mapped. A remote one, or a local one
that is not to be mapped, gets memory of its size of which only the windows that are looked at are
ever filled: one reader holds no more than the part that it reads.
"""

import fnmatch
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ..errors import LogDirectoryError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem, NativeFile

WINDOW: Final = 16 << 20  # bytes; large enough that a request to an object store pays off
ANY_NAME: Final = re.compile(r".+", re.DOTALL)
_PATTERN: Final = re.compile(r"[*?\[]")
_KNOWN_MAX: Final = 256  # file systems kept open, one per path


class FolderEntry(NamedTuple):
    """One entry of a folder."""

    name: str
    path: str
    size: int  # bytes
    is_folder: bool


def is_remote(path: str) -> bool:
    """Tell whether a path names another file system than the local one."""
    return len(urlsplit(path).scheme) > 1 and "://" in path  # one letter is a Windows drive


def location(directory: str | Path) -> str:
    """Return a path that workers understand, which have a working directory of their own."""
    return str(directory) if is_remote(str(directory)) else str(Path(directory).absolute())


def name_of(path: str) -> str:
    """Return the last part of a path."""
    place = urlsplit(path).path if is_remote(path) else str(path)
    return unquote(place.rstrip("/").rpartition("/")[2])


def child(path: str, name: str) -> str:
    """Return the path of an entry of a folder."""
    if not is_remote(path):
        return str(Path(path, name))
    url = urlsplit(path)
    return urlunsplit(url._replace(path=f"{url.path.rstrip('/')}/{quote(name)}"))


def parent(path: str) -> str:
    """Return the path of the folder of a file."""
    if not is_remote(path):
        return str(Path(path).parent)
    url = urlsplit(path)
    return urlunsplit(url._replace(path=url.path.rstrip("/").rpartition("/")[0]))


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Name the path in errors of the file system.

    Raises:
        LogDirectoryError: What is in the context could not read it.
    """
    try:
        yield
    except (OSError, ValueError, ImportError) as error:  # ArrowInvalid is a ValueError
        named = getattr(error, "filename", None) or path
        reason = getattr(error, "strerror", None) or str(error)
        raise LogDirectoryError(str(named), reason) from error


@lru_cache(maxsize=_KNOWN_MAX)
def file_system_of(path: str) -> "tuple[FileSystem, str]":
    """Open the file system of a path; return it with the path inside.

    Raises:
        LogDirectoryError: There is no such file system, or it cannot be reached.
    """
    from pyarrow.fs import FileSystem, LocalFileSystem  # noqa: PLC0415  takes long to import

    if not is_remote(path):
        return LocalFileSystem(), path
    with readable(path):
        return FileSystem.from_uri(path)  # type: ignore[no-any-return]


def exists(path: str) -> bool:
    """Tell whether there is something of this name."""
    return bool(_info(path).type.name != "NotFound")


def is_folder(path: str) -> bool:
    """Tell whether this is a folder."""
    return bool(_info(path).type.name == "Directory")


def _info(path: str):  # type: ignore[no-untyped-def]  # noqa: ANN202, RUF100  pyarrow is untyped
    system, inner = file_system_of(path)
    return system.get_file_info(inner)


def folder_in(directory: str, name: str) -> str:
    """Return the folder of this name in a directory; without one, the directory itself.

    Raises:
        LogDirectoryError: It is no directory.
    """
    if not is_folder(directory):
        reason = "is not a directory" if exists(directory) else "no such directory"
        raise LogDirectoryError(directory, reason)
    inside = child(directory, name)
    return inside if is_folder(inside) else directory


def entries(folder: str, names: re.Pattern[str]) -> list[FolderEntry]:
    """List the entries of a folder whose names match, sorted by name.

    Raises:
        OSError: It cannot be read, or what is in it cannot.
    """
    if is_remote(folder):
        return sorted(one for one in _remote_entries(folder) if names.fullmatch(one.name))
    with os.scandir(folder) as found:
        listed = [local_entry(one) for one in found if names.fullmatch(one.name)]
    return sorted(one for one in listed if one is not None)


def local_entry(found: "os.DirEntry[str]") -> FolderEntry | None:
    """Describe an entry of a folder; None if a broker has deleted it since.

    Raises:
        OSError: It cannot be looked at; a link to nowhere is no file that was deleted.
    """
    try:
        return FolderEntry(found.name, found.path, found.stat().st_size, found.is_dir())
    except FileNotFoundError:
        if found.is_symlink():
            raise
        return None


def _remote_entries(folder: str) -> list[FolderEntry]:
    from pyarrow.fs import FileSelector  # noqa: PLC0415  as above

    system, inner = file_system_of(folder)
    return [
        FolderEntry(
            info.base_name,
            child(folder, info.base_name),
            info.size or 0,
            info.type.name == "Directory",
        )
        for info in system.get_file_info(FileSelector(inner))
    ]


def read_bytes(path: str) -> bytes:
    """Read a whole small file.

    Raises:
        OSError: It cannot be read.
    """
    with open_file(path) as file:
        return bytes(file.read())


def open_file(path: str) -> "NativeFile":
    """Open a file for reading anywhere in it, without mapping it."""
    system, inner = file_system_of(path)
    return system.open_input_file(inner)


def expanded(path: str) -> list[str]:
    """Return the paths that a pattern with ``*``, ``?`` and ``[…]`` matches, or the path itself.

    Raises:
        LogDirectoryError: It cannot be looked at.
    """
    if not _PATTERN.search(urlsplit(path).path if is_remote(path) else path):
        return [path]
    name = re.compile(fnmatch.translate(name_of(path)))
    with readable(path):
        folders = [one for one in expanded(parent(path)) if is_folder(one)]
        return [found.path for folder in folders for found in entries(folder, name)]


class FileContent:
    """The first ``size`` bytes of a file at their places in memory; it may have become shorter.

    A local file is mapped. What is not mapped is read in windows, into memory that is reserved at
    its full size. Where the system can, reserved memory costs nothing before it is filled.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is empty.
    """

    def __init__(self, path: str, size: int, *, memory_map: bool = True) -> None:
        self._missing: set[int] = set()  # windows
        if memory_map and not is_remote(path):
            with Path(path).open("rb") as file:
                self.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return
        self._file = open_file(path)
        self._size = min(size, self._file.size())
        self.mapped = mmap.mmap(-1, self._size)
        self._missing.update(range(-(-self._size // WINDOW)))

    def load(self, start: int, end: int) -> None:
        """Read the windows that hold the bytes [start, end), unless they are there."""
        if not self._missing:
            return
        for window in range(start // WINDOW, -(-min(end, self._size) // WINDOW)):
            if window in self._missing:
                place = window * WINDOW
                content = self._file.read_at(min(WINDOW, self._size - place), place)
                self.mapped[place : place + len(content)] = content
                self._missing.remove(window)
