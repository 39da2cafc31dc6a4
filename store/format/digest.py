"""The layout of a digest file: a CRC-32 for each block of a data file, as far as that was written.

Big-endian: magic, block size, number of bytes covered, the CRC-32 of each block (of the last one,
of its covered part), and a CRC-32 of everything before.
"""

import sys
from array import array
from collections.abc import Mapping
from functools import lru_cache
from struct import Struct
from typing import Final

from .crc import crc32

BLOCK: Final = 1 << 16  # bytes; zlib lets other threads run from 5 KiB on
DIRECTORY: Final = "digests"  # below a store's root; a digest has the name of its data file
_HEAD: Final = Struct(">4sIQ")  # magic, block size, bytes covered
_MAGIC: Final = b"hmqd"
_CRC: Final = Struct(">I")
_ITEM: Final = Struct(">HI")  # of several: bytes of a file's name, and of its digest; both follow
_POLYNOMIAL: Final = 0xEDB8_8320  # of CRC-32, its bits reversed as zlib has them


def pack_digest(end: int, crcs: "array[int]") -> bytes:
    """Pack the CRCs of the blocks of ``end`` bytes."""
    crcs = array("I", crcs)
    if sys.byteorder == "little":
        crcs.byteswap()
    content = _HEAD.pack(_MAGIC, BLOCK, end) + crcs.tobytes()
    return content + _CRC.pack(crc32(content))


def unpack_digest(content: bytes) -> "tuple[int, array[int]] | None":
    """Return how many bytes a digest covers, and the CRCs; None if it is damaged."""
    if len(content) < _HEAD.size + _CRC.size:
        return None
    if crc32(content[: -_CRC.size]) != _CRC.unpack(content[-_CRC.size :])[0]:
        return None
    magic, block, end = _HEAD.unpack_from(content)
    crcs = array("I")
    if crcs.itemsize != _CRC.size or (magic, block) != (_MAGIC, BLOCK):
        return None
    crcs.frombytes(content[_HEAD.size : -_CRC.size])
    if len(crcs) != -(-end // BLOCK):
        return None
    if sys.byteorder == "little":
        crcs.byteswap()
    return end, crcs


def pack_digests(digests: Mapping[str, bytes]) -> bytes:
    """Pack digests of several files by name, as ``unpack_digests`` reads them."""
    content = b"".join(
        _ITEM.pack(len(name), len(packed)) + name + packed
        for name, packed in ((name.encode(), packed) for name, packed in digests.items())
    )
    return content + _CRC.pack(crc32(content))


def unpack_digests(content: bytes) -> dict[str, bytes]:
    """Return packed digests by name; none if the content is damaged."""
    end = len(content) - _CRC.size
    if end < 0 or _CRC.pack(crc32(content[:end])) != content[end:]:
        return {}
    digests: dict[str, bytes] = {}
    position = 0
    while position < end:
        name_size, size = _ITEM.unpack_from(content, position)
        position += _ITEM.size
        name = content[position : position + name_size].decode()
        position += name_size
        digests[name] = content[position : position + size]
        position += size
    return digests


def find_flipped_bit(content: bytes, crc: int) -> tuple[int, int] | None:
    """Return byte and bit in which ``content`` differs from the content with this CRC-32.

    None if they differ in more than one bit. ``content`` has at most ``BLOCK`` bytes. The first
    call takes a tenth of a second.
    """
    wanted = array("I", [crc32(content) ^ crc]).tobytes()
    changes, end = _changes(), 8 * len(wanted) * len(content)
    at = changes.find(wanted, 0, end)
    while at >= 0 and at % len(wanted):
        at = changes.find(wanted, at + 1, end)
    if at < 0:
        return None
    distance, bit = divmod(at // len(wanted), 8)
    return len(content) - 1 - distance, bit


@lru_cache(maxsize=1)  # two megabytes
def _changes() -> bytes:
    """Return how a flip of each bit changes the CRC-32 of a block, last byte first."""
    table = [_shifted(value) for value in range(256)]
    nearer = [table[1 << bit] for bit in range(8)]
    changes = array("I", nearer)
    for _ in range(BLOCK - 1):
        nearer = [value >> 8 ^ table[value & 0xFF] for value in nearer]
        changes.extend(nearer)
    return changes.tobytes()


def _shifted(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value
