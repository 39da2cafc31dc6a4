"""What a file held when it was on disk: checksums of its parts, kept in a file beside the store's.

The format of the log has a checksum for bodies only, that of queues and index has none. A digest
has a CRC-32 for each ``BLOCK`` of such a file, up to where it was written. With it a start, or
``halfmq store verify``, finds every flipped bit. A CRC-32 even tells which bit it was, if just one.

It is written without being flushed, and carries a checksum of its own; one that did not arrive is
as good as none. Digests lie in ``digests/`` below the root, under the names of their files. Other
brokers know nothing of them and may have rewritten something: a store that one of them had last
loses its digests.
"""

import sys
from array import array
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from . import disk
from .format.crc import crc32

BLOCK: Final = 1 << 16  # bytes; zlib lets other threads run from 5 KiB on
DIRECTORY: Final = "digests"
_HEAD: Final = Struct(">4sIQ")  # magic, block size, end
_MAGIC: Final = b"hmqd"
_CRC: Final = Struct(">I")
_POLYNOMIAL: Final = 0xEDB8_8320  # of CRC-32, its bits reversed as zlib has them


def digest_path(root: Path, file: Path) -> Path:
    """Return where the digest of a file of the store lies."""
    parts = file.relative_to(root).parts if file.is_relative_to(root) else file.parts[-2:]
    return root.joinpath(DIRECTORY, *parts)


class Block(NamedTuple):
    """A part of a file, and the CRC-32 that it had."""

    position: int  # bytes
    content: bytes  # now
    crc: int

    @property
    def end(self) -> int:
        """The position behind its last byte."""
        return self.position + len(self.content)


class Digest:
    """Checksums of the first ``end`` bytes of a file."""

    __slots__ = ("_crcs", "end")

    def __init__(self, end: int = 0, crcs: "array[int] | None" = None) -> None:
        self.end = end  # bytes
        # Of each block; of the last one, as far as it is written.
        self._crcs = array("I") if crcs is None else crcs

    def extend(self, fd: int, end: int) -> None:
        """Take in what a file holds up to byte ``end``; what was taken in stays as it was."""
        start = self.end - self.end % BLOCK
        del self._crcs[start // BLOCK :]
        for position in range(start, end, BLOCK):
            self._crcs.append(crc32(disk.pread(fd, min(BLOCK, end - position), position)))
        self.end = max(end, start)

    def refresh(self, fd: int, start: int, end: int) -> None:
        """Take in again the blocks that hold bytes ``start`` to ``end``, as far as they were."""
        for number in range(start // BLOCK, min(-(-end // BLOCK), len(self._crcs))):
            position = number * BLOCK
            content = disk.pread(fd, min(BLOCK, self.end - position), position)
            self._crcs[number] = crc32(content)

    def cut(self, end: int) -> None:
        """Forget what stood behind byte ``end``, and the block it is in."""
        if end < self.end:
            self.end = end - end % BLOCK
            del self._crcs[self.end // BLOCK :]

    def blocks(self, fd: int, start: int = 0) -> Iterator[Block]:
        """Give each block as the file holds it now, from the one on that byte ``start`` is in."""
        for number in range(start // BLOCK, len(self._crcs)):
            position, crc = number * BLOCK, self._crcs[number]
            yield Block(position, disk.pread(fd, min(BLOCK, self.end - position), position), crc)

    def save(self, path: Path) -> None:
        """Write the digest; it is not flushed."""
        crcs = array("I", self._crcs)
        if sys.byteorder == "little":
            crcs.byteswap()
        content = _HEAD.pack(_MAGIC, BLOCK, self.end) + crcs.tobytes()
        temporary = path.with_name(path.name + ".tmp")
        disk.make_directories(path.parent)
        disk.write_file(temporary, content + _CRC.pack(crc32(content)))
        disk.replace(temporary, path)


def load_digest(path: Path) -> Digest | None:
    """Return the digest kept at ``path``; None if there is none, or not a whole one."""
    try:
        content = disk.read_bytes(path)
    except FileNotFoundError:
        return None
    whole = len(content) >= _HEAD.size + _CRC.size
    if not whole or crc32(content[: -_CRC.size]) != _CRC.unpack(content[-_CRC.size :])[0]:
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
    return Digest(end, crcs)


def find_flipped_bit(content: bytes, crc: int) -> tuple[int, int] | None:
    """Return byte and bit in which ``content`` differs from what had this CRC-32.

    None if it is not just one. ``content`` has ``BLOCK`` bytes at most. The first call takes a
    tenth of a second.
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
    """Return what a flip of each bit does to a CRC-32: of the last byte, of the one before, ..."""
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
