"""Queue entries from the records of the log, as a scan comes by them.

A queue goes on with the queue offset after its last one. A record that says something else is not
simply believed, because nothing in the log protects that field: one flipped bit in it must not hide
the messages that follow. So

* a record that is too early in its queue is left out: the first of a queue offset keeps it;
* one that jumps ahead waits for the queue's next record. If that lies further ahead, records
  between them are lost; else the one that waited says it wrongly, and is left out.

Lost places get an entry that is none (``PRE_BLANK``) until the scan is over. Then each gets a
filler in the damaged stretch where its record must have been (``repair``). A place without such a
stretch stays blank, and consumers skip it. A queue's end is made good in the same way, from what is
legible in damaged stretches and from the entries that the queue had: no queue offset that a
consumer may have seen is used again.

A batch of RocketMQ's batch queues takes as many queue offsets as it has messages. All of them lead
to its one record here: the last has the entry, the ones before are skipped.
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
from ..queue.consume_queue import ConsumeQueue, QueueTable

logger = logging.getLogger(__name__)

_ENTRIES_HELD: Final = 1 << 16  # queue entries gathered before they are written: about 6 MB
_BLANKS_MAX: Final = 16 << 20  # places that may lack in a row: twenty bytes each
_LAST_ENTRIES_MAX: Final = 64  # that a queue had at its end; more are rarely lost at once
_GIVEN_UP_MAX: Final = 10_000  # records of no queue that are told one by one
_UNUSUAL: Final = NO_QUEUE_ENTRY | INNER_BATCH | FILLER_BIT


class IncompleteError(Exception):
    """Queues lack entries, or hold wrong ones, below the point where the scan began."""


class Gap(NamedTuple):
    """A place in a queue that no record was found for."""

    queue: ConsumeQueue
    queue_offset: int
    after: int  # physical offset behind the record before it
    before: int  # where the record behind it begins


class QueuedRecord(NamedTuple):
    """A record that takes a place in a queue."""

    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int
    messages: int  # queue offsets that it takes


class LastEntries(NamedTuple):
    """The last entries that a queue had before the first scan of a start."""

    first: int = 0  # queue offset
    entries: tuple[QueueEntry, ...] = ()

    @property
    def end(self) -> int:
        """The queue offset behind the last one."""
        return self.first + len(self.entries)


class QueueScan:
    """Entries of one queue as the scan finds them, held back to be written in one go."""

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
        self.ahead: QueuedRecord | None = None  # a record that waits for the next one to tell
        self.ahead_at = 0  # the queue's next offset when it came
        self.before = before

    def add(self, record: QueuedRecord) -> None:
        """Take the next record."""
        if record.messages > 1:
            # All but the last are skipped; consumers that ask for one of them get the batch.
            skipped = QueueEntry(record.physical_offset, PRE_BLANK.size, 1).pack()
            self.entries += [skipped] * (record.messages - 1)
        self.entries.append(LAYOUT.pack(record.physical_offset, record.size, record.tags_code))
        self.last_end = record.physical_offset + record.size
        self.next_offset = record.queue_offset + record.messages

    def has_room_before(self, record: QueuedRecord) -> bool:
        """Tell whether all that would lack before a record can have lain in the log before it."""
        missing = record.queue_offset - self.next_offset
        return missing * RECORD_SIZE_MIN <= record.physical_offset - self.last_end

    def skip_to(self, queue_offset: int) -> None:
        """Leave out queue offsets that no record of the log has."""
        self.write()
        queue = self.queue
        gap = queue_offset - queue.next_offset
        if queue.next_offset > queue.first_offset and gap <= _BLANKS_MAX:
            queue.extend(PRE_BLANK.pack() * gap, self.last_end)
        else:
            queue.skip_to(queue_offset)
        self.next_offset = queue_offset

    def write(self) -> None:
        """Write the entries gathered so far."""
        if self.entries:
            self.queue.extend(b"".join(self.entries), self.last_end)
            self.entries.clear()


class QueueRebuild:
    """Queues during one scan of the log, from ``start`` on."""

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
        """``held`` says how many entries below the start a queue has; it may raise.

        ``before`` keeps what the first scan of a start finds at the ends of queues, for a second.
        """
        self._queues = queues
        self._start = start
        self._log_start = log_start
        self._held = held
        self._levels = delay_levels_ms
        self._batch_queues = batch_queues
        self._before = before
        self._scans: dict[tuple[bytes, int], QueueScan] = {}
        self._gathered = 0  # entries
        self._tags_codes = TagsCodes()
        self.transactions = TransactionRanges(start)
        self._notes = True  # their places are kept
        self.gaps: list[Gap] = []
        self.given_up: list[tuple[Damage, int]] = []  # records of no queue, and when stored, in ms
        self.left_out = 0  # records without a place

    # The scan -------------------------------------------------------------------------------

    def dispatch(self, chunk_offset: int, chunk: bytes, found: list[Found]) -> None:
        """Gather the queue entries of records in a chunk.

        Raises:
            IncompleteError: The scan has to begin with the first record of the log.
        """
        self._dispatch(chunk_offset, chunk, found)
        position, size, *_ = found[-1]
        self._notes = self._notes and self.transactions.reach(chunk_offset + position + size)
        self._gathered += len(found)
        if self._gathered > _ENTRIES_HELD:
            self._gathered = 0
            for scan in self._scans.values():
                scan.write()

    def _dispatch(self, chunk_offset: int, chunk: bytes, found: list[Found]) -> None:
        scans, pack, tags_code_at = self._scans, LAYOUT.pack, self._tags_codes.code_at
        note = self.transactions.add if self._notes else _note_nothing
        for record in found:
            (
                position, size, sys_flag, queue_id, queue_offset, topic_at, topic_end,
                properties_at,
            ) = record  # fmt: skip
            physical_offset = chunk_offset + position
            topic = chunk[topic_at:topic_end]
            scan = scans.get((topic, queue_id))
            if sys_flag & TRANSACTION_MASK:
                note(physical_offset, size)
                if sys_flag & NO_QUEUE_ENTRY and not queue_offset and is_text(topic):
                    continue
            elif scan is not None and scan.is_about_transactions:
                note(physical_offset, size)
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
            scan = self._meet((topic, queue_id), queue_offset)
            if scan is None:
                self._give_up(chunk_offset, chunk, found)
                return
            if scan.is_about_transactions and self._notes and not sys_flag & TRANSACTION_MASK:
                self.transactions.add(chunk_offset + position, size)
        count = 1
        if sys_flag & INNER_BATCH and (scan.queue.topic, queue_id) in self._batch_queues:
            count = inner_batch_size(chunk[properties_at : position + size], queue_offset)
        code = entry_code(
            chunk[position : position + size],
            properties_at - position,
            topic=topic,
            sys_flag=sys_flag,
            delay_levels_ms=self._levels,
        )
        self._place(scan, QueuedRecord(queue_offset, chunk_offset + position, size, code, count))

    def _give_up(self, chunk_offset: int, chunk: bytes, found: Found) -> None:
        """Take a record that no reader could do anything with for a damaged stretch."""
        position, size, sys_flag, *_ = found
        self.left_out += 1
        if len(self.given_up) < _GIVEN_UP_MAX:
            damage = Damage(chunk_offset + position, size, "no queue can have such a name")
            self.given_up.append((damage, store_timestamp(chunk, position, sys_flag)))

    def _meet(self, key: tuple[bytes, int], queue_offset: int) -> QueueScan | None:
        """Ready a queue for its first record of the scan; None if there can be no such queue."""
        try:
            queue = self._queues[key[0].decode(), key[1]]
        except ValueError:
            return None
        held = self._held(queue)
        if queue_offset > held and self._start > self._log_start:
            raise IncompleteError(
                f"{queue.topic}:{queue.queue_id} lacks entries {held} to {queue_offset - 1}"
            )
        # When the scan sees the whole log, a queue that holds more than its first record says
        # holds nonsense.
        rebuilding = self._start == self._log_start
        scan = self._cut(queue, min(held, max(queue_offset, 0)) if rebuilding else held)
        self._scans[key] = scan
        return scan

    def _cut(self, queue: ConsumeQueue, end: int) -> QueueScan:
        """Take all entries from a queue that the scan has to prove."""
        if queue not in self._before:
            first = max(end, queue.next_offset - _LAST_ENTRIES_MAX, queue.first_offset)
            count = max(queue.next_offset - first, 0)
            content = queue.entries(first, count) if count else b""
            self._before[queue] = LastEntries(first, tuple(unpack_entries(content)))
        queue.cut(end)
        return QueueScan(queue, self._before[queue])

    def _place(self, scan: QueueScan, record: QueuedRecord) -> None:
        """Give a record its place, or wait for the next one to tell whether it has it."""
        ahead = scan.ahead
        if ahead is not None and record.queue_offset > scan.next_offset:
            scan.ahead = None
            if scan.ahead_at == scan.next_offset and record.queue_offset > ahead.queue_offset:
                self._skip_to(scan, ahead)
            else:
                self.left_out += 1  # it said that it was further ahead than it was
        if record.queue_offset == scan.next_offset:
            scan.add(record)
        elif record.queue_offset > scan.next_offset and (
            record.messages > 1 or scan.has_room_before(record)
        ):
            scan.ahead, scan.ahead_at = record, scan.next_offset
        else:
            self.left_out += 1

    def _skip_to(self, scan: QueueScan, record: QueuedRecord) -> None:
        """Go on with a record further ahead, and leave room for what lacks before it."""
        missing = range(scan.next_offset, record.queue_offset)
        # What retention has deleted is no loss.
        is_loss = self._log_start == 0 or scan.last_end > self._log_start
        if is_loss and len(missing) <= _BLANKS_MAX:
            before = record.physical_offset
            self.gaps += [Gap(scan.queue, one, scan.last_end, before) for one in missing]
        scan.skip_to(record.queue_offset)
        scan.add(record)

    # The end --------------------------------------------------------------------------------

    def finish(self) -> list[QueueScan]:
        """Write what is left, and take from all queues what no record proves; return all queues."""
        for scan in self._scans.values():
            if scan.ahead is not None and scan.ahead_at == scan.next_offset:
                self._skip_to(scan, scan.ahead)  # nothing says that it is not so
            elif scan.ahead is not None:
                self.left_out += 1
        met = {scan.queue for scan in self._scans.values()}
        unmet = [queue for queue in self._queues.values() if queue not in met]
        scans = [*self._scans.values(), *(self._cut(queue, self._held(queue)) for queue in unmet)]
        for scan in scans:
            scan.write()
        return scans


def _note_nothing(_physical_offset: int, _size: int) -> None:
    """Do so; there are too many places already."""
