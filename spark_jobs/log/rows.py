"""Columns of many records at once, decoded on demand with numpy and Arrow.

``Rows`` is a set of records in one segment, given by where each starts and ends. Nothing is
decoded before it is asked for, and nothing is decoded record by record: a column whose place
varies (body, topic, properties) is cut out of the mapped file by one Arrow ``take`` over
alternating offsets *start0, end0, start1, end1, …*, of which every second slice is wanted. The
fixed head is copied by numpy and read through a record type.

Source of all positions: ``halfmq.store.format.record_fields``; of the properties' rules:
``halfmq.store.format.properties``.
"""

import mmap
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from halfmq.store.format.flags import HOSTS_MASK, NO_QUEUE_ENTRY
from halfmq.store.format.properties import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR
from halfmq.store.format.record import HEADS, MAGIC_V2, RECORD_SIZE_MIN
from halfmq.store.format.record_fields import (
    HOST_BITS_AT,
    LAYOUTS,
    PROPERTIES_LENGTH,
    TOPIC_LENGTH_V1,
    TOPIC_LENGTH_V2,
)

from .arrays import WORD, Bools, Bytes, Ints, Words, cut, joined, words

PROPERTY_END: Final = PROPERTY_SEPARATOR[0]

_PROPERTIES_LENGTH: Final = np.dtype(PROPERTIES_LENGTH.format)
_LENGTHS_MIN: Final = RECORD_SIZE_MIN - HEADS[0].size  # of topic and properties
assert TOPIC_LENGTH_V2.size == TOPIC_LENGTH_V1.size + 1  # so `_version_2` is the difference


def _by_hosts(name: str, *, end: bool = False) -> Ints:
    """Return where a field begins, or ends, by ``sys_flag & HOSTS_MASK``."""
    places = np.zeros(HOSTS_MASK + 1, dtype=np.int64)
    for hosts, fields in LAYOUTS.items():
        places[hosts] = fields[name].end if end else fields[name].position
    return places


_HEAD_SIZES: Final = _by_hosts("body_size", end=True)
_HOST_PLACES: Final = {
    name: (_by_hosts(name), _by_hosts(name, end=True)) for name in ("born_host", "store_host")
}

TIME_MAX: Final = 253_402_300_799_999  # ms, the end of the year 9999
_WORDS_AFTER: Final = 8  # that may be read after the last property: the longest name

Item = TypeVar("Item", bound=np.generic)


def _head_type(hosts: int) -> np.dtype[np.void]:
    """The head as a numpy type, for one of the four mixes of IPv4 and IPv6 hosts."""
    fields = LAYOUTS[hosts].values()
    kind: np.dtype[np.void] = np.dtype([(field.name, field.dtype) for field in fields])
    assert kind.itemsize == HEADS[hosts].size
    return kind


class SegmentBytes:
    """One mapped segment, seen by numpy and by Arrow without a copy."""

    def __init__(self, mapped: mmap.mmap, base: int) -> None:
        self.base = base  # physical offset of the first byte
        self.mapped = mapped
        self.view: Bytes = np.frombuffer(mapped, dtype=np.uint8)
        self.buffer = pa.py_buffer(mapped)

    @cached_property
    def words(self) -> Words:
        """The eight bytes from every place on, as a number."""
        return words(self.view)

    def cut(self, starts: Ints, ends: Ints, valid: Bools | None = None) -> pa.BinaryArray:
        """Copy out the slices [start, end), which must be ascending; null where not valid."""
        return cut(self.buffer, starts, ends, valid)

    def read(self, kind: np.dtype[Item], places: Ints) -> npt.NDArray[Item]:
        """Copy a structure of this type from each of these places."""
        # numpy copies plain bytes several times faster than it copies fields.
        plain = f"V{kind.itemsize}"
        count = max(0, len(self.view) - kind.itemsize + 1)  # a segment may be shorter
        every = np.ndarray(shape=(count,), dtype=plain, buffer=self.view, strides=(1,))
        blocks: npt.NDArray[Item] = every[places].view(kind)
        return blocks


