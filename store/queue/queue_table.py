"""All consume queues of a store, by topic and queue id."""

from pathlib import Path

from ..files import disk
from ..format.crc import crc32
from .consume_queue import ConsumeQueue, MapPool


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

    def __missing__(self, key: tuple[str, int]) -> ConsumeQueue:
        """Add the queue; its files are created with its first entry."""
        topic, queue_id = key
        queue = self[key] = ConsumeQueue(
            topic,
            queue_id,
            directory=self._directory / topic / str(queue_id),
            file_size=self._file_size,
            pool=self._pool,
            special=self._all_special or topic in self._special_topics,
        )
        return queue

    def load(self) -> None:
        """Find the existing queues; directories not named by a number are ignored.

        Raises:
            UnusableFileError: A file of a queue has a wrong size or name.
        """
        for topic in disk.directories(self._directory):
            for directory in disk.directories(topic):
                if directory.name.isdecimal():
                    self[topic.name, int(directory.name)].load()

    def digest(self) -> int:
        """Return a checksum of the ends of all queues."""
        ends = sorted((*key, queue.next_offset) for key, queue in self.items() if queue.next_offset)
        return crc32(repr(ends).encode())

    def close(self) -> None:
        """Close all files."""
        for queue in self.values():
            queue.close()
