"""Index files: hash tables on disk from ``topic#key`` to the records that carry the key.

A file is a header, an array of slots, and an array of items. An item's slot is its key hash
modulo the number of slots. The slot holds the number of its newest item, and each item the
number of the one before it in the same slot, so that a look-up walks from new to old. Item 0
is never used, because 0 means "none". Keys themselves are not stored: two keys with one hash are
told apart only by reading the record.

An item's time is kept in whole seconds after the header's begin timestamp.

Source: RocketMQ ``IndexFile.java``, ``IndexHeader.java``, ``IndexService.java``.
"""

import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

from .columns import ones
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
UNIQUE_KEY_SIZE: Final = 32  # characters of an IPv4 client's key
_CLIENT_SIZE: Final = 24  # of its characters that stay for a minute: all but time and counter
_BEHIND_TOPIC: Final = int(31**UNIQUE_KEY_SIZE) & 0xFFFF_FFFF
_TAIL_SIZE: Final = UNIQUE_KEY_SIZE - _CLIENT_SIZE
_BEHIND_CLIENT: Final = int(31**_TAIL_SIZE) & 0xFFFF_FFFF
_NO_TAIL: Final = bytes(_TAIL_SIZE)
_CLIENT: Final = Struct(f"{_CLIENT_SIZE}s{_TAIL_SIZE}x")  # of a key
_KEY_WORDS: Final = UNIQUE_KEY_SIZE // 8
_CLIENT_WORDS: Final = _CLIENT_SIZE // 8
_LANES: Final = 1024  # tails hashed at once, in numbers of 8 KiB


