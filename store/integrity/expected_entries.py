"""The queue entries that the records of a log range should have.

A start writes them (``recovery/queue_rebuild.py``), and ``halfmq store verify`` compares them with
the files (``tools/queue_check.py``).

The records of a queue have consecutive queue offsets. A record with another offset is not trusted
at once, because no checksum covers that field: one flipped bit in it must not hide the messages
that follow. So

* a record whose queue offset is taken already is left out: the first record keeps it;
* a record with a higher offset is held until the next record of the queue. If that has a higher
  offset too, the records in between are lost; otherwise the held record is wrong and left out.

A batch of RocketMQ's batch queues takes as many queue offsets as it has messages. All of them refer
to its one record here: the last one has the entry, the others are skipped.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from attrs import define, field

from ..files import disk
from ..format.filler import FILLER_BIT
from ..format.flags import INNER_BATCH, NO_QUEUE_ENTRY, TRANSACTION_MASK
from ..format.properties import TagsCodeCache
from ..format.queue_entry import LAYOUT, PRE_BLANK, QueueEntry
from ..format.record import RECORD_SIZE_MIN, Record, store_timestamp
from ..format.topics import DELAYED_TOPICS, is_text
from ..log.log_scan import Found
from ..log.queue_dispatch import entry_code, inner_batch_size
from ..log.resync import Damage
from ..log.transaction_ranges import TRANSACTION_TOPICS, TransactionRanges
from ..queue.consume_queue import BLANKS_MAX

_ENTRIES_HELD: Final = 1 << 16  # queue entries collected before they are written: about 6 MB
_GIVEN_UP_MAX: Final = 10_000  # records of no queue that are reported one by one
_UNUSUAL: Final = NO_QUEUE_ENTRY | INNER_BATCH | FILLER_BIT


class EntryTarget(Protocol):
    """A queue that takes the entries of its records, in order."""

    @property
    def topic(self) -> str: ...
    @property
    def queue_id(self) -> int: ...

    next_offset: int  # queue offset of the next entry
    last_end: int  # physical offset after the newest record

    def extend(self, entries: bytes, physical_end: int) -> None:
        """Take the next entries; the record of the last one ends at ``physical_end``."""

    def skip_to(self, queue_offset: int) -> None:
        """Continue at a higher offset; the records in between are missing in the log."""


Q = TypeVar("Q", bound=EntryTarget)


class MissingEntries(NamedTuple, Generic[Q]):
    """Consecutive queue offsets without a record."""

    queue: Q
    queue_offsets: range
    after: int  # physical offset of the end of the previous record
    before: int  # physical offset of the next record


class QueuedRecord(NamedTuple):
    """A record with its position in a queue."""

    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int
    messages: int  # queue offsets that the record takes


class QueueScan(Generic[Q]):
    """Entries of one queue, collected and passed on in one step."""

    __slots__ = (
        "ahead", "ahead_at", "entries", "is_about_transactions", "is_delayed", "last_end",
        "next_offset", "queue",
    )  # fmt: skip

    def __init__(self, queue: Q) -> None:
        self.queue = queue
        self.next_offset = queue.next_offset
        self.entries: list[bytes] = []
        self.last_end = queue.last_end
        self.is_delayed = queue.topic in DELAYED_TOPICS
        self.is_about_transactions = queue.topic in TRANSACTION_TOPICS
        self.ahead: QueuedRecord | None = None  # a record held until the next one
        self.ahead_at = 0  # the queue's next offset when it was held

    def add(self, record: QueuedRecord) -> None:
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
        self.queue.skip_to(queue_offset)
        self.next_offset = queue_offset

    def write(self) -> None:
        """Pass the collected entries on."""
        if self.entries:
            self.queue.extend(b"".join(self.entries), self.last_end)
            self.entries.clear()


@define(eq=False, repr=False, slots=False, kw_only=True)
class ExpectedEntries(Generic[Q]):
    """The entries of all records in one scan of the log, passed on to their queues."""

    # Returns a queue by topic, queue id and the offset of its first record; raises ValueError if no
    # queue can have such a name.
    _begin: Callable[[str, int, int], Q] = field(kw_only=False)
    _log_start: int
    _delay_levels_ms: Sequence[int]
    _batch_queues: frozenset[tuple[str, int]] = frozenset()
    _deleted_topics: Mapping[str, int]  # their records have no entries below these offsets
    _ranges: TransactionRanges | None = field(alias="transactions", default=None)
    # Gets the physical offset of a record that has no entry, and the reason.
    _on_left_out: Callable[[int, str], None] = lambda _physical_offset, _reason: None

    def __attrs_post_init__(self) -> None:
        self._deleted = {topic.encode(): end for topic, end in self._deleted_topics.items()}
        self._scans: dict[tuple[bytes, int], QueueScan[Q]] = {}
        self._collected = 0  # entries
        self._tags_codes = TagsCodeCache()
        self._transactions = self._ranges or TransactionRanges()
        self._collects = self._ranges is not None  # and has room for more of these ranges
        self.missing: list[MissingEntries[Q]] = []
        self.given_up: list[tuple[Damage, int]] = []  # records of no queue, with store time in ms
        self.left_out = 0  # records without an entry

    def take(self, chunk_offset: int, chunk: bytes, found: list[Found]) -> None:
        """Collect the queue entries of the records in a chunk; may raise what ``begin`` does."""
        self._take(chunk_offset, chunk, found)
        position, size, *_ = found[-1]
        self._collects = self._collects and self._transactions.reach(chunk_offset + position + size)
        self._collected += len(found)
        if self._collected > _ENTRIES_HELD:
            self._collected = 0
            for scan in self._scans.values():
                scan.write()

    def _take(self, chunk_offset: int, chunk: bytes, found: list[Found]) -> None:
        scans, pack, tags_code_at = self._scans, LAYOUT.pack, self._tags_codes.code_at
        add = self._transactions.add if self._collects else _add_nothing
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
                or scan.is_delayed
            ):
                self._take_unusual(scan, chunk_offset, chunk, record)
                continue
            code = tags_code_at(chunk, properties_at, position + size)
            scan.entries.append(pack(physical_offset, size, code))
            scan.last_end = physical_offset + size
            scan.next_offset = queue_offset + 1

    def _take_unusual(
        self, scan: QueueScan[Q] | None, chunk_offset: int, chunk: bytes, found: Found
    ) -> None:
        position, size, sys_flag, queue_id, queue_offset, topic_at, topic_end, properties_at = found
        topic = chunk[topic_at:topic_end]
        if sys_flag & NO_QUEUE_ENTRY and is_text(topic):
            self._leave_out(chunk_offset + position, f"queue offset {queue_offset} instead of none")
            return
        if scan is None:  # so each queue is looked up until its first record of a living topic
            if topic in self._deleted and chunk_offset + position < self._deleted[topic]:
                return
            try:
                scan = QueueScan(self._begin(topic.decode(), queue_id, queue_offset))
            except ValueError:
                self._give_up(chunk_offset, chunk, found)
                return
            self._scans[topic, queue_id] = scan
            if scan.is_about_transactions and self._collects and not sys_flag & TRANSACTION_MASK:
                self._transactions.add(chunk_offset + position, size)
        count = 1
        if sys_flag & INNER_BATCH and (scan.queue.topic, queue_id) in self._batch_queues:
            count = inner_batch_size(chunk[properties_at : position + size], queue_offset)
        code = entry_code(chunk, found, self._delay_levels_ms)
        self._place(scan, QueuedRecord(queue_offset, chunk_offset + position, size, code, count))

    def _leave_out(self, physical_offset: int, reason: str) -> None:
        self.left_out += 1
        self._on_left_out(physical_offset, reason)

    def _give_up(self, chunk_offset: int, chunk: bytes, found: Found) -> None:
        """Treat a record that no reader could use as a damaged range."""
        position, size, sys_flag, *_ = found
        self._leave_out(chunk_offset + position, "no queue can have such a name")
        if len(self.given_up) < _GIVEN_UP_MAX:
            damage = Damage(chunk_offset + position, size, "no queue can have such a name")
            self.given_up.append((damage, store_timestamp(chunk, position, sys_flag)))

    def _place(self, scan: QueueScan[Q], record: QueuedRecord) -> None:
        """Add a record to its queue, or hold it until the next record confirms its offset."""
        ahead = scan.ahead
        if ahead is not None and record.queue_offset > scan.next_offset:
            scan.ahead = None
            if scan.ahead_at == scan.next_offset and record.queue_offset > ahead.queue_offset:
                self._skip_to(scan, ahead)
            else:
                self._misplaced(scan, ahead)
        if record.queue_offset == scan.next_offset:
            scan.add(record)
        elif record.queue_offset > scan.next_offset and (
            record.messages > 1 or scan.has_room_before(record)
        ):
            scan.ahead, scan.ahead_at = record, scan.next_offset
        else:
            self._misplaced(scan, record)

    def _misplaced(self, scan: QueueScan[Q], record: QueuedRecord) -> None:
        place = f"{scan.queue.topic}:{scan.queue.queue_id}"
        reason = f"queue offset {record.queue_offset} of {place}, which continues at"
        self._leave_out(record.physical_offset, f"{reason} {scan.next_offset}")

    def _skip_to(self, scan: QueueScan[Q], record: QueuedRecord) -> None:
        """Continue with a record at a higher offset; add missing entries before it."""
        missing = range(scan.next_offset, record.queue_offset)
        # Records that retention has deleted are not lost.
        is_loss = self._log_start == 0 or scan.last_end > self._log_start
        if is_loss and len(missing) <= BLANKS_MAX:
            before = record.physical_offset
            self.missing.append(MissingEntries(scan.queue, missing, scan.last_end, before))
        scan.skip_to(record.queue_offset)
        scan.add(record)

    def finish(self) -> None:
        for scan in self._scans.values():
            if scan.ahead is not None and scan.ahead_at == scan.next_offset:
                self._skip_to(scan, scan.ahead)  # no later record contradicts it
            elif scan.ahead is not None:
                self._misplaced(scan, scan.ahead)
            scan.write()


def _add_nothing(_physical_offset: int, _size: int) -> None:
    """Ignore a transaction record, because too many ranges are collected already."""


def is_sound(
    entry: QueueEntry,
    queue: EntryTarget,
    queue_offset: int,
    *,
    log_start: int,
    record_at: Callable[[int], Record | None],
) -> bool:
    """Return whether an entry of a queue is blank, or refers to the record with its queue offset.

    An entry of a record before ``log_start``, which retention has deleted, needs to be valid only.
    """
    if entry.size == PRE_BLANK.size:
        return True
    if not entry.is_valid or entry.physical_offset < log_start:
        return entry.is_valid
    record = record_at(entry.physical_offset)
    if record is None or (record.topic, record.queue_id) != (queue.topic, queue.queue_id):
        return False
    is_batch = record.sys_flag & INNER_BATCH  # of a batch queue: its last offset has the entry
    count = inner_batch_size(record.properties, record.queue_offset) if is_batch else 1
    at = queue_offset - record.queue_offset
    return at in {0, count - 1} and record.total_size == entry.size


def find_batch_queues(root: Path) -> frozenset[tuple[str, int]]:
    """Return topic and queue id of RocketMQ's batch queues, which have a format of their own."""
    return frozenset(
        (topic.name, int(queue.name))
        for topic in disk.directories(root / "batchconsumequeue")
        for queue in disk.directories(topic)
        if queue.name.isdecimal() and disk.entries(queue)
    )