class Rows:
    """Some records of one segment; ``starts`` and ``ends`` count from the segment's start."""

    def __init__(self, segment: SegmentBytes, starts: Ints, ends: Ints) -> None:
        self.segment = segment
        self.starts = starts
        self.ends = ends
        self._property_places: dict[str, tuple[Ints, Ints, Bools]] = {}

    def __len__(self) -> int:
        return len(self.starts)

    def select(self, wanted: Bools | None) -> "Rows":
        """Return only the wanted records; None: all."""
        return self if wanted is None or wanted.all() else self.at(np.flatnonzero(wanted))

    def at(self, places: Ints) -> "Rows":
        """Return the records at these places, which are ascending."""
        return Rows(self.segment, self.starts[places], self.ends[places])

    def are_in(self, topics: frozenset[str] | None) -> Bools | None:
        """Tell which records are of these topics; None, if all are wanted."""
        if topics is None:
            return None
        return self.of_topics(np.array([name in topics for name in self.topic_names], np.bool_))

    def queued(self) -> "Rows":
        """Return only the records that have a place in a queue: no rollbacks, no prepared ones."""
        return self.select(self.field("sys_flag") & NO_QUEUE_ENTRY == 0)

    def queue_numbers(self) -> Ints:
        """Number the queues of the records; the numbers mean something within these only."""
        topics = self.topic_codes.astype(np.int64) << 32
        return topics + (self.field("queue_id") & 0xFFFF_FFFF)

    def sound_count(self) -> int:
        """Count the records before the first whose fields contradict its size or place."""
        heads = self._head_sizes
        fits = self.sizes >= heads + _LENGTHS_MIN
        if not fits.all():  # a head must not be read past the end of its record
            return self.at(np.arange(np.argmin(fits))).sound_count()
        sound = self.field("physical_offset") == self.segment.base + self.starts
        sound &= self.field("body_size") == self._body_sizes  # not clipped
        sound &= self._topic_sizes >= 0
        sound &= self.properties_starts + self._properties_sizes == self.ends
        return len(sound) if sound.all() else int(np.argmin(sound))

    @property
    def end(self) -> int:
        """Where the last record ends."""
        return int(self.ends[-1])

    @property
    def sizes(self) -> Ints:
        return self.ends - self.starts

    @property
    def physical_offsets(self) -> Ints:
        return self.starts + self.segment.base

    def field(self, name: str) -> Ints:
        """Return a field of the head that is a number."""
        if len(self._heads) == 1:
            return self._heads[0][1][name].astype(np.int64)
        values = np.empty(len(self), dtype=np.int64)
        for places, head in self._heads:
            values[places] = head[name]
        return values

    @cached_property
    def _hosts(self) -> npt.NDArray[np.uint8]:
        flags = self.segment.view[self.starts + HOST_BITS_AT]
        return flags & np.uint8(HOSTS_MASK)

    @cached_property
    def _head_sizes(self) -> Ints:
        return _HEAD_SIZES[self._hosts]

    @cached_property
    def _heads(self) -> list[tuple[npt.NDArray[np.intp], npt.NDArray[np.void]]]:
        """Heads by kind of hosts, each with the places of its records; mostly one kind only."""
        heads = []
        for hosts in np.flatnonzero(np.bincount(self._hosts)):
            places = np.flatnonzero(self._hosts == hosts)
            kind = _head_type(int(hosts))
            heads.append((places, self.segment.read(kind, self.starts[places])))
        return heads

    @cached_property
    def _body_starts(self) -> Ints:
        return self.starts + self._head_sizes

    @cached_property
    def _body_sizes(self) -> Ints:
        # Clipped, so that a damaged length cannot lead out of the record.
        room = self.ends - self._body_starts - _LENGTHS_MIN - self._version_2
        sizes: Ints = np.clip(self.field("body_size"), 0, np.maximum(room, 0))
        return sizes

    @cached_property
    def _version_2(self) -> Ints:
        version_2: Ints = (self.field("magic") == MAGIC_V2).astype(np.int64)
        return version_2

    @cached_property
    def _topic_sizes(self) -> Ints:
        at = self._body_starts + self._body_sizes
        view = self.segment.view
        sizes: Ints = view[at].astype(np.int8).astype(np.int64)
        long = np.flatnonzero(self._version_2)
        sizes[long] = sizes[long] * 256 + view[at[long] + 1]
        return sizes

    @cached_property
    def _topic_starts(self) -> Ints:
        return self._body_starts + self._body_sizes + TOPIC_LENGTH_V1.size + self._version_2

    @cached_property
    def properties_starts(self) -> Ints:
        room = self.ends - self._topic_starts - PROPERTIES_LENGTH.size
        sizes = np.clip(self._topic_sizes, 0, room)
        return self._topic_starts + sizes + PROPERTIES_LENGTH.size

    @cached_property
    def _properties_sizes(self) -> Ints:
        at = self.properties_starts - PROPERTIES_LENGTH.size
        return self.segment.read(_PROPERTIES_LENGTH, at).astype(np.int64)

    @property
    def body_bounds(self) -> tuple[Ints, Ints]:
        """Where each body starts and ends in the segment."""
        return self._body_starts, self._body_starts + self._body_sizes

    def body(self, index: int) -> memoryview:
        """Return the stored body of one record, without a copy."""
        start = int(self._body_starts[index])
        return memoryview(self.segment.mapped)[start : start + int(self._body_sizes[index])]

    def ends_written(self, index: int) -> bool:
        """Tell whether the last byte of the properties, or else of the topic, was written."""
        after = 0 if self._properties_sizes[index] else PROPERTIES_LENGTH.size
        return bool(self.segment.view[int(self.ends[index]) - after - 1])

    def bodies(self, wanted: Bools | None = None) -> pa.BinaryArray:
        """Return the stored bodies; null where not wanted."""
        starts = self._body_starts
        sizes = self._body_sizes if wanted is None else np.where(wanted, self._body_sizes, 0)
        return self.segment.cut(starts, starts + sizes, wanted)

    @cached_property
    def topics(self) -> tuple[pa.BinaryArray, npt.NDArray[np.int32]]:
        """The distinct topics, and for each record the place of its topic among them."""
        starts = self._topic_starts
        topics = self.segment.cut(starts, starts + self._topic_sizes).dictionary_encode()
        codes = np.frombuffer(topics.indices.buffers()[1], dtype=np.int32, count=len(self))
        return topics.dictionary, codes

    @cached_property
    def topic_names(self) -> list[str]:
        """The distinct topics."""
        return [str(name, "utf-8", "replace") for name in self.topics[0].to_pylist()]

    @property
    def topic_codes(self) -> npt.NDArray[np.int32]:
        """For each record the place of its topic in ``topic_names``."""
        return self.topics[1]

    def of_topics(self, wanted: Bools) -> Bools:
        """Turn one decision per distinct topic into one per record."""
        spread: Bools = wanted[self.topic_codes]
        return spread

    @cached_property
    def properties(self) -> pa.BinaryArray:
        """The property strings as they are stored."""
        return self.segment.cut(self.properties_starts, self.ends)

    def hosts(self, name: str) -> pa.BinaryArray:
        """Return ``born_host`` or ``store_host``, packed: address and port, 8 or 20 bytes."""
        begins, ends = _HOST_PLACES[name]
        return self.segment.cut(self.starts + begins[self._hosts], self.starts + ends[self._hosts])

    @cached_property
    def property_block(self) -> "PropertyBlock":
        """All property strings, joined and indexed."""
        return PropertyBlock(*joined(self.properties))

    def property_places(self, name: str) -> tuple[Ints, Ints, Bools]:
        """Find a property's value in each row: start, end, and whether it is there.

        Of two properties of one name the last wins. Where there is none, start and end are those
        of an empty value at the beginning of the row. Do not change the arrays: they are kept.
        """
        found = self._property_places.get(name)
        if found is None:
            found = self._property_places[name] = self.property_block.find(name)
        return found

    def property_values(self, name: str) -> pa.BinaryArray:
        """Return the values of one property, null where a record has none."""
        starts, ends, there = self.property_places(name)
        return cut(self.property_block.buffer, starts, ends, there)

    def sum_over_properties(self, hashes: "Callable[[PropertyBlock], Words]") -> Words:
        """Add up a number of 64 bits for each property of a record; the sum wraps around."""
        return self.property_block.sums(hashes(self.property_block))

    def property_pairs(self) -> tuple[Ints, pa.BinaryArray, pa.BinaryArray]:
        """Return all properties: how many each record has, their names and their values.

        What lacks a name or a value is no property.
        """
        import pyarrow.compute as pc  # noqa: PLC0415  takes long, and only headers need it

        texts = pc.split_pattern(self.properties, PROPERTY_SEPARATOR)
        row = pc.list_parent_indices(texts)
        pairs = pc.split_pattern(texts.flatten(), NAME_VALUE_SEPARATOR, max_splits=1)
        has_value = pc.equal(pc.list_value_length(pairs), 2)
        row, pairs = row.filter(has_value), pairs.filter(has_value)
        names, values = pc.list_element(pairs, 0), pc.list_element(pairs, 1)
        is_whole = pc.greater(
            pc.min_element_wise(pc.binary_length(names), pc.binary_length(values)), 0
        )
        counts = np.bincount(row.filter(is_whole).to_numpy(), minlength=len(self)).astype(np.int64)
        return counts, names.filter(is_whole), values.filter(is_whole)