def _lower_halves(size: int) -> int:
    """Return the bits of the lower of each two pieces of so many bytes, in all lanes."""
    pieces = b"\xff" * size + bytes(size)
    return int.from_bytes(pieces * (_LANES * _TAIL_SIZE // len(pieces)), "little")


_ONES: Final = ones(_LANES)
_SIGNS: Final = _ONES << 31
_WORDS: Final = (_ONES << 32) - _ONES

# How two neighbours of so many bytes are put together: bits, power of 31, the lower ones.
_FOLDS: Final = tuple((8 * size, 31**size, _lower_halves(size)) for size in (1, 2, 4))


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


def seconds_column(begin_timestamp: int, keys: "HashedKeys") -> "array[int]":
    """Return the times that items store, int32; mostly one for all."""
    timestamps = keys.store_timestamps
    earliest = seconds_after(begin_timestamp, keys.earliest)
    if earliest == seconds_after(begin_timestamp, keys.latest):
        return array("i", [earliest]) * len(timestamps)
    seconds_of = {time: seconds_after(begin_timestamp, time) for time in set(timestamps)}
    return array("i", map(seconds_of.__getitem__, timestamps))


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

    hashes: "array[int]"  # int32
    physical_offsets: "array[int]"  # int64
    store_timestamps: "array[int]"  # int64, ms
    earliest: int  # no store timestamp is less; to look through them takes longer than to hash
    latest: int  # none is greater

    def part(self, start: int, end: int) -> "HashedKeys":
        """Return the keys from one position to another."""
        return self._replace(
            hashes=self.hashes[start:end],
            physical_offsets=self.physical_offsets[start:end],
            store_timestamps=self.store_timestamps[start:end],
        )


def hashed_keys(
    hashes: Iterable[int], physical_offsets: Iterable[int], store_timestamps: Sequence[int]
) -> HashedKeys:
    """Return keys in columns."""
    return HashedKeys(
        array("i", hashes),
        array("q", physical_offsets),
        array("q", store_timestamps),
        min(store_timestamps, default=0),
        max(store_timestamps, default=0),
    )


class UniqueKeys(NamedTuple):
    """Records of one topic and time with a usual unique key each, and nothing else to index."""

    topic: str
    keys: bytes  # one after the other; see ``joined_if_usual``
    physical_offsets: "array[int]"  # int64, rising
    store_timestamp: int  # ms


class SingleKeys(NamedTuple):
    """Records with a usual unique key each, and nothing else to index; columns of equal length."""

    topics: Sequence[str]
    keys: bytes  # one after the other; see ``joined_if_usual``
    physical_offsets: Sequence[int]  # rising
    store_timestamps: Sequence[int]  # ms


def joined_if_usual(keys: Sequence[bytes]) -> bytes | None:
    """Return unique keys one after the other, if all are usual: of 32 ASCII characters.

    So clients with IPv4 addresses make them.
    """
    joined = b"".join(keys)
    sizes = [*map(len, keys)]
    return joined if sizes.count(UNIQUE_KEY_SIZE) == len(sizes) and joined.isascii() else None


def _have_one_client(words: "array[int]") -> bool:
    """Tell whether usual keys, in pieces of 8 bytes, begin alike but for their tails."""
    count = len(words) // _KEY_WORDS
    return all(words[at::_KEY_WORDS] == words[at : at + 1] * count for at in range(_CLIENT_WORDS))


def _sums_of_hashes(tails: bytes, beginnings: "array[int]") -> "array[int]":
    """Return what items store of hashes, each the sum of its beginning and the hash of its tail.

    Tails have ``_TAIL_SIZE`` ASCII characters each, beginnings are uint64. All tails are hashed at
    once, in arithmetic on a large number: each has a lane of its own, in which neighbours are put
    together, first characters, then pairs, then fours. No sum leaves its lane, as long as
    beginnings are below 2**63, since 127 * (31**8 - 1) / 30 < 2**42. A twentieth of a microsecond
    each.
    """
    hashes = array("i")
    for start in range(0, len(beginnings), _LANES):
        lanes = tails[_TAIL_SIZE * start : _TAIL_SIZE * (start + _LANES)]
        total = int.from_bytes(lanes, "little")
        for width, factor, lower in _FOLDS:
            first = total & lower
            total = first * factor + ((total ^ first) >> width)
        total += int.from_bytes(_little(beginnings[start : start + _LANES]).tobytes(), "little")
        total &= _WORDS  # cut to an int, of which the absolute value is taken
        negative = (total >> 31) & _ONES
        total = (total ^ ((negative << 32) - negative)) + negative
        total ^= total & _SIGNS  # of -2**31 there is none, and RocketMQ takes 0
        words = array("i", total.to_bytes(len(lanes), "little"))
        hashes += _little(words[::2])
    return hashes


def _little(numbers: "array[int]") -> "array[int]":
    """Return numbers in little-endian order, or such numbers as native ones; they are spent."""
    if sys.byteorder != "little":
        numbers.byteswap()
    return numbers


class KeyHasher:
    """Hashes keys as ``index_key_hash`` does, but remembers what most of them begin with.

    The hash is linear: that of a whole is that of its parts, each times a power of 31. So the
    topic is hashed once, and so are the 24 characters that unique keys of one client share for a
    minute; the other 8 are hashed for many keys at once. Both memories are emptied when full.
    """

    def __init__(self) -> None:
        self._topics: dict[str, int] = {}  # hash of "topic#" before a unique key
        self._clients: dict[bytes, int] = {}  # hash of its first 24 characters before its last 8

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
                and properties.find(b"\x02", start) == start + UNIQUE_KEY_SIZE
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
                    beginnings.append(java_string_hash(text) & 0xFFFF_FFFF)
                    tails.append(_NO_TAIL)
                    physical_offsets.append(physical_offset)
                    store_timestamps.append(store_timestamp)
        hashes = _sums_of_hashes(b"".join(tails), array("Q", beginnings))
        return hashed_keys(hashes, physical_offsets, store_timestamps)

    def hash_single_keys(self, singles: SingleKeys) -> HashedKeys:
        """Return the hashed keys of records whose keys need not be looked for."""
        topics, keys, physical_offsets, store_timestamps = singles
        words = array("Q", keys)
        if _have_one_client(words):
            client = keys[:_CLIENT_SIZE]
            of_topic = {topic: self._beginning(topic, client) for topic in set(topics)}
            beginnings = array("Q", map(of_topic.__getitem__, topics))
        else:
            clients = [client for (client,) in _CLIENT.iter_unpack(keys)]
            beginnings = array("Q", map(self._beginning, topics, clients))
        hashes = _sums_of_hashes(words[_CLIENT_WORDS::_KEY_WORDS].tobytes(), beginnings)
        return hashed_keys(hashes, physical_offsets, store_timestamps)

    def hash_unique_keys(self, groups: Sequence[UniqueKeys]) -> HashedKeys:
        """Return the hashed keys of groups whose keys need not be looked for."""
        physical_offsets, store_timestamps = array("q"), array("q")
        for group in groups:
            physical_offsets += group.physical_offsets
            times = array("q", [group.store_timestamp])
            store_timestamps += times * len(group.physical_offsets)
        keys = b"".join([group.keys for group in groups])
        words = array("Q", keys)
        if _have_one_client(words):
            client = keys[:_CLIENT_SIZE]
            beginnings = array("Q")
            for group in groups:
                beginning = array("Q", [self._beginning(group.topic, client)])
                beginnings += beginning * len(group.physical_offsets)
        else:
            beginnings = array("Q", self._beginnings(groups))
        hashes = _sums_of_hashes(words[_CLIENT_WORDS::_KEY_WORDS].tobytes(), beginnings)
        timestamps = [group.store_timestamp for group in groups]
        earliest, latest = min(timestamps, default=0), max(timestamps, default=0)
        return HashedKeys(hashes, physical_offsets, store_timestamps, earliest, latest)

    def _beginnings(self, groups: Iterable[UniqueKeys]) -> Iterator[int]:
        """Give for each key of groups what its hash begins with."""
        for group in groups:
            for (client,) in _CLIENT.iter_unpack(group.keys):
                yield self._beginning(group.topic, client)

    def _beginning(self, topic: str, client: bytes) -> int:
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
