"""Records of one layout in a row, taken apart in columns.

Most logs hold long runs of records that have the same size, topic and lengths. A byte of a field is
then at the same place in each, one size further on, so ``Runs`` reads up to ``RUN_LENGTH_MAX`` of
them column by column, with a few calls for each field of all: less than half of what the walk from
record to record takes, CRCs included. Whatever is unusual about one of them, it says that there is
no run, and ``find_records`` looks. How much is tried doubles with each run found, so that little
is taken apart in vain.
"""

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_
from struct import Struct
from typing import Final, NamedTuple

from .format.columns import ones, progression
from .format.crc import crc32
from .format.filler import FILLER_BIT
from .format.flags import HOSTS_MASK, INNER_BATCH, TransactionType
from .format.properties import tags_code
from .format.queue_entry import ENTRY_SIZE, LAYOUT
from .format.record import (
    CRC_MASK,
    CRC_TAIL_START,
    HEAD_V4,
    MAGIC_V1,
    MAGIC_V2,
    PHYSICAL_OFFSET_AT,
    PREFIX,
    QUEUE_OFFSET_AT,
    SYS_FLAG_AT,
)
from .format.topics import SCHEDULE_TOPIC
from .portion import Portion, Share

RUN_LENGTH_MIN: Final = 64  # records; fewer are found faster one by one
RUN_LENGTH_MAX: Final = 2048  # of 512 bytes; a mebibyte, which is scanned at once, has no more
_LAYOUTS_MAX: Final = 64  # whose queue entries are kept, each of 1 to 40 KB
_DIVIDERS_MAX: Final = 128  # kept, three for each layout, of 3 to 90 KB
_PREPARED: Final = int(TransactionType.PREPARED)  # in prepared and rollback records
_UNUSUAL: Final = _PREPARED | HOSTS_MASK | INNER_BATCH | FILLER_BIT
_BODY_LENGTH_AT: Final = HEAD_V4.size - 4
_TOPIC_LENGTH_SIZE: Final = {MAGIC_V1: 1, MAGIC_V2: 2}
_TAGS: Final = b"TAGS\x01"
_SECTOR: Final = 512  # bytes; see is_torn in log_scan.py
_LONG: Final = Struct(">q")
_CRC_MASKED: Final = bytes(value & CRC_MASK >> 24 for value in range(256))  # of the first byte
_BODY_CRC_AT: Final = 8
_QUEUE_ID_AT: Final = 12
_STORE_TIMESTAMP_AT: Final = 56  # with IPv4 hosts
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()  # its queue entries say when, not which tags


class _Layout(NamedTuple):
    """Where the parts lie that all records of a run have."""

    head: bytes  # size and magic
    body_size: int
    topic_size: int  # with both lengths around it
    tags_at: int  # in the properties, with the separator before them
    tags_size: int  # 0 without tags
    properties_size: int


def _layout_at(chunk: bytes, position: int) -> _Layout | None:
    """Read the layout of the record at a position."""
    size, magic = PREFIX.unpack_from(chunk, position)
    topic_length_size = _TOPIC_LENGTH_SIZE.get(magic)
    if topic_length_size is None:
        return None
    body_at = position + HEAD_V4.size
    body_size = int.from_bytes(chunk[body_at - 4 : body_at], "big", signed=True)
    topic_at = body_at + body_size
    end = position + size
    if body_size < 0 or topic_at + topic_length_size + 2 > end:
        return None
    topic_length = int.from_bytes(chunk[topic_at : topic_at + topic_length_size], "big")
    properties_at = topic_at + topic_length_size + topic_length + 2
    properties_size = int.from_bytes(chunk[properties_at - 2 : properties_at], "big")
    if properties_at + properties_size != end:
        return None
    tags_at = chunk.rfind(b"\x02" + _TAGS, properties_at, end)
    if tags_at < 0 and chunk.startswith(_TAGS, properties_at):
        tags_at = properties_at
    tags_end = chunk.find(b"\x02", tags_at + 1, end) + 1
    if tags_at < 0 or not tags_end:
        tags_at = tags_end = properties_at
    return _Layout(
        chunk[position : position + PREFIX.size],
        body_size,
        properties_at - topic_at,
        tags_at - properties_at,
        tags_end - tags_at,
        properties_size,
    )


class Runs:
    """Finds the runs of one walk over the log."""

    def __init__(self, *, check_crc: bool) -> None:
        self._check_crc = check_crc
        self._longest = RUN_LENGTH_MIN  # what is tried next

    def at(self, chunk: bytes, position: int, offset: int, end: int) -> Portion | None:
        """Return the run that begins at a position, which has the physical offset ``offset``.

        It ends at the physical offset ``end`` at most, and another record begins behind it.
        """
        length = _seeming_length(chunk, position, offset, end, self._longest)
        if not length:
            return None
        layout = _layout_at(chunk, position)
        run = layout and _taken_apart(chunk, position, offset, layout, length, self._check_crc)
        if run is None:
            self._longest = RUN_LENGTH_MIN
        elif length == self._longest < RUN_LENGTH_MAX:
            self._longest *= 2
        return run


