"""Reading consume queues: which messages a queue has, and which a pull gets."""

from bisect import bisect_left
from collections.abc import Callable, Iterator

from attrs import define

from ..format.queue_entry import PRE_BLANK, QueueEntry, unpack_entries
from ..ports import LogOffsets
from .consume_queue import ConsumeQueue
from .pull_selection import GetResult, select
from .queue_table import QueueTable


@define(eq=False, repr=False)
class QueueReader:
    """The consume queues as far as their records can be read."""

    _table: QueueTable
    _log: LogOffsets
    _store_timestamp: Callable[[int], int]  # store time in ms of the record at a physical offset
    # Queue offset of the first message that is archived or here; None without an archive.
    archived_from: Callable[[ConsumeQueue], int] | None = None

    def names(self) -> list[tuple[str, int]]:
        """Return topic and queue id of every queue that has, or had, messages."""
        return [key for key, queue in self._table.items() if queue.next_offset]

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the queue offsets of the first message and after the last visible one."""
        queue = self._table.get((topic, queue_id))
        if queue is None:
            return 0, 0
        return queue.min_offset, queue.visible_end(self._log.readable_offset)

    def first_offset(self, topic: str, queue_id: int) -> int:
        """Return the queue offset of the first message that can be pulled, archived or not."""
        queue = self._table.get((topic, queue_id))
        if queue is None:
            return 0
        return queue.min_offset if self.archived_from is None else self.archived_from(queue)

    def take_appended(self) -> Iterator[tuple[str, int, int]]:
        """Yield topic, messages and bytes appended to each queue since the previous call.

        At a start all messages in the store are counted already.
        """
        for queue in list(self._table.values()):
            messages, size = queue.next_offset - queue.counted_offset, queue.appended_bytes
            queue.counted_offset, queue.appended_bytes = queue.next_offset, 0
            yield queue.topic, messages, size

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_count: int = 32,
        max_bytes: int = 262_144,
        tag_codes: frozenset[int] | None = None,
        wait: bool = True,
        archived: bool = False,
    ) -> GetResult:
        """Select messages from a queue offset on, at least one if there is one.

        Without ``wait`` the queue is not read from disk; see ``warm``. With ``archived`` a message
        that was deleted here and is in an archive counts, with ``GetStatus.ARCHIVED``.

        ``tag_codes`` excludes messages whose tag has another hash (``properties.tag_hash``).
        Different tags may have equal hashes, so consumers filter again.
        """
        queue, archived_from = self._table.get((topic, queue_id)), None
        if archived and self.archived_from is not None and queue is not None:
            archived_from = self.archived_from(queue)
        return select(
            queue,
            offset,
            readable_offset=self._log.readable_offset,
            log_start=self._log.min_offset,
            max_count=max_count,
            max_bytes=max_bytes,
            tag_codes=tag_codes,
            wait=wait,
            archived_from=archived_from,
        )

    def entries(self, topic: str, queue_id: int, offset: int, count: int) -> list[QueueEntry]:
        """Return up to ``count`` entries from a queue offset on; [] outside of the queue."""
        queue = self._table.get((topic, queue_id))
        if queue is None:
            return []
        end = min(offset + count, queue.visible_end(self._log.readable_offset))
        if not queue.min_offset <= offset < end:
            return []
        return list(unpack_entries(queue.entries(offset, end - offset)))

    def has_record(
        self, topic: str, queue_id: int, offset: int, physical_offset: int, size: int
    ) -> bool:
        """Return whether the entry at a queue offset is that of a record in the log.

        Only then the record was appended: bytes inside of a message's body may look like a record
        of any queue, but no entry points there. Deleted entries do not count.
        """
        queue = self._table.get((topic, queue_id))
        if queue is None or not queue.min_offset <= offset < queue.next_offset:
            return False
        return queue.entry(offset)[:2] == (physical_offset, size)

    def warm(self, topic: str, queue_id: int, offset: int) -> None:
        """Load queue entries from an offset on into memory, waiting for the disk; any thread.

        Raises:
            OSError: The file cannot be read, or has been deleted.
        """
        queue = self._table.get((topic, queue_id))
        if queue is not None:
            queue.warm(offset)

    def offset_by_time(
        self, topic: str, queue_id: int, timestamp: int, *, upper: bool = False
    ) -> int:
        """Return the queue offset of a store time, in ms.

        That is the first message stored at that time or later, or the offset after the last one.
        With ``upper``, the last message stored at that time or before; the first one if all are
        newer.
        """
        queue = self._table.get((topic, queue_id))
        if queue is None:
            return 0
        low, high = queue.min_offset, queue.visible_end(self._log.readable_offset)
        following = low + bisect_left(
            range(low, high),
            timestamp + upper,
            key=lambda queue_offset: self._store_time(queue, queue_offset),
        )
        return max(following - 1, low) if upper else following

    def store_time_at(self, topic: str, queue_id: int, offset: int) -> int:
        """Return the store time in ms of the message at a queue offset; -1 if there is none."""
        queue = self._table.get((topic, queue_id))
        if queue is None:
            return -1
        if not queue.min_offset <= offset < queue.visible_end(self._log.readable_offset):
            return -1
        if queue.entry(offset).size == PRE_BLANK.size:
            return -1
        return self._store_time(queue, offset)

    def _store_time(self, queue: ConsumeQueue, queue_offset: int) -> int:
        physical_offset = queue.start_of(queue_offset)
        if physical_offset < self._log.min_offset:
            return -1
        return self._store_timestamp(physical_offset)
