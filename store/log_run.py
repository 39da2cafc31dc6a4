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
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import itemgetter, or_
from struct import Struct
from typing import Any, Final, NamedTuple, TypeAlias

from .format.columns import halves, packed, repeated
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

RUN_LENGTH_MIN: Final = 64  # records; fewer are found faster one by one
RUN_LENGTH_MAX: Final = 512  # of 2 KB; a mebibyte, which is scanned at once, has no more
_LAYOUTS_MAX: Final = 64  # layouts kept, each of 6 to 50 KB
_PREPARED: Final = int(TransactionType.PREPARED)  # in prepared and rollback records
_UNUSUAL: Final = _PREPARED | HOSTS_MASK | INNER_BATCH | FILLER_BIT
_BODY_LENGTH_AT: Final = HEAD_V4.size - 4
_TOPIC_LENGTH_SIZE: Final = {MAGIC_V1: 1, MAGIC_V2: 2}
_TAGS: Final = b"TAGS\x01"
_SECTOR: Final = 512  # bytes; see is_torn in log_scan.py
_LONG: Final = Struct(">q")
_BODY_CRC_AT: Final = 8
_QUEUE_ID_AT: Final = 12
_STORE_TIMESTAMP_AT: Final = 56  # with IPv4 hosts
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()  # its queue entries say when, not which tags
_Taker: TypeAlias = Callable[[Sequence[Any]], Any]

Share: TypeAlias = tuple[int, int, bytes, int]
"""What a run has of one queue: its id, the queue offset of the first record, their queue entries
and the physical offset behind the last one. Queue offsets follow each other."""


class Run(NamedTuple):
    """Whole records that follow each other, and their places in queues."""

    at: int  # position of the first in its chunk
    size: int  # bytes of each
    length: int  # records
    topic: bytes  # of all
    sys_flags: int  # bits that any of them has
    store_timestamp: int  # of the last one, in ms
    shares: list[Share]


class _Layout(NamedTuple):
    """Where the parts lie that all records of a run have."""

    head: bytes  # size and magic
    body_size: int
    topic_size: int  # with both lengths around it
    tags_at: int  # in the properties, with the separator before them
    tags_size: int  # 0 without tags
    properties_size: int


@lru_cache(maxsize=_LAYOUTS_MAX)
def _parts(layout: _Layout, length: int) -> Struct:
    """Return what gives bodies, tags and the properties behind them, of so many records."""
    tail_size = layout.properties_size - layout.tags_at - layout.tags_size
    return Struct(
        (
            f"{HEAD_V4.size}x{layout.body_size}s{layout.topic_size}x"
            f"{layout.tags_at}x{layout.tags_size}s{tail_size}s"
        )
        * length
    )


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

    def at(self, chunk: bytes, position: int, offset: int, end: int) -> Run | None:
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

    def numbers(self, at: int, typecode: str) -> "array[int]":
        """Return a field of all records, a big-endian number."""
        column = array(typecode)
        width = column.itemsize
        content = bytearray(width * self._length)
        first = self._position + at
        for place in range(width):
            content[place::width] = self._chunk[first + place : self._end : self._size]
        column.frombytes(content)
        if sys.byteorder == "little":
            column.byteswap()
        return column


