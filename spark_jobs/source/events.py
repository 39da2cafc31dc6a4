"""The records of transactions as numbers: all that an audit needs of them.

A record of a transaction becomes a row of ``EVENT``. Texts become hashes of 64 bits: of a hundred
million unique keys, two have equal hashes with a probability of 1 in 4000, and what an audit
reports is looked up in the log again. Everything here works on whole batches; no record becomes an
object of Python.

Source: ``broker/transaction/half.py``; RocketMQ ``TransactionalMessageBridge``.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from halfmq.store.format.properties import (
    PROPERTY_KEYS,
    PROPERTY_PGROUP,
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TAGS,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_DELAY_MS,
    PROPERTY_TRANSACTION_DELIVER_MS,
    PROPERTY_TRANSACTION_GROUP,
    PROPERTY_TRANSACTION_HALF_ID,
    PROPERTY_TRANSACTION_HALVES,
    PROPERTY_UNIQ_KEY,
)
from halfmq.store.format.record import CRC_MASK

from ..log.arrays import Bools, Ints, joined, one
from ..log.numbers import Numbers, numbers_at, read_lists
from ..log.rows import WORD, Rows, Words, cut, store_times, words
from .parts import Part, Parts

EVENT: Final = np.dtype(
    [
        ("key", "<u8"),  # of its family: of the producer group and the unique key
        ("is_known", "?"),  # whether the key is: some records say only which half they are about
        ("part", "i1"),
        ("at", "<i8"),  # physical offset of the record
        ("reference", "<i8"),  # physical offset of the half that it names; NOTHING
        ("slot", "<i8"),  # of a half and of an op: the half's place in its queue; NOTHING
        ("time", "<i8"),  # ms, when it was stored
        ("due", "<i8"),  # ms, of what waits: when it is to be delivered; 0: not known
        ("checks", "<i4"),  # of a half: NOTHING for an original, else a copy
        ("number", "<i4"),  # which of several messages it is about
        ("total", "<i4"),  # of how many
        ("sound", "?"),  # matches its CRC, as far as that was looked at
        ("size", "<i4"),  # bytes of the record
        # Of halves, and of what delivers them:
        ("topic", "<u8"),  # hash of the real one
        ("queue", "<i4"),  # the real one
        ("tags", "<u8"),  # hash
        ("keys", "<u8"),  # hash
        ("body_crc", "<i4"),
        ("body_size", "<i4"),  # bytes
        ("label", "<u8"),  # of a half: stands for producer group and topic
    ]
)
MARK: Final = np.dtype([("at", "<i8"), ("is_ours", "?"), ("is_final", "?")])

NOTHING: Final = -1
_OF_HALVES: Final = ["key", "at", "slot"]  # fields
SLOT_BITS: Final = 48  # of an offset in a half queue; above them is the queue's number, mostly 0
WITH_CONTENT: Final = (Part.HALF, Part.COMMIT, Part.DELIVERED, Part.WAITING)
_NAMING: Final = (Part.COMMIT, Part.ROLLBACK, Part.WAITING)  # may name further halves
_NUMBER_MAX: Final = np.iinfo(np.int32).max
_HASHED_MAX: Final = 512  # bytes hashed of a text; keys have 32, groups and topics up to 255
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)

Hashes = npt.NDArray[np.uint64]
Records = npt.NDArray[np.void]


class Told(NamedTuple):
    """What some records tell about transactions."""

    events: Records  # EVENT; of an op one for each entry, without a key
    unread_ops: Ints  # physical offsets of op records with something that is no queue offset
    marks: Records  # MARK, see ``audit/dialects.py``: those that may begin or end a range
    labels: dict[int, tuple[str, str]]  # producer group and topic


def read_events(rows: Rows, parts: Parts, sound: Bools, sound_ops: Bools) -> Told:
    """Take the transactions out of some records.

    ``parts`` says what each is, 0 for none; ``sound`` which match their CRC. ``sound_ops`` is the
    same of the op records among them: a damaged one says nothing, since one flipped bit would roll
    back another transaction.
    """
    ops, unread_ops = _op_entries(rows.select(parts == Part.OP).select(sound_ops))
    chosen = np.flatnonzero((parts != 0) & (parts != Part.OP))
    events = _Reader(rows, chosen, parts[chosen], sound[chosen])
    named = events.with_named()
    return Told(np.concatenate([named, ops]), unread_ops, events.marks(), events.labels())


class _Reader:
    """Reads the chosen records of a batch as events."""

    def __init__(self, rows: Rows, chosen: Ints, parts: Parts, sound: Bools) -> None:
        self._rows = rows
        self._chosen = chosen
        self._words = rows.property_block.words
        self.events = events = np.zeros(len(chosen), dtype=EVENT)
        events["part"] = parts
        events["sound"] = sound
        events["total"] = 1
        events["at"] = rows.physical_offsets[chosen]
        events["time"] = store_times(rows)[chosen]
        events["size"] = rows.sizes[chosen]
        self._is_half = parts == Part.HALF
        links = rows.field("prepared_transaction_offset")[chosen]
        events["reference"] = np.where(self._is_half, NOTHING, links)
        events["slot"] = np.where(self._is_half, _slots(rows)[chosen], NOTHING)
        self._read_keys()
        self._read_content()
        self._read_checks()
        self._read_due_times()

    def _places(self, name: str) -> tuple[Ints, Ints, Bools]:
        starts, ends, there = self._rows.property_places(name)
        return starts[self._chosen], ends[self._chosen], there[self._chosen]

    def _hashes(self, name: str) -> Hashes:
        starts, ends, _ = self._places(name)
        return hashed(self._words, starts, ends)

    def _numbers(self, name: str) -> Numbers:
        starts, ends, there = self._places(name)
        if not there.any():
            return Numbers(np.zeros(len(there), dtype=np.int64), there)
        return numbers_at(self._rows.property_block.padded, starts, ends)

    def _read_keys(self) -> None:
        events = self.events
        self._group = self._hashes(PROPERTY_PGROUP)
        starts, ends, has_key = self._places(PROPERTY_UNIQ_KEY)
        ends = self._read_group_marks(starts, ends, has_key)
        text = hashed(self._words, starts, ends)
        events["key"] = _mixed(text + self._group * _GOLDEN)
        by_place = self._is_half & ~has_key
        events["key"][by_place] = key_of_place(events["at"][by_place])
        events["is_known"] = has_key | self._is_half

    def _read_group_marks(self, key_starts: Ints, key_ends: Ints, has_key: Bools) -> Ints:
        """Read which of several messages a record is about; take the leader's key for its own.

        The property is ``<leader's key>,<number>,<total>``; what is not of this form counts for
        nothing, as it does for the broker.
        """
        starts, ends, there = self._places(PROPERTY_TRANSACTION_GROUP)
        if not there.any():
            return key_ends
        data = self._rows.property_block.padded
        commas = np.flatnonzero(data == ord(","))
        last = np.searchsorted(commas, ends) - 1
        row = np.flatnonzero(there & (last > 0))
        starts, ends, last = starts[row], ends[row], last[row]
        first_comma, second_comma = commas[last - 1], commas[last]
        number = numbers_at(data, first_comma + 1, second_comma)
        total = numbers_at(data, second_comma + 1, ends)
        right = number.is_number & total.is_number & (first_comma > starts)
        row = row[right]
        self.events["number"][row] = np.minimum(number.values[right], _NUMBER_MAX)
        self.events["total"][row] = np.minimum(total.values[right], _NUMBER_MAX)
        key_starts[row] = starts[right]
        has_key[row] = True
        key_ends = key_ends.copy()
        key_ends[row] = first_comma[right]
        return key_ends

    def _read_content(self) -> None:
        rows, events = self._rows, self.events
        real_topic = self._hashes(PROPERTY_REAL_TOPIC)
        events["label"] = np.where(self._is_half, _mixed(real_topic + self._group * _GOLDEN), 0)
        is_moved = self._is_half | (events["part"] == Part.WAITING)
        topic = _hashes_of(rows.topics.dictionary)[rows.topic_codes[self._chosen]]
        queue = rows.field("queue_id")[self._chosen]
        real_queue = self._numbers(PROPERTY_REAL_QID)
        told = np.where(real_queue.is_number, real_queue.values, NOTHING)
        has = np.isin(events["part"], WITH_CONTENT)
        events["topic"] = np.where(is_moved, real_topic, topic) * has
        events["queue"] = np.minimum(np.where(is_moved, told, queue), _NUMBER_MAX) * has
        events["tags"] = self._hashes(PROPERTY_TAGS) * has
        events["keys"] = self._hashes(PROPERTY_KEYS) * has
        events["body_crc"] = (rows.field("body_crc")[self._chosen] & CRC_MASK) * has
        events["body_size"] = rows.field("body_size")[self._chosen] * has

    def _read_checks(self) -> None:
        checks = self._numbers(PROPERTY_TRANSACTION_CHECK_TIMES)
        _, _, there = self._places(PROPERTY_TRANSACTION_CHECK_TIMES)
        times = np.where(checks.is_number, np.minimum(checks.values, _NUMBER_MAX), 0)
        self.events["checks"] = np.where(there & self._is_half, times, NOTHING)

    def _read_due_times(self) -> None:
        waits = self.events["part"] == Part.WAITING
        if not waits.any():
            return
        due = self._numbers(PROPERTY_TRANSACTION_DELIVER_MS)
        wait = self._numbers(PROPERTY_TRANSACTION_DELAY_MS)
        by_wait = np.where(wait.is_number, self.events["time"] + wait.values, 0)
        self.events["due"] = np.where(due.is_number, due.values, by_wait) * waits

    def with_named(self) -> Records:
        """Return the events, and the further halves that decisions name as events of their own."""
        starts, ends, there = self._places(PROPERTY_TRANSACTION_HALVES)
        row = np.flatnonzero(
            there & np.isin(self.events["part"], _NAMING) & self.events["is_known"]
        )
        if not len(row):
            return self.events
        read = read_lists(*joined(cut(self._rows.property_block.buffer, starts[row], ends[row])))
        named = self.events[row[read.rows]][read.is_number]
        named["part"] = Part.NAMED
        named["reference"] = read.values[read.is_number]
        return np.concatenate([self.events, named])

    def marks(self) -> Records:
        """Return the records that only one of the brokers writes; of each run its ends.

        Finals count only in logs in which some have the mark, so that runs end with them and
        without them.
        """
        parts = self.events["part"]
        has_id = self._places(PROPERTY_TRANSACTION_HALF_ID)[2]
        is_linked = self.events["reference"] > 0
        is_final = parts == Part.COMMIT
        is_final |= (parts == Part.WAITING) & is_linked & has_id
        is_ours = (is_final & has_id) | ((parts == Part.DISCARD) & is_linked)
        is_ours |= (parts == Part.ROLLBACK) | (parts == Part.RESUME)
        is_mark = is_ours | is_final | (parts == Part.DISCARD) | (self.events["checks"] >= 0)
        found = np.zeros(int(is_mark.sum()), dtype=MARK)
        found["at"] = self.events["at"][is_mark]
        found["is_ours"], found["is_final"] = is_ours[is_mark], is_final[is_mark]
        others = np.flatnonzero(~found["is_final"])
        first_final = np.flatnonzero(found["is_final"] & found["is_ours"])[:1]
        kept = [_ends_of_runs(found["is_ours"]), first_final]
        kept.append(others[_ends_of_runs(found["is_ours"][others])])
        ends: Records = found[np.unique(np.concatenate(kept))]
        return ends

    def labels(self) -> dict[int, tuple[str, str]]:
        """Return the producer groups and topics of halves."""
        labels = self.events["label"]
        places = np.flatnonzero(self._is_half)
        _, firsts = np.unique(labels[places], return_index=True)
        places = np.sort(places[firsts])
        named = self._rows.at(self._chosen[places])
        groups, topics = (
            [
                str(value or b"", "utf-8", "replace")
                for value in named.property_values(name).to_pylist()
            ]
            for name in (PROPERTY_PGROUP, PROPERTY_REAL_TOPIC)
        )
        return dict(zip(labels[places].tolist(), zip(groups, topics, strict=True), strict=True))


def _ends_of_runs(values: Bools) -> Ints:
    changes = np.flatnonzero(values[1:] != values[:-1])
    places: Ints = np.concatenate([[0], changes, changes + 1, [len(values) - 1]]).astype(np.int64)
    return places if len(values) else places[:0]


def key_of_place(at: Ints) -> Hashes:
    """Return the family of halves without the key, which brokers always add: each its own."""
    return _mixed(at.astype(np.uint64) ^ _GOLDEN)


def _slots(rows: Rows) -> Ints:
    mask = (1 << SLOT_BITS) - 1
    slots: Ints = (rows.field("queue_id") << SLOT_BITS) + (rows.field("queue_offset") & mask)
    return slots


def _op_entries(rows: Rows) -> tuple[Records, Ints]:
    """Read which offsets of the half queue op records mark as done."""
    if not len(rows):
        return np.zeros(0, dtype=EVENT), np.zeros(0, dtype=np.int64)
    read = read_lists(*joined(rows.bodies()))
    entries = np.zeros(len(read.values), dtype=EVENT)
    entries["part"], entries["sound"], entries["total"] = Part.OP, True, 1
    entries["checks"] = entries["reference"] = NOTHING
    entries["slot"] = (rows.field("queue_id") << SLOT_BITS)[read.rows] + read.values
    entries["at"] = rows.physical_offsets[read.rows]
    entries["time"] = store_times(rows)[read.rows]
    entries["size"] = rows.sizes[read.rows]
    is_slot = read.is_number & (read.values < 1 << SLOT_BITS)
    return entries[is_slot], rows.physical_offsets[np.unique(read.rows[~is_slot])]


class Halves:
    """The halves of a part of the log, by which records find the family that they do not name."""

    def __init__(self) -> None:
        self._halves = [np.zeros(0, dtype=EVENT)[_OF_HALVES]]

    def add(self, events: Records) -> None:
        """Take in what is a half."""
        halves = events[events["part"] == Part.HALF]
        self._halves.append(halves[_OF_HALVES].copy())

    def link(self, events: Records) -> Records:
        """Give op entries, and records that know only their half, the family of that half."""
        halves = np.concatenate(self._halves)
        linked = events.copy()
        is_op = events["part"] == Part.OP
        for chosen, name, wanted in (
            (np.flatnonzero(is_op), "slot", "slot"),
            (np.flatnonzero(~is_op & ~events["is_known"]), "at", "reference"),
        ):
            order = np.argsort(halves[name], kind="stable")
            rising = halves[name][order]
            place = np.searchsorted(rising, events[wanted][chosen])
            found = place < len(rising)
            found[found] = rising[place[found]] == events[wanted][chosen[found]]
            half = halves[order[place[found]]]
            linked["key"][chosen[found]] = half["key"]
            linked["reference"][chosen[found]] = half["at"]
            linked["is_known"][chosen[found]] = True
        return linked


# --- hashes


def hash_of(text: str) -> int:
    """Hash a text as it stands in a column."""
    return int(_hashes_of(one(text.encode(), pa.binary())).astype(np.int64)[0])


def _hashes_of(texts: pa.BinaryArray) -> Hashes:
    """Hash some texts."""
    data, bounds = joined(texts)
    padded = np.append(data, np.zeros(WORD, dtype=np.uint8))
    return hashed(words(padded), bounds[:-1], bounds[1:])


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
