"""Maintain the digests of log, queue and index files.

The digest of a log file is extended once per second, never beyond what is on disk. The last second
or two before a kill are not covered. Queue and index files get their digest when they are full; the
others keep changing and get it at a clean stop. All of this runs on the helper thread, so that it
costs appends nothing.

After a start, digests end at the latest where the start found the end of the data. A file whose
digest was lost does not get a new one from its beginning, because it may have been damaged since.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..format.digest import DIRECTORY, pack_digests, unpack_digests
from ..format.queue_entry import ENTRY_SIZE
from ..log.resync import Damage
from ..queue.consume_queue import ConsumeQueue
from ..queue.queue_table import QueueTable
from .file_digest import (
    Digest,
    digest_of,
    digest_path,
    load_digest,
    read_if_there,
    replace_file,
    unpacked,
)

IndexExtent = tuple[Path, int]
"""An index file and the number of bytes used in it."""


class LogDigests:
    """The digests of log files; used by one thread at a time."""

    def __init__(self, root: Path, files: MappedFileQueue) -> None:
        self._root = root
        self._files = files
        self._base = 0  # of the file whose digest is extended
        self._digest = Digest()

    def start(self, end_offset: int, damages: Iterable[Damage] = ()) -> None:
        """Begin after a recovery that found ``end_offset`` and put fillers on ``damages``."""
        active = self._files.base_of(end_offset)
        for path in _files_below(self._directory()):
            if path.name.isdecimal() and int(path.name) not in self._files.bases:
                disk.remove(path)
        for base in {self._files.base_of(damage.offset) for damage in damages}:
            disk.remove(self._path(base))
        self._base, self._digest = active, Digest()
        for base in reversed([base for base in self._files.bases if base <= active]):
            digest = load_digest(self._path(base))
            if digest is not None and base < active and digest.end == self._files.file_size:
                break
            if digest is not None:  # the previous run did not complete this digest
                if digest.end > end_offset - base:
                    digest.cut(end_offset - base)
                    digest.save(self._path(base))
                self._base, self._digest = base, digest

    def advance(self, durable_offset: int, bytes_max: int) -> None:
        """Extend digests by at most ``bytes_max`` bytes that are on disk, and save them."""
        size = self._files.file_size
        while bytes_max > 0:
            end = min(durable_offset - self._base, size, self._digest.end + bytes_max)
            if end <= self._digest.end:
                break
            bytes_max -= end - self._digest.end
            if self._extend_current(end):
                self._digest.save(self._path(self._base))
                if end == size:
                    self._base, self._digest = self._base + size, Digest()

    def _extend_current(self, end: int) -> bool:
        """Extend the current digest up to byte ``end``; return False if the file is deleted."""
        try:
            _extend(self._digest, self._files.path(self._base), end)
        except FileNotFoundError:  # deleted by age
            self._base, self._digest = self._base + self._files.file_size, Digest()
            return False
        return True

    def _path(self, base: int) -> Path:
        return digest_path(self._root, self._files.path(base))

    def _directory(self) -> Path:
        return self._path(0).parent


class QueueEndDigests:
    """The digests of the last files of all queues, in one file that a clean stop writes.

    Files of their own would be tens of thousands, each in two directories of its own.
    """

    def __init__(self, root: Path) -> None:
        """Load the file; without one, or if it is damaged, there are no digests."""
        self._path = root / DIRECTORY / "consumequeue.ends"
        self._packed = unpack_digests(read_if_there(self._path) or b"")

    def of(self, queue: ConsumeQueue, base: int) -> Digest | None:
        """Return the digest of a file, if it has one here."""
        return unpacked(self._packed.get(_name(queue, base)))

    def set(self, queue: ConsumeQueue, base: int, digest: Digest) -> None:
        self._packed[_name(queue, base)] = digest.pack()

    def remove(self, queues: Sequence[ConsumeQueue]) -> None:
        """Remove those of some queues from the file."""
        gone = {f"{queue.topic}/{queue.queue_id}" for queue in queues}
        kept = {
            name: digest
            for name, digest in self._packed.items()
            if name[: name.rfind("/")] not in gone
        }
        if len(kept) < len(self._packed):
            replace_file(self._path, pack_digests(kept))

    def save(self, queues: Iterable[ConsumeQueue]) -> None:
        """Write those of the last files of these queues; they are not flushed."""
        names = [_name(queue, base) for queue in queues for base in queue.files.bases[-1:]]
        kept = {name: self._packed[name] for name in names if name in self._packed}
        replace_file(self._path, pack_digests(kept))


def _name(queue: ConsumeQueue, base: int) -> str:
    return f"{queue.topic}/{queue.queue_id}/{base}"


class QueueDigests:
    """The digests of queue files; used by one thread at a time."""

    def __init__(self, root: Path, queues: QueueTable) -> None:
        self._root = root
        self._queues = queues
        self._covered: dict[ConsumeQueue, int] = {}  # queue offset up to which digests exist

    def start(self) -> None:
        """Begin with the current ends of the queues."""
        self._covered = {
            queue: min(queue.next_offset, queue.kept_end) for queue in self._queues.values()
        }

    def advance(self, *, closing: bool = False) -> None:
        """Extend the digests of full files; with ``closing``, of all changed files."""
        ends: QueueEndDigests | None = None
        for queue in list(self._queues.values()):
            end = queue.flushed_offset
            covered = self._covered.get(queue, 0)
            if end == covered:
                continue
            per_file = queue.files.file_size // ENTRY_SIZE
            first, last = min(covered, end) // per_file, -(-end // per_file)
            full = end // per_file
            for number in range(first, last if closing else full):
                count = min(end - number * per_file, per_file)
                ends = QueueEndDigests(self._root) if ends is None else ends
                self._extend_file(queue, number * per_file * ENTRY_SIZE, count * ENTRY_SIZE, ends)
            if closing or full > covered // per_file:
                self._covered[queue] = end if closing else full * per_file
        if ends is not None and closing:
            ends.save(self._queues.values())

    def forget(self, queues: Sequence[ConsumeQueue]) -> None:
        """Delete the digests of deleted queues; new ones may have files of their names."""
        for queue in queues:
            self._covered.pop(queue, None)
            directory = digest_path(self._root, queue.files.directory)
            for path in disk.files(directory) if disk.is_directory(directory) else ():
                disk.remove(path)
        QueueEndDigests(self._root).remove(queues)

    def _extend_file(self, queue: ConsumeQueue, base: int, end: int, ends: QueueEndDigests) -> None:
        """Extend the digest of a file; its older part may not have been compared yet."""
        path = queue.files.path(base)
        digest = ends.of(queue, base) or Digest()
        digest.cut(max(min(end, queue.kept_end * ENTRY_SIZE - base), 0))
        try:
            _extend(digest, path, end)
        except FileNotFoundError:  # deleted by age
            return
        if end == queue.files.file_size:
            digest.save(digest_path(self._root, path))
        else:
            ends.set(queue, base, digest)


class IndexDigests:
    """The digests of index files; used by one thread at a time."""

    def __init__(self, root: Path, slots_end: int) -> None:
        """Before byte ``slots_end`` a file changes until it is full."""
        self._root = root
        self._slots_end = slots_end
        self._done: set[Path] = set()
        self.path: Path | None = None  # of the file whose digest is extended next
        self.digest = Digest()
        self._outdated: Path | None = None  # a digest that an error has kept from deletion

    def write_to(self, path: Path | None, *, keep: bool = False) -> None:
        """Delete the digest of a file that is about to change; with ``keep`` extend it later.

        Deleted durably, because it would not match after a power cut. None: there is no file.
        """
        self.path, self.digest = path, Digest()
        self._outdated = None if path is None else digest_path(self._root, path)
        if self._outdated is not None and disk.exists(self._outdated):
            self.digest = (load_digest(self._outdated) if keep else None) or Digest()
        self.remove_outdated()

    def remove_outdated(self) -> None:
        """Delete what ``write_to`` could not: the next start would find the file damaged."""
        outdated = self._outdated
        if outdated is not None and disk.exists(outdated):
            disk.remove(outdated)
            disk.sync_directory(outdated.parent)
        self._outdated = None

    def start(self, files: Sequence[IndexExtent], before: Sequence[Path]) -> None:
        """Begin with the current index files; ``before`` are those before the index was opened.

        Full files get no new digest: they have one, or they may have been damaged since. The file
        to which the index continues to write is an exception.
        """
        paths = [path for path, _ in files]
        written = max({*paths}.intersection(before), default=None)
        if written != self.path:
            self.write_to(written)  # newer ones were uncertain, and deleted
        self._done = {*paths[:-1]} - {written}

    def advance(self, files: Sequence[IndexExtent], bytes_max: int) -> None:
        """Extend a full file's digest by at most ``bytes_max``; ``files`` are all, newest last."""
        full = [path for path, _ in files[:-1] if path not in self._done]
        if full:
            self._extend_file(full[0], disk.size_of(full[0]), bytes_max)

    def close(self, files: Sequence[IndexExtent]) -> None:
        """Complete all digests at a stop; that of the newest file covers its used part."""
        for path, used in files:
            if path not in self._done:
                end = used if path == files[-1][0] else disk.size_of(path)
                self._extend_file(path, end, end)

    def _extend_file(self, path: Path, end: int, bytes_max: int) -> None:
        if path != self.path:
            self.path, self.digest = path, Digest()
        digest = self.digest
        fd = disk.open_file(path, disk.READ)
        try:
            digest.extend(fd, min(end, digest.end + bytes_max))
            if digest.end == end:
                digest.refresh(fd, 0, self._slots_end)
                digest.save(digest_path(self._root, path))
                self._done.add(path)
        finally:
            disk.close(fd)


