"""The records of a batch and their queue entries, made together.

The records of messages that are alike differ in CRC, offsets, body and one piece of the properties.
Only that is made for each of them; what lies between is the same bytes each time.
"""

import struct
from array import array
from functools import lru_cache
from typing import Final, NamedTuple

from .consume_queue import ConsumeQueue
from .draft import AlikeUnits, Batch, Units
from .format.columns import packed, progression
from .format.crc import crc32
from .format.queue_entry import LAYOUT
from .format.record import BATCH_HEAD_V4, CRC_MASK, HEAD_V4, SHARED_V4

_LENGTH: Final = struct.Struct(">h")  # of the properties
# What differs in the heads of a batch, from the CRC to the physical offset, in words of 4 bytes.
_DIFFERENT: Final = slice(8, 36)
_DIFFERENT_SIZE: Final = _DIFFERENT.stop - _DIFFERENT.start
_DIFFERENT_WORDS: Final = _DIFFERENT_SIZE // 4
_QUEUE_OFFSET, _PHYSICAL_OFFSET = 3, 5  # their first words; the CRC comes first of all
_ENTRY_WORDS: Final = LAYOUT.size // 4
_LAYOUTS_CACHED_MAX: Final = 64  # 2 MiB of the largest


class Sizes(NamedTuple):
    """How long the parts of messages are, in bytes."""

    bodies: list[int]
    properties: list[int]
    times: int  # how often there are such messages


def sizes_of(units: Units | AlikeUnits) -> Sizes:
    """Measure the messages of a batch."""
    if isinstance(units, AlikeUnits):
        return Sizes([len(units.bodies[0])], [units.properties_size], len(units.bodies))
    return Sizes([*map(len, units.bodies)], [*map(len, units.properties)], 1)


class Layout(NamedTuple):
    """What a batch is in the files, from a physical offset on."""

    records: list[bytes]  # in pieces that follow each other
    entries: bytes
    offsets: "array[int]"  # physical ones, of each message, int64
    end: int


def lay_out(batch: Batch, sizes: Sizes, queue: ConsumeQueue, start: int, now: int) -> Layout:
    """Return records that begin at a physical offset, and entries for the end of their queue.

    Hosts are IPv4 addresses, and neither batch nor queue asks for anything unusual.
    """
    if isinstance(batch.units, AlikeUnits):
        return _by_columns(batch, batch.units, queue, start, now)
    return _one_by_one(batch, batch.units, sizes, queue, start, now)


def _by_columns(
    batch: Batch, units: AlikeUnits, queue: ConsumeQueue, start: int, now: int
) -> Layout:
    count, body_size = len(units.bodies), len(units.bodies[0])
    properties_size = units.properties_size
    size = queue.overhead + body_size + properties_size
    offsets = progression(start, size, count)
    offset_words = array("i", offsets)
    head = HEAD_V4.pack(
        size, queue.magic, 0, batch.queue_id, units.flag, 0, 0, batch.sys_flag,
        batch.born_timestamp, batch.born_host, now, batch.store_host, batch.reconsume_times, 0,
        body_size,
    )  # fmt: skip
    beginning, before_body = head[: _DIFFERENT.start], head[_DIFFERENT.stop :]
    behind_body = queue.topic_field + _LENGTH.pack(properties_size) + units.head
    parts = [units.tail + beginning, b"", before_body, b"", behind_body, b""] * count
    parts[0] = beginning  # of the first record no other one is before
    parts[1::6] = _different(head, units, offset_words, queue.next_offset)
    parts[3::6] = units.bodies
    parts[5::6] = units.middles
    parts.append(units.tail)
    entries = array("i", LAYOUT.pack(0, size, units.tags_code)) * count
    entries[0::_ENTRY_WORDS], entries[1::_ENTRY_WORDS] = offset_words[0::2], offset_words[1::2]
    numbers = array("q", packed(array("q", offsets)))
    return Layout(parts, entries.tobytes(), numbers, start + size * count)


def _different(
    head: bytes, units: AlikeUnits, offsets: "array[int]", queue_offset: int
) -> tuple[bytes, ...]:
    """Return what differs in the heads of records, which lie at the physical ``offsets``.

    These are in words of 4 bytes in the order of the file, as all words here.
    """
    count = len(units.bodies)
    words = array("i", head[_DIFFERENT]) * count
    crcs = packed(array("i", [crc & CRC_MASK for crc in map(crc32, units.bodies)]))
    words[0::_DIFFERENT_WORDS] = array("i", crcs)
    queue_offsets = array("i", progression(queue_offset, 1, count))
    for place, column in ((_QUEUE_OFFSET, queue_offsets), (_PHYSICAL_OFFSET, offsets)):
        words[place::_DIFFERENT_WORDS] = column[0::2]
        words[place + 1 :: _DIFFERENT_WORDS] = column[1::2]
    return _pieces(count).unpack(words)


@lru_cache(maxsize=_LAYOUTS_CACHED_MAX)
def _pieces(count: int) -> struct.Struct:
    return struct.Struct(f"{_DIFFERENT_SIZE}s" * count)


def _one_by_one(
    batch: Batch, units: Units, sizes: Sizes, queue: ConsumeQueue, start: int, now: int
) -> Layout:
    overhead, topic_field, magic = queue.overhead, queue.topic_field, queue.magic
    queue_id, queue_offset, offset = batch.queue_id, queue.next_offset, start
    shared = SHARED_V4.pack(
        batch.sys_flag, batch.born_timestamp, batch.born_host, now, batch.store_host,
        batch.reconsume_times, 0,
    )  # fmt: skip
    pack_head, pack_length = BATCH_HEAD_V4.pack, _LENGTH.pack
    parts: list[bytes] = []
    offsets: list[int] = []
    entries: list[int] = []
    columns = zip(
        units.flags,
        units.bodies,
        units.properties,
        units.tags_codes,
        sizes.bodies,
        sizes.properties,
        strict=True,
    )
    for flag, body, properties, tags_code, body_size, properties_size in columns:
        size = overhead + body_size + properties_size
        head = pack_head(
            size, magic, crc32(body) & CRC_MASK, queue_id, flag, queue_offset, offset, shared,
            body_size,
        )  # fmt: skip
        parts += (head, body, topic_field + pack_length(properties_size), properties)
        offsets.append(offset)
        entries += (offset, size, tags_code)
        queue_offset += 1
        offset += size
    packed_entries = struct.pack(">" + "qiq" * len(offsets), *entries)
    return Layout(parts, packed_entries, array("q", offsets), offset)
