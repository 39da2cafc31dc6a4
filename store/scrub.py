"""Turning back bits that the disk has flipped in log, queue and index files.

A digest has a CRC-32 of each 64 KiB of a file. If a block differs from it in one bit, the CRC tells
which one, and that bit is turned back: it costs no message. A block with several bad bits looks
like one with a single bad bit once in 8,192 times. So the record or entry that holds the bit is
checked afterwards, and the bit is turned again if that is not whole.

A start compares what it is about to rely on: queues, the newest index file, and after a kill the
end of the log. The rest is compared while the broker works. A block of a queue or index file that
cannot be mended is reported, and the file is rebuilt from the log, by this start or the next one.
"""

import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from . import disk
from .consume_queue import ConsumeQueue, QueueTable
from .digest import Block, Digest, digest_path, load_digest
from .format.crc import crc32
from .format.digest import BLOCK, find_flipped_bit
from .format.queue_entry import ENTRY_SIZE, PRE_BLANK, unpack_entry
from .format.record import MAGIC_BLANK, PREFIX
from .log_scan import find_records
from .log_search import LogFile, candidate_at, candidates
from .mapped_file_queue import MappedFileQueue

logger = logging.getLogger(__name__)

# Bytes of queues, and of the newest index file after its slots, that a start compares: a disk reads
# them in a tenth of a second each.
START_BYTES: Final = 16 << 20
_RECORD_MAX: Final = 8 << 20  # bytes before a bit in which the start of its record is looked for


class Outcome(Enum):
    """What comparing a block with its CRC came to."""

    SOUND = "sound"
    TURNED_BACK = "turned back"  # one bit was flipped
    DAMAGED = "damaged"  # more than that


class Target(NamedTuple):
    """A file to compare with its digest."""

    path: Path
    digest: Digest
    # Given the open file and a position: whether what holds that byte is whole.
    is_whole: Callable[[int, int], bool] = lambda _fd, _position: True
    # Bytes that are relied on now; damage after them does not count.
    used: Callable[[], int] = lambda: sys.maxsize
    start: int = 0  # bytes before are compared already
    doubt: Callable[[], None] | None = None  # has the next start rebuild the file; not of the log


def compare(target: Target) -> Generator[tuple[Block, Outcome], None, None]:
    """Compare a file block by block, turn bits back, and report damage where the file is used."""
    try:
        fd = disk.open_file(target.path, disk.WRITE)
    except FileNotFoundError:
        return  # deleted by age
    try:
        for block in target.digest.blocks(fd, target.start):
            outcome = _mend(target, fd, block)
            if outcome is Outcome.DAMAGED:
                if block.end > target.used():
                    return
                logger.error(
                    "event=block_damaged path=%s position=%d length=%d",
                    target.path,
                    block.position,
                    len(block.content),
                )
            yield block, outcome
    finally:
        disk.close(fd)


def _mend(target: Target, fd: int, block: Block) -> Outcome:
    position, content, crc = block
    if crc32(content) == crc:
        return Outcome.SOUND
    flipped = find_flipped_bit(content, crc)
    if flipped is None:
        return Outcome.DAMAGED
    at, bit = flipped
    disk.pwrite(fd, bytes([content[at] ^ 1 << bit]), position + at)
    if not target.is_whole(fd, position + at):
        disk.pwrite(fd, content[at : at + 1], position + at)
        return Outcome.DAMAGED
    disk.sync_data(fd)
    logger.error(
        "event=bit_turned_back path=%s position=%d bit=%d", target.path, position + at, bit
    )
    return Outcome.TURNED_BACK


def compare_all(targets: Iterable[Target | None]) -> Generator[Outcome, None, None]:
    """Compare files block by block; leave one that has to be rebuilt at its first damage."""
    for target in targets:
        if target is None:
            continue
        for _, outcome in compare(target):
            if outcome is Outcome.DAMAGED and target.doubt is not None:
                target.doubt()
                yield outcome
                break
            yield outcome


# The log ----------------------------------------------------------------------------------------


def log_target(root: Path, files: MappedFileQueue, base: int, start: int = 0) -> Target | None:
    """Return a file of the log with its digest, if any, to be compared from byte ``start`` on."""
    path = files.path(base)
    digest = load_digest(digest_path(root, path))
    if digest is None:
        return None
    return Target(path, digest, partial(_is_whole, base, files.file_size), start=start)


def mend_log(root: Path, files: MappedFileQueue, start: int) -> int:
    """Turn flipped bits back in the log from ``start`` on, as far as digests reach.

    Returns:
        The physical offset up to which all is as it was written; ``start`` if nothing is known.
    """
    sound_end = start
    for base in [base for base in files.bases if base + files.file_size > start]:
        target = log_target(root, files, base, max(start - base, 0))
        for block, outcome in () if target is None else compare(target):
            if outcome is not Outcome.DAMAGED and base + block.position <= sound_end:
                sound_end = max(sound_end, base + block.end)
    return sound_end


