"""Finding and mending what the disk has changed in queue and index files.

At an ordered stop, files get digests. The start compares: for a moment before it serves, the files
that are written to first, because consumers are mostly there; then a little every second, until all
have been seen once. That reads what queues and index hold, a fiftieth of the log.

A block of a queue that differs is compared with the log, entry by entry. An entry is true if the
record it names says that it is that entry's. For one that is not, the record lies between those of
its neighbours, and is looked for there. So a flipped bit costs a moment, and no message.

An index file cannot be mended item by item while it is used. It is given up before the index is
opened, with all newer ones, and their keys are put again from the log. Of one that is found later a
note is made, and the next start does that.
"""

import logging
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from . import disk
from .commit_log import NO_QUEUE_ENTRY
from .consume_queue import ConsumeQueue, QueueTable
from .digest import BLOCK, Digest, digest_path, load_digest
from .dispatch import entry_code
from .format.crc import crc32
from .format.index import is_index_file_name
from .format.queue_entry import ENTRY_SIZE, PRE_BLANK, QueueEntry, unpack_entry
from .format.topics import SCHEDULE_TOPIC
from .log_scan import Found, LogScan, find_records, store_timestamp
from .mapped_file_queue import MappedFileQueue
from .queue_extension import is_extension

logger = logging.getLogger(__name__)

# A step is 64 KiB of a queue or index, or a mebibyte of log that is searched: a tenth of a
# millisecond to one.
START_STEPS: Final = 256  # of a start: 16 MiB of queues, and of older index files
ROUND_STEPS: Final = 128  # of a round of the helper thread, which comes once per second
_SUSPECT: Final = ".suspect"  # behind the name of a digest: its file is to be put aside
_SECOND: Final = 1000  # ms; delay levels are whole seconds
_NEIGHBOURS_MAX: Final = 10_000  # entries looked at for a true one; then the whole log is scanned


class _Place(NamedTuple):
    """One file of a queue."""

    queue: ConsumeQueue
    base: int


