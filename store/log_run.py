"""Records of one layout in a row, taken apart in columns.

Most logs hold long runs of records that have the same size, topic and lengths. ``Runs`` takes up to
``RUN_LENGTH_MAX`` of them apart with one call and checks each field of all of them with one more:
half of what the walk from record to record takes, CRCs included. Whatever is unusual about one of
them, it says that there is no run, and ``find_records`` looks. How much is tried doubles with each
run found, so that little is taken apart in vain.
"""

from functools import lru_cache, reduce
from operator import or_
from struct import Struct
from typing import Final, NamedTuple

from .format.crc import crc32
from .format.filler import FILLER_BIT
from .format.flags import HOSTS_MASK, INNER_BATCH, TransactionType
from .format.properties import tags_code
from .format.record import (
    CRC_MASK,
    CRC_TAIL_START,
    HEAD_V4,
    MAGIC_V1,
    MAGIC_V2,
    PHYSICAL_OFFSET_AT,
    PREFIX,
)

RUN_LENGTH_MIN: Final = 64  # records; fewer are found faster one by one
# A start takes a third less than with 64; a mebibyte is scanned at once, and has no more of 2 KB.
RUN_LENGTH_MAX: Final = 512
_LAYOUTS_MAX: Final = 64  # layouts kept, each of 30 to 240 KB
_PREPARED: Final = int(TransactionType.PREPARED)  # in prepared and rollback records
_UNUSUAL: Final = _PREPARED | HOSTS_MASK | INNER_BATCH | FILLER_BIT
_BODY_LENGTH_AT: Final = HEAD_V4.size - 4
_TOPIC_LENGTH_SIZE: Final = {MAGIC_V1: 1, MAGIC_V2: 2}
_TAGS: Final = b"TAGS\x01"
_SECTOR: Final = 512  # bytes; see is_torn in log_scan.py
_LONG: Final = Struct(">q")
# Size and magic, CRC, queue id, queue offset, physical offset, flags, body length, body, topic with
# both lengths around it, tags, and the properties behind them.
_FIELDS: Final = 11


class Run(NamedTuple):
    """Columns of whole records that follow each other."""

    at: int  # position of the first in its chunk
    size: int  # bytes of each
    topic: bytes  # of all
    sys_flags: int  # bits that any of them has
    queue_ids: tuple[int, ...]
    queue_offsets: tuple[int, ...]
    tags_codes: list[int]

    @property
    def length(self) -> int:
        """How many records it has."""
        return len(self.queue_ids)


class _Layout(NamedTuple):
    """Where the parts lie that all records of a run have."""

    head: bytes  # size and magic
    body_size: int
    topic_size: int  # with both lengths around it
    tags_at: int  # in the properties, with the separator before them
    tags_size: int  # 0 without tags
    properties_size: int


@lru_cache(maxsize=_LAYOUTS_MAX)
def _columns(layout: _Layout, length: int) -> Struct:
    """Return what takes a run of a length apart: ``_FIELDS`` values for each record."""
    tail_size = layout.properties_size - layout.tags_at - layout.tags_size
    return Struct(
        ">"
        + (
            f"8sIi4xqqi44x4s{layout.body_size}s{layout.topic_size}s"
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


def _taken_apart(
    chunk: bytes, position: int, offset: int, layout: _Layout, length: int, check_crc: bool
) -> Run | None:
    size = int.from_bytes(layout.head[:4], "big")
    fields = _columns(layout, length).unpack_from(chunk, position)
    topics = fields[8::_FIELDS]
    flags = fields[5::_FIELDS]
    body_at = position + HEAD_V4.size
    topic_at = body_at + layout.body_size
    if (
        fields[::_FIELDS].count(layout.head) != length
        or fields[4::_FIELDS] != tuple(range(offset, offset + length * size, size))
        or fields[6::_FIELDS].count(chunk[body_at - 4 : body_at]) != length
        or topics.count(chunk[topic_at : topic_at + layout.topic_size]) != length
        or (sys_flags := reduce(or_, set(flags))) & _UNUSUAL
    ):
        return None
    if check_crc and [crc & CRC_MASK for crc in map(crc32, fields[7::_FIELDS])] != list(
        fields[1::_FIELDS]
    ):
        return None
    codes = _tags_codes(fields[9::_FIELDS], fields[10::_FIELDS], layout)
    if codes is None:
        return None
    topic_start = topic_at + _TOPIC_LENGTH_SIZE[PREFIX.unpack(layout.head)[1]]
    topic = chunk[topic_start : topic_at + layout.topic_size - 2]
    return Run(position, size, topic, sys_flags, fields[2::_FIELDS], fields[3::_FIELDS], codes)


def _tags_codes(
    tags: tuple[bytes, ...], tails: tuple[bytes, ...], layout: _Layout
) -> list[int] | None:
    """Return the tags codes of a run; None if its properties need a closer look."""
    for tail in set(tails):
        # Later tags would win, a CRC must be checked, and zeros may be a sector never written.
        if _TAGS in tail or CRC_TAIL_START in tail or tail.endswith(b"\0"):
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