def _taken_apart(
    chunk: bytes, position: int, offset: int, layout: _Layout, length: int, check_crc: bool
) -> Run | None:
    size = int.from_bytes(layout.head[:4], "big")
    columns = _Columns(chunk, position, size, length)
    topic_at = HEAD_V4.size + layout.body_size
    physical = array("q", range(offset, offset + length * size, size))
    if (
        not columns.are_same(0, PREFIX.size)
        or not columns.are_same(_BODY_LENGTH_AT, 4)
        or not columns.are_same(topic_at, layout.topic_size)
        or columns.numbers(PHYSICAL_OFFSET_AT, "q").tobytes() != physical.tobytes()
        or (sys_flags := reduce(or_, set(columns.numbers(SYS_FLAG_AT, "i")))) & _UNUSUAL
    ):
        return None
    parts = _parts(layout, length).unpack_from(chunk, position)
    if check_crc:
        crcs = array("I", [crc & CRC_MASK for crc in map(crc32, parts[::3])])
        if crcs.tobytes() != columns.numbers(_BODY_CRC_AT, "I").tobytes():
            return None
    codes = _tags_codes(parts[1::3], parts[2::3], layout)
    if codes is None:
        return None
    queue_ids = tuple(columns.numbers(_QUEUE_ID_AT, "i"))
    queue_offsets = tuple(columns.numbers(QUEUE_OFFSET_AT, "q"))
    shares = _shares(offset, size, queue_ids, queue_offsets, codes)
    topic_start = position + topic_at + _TOPIC_LENGTH_SIZE[PREFIX.unpack(layout.head)[1]]
    topic = chunk[topic_start : position + topic_at + layout.topic_size - 2]
    if shares is None or topic == _SCHEDULE_TOPIC:
        return None
    stored = _LONG.unpack_from(chunk, position + size * (length - 1) + _STORE_TIMESTAMP_AT)[0]
    return Run(position, size, length, topic, sys_flags, stored, shares)


def _tags_codes(
    tags: tuple[bytes, ...], tails: tuple[bytes, ...], layout: _Layout
) -> list[int] | None:
    """Return the tags codes of a run; None if its properties need a closer look."""
    # Later tags would win, a CRC must be checked, and zeros may be a sector never written. Where
    # two meet, there may seem to be some: then it is looked for from record to record, in vain.
    joined = b"".join(tails)
    if _TAGS in joined or CRC_TAIL_START in joined or b"\0" in joined:
        return None
    if layout.properties_size >= _SECTOR:
        return None  # such a sector may lie within
    if not layout.tags_size:
        return [0] * len(tags)
    start = (b"\x02" if layout.tags_at else b"") + _TAGS
    codes: dict[bytes, int] = {}
    for field in set(tags):
        if not field.startswith(start) or field.find(b"\x02", 1) != len(field) - 1:
            return None
        codes[field] = tags_code(field[len(start) - len(_TAGS) :])
    return [codes[field] for field in tags]


# Shares ----------------------------------------------------------------------------------------


def _shares(
    start: int,
    size: int,
    queue_ids: tuple[int, ...],
    queue_offsets: tuple[int, ...],
    codes: list[int],
) -> list[Share] | None:
    """Return the shares of a run at physical offset ``start``; None if a queue has an odd one."""
    entries = _entries(start, size, codes)
    ends = range(start + size, start + size * len(codes) + 1, size)
    shares: list[Share] = []
    for queue_id, share in _takers(queue_ids):
        offsets = share(queue_offsets)
        first = offsets[0]
        if offsets != (*range(first, first + len(offsets)),):
            return None
        shares.append((queue_id, first, b"".join(share(entries)), share(ends)[-1]))
    return shares


def _takers(queue_ids: tuple[int, ...]) -> list[tuple[int, _Taker]]:
    """Return for each queue what takes its part of a run's column."""
    count = len(set(queue_ids))
    if queue_ids[count:] == queue_ids[:-count]:  # in turn, as most programs send
        return [(queue_ids[first], _every(first, count)) for first in range(count)]
    places: dict[int, list[int]] = {}
    for index, queue_id in enumerate(queue_ids):
        places.setdefault(queue_id, []).append(index)
    return [
        (queue_id, itemgetter(*indexes) if len(indexes) > 1 else _every(indexes[0], len(queue_ids)))
        for queue_id, indexes in places.items()
    ]


@lru_cache(maxsize=RUN_LENGTH_MAX)
def _every(first: int, step: int) -> _Taker:
    return itemgetter(slice(first, None, step))


def _entries(start: int, size: int, codes: list[int]) -> tuple[bytes, ...]:
    """Return the queue entries of records of one size that follow each other."""
    length = len(codes)
    columns = repeated(LAYOUT.pack(0, size, codes[0]), length)
    columns[0::5], columns[1::5] = halves(range(start, start + length * size, size))
    if codes.count(codes[0]) != length:
        columns[3::5], columns[4::5] = halves(codes)
    return _divider(length).unpack(packed(columns))


@lru_cache(maxsize=8)
def _divider(count: int) -> Struct:
    return Struct(f"{ENTRY_SIZE}s" * count)
