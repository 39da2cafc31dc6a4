"""Index files: hash tables on disk from ``topic#key`` to the records that carry the key.

A file is a header, an array of slots, and an array of items. An item's slot is its key hash
modulo the number of slots. The slot holds the number of its newest item, and each item the
number of the one before it in the same slot, so that a look-up walks from new to old. Item 0
is never used, because 0 means "none". Keys themselves are not stored: two keys with one hash are
distinguished only by reading the record.

An item's time is kept in whole seconds after the header's begin timestamp.

Source: RocketMQ ``IndexFile.java``, ``IndexHeader.java``, ``IndexService.java``.
"""

import time
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .flags import TRANSACTION_MASK, TransactionType
from .ids import java_string_hash
from .properties import KEY_SEPARATOR, PROPERTY_SEPARATOR, get_property

HEADER: Final = Struct(">qqqqii")
SLOT: Final = Struct(">i")
ITEM: Final = Struct(">iqii")
HEADER_SIZE: Final = HEADER.size
SLOT_SIZE: Final = SLOT.size
ITEM_SIZE: Final = ITEM.size
# INDEX_HEADER_SIZE, hashSlotSize, indexSize
assert (HEADER_SIZE, SLOT_SIZE, ITEM_SIZE) == (40, 4, 20)

FIRST_ITEM: Final = 1
_NAME_LENGTH: Final = 17
_KEY_SEPARATOR: Final = KEY_SEPARATOR.encode()
_SEPARATOR: Final = PROPERTY_SEPARATOR[0]
_UNIQUE_KEY: Final = b"UNIQ_KEY\x01"
_KEYS: Final = b"KEYS\x01"
SECONDS_MAX: Final = 0x7FFF_FFFF
_ROLLBACK: Final = int(TransactionType.ROLLBACK)  # comparing with a plain int is faster

