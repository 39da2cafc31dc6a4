"""Rebuild queue entries from the records of the log during a scan.

The records of a queue have consecutive queue offsets. A record with another offset is not trusted
at once, because no checksum covers that field: one flipped bit in it must not hide the messages
that follow. So

* a record whose queue offset is taken already is left out: the first record keeps it;
* a record with a higher offset is held until the next record of the queue. If that has a higher
  offset too, the records in between are lost; otherwise the held record is wrong and left out.

Entries of lost records are blank (``PRE_BLANK``) until the scan is done. Then each gets a filler in
the damaged range that must have held its record (``repair``). An entry without such a range stays
blank, and consumers skip it. The end of a queue is restored in the same way, from legible heads in
damaged ranges and from the entries that the queue had: a queue offset that a consumer may have seen
is never used again.

A batch of RocketMQ's batch queues takes as many queue offsets as it has messages. All of them refer
to its one record here: the last one has the entry, the others are skipped.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ..format.filler import FILLER_BIT
from ..format.flags import INNER_BATCH, NO_QUEUE_ENTRY, TRANSACTION_MASK
from ..format.properties import TagsCodes
from ..format.queue_entry import LAYOUT, PRE_BLANK, QueueEntry, unpack_entries
from ..format.record import RECORD_SIZE_MIN, store_timestamp
from ..format.topics import SCHEDULE_TOPIC, is_text
from ..log.dispatch import entry_code, inner_batch_size
from ..log.log_scan import Found
from ..log.resync import Damage
from ..log.transaction_ranges import TRANSACTION_TOPICS, TransactionRanges
from ..queue.consume_queue import ConsumeQueue
from ..queue.queue_table import QueueTable

logger = logging.getLogger(__name__)

_ENTRIES_HELD: Final = 1 << 16  # queue entries collected before they are written: about 6 MB
_BLANKS_MAX: Final = 16 << 20  # most blank entries in a row: twenty bytes each
_LAST_ENTRIES_MAX: Final = 64  # entries kept of a queue's old end; more are rarely lost at once
_GIVEN_UP_MAX: Final = 10_000  # records of no queue that are reported one by one
_UNUSUAL: Final = NO_QUEUE_ENTRY | INNER_BATCH | FILLER_BIT


class IncompleteError(Exception):
    """Queues lack entries, or hold wrong ones, below the point where the scan began."""


class MissingEntry(NamedTuple):
    """A queue offset without a record."""

    queue: ConsumeQueue
    queue_offset: int
    after: int  # physical offset of the end of the previous record
    before: int  # physical offset of the next record


class QueuedRecord(NamedTuple):
    """A record with its position in a queue."""

    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int
    messages: int  # queue offsets that the record takes


class LastEntries(NamedTuple):
    """The last entries that a queue had before the first scan of a start."""

    first: int = 0  # queue offset
    entries: tuple[QueueEntry, ...] = ()

    @property
    def end(self) -> int:
        """The queue offset after the last entry."""
        return self.first + len(self.entries)


class QueueScan:
    """Entries of one queue, collected by the scan and written in one step."""

    __slots__ = (
        "ahead", "ahead_at", "before", "entries", "is_about_transactions", "is_schedule",
        "last_end", "next_offset", "queue",
    )  # fmt: skip

    def __init__(self, queue: ConsumeQueue, before: LastEntries) -> None:
        self.queue = queue
        self.next_offset = queue.next_offset
        self.entries: list[bytes] = []
        self.last_end = queue.last_end
        self.is_schedule = queue.topic == SCHEDULE_TOPIC
        self.is_about_transactions = queue.topic in TRANSACTION_TOPICS
        self.ahead: QueuedRecord | None = None  # a record held until the next one
        self.ahead_at = 0  # the queue's next offset when it was held
        self.before = before

    def add(self, record: QueuedRecord) -> None:
        """Add the next record."""
        if record.messages > 1:
            # All but the last are skipped; a consumer that pulls one of them gets the batch.
            skipped = QueueEntry(record.physical_offset, PRE_BLANK.size, 1).pack()
            self.entries += [skipped] * (record.messages - 1)
        self.entries.append(LAYOUT.pack(record.physical_offset, record.size, record.tags_code))
        self.last_end = record.physical_offset + record.size
        self.next_offset = record.queue_offset + record.messages

    def has_room_before(self, record: QueuedRecord) -> bool:
        """Return whether the log has room for all records missing before this one."""
        missing = record.queue_offset - self.next_offset
        return missing * RECORD_SIZE_MIN <= record.physical_offset - self.last_end

    def skip_to(self, queue_offset: int) -> None:
        """Skip queue offsets without a record in the log."""
        self.write()
        queue = self.queue
        gap = queue_offset - queue.next_offset
        if queue.next_offset > queue.first_offset and gap <= _BLANKS_MAX:
            queue.extend(PRE_BLANK.pack() * gap, self.last_end)
        else:
            queue.skip_to(queue_offset)
        self.next_offset = queue_offset

    def write(self) -> None:
        """Write the collected entries."""
        if self.entries:
            self.queue.extend(b"".join(self.entries), self.last_end)
            self.entries.clear()


class QueueRebuild:
    """The queues during one scan of the log from ``start`` on."""

    def __init__(
        self,
        queues: QueueTable,
        *,
        start: int,
        log_start: int,
        held: Callable[[ConsumeQueue], int],
        delay_levels_ms: Sequence[int],
        batch_queues: frozenset[tuple[str, int]],
        before: dict[ConsumeQueue, LastEntries],
    ) -> None:
        """``held`` returns how many entries below ``start`` a queue has; it may raise.

        ``before`` keeps the ends of queues that the first scan of a start found, for a second scan.
        """
        self._queues = queues
        self._start = start
        self._log_start = log_start
        self._held = held
        self._levels = delay_levels_ms
        self._batch_queues = batch_queues
        self._before = before
        self._scans: dict[tuple[bytes, int], QueueScan] = {}
        self._collected = 0  # entries
        self._tags_codes = TagsCodes()
        self.transactions = TransactionRanges(start)
        self._collects = True  # whether there is room for more of these ranges
        self.missing_entries: list[MissingEntry] = []
        self.given_up: list[tuple[Damage, int]] = []  # records of no queue, with store time in ms
        self.left_out = 0  # records without a queue offset

    # The scan -------------------------------------------------------------------------------

    def dispatch(self, chunk_offset: int, chunk: bytes, found: list[Found]) -> None:
        """Collect the queue entries of the records in a chunk.

        Raises:
            IncompleteError: The scan has to begin with the first record of the log.
        """
        self._dispatch(chunk_offset, chunk, found)
        position, size, *_ = found[-1]
        self._collects = self._collects and self.transactions.reach(chunk_offset + position + size)
        self._collected += len(found)
        if self._collected > _ENTRIES_HELD:
            self._collected = 0
            for scan in self._scans.values():
                scan.write()

    def _dispatch(self, chunk_offset: int, chunk: bytes, found: list[Found]) -> None:
        scans, pack, tags_code_at = self._scans, LAYOUT.pack, self._tags_codes.code_at
        add = self.transactions.add if self._collects else _add_nothing
        for record in found:
            (
                position, size, sys_flag, queue_id, queue_offset, topic_at, topic_end,
                properties_at,
            ) = record  # fmt: skip
            physical_offset = chunk_offset + position
            topic = chunk[topic_at:topic_end]
            scan = scans.get((topic, queue_id))
            if sys_flag & TRANSACTION_MASK:
                add(physical_offset, size)
                if sys_flag & NO_QUEUE_ENTRY and not queue_offset and is_text(topic):
                    continue
            elif scan is not None and scan.is_about_transactions:
                add(physical_offset, size)
            if (
                scan is None
                or queue_offset != scan.next_offset
                or sys_flag & _UNUSUAL
                or scan.is_schedule
            ):
                self._dispatch_unusual(scan, chunk_offset, chunk, record)
                continue
            code = tags_code_at(chunk, properties_at, position + size)
            scan.entries.append(pack(physical_offset, size, code))
            scan.last_end = physical_offset + size
            scan.next_offset = queue_offset + 1

    def _dispatch_unusual(
        self, scan: QueueScan | None, chunk_offset: int, chunk: bytes, found: Found
    ) -> None:
        position, size, sys_flag, queue_id, queue_offset, topic_at, topic_end, properties_at = found
        topic = chunk[topic_at:topic_end]
        if sys_flag & NO_QUEUE_ENTRY and is_text(topic):
            self.left_out += 1  # such records have no queue offset
            return
        if scan is None:
            scan = self._prepare((topic, queue_id), queue_offset)
            if scan is None:
                self._give_up(chunk_offset, chunk, found)
                return
            if scan.is_about_transactions and self._collects and not sys_flag & TRANSACTION_MASK:
                self.transactions.add(chunk_offset + position, size)
        count = 1
        if sys_flag & INNER_BATCH and (scan.queue.topic, queue_id) in self._batch_queues:
            count = inner_batch_size(chunk[properties_at : position + size], queue_offset)
        code = entry_code(chunk, found, self._levels)
        self._place(scan, QueuedRecord(queue_offset, chunk_offset + position, size, code, count))

    def _give_up(self, chunk_offset: int, chunk: bytes, found: Found) -> None:
        """Treat a record that no reader could use as a damaged range."""
        position, size, sys_flag, *_ = found
        self.left_out += 1
        if len(self.given_up) < _GIVEN_UP_MAX:
            damage = Damage(chunk_offset + position, size, "no queue can have such a name")
            self.given_up.append((damage, store_timestamp(chunk, position, sys_flag)))

    def _prepare(self, key: tuple[bytes, int], queue_offset: int) -> QueueScan | None:
        """Prepare a queue for its first record of the scan; None if its name is invalid."""
        try:
            queue = self._queues[key[0].decode(), key[1]]
        except ValueError:
            return None
        held = self._held(queue)
        if queue_offset > held and self._start > self._log_start:
            raise IncompleteError(
                f"{queue.topic}:{queue.queue_id} lacks entries {held} to {queue_offset - 1}"
            )
        # In a scan of the whole log, entries from the first record's offset on are invalid.
        rebuilding = self._start == self._log_start
        scan = self._cut(queue, min(held, max(queue_offset, 0)) if rebuilding else held)
        self._scans[key] = scan
        return scan

    def _cut(self, queue: ConsumeQueue, end: int) -> QueueScan:
        """Remove the entries that the scan has to confirm, and keep the last of them."""
        if queue not in self._before:
            first = max(end, queue.next_offset - _LAST_ENTRIES_MAX, queue.first_offset)
            count = max(queue.next_offset - first, 0)
            content = queue.entries(first, count) if count else b""
            self._before[queue] = LastEntries(first, tuple(unpack_entries(content)))
        queue.cut(end)
        return QueueScan(queue, self._before[queue])

    def _place(self, scan: QueueScan, record: QueuedRecord) -> None:
        """Add a record to its queue, or hold it until the next record confirms its offset."""
        ahead = scan.ahead
        if ahead is not None and record.queue_offset > scan.next_offset:
            scan.ahead = None
            if scan.ahead_at == scan.next_offset and record.queue_offset > ahead.queue_offset:
                self._skip_to(scan, ahead)
            else:
                self.left_out += 1  # its queue offset was too high
        if record.queue_offset == scan.next_offset:
            scan.add(record)
        elif record.queue_offset > scan.next_offset and (
            record.messages > 1 or scan.has_room_before(record)
        ):
            scan.ahead, scan.ahead_at = record, scan.next_offset
        else:
            self.left_out += 1

    def _skip_to(self, scan: QueueScan, record: QueuedRecord) -> None:
        """Continue with a record at a higher offset; add missing entries before it."""
        missing = range(scan.next_offset, record.queue_offset)
        # Records that retention has deleted are not lost.
        is_loss = self._log_start == 0 or scan.last_end > self._log_start
        if is_loss and len(missing) <= _BLANKS_MAX:
            before = record.physical_offset
            self.missing_entries += [
                MissingEntry(scan.queue, one, scan.last_end, before) for one in missing
            ]
        scan.skip_to(record.queue_offset)
        scan.add(record)

    # The end --------------------------------------------------------------------------------

    def finish(self) -> list[QueueScan]:
        """Write the rest, and remove unconfirmed entries from all queues; return all queues."""
        for scan in self._scans.values():
            if scan.ahead is not None and scan.ahead_at == scan.next_offset:
                self._skip_to(scan, scan.ahead)  # no later record contradicts it
            elif scan.ahead is not None:
                self.left_out += 1
        met = {scan.queue for scan in self._scans.values()}
        unmet = [queue for queue in self._queues.values() if queue not in met]
        scans = [*self._scans.values(), *(self._cut(queue, self._held(queue)) for queue in unmet)]
        for scan in scans:
            scan.write()
        return scans


def _add_nothing(_physical_offset: int, _size: int) -> None:
    """Ignore a transaction record, because too many ranges are collected already."""
