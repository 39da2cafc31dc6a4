"""Queue entries from the records of the log, as a scan comes by them.

A queue goes on with the queue offset behind its last one. A record that says something else is not
simply believed, because nothing protects that field, nor topic and queue id: one flipped bit in
them must not hide the messages behind. So

* a record that is too early in its queue is left out: the first of a queue offset keeps it;
* one that jumps ahead is held until the queue's next record tells: if that follows it, records
  between them are lost; if that follows where the queue stood, the one held says it wrongly.

Lost places get an entry that is none (``PRE_BLANK``) until the scan is over. Then each is filled:
by a record left out that differs from what belongs there in one bit (``misplaced.py``), which is
flipped back; else by a filler in the damaged stretch where the lost one must have been
(``repair.py``). A place that finds neither stays blank, and consumers skip it. A queue's end is
made good in the same way, from what is legible in damaged stretches and from the entries that the
queue had: no queue offset that a consumer may have seen is used again.

A batch of RocketMQ's batch queues takes as many queue offsets as it has messages. All of them lead
to its one record here: the last has the entry, the ones before are skipped.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from .commit_log import NO_QUEUE_ENTRY
from .consume_queue import ConsumeQueue, QueueTable
from .dispatch import inner_batch_size
from .format.filler import FILLER_BIT
from .format.flags import INNER_BATCH, TRANSACTION_MASK
from .format.properties import TagsCodes
from .format.queue_entry import LAYOUT, PRE_BLANK, QueueEntry
from .format.record import RECORD_SIZE_MIN
from .format.topics import SCHEDULE_TOPIC, is_text
from .log_scan import Found
from .odd import NO_END, Gap, Odd, is_one_bit_off, odd_from
from .old_entries import OldEntries, OldQueues
from .transaction_places import TRANSACTION_TOPICS, TransactionPlaces

logger = logging.getLogger(__name__)

_ENTRIES_HELD: Final = 1 << 16  # queue entries gathered before they are written: about 6 MB
_ODD_MAX: Final = 10_000  # records left out that are remembered
_BLANKS_MAX: Final = 16 << 20  # places that may lack in a row: twenty bytes each
_UNCONFIRMED_MAX: Final = 100_000  # of these, when no other record of the queue follows
_LONE_MAX: Final = 100  # such records that are compared with the ends of all queues
_UNUSUAL: Final = NO_QUEUE_ENTRY | INNER_BATCH | FILLER_BIT
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()


class IncompleteError(Exception):
    """Queues lack entries, or hold wrong ones, below the point where the scan began."""


class QueueScan:
    """Entries of one queue as the scan finds them, held back to be written in one go."""

    __slots__ = (
        "entries", "held", "held_at", "is_about_transactions", "is_schedule", "last_end",
        "next_offset", "old", "queue",
    )  # fmt: skip

    def __init__(self, queue: ConsumeQueue, old: OldEntries) -> None:
        self.queue = queue
        self.next_offset = queue.next_offset
        self.entries: list[bytes] = []
        self.last_end = queue.last_end
        self.is_schedule = queue.topic == SCHEDULE_TOPIC
        self.is_about_transactions = queue.topic in TRANSACTION_TOPICS
        self.held: Odd | None = None  # a record that jumps ahead, until the next one tells
        self.held_at = 0  # the queue's next offset when it came
        self.old = old  # the last entries it had before the scan

    @property
    def is_new(self) -> bool:
        """Whether nothing is known of the queue's place."""
        return self.next_offset == self.queue.first_offset and not self.entries

    def hold(self, record: Odd) -> None:
        """Wait for the queue's next record to tell whether this one is right."""
        self.held, self.held_at = record, self.next_offset

    def add(self, record: Odd) -> None:
        """Take the next record."""
        if record.messages > 1:
            # All but the last are skipped; consumers that ask for one of them get the batch.
            skipped = QueueEntry(record.physical_offset, PRE_BLANK.size, 1).pack()
            self.entries += [skipped] * (record.messages - 1)
        self.entries.append(LAYOUT.pack(record.physical_offset, record.size, record.tags_code))
        self.last_end = record.end
        self.next_offset = record.queue_offset + record.messages

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
        old: OldQueues,
    ) -> None:
        """``held`` says how many entries below the start a queue has; it may raise."""
        self._queues = queues
        self._start = start
        self._log_start = log_start
        self._held = held
        self._levels = delay_levels_ms
        self._batch_queues = batch_queues
        self._old = old
        self._scans: dict[tuple[bytes, int], QueueScan] = {}
        self._gathered = 0  # entries, about
        self._tags_codes = TagsCodes()
        self._nameless: set[tuple[bytes, int]] = set()  # no directory can have such a name
        self.transactions = TransactionPlaces(start)
        self._notes = True  # their places are kept
        self.gaps: list[Gap] = []
        self.odd: list[Odd] = []  # records left out
        self.odd_count = 0

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
        note = self.transactions.note if self._notes else _note_nothing
        for record in found:
            position, size, sys_flag, queue_id, queue_offset, topic_at, properties_at = record
            physical_offset = chunk_offset + position
            topic = chunk[topic_at : properties_at - 2]
            if sys_flag & TRANSACTION_MASK:
                note(physical_offset, size)
                if sys_flag & NO_QUEUE_ENTRY and not queue_offset and is_text(topic):
                    continue
            scan = scans.get((topic, queue_id))
            if (
                scan is None
                or queue_offset != scan.next_offset
                or sys_flag & _UNUSUAL
                or scan.is_schedule
            ):
                if not sys_flag & TRANSACTION_MASK and topic != _SCHEDULE_TOPIC:
                    note(physical_offset, size)  # one bit of it may be turned back
                self._dispatch_unusual(scan, chunk_offset, chunk, record)
                continue
            if scan.is_about_transactions and not sys_flag & TRANSACTION_MASK:
                note(physical_offset, size)
            code = tags_code_at(chunk, properties_at, position + size)
            scan.entries.append(pack(physical_offset, size, code))
            scan.last_end = physical_offset + size
            scan.next_offset = queue_offset + 1

    def _dispatch_unusual(
        self, scan: QueueScan | None, chunk_offset: int, chunk: bytes, found: Found
    ) -> None:
        position, size, sys_flag, queue_id, queue_offset, topic_at, properties_at = found
        topic = chunk[topic_at : properties_at - 2]
        count = 1
        if sys_flag & INNER_BATCH and self._is_batch_queue(topic, queue_id):
            count = inner_batch_size(chunk[properties_at : position + size], queue_offset)
        record = odd_from(
            chunk, chunk_offset, found, delay_levels_ms=self._levels, batch_size=count
        )
        if sys_flag & NO_QUEUE_ENTRY:
            self._leave_out(record)  # such records have no queue offset
            return
        if scan is None:
            scan = self._meet((topic, queue_id), queue_offset)
        if scan is None:
            self._leave_out(record)
        elif queue_offset == scan.next_offset or self._believe(scan, record):
            scan.add(record)

    def _is_batch_queue(self, topic: bytes, queue_id: int) -> bool:
        return is_text(topic) and (topic.decode(), queue_id) in self._batch_queues

    def _meet(self, key: tuple[bytes, int], queue_offset: int) -> QueueScan | None:
        """Ready a queue for its first record of the scan; None if there can be no such queue."""
        if key in self._nameless:
            return None
        try:
            queue = self._queues[key[0].decode(), key[1]]
        except ValueError:
            self._nameless.add(key)
            logger.error("event=record_of_no_queue topic=%r queue_id=%d", *key)  # noqa: TRY400
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
        old = self._old.keep(queue, end)
        queue.cut(end)
        return QueueScan(queue, old)

    def _believe(self, scan: QueueScan, record: Odd) -> bool:
        """Tell whether a record that is not its queue's next one may be written now."""
        queue_offset = record.queue_offset
        if queue_offset < scan.next_offset:
            self._leave_out(record)
            return False
        held, scan.held = scan.held, None
        if held is None:
            pass
        elif scan.held_at != scan.next_offset:
            self._leave_out(held)  # the queue went on without it
        elif queue_offset == held.queue_offset == scan.next_offset + 1:
            self._leave_out(held)  # the place before is its own
            self._skip(scan, queue_offset, record.physical_offset)
        elif queue_offset == held.queue_offset:
            scan.held = held
            self._leave_out(record)
            return False
        elif queue_offset > held.queue_offset and queue_offset != scan.next_offset + 1:
            self._jump(scan, held)
        else:
            self._leave_out(held)
            if queue_offset == scan.next_offset + 1:
                self._skip(scan, queue_offset, record.physical_offset)  # it was the one before
        if queue_offset == scan.next_offset:
            return True
        scan.hold(record)
        return False

    def _jump(self, scan: QueueScan, record: Odd) -> None:
        """Go on with a record further ahead in its queue."""
        self._skip(scan, record.queue_offset, record.physical_offset)
        scan.add(record)

    def _skip(self, scan: QueueScan, queue_offset: int, before: int) -> None:
        """Leave room for the records that a queue lacks up to a queue offset."""
        missing = range(scan.next_offset, queue_offset)
        # What retention has deleted is no loss.
        is_loss = self._log_start == 0 or scan.last_end > self._log_start
        if is_loss and len(missing) <= _BLANKS_MAX:
            self.gaps += [Gap(scan.queue, one, scan.last_end, before) for one in missing]
        scan.skip_to(queue_offset)

    def _leave_out(self, record: Odd) -> None:
        self.odd_count += 1
        if len(self.odd) < _ODD_MAX:
            self.odd.append(record)

    # The end --------------------------------------------------------------------------------

    def finish(self, damaged: Sequence[tuple[int, int]]) -> list[QueueScan]:
        """Write what is left, and take from all queues what no record proves; return all queues.

        ``damaged`` are the stretches of the log, start and end, that records may be lost in.
        """
        lone: list[tuple[QueueScan, Odd]] = []
        for scan in self._scans.values():
            held = scan.held
            if held is not None and (scan.held_at != scan.next_offset):
                self._leave_out(held)
            elif held is not None:
                lone.append((scan, held))
        met = {scan.queue for scan in self._scans.values()}
        unmet = [queue for queue in self._queues.values() if queue not in met]
        scans = [*self._scans.values(), *(self._cut(queue, self._held(queue)) for queue in unmet)]
        expected = {
            entry.physical_offset: scan
            for scan in scans
            if (entry := scan.old.at(scan.next_offset)) is not None
        }
        others = [*self.odd, *(held for _, held in lone)]
        missed = {scan.queue for scan, held in lone if _lacks_one_of(scan, held, others)}
        # What those lack that come first tells of the others.
        lone.sort(key=lambda one: (one[0].queue not in missed, one[0].is_new))
        near = scans if len(lone) <= _LONE_MAX else []
        for scan, held in lone:
            in_place = expected.get(held.physical_offset, scan) is scan
            if in_place and self._is_right(scan, held, others, damaged, near):
                self._jump(scan, held)
            else:
                self._leave_out(held)
        for scan in scans:
            scan.write()
        return scans

    def _is_right(
        self,
        scan: QueueScan,
        held: Odd,
        others: Iterable[Odd],
        damaged: Iterable[tuple[int, int]],
        near: Iterable[QueueScan],
    ) -> bool:
        """Decide about a record that jumps ahead and that no other of its queue follows."""
        queue_offset = held.queue_offset
        old_offset = scan.old.place_of(held.physical_offset)
        if old_offset is not None:
            return old_offset == queue_offset
        behind = scan.last_end
        if any(behind <= start and end <= held.physical_offset for start, end in damaged):
            return True
        if _lacks_one_of(scan, held, others):
            return True
        if any(is_one_bit_off(held, gap) for gap in self.gaps):
            return False
        if scan.is_new and self._log_start > 0:
            return _had_room(held)
        if not scan.is_new and (queue_offset ^ scan.next_offset).bit_count() == 1:
            return False
        ends = (Gap(one.queue, one.next_offset, one.last_end, NO_END) for one in near)
        if any(is_one_bit_off(held, end) for end in ends):
            return False
        return queue_offset - scan.next_offset <= _UNCONFIRMED_MAX


def _note_nothing(_physical_offset: int, _size: int) -> None:
    """Do so; there are too many places already."""


def _had_room(held: Odd) -> bool:
    """Decide about a queue's only record, where what was before it may have been deleted.

    It can have any place for which there was room in the log. That it fits the end of another queue
    says nothing: queues that producers take in turn are equally long. Should it lie, it is the one
    message that its bit costs; to leave out one that does not would cost another.
    """
    room = held.physical_offset // RECORD_SIZE_MIN
    return held.messages > 1 or 0 <= held.queue_offset <= room


def _lacks_one_of(scan: QueueScan, held: Odd, others: Iterable[Odd]) -> bool:
    """Tell whether another record could be the one that a queue lacks before a held one."""
    lacking = Gap(scan.queue, scan.next_offset, scan.last_end, held.physical_offset)
    return any(is_one_bit_off(other, lacking) for other in others)
