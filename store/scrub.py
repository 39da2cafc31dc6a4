"""Turning bits back that the disk has flipped in log, queue and index files.

A digest has a CRC-32 of each 64 KiB of a file. Where a block differs from it in one bit, the CRC
tells which one, and that bit is turned back: it costs no message. A block with more than one bad
bit may seem to have just one, once in eight thousand times. So what the bit is part of must be
whole afterwards, or it is turned again.

A start compares first what it is about to rely on: queues, the newest index file, and, after a
kill, the last file of the log. Then a little is compared every second, until all files have been
seen once. A block of a queue or index that cannot be mended is told,
and its files are made anew from the log, by this start or the next one.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from . import disk
from .consume_queue import ConsumeQueue, QueueTable
from .digest import Block, Digest, digest_path, load_digest
from .format.crc import crc32
from .format.digest import BLOCK, DIRECTORY, find_flipped_bit
from .format.index import is_index_file_name
from .format.queue_entry import ENTRY_SIZE, PRE_BLANK, unpack_entry
from .format.record import MAGIC_BLANK, PREFIX
from .log_scan import find_records
from .log_search import LogFile, candidate_at, candidates
from .mapped_file_queue import MappedFileQueue

logger = logging.getLogger(__name__)

# A step is 64 KiB of a file: a tenth of a millisecond.
START_STEPS: Final = 256  # of a start: 16 MiB of queues, and of older index files
ROUND_STEPS: Final = 128  # of a round of the helper thread, which comes once per second
_RECORD_MAX: Final = 8 << 20  # bytes in which the record that holds a bit is looked for
_SUSPECT: Final = ".suspect"  # behind the name of a digest: its file is to be made anew


def is_sound(
    path: Path, fd: int, block: Block, is_whole: Callable[[int], bool] = lambda _position: True
) -> bool:
    """Compare a block of an open file; turn a flipped bit back. False: more than that is wrong.

    ``is_whole`` is asked whether what holds the byte at a position makes sense.
    """
    position, content, crc = block
    if crc32(content) == crc:
        return True
    flipped = find_flipped_bit(content, crc)
    if flipped is not None:
        at, bit = flipped
        disk.pwrite(fd, bytes([content[at] ^ 1 << bit]), position + at)
        if is_whole(position + at):
            disk.sync_data(fd)
            logger.error(
                "event=bit_turned_back path=%s position=%d bit=%d", path, position + at, bit
            )
            return True
        disk.pwrite(fd, content[at : at + 1], position + at)
    return False


def _tell(path: Path, block: Block) -> None:
    logger.error(
        "event=block_damaged path=%s position=%d length=%d",
        path,
        block.position,
        len(block.content),
    )


def mend_log(root: Path, files: MappedFileQueue, start: int) -> int:
    """Turn flipped bits back in the log from ``start`` on, as far as digests reach.

    Returns:
        The physical offset up to which all is as it was written; ``start`` if nothing is known.
    """
    sound_end = start
    for base in [base for base in files.bases if base + files.file_size > start]:
        path = files.path(base)
        digest = load_digest(digest_path(root, path))
        if digest is None:
            continue
        with disk.opened(path, disk.WRITE) as fd:
            file = LogFile(fd, base, files.file_size)
            for block in digest.blocks(fd, max(start - base, 0)):
                if not is_sound(path, fd, block, partial(_is_whole, file)):
                    _tell(path, block)
                elif base + block.position <= sound_end:
                    sound_end = max(sound_end, base + block.end)
    return sound_end


def _is_whole(file: LogFile, position: int) -> bool:
    """Tell whether a byte of the log lies in a whole record, or behind the last one of its file."""
    near = file._replace(limit=min(position + PREFIX.size, file.limit))
    for start in reversed([*candidates(near, max(position - _RECORD_MAX, 0))]):
        found = find_records(candidate_at(file, start), file.base + start, check_crc=True)
        if start <= position and found:
            end = start + found[0][1]
            return position < end or _is_blank(file, end)
    return _is_blank(file, 0)


def _is_blank(file: LogFile, position: int) -> bool:
    head = file.read(position, PREFIX.size)
    return head == PREFIX.pack(file.limit - position, MAGIC_BLANK)


class _Pass:
    """One look at all there is to compare, in steps."""

    _steps: Generator[None, None, None]

    def run(self, steps: int) -> bool:
        """Go on for so many steps; return whether there may be more to do."""
        return sum(1 for _ in islice(self._steps, steps)) == steps

    def close(self) -> None:
        """Leave the rest to the next start."""
        self._steps.close()


class LogScrub(_Pass):
    """One pass over all files of the log that have a digest, from the newest on."""

    def __init__(self, root: Path, files: MappedFileQueue) -> None:
        self._root = root
        self._files = files
        self._steps = self._check_all()

    def _check_all(self) -> Generator[None, None, None]:
        for base in reversed(self._files.bases):
            path = self._files.path(base)
            digest = load_digest(digest_path(self._root, path))
            if digest is None:
                continue
            try:
                fd = disk.open_file(path, disk.WRITE)
            except FileNotFoundError:
                return  # deleted by age, and so are all before it
            try:
                file = LogFile(fd, base, self._files.file_size)
                for block in digest.blocks(fd):
                    if not is_sound(path, fd, block, partial(_is_whole, file)):
                        _tell(path, block)
                    yield
            finally:
                disk.close(fd)


class QueueScrub(_Pass):
    """One pass over all queue files that have a digest."""

    def __init__(self, root: Path, queues: QueueTable, files: MappedFileQueue) -> None:
        """``files`` are those of the log."""
        self._queues = queues
        self._files = files
        self._directory = root / DIRECTORY / "consumequeue"
        self._root = root
        self._suspect = root / DIRECTORY / f"consumequeue{_SUSPECT}"
        self._steps = self._check_all()
        self.turned: set[ConsumeQueue] = set()  # queues in which bits were turned back
        # Queue offsets with which damaged blocks begin, the first of each queue.
        self.damaged: dict[ConsumeQueue, int] = {}

    def before_recovery(self) -> None:
        """Look at what the last run found, and at the first blocks; the queues are loaded."""
        if disk.exists(self._suspect):
            self.damaged.update(dict.fromkeys(self._queues.values(), -1))
        self.run(START_STEPS)
        for queue in self.turned:
            queue.load()  # its end may not have been where it seemed to be

    def forget(self) -> None:
        """Drop the digests of all queues: they were made anew."""
        for path in reversed(disk.below(self._directory)):
            if disk.is_file(path):
                disk.remove(path)
        disk.remove(self._suspect)
        self.damaged.clear()

    def work(self, steps: int) -> None:
        """Do so beside the traffic, and leave damaged blocks to the next start."""
        known = len(self.damaged)
        self.run(steps)
        if len(self.damaged) > known:
            disk.make_directories(self._suspect.parent)
            disk.write_file(self._suspect, b"")

    def _check_all(self) -> Generator[None, None, None]:
        """Check the last files of all queues, then the others, each queue from the newest on."""
        queues = list(self._queues.values())
        newest = [(queue, base) for queue in queues for base in queue.files.bases[-1:]]
        older = [(queue, base) for queue in queues for base in reversed(queue.files.bases[:-1])]
        for queue, base in newest + older:
            yield from self._check(queue, base)

    def _check(self, queue: ConsumeQueue, base: int) -> Generator[None, None, None]:
        path = queue.files.path(base)
        digest = load_digest(digest_path(self._root, path))
        if digest is None:
            return
        try:
            fd = disk.open_file(path, disk.WRITE)
        except FileNotFoundError:
            return  # deleted by age
        try:
            for block in digest.blocks(fd):
                first, end = (base + block.position) // ENTRY_SIZE, base + block.end
                if end > queue.kept_end * ENTRY_SIZE:
                    return  # this start has written it
                if is_sound(path, fd, block, partial(self._is_true, queue, fd)):
                    if crc32(block.content) != block.crc:
                        self.turned.add(queue)
                elif end > queue.next_offset * ENTRY_SIZE:
                    return  # an earlier start was killed while it made the queue anew
                else:
                    _tell(path, block)
                    self.damaged[queue] = min(first, self.damaged.get(queue, first))
                yield
        finally:
            disk.close(fd)

    def _is_true(self, queue: ConsumeQueue, fd: int, position: int) -> bool:
        """Tell whether the entry at a position leads to a record of its queue, or says it is none.

        Of a record that was deleted by age nobody can tell.
        """
        at = position - position % ENTRY_SIZE
        entry = unpack_entry(disk.pread(fd, ENTRY_SIZE, at))
        if entry.size == PRE_BLANK.size:
            return True
        log_start = self._files.bases[0] if self._files.bases else 0
        if not entry.is_valid or entry.physical_offset < log_start:
            return entry.is_valid
        base = self._files.base_of(entry.physical_offset)
        try:
            with disk.opened(self._files.path(base)) as log:
                content = disk.pread(log, entry.size, entry.physical_offset - base)
        except FileNotFoundError:
            return False
        found = find_records(content, entry.physical_offset, check_crc=False)
        if not found or found[0][1] != entry.size:
            return False
        _, _, _, queue_id, _, topic_at, properties_at = found[0]
        topic = content[topic_at : properties_at - 2]
        return (topic, queue_id) == (queue.topic.encode(), queue.queue_id)


class IndexScrub(_Pass):
    """Compares index files: the newest before it is opened, the others in time."""

    def __init__(self, root: Path, slots_end: int) -> None:
        """From byte ``slots_end`` on a file only grows."""
        self._root = root
        self._directory = root / "index"
        self._start_end = slots_end + START_STEPS * BLOCK
        self._steps = self._check_in_time()
        self.kept: tuple[Path, Digest] | None = None  # the newest file, as far as it was compared
        self._found: list[Path] = []  # all files, before the index was opened
        self._written: Path | None = None  # an older one that is the newest again

    def give_up_damaged(self, *, clean: bool) -> None:
        """Make the oldest file unusable that cannot be mended; before the index is opened.

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
        damaged = [path for path in paths if disk.exists(self._suspect(path))]
        if digest is not None and not all(self._are_sound(newest, digest, range(self._start_end))):
            damaged.append(newest)
        if not damaged:
            return
        logger.error("event=index_file_given_up path=%s Its keys are put again", damaged[0])
        disk.truncate(damaged[0], 0)
        self.kept = None
        for path in paths[paths.index(damaged[0]) :]:
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

    def _check_in_time(self) -> Generator[None, None, None]:
        """Check all older files, then the part of the newest that does not change."""
        for path in reversed(_index_files(self._directory)[:-1]):
            digest = load_digest(digest_path(self._root, path))
            if digest is not None:
                yield from self._check(path, digest, range(digest.end))
        if self.kept is not None:
            path, digest = self.kept
            yield from self._check(path, digest, range(self._start_end, digest.end))

    def _check(self, path: Path, digest: Digest, part: range) -> Generator[None, None, None]:
        for sound in self._are_sound(path, digest, part):
            yield
            if path == self._written:
                return
            if not sound:
                disk.make_directories(self._suspect(path).parent)
                disk.write_file(self._suspect(path), b"")
                return

    @staticmethod
    def _are_sound(path: Path, digest: Digest, part: range) -> Iterator[bool]:
        """Tell of each block that begins in a part whether it is as it was, if need be mended."""
        try:
            fd = disk.open_file(path, disk.WRITE)
        except FileNotFoundError:
            return  # deleted by age
        try:
            for block in digest.blocks(fd, part.start + -part.start % BLOCK):
                if block.position >= part.stop:
                    return
                sound = is_sound(path, fd, block)
                if not sound:
                    _tell(path, block)
                yield sound
        finally:
            disk.close(fd)

    def _suspect(self, path: Path) -> Path:
        digest = digest_path(self._root, path)
        return digest.with_name(digest.name + _SUSPECT)


def _index_files(directory: Path) -> list[Path]:
    if not disk.is_directory(directory):
        return []
    return [path for path in disk.entries(directory) if is_index_file_name(path.name)]
