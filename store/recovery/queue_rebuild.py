"""Rebuild queues from the records of the log during a scan.

The scan gives each queue the entries that it should have (``integrity/expected_entries.py``).
Entries of lost records are blank (``PRE_BLANK``) until the scan is done. Then each gets a filler in
the damaged range that must have held its record (``repair``). An entry without such a range stays
blank, and consumers skip it. The end of a queue is restored in the same way, from the entries that
the queue had: a queue offset that a consumer may have seen is not used again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from attrs import define

from ..format.queue_entry import QueueEntry, unpack_entries
from ..integrity.expected_entries import ExpectedEntries
from ..log.transaction_ranges import TransactionRanges
from ..queue.consume_queue import ConsumeQueue
from ..queue.queue_table import QueueTable

_LAST_ENTRIES_MAX: Final = 64  # entries kept of a queue's old end; more are rarely lost at once


class IncompleteError(Exception):
    """Queues lack entries, or hold wrong ones, below the point where the scan began."""


class LastEntries(NamedTuple):
    """The last entries that a queue had before the first scan of a start."""

    first: int = 0  # queue offset
    entries: tuple[QueueEntry, ...] = ()

    @property
    def end(self) -> int:
        return self.first + len(self.entries)


@define(eq=False, repr=False, slots=False)
class QueueRebuild:
    """The queues during one scan of the log from ``start`` on."""

    _queues: QueueTable
    _start: int
    _log_start: int
    _held: Callable[[ConsumeQueue], int]  # how many entries below ``start`` a queue has; may raise
    _delay_levels_ms: Sequence[int]
    _batch_queues: frozenset[tuple[str, int]]
    _deleted_topics: Mapping[str, int]
    # Keeps the ends of queues that the first scan of a start found, for a second scan.
    _before: dict[ConsumeQueue, LastEntries]
    _ends_checked: bool  # a queue without records in the scan is left as it is

    def __attrs_post_init__(self) -> None:
        self._is_partial = self._start > self._log_start
        self._begun: set[ConsumeQueue] = set()
        self.transactions = TransactionRanges(self._start)
        self.expected = ExpectedEntries(
            self._begin,
            log_start=self._log_start,
            delay_levels_ms=self._delay_levels_ms,
            batch_queues=self._batch_queues,
            deleted_topics=self._deleted_topics,
            transactions=self.transactions,
        )

    def _begin(self, topic: str, queue_id: int, queue_offset: int) -> ConsumeQueue:
        """Prepare a queue for its first record of the scan.

        Raises:
            ValueError: No queue can have such a name.
            IncompleteError: The scan has to begin with the first record of the log.
        """
        queue = self._queues[topic, queue_id]
        held = self._held(queue)
        if queue_offset > held and self._is_partial:
            raise IncompleteError(f"{topic}:{queue_id} lacks entries {held} to {queue_offset - 1}")
        # In a scan of the whole log, entries from the first record's offset on are invalid.
        self._cut(queue, held if self._is_partial else min(held, max(queue_offset, 0)))
        return queue

    def _cut(self, queue: ConsumeQueue, end: int) -> None:
        """Remove the entries that the scan has to confirm, and keep the last of them."""
        if queue not in self._before:
            first = max(end, queue.next_offset - _LAST_ENTRIES_MAX, queue.first_offset)
            count = max(queue.next_offset - first, 0)
            content = queue.entries(first, count) if count else b""
            self._before[queue] = LastEntries(first, tuple(unpack_entries(content)))
        queue.cut(end)
        self._begun.add(queue)

    def finish(self) -> None:
        """Write the rest, and remove unconfirmed entries from all queues."""
        self.expected.finish()
        for queue in self._queues.values():
            if queue not in self._begun and not self._ends_checked:
                self._cut(queue, self._held(queue))