class QueueScrub:
    """One pass over all queue files that have a digest."""

    def __init__(
        self,
        root: Path,
        queues: QueueTable,
        files: MappedFileQueue,
        delay_levels_ms: tuple[int, ...],
    ) -> None:
        """``files`` are those of the log."""
        self._root = root
        self._queues = queues
        self._files = files
        self._levels = delay_levels_ms
        self._steps = self._check_all()
        self.mended = 0  # entries

    def run(self, steps: int) -> bool:
        """Go on for so many steps; return whether there may be more to do."""
        return sum(1 for _ in islice(self._steps, steps)) == steps

    def close(self) -> None:
        """Leave the rest to the next start."""
        self._steps.close()

    def _check_all(self) -> Generator[None, None, None]:
        for place in list(self._places()):
            yield from self._check(place)

    def _places(self) -> Iterator[_Place]:
        """Give the last files of all queues, then the others, each queue from the newest on."""
        older: list[_Place] = []
        for queue in list(self._queues.values()):
            if disk.is_directory(self._root / "batchconsumequeue" / queue.topic):
                continue  # entries of RocketMQ's batch queues are made of something else
            places = [_Place(queue, base) for base in reversed(queue.files.bases)]
            yield from places[:1]
            older += places[1:]
        yield from older

    def _check(self, place: _Place) -> Generator[None, None, None]:
        """Check one file, block by block."""
        queue, base = place
        path = queue.files.path(base)
        kept = digest_path(self._root, path)
        digest = load_digest(kept)
        if digest is None:
            return
        digest.cut(queue.next_offset * ENTRY_SIZE - base)
        changed = False
        try:
            fd = disk.open_file(path, disk.WRITE)
        except FileNotFoundError:
            return  # deleted by age
        try:
            for position, content, crc in digest.blocks(fd):
                if crc32(content) != crc:
                    yield from self._mend(place, fd, position, len(content))
                    digest.refresh(fd, position, position + len(content))
                    changed = True
                yield
            if changed:
                digest.save(kept)
        finally:
            disk.close(fd)

    # Mending ----------------------------------------------------------------------------------

    def _mend(
        self, place: _Place, fd: int, position: int, size: int
    ) -> Generator[None, None, None]:
        """Compare the entries of a block with the log; write those anew that are not true."""
        queue, base = place
        first = (base + position) // ENTRY_SIZE
        end = min(-(-(base + position + size) // ENTRY_SIZE), queue.next_offset)
        for queue_offset in range(first, end):
            where = queue_offset * ENTRY_SIZE - base
            found = unpack_entry(disk.pread(fd, ENTRY_SIZE, where))
            if self._is_true(queue, queue_offset, found):
                continue
            entry = yield from self._find(queue, queue_offset)
            if entry == found:
                continue  # it was blank, and is
            disk.pwrite(fd, entry.pack(), where)
            disk.sync_data(fd)
            self.mended += 1
            self._begin_earlier(queue)
            logger.error(
                "event=queue_entry_mended topic=%s queue=%d offset=%d was=%r now=%r",
                queue.topic,
                queue.queue_id,
                queue_offset,
                tuple(found),
                tuple(entry),
            )

    def _begin_earlier(self, queue: ConsumeQueue) -> None:
        """Let a queue begin where it does: what was false may have hidden what came before it."""
        log_start = self._files.bases[0] if self._files.bases else 0
        while queue.min_offset > queue.first_offset:
            entry = _entry_at(queue, queue.min_offset - 1)
            if entry is None or not entry.is_valid or entry.size == PRE_BLANK.size:
                break
            if entry.physical_offset < log_start:
                break
            queue.min_offset -= 1

    def _is_true(self, queue: ConsumeQueue, queue_offset: int, entry: QueueEntry) -> bool:
        """Tell whether the record that an entry names says that it is that entry's."""
        log_start = self._files.bases[0] if self._files.bases else 0
        if 0 <= entry.physical_offset < log_start and entry.size > 0:
            return True  # deleted by age, as far as anybody can tell
        if entry.size == PRE_BLANK.size or not entry.is_valid:
            return False
        base = self._files.base_of(entry.physical_offset)
        if entry.physical_offset + entry.size > base + self._files.file_size:
            return False
        content = _read(self._files.path(base), entry.physical_offset - base, entry.size)
        found = find_records(content, entry.physical_offset, check_crc=False)
        if not found or found[0][1] != entry.size:
            return False
        wanted = self._entry_of(queue, queue_offset, entry.physical_offset, content, found[0])
        if wanted is None or wanted[:2] != entry[:2]:
            return False
        return wanted == entry or self._may_be_code(
            queue, entry.tags_code, wanted, content, found[0]
        )

    def _entry_of(
        self, queue: ConsumeQueue, queue_offset: int, offset: int, content: bytes, found: Found
    ) -> QueueEntry | None:
        """Return the entry of a record if it has that place in the queue."""
        position, size, sys_flag, queue_id, said_offset, topic_at, properties_at = found
        topic = content[topic_at : properties_at - 2]
        if sys_flag & NO_QUEUE_ENTRY or (queue_id, said_offset) != (queue.queue_id, queue_offset):
            return None
        if topic != queue.topic.encode():
            return None
        code = entry_code(
            content[position : position + size],
            properties_at - position,
            topic=topic,
            sys_flag=sys_flag,
            delay_levels_ms=self._levels,
        )
        return QueueEntry(offset, size, code)

    def _may_be_code(
        self, queue: ConsumeQueue, code: int, wanted: QueueEntry, content: bytes, found: Found
    ) -> bool:
        """Tell whether a code may stand there for another reason than the properties."""
        if queue.topic == SCHEDULE_TOPIC:
            # The levels may have changed; all are whole seconds, which no flipped bit leaves so.
            delay = code - store_timestamp(content, found[0], found[2])
            return delay > 0 and delay % _SECOND == 0
        return is_extension(self._root, queue.topic, queue.queue_id, code, wanted.tags_code)

    def _find(self, queue: ConsumeQueue, queue_offset: int) -> Generator[None, None, QueueEntry]:
        """Look for the record of a place between those of its neighbours; blank if there is none.

        ``yield`` comes after each mebibyte of log.
        """
        log_start = self._files.bases[0] if self._files.bases else 0
        before = self._neighbour(queue, range(queue_offset - 1, queue.first_offset - 1, -1))
        behind = self._neighbour(queue, range(queue_offset + 1, queue.next_offset))
        start = (
            log_start if before is None else max(log_start, before.physical_offset + before.size)
        )
        end = queue.last_end if behind is None else behind.physical_offset
        for chunk_offset, content, found in LogScan(self._files, start, end, check_crc=False):
            for record in found:
                if record[4] == queue_offset:
                    offset = chunk_offset + record[0]
                    entry = self._entry_of(queue, queue_offset, offset, content, record)
                    if entry is not None:
                        return entry
            yield
        return PRE_BLANK

    def _neighbour(self, queue: ConsumeQueue, places: range) -> QueueEntry | None:
        """Return the first true entry of some places; None if the nearest ones are all false."""
        for queue_offset in places[:_NEIGHBOURS_MAX]:
            entry = _entry_at(queue, queue_offset)
            if entry is None:
                return None
            if entry.is_valid and self._is_true(queue, queue_offset, entry):
                return entry
        return None


def _entry_at(queue: ConsumeQueue, queue_offset: int) -> QueueEntry | None:
    """Read an entry without the maps, which are another thread's; None where a file ends."""
    position = queue_offset * ENTRY_SIZE
    base = queue.files.base_of(position)
    content = _read(queue.files.path(base), position - base, ENTRY_SIZE)
    return unpack_entry(content) if len(content) == ENTRY_SIZE else None


def _read(path: Path, position: int, size: int) -> bytes:
    try:
        fd = disk.open_file(path, disk.READ)
    except FileNotFoundError:
        return b""
    try:
        return disk.pread(fd, size, position)
    finally:
        disk.close(fd)


class IndexScrub:
    """Finds index files that have changed: the newest before it is opened, the others in time."""

    def __init__(self, root: Path, slots_end: int) -> None:
        """From byte ``slots_end`` on a file only grows."""
        self._root = root
        self._directory = root / "index"
        self._start_end = slots_end + START_STEPS * BLOCK
        self._steps = self._check_in_time()
        self.kept: tuple[Path, Digest] | None = None  # the newest file, as far as it was compared
        self._found: list[Path] = []  # all files, before the index was opened
        self._written: Path | None = None  # an older one that is the newest again

    def give_up_changed(self, *, clean: bool) -> None:
        """Make the oldest file that has changed unusable; before the index is opened.

        It is then put aside with all newer ones, and their keys are put again from the log. Only
        after an ordered stop is the newest file as its digest says.
        """
        paths = self._found = _index_files(self._directory)
        if not paths:
            return
        newest = paths[-1]
        digest = load_digest(digest_path(self._root, newest)) if clean else None
        self._forget(newest)  # it is about to change
        if digest is not None:
            self.kept = newest, digest
        self.run(START_STEPS)
        changed = [path for path in paths if disk.exists(self._suspect(path))]
        if digest is not None and any(self._differences(newest, digest, range(self._start_end))):
            changed.append(newest)
        if not changed:
            return
        logger.error("event=index_file_changed path=%s Its keys are put again", changed[0])
        disk.truncate(changed[0], 0)
        self.kept = None
        for path in paths[paths.index(changed[0]) :]:
            disk.remove(self._suspect(path))
            disk.remove(digest_path(self._root, path))

    def opened(self, paths: Iterable[Path]) -> Path | None:
        """Forget the digest of the file that the index goes on with, if newer ones were deleted.

        ``paths`` are the files of the index now. Returns the one that counts as not taken in.
        """
        left = set(paths).intersection(self._found)
        if not left or self._found[-1] in left:
            return None
        self._written = max(left)
        self._forget(self._written)
        disk.remove(self._suspect(self._written))
        return self._written

    def _forget(self, path: Path) -> None:
        """Remove a digest for good: after a power cut it would not fit any more."""
        digest = digest_path(self._root, path)
        if disk.exists(digest):
            disk.remove(digest)
            disk.sync_directory(digest.parent)

    def run(self, steps: int) -> bool:
        """Go on with what may be compared in time; return whether there may be more to do."""
        return sum(1 for _ in islice(self._steps, steps)) == steps

    def close(self) -> None:
        """Leave the rest to the next start."""
        self._steps.close()

    def _check_in_time(self) -> Generator[None, None, None]:
        """Check all older files, then the part of the newest that does not change."""
        for path in reversed(_index_files(self._directory)[:-1]):
            digest = load_digest(digest_path(self._root, path))
            if digest is not None:
                yield from self._note_change(path, digest, range(digest.end))
        if self.kept is not None:
            path, digest = self.kept
            yield from self._note_change(path, digest, range(self._start_end, digest.end))

    def _note_change(self, path: Path, digest: Digest, part: range) -> Generator[None, None, None]:
        for changed in self._differences(path, digest, part):
            yield
            if path == self._written:
                return
            if changed:
                logger.error("event=index_file_changed path=%s The next start mends it", path)
                disk.make_directories(self._suspect(path).parent)
                disk.write_file(self._suspect(path), b"")
                return

    @staticmethod
    def _differences(path: Path, digest: Digest, part: range) -> Iterator[bool]:
        """Tell of each block that begins in a part whether it is not as it was."""
        try:
            fd = disk.open_file(path, disk.READ)
        except FileNotFoundError:
            return  # deleted by age
        try:
            for position, content, crc in digest.blocks(fd, part.start + -part.start % BLOCK):
                if position >= part.stop:
                    return
                yield crc32(content) != crc
        finally:
            disk.close(fd)

    def _suspect(self, path: Path) -> Path:
        digest = digest_path(self._root, path)
        return digest.with_name(digest.name + _SUSPECT)


def _index_files(directory: Path) -> list[Path]:
    if not disk.is_directory(directory):
        return []
    return [path for path in disk.entries(directory) if is_index_file_name(path.name)]