def _seeming_length(chunk: bytes, position: int, offset: int, end: int, longest: int) -> int:
    """Return how many records a run may have by a look at three of them; 0 for none."""
    head = chunk[position : position + PREFIX.size]
    if len(head) < PREFIX.size:
        return 0
    size, _ = PREFIX.unpack(head)
    if size < HEAD_V4.size or not chunk.startswith(head, position + size):
        return 0
    room = min(len(chunk) - HEAD_V4.size - position, end - offset)
    if room < RUN_LENGTH_MIN * size:
        return 0
    length = longest
    while length * size > room:
        length //= 2
    behind = position + length * size
    if (
        not chunk.startswith(head, behind - size)
        or _LONG.unpack_from(chunk, behind + PHYSICAL_OFFSET_AT)[0] != offset + length * size
    ):
        return 0
    return length


class _Columns:
    """Fields of records of one size in a row, read by steps of that size."""

    def __init__(self, chunk: bytes, position: int, size: int, length: int) -> None:
        self._chunk, self._position, self._size, self._length = chunk, position, size, length
        self._end = position + size * length

    def are_same(self, at: int, width: int) -> bool:
        """Tell whether these bytes are the same in all records."""
        chunk, size, length = self._chunk, self._size, self._length
        first = self._position + at
        for place in range(first, first + width):
            if chunk[place : self._end : size].count(chunk[place]) != length:
                return False
        return True

    def field(self, at: int, width: int) -> bytearray:
        """Return these bytes of all records, one after the other."""
        content = bytearray(width * self._length)
        first = self._position + at
        for place in range(width):
            content[place::width] = self._chunk[first + place : self._end : self._size]
        return content

    def first(self, at: int, width: int) -> bytes:
        """Return these bytes of the first record."""
        return self._chunk[self._position + at : self._position + at + width]

    def parts(self, at: int, width: int) -> tuple[bytes, ...]:
        """Return these bytes of each record."""
        divide = _divider(at, width, self._size - at - width, self._length)
        return divide.unpack_from(self._chunk, self._position)


@lru_cache(maxsize=_DIVIDERS_MAX)
def _divider(before: int, width: int, behind: int, count: int) -> Struct:
    return Struct(f"{before}x{width}s{behind}x" * count)


def _taken_apart(
    chunk: bytes, position: int, offset: int, layout: _Layout, length: int, check_crc: bool
) -> Portion | None:
    size = int.from_bytes(layout.head[:4], "big")
    columns = _Columns(chunk, position, size, length)
    topic_at = HEAD_V4.size + layout.body_size
    if (
        not columns.are_same(0, PREFIX.size)
        or not columns.are_same(_BODY_LENGTH_AT, 4)
        or not columns.are_same(topic_at, layout.topic_size)
        or columns.field(PHYSICAL_OFFSET_AT, 8) != progression(offset, size, length)
        or (sys_flags := _all_flags(columns)) & _UNUSUAL
        or (check_crc and not _crcs_match(columns, layout.body_size))
        or (codes := _tags_codes(columns, topic_at + layout.topic_size, layout)) is None
    ):
        return None
    topic_start = position + topic_at + _TOPIC_LENGTH_SIZE[PREFIX.unpack(layout.head)[1]]
    topic = chunk[topic_start : position + topic_at + layout.topic_size - 2]
    shares = _shares(offset, size, topic, columns, codes)
    if shares is None or topic == _SCHEDULE_TOPIC:
        return None
    end = offset + size * length
    stored = _LONG.unpack_from(chunk, position + size * (length - 1) + _STORE_TIMESTAMP_AT)[0]
    return Portion(offset, end, end - size, length, sys_flags, stored, shares)


def _all_flags(columns: _Columns) -> int:
    """Return the bits that any record has."""
    if columns.are_same(SYS_FLAG_AT, 4):
        return int.from_bytes(columns.first(SYS_FLAG_AT, 4), "big")
    return reduce(or_, set(_numbers("I", columns.field(SYS_FLAG_AT, 4))))


def _numbers(typecode: str, content: bytes | bytearray) -> "array[int]":
    """Return big-endian numbers as such."""
    numbers = array(typecode, content)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def _crcs_match(columns: _Columns, body_size: int) -> bool:
    crcs = array("I", map(crc32, columns.parts(HEAD_V4.size, body_size)))
    if sys.byteorder == "little":
        crcs.byteswap()
    expected = bytearray(crcs.tobytes())
    expected[::4] = expected[::4].translate(_CRC_MASKED)
    return expected == columns.field(_BODY_CRC_AT, 4)