def _is_whole(base: int, size: int, fd: int, position: int) -> bool:
    """Tell whether a byte of the log lies in a whole record, or after the last one of its file."""
    file = LogFile(fd, base, size)
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


# Queues -----------------------------------------------------------------------------------------


def queue_targets(root: Path, queues: QueueTable, log: MappedFileQueue) -> Iterator[Target]:
    """Give the queue files that have a digest: the last one of each queue, then older ones."""
    files = [(queue, list(queue.files.bases)) for queue in list(queues.values())]
    newest = [(queue, base) for queue, bases in files for base in bases[-1:]]
    older = [(queue, base) for queue, bases in files for base in reversed(bases[:-1])]
    for queue, base in newest + older:
        path = queue.files.path(base)
        digest = load_digest(digest_path(root, path))
        if digest is not None:
            # This start has written the rest; one that was killed has left the queue shorter.
            digest.cut(max(queue.kept_end * ENTRY_SIZE - base, 0))
            used = partial(_used, queue, base)
            yield Target(path, digest, partial(_is_true, queue, log), used, doubt=queues.doubt)


def mend_queues(root: Path, queues: QueueTable, log: MappedFileQueue) -> None:
    """Compare queues that are loaded, before anything relies on them."""
    outcomes = compare_all(queue_targets(root, queues, log))
    if Outcome.TURNED_BACK in list(islice(outcomes, START_BYTES // BLOCK)):
        queues.load()  # a queue may not end where it seemed to
    outcomes.close()


def _used(queue: ConsumeQueue, base: int) -> int:
    return queue.next_offset * ENTRY_SIZE - base


def _is_true(queue: ConsumeQueue, log: MappedFileQueue, fd: int, position: int) -> bool:
    """Tell whether the entry at a position leads to a record of its queue, or says it is none.

    Of a record that was deleted by age nobody can tell.
    """
    at = position - position % ENTRY_SIZE
    entry = unpack_entry(disk.pread(fd, ENTRY_SIZE, at))
    if entry.size == PRE_BLANK.size:
        return True
    log_start = log.bases[0] if log.bases else 0
    if not entry.is_valid or entry.physical_offset < log_start:
        return entry.is_valid
    base = log.base_of(entry.physical_offset)
    try:
        with disk.opened(log.path(base)) as log_fd:
            content = disk.pread(log_fd, entry.size, entry.physical_offset - base)
    except FileNotFoundError:
        return False
    found = find_records(content, entry.physical_offset, check_crc=False)
    if not found or found[0][1] != entry.size:
        return False
    _, _, _, queue_id, _, topic_at, properties_at = found[0]
    topic = content[topic_at : properties_at - 2]
    return (topic, queue_id) == (queue.topic.encode(), queue.queue_id)


# The index --------------------------------------------------------------------------------------


def index_targets(
    root: Path, paths: Sequence[Path], kept: tuple[Path, Digest] | None, kept_start: int
) -> Iterator[Target]:
    """Give the index files that have a digest, the newest first; ``paths`` are in order.

    The digest ``kept`` is no longer on disk, and its file is compared from ``kept_start`` on.
    """
    for path in reversed(paths):
        is_kept = kept is not None and path == kept[0]
        digest = kept[1] if kept is not None and is_kept else load_digest(digest_path(root, path))
        if digest is not None:
            doubt = partial(disk.write_file, _doubt_path(root, path), b"")
            yield Target(path, digest, start=kept_start if is_kept else 0, doubt=doubt)


def give_up_index(
    root: Path, paths: Sequence[Path], kept: tuple[Path, Digest] | None, end: int
) -> bool:
    """Make the oldest index file unusable that cannot be mended; before the index is opened.

    It is then put aside with all newer ones, and their keys are put again from the log. The file of
    the digest ``kept`` is compared up to byte ``end``. Returns whether there was a damaged file.
    """
    if kept is not None:
        outcomes = compare_all(index_targets(root, [kept[0]], kept, 0))
        for _ in islice(outcomes, -(-end // BLOCK)):
            pass
        outcomes.close()
    damaged = [path for path in paths if disk.exists(_doubt_path(root, path))]
    if not damaged:
        return False
    logger.error("event=index_file_given_up path=%s Its keys are put again", damaged[0])
    disk.truncate(damaged[0], 0)
    for path in paths[paths.index(damaged[0]) :]:
        disk.remove(_doubt_path(root, path))
        disk.remove(digest_path(root, path))
    return True


def _doubt_path(root: Path, path: Path) -> Path:
    """Return the file that has the next start rebuild an index file."""
    digest = digest_path(root, path)
    return digest.with_name(digest.name + ".doubtful")
