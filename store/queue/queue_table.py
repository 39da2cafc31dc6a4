"""All consume queues of a store, by topic and queue id."""

import logging
from pathlib import Path

from ..errors import UnusableFileError
from ..files import disk
from .consume_queue import ConsumeQueue, MapPool

logger = logging.getLogger(__name__)


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

    def load(self, *, rebuild: bool = False) -> None:
        """Find the existing queues; directories not named by a number are ignored.

        A file that was cut or extended gets its size again; ``recovery`` finds what is missing.

        Raises:
            UnusableFileError: A name is wrong, or the sizes of all files without ``rebuild``, as
                after a change of the settings. Nothing was changed.
        """
        for topic in disk.directories(self._directory):
            for directory in disk.directories(topic):
                if directory.name.isdecimal():
                    self[topic.name, int(directory.name)].files.load()
        self._mend_sizes(rebuild=rebuild)
        for queue in self.values():
            queue.load()

    def _mend_sizes(self, *, rebuild: bool) -> None:
        wrong: dict[Path, int] = {}
        count = 0
        for queue in self.values():
            wrong |= queue.files.wrong_sizes()
            count += len(queue.files.bases)
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

    def close(self) -> None:
        """Close all files."""
        for queue in self.values():
            queue.close()
