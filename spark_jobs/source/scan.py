"""Read splits of a log as events of transactions, and notes on everything else; no Spark in here.

So an audit reads a log once.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from halfmq.store.format.flags import INNER_BATCH, NO_QUEUE_ENTRY
from halfmq.store.format.properties import PROPERTY_INNER_NUM
from halfmq.store.format.topics import HALF_TOPIC

from ..log.arrays import Bools, Ints, whole_numbers
from ..log.checksums import sound_records
from ..log.rows import Rows, store_times
from ..log.segment_reader import SegmentReader, SkippedRange
from ..log.transaction_parts import Part, all_parts
from .columns import ARROW_TYPES, tags_codes
from .events import EVENT, HAS_KEY, BatchEvents, Halves, Records, read_events
from .options import LogOptions
from .splits import SegmentSplit

BLOCK: Final = 4096  # queue offsets that are compared at once; a power of 2
# Of the sum over queue entries. Its terms stay below 2^44, a block's sum below 2^56.
PLACE_FACTOR: Final = 8191  # a prime, so that two entries that changed places change the sum
SIZE_FACTOR: Final = 31
TAGS_FACTOR: Final = 17
MODULUS: Final = (1 << 31) - 1
PAUSE_MIN: Final = 10_000  # ms without a record: the broker may have been down
_PAUSES_MAX: Final = 100  # of a batch; one with more is a pause as a whole
CLOCK_STEP_MIN: Final = 1_000  # ms; clocks are corrected by less all the time


class Note(NamedTuple):
    """A fact about the log other than transactions; each kind uses some of the fields."""

    what: str  # a constant below
    topic: str | None = None
    text: str | None = None
    partition: int = 0
    offset: int = 0
    endOffset: int = 0  # noqa: N815  the names are those of columns
    physicalOffset: int = 0  # noqa: N815
    lastPhysicalOffset: int = 0  # noqa: N815
    records: int = 0
    sum: int = 0
    time: int = 0
    lastTime: int = 0  # noqa: N815


QUEUE: Final = "queue"  # records of a queue with the offsets [offset, endOffset): see queue_ranges
RECORDS: Final = "records"  # in a row, in which the clock was not set back; ``sum`` are their bytes
HOLE: Final = "hole"  # [physicalOffset, lastPhysicalOffset) holds no record; ``text`` says what
UNSOUND: Final = "unsound"  # a record that does not match its CRC
INVISIBLE: Final = "invisible"  # a message with bits that keep it out of its queue
UNREAD_OP: Final = "unread op"  # an op record with something that is no queue offset
MARK: Final = "mark"  # which broker wrote: ``records`` is 1 for halfmq, ``sum`` for a final
PAUSE: Final = "pause"  # from ``time`` to ``lastTime`` nothing was written
DELAYS: Final = "delays"  # so many events are about plain delays
KEYLESS: Final = "keyless"  # so many events name a half in another split

_TYPES: Final = {
    **dict.fromkeys(Note._fields[:3], "string"),
    "partition": "int",
    **dict.fromkeys(Note._fields[4:], "bigint"),
}
_FIELDS: Final = ",".join(f"{name}:{kind}" for name, kind in _TYPES.items())
NOTES_TYPE: Final = f"array<struct<{_FIELDS}>>"
ARROW_TYPES[NOTES_TYPE] = pa.list_(
    pa.field("element", pa.struct({name: ARROW_TYPES[kind] for name, kind in _TYPES.items()}))
)


class EventChunk(NamedTuple):
    """What a split holds in one place: records, or a range without; the last chunk has neither."""

    events: Records  # those whose half has been read; in the last chunk all others
    rows: Rows | None = None
    sound: Bools | None = None  # which of the rows match their CRC; None: not checked
    found: BatchEvents | None = None  # in the rows
    skipped: SkippedRange | None = None


def read_chunks(split: SegmentSplit, options: LogOptions) -> Iterator[EventChunk]:
    """Read the events of a split, each with its key if its half lies in the split."""
    halves = Halves()
    none = np.zeros(0, dtype=EVENT)
    waiting = [none]
    reader = SegmentReader(split.segment, split.limit, memory_map=options.memory_map)
    for item in reader.scan(split.start, split.stop, end=split.end):
        if not isinstance(item, Rows):
            yield EventChunk(none, skipped=item)
            continue
        sound = sound_records(item) if options.verify_crc else None
        found = _read_events(item, sound, options)
        halves.add(found.events)
        events = halves.link(found.events)
        waiting.append(events[~events[HAS_KEY]])
        yield EventChunk(events[events[HAS_KEY]], item, sound, found)
    yield EventChunk(halves.link(np.concatenate(waiting)))  # some may precede their half


def _read_events(rows: Rows, sound: Bools | None, options: LogOptions) -> BatchEvents:
    parts = all_parts(rows)
    if sound is None:  # op records are checked all the same
        is_op = parts == Part.OP
        sound = np.ones(len(rows), dtype=np.bool_)
        sound[is_op] = sound_records(rows.select(is_op))
    return read_events(rows, parts, sound, options.delay_levels)


def notes_of(chunk: EventChunk, base: int, levels_ms: Sequence[int]) -> Iterator[Note]:
    """Describe what a chunk of the segment at ``base`` holds beside events."""
    if chunk.skipped is not None:
        position, size, reason = chunk.skipped
        if reason is not None:
            start = base + position
            yield Note(HOLE, text=reason, physicalOffset=start, lastPhysicalOffset=start + size)
    elif chunk.rows is not None and chunk.found is not None:
        for at in chunk.found.unread_ops.tolist():
            yield Note(UNREAD_OP, physicalOffset=at)
        for at, is_ours, is_final in chunk.found.marks.tolist():
            yield Note(MARK, physicalOffset=at, records=int(is_ours), sum=int(is_final))
        yield from _clock_ranges(chunk.rows)
        yield from _pauses(_smoothed(store_times(chunk.rows))[1:-1])
        if count := int((chunk.found.events["part"] >= Part.DELAYED).sum()):
            yield Note(DELAYS, records=count)
        if chunk.sound is not None and not chunk.sound.all():
            unsound = chunk.rows.physical_offsets[~chunk.sound].tolist()
            yield from (Note(UNSOUND, physicalOffset=at) for at in unsound)
        for at in _invisible(chunk.rows):
            yield Note(INVISIBLE, physicalOffset=at)
        yield from queue_ranges(chunk.rows.queued(), levels_ms)
    elif keyless := int((~chunk.events[HAS_KEY]).sum()):
        yield Note(KEYLESS, records=keyless)


def _invisible(rows: Rows) -> list[int]:
    """Find messages with the bits of a prepared or rolled-back one, which no queue takes in.

    RocketMQ stores what a client sends with such bits and without TRAN_MSG, and answers OK. In the
    half topic, these are records of decisions.
    """
    is_elsewhere = np.array([name != HALF_TOPIC for name in rows.topic_names], dtype=np.bool_)
    found = (rows.field("sys_flag") & NO_QUEUE_ENTRY != 0) & rows.of_topics(is_elsewhere)
    offsets: list[int] = rows.physical_offsets[found].tolist()
    return offsets


def _clock_ranges(rows: Rows) -> Iterator[Note]:
    """Divide records where the clock was set back.

    One record with a wrong time, which no CRC covers, is no step. The first and the last record are
    ranges of their own: what their neighbours are is known when all notes are there.
    """
    times, at, sizes = _smoothed(store_times(rows)), rows.physical_offsets, rows.sizes
    steps = np.flatnonzero(times[1:] + CLOCK_STEP_MIN <= times[:-1]) + 1
    bounds = np.union1d(steps, [1, len(rows) - 1])
    for own in filter(len, np.split(np.arange(len(rows)), bounds)):
        first, last = own[0], own[-1]
        yield Note(
            RECORDS,
            physicalOffset=int(at[first]),
            lastPhysicalOffset=int(at[last]),
            records=len(own),
            sum=int(sizes[own].sum()),
            time=int(times[first]),
            lastTime=int(times[last]),
        )


def _pauses(times: Ints) -> Iterator[Note]:
    places = np.flatnonzero(times[1:] - times[:-1] >= PAUSE_MIN)
    if len(places) > _PAUSES_MAX:
        yield Note(PAUSE, time=int(times.min()), lastTime=int(times.max()))
        return
    for place in places.tolist():
        yield Note(PAUSE, time=int(times[place]), lastTime=int(times[place + 1]))


def _smoothed(times: Ints) -> Ints:
    """Replace every time but the first and the last by the median of three."""
    if len(times) < 3:
        return times
    one, two, three = times[:-2], times[1:-1], times[2:]
    middle = np.maximum(np.minimum(one, two), np.minimum(np.maximum(one, two), three))
    return np.concatenate([times[:1], middle, times[-1:]])


def queue_ranges(rows: Rows, levels_ms: Sequence[int]) -> Iterator[Note]:
    """Divide records, each of which has a place in a queue, into ranges of their queues.

    Within a queue, offsets rise by one from record to record. So what a batch of records says about
    a queue is mostly one range; whatever is wrong with the order begins another one. Ranges end at
    multiples of ``BLOCK`` too, and each has a sum over its entries, so that a whole block can be
    compared with the same sum over a consume queue (``audit/queue_findings.py`` has it in SQL).

    Source: RocketMQ ``ConsumeQueue.java``, ``CommitLogDispatcherBuildConsumeQueue``.
    """
    if not len(rows):
        return
    order = np.argsort(rows.queue_numbers(), kind="stable")
    codes, queues = rows.topic_codes[order], rows.field("queue_id")[order]
    slots, at = rows.field("queue_offset")[order], rows.physical_offsets[order]
    ends = slots + _slots_taken(rows)[order]
    begins = np.ones(len(rows), dtype=np.bool_)
    begins[1:] = (codes[1:] != codes[:-1]) | (queues[1:] != queues[:-1])
    begins[1:] |= (slots[1:] != ends[:-1]) | (slots[1:] // BLOCK != slots[:-1] // BLOCK)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(rows)) - 1
    sums = np.add.reduceat(_entry_terms(rows, levels_ms)[order], first)
    columns = (codes[first], queues[first], slots[first], ends[last], at[first], at[last])
    values = (column.tolist() for column in (*columns, last - first + 1, sums))
    for code, *numbers in zip(*values, strict=True):
        yield Note(QUEUE, rows.topic_names[code], None, *numbers)


def _entry_terms(rows: Rows, levels_ms: Sequence[int]) -> Ints:
    """Return what the entry of each record adds to a sum."""
    tags = TAGS_FACTOR * (tags_codes(rows, levels_ms)[0] % MODULUS)
    content = (rows.physical_offsets + SIZE_FACTOR * rows.sizes + tags) % MODULUS
    terms: Ints = (rows.field("queue_offset") % PLACE_FACTOR + 1) * content
    return terms


def _slots_taken(rows: Rows) -> Ints:
    taken = np.ones(len(rows), dtype=np.int64)
    batches = np.flatnonzero(rows.field("sys_flag") & INNER_BATCH)
    counts = whole_numbers(rows.at(batches).property_values(PROPERTY_INNER_NUM))
    taken[batches] = np.maximum(counts.fill_null(1).to_numpy(), 1)
    return taken
