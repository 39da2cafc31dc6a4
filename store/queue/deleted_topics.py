"""Topics that were deleted while the log still has their records.

A deletion removes the queues of a topic, so that the queues of a new topic of that name begin at 0,
as in RocketMQ. Its records stay in the log until retention deletes them. The topic table keeps the
physical offset below which they lie, in one write with the removal of the topic. So a start leaves
them out when it rebuilds queues, and removes the queues if a kill has prevented that.

RocketMQ drops the key when it writes the file.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import define, field

from ..files import disk
from ..files.json_table import decode_table
from .consume_queue import ConsumeQueue
from .queue_table import QueueTable

DELETED_KEY: Final = "halfmqDeletedTopics"
"""Key of ``topics.json``: topic → physical offset below which its records are deleted."""


def load_deleted_topics(root: Path) -> dict[str, int]:
    """Return the deleted topics of a store; none if the table cannot be read."""
    for name in ("topics.json", "topics.json.bak"):
        with suppress(OSError, ValueError):  # the broker says so when it loads the table
            return deleted_topics_of(decode_table(disk.read_bytes(root / "config" / name)))
    return {}


def deleted_topics_of(table: Mapping[str, object]) -> dict[str, int]:
    """Return the deleted topics that a topic table names."""
    found = table.get(DELETED_KEY)
    topics = found.items() if isinstance(found, dict) else ()
    return {str(topic): end for topic, end in topics if isinstance(end, int)}


@define(eq=False, repr=False)
class TopicDeletion:
    """Removes the queues of deleted topics."""

    _directory: Path
    _queues: QueueTable
    # Gets the queues before their files are removed, on the same thread.
    _forget: Callable[[Sequence[ConsumeQueue]], None]
    _waiting: deque[tuple[str, list[ConsumeQueue], Future[None]]] = field(factory=deque, init=False)

    def begin(self, topic: str) -> Future[None]:
        """Drop the queues of a topic; on the loop thread.

        The result, or an OSError, is there when their files are removed. Nothing may be appended to
        the topic before.
        """
        done: Future[None] = Future()
        self._waiting.append((topic, self._queues.drop(topic), done))
        return done

    def work(self) -> bool:
        """Remove the files of dropped queues; on the thread that flushes queues.

        Return whether there were any.
        """
        found = bool(self._waiting)
        while self._waiting:
            topic, queues, done = self._waiting.popleft()
            try:
                self._forget(queues)
                # Those on the disk: an earlier attempt may have left some.
                _remove_files(disk.directories(self._directory / topic))
            except OSError as error:
                done.set_exception(error)
            else:
                done.set_result(None)
        return found

    def finish(self, deleted: Mapping[str, int]) -> None:
        """Remove the queues that a kill has left; for a start."""
        for topic, end in deleted.items():
            queues = self._queues.drop(topic, end)
            if queues:
                self._forget(queues)
            _remove_files(queue.files.directory for queue in queues)


def _remove_files(directories: Iterable[Path]) -> None:
    """Remove the files; a start does so again if a power cut brings them back."""
    for directory in directories:
        # The newest first, so that an interruption leaves no file missing in between.
        for path in reversed(disk.files(directory)):
            disk.remove(path)
