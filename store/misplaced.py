"""Records that one damaged bit has put into another queue or to another queue offset.

Such a record takes a place that is another's. When the other comes it is left out, and the place
of the first stays empty: without more, one bit would cost two messages. So for all that a scan
has left out it is decided here whether the holder of their place is the one that lies:

* The entry that the place had before the scan names one of the two (``old_entries``).
* Where no such entry is left, the holder lies if the other could be in its place, and a place
  lacks a record, just there in the log, whose topic, queue id or queue offset differs from the
  holder's in one bit; a place between others says more than the end of a queue. The other may fit
  as well: then nothing tells who lies, and the two may change places, but both are kept.

Who lies is left out instead, and ``take`` gives it to the place where it belongs (``repair.py``).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from .commit_log import NO_QUEUE_ENTRY
from .consume_queue import ConsumeQueue
from .format.queue_entry import PRE_BLANK
from .odd import Gap, Odd
from .queue_rebuild import QueueScan

# More than that is not what flipped bits do, and would only take time.
_CONTESTS_MAX: Final = 1_000  # records left out whose places are looked at
_GAPS_MAX: Final = 100_000  # places that lack a record
_LOOKS_MAX: Final = 10_000  # records that old entries name for places that lack theirs

_QUEUE_ID_BITS: Final = 32
_QUEUE_OFFSET_BITS: Final = 64

Place = tuple[ConsumeQueue, int]  # with the queue offset


class Misplaced:
    """The records that a scan has left out, each with the places that are one bit away at most."""

    def __init__(self, odd: Iterable[Odd], scans: Sequence[QueueScan]) -> None:
        self.records: list[Odd] = []
        self._liars: set[int] = set()  # physical offsets of those that held another one's place
        self._scans = {(scan.queue.topic.encode(), scan.queue.queue_id): scan for scan in scans}
        # Beyond twice the longest queue nothing can lack a record.
        self._offset_max = 2 + 2 * max(
            (max(scan.queue.next_offset, scan.old.end) for scan in scans), default=0
        )
        self._near: dict[Place, list[Odd]] = {}
        for record in odd:
            self._add(record)

    def settle(
        self,
        gaps: list[Gap],
        *,
        record_at: Callable[[int], Odd | None],
        believe_ends: bool,
    ) -> None:
        """Exchange the holders of contested places for whom they belong to.

        ``record_at`` returns the whole record at a physical offset. With ``believe_ends`` also
        what an old entry names behind the end of its queue is believed, although nothing else
        says that the queue lacks it. ``gaps`` may grow.
        """
        if len(gaps) <= _GAPS_MAX:
            wanted = {(gap.queue, gap.queue_offset): gap for gap in gaps}
            for record in self.records[:_CONTESTS_MAX]:
                self._settle(record, wanted, record_at)
        lacking: Iterable[Place] = ((gap.queue, gap.queue_offset) for gap in gaps)
        if believe_ends:
            behind = (
                (scan.queue, queue_offset)
                for scan in self._scans.values()
                for queue_offset in range(scan.queue.next_offset, scan.old.end)
            )
            lacking = chain(lacking, behind)
        gaps += self._evict_named(lacking, record_at)

    def take(self, gap: Gap) -> Odd | None:
        """Take out the record that belongs into a gap but for one bit at most; else None.

        Among several the queue's old entry decides; else it is one that is known to lie.
        """
        place = gap.queue, gap.queue_offset
        found = [record for record in self._near.get(place, ()) if _is_within(record, gap)]
        for record in found:
            if self._is_named(record, place):
                return self.remove(record)
        for record in sorted(found, key=lambda one: one.physical_offset not in self._liars):
            if not any(self._is_named(record, other) for other in self._neighbours(record)):
                return self.remove(record)
        return None

    def remove(self, record: Odd) -> Odd:
        """Do not have a record any more; return it."""
        self.records.remove(record)
        for place in self._neighbours(record):
            self._near[place].remove(record)
        return record

    # Deciding -------------------------------------------------------------------------------

    def _settle(
        self, record: Odd, wanted: dict[Place, Gap], record_at: Callable[[int], Odd | None]
    ) -> None:
        """Give a record left out its place if the one that holds it lies."""
        scan = self._scans.get((record.topic, record.queue_id))
        if scan is None or record.sys_flag & NO_QUEUE_ENTRY or record.messages > 1:
            return
        queue, queue_offset = scan.queue, record.queue_offset
        if not queue.first_offset <= queue_offset < queue.next_offset:
            return
        entry = queue.entry(queue_offset)
        if entry.size == PRE_BLANK.size or entry.physical_offset == record.physical_offset:
            return
        holder = record_at(entry.physical_offset)
        if holder is None or not _claims(holder, record):
            return
        if scan.old.names(queue_offset, record.physical_offset):
            lies = True
        elif scan.old.names(queue_offset, holder.physical_offset):
            lies = False
        else:
            fit = self._fit(holder, wanted)
            lies = fit > 0 and fit >= self._fit(record, wanted) and _is_in_order(queue, record)
        if lies:
            self.remove(record)
            self._accuse(holder)
            queue.replace(queue_offset, record.entry)
            if queue_offset == queue.next_offset - 1:
                queue.last_end = record.end

    def _fit(self, record: Odd, wanted: dict[Place, Gap]) -> int:
        """Tell how well a record would stand elsewhere if a bit of it were another.

        2: a place between others lacks it; 1: a queue could end with it; 0: neither.
        """
        found = 0
        for queue, queue_offset in self._neighbours(record):
            gap = wanted.get((queue, queue_offset))
            if gap is not None and _is_within(record, gap):
                return 2
            if queue_offset == queue.next_offset and queue.last_end <= record.physical_offset:
                found = 1
        return found

    def _evict_named(
        self, lacking: Iterable[Place], record_at: Callable[[int], Odd | None]
    ) -> list[Gap]:
        """Leave out those that old entries name for places that lack theirs; return new gaps."""
        gaps: list[Gap] = []
        known = {record.physical_offset for record in self.records}
        looks = 0
        for queue, queue_offset in lacking:
            old = self._scan_of(queue).old.at(queue_offset)
            if old is None or not old.is_valid or old.physical_offset in known:
                continue
            looks += 1
            if looks > _LOOKS_MAX:
                break
            record = record_at(old.physical_offset)
            if record is None or record.size != old.size:
                continue
            if (queue, queue_offset) in self._neighbours(record):
                self._evict(record, gaps)
        return gaps

    def _evict(self, record: Odd, gaps: list[Gap]) -> None:
        """Take a record out of the place that it claims, if no old entry says that it was there."""
        scan = self._scans.get((record.topic, record.queue_id))
        if scan is None or scan.old.names(record.queue_offset, record.physical_offset):
            return
        queue, queue_offset = scan.queue, record.queue_offset
        if not queue.first_offset <= queue_offset < queue.next_offset:
            return
        if queue.entry(queue_offset) != record.entry:
            return
        if queue_offset == queue.next_offset - 1:
            queue.cut(queue_offset)
        else:
            queue.replace(queue_offset, PRE_BLANK)
            gaps.append(Gap(queue, queue_offset, record.physical_offset, record.end))
        self._accuse(record)

    # The records ----------------------------------------------------------------------------

    def _scan_of(self, queue: ConsumeQueue) -> QueueScan:
        return self._scans[queue.topic.encode(), queue.queue_id]

    def _is_named(self, record: Odd, place: Place) -> bool:
        queue, queue_offset = place
        return self._scan_of(queue).old.names(queue_offset, record.physical_offset)

    def _accuse(self, record: Odd) -> None:
        self._liars.add(record.physical_offset)
        self._add(record)

    def _add(self, record: Odd) -> None:
        self.records.append(record)
        for place in self._neighbours(record):
            self._near.setdefault(place, []).append(record)

    def _neighbours(self, record: Odd) -> Iterator[Place]:
        """Give a record's place in a known queue, and those that differ from it in one bit."""
        topic, queue_id, queue_offset = record.topic, record.queue_id, record.queue_offset
        scans = self._scans
        own = scans.get((topic, queue_id))
        if record.sys_flag & NO_QUEUE_ENTRY:
            if own is not None:
                yield own.queue, queue_offset
            return
        if own is not None:
            yield own.queue, queue_offset
            for other_offset in _one_bit_off(queue_offset, _QUEUE_OFFSET_BITS):
                if 0 <= other_offset < self._offset_max:
                    yield own.queue, other_offset
        keys = [(topic, other_id) for other_id in _one_bit_off(queue_id, _QUEUE_ID_BITS)]
        keys += [(other_topic, queue_id) for other_topic in _one_bit_off_topics(topic)]
        for key in keys:
            scan = scans.get(key)
            if scan is not None:
                yield scan.queue, queue_offset


