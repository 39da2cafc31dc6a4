"""Index files: hash tables on disk from ``topic#key`` to the records that carry the key.

A file is a header, an array of slots, and an array of items. An item's slot is its key hash
modulo the number of slots. The slot holds the number of its newest item, and each item the
number of the one before it in the same slot, so that a look-up walks from new to old. Item 0
is never used, because 0 means "none". Keys themselves are not stored: two keys with one hash are
told apart only by reading the record.

An item's time is kept in whole seconds after the header's begin timestamp.

Source: RocketMQ ``IndexFile.java``, ``IndexHeader.java``, ``IndexService.java``.
"""

import time
from collections.abc import Iterable
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
_BEHIND_CLIENT: Final = int(31 ** (_UNIQUE_KEY_SIZE - _CLIENT_SIZE)) & 0xFFFF_FFFF
_unpack_pairs = Struct(">6H").unpack_from  # its 12 others, two at a time


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
# sys_flag; and what it makes of each key: hash, physical offset, store timestamp. Plain tuples,
# because one of each is made per message.
KeyedRecord = tuple[str, bytes, int, int, int]
HashedKey = tuple[int, int, int]


def _pair_hashes(characters_behind: int) -> list[int]:
    """Return what two ASCII characters, as 16 bits, add to the hash of a longer text."""
    factor = 31**characters_behind
    # The hash of a pair is 31 * first + second; one object each serves all pairs that share it.
    sums = [value * factor & 0xFFFF_FFFF for value in range(32 * 0x7F + 1)]
    hashes: list[int] = []
    for first in range(0x80):
        row = sums[31 * first : 31 * first + 0x80]
        hashes += row
        hashes += row  # stands where the second is not ASCII, and is never asked for
    return hashes


_PAIRS: Final = tuple(_pair_hashes(behind) for behind in (10, 8, 6, 4, 2, 0))  # 2.3 MB in all


class KeyHasher:
    """Hashes keys as ``index_key_hash`` does, but remembers what most of them begin with.

    The hash is linear: that of a whole is that of its parts, each times a power of 31. So the
    topic is hashed once, and so are the 20 characters that all unique keys of one client share;
    the 12 that differ take six table look-ups. Both memories are emptied when they are full.
    """

    def __init__(self) -> None:
        self._topics: dict[str, int] = {}  # hash of "topic#" before a unique key
        self._clients: dict[bytes, int] = {}  # hash of its first 20 characters before its last 12

    def hash_records(self, records: Iterable[KeyedRecord], *, after: int) -> list[HashedKey]:
        """Return the hashed keys of records in log order, from behind offset ``after`` on.

        Rollback records have none. A record that does not lie behind the one before it was there
        already, and is passed over: log and index may be replayed from any older position.
        """
        hashed: list[HashedKey] = []
        p10, p8, p6, p4, p2, p0 = _PAIRS
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
                topic_part = self._topics.get(topic)
                if topic_part is None:
                    topic_part = self._remember_topic(topic)
                client = properties[start : start + _CLIENT_SIZE]
                client_part = self._clients.get(client)
                if client_part is None:
                    client_part = self._remember_client(client)
                a, b, c, d, e, f = _unpack_pairs(properties, start + _CLIENT_SIZE)
                pairs = p10[a] + p8[b] + p6[c] + p4[d] + p2[e] + p0[f]
                value = topic_part + client_part + pairs & 0xFFFF_FFFF
                if value >= 0x8000_0000:
                    value = (0x1_0000_0000 - value) & 0x7FFF_FFFF  # as _absolute does
                hashed.append((value, physical_offset, store_timestamp))
            else:
                for key in index_keys(properties):
                    value = index_key_hash(index_key(topic, key.decode(errors="replace")))
                    hashed.append((value, physical_offset, store_timestamp))
        return hashed

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
