"""Index files: hash tables on disk from ``topic#key`` to the records that carry the key.

A file is a header, an array of slots, and an array of items. An item's slot is its key hash
modulo the number of slots. The slot holds the number of its newest item, and each item the
number of the one before it in the same slot, so that a look-up walks from new to old. Item 0
is never used, because 0 means "none". Keys themselves are not stored: two keys with one hash are
told apart only by reading the record.

An item's time is kept in whole seconds after the header's begin timestamp.

Source: RocketMQ ``IndexFile.java``, ``IndexHeader.java``, ``IndexService.java``.
"""

import struct
import time
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final, NamedTuple

from .flags import TRANSACTION_MASK, TransactionType
from .ids import java_string_hash
from .properties import KEY_SEPARATOR, get_property

HEADER: Final = Struct(">qqqqii")
SLOT: Final = Struct(">i")
ITEM: Final = Struct(">iqii")
HEADER_SIZE: Final = HEADER.size
SLOT_SIZE: Final = SLOT.size
ITEM_SIZE: Final = ITEM.size
assert (HEADER_SIZE, SLOT_SIZE, ITEM_SIZE) == (
    40,
    4,
    20,
)  # INDEX_HEADER_SIZE, hashSlotSize, indexSize

FIRST_ITEM: Final = 1
_NAME_LENGTH: Final = 17
SECONDS_MAX: Final = 0x7FFF_FFFF
_ROLLBACK: Final = int(TransactionType.ROLLBACK)  # comparing with a plain int is faster

_TOPICS_CACHED_MAX: Final = 4096  # topics whose hash is kept, about 250 bytes each
_CLIENTS_CACHED_MAX: Final = 16_384  # heads of unique keys whose hash is kept, about 150 bytes each
_UNIQUE_KEY_SIZE: Final = 32  # characters of an IPv4 client's key
_CLIENT_SIZE: Final = 20  # its characters that stay: address, process id, token
_BEHIND_TOPIC: Final = int(31**_UNIQUE_KEY_SIZE) & 0xFFFF_FFFF
_TAIL_SIZE: Final = _UNIQUE_KEY_SIZE - _CLIENT_SIZE  # the others: time and counter
_BEHIND_CLIENT: Final = int(31**_TAIL_SIZE) & 0xFFFF_FFFF
_NO_TAIL: Final = bytes(_TAIL_SIZE)
_ONE: Final = (1).to_bytes(8, "little")  # in a lane of `_tail_hashes`


class IndexHeader(NamedTuple):
    """The first 40 bytes of an index file."""

    begin_timestamp: int = 0  # ms, store timestamp of the first item
    end_timestamp: int = 0  # ms, of the last item
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    slot_count: int = 0  # slots in use
    next_item: int = FIRST_ITEM  # number of the first free item; what RocketMQ calls indexCount

    def pack(self) -> bytes:
        """Return the 40 bytes of the file."""
        return HEADER.pack(*self)


class IndexItem(NamedTuple):
    """One key of one record."""

    key_hash: int  # 0 .. 2**31 - 1
    physical_offset: int
    seconds: int  # after the file's begin timestamp
    previous: int  # number of the next older item in the same slot; 0 for none

    def pack(self) -> bytes:
        """Return the 20 bytes of the file."""
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


