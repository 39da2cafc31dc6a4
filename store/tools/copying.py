"""``halfmq store copy``: copy files of a log, also while a broker writes it.

The files of a copy have the names and sizes of the log's files, so the audit, a broker and Apache
RocketMQ can read it. Full files are copied unchanged. The last file ends with the last complete
record of the range, and zeros follow: records that a broker is writing, or that a power cut has
torn, are left out. A file is flushed before it is copied, so the copy has no record that its source
may still lose.

Only the end of a file is cut, because readers begin with the first record of a file. So the copy
begins with the file that holds the first record of the range.

The copy is written to another directory, which gets the name of the target when everything is on
disk. So an interrupted copy cannot be mistaken for a complete one.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import UnusableFileError
from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..format.queue_entry import ENTRY_SIZE, PRE_BLANK, unpack_entries
from ..log.log_reader import LogReader
from ..log.resync import Damage
from .data_files import find_log, list_files, list_queues
from .findings import Findings
from .log_walk import Chunk, LogWalk
from .state import StoreState, read_condition

_PIECE: Final = 1 << 20  # bytes copied at once
PART_SUFFIX: Final = ".part"  # of the directory while it is filled

Bound = int | datetime
"""A physical offset, or a store time."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The content of a copy."""

    first_offset: int
    end_offset: int  # after its last valid record
    files: int
    damaged: int  # damaged ranges in the last file; copied unchanged


def copy_log(
    root: Path,
    target: Path,
    *,
    commit_log: Path | None = None,
    start: Bound | None = None,
    end: Bound | None = None,
    with_config: bool = False,
    with_queues: bool = False,
    progress: Progress = lambda done, total: None,
) -> Copied:
    """Copy the files that hold the records from ``start`` to before ``end``.

    An offset as ``end`` excludes records that begin there or later, a time those stored later.
    ``with_config`` also copies the tables in ``config/``, ``with_queues`` the consume queues.
    Without its queues a store rebuilds them at its first start.

    Raises:
        UnusableFileError: There is no log, it has no record in the range, a file was deleted by
            age during the copy, or the target exists.
        OSError: Something cannot be read or written.
    """
    files = find_log(root, commit_log).files
    live = read_condition(root, Findings(root)).state is StoreState.OPEN
    chosen = _choose(files, start, end)
    stop = find_stop(files, chosen[-1], end, live=live)
    if _is_before(stop, start):
        raise UnusableFileError(files.directory, "holds no record in this range")
    with filled(target) as partial:
        disk.make_directories(partial / "commitlog")
        _copy_files(files, chosen, stop.size, partial / "commitlog", progress)
        copied = Copied(
            first_offset=chosen[0],
            end_offset=stop.end_offset,
            files=len(chosen),
            damaged=stop.damaged,
        )
        if with_config and disk.is_directory(root / "config"):
            _copy_config(root / "config", partial / "config")
        if with_queues and disk.is_directory(root / "consumequeue"):
            _copy_queues(root / "consumequeue", partial / "consumequeue", copied)
    return copied


@contextmanager
def filled(target: Path) -> Iterator[Path]:
    """Yield a directory to fill; at the end it is flushed and gets the name of the target.

    After an error it is removed.

    Raises:
        UnusableFileError: The target, or the directory of an earlier attempt, exists.
    """
    partial = target.with_name(target.name + PART_SUFFIX)
    for path in (target, partial):
        if disk.exists(path):
            raise UnusableFileError(path, "is there already")
    try:
        yield partial
        sync_directories(partial)
        disk.replace(partial, target)
        disk.sync_directory(target.parent)
    except BaseException:
        disk.remove_tree(partial, ignore_errors=True)
        raise


def _choose(files: MappedFileQueue, start: Bound | None, end: Bound | None) -> list[int]:
    """Return the files to copy by their first offsets.

    Raises:
        UnusableFileError: There is none.
    """
    begun = [base for base in files.bases if _first_time(files, base) is not None]
    low = 0 if start is None else _number_of(files, begun, start)
    high = len(begun) - 1 if end is None else _number_of(files, begun, end)
    if isinstance(end, int) and 0 <= high < len(begun) and begun[high] == end:
        high -= 1
    chosen = begun[max(low, 0) : high + 1]
    if not chosen:
        raise UnusableFileError(files.directory, "holds no record in this range")
    return chosen


def _number_of(files: MappedFileQueue, begun: list[int], bound: Bound) -> int:
    """Return the number of the last file that begins at or before a bound; -1 if none does."""
    if isinstance(bound, int):
        return bisect_right(begun, bound) - 1
    wanted = _milliseconds(bound)
    return bisect_right(begun, wanted, key=lambda base: _first_time(files, base) or 0) - 1


def _first_time(files: MappedFileQueue, base: int) -> int | None:
    """Return the store time in ms of the first record of a file; None if there is none."""
    reader = LogReader(files)
    try:
        record = reader.record_at(base, base + files.file_size)
    except FileNotFoundError:
        return None
    finally:
        reader.close()
    if record is not None:
        return record.store_timestamp
    for part in LogWalk(files, start=base, end=base + files.file_size):  # its first one is damaged
        if isinstance(part, Chunk):
            return part.stored(0)
    return None


