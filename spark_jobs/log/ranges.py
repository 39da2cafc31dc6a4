"""Ranges of queue offsets without a gap, and of the log without a step of the clock.

Within a queue, offsets rise by one from record to record. So what a batch of records says about a
queue is mostly one range; whatever is wrong with the order begins another one. Ranges end at
multiples of ``BLOCK`` too, and each has a sum over its entries, so that a whole block can be
compared with the same sum over a consume queue (``audit/queues.py`` spells it in SQL).

Source: RocketMQ ``ConsumeQueue.java``, ``CommitLogDispatcherBuildConsumeQueue``.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from halfmq.store.format.flags import INNER_BATCH
from halfmq.store.format.properties import PROPERTY_INNER_NUM, PROPERTY_TAGS, tag_hash
from halfmq.store.format.topics import SCHEDULE_TOPIC

from .arrays import Bools, Ints
from .numbers import numbers_at
from .rows import Rows, cut, store_times

BLOCK: Final = 4096  # queue offsets that are compared at once; a power of 2
# Of the sum over entries. Its terms stay below 2^44, a block's sum below 2^56.
PLACE_FACTOR: Final = 8191  # a prime, so that two entries that changed places change the sum
SIZE_FACTOR: Final = 31
TAGS_FACTOR: Final = 17
MODULUS: Final = (1 << 31) - 1
QUIET_MAX: Final = 86_400_000  # ms; a longer pause beside one record is taken for a wrong time
STEP_MIN: Final = 1_000  # ms; clocks are corrected by less all the time


class Ranges(NamedTuple):
    """Some ranges, column by column, in the order of their queues."""

    codes: npt.NDArray[np.int32]  # of the topics, into ``Rows.topic_names``
    queues: Ints
    starts: Ints  # queue offset of the first record
    ends: Ints  # and behind the last one
    at: Ints  # physical offset of the first record
    last_at: Ints  # and of the last one
    records: Ints
    sums: Ints


class Stretch(NamedTuple):
    """Records of the log in a row, in which the clock was not set back."""

    at: int  # physical offset of the first record
    last_at: int
    records: int
    size: int  # bytes
    time: int  # ms, when the first one was stored
    last_time: int


def queue_ranges(rows: Rows) -> Ranges:
    """Divide records into ranges, of which each one has a place in a queue (``Rows.queued``)."""
    order = np.argsort(rows.queue_numbers(), kind="stable")
    terms = entry_terms(rows)[order]
    codes, queues = rows.topic_codes[order], rows.field("queue_id")[order]
    slots, at = rows.field("queue_offset")[order], rows.physical_offsets[order]
    ends = slots + _slots_taken(rows)[order]
    begins = np.ones(len(rows), dtype=np.bool_)
    begins[1:] = (codes[1:] != codes[:-1]) | (queues[1:] != queues[:-1])
    begins[1:] |= (slots[1:] != ends[:-1]) | (slots[1:] // BLOCK != slots[:-1] // BLOCK)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(rows)) - 1
    return Ranges(
        codes[first],
        queues[first],
        slots[first],
        ends[last],
        at[first],
        at[last],
        last - first + 1,
        np.add.reduceat(terms, first),
    )


def entry_terms(rows: Rows) -> Ints:
    """Return what the entry of each record adds to a sum."""
    tags = TAGS_FACTOR * (tags_codes(rows)[0] % MODULUS)
    content = (rows.physical_offsets + SIZE_FACTOR * rows.sizes + tags) % MODULUS
    terms: Ints = (rows.field("queue_offset") % PLACE_FACTOR + 1) * content
    return terms


def stretches(rows: Rows) -> list[Stretch]:
    """Divide records in a row where the clock was set back.

    One record with a wrong time, which no CRC covers, is no step.
    """
    times, at, sizes = smoothed(store_times(rows)), rows.physical_offsets, rows.sizes
    bounds = np.flatnonzero(times[1:] + STEP_MIN <= times[:-1]) + 1
    firsts, lasts = [0, *bounds.tolist()], [*(bounds - 1).tolist(), len(rows) - 1]
    return [
        Stretch(*map(int, (at[a], at[b], b - a + 1, sizes[a : b + 1].sum(), times[a], times[b])))
        for a, b in zip(firsts, lasts, strict=True)
    ]


def smoothed(times: Ints) -> Ints:
    """Replace every time by the median of three; at the ends only one that is far from it."""
    if len(times) < 3:
        return times
    one, two, three = times[:-2], times[1:-1], times[2:]
    middle = np.maximum(np.minimum(one, two), np.minimum(np.maximum(one, two), three))
    first, last = (
        near if abs(near - far) <= QUIET_MAX else far
        for near, far in ((times[0], middle[0]), (times[-1], middle[-1]))
    )
    return np.concatenate([[first], middle, [last]])


def tags_codes(rows: Rows) -> tuple[Ints, Bools]:
    """Compute what the consume queue says of the tags of each record; tell where that is known.

    Of a delayed message it says when it is due, which only the broker knew.
    """
    block = rows.property_block
    row, starts, ends = block.find(PROPERTY_TAGS)
    tags = cut(block.buffer, starts, ends).dictionary_encode()
    hashes = [tag_hash(str(tag, "utf-8", "replace")) for tag in tags.dictionary.to_pylist()]
    codes = np.zeros(len(rows), dtype=np.int64)
    codes[row] = np.array(hashes, dtype=np.int64)[tags.indices.to_numpy()]
    waits = np.array([name == SCHEDULE_TOPIC for name in rows.topic_names], dtype=np.bool_)
    waiting = rows.of_topics(waits)
    codes[waiting] = 0
    return codes, ~waiting


def _slots_taken(rows: Rows) -> Ints:
    taken = np.ones(len(rows), dtype=np.int64)
    bits = rows.field("sys_flag")
    if (bits & INNER_BATCH).any():
        row, starts, ends = rows.property_block.find(PROPERTY_INNER_NUM)
        inner = numbers_at(rows.property_block.padded, starts, ends)
        right = inner.is_number & (bits[row] & INNER_BATCH != 0) & (inner.values > 0)
        taken[row[right]] = inner.values[right]
    return taken
