"""What queues said before a scan took their entries: evidence about records that one bit damaged.

A scan believes the log, and the log does not protect where a record belongs. The entries that a
queue had before are the only witness of that, so the newest of them are kept in memory.
"""

from typing import Final, NamedTuple

from .consume_queue import ConsumeQueue
from .format.queue_entry import ENTRY_SIZE, QueueEntry, unpack_entry

# Entries of all queues together: 64 MiB, what three gigabytes of one-kilobyte messages have. A
# scan begins with the newest file before the checkpoint, so mostly that is all it goes through.
OLD_ENTRIES_MAX: Final = 3 << 20
_SHARE_MIN: Final = 64  # entries of each queue, however many queues there are


class OldEntries(NamedTuple):
    """The last entries that a queue had."""

    first: int  # queue offset
    content: bytes  # 20 bytes each

    @property
    def end(self) -> int:
        """The queue offset behind the last one."""
        return self.first + len(self.content) // ENTRY_SIZE

    def at(self, queue_offset: int) -> QueueEntry | None:
        """Return an entry, valid or not; None if it is not known."""
        position = (queue_offset - self.first) * ENTRY_SIZE
        if not 0 <= position < len(self.content):
            return None
        return unpack_entry(self.content, position)

    def names(self, queue_offset: int, physical_offset: int) -> bool:
        """Tell whether the entry of a queue offset was that of a record."""
        entry = self.at(queue_offset)
        return entry is not None and entry.is_valid and entry.physical_offset == physical_offset

    def place_of(self, physical_offset: int) -> int | None:
        """Return the queue offset of the entry that names a record; None if there is none."""
        wanted = physical_offset.to_bytes(8, "big")
        at = self.content.find(wanted)
        while at >= 0 and at % ENTRY_SIZE:
            at = self.content.find(wanted, at + 1)
        return None if at < 0 else self.first + at // ENTRY_SIZE


class OldQueues:
    """Old entries of all queues, as they were before the first scan of a start."""

    def __init__(self, queue_count: int) -> None:
        self._share = max(OLD_ENTRIES_MAX // max(queue_count, 1), _SHARE_MIN)
        self._kept: dict[ConsumeQueue, OldEntries] = {}

    def keep(self, queue: ConsumeQueue, end: int) -> OldEntries:
        """Return the entries from queue offset ``end`` on; of a second call those of the first."""
        kept = self._kept.get(queue)
        if kept is None:
            first = max(end, queue.next_offset - self._share, queue.first_offset)
            count = max(queue.next_offset - first, 0)
            content = queue.entries(first, count) if count else b""
            kept = self._kept[queue] = OldEntries(first, content)
        return kept
