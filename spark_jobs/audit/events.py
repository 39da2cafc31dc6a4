"""The records of transactions as numbers: all that an audit keeps of them.

A record of a transaction becomes a row of ``EVENT``. Texts become hashes of 64 bits: of a hundred
million unique keys, two have equal hashes with a probability of 1 in 4000, and what an audit
reports is looked up in the log again. Everything here works on whole batches; no record becomes an
object of Python.

Source: ``broker/transaction/half.py``; RocketMQ ``TransactionalMessageBridge``.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from halfmq.store.format.properties import (
    PROPERTY_PGROUP,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_GROUP,
    PROPERTY_TRANSACTION_HALVES,
    PROPERTY_UNIQ_KEY,
)

from ..log.arrays import Bools, Ints, joined
from ..log.checksums import sound_records
from ..log.numbers import numbers_at, read_lists
from ..log.rows import WORD, PropertyBlock, Rows, Words, cut, store_times
from .judge import Part

EVENT: Final = np.dtype(
    [
        ("key", "<u8"),  # of its family: of the producer group and the unique key
        ("at", "<i8"),  # physical offset of the record
        ("reference", "<i8"),  # of the half that it names; of a half, its slot
        ("time", "<i8"),  # ms, when it was stored
        ("label", "<u8"),  # of a half: stands for producer group and topic
        ("checks", "<i2"),  # of a half: NO_CHECKS for an original, else a copy
        ("part", "u1"),  # judge.Part
        ("number", "u1"),  # which of several messages it is about
        ("total", "u1"),  # of how many
    ]
)
OP_ENTRY: Final = np.dtype([("slot", "<i8"), ("at", "<i8"), ("time", "<i8")])
SLOT: Final = np.dtype([("slot", "<i8"), ("at", "<i8"), ("key", "<u8")])

NO_CHECKS: Final = -1
SLOT_BITS: Final = 48  # of an offset in a half queue; above them is the queue's number, mostly 0
_CHECKS_MAX: Final = np.iinfo(np.int16).max
_MESSAGES_MAX: Final = np.iinfo(np.uint8).max  # of one transaction; brokers allow 64
_HASHED_MAX: Final = 512  # bytes hashed of a text; keys have 32, groups and topics up to 255
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)

Hashes = npt.NDArray[np.uint64]
Records = npt.NDArray[np.void]


class Told(NamedTuple):
    """What some records tell about transactions."""

    events: Records  # EVENT: all but ops, in log order
    bare: Bools  # of them, those whose family is known by their link alone
    op_entries: Records  # OP_ENTRY
    unread_ops: Ints  # physical offsets of op records with something that is no queue offset
    labels: dict[int, tuple[str, str]]  # producer group and topic


def read_events(rows: Rows, parts: npt.NDArray[np.int8]) -> Told:
    """Take the transactions out of some records; ``parts`` says what each is, 0 for none."""
    is_op = parts == Part.OP
    is_event = (parts != 0) & ~is_op
    op_entries, unread_ops = _op_entries(rows.select(is_op))
    chosen = rows.select(is_event)
    if not len(chosen):
        return Told(
            np.zeros(0, dtype=EVENT), np.zeros(0, dtype=np.bool_), op_entries, unread_ops, {}
        )
    events = np.zeros(len(chosen), dtype=EVENT)
    events["part"] = parts[is_event]
    events["total"] = 1
    is_half = events["part"] == Part.HALF
    events["at"] = chosen.physical_offsets
    events["time"] = store_times(chosen)
    events["reference"] = np.where(
        is_half, _slots(chosen), chosen.field("prepared_transaction_offset")
    )
    block = chosen.property_block
    group, _ = _hashes_of(block, PROPERTY_PGROUP)
    topic, _ = _hashes_of(block, PROPERTY_REAL_TOPIC)
    text, has_key = _hashes_of(block, PROPERTY_UNIQ_KEY)
    _read_group_marks(events, block, text, has_key)
    events["key"] = _mixed(text + group * _GOLDEN)
    by_place = is_half & ~has_key
    events["key"][by_place] = key_of_place(events["at"][by_place])
    events["label"] = np.where(is_half, _mixed(topic + group * _GOLDEN), 0)
    _read_checks(events, block)
    bare = ~has_key & ~is_half
    events, bare = _with_named(events, bare, block)
    return Told(events, bare, op_entries, unread_ops, _labels(chosen, events, is_half))


def key_of_place(at: Ints) -> Hashes:
    """Return the family of halves without the key, which brokers always add: each its own."""
    return _mixed(at.astype(np.uint64) ^ _GOLDEN)


def _slots(rows: Rows) -> Ints:
    mask = (1 << SLOT_BITS) - 1
    slots: Ints = (rows.field("queue_id") << SLOT_BITS) + (rows.field("queue_offset") & mask)
    return slots


def _op_entries(rows: Rows) -> tuple[Records, Ints]:
    """Read which offsets of the half queue op records mark as done.

    A damaged op record says nothing: one flipped bit would roll back another transaction.
    """
    rows = rows.select(sound_records(rows))
    if not len(rows):
        return np.zeros(0, dtype=OP_ENTRY), np.zeros(0, dtype=np.int64)
    read = read_lists(*joined(rows.bodies()))
    entries = np.zeros(len(read.values), dtype=OP_ENTRY)
    entries["slot"] = (rows.field("queue_id") << SLOT_BITS)[read.rows] + read.values
    entries["at"] = rows.physical_offsets[read.rows]
    entries["time"] = store_times(rows)[read.rows]
    is_slot = read.is_number & (read.values < 1 << SLOT_BITS)
    return entries[is_slot], rows.physical_offsets[np.unique(read.rows[~is_slot])]


def _read_group_marks(events: Records, block: PropertyBlock, text: Hashes, has: Bools) -> None:
    """Enter which of several messages a record is about, and their leader's key as its key.

    The property is ``<leader's key>,<number>,<total>``; what is not of this form counts for
    nothing, as it does for the broker.
    """
    row, starts, ends = block.find(PROPERTY_TRANSACTION_GROUP)
    if not len(row):
        return
    commas = np.flatnonzero(block.padded == ord(","))
    last = np.searchsorted(commas, ends) - 1
    row, starts, ends, last = (values[last > 0] for values in (row, starts, ends, last))
    first_comma, second_comma = commas[last - 1], commas[last]
    number = numbers_at(block.padded, first_comma + 1, second_comma)
    total = numbers_at(block.padded, second_comma + 1, ends)
    right = number.is_number & total.is_number & (first_comma > starts)
    row = row[right]
    events["number"][row] = np.minimum(number.values[right], _MESSAGES_MAX)
    events["total"][row] = np.minimum(total.values[right], _MESSAGES_MAX)
    text[row] = hashed(block.words, starts[right], first_comma[right])
    has[row] = True


def _read_checks(events: Records, block: PropertyBlock) -> None:
    events["checks"] = NO_CHECKS
    row, starts, ends = block.find(PROPERTY_TRANSACTION_CHECK_TIMES)
    if len(row):
        times = numbers_at(block.padded, starts, ends)
        events["checks"][row] = np.where(times.is_number, np.minimum(times.values, _CHECKS_MAX), 0)


def _with_named(events: Records, bare: Bools, block: PropertyBlock) -> tuple[Records, Bools]:
    """Add the further halves that decisions name, each as an event of its own."""
    row, starts, ends = block.find(PROPERTY_TRANSACTION_HALVES)
    decides = np.isin(events["part"][row], (Part.COMMIT, Part.ROLLBACK)) & ~bare[row]
    if not decides.any():
        return events, bare
    row, starts, ends = row[decides], starts[decides], ends[decides]
    read = read_lists(*joined(cut(block.buffer, starts, ends)))
    named = events[row[read.rows]][read.is_number]
    named["part"] = Part.NAMED
    named["reference"] = read.values[read.is_number]
    return np.concatenate([events, named]), np.append(bare, np.zeros(len(named), dtype=np.bool_))


def _labels(rows: Rows, events: Records, is_half: Bools) -> dict[int, tuple[str, str]]:
    places = np.flatnonzero(is_half)
    _, firsts = np.unique(events["label"][places], return_index=True)
    places = np.sort(places[firsts])
    named = rows.at(places)
    groups, topics = (
        [str(value or b"", "utf-8", "replace") for value in named.property_values(name).to_pylist()]
        for name in (PROPERTY_PGROUP, PROPERTY_REAL_TOPIC)
    )
    return dict(
        zip(events["label"][places].tolist(), zip(groups, topics, strict=True), strict=True)
    )


# --- hashes


def _hashes_of(block: PropertyBlock, name: str) -> tuple[Hashes, Bools]:
    """Hash a property of each row; where there is none the hash is 0."""
    count = len(block.bounds) - 1
    row, starts, ends = block.find(name)
    hashes = np.zeros(count, dtype=np.uint64)
    hashes[row] = hashed(block.words, starts, ends)
    there = np.zeros(count, dtype=np.bool_)
    there[row] = True
    return hashes, there


def hashed(content: Words, starts: Ints, ends: Ints) -> Hashes:
    """Hash the texts [start, end) of up to 512 bytes; ``content`` reaches a word behind them."""
    sizes = np.minimum(ends - starts, _HASHED_MAX)
    hashes = _mixed(sizes.astype(np.uint64) + _GOLDEN)
    for place in range(0, int(sizes.max(initial=0)), WORD):
        left = sizes - place
        if left.min() >= WORD:
            hashes = _mixed(hashes ^ content[starts + place])
            continue
        here = np.flatnonzero(left > 0)
        bits = 8 * np.minimum(left[here], WORD).astype(np.uint64)
        mask = np.uint64(2**64 - 1) >> (np.uint64(64) - bits)
        hashes[here] = _mixed(hashes[here] ^ (content[starts[here] + place] & mask))
    return hashes


def _mixed(values: Hashes) -> Hashes:
    """Spread every bit over all: the last steps of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def by_bucket(records: Records, buckets: npt.NDArray[np.int64]) -> Iterator[tuple[int, bytes]]:
    """Divide records by bucket, packed."""
    for number in np.unique(buckets):
        yield int(number), records[buckets == number].tobytes()