def _one_bit_off(number: int, bits: int) -> Iterator[int]:
    """Give the signed numbers that differ from one in a bit."""
    sign = 1 << bits - 1
    for bit in range(bits):
        other = (number ^ 1 << bit) & (1 << bits) - 1
        yield (other ^ sign) - sign


def _one_bit_off_topics(topic: bytes) -> Iterator[bytes]:
    for place, byte in enumerate(topic):
        for bit in range(8):
            yield topic[:place] + bytes([byte ^ 1 << bit]) + topic[place + 1 :]


def _is_in_order(queue: ConsumeQueue, record: Odd) -> bool:
    """Tell whether a record lies between those that have the places beside its own."""
    own = record.queue_offset
    beside = [
        (queue_offset, queue.entry(queue_offset))
        for queue_offset in (own - 1, own + 1)
        if queue.first_offset <= queue_offset < queue.next_offset
    ]
    return all(
        entry.size == PRE_BLANK.size
        or (entry.physical_offset < record.physical_offset) == (queue_offset < own)
        for queue_offset, entry in beside
    )


def _is_within(record: Odd, gap: Gap) -> bool:
    return gap.after <= record.physical_offset < gap.before


def _claims(record: Odd, other: Odd) -> bool:
    """Tell whether a record claims the place of another."""
    return (
        not record.sys_flag & NO_QUEUE_ENTRY
        and record.topic == other.topic
        and record.queue_id == other.queue_id
        and record.queue_offset == other.queue_offset
    )
