"""Names of messages and hosts, and the hash that RocketMQ files are built on.

Two kinds of message id exist. The offset message id is the packed store host followed by the
physical offset, so that it says where a record lies. The unique key (property ``UNIQ_KEY``) is
made by the client before it sends. Both are upper-case hex, 32 characters long with an IPv4
address and 56 with an IPv6 one.

A packed host is the address (4 or 16 bytes) followed by the port as int32, as records hold it.

Source: RocketMQ ``MessageDecoder.java``, ``MessageClientIDSetter.java``, ``UtilAll.java``.
"""

import socket
import time
from collections.abc import Callable, Sequence
from operator import mul
from struct import Struct, pack
from typing import Final, NamedTuple

HOST_V4_SIZE: Final = 8  # bytes: address 4, port 4
HOST_V6_SIZE: Final = 20  # bytes: address 16, port 4
_ID_V4_LENGTH: Final = 32  # hex digits; RocketMQ distinguishes IPv4 and IPv6 by this length
_ID_V6_LENGTH: Final = 56
_pack_offset: Final = Struct(">q").pack

_HASH_CHUNK: Final = 64  # characters per step; one more power of 31 is kept for joining the steps
_POWERS: Final[tuple[int, ...]] = tuple(31**n & 0xFFFF_FFFF for n in range(_HASH_CHUNK, -1, -1))
# _WEIGHTS[n] are the factors of n characters, the last one being 1.
_WEIGHTS: Final = tuple(_POWERS[_HASH_CHUNK + 1 - n :] for n in range(_HASH_CHUNK + 1))


def java_string_hash(text: str) -> int:
    """Hash a string as Java's ``String.hashCode`` does: signed 32 bit, over UTF-16 units."""
    if text.isascii():
        value = _polynomial(text.encode())
    else:
        units = memoryview(text.encode("utf-16-le", "surrogatepass"))
        value = _polynomial(
            [low | high << 8 for low, high in zip(units[::2], units[1::2], strict=True)]
        )
    return _signed(value)


def _signed(value: int) -> int:
    return value - 0x1_0000_0000 if value & 0x8000_0000 else value


def _polynomial(units: bytes | list[int]) -> int:
    """Sum units[i] * 31 ** (n - 1 - i) modulo 2 ** 32."""
    count = len(units)
    if count <= _HASH_CHUNK:
        short: int = sum(map(mul, units, _WEIGHTS[count]))
        return short & 0xFFFF_FFFF
    value = 0
    for start in range(0, count, _HASH_CHUNK):
        chunk = units[start : start + _HASH_CHUNK]
        shift = _POWERS[_HASH_CHUNK - len(chunk)]
        value = (value * shift + sum(map(mul, chunk, _WEIGHTS[len(chunk)]))) & 0xFFFF_FFFF
    return value


def pack_host(address: str, port: int) -> bytes:
    """Return the host as a record stores it: 8 bytes for IPv4, 20 for IPv6.

    Raises:
        ValueError: The address is not a numeric IPv4 or IPv6 address, or the port is no port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        packed = socket.inet_pton(family, address.partition("%")[0])
    except OSError as error:
        raise ValueError(f"{address!r} is not a numeric IP address") from error
    if not 0 <= port <= 0xFFFF:
        raise ValueError(f"port {port} is not within 0..65535")
    return packed + port.to_bytes(4, "big")


def unpack_host(packed: bytes) -> tuple[str, int]:
    """Return address and port of a host as a record stores it.

    Raises:
        ValueError: ``packed`` is neither 8 nor 20 bytes.
    """
    if len(packed) == HOST_V4_SIZE:
        family = socket.AF_INET
    elif len(packed) == HOST_V6_SIZE:
        family = socket.AF_INET6
    else:
        raise ValueError(f"a packed host has 8 or 20 bytes, not {len(packed)}")
    return socket.inet_ntop(family, packed[:-4]), int.from_bytes(packed[-4:], "big", signed=True)


def offset_message_id(packed_host: bytes, physical_offset: int) -> str:
    """Return the message id that holds the host and physical offset of a record."""
    return (packed_host + _pack_offset(physical_offset)).hex().upper()


def offset_message_ids(packed_host: bytes, physical_offsets: Sequence[int]) -> str:
    """Return the ids of several records of one host, with commas between them."""
    host = packed_host.hex().upper()
    numbers = pack(f">{len(physical_offsets)}q", *physical_offsets)
    return host + numbers.hex(",", 8).upper().replace(",", "," + host)


class OffsetMessageId(NamedTuple):
    """The two halves of an offset message id."""

    store_host: bytes
    physical_offset: int


def parse_offset_message_id(text: str) -> OffsetMessageId:
    """Return host and offset of an offset message id; upper and lower case are accepted.

    Raises:
        ValueError: The text is not 32 or 56 hex digits, or its offset is negative.
    """
    if len(text) not in {_ID_V4_LENGTH, _ID_V6_LENGTH}:
        raise ValueError(f"an offset message id has 32 or 56 digits, not {len(text)}")
    raw = bytes.fromhex(text)
    if 2 * len(raw) != len(text):  # fromhex skips blanks
        raise ValueError(f"{text!r} is not an offset message id")
    physical_offset = int.from_bytes(raw[-8:], "big", signed=True)
    if physical_offset < 0:
        raise ValueError(f"{text!r} names a negative offset")
    return OffsetMessageId(raw[:-8], physical_offset)


class UniqueKeyFactory:
    """Creates the ``UNIQ_KEY`` of every message that one process sends.

    A key is address, process id (low 16 bits), 4 bytes that distinguish processes with equal ids
    (Java puts the hash of a class loader there), milliseconds since the month began in local time,
    and a counter of 16 bits. Tools read the time from it. Keys are unique within a month, at any
    rate and even if the clock steps back: when the counter wraps, the time continues after the
    latest one used.

    Use one per process: a forked child that used its parent's factory would repeat keys.
    """

    def __init__(
        self, address: bytes, *, process_id: int, token: bytes, now_ms: Callable[[], int]
    ) -> None:
        if len(address) not in {4, 16}:
            raise ValueError(f"a packed address has 4 or 16 bytes, not {len(address)}")
        if len(token) != 4:
            raise ValueError(f"the token has 4 bytes, not {len(token)}")
        self._prefix = (address + (process_id & 0xFFFF).to_bytes(2, "big") + token).hex().upper()
        self._now_ms = now_ms
        self._counter = 0
        self._earliest_ms = 0  # allowed in this round of the counter
        self._latest_ms = 0  # used so far
        self._month_start_ms = 0
        self._next_month_ms = 0

    def create(self) -> str:
        """Return the next key: 32 characters with an IPv4 address, 56 with IPv6."""
        counter = self._counter
        if counter > 0xFFFF:
            counter = 0
            self._earliest_ms = self._latest_ms + 1
        self._counter = counter + 1
        now = max(self._now_ms(), self._earliest_ms)
        self._latest_ms = max(self._latest_ms, now)
        if not self._month_start_ms <= now < self._next_month_ms:
            self._month_start_ms, self._next_month_ms = _month_bounds_ms(now)
        return f"{self._prefix}{now - self._month_start_ms:08X}{counter:04X}"


def _month_bounds_ms(now_ms: int) -> tuple[int, int]:
    """Return when the local month of ``now_ms`` began and when it ends."""
    year, month = time.localtime(now_ms / 1000)[:2]
    start = time.mktime((year, month, 1, 0, 0, 0, 0, 0, -1))
    end = time.mktime((year, month + 1, 1, 0, 0, 0, 0, 0, -1))  # month 13 is next January
    return int(start * 1000), int(end * 1000)