def _milliseconds(bound: datetime) -> int:
    return int(bound.timestamp() * 1000)


class _Stop(NamedTuple):
    """The end of the copy in its last file."""

    end_offset: int  # after the last record in the range
    last_timestamp: int  # ms, its store time
    size: int  # bytes of the file to copy, with its blank if the range covers the whole file
    damaged: int


def find_stop(files: MappedFileQueue, base: int, end: Bound | None, *, live: bool) -> _Stop:
    """Find the end of a range in the file at ``base``."""
    walk = LogWalk(files, start=base, end=base + files.file_size, live=live)
    found, timestamp, damaged = base, 0, 0
    for part in walk:
        if isinstance(part, Damage):
            damaged += 1
            continue
        for number, (position, size, *_) in enumerate(part.found):
            stored = part.stored(number)
            if end is not None and _is_after(end, part.offset + position, stored):
                return _Stop(found, timestamp, found - base, damaged)
            found, timestamp = part.offset + position + size, stored
    is_followed = walk.end_offset >= base + files.file_size  # by another file
    full = is_followed or walk.ends_with_blank(walk.end_offset)
    return _Stop(found, timestamp, files.file_size if full else found - base, damaged)


def _is_before(stop: _Stop, start: Bound | None) -> bool:
    """Return whether even the last record is before the range."""
    if start is None:
        return False
    if isinstance(start, int):
        return stop.end_offset <= start
    return stop.last_timestamp < _milliseconds(start)


def _is_after(end: Bound, offset: int, stored: int) -> bool:
    return offset >= end if isinstance(end, int) else stored > _milliseconds(end)


def _copy_files(
    files: MappedFileQueue, chosen: list[int], last_size: int, directory: Path, progress: Progress
) -> None:
    for number, base in enumerate(chosen):
        progress(number * files.file_size, len(chosen) * files.file_size)
        size = last_size if base == chosen[-1] else files.file_size
        path = files.path(base)
        try:
            with disk.opened(path) as fd:
                disk.sync_data(fd)
                _copy_bytes(fd, directory / path.name, size, files.file_size)
        except FileNotFoundError as error:
            raise UnusableFileError(path, "was deleted by age during the copy") from error


def _copy_bytes(source: int, path: Path, size: int, full_size: int) -> None:
    """Copy the first ``size`` bytes of a file into one of ``full_size``; the rest are zeros."""
    with disk.opened(path, disk.CREATE_NEW) as copy:
        copied = 0
        while copied < size:
            piece = disk.pread(source, min(_PIECE, size - copied), copied)
            if not piece:
                break
            disk.write_all(copy, piece, copied)
            copied += len(piece)
        disk.ftruncate(copy, full_size)
        disk.fsync(copy)


def _copy_config(source: Path, target: Path) -> None:
    """Copy the tables; a broker replaces them as a whole, so each copy is complete."""
    disk.mkdir(target, disk.DIRECTORY_MODE)
    for path in disk.entries(source):
        if disk.is_file(path) and path.suffix in {".json", ".bak"}:
            try:
                content = disk.read_bytes(path)
            except FileNotFoundError:
                continue  # a backup that is being replaced
            _write(target / path.name, content)


def _copy_queues(source: Path, target: Path, copied: Copied) -> None:
    """Copy the entries of the copied records, and of earlier ones in the same file."""
    for directory in list_queues(source):
        files = list_files(directory).files
        wanted = target / directory.relative_to(source)
        for number, base in enumerate(files.bases):
            content = disk.read_bytes(files.path(base))
            kept, newest = _entries_kept(content, copied.end_offset)
            last = number == len(files.bases) - 1
            if kept and (last or newest >= copied.first_offset):
                disk.make_directories(wanted)
                _write(wanted / files.path(base).name, content[:kept].ljust(files.file_size, b"\0"))
            if kept < len(content):
                break


def _entries_kept(content: bytes, end_offset: int) -> tuple[int, int]:
    """Return how many bytes of entries refer to records before ``end_offset`` of the log.

    Also returns the highest physical offset in them; -1 if there is none.
    """
    newest = -1
    for number, entry in enumerate(
        unpack_entries(content[: len(content) // ENTRY_SIZE * ENTRY_SIZE])
    ):
        is_beyond = entry != PRE_BLANK and entry.physical_offset + entry.size > end_offset
        if not entry.is_valid or is_beyond:
            return number * ENTRY_SIZE, newest
        newest = max(newest, entry.physical_offset)
    return len(content), newest


def _write(path: Path, content: bytes) -> None:
    with disk.NewFile(path, disk.CREATE_NEW) as file:
        file.write(content)
        file.sync()


def sync_directories(root: Path) -> None:
    """Flush the names of everything below a directory."""
    for directory, _, _ in disk.walk(root):
        disk.sync_directory(Path(directory))