class PropertyBlock:
    """The property strings of some records, joined, with the places where properties begin.

    A name is searched in all records at once, by the first eight bytes of every property, taken as
    one number.
    """

    def __init__(self, data: Bytes, bounds: Ints) -> None:
        self._bounds = bounds  # where each row begins, and the end of the last
        # Eight bytes can be read at every place, and a few times more after it.
        self.padded = np.zeros(len(data) + _WORDS_AFTER * WORD, dtype=np.uint8)
        self.padded[: len(data)] = data
        self.words = words(self.padded)
        begins = np.zeros(len(data) + 1, dtype=np.bool_)
        np.equal(data, PROPERTY_END, out=begins[1:])
        begins[bounds] = True
        self._starts = np.flatnonzero(begins)
        self._first_words = self.words[self._starts]

    @property
    def buffer(self) -> pa.Buffer:
        """The joined strings, for ``cut``."""
        return pa.py_buffer(self.padded)

    @cached_property
    def bounds(self) -> tuple[Ints, Ints]:
        """Where properties begin and end, name and value together; of what is none, end < begin."""
        return self._starts, self._ends(np.arange(len(self._starts)))

    def are_named(self, names: Sequence[bytes]) -> Bools:
        """Tell which properties begin with one of these names, each with its separator."""
        codes = [int.from_bytes(name[:WORD], "little") for name in names if len(name) >= WORD]
        is_like = np.isin(self._first_words, np.array(codes, dtype=np.uint64))
        for name in names:
            if len(name) < WORD:
                is_like |= _begins_with(self._first_words, name)
        alike = np.flatnonzero(is_like)
        named = np.zeros(len(alike), dtype=np.bool_)
        for name in names:
            is_it = _begins_with(self._first_words[alike], name[:WORD])
            for place in range(WORD, len(name), WORD):
                here = self.words[self._starts[alike] + place]
                is_it &= _begins_with(here, name[place : place + WORD])
            named |= is_it
        is_like[alike] = named
        return is_like

    def sums(self, values: Words) -> Words:
        """Add up the values of the properties in each row."""
        up_to = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(values)])
        places = np.searchsorted(self._starts, self._bounds)
        sums: Words = up_to[places[1:]] - up_to[places[:-1]]
        return sums

    def find(self, name: str) -> tuple[Ints, Ints, Bools]:
        """Find a property; see ``Rows.property_places``.

        One without a value does not count, as in RocketMQ.
        """
        wanted = name.encode() + NAME_VALUE_SEPARATOR
        assert len(wanted) <= _WORDS_AFTER * WORD
        found = np.flatnonzero(_begins_with(self._first_words, wanted[:WORD]))
        for place in range(WORD, len(wanted), WORD):
            here = self.words[self._starts[found] + place]
            found = found[_begins_with(here, wanted[place : place + WORD])]
        begin, end = self._starts[found] + len(wanted), self._ends(found)
        whole = begin < end
        if not whole.all():
            found, begin, end = found[whole], begin[whole], end[whole]
        row = np.searchsorted(self._bounds, self._starts[found], side="right") - 1
        starts = self._bounds[:-1].copy()
        ends = starts.copy()
        there = np.zeros(len(starts), dtype=np.bool_)
        starts[row] = begin  # rows are ascending: of repeated ones, numpy assigns the last
        ends[row] = end
        there[row] = True
        return starts, ends, there

    def _ends(self, places: Ints) -> Ints:
        following = self._starts[np.minimum(places + 1, len(self._starts) - 1)]
        ends: Ints = following - (self.padded[following - 1] == PROPERTY_END)
        return ends


def _begins_with(here: Words, text: bytes) -> Bools:
    code = np.uint64(int.from_bytes(text, "little"))
    mask = np.uint64((1 << 8 * len(text)) - 1)
    found: Bools = (here if len(text) == WORD else here & mask) == code
    return found


def store_times(rows: Rows) -> Ints:
    """Return when records were stored, in ms; no CRC covers that, so it may be anything."""
    times: Ints = np.clip(rows.field("store_timestamp"), 0, TIME_MAX)
    return times
