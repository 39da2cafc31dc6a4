"""Scrub: compare log, queue and index files with their digests, and repair flipped bits.

A digest has a CRC-32 of each 64 KiB of a file. If a block differs in one bit, the CRC identifies
the bit, and it is flipped back, so that no message is lost. A block with several wrong bits looks
like one with a single wrong bit once in 8,192 times. So the record or entry that holds the bit is
checked afterwards, and the repair is undone if it is not valid.

A start compares queues and index before it uses them, the newest files first, and after a kill the
end of the log. The rest is compared while the broker runs. A damaged block of a queue or index is
logged, and a marker makes this start or the next one rebuild all queues, or the whole index.
"""

import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from ..files import disk
from ..files.checkpoint import Marker, rebuild_marker
from ..files.mapped_file_queue import MappedFileQueue
from ..format.digest import BLOCK
from ..format.index import is_index_file_name
from ..format.queue_entry import ENTRY_SIZE, unpack_entry
from ..format.record import MAGIC_BLANK, PREFIX
from ..log.log_reader import LogReader
from ..log.log_scan import find_records
from ..log.resync import OpenLogFile, candidate_at, candidates
from ..queue.consume_queue import ConsumeQueue
from ..queue.queue_table import QueueTable
from .digests import QueueEndDigests
from .expected_entries import is_sound
from .file_digest import Block, Digest, digest_of, digest_path

logger = logging.getLogger(__name__)

# Bytes of queues, and of index files, that a start compares: those for a gigabyte of log.
START_BYTES: Final = 64 << 20
_RECORD_MAX: Final = 8 << 20  # bytes before a bit in which the start of its record is searched


class ScrubTarget(NamedTuple):
    """A file to compare with its digest, if it has one."""

    path: Path
    digest: Digest | None
    start: int = 0  # bytes before are not compared
    used: int = sys.maxsize  # bytes in use; damage after them is ignored
    # From open file and position: whether the record or entry that holds the byte is valid.
    is_whole: Callable[[int, int], bool] = lambda _fd, _position: True
    rebuild: Marker | None = None  # is set if the file is damaged


Comparison = Generator[tuple[Block, bool], None, None]
"""Yields each block as it was read, and whether it is sound now."""


def compare(targets: Iterable[ScrubTarget]) -> Comparison:
    """Compare files block by block, repair flipped bits and log damage."""
    for target in targets:
        if target.digest is None:
            continue
        try:
            fd = disk.open_file(target.path, disk.WRITE)
        except OSError as error:
            if isinstance(error, FileNotFoundError) or disk.lacks_descriptors(error):
                continue  # deleted by age, or left to the next start
            raise
        try:
            for block in target.digest.blocks(fd, target.start):
                sound = block.is_sound or _flip_back(target, fd, block)
                if not sound and block.end > target.used:
                    break
                if not sound:
                    _report(target, block)
                yield block, sound
                if not sound and target.rebuild is not None:
                    break  # the file is rebuilt in any case
        finally:
            disk.close(fd)


def _flip_back(target: ScrubTarget, fd: int, block: Block) -> bool:
    """Repair a block with one flipped bit; return False if more than one differs."""
    flipped = block.flipped_bit()
    if flipped is None:
        return False
    position, bit = flipped
    content = disk.pread(fd, 1, position)
    disk.pwrite(fd, bytes([content[0] ^ 1 << bit]), position)
    if not target.is_whole(fd, position):
        disk.pwrite(fd, content, position)
        return False
    disk.sync_data(fd)
    logger.error("event=bit_turned_back path=%s position=%d bit=%d", target.path, position, bit)
    return True


def _report(target: ScrubTarget, block: Block) -> None:
    size = len(block.content)
    logger.error(
        "event=block_damaged path=%s position=%d length=%d", target.path, block.position, size
    )
    if target.rebuild is not None and not target.rebuild.is_set():
        target.rebuild.create()