# Slots and items as columns of a whole file.
SLOTS: Final = np.dtype(">i4")
ITEMS: Final = np.dtype(
    [("key_hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
)
assert (SLOTS.itemsize, ITEMS.itemsize) == (SLOT_SIZE, ITEM_SIZE)

# Most bytes of text hashed in one call, which takes up to 20 bytes of memory each. The longest
# topic and key fit: the lengths of topic and properties are int16.
HASHED_AT_ONCE: Final = 1 << 16


def _powers(base: int) -> NDArray[np.uint32]:
    """Return the powers of a number modulo 2**32, from its power of 0 on."""
    factors = np.full(HASHED_AT_ONCE, base, np.uint32)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint32)


_POWERS: Final = _powers(31)
_INVERSES: Final = _powers(pow(31, -1, 1 << 32))


class IndexHeader(NamedTuple):
    """The first 40 bytes of an index file."""

    begin_timestamp: int = 0  # ms, store timestamp of the first item
    end_timestamp: int = 0  # ms, of the last item
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    slot_count: int = 0  # slots in use
    next_item: int = FIRST_ITEM  # number of the first free item; what RocketMQ calls indexCount

    def pack(self) -> bytes:
        return HEADER.pack(*self)


class IndexItem(NamedTuple):
    """One key of one record."""

    key_hash: int  # 0 .. 2**31 - 1
    physical_offset: int
    seconds: int  # after the file's begin timestamp
    previous: int  # number of the next older item in the same slot; 0 for none

    def pack(self) -> bytes:
        return ITEM.pack(*self)


def unpack_header(buffer: bytes | memoryview) -> IndexHeader:
    """Read the header at the start of a file; RocketMQ takes a count of 0 or less for 1."""
    header = IndexHeader._make(HEADER.unpack_from(buffer))
    return header if header.next_item >= FIRST_ITEM else header._replace(next_item=FIRST_ITEM)


def unpack_item(buffer: bytes | memoryview, position: int = 0) -> IndexItem:
    """Read the item at a byte position."""
    return IndexItem._make(ITEM.unpack_from(buffer, position))


def slot_position(slot: int) -> int:
    """Return the file position of a slot."""
    return HEADER_SIZE + SLOT_SIZE * slot


def item_position(number: int, slots: int) -> int:
    """Return the file position of an item in a file with so many slots."""
    return HEADER_SIZE + SLOT_SIZE * slots + ITEM_SIZE * number


def index_file_size(slots: int, items: int) -> int:
    """Return the size of an index file; 420 000 040 bytes by default."""
    return item_position(items, slots)


def index_file_name(now_ms: int, *, after: str = "") -> str:
    """Name a new file by local time, yyyyMMddHHmmssSSS, so that it sorts after another.

    If both are created within a millisecond, or the clock steps back, it is the next number.
    """
    name = time.strftime("%Y%m%d%H%M%S", time.localtime(now_ms // 1000)) + f"{now_ms % 1000:03d}"
    return name if name > after else f"{int(after) + 1:0{_NAME_LENGTH}d}"


def is_index_file_name(name: str) -> bool:
    """Return whether a name is that of an index file, and not of a file set aside."""
    return len(name) == _NAME_LENGTH and name.isascii() and name.isdecimal()


def index_key(topic: str, key: str) -> str:
    """Return the text that is hashed for a key."""
    return f"{topic}#{key}"


def index_key_hash(key: str) -> int:
    """Hash the text that ``index_key`` returns, to 0 .. 2**31 - 1."""
    return _absolute(java_string_hash(key))


def _absolute(value: int) -> int:
    """Return |value|; for -2**31, whose absolute value is no Java int, RocketMQ uses 0."""
    return abs(value) if value != -0x8000_0000 else 0


def seconds_after(begin_timestamp: int, store_timestamps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the times that items store, with RocketMQ's clamps; both arguments in ms."""
    if begin_timestamp <= 0:
        return np.zeros_like(store_timestamps)
    seconds = (store_timestamps - begin_timestamp) // 1000
    return np.minimum(np.maximum(seconds, 0), SECONDS_MAX)  # half the time of ``clip``


def index_keys(properties: bytes) -> list[bytes]:
    """Return the keys under which a record is found: its unique key, then each of its KEYS.

    A key that stands twice in KEYS is indexed twice, as RocketMQ does.
    """
    # Inlined, because calls would take half of the time. ``get_property`` handles the rare cases:
    # a longer name with the same end, or an empty value.
    keys: list[bytes] = []
    before, found, rest = properties.rpartition(_UNIQUE_KEY)
    if found:
        key: bytes | None = rest.partition(PROPERTY_SEPARATOR)[0]
        if not key or (before and before[-1] != _SEPARATOR):
            key = get_property(properties, b"UNIQ_KEY")
        if key:
            keys.append(key)
    before, found, rest = properties.rpartition(_KEYS)
    if found:
        named: bytes | None = rest.partition(PROPERTY_SEPARATOR)[0]
        if not named or (before and before[-1] != _SEPARATOR):
            named = get_property(properties, b"KEYS")
        if named:
            keys += filter(None, named.split(_KEY_SEPARATOR))
    return keys


# What the index needs of one record: topic, properties, physical offset, store timestamp (ms) and
# sys_flag. A plain tuple, because one is made per message.
KeyedRecord = tuple[str, bytes, int, int, int]


class HashedKeys(NamedTuple):
    """Keys of records in log order, as columns of equal length."""

    hashes: NDArray[np.int32]
    physical_offsets: NDArray[np.int64]
    store_timestamps: NDArray[np.int64]  # ms

    def part(self, start: int, end: int) -> "HashedKeys":
        """Return the keys from one position to another."""
        return HashedKeys(
            self.hashes[start:end],
            self.physical_offsets[start:end],
            self.store_timestamps[start:end],
        )


def hashed_keys(records: Iterable[KeyedRecord], *, after: int) -> HashedKeys:
    """Return the hashed keys of records in log order, of those that lie after offset ``after``.

    Rollback records are not indexed. A record that does not lie after the previous one is skipped
    as a repetition: the log may be replayed from any older position.
    """
    texts: list[bytes] = []
    physical_offsets: list[int] = []
    store_timestamps: list[int] = []
    previous_topic, beginning = None, b""
    for topic, properties, physical_offset, store_timestamp, sys_flag in records:
        if physical_offset <= after or sys_flag & TRANSACTION_MASK == _ROLLBACK:
            continue
        after = physical_offset
        if topic is not previous_topic:
            previous_topic, beginning = topic, index_key(topic, "").encode()
        for key in index_keys(properties):
            texts.append(beginning + key)
            physical_offsets.append(physical_offset)
            store_timestamps.append(store_timestamp)
    return HashedKeys(
        index_key_hashes(texts),
        np.array(physical_offsets, np.int64),
        np.array(store_timestamps, np.int64),
    )


def index_key_hashes(texts: Sequence[bytes]) -> NDArray[np.int32]:
    """Return ``index_key_hash`` of many texts in UTF-8, none of which is empty.

    A hash is the sum of all characters times powers of 31. Here each character is first multiplied
    with the inverse of a power, by its place among all texts (31 is odd, so that modulo 2**32 it
    has one); then each text's sum is multiplied with the power that makes its last factor 1.
    """
    joined = b"".join(texts)
    if len(joined) > HASHED_AT_ONCE:
        half = len(texts) // 2
        return np.concatenate((index_key_hashes(texts[:half]), index_key_hashes(texts[half:])))
    units: NDArray[np.uint8 | np.uint16] = np.frombuffer(joined, np.uint8)
    if not joined.isascii():
        texts = [text.decode(errors="replace").encode("utf-16-le") for text in texts]
        units = np.frombuffer(b"".join(texts), "<u2")
    lengths = np.fromiter(map(len, texts), np.int64, len(texts)) // units.itemsize
    ends = lengths.cumsum()
    sums = np.add.reduceat(units * _INVERSES[: len(units)], ends - lengths, dtype=np.uint32)
    hashes: NDArray[np.int32] = (sums * _POWERS[ends - 1]).view(np.int32)
    return np.maximum(np.abs(hashes), 0)  # -2**31 has no absolute value
