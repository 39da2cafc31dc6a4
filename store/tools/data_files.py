"""Find the files of a log or queue without changing them."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import UnusableFileError
from ..files import disk
from ..files.mapped_file_queue import NAME_DIGITS, MappedFileQueue


class DataFiles(NamedTuple):
    """The data files of a directory, and other entries of it."""

    files: MappedFileQueue
    unusable: list[tuple[Path, str]]  # other entries, and why a store cannot use them


def list_files(directory: Path, file_size: int | None = None) -> DataFiles:
    """List the files of a log or queue without changing them; most files give the size.

    Raises:
        OSError: The directory cannot be read.
    """
    unusable: list[tuple[Path, str]] = []
    sizes: dict[Path, int] = {}
    for path in disk.files(directory):
        if len(path.name) == NAME_DIGITS and path.name.isascii() and path.name.isdigit():
            sizes[path] = disk.size_of(path)
        else:
            unusable.append((path, "is no data file, and nothing else may lie here"))
    if sizes and sizes[last := max(sizes)] == 0:
        del sizes[last]  # it was being created; the next start removes it
    usual = file_size or (Counter(sizes.values()).most_common(1)[0][0] if sizes else 1)
    files = MappedFileQueue(directory, max(usual, 1))
    for path, size in sizes.items():
        if size != usual:
            unusable.append((path, f"has {size} bytes, but the others have {usual}"))
        elif int(path.name) % usual:
            unusable.append((path, f"is not named by a multiple of {usual} bytes"))
        else:
            files.bases.append(int(path.name))
    return DataFiles(files, unusable)


def list_queues(directory: Path) -> Iterator[Path]:
    """Yield the directories of all queues below ``consumequeue``; ignore other directories."""
    for topic in disk.directories(directory):
        yield from (path for path in disk.directories(topic) if path.name.isdecimal())


def find_log(root: Path, commit_log: Path | None = None) -> DataFiles:
    """Find the log of a store.

    Raises:
        UnusableFileError: There is none.
        OSError: It cannot be read.
    """
    directory = commit_log or root / "commitlog"
    if not disk.is_directory(directory):
        raise UnusableFileError(root, f"is no store: there is no directory {directory}")
    return list_files(directory)
