"""The records of transactions as numbers: all that an audit needs of them.

A record of a transaction becomes a row of ``EVENT``. Texts become hashes (``hashes.py``); what an
audit reports is looked up in the log again. Everything here works on whole batches; no record
becomes an object of Python.

Source: ``broker/transaction/half.py``; RocketMQ ``TransactionalMessageBridge``.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from halfmq.store.format.properties import (
    PROPERTY_PGROUP,
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TIMER_ROLL_TIMES,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_DELAY_MS,
    PROPERTY_TRANSACTION_DELIVER_MS,
    PROPERTY_TRANSACTION_GROUP,
    PROPERTY_TRANSACTION_HALF_ID,
    PROPERTY_TRANSACTION_HALVES,
    PROPERTY_UNIQ_KEY,
)
from halfmq.store.format.topics import TIMER_TOPIC

from ..log.arrays import Bools, Ints, whole_numbers
from ..log.final_content import content_hashes
from ..log.hashes import GOLDEN, Hashes, hashed, hashes_of, mixed
from ..log.rows import Rows, store_times
from ..log.transaction_parts import SLOT_BITS, Part, Parts
from .options import DELAY_LEVELS_MS

HAS_KEY: Final = "hasKey"
EVENT: Final = np.dtype(
    [
        ("key", "<u8"),  # of its key group: of the producer group and the unique key
        ("part", "i1"),
        ("physicalOffset", "<i8"),
        ("halfOffset", "<i8"),  # physical offset of the half that it names; NOTHING
        ("halfQueueOffset", "<i8"),  # of a half and of an op: the half's place in its queue
        ("time", "<i8"),  # ms, when it was stored
        ("dueTime", "<i8"),  # ms, of what waits: when it is to be delivered; 0: not known
        ("checkTimes", "<i4"),  # of a half: NOTHING for an original, else a copy
        ("number", "<i4"),  # which of several messages it is about
        ("total", "<i4"),  # of how many
        ("crcOk", "?"),  # matches its CRC, as far as that was looked at
        ("size", "<i4"),  # bytes of the record
        # Of halves, and of what delivers them:
        ("topicHash", "<u8"),  # of the real one
        ("partition", "<i4"),  # the real one
        (
            "contentHash",
            "<u8",
        ),  # of all else that a final has of its half, see ``final_content.py``
        ("bodySize", "<i4"),  # bytes
        ("halfId", "<i8"),  # physical offset in TRANSACTION_HALF_ID; NOTHING
        ("label", "<u8"),  # of a half: stands for producer group and topic
        (HAS_KEY, "?"),  # no column; some records say only which half they are about
    ]
)
MARK: Final = np.dtype([("at", "<i8"), ("is_ours", "?"), ("is_final", "?")])

NOTHING: Final = -1
_OF_HALVES: Final = ["key", "physicalOffset", "halfQueueOffset"]  # fields
_OF_DELAYS: Final = (Part.DELAYED, Part.ARRIVED, Part.RECALLED)
_WAITING: Final = (Part.WAITING, Part.DELAYED)
WITH_CONTENT: Final = (
    *(Part.HALF, Part.COMMIT, Part.DELIVERED, Part.WAITING),
    *(Part.DELAYED, Part.ARRIVED),
)
_PLACE_BITS: Final = 40  # of a place where a message waits; above them is the number of its queue
_DELAYS: Final = np.uint64(0xD6E8FEB86659FD93)  # keeps keys of delays apart from transactions'
_NAMING: Final = (Part.COMMIT, Part.ROLLBACK, Part.WAITING)  # may name further halves
_ID_DIGITS: Final = 16  # of an offset, at the end of an offset message id
_ID_PLACES: Final = np.arange(-_ID_DIGITS, 0)
_ID_SHIFTS: Final = -4 * (_ID_PLACES + 1)
_HEX: Final = np.full(256, 16, dtype=np.uint8)  # the value of each hexadecimal digit
_HEX[list(b"0123456789ABCDEF")] = np.arange(16)
_HEX[list(b"abcdef")] = np.arange(10, 16)
_NUMBER_MAX: Final = np.iinfo(np.int32).max

Records = npt.NDArray[np.void]


class BatchEvents(NamedTuple):
    """What a batch of records says about transactions."""

    events: Records  # EVENT; of an op one for each entry, without a key
    unread_ops: Ints  # physical offsets of op records with something that is no queue offset
    marks: Records  # MARK, see ``audit/dialects.py``: those that may begin or end a range


def read_events(
    rows: Rows, parts: Parts, sound: Bools, levels_ms: Sequence[int] = DELAY_LEVELS_MS
) -> BatchEvents:
    """Extract the events of transactions from a batch of records.

    ``parts`` says what each record is, 0 for none; ``sound`` which match their CRC; ``levels_ms``
    how long each delay level lasts. A damaged op record is ignored, since one flipped bit would
    roll back another transaction.
    """
    is_op = parts == Part.OP
    ops, unread_ops = _op_entries(rows.select(is_op & sound))
    chosen = (parts != 0) & ~is_op
    batch = _Reader(rows.select(chosen), parts[chosen], sound[chosen], levels_ms)
    events = np.concatenate([batch.events, batch.named(), ops])
    return BatchEvents(events, unread_ops, batch.marks())


class _Reader:
    """Reads records, each of which is about a transaction, as events."""

    def __init__(self, rows: Rows, parts: Parts, sound: Bools, levels_ms: Sequence[int]) -> None:
        self._rows = rows
        self._levels_ms = np.array(levels_ms, dtype=np.int64)
        self._words = rows.property_block.words
        self._is_half = is_half = parts == Part.HALF
        self._group = self._hashes(PROPERTY_PGROUP)
        self.events = events = np.zeros(len(rows), dtype=EVENT)
        events["part"] = parts
        events["crcOk"] = sound
        events["total"] = 1
        events["physicalOffset"] = rows.physical_offsets
        events["time"] = store_times(rows)
        events["size"] = rows.sizes
        links = rows.field("prepared_transaction_offset")
        events["halfOffset"] = np.where(is_half, NOTHING, links)
        events["halfQueueOffset"] = np.where(is_half, _slots(rows), NOTHING)
        checked = rows.property_places(PROPERTY_TRANSACTION_CHECK_TIMES)[2]
        checks = self._numbers(PROPERTY_TRANSACTION_CHECK_TIMES, 0)
        events["checkTimes"] = np.where(checked & is_half, np.minimum(checks, _NUMBER_MAX), NOTHING)
        self._read_keys()
        self._read_content()
        self._read_due_times()
        self._read_delays()

    def _hashes(self, name: str) -> Hashes:
        starts, ends, _ = self._rows.property_places(name)
        return hashed(self._words, starts, ends)

    def _numbers(self, name: str, default: int) -> Ints:
        """Read a property; ``default`` where there is none or it is no number."""
        numbers = whole_numbers(self._rows.property_values(name))
        read: Ints = numbers.fill_null(default).to_numpy()
        return read

    def _read_keys(self) -> None:
        events = self.events
        starts, ends, has_key = self._rows.property_places(PROPERTY_UNIQ_KEY)
        starts, ends, has_key = starts.copy(), ends.copy(), has_key.copy()
        self._read_group_marks(starts, ends, has_key)
        text = hashed(self._words, starts, ends)
        events["key"] = mixed(text + self._group * GOLDEN)
        by_place = self._is_half & ~has_key
        events["key"][by_place] = key_of_place(events["physicalOffset"][by_place])
        events[HAS_KEY] = has_key | self._is_half

    def _read_group_marks(self, key_starts: Ints, key_ends: Ints, has_key: Bools) -> None:
        """Read which of several messages a record is about; take the leader's key for its own.

        The property is ``<leader's key>,<number>,<total>``; any other text is ignored, as it is by
        the broker.
        """
        starts, _, there = self._rows.property_places(PROPERTY_TRANSACTION_GROUP)
        if not there.any():
            return
        import pyarrow.compute as pc  # noqa: PLC0415  see whole_numbers

        texts = self._rows.property_values(PROPERTY_TRANSACTION_GROUP)
        fields = pc.split_pattern(texts, ",", max_splits=2, reverse=True)
        there = pc.equal(pc.list_value_length(fields), 3).fill_null(False)
        fields, row = fields.filter(there), np.flatnonzero(there)
        sizes = pc.binary_length(pc.list_element(fields, 0)).to_numpy()
        number, total = (
            whole_numbers(pc.list_element(fields, place)).fill_null(NOTHING).to_numpy()
            for place in (1, 2)
        )
        right = (number >= 0) & (total >= 0) & (sizes > 0)
        row = row[right]
        self.events["number"][row] = np.minimum(number[right], _NUMBER_MAX)
        self.events["total"][row] = np.minimum(total[right], _NUMBER_MAX)
        key_starts[row], key_ends[row] = starts[row], starts[row] + sizes[right]
        has_key[row] = True

    def _read_content(self) -> None:
        rows, events = self._rows, self.events
        real_topic = self._hashes(PROPERTY_REAL_TOPIC)
        events["label"] = np.where(self._is_half, mixed(real_topic + self._group * GOLDEN), 0)
        is_moved = self._is_half | np.isin(events["part"], _WAITING)
        topic = hashes_of(rows.topics[0])[rows.topic_codes]
        real_queue = self._numbers(PROPERTY_REAL_QID, NOTHING)
        has = np.isin(events["part"], WITH_CONTENT)
        events["topicHash"] = np.where(is_moved, real_topic, topic) * has
        queue = np.where(is_moved, real_queue, rows.field("queue_id"))
        events["partition"] = np.minimum(queue, _NUMBER_MAX) * has
        events["contentHash"] = content_hashes(rows) * has
        events["bodySize"] = rows.field("body_size") * has
        events["halfId"] = self._half_ids()

    def _half_ids(self) -> Ints:
        """Read the offsets at the ends of TRANSACTION_HALF_ID; what is no such id counts as 0."""
        starts, ends, there = self._rows.property_places(PROPERTY_TRANSACTION_HALF_ID)
        ids = np.full(len(starts), NOTHING, dtype=np.int64)
        row = np.flatnonzero(there)
        ids[row] = 0
        row = row[ends[row] - starts[row] >= _ID_DIGITS]
        digits = _HEX[self._rows.property_block.padded[ends[row, None] + _ID_PLACES]]
        right = (digits < 16).all(axis=1)
        ids[row[right]] = digits[right].astype(np.int64) @ (np.int64(1) << _ID_SHIFTS)
        return ids

    def _read_due_times(self) -> None:
        waits = np.isin(self.events["part"], _WAITING)
        if not waits.any():
            return
        wait = self._numbers(PROPERTY_TRANSACTION_DELAY_MS, NOTHING)
        level = np.clip(self._rows.field("queue_id"), 0, len(self._levels_ms) - 1)
        wait = np.where(wait >= 0, wait, self._levels_ms[level])
        by_wait = np.where(self._in_topic(TIMER_TOPIC), 0, self.events["time"] + wait)
        due = self._numbers(PROPERTY_TRANSACTION_DELIVER_MS, NOTHING)
        in_timer_topic = self._numbers(PROPERTY_TIMER_OUT_MS, NOTHING)
        due = np.where(in_timer_topic >= 0, in_timer_topic, due)
        self.events["dueTime"] = np.where(due >= 0, due, by_wait) * waits

    def _in_topic(self, topic: str) -> Bools:
        names = self._rows.topic_names
        return self._rows.of_topics(np.array([name == topic for name in names], dtype=np.bool_))

    def _read_delays(self) -> None:
        """Read plain delays: known by unique key and retries, and by the place of what waits."""
        events, rows = self.events, self._rows
        chosen = np.isin(events["part"], _OF_DELAYS)
        if not chosen.any():
            return
        retries = rows.field("reconsume_times").astype(np.uint64)
        key = mixed(self._hashes(PROPERTY_UNIQ_KEY) ^ mixed(retries ^ _DELAYS))
        events["key"][chosen] = key[chosen]
        waits = events["part"] == Part.DELAYED
        number = np.where(self._in_topic(TIMER_TOPIC), 0, rows.field("queue_id") + 1)
        place = (number << _PLACE_BITS) + rows.field("queue_offset")
        again = events["halfOffset"] < 0
        again |= rows.property_places(PROPERTY_TIMER_ROLL_TIMES)[2]
        events["number"][chosen] = (again & waits)[chosen]
        events["total"][chosen] = 1
        events["halfOffset"][waits] = -1 - place[waits]  # what a record that delivers it has

    def named(self) -> Records:
        """Return the further halves that decisions name, each as an event of its own."""
        decides = np.isin(self.events["part"], _NAMING) & self.events[HAS_KEY]
        chosen = np.flatnonzero(
            decides & self._rows.property_places(PROPERTY_TRANSACTION_HALVES)[2]
        )
        lists = self._rows.at(chosen).property_values(PROPERTY_TRANSACTION_HALVES)
        row, values, is_number = _listed(lists)
        named = self.events[chosen[row[is_number]]]
        named["part"] = Part.NAMED
        named["halfOffset"] = values[is_number]
        return named

    def marks(self) -> Records:
        """Return the records that only one of the brokers writes; of each run its ends."""
        parts = self.events["part"]
        has_id = self._rows.property_places(PROPERTY_TRANSACTION_HALF_ID)[2]
        is_linked = self.events["halfOffset"] > 0
        is_final = parts == Part.COMMIT
        is_final |= (parts == Part.WAITING) & is_linked & has_id
        is_ours = (is_final & has_id) | ((parts == Part.DISCARD) & is_linked)
        is_ours |= (parts == Part.ROLLBACK) | (parts == Part.RESUME)
        is_mark = is_ours | is_final | (parts == Part.DISCARD) | (self.events["checkTimes"] >= 0)
        found = np.zeros(int(is_mark.sum()), dtype=MARK)
        found["at"] = self.events["physicalOffset"][is_mark]
        found["is_ours"], found["is_final"] = is_ours[is_mark], is_final[is_mark]
        return ends_of_marks(found)


def ends_of_marks(marks: Records) -> Records:
    """Choose the marks that say as much as all of them: the ends of each run.

    Finals count only in logs in which some have the mark, so that runs end with them and without
    them.
    """
    others = np.flatnonzero(~marks["is_final"])
    first_final = np.flatnonzero(marks["is_final"] & marks["is_ours"])[:1]
    kept = [_ends_of_runs(marks["is_ours"]), first_final]
    kept.append(others[_ends_of_runs(marks["is_ours"][others])])
    ends: Records = marks[np.unique(np.concatenate(kept))]
    return ends


def _ends_of_runs(values: Bools) -> Ints:
    changes = np.flatnonzero(values[1:] != values[:-1])
    places: Ints = np.concatenate([[0], changes, changes + 1, [len(values) - 1]]).astype(np.int64)
    return places if len(values) else places[:0]


def key_of_place(at: Ints) -> Hashes:
    """Return the keys of halves without a unique key, which brokers always add: each its own."""
    return mixed(at.astype(np.uint64) ^ GOLDEN)


def _slots(rows: Rows) -> Ints:
    mask = (1 << SLOT_BITS) - 1
    slots: Ints = (rows.field("queue_id") << SLOT_BITS) + (rows.field("queue_offset") & mask)
    return slots


def _op_entries(rows: Rows) -> tuple[Records, Ints]:
    """Read which offsets of the half queue op records mark as done."""
    row, values, is_number = _listed(rows.bodies())
    entries = np.zeros(len(row), dtype=EVENT)
    entries["part"], entries["crcOk"], entries["total"] = Part.OP, True, 1
    entries["checkTimes"] = entries["halfOffset"] = entries["halfId"] = NOTHING
    entries["halfQueueOffset"] = (rows.field("queue_id") << SLOT_BITS)[row] + values
    entries["physicalOffset"] = rows.physical_offsets[row]
    entries["time"] = store_times(rows)[row]
    entries["size"] = rows.sizes[row]
    is_slot = is_number & (values < 1 << SLOT_BITS)
    return entries[is_slot], rows.physical_offsets[np.unique(row[~is_slot])]


def _listed(lists: pa.BinaryArray) -> tuple[Ints, Ints, Bools]:
    """Read comma-separated numbers: of which list each is, its value, and whether it is a number.

    Empty entries do not count.
    """
    import pyarrow.compute as pc  # noqa: PLC0415  see whole_numbers

    entries = pc.split_pattern(lists, ",")
    row, texts = pc.list_parent_indices(entries), entries.flatten()
    is_there = pc.greater(pc.binary_length(texts), 0)
    values = whole_numbers(texts.filter(is_there))
    is_number = values.is_valid().to_numpy(zero_copy_only=False)
    return row.filter(is_there).to_numpy(), values.fill_null(0).to_numpy(), is_number


class Halves:
    """The halves of a part of the log, which give records their keys."""

    def __init__(self) -> None:
        self._halves = [np.zeros(0, dtype=EVENT)[_OF_HALVES]]

    def add(self, events: Records) -> None:
        """Take in what is a half."""
        halves = events[events["part"] == Part.HALF]
        self._halves.append(halves[_OF_HALVES].copy())

    def link(self, events: Records) -> Records:
        """Give op entries, and records that know only their half, the key of that half."""
        halves = np.concatenate(self._halves)
        is_op = events["part"] == Part.OP
        for chosen, name, wanted in (
            (np.flatnonzero(is_op), "halfQueueOffset", "halfQueueOffset"),
            (np.flatnonzero(~is_op & ~events[HAS_KEY]), "physicalOffset", "halfOffset"),
        ):
            order = np.argsort(halves[name], kind="stable")
            rising = halves[name][order]
            place = np.searchsorted(rising, events[wanted][chosen])
            found = place < len(rising)
            found[found] = rising[place[found]] == events[wanted][chosen[found]]
            half = halves[order[place[found]]]
            events["key"][chosen[found]] = half["key"]
            events["halfOffset"][chosen[found]] = half["physicalOffset"]
            events[HAS_KEY][chosen[found]] = True
        return events