def _tags_codes(columns: _Columns, properties_at: int, layout: _Layout) -> list[int] | None:
    """Return the tags codes of a run, or one for all; None if its properties need a closer look."""
    # Later tags would win, a CRC must be checked, and zeros may be a sector never written. Where
    # two meet, there may seem to be some: then it is looked for from record to record, in vain.
    tags_at, tags_size = properties_at + layout.tags_at, layout.tags_size
    tail_size = layout.properties_size - layout.tags_at - tags_size
    joined = b"".join(columns.parts(tags_at + tags_size, tail_size))
    if _TAGS in joined or CRC_TAIL_START in joined or b"\0" in joined:
        return None
    if layout.properties_size >= _SECTOR:
        return None  # such a sector may lie within
    if not tags_size:
        return [0]
    if columns.are_same(tags_at, tags_size):
        fields: Sequence[bytes] = (columns.first(tags_at, tags_size),)
    else:
        fields = columns.parts(tags_at, tags_size)
    start = (b"\x02" if layout.tags_at else b"") + _TAGS
    codes: dict[bytes, int] = {}
    for field in set(fields):
        if not field.startswith(start) or field.find(b"\x02", 1) != len(field) - 1:
            return None
        codes[field] = tags_code(field[len(start) - len(_TAGS) :])
    return [codes[field] for field in fields]


# Shares ----------------------------------------------------------------------------------------


def _shares(
    start: int, size: int, topic: bytes, columns: _Columns, codes: list[int]
) -> list[Share] | None:
    """Return the shares of a run at physical offset ``start``; None if a queue has an odd one."""
    ids = _numbers("i", columns.field(_QUEUE_ID_AT, 4))
    offsets = columns.field(QUEUE_OFFSET_AT, 8)
    length = len(ids)
    entries = _divider(0, ENTRY_SIZE, 0, length).unpack(_entries(start, size, codes, length))
    count = len(set(ids))
    shares: list[Share] = []
    if ids[count:] == ids[:-count]:  # in turn, as most programs send
        if not _grow_in_turn(offsets, count):
            return None
        for place in range(count):
            (first,) = _LONG.unpack_from(offsets, 8 * place)
            end = start + size * (length - (length - 1 - place) % count)
            shares.append(((topic, ids[place]), first, b"".join(entries[place::count]), end))
        return shares
    queue_offsets = _numbers("q", offsets)
    places: dict[int, list[int]] = {}
    for place, queue_id in enumerate(ids):
        places.setdefault(queue_id, []).append(place)
    for queue_id, its in places.items():
        first = queue_offsets[its[0]]
        if [*map(queue_offsets.__getitem__, its)] != [*range(first, first + len(its))]:
            return None
        its_entries = b"".join(map(entries.__getitem__, its))
        shares.append(((topic, queue_id), first, its_entries, start + size * (its[-1] + 1)))
    return shares


def _grow_in_turn(offsets: bytearray, count: int) -> bool:
    """Tell whether each queue offset is the one ``count`` places before it, and one."""
    split = 8 * count
    if any(first & 0x80 for first in offsets[:split:8]):
        return False  # negative, so that the sum below would say nothing
    before, behind = (int.from_bytes(part, "big") for part in (offsets[:-split], offsets[split:]))
    return behind == before + ones(len(offsets) // 8 - count)


def _entries(start: int, size: int, codes: list[int], length: int) -> bytes | bytearray:
    """Return the queue entries of records of one size that follow each other."""
    numbers = start * _offset_ones(length) + _entries_from_zero(size, codes[0], length)
    entries = numbers.to_bytes(ENTRY_SIZE * length, "big")
    if len(codes) == 1:
        return entries
    changed = bytearray(entries)
    column = _numbers("q", array("q", codes).tobytes()).tobytes()
    for place in range(8):
        changed[ENTRY_SIZE - 8 + place :: ENTRY_SIZE] = column[place::8]
    return changed


# As one long number each, with entries for digits: see ``columns.progression``.


@lru_cache(maxsize=_LAYOUTS_MAX)
def _offset_ones(length: int) -> int:
    return int.from_bytes(LAYOUT.pack(1, 0, 0) * length, "big")


@lru_cache(maxsize=_LAYOUTS_MAX)
def _entries_from_zero(size: int, code: int, length: int) -> int:
    content = b"".join(LAYOUT.pack(size * number, size, code) for number in range(length))
    return int.from_bytes(content, "big")