def index_file_name(now_ms: int, *, behind: str = "") -> str:
    """Name a new file by local time, yyyyMMddHHmmssSSS, so that it sorts behind another.

    Two may be made within one millisecond, and the clock may step back; then the name counts on.
    """
    name = time.strftime("%Y%m%d%H%M%S", time.localtime(now_ms // 1000)) + f"{now_ms % 1000:03d}"
    return name if name > behind else f"{int(behind) + 1:0{_NAME_LENGTH}d}"


def is_index_file_name(name: str) -> bool:
    """Tell index files from what else lies beside them, such as a file set aside."""
    return len(name) == _NAME_LENGTH and name.isascii() and name.isdecimal()


def index_key(topic: str, key: str) -> str:
    """Return the text that is hashed for a key."""
    return f"{topic}#{key}"


def index_key_hash(key: str) -> int:
    """Hash the text that ``index_key`` returns, to 0 .. 2**31 - 1."""
    return _absolute(java_string_hash(key))


def _absolute(value: int) -> int:
    """Return |value|; Java has no positive twin of -2**31 in an int, and RocketMQ takes 0."""
    return abs(value) if value != -0x8000_0000 else 0


def seconds_after(begin_timestamp: int, store_timestamp: int) -> int:
    """Return the time an item stores, with RocketMQ's clamps; both arguments in ms."""
    if begin_timestamp <= 0:
        return 0
    return min(max((store_timestamp - begin_timestamp) // 1000, 0), SECONDS_MAX)


def index_keys(properties: bytes) -> list[bytes]:
    """Return the keys under which a record is found: its unique key, then each of its KEYS.

    A key that stands twice in KEYS is indexed twice, as RocketMQ does.
    """
    unique_key = get_property(properties, b"UNIQ_KEY")
    keys = [] if unique_key is None else [unique_key]
    named = get_property(properties, b"KEYS")
    if named is not None:
        keys += filter(None, named.split(KEY_SEPARATOR.encode()))
    return keys


# What the index needs of one record: topic, properties, physical offset, store timestamp (ms) and
# sys_flag. A plain tuple, because one is made per message.
KeyedRecord = tuple[str, bytes, int, int, int]


class HashedKeys(NamedTuple):
    """Keys of records in log order, as columns of equal length."""

    hashes: list[int]
    physical_offsets: list[int]
    store_timestamps: list[int]  # ms

    def part(self, start: int, end: int) -> "HashedKeys":
        """Return the keys from one position to another."""
        return HashedKeys(*(column[start:end] for column in self))


class UniqueKeys(NamedTuple):
    """Records of one topic and time with a unique key each, and nothing else to index."""

    topic: str
    keys: Sequence[bytes]
    physical_offsets: list[int]  # rising
    store_timestamp: int  # ms


def _tail_hashes(texts: bytes, size: int, beginning: int = 0) -> tuple[int, ...]:
    """Hash the last ``_TAIL_SIZE`` of the ``size`` ASCII characters of each text, cut to 32 bits.

    ``beginning``, an uint32, is added to each. All at once, in arithmetic on two large numbers:
    every text has a lane of 64 bits, which its hash cannot leave, since 127 * (31**12 - 1) / 30
    < 2**62. A fifth of a microsecond each.
    """
    count = len(texts) // size
    lanes = bytearray(8 * count)
    total = 0
    for position in range(size - _TAIL_SIZE, size):
        lanes[::8] = texts[position::size]
        total = total * 31 + int.from_bytes(lanes, "little")
    if beginning:
        total += beginning * int.from_bytes(_ONE * count, "little")
    return struct.unpack("<" + "I4x" * count, total.to_bytes(len(lanes), "little"))


def _item_hashes(values: Iterable[int]) -> list[int]:
    """Return what items store of hashes, which are given as uint32: the number without its sign."""
    return [
        value if value < 0x8000_0000 else (0x1_0000_0000 - value) & 0x7FFF_FFFF  # _absolute
        for value in values
    ]


def _sums(beginnings: Iterable[int], tails: Iterable[int]) -> list[int]:
    pairs = zip(beginnings, tails, strict=True)
    return [(beginning + tail) & 0xFFFF_FFFF for beginning, tail in pairs]


def _have_common_beginning(texts: bytes, size: int, common: int) -> bool:
    """Tell whether texts of ``size`` characters each begin with the same ``common`` ones."""
    count = len(texts) // size
    return all(texts[at::size] == texts[at : at + 1] * count for at in range(common))


class KeyHasher:
    """Hashes keys as ``index_key_hash`` does, but remembers what most of them begin with.

    The hash is linear: that of a whole is that of its parts, each times a power of 31. So the
    topic is hashed once, and so are the 20 characters that all unique keys of one client share;
    the 12 that differ are hashed for many keys at once. Both memories are emptied when full.
    """

    def __init__(self) -> None:
        self._topics: dict[str, int] = {}  # hash of "topic#" before a unique key
        self._clients: dict[bytes, int] = {}  # hash of its first 20 characters before its last 12

    def hash_records(self, records: Iterable[KeyedRecord], *, after: int) -> HashedKeys:
        """Return the hashed keys of records in log order, from behind offset ``after`` on.

        Rollback records have none. A record that does not lie behind the one before it was there
        already, and is passed over: log and index may be replayed from any older position.
        """
        beginnings: list[int] = []
        tails: list[bytes] = []
        physical_offsets: list[int] = []
        store_timestamps: list[int] = []
        clients = self._clients
        topic_before, topic_part = None, 0
        for topic, properties, physical_offset, store_timestamp, sys_flag in records:
            if physical_offset <= after or sys_flag & TRANSACTION_MASK == _ROLLBACK:
                continue
            after = physical_offset
            # One unique key of 32 ASCII characters and no KEYS is what nearly every record has.
            start = properties.rfind(b"UNIQ_KEY\x01") + 9
            if (
                start > 8  # it was found
                and properties.find(b"\x02", start) == start + _UNIQUE_KEY_SIZE
                and (start == 9 or properties[start - 10] == 2)
                and properties.find(b"KEYS\x01") < 0
                and properties.isascii()
            ):
                if topic is not topic_before:
                    topic_before, topic_part = topic, self._topic_part(topic)
                tail_at = start + _CLIENT_SIZE
                client = properties[start:tail_at]
                client_part = clients.get(client)
                if client_part is None:
                    client_part = self._remember_client(client)
                beginnings.append(topic_part + client_part)
                tails.append(properties[tail_at : tail_at + _TAIL_SIZE])
                physical_offsets.append(physical_offset)
                store_timestamps.append(store_timestamp)
            else:
                for key in index_keys(properties):
                    text = index_key(topic, key.decode(errors="replace"))
                    beginnings.append(java_string_hash(text))
                    tails.append(_NO_TAIL)
                    physical_offsets.append(physical_offset)
                    store_timestamps.append(store_timestamp)
        hashes = _item_hashes(_sums(beginnings, _tail_hashes(b"".join(tails), _TAIL_SIZE)))
        return HashedKeys(hashes, physical_offsets, store_timestamps)

    def hash_unique_keys(self, group: UniqueKeys) -> HashedKeys:
        """Return the hashed keys of a group whose keys need not be looked for."""
        topic, keys, physical_offsets, store_timestamp = group
        characters = b"".join(keys)
        if set(map(len, keys)) == {_UNIQUE_KEY_SIZE} and characters.isascii():
            if _have_common_beginning(characters, _UNIQUE_KEY_SIZE, _CLIENT_SIZE):
                beginning = self._beginning(topic, keys[0]) & 0xFFFF_FFFF
                hashes = _item_hashes(_tail_hashes(characters, _UNIQUE_KEY_SIZE, beginning))
            else:
                tails = _tail_hashes(characters, _UNIQUE_KEY_SIZE)
                hashes = _item_hashes(_sums([self._beginning(topic, key) for key in keys], tails))
        else:
            texts = [index_key(topic, key.decode(errors="replace")) for key in keys]
            hashes = list(map(index_key_hash, texts))
        return HashedKeys(hashes, physical_offsets, [store_timestamp] * len(hashes))

    def _beginning(self, topic: str, key: bytes) -> int:
        client = key[:_CLIENT_SIZE]
        part = self._clients.get(client)
        return self._topic_part(topic) + (self._remember_client(client) if part is None else part)

    def _topic_part(self, topic: str) -> int:
        part = self._topics.get(topic)
        return self._remember_topic(topic) if part is None else part

    def _remember_topic(self, topic: str) -> int:
        if len(self._topics) >= _TOPICS_CACHED_MAX:
            self._topics.clear()
        part = self._topics[topic] = java_string_hash(f"{topic}#") * _BEHIND_TOPIC & 0xFFFF_FFFF
        return part

    def _remember_client(self, client: bytes) -> int:
        if len(self._clients) >= _CLIENTS_CACHED_MAX:
            self._clients.clear()
        part = self._clients[client] = (
            java_string_hash(client.decode()) * _BEHIND_CLIENT & 0xFFFF_FFFF
        )
        return part