def compare_first(targets: Iterable[ScrubTarget]) -> bool:
    """Compare the first ``START_BYTES``; return whether a bit was repaired."""
    compared = compare(targets)
    first = islice(compared, START_BYTES // BLOCK)
    repaired = [sound and not block.is_sound for block, sound in first]
    compared.close()
    return any(repaired)


def log_targets(
    root: Path, log: MappedFileQueue, bases: Iterable[int], start: int = 0
) -> Iterator[ScrubTarget]:
    """Yield log files by their first offsets, to be compared from offset ``start`` on."""
    for base in bases:
        path = log.path(base)
        is_whole = partial(_is_whole, base, log.file_size)
        yield ScrubTarget(path, digest_of(root, path), max(start - base, 0), is_whole=is_whole)


def repair_log(root: Path, log: MappedFileQueue, start: int) -> int:
    """Repair flipped bits in the log from ``start`` on, as far as digests reach.

    Returns:
        The physical offset up to which digests confirm the log; ``start`` without digests.
    """
    sound_end = start
    for base in [base for base in log.bases if base + log.file_size > start]:
        for block, sound in compare(log_targets(root, log, [base], start)):
            if sound and base + block.position <= sound_end:
                sound_end = max(sound_end, base + block.end)
    return sound_end


def _is_whole(base: int, size: int, fd: int, position: int) -> bool:
    """Return whether a byte of the log is in a valid record, or after the last one of a file."""
    file = OpenLogFile(fd, base, size)
    near = file._replace(limit=min(position + PREFIX.size, file.limit))
    for start in reversed([*candidates(near, max(position - _RECORD_MAX, 0))]):
        found = find_records(candidate_at(file, start), file.base + start, check_crc=True)
        if start <= position and found:
            end = start + found[0][1]
            return position < end or _is_blank(file, end)
    return _is_blank(file, 0)


def _is_blank(file: OpenLogFile, position: int) -> bool:
    head = file.read(position, PREFIX.size)
    return head == PREFIX.pack(file.limit - position, MAGIC_BLANK)


def queue_targets(root: Path, queues: QueueTable, log: MappedFileQueue) -> Iterator[ScrubTarget]:
    """Yield the queue files: the last one of each queue, then older ones."""
    files = [(queue, list(queue.files.bases)) for queue in list(queues.values())]
    newest = [(queue, base) for queue, bases in files for base in bases[-1:]]
    older = [(queue, base) for queue, bases in files for base in reversed(bases[:-1])]
    rebuild = rebuild_marker(root, "consumequeue")
    ends = QueueEndDigests(root)
    for queue, base in newest + older:
        path = queue.files.path(base)
        digest = ends.of(queue, base) or digest_of(root, path)
        if digest is not None:  # this start has written the entries from ``kept_end`` on
            digest.cut(max(queue.kept_end * ENTRY_SIZE - base, 0))
        used = queue.next_offset * ENTRY_SIZE - base  # the digest may be longer after a kill
        yield ScrubTarget(path, digest, 0, used, partial(_is_sound, queue, log, base), rebuild)


def repair_queues(root: Path, queues: QueueTable, log: MappedFileQueue) -> None:
    """Compare loaded queues with their digests, before they are used."""
    if compare_first(queue_targets(root, queues, log)):
        queues.load()  # the repair may have changed the end of a queue


def _is_sound(queue: ConsumeQueue, log: MappedFileQueue, base: int, fd: int, position: int) -> bool:
    """Return whether the entry that holds a byte of a queue file fits its record."""
    start = position - position % ENTRY_SIZE
    entry = unpack_entry(disk.pread(fd, ENTRY_SIZE, start))
    queue_offset, log_start = (base + start) // ENTRY_SIZE, (log.bases or [0])[0]
    with closing(LogReader(log)) as reader:
        return is_sound(entry, queue, queue_offset, log_start=log_start, record_at=reader.record_at)


def index_targets(root: Path, paths: Sequence[Path]) -> Iterator[ScrubTarget]:
    """Yield index files, the newest first; ``paths`` are in order."""
    for path in reversed(paths):
        yield ScrubTarget(path, digest_of(root, path), rebuild=rebuild_marker(root, "index"))


def repair_index(root: Path) -> list[Path]:
    """Compare index files before the index is opened; delete all if one has to be rebuilt.

    The index is then rebuilt from the log. Returns the remaining files, in order.
    """
    directory, marker = root / "index", rebuild_marker(root, "index")
    found = disk.files(directory) if disk.is_directory(directory) else []
    paths = [path for path in found if is_index_file_name(path.name)]
    compare_first(index_targets(root, paths))
    if not marker.is_set():
        return paths
    logger.error("event=index_deleted files=%d note='keys are put again from the log'", len(paths))
    for path in reversed(paths):
        disk.remove(path)
        disk.remove(digest_path(root, path))
    marker.remove()
    return []
