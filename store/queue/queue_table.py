"""All consume queues of a store, by topic and queue id; their ends for the checkpoint."""

import logging
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from ..errors import UnusableFileError
from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..format.crc import crc32
from .consume_queue import ConsumeQueue, MapPool

logger = logging.getLogger(__name__)

# Most queues that are flushed one by one, which takes some milliseconds of the disk for each: a
# second at most. More are flushed with all that was changed in their file system, by others too.
SYNCED_SINGLY_MAX: Final = 128


class QueueTable(dict[tuple[str, int], ConsumeQueue]):
    """All queues of a store by topic and queue id."""

    def __init__(
        self,
        directory: Path,
        file_size: int,
        *,
        maps_max: int,
        special_topics: frozenset[str],
        all_special: bool = False,
    ) -> None:
        super().__init__()
        self._directory = directory
        self._file_size = file_size
        self._pool = MapPool(maps_max)
        self._special_topics = special_topics
        self._all_special = all_special
        self._fd = -1  # of the directory; kept open, so that no error in between is missed

    def __missing__(self, key: tuple[str, int]) -> ConsumeQueue:
        """Add the queue; its files are created with its first entry."""
        topic, queue_id = key
        queue = self[key] = ConsumeQueue(
            topic,
            queue_id,
            MappedFileQueue(f"{self._directory}/{topic}/{queue_id}", self._file_size),
            self._pool,
            special=self._all_special or topic in self._special_topics,
        )
        return queue

    def load(self, *, rebuild: bool = False) -> None:
        """Find the existing queues; directories not named by a number are ignored.

        A file that was cut or extended gets its size again; ``recovery`` finds what is missing.

        Raises:
            UnusableFileError: A name is wrong, or the sizes of all files without ``rebuild``, as
                after a change of the settings. Nothing was changed.
        """
        wrong: dict[Path, int] = {}
        count = 0
        root = str(self._directory)
        for topic in disk.directory_names(root):
            for queue_id in filter(str.isdecimal, disk.directory_names(f"{root}/{topic}")):
                files = self[topic, int(queue_id)].files
                wrong |= files.load()
                count += len(files.bases)
        self._mend_sizes(wrong, count, rebuild=rebuild)
        for queue in self.values():
            queue.load()

    def _mend_sizes(self, wrong: dict[Path, int], count: int, *, rebuild: bool) -> None:
        if wrong and len(wrong) == count and not rebuild:
            path, size = next(iter(wrong.items()))
            raise UnusableFileError(
                path,
                f"has {size} bytes and no queue file has {self._file_size}. If "
                f"mappedFileSizeConsumeQueue was {size} until now, set it so; otherwise create the "
                f"empty file {self._directory}.rebuild, and the next start rebuilds all queues",
            )
        for path, size in wrong.items():
            logger.warning("event=queue_file_mended path=%s bytes=%d", path, size)
            disk.truncate(path, self._file_size)

    def _changed(self) -> list[ConsumeQueue]:
        return [queue for queue in list(self.values()) if queue.is_changed]

    @property
    def flushes_file_system(self) -> bool:
        """Whether ``sync`` would flush everything that was changed in the file system."""
        return disk.sync_file_system is not None and len(self._changed()) > SYNCED_SINGLY_MAX

    def sync(self) -> None:
        """Flush the new entries of all queues; called by the maintenance thread."""
        changed = self._changed()
        if len(changed) <= SYNCED_SINGLY_MAX or disk.sync_file_system is None:
            for queue in changed:
                queue.sync()
            return
        if self._fd < 0:
            self._fd = disk.open_file(self._directory, disk.READ)
        with ExitStack() as flushing:
            for queue in changed:
                flushing.enter_context(queue.flushing())
            disk.sync_file_system(self._fd)

    def drop(self, topic: str, end: int = sys.maxsize) -> list[ConsumeQueue]:
        """Forget the queues of a topic whose records lie below ``end``; their files stay.

        A new queue begins at queue offset 0.
        """
        dropped = [one for (name, _), one in self.items() if name == topic and one.last_end <= end]
        for queue in dropped:
            queue.is_deleted = True
            queue.close()
            del self[topic, queue.queue_id]
        return dropped

    def close(self) -> None:
        for queue in self.values():
            queue.close()
        if self._fd >= 0:
            disk.close(self._fd)
            self._fd = -1


def checksum(queue: ConsumeQueue, end: int) -> int:
    """Return one queue's part of the sum; 0 for a queue without entries, which needs no file."""
    return crc32(f"{queue.topic}:{queue.queue_id}:{end}".encode()) if end else 0


class QueueEnds:
    """The ends of all queues below a record that moves, as one checksum; for one thread at a time.

    A queue file that is lost, cut or zeroed is not visible from the other queues, and its records
    may lie far before the part of the log that a start scans. So each checkpoint says where the
    queues ended, and a start rebuilds them from the log if they end elsewhere. The checksum is a
    sum over all queues: only changed ones cost time at each checkpoint, in any order.
    """

    def __init__(self) -> None:
        self.offset = -1  # physical offset of that record
        self.checksum = 0
        self._ends: dict[ConsumeQueue, int] = {}

    def start(self, queues: Iterable[ConsumeQueue], physical_offset: int) -> None:
        """Begin with a record, while nothing is appended."""
        self.offset = physical_offset
        for queue in queues:
            self._set(queue, queue.find_physical(physical_offset))

    def move(self, queues: Iterable[ConsumeQueue], physical_offset: int) -> None:
        """Continue to a later record; all entries of records before it are on disk."""
        self.offset = physical_offset
        for queue in queues:
            known = self._ends.get(queue, 0)
            if known != queue.flushed_offset:
                self._set(queue, queue.first_at_or_after(physical_offset, known))

    def forget(self, queues: Iterable[ConsumeQueue]) -> None:
        """Leave out deleted queues."""
        for queue in queues:
            self.checksum -= checksum(queue, self._ends.pop(queue, 0))

    def _set(self, queue: ConsumeQueue, end: int) -> None:
        self.checksum += checksum(queue, end) - checksum(queue, self._ends.get(queue, 0))
        self._ends[queue] = end