def _extend(digest: Digest, path: Path, end: int) -> None:
    fd = disk.open_file(path, disk.READ)
    try:
        digest.extend(fd, end)
    finally:
        disk.close(fd)


def _files_below(directory: Path) -> Iterator[Path]:
    if disk.is_directory(directory):
        yield from disk.files(directory)


def remove_all(root: Path, name: str = "") -> None:
    """Delete all digests, or those of one directory of the store."""
    top = root / DIRECTORY
    for path in reversed(disk.below(top)):
        if str(path.relative_to(top)).startswith(name) and disk.is_file(path):
            disk.remove(path)


def remove_orphans(root: Path) -> None:
    """Delete the digests of deleted queue and index files, and left-over temporary files."""
    for name in ("consumequeue", "index"):
        # By names, not paths: there may be tens of thousands of queues.
        for directory, _, files in disk.walk(root / DIRECTORY / name):
            of = root / Path(directory).relative_to(root / DIRECTORY)
            for file in files:
                if not disk.exists(of / file):
                    disk.remove(Path(directory, file))


_READ_SIZE: Final = 1 << 20  # bytes at once
# Entries never have so many zeros in a row: a size is not 0, and an offset 0 begins a log.
_ZEROS: Final = bytes(ENTRY_SIZE)


class HoleSearch:
    """Finds zeros among the entries of a queue, where no digest tells; for a start.

    A part of a queue file may be zeroed that a kill left without a digest. The search for the end
    of the entries meets such a hole by chance only, and consumers would skip the messages.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ends = QueueEndDigests(root)

    def has_hole(self, queue: ConsumeQueue, end: int) -> bool:
        """Return whether zeros lie among the entries below queue offset ``end``."""
        files = queue.files
        for base in files.bases:
            stop = min(end * ENTRY_SIZE - base, files.file_size)
            if stop <= 0:
                return False
            path = files.path(base)
            digest = self._ends.of(queue, base) or digest_of(self._root, path)
            start = 0 if digest is None else digest.end
            if start < stop and _has_zeros(path, start, stop):
                return True
        return False


def _has_zeros(path: Path, start: int, stop: int) -> bool:
    with disk.opened(path) as fd:
        return any(
            _ZEROS in disk.pread(fd, min(_READ_SIZE + ENTRY_SIZE, stop - position), position)
            for position in range(start, stop, _READ_SIZE)
        )
