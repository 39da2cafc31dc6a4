"""Digests: checksums of the blocks of a file, stored in a separate file.

The format of the log has a checksum for bodies only; queues and index have none. A digest has a
CRC-32 for each ``BLOCK`` of such a file, as far as the file is written. With it a start, or
``halfmq store verify``, finds every flipped bit. If only one bit is wrong, the CRC-32 shows which.

A digest is not flushed and has a checksum of its own; a damaged one counts as missing.
Digests lie in ``digests/`` below the root, under the names of their files, but for those of the
last file of each queue, which lie together in one. Other brokers ignore
them and may rewrite files, so the digests are deleted if another broker used the store last.
"""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..files import disk
from ..format.crc import crc32
from ..format.digest import BLOCK, DIRECTORY, find_flipped_bit, pack_digest, unpack_digest


def digest_path(root: Path, file: Path) -> Path:
    """Return the path of the digest of a file of the store."""
    parts = file.relative_to(root).parts if file.is_relative_to(root) else file.parts[-2:]
    return root.joinpath(DIRECTORY, *parts)


class Block(NamedTuple):
    """A block of a file, and the CRC-32 that it should have."""

    position: int  # bytes
    content: bytes  # as read now
    crc: int

    @property
    def end(self) -> int:
        """The position after its last byte."""
        return self.position + len(self.content)

    @property
    def is_sound(self) -> bool:
        """Whether the content matches the CRC."""
        return crc32(self.content) == self.crc

    def flipped_bit(self) -> tuple[int, int] | None:
        """Return file position and number of the flipped bit; None if more than one differs."""
        flipped = find_flipped_bit(self.content, self.crc)
        return None if flipped is None else (self.position + flipped[0], flipped[1])


class Digest:
    """Checksums of the first ``end`` bytes of a file."""

    __slots__ = ("_crcs", "end")

    def __init__(self, end: int = 0, crcs: "array[int] | None" = None) -> None:
        self.end = end  # bytes
        # One per block; of the last block, as far as it is written.
        self._crcs = array("I") if crcs is None else crcs

    def extend(self, fd: int, end: int) -> None:
        """Add checksums up to byte ``end`` of a file; those of full blocks do not change."""
        start = self.end - self.end % BLOCK
        del self._crcs[start // BLOCK :]
        for position in range(start, end, BLOCK):
            self._crcs.append(crc32(disk.pread(fd, min(BLOCK, end - position), position)))
        self.end = max(end, start)

    def refresh(self, fd: int, start: int, end: int) -> None:
        """Recompute the checksums of known blocks that hold bytes ``start`` to ``end``."""
        for number in range(start // BLOCK, min(-(-end // BLOCK), len(self._crcs))):
            position = number * BLOCK
            content = disk.pread(fd, min(BLOCK, self.end - position), position)
            self._crcs[number] = crc32(content)

    def cut(self, end: int) -> None:
        """Drop the checksums from the block that holds byte ``end`` on."""
        if end < self.end:
            self.end = end - end % BLOCK
            del self._crcs[self.end // BLOCK :]

    def blocks(self, fd: int, start: int = 0) -> Iterator[Block]:
        """Yield the blocks of a file as it is now, from the block that holds byte ``start`` on."""
        for number in range(start // BLOCK, len(self._crcs)):
            position, crc = number * BLOCK, self._crcs[number]
            yield Block(position, disk.pread(fd, min(BLOCK, self.end - position), position), crc)

    def covers(self, position: int, content: bytes) -> bool:
        """Return whether bytes from the begin of a block on are as they should be."""
        first, count = position // BLOCK, -(-len(content) // BLOCK)
        return all(
            crc32(content[number * BLOCK : (number + 1) * BLOCK]) == crc
            for number, crc in enumerate(self._crcs[first : first + count])
        )

    def pack(self) -> bytes:
        return pack_digest(self.end, self._crcs)

    def save(self, path: Path) -> None:
        """Write the digest; it is not flushed."""
        replace_file(path, self.pack())


def unpacked(content: bytes | None) -> Digest | None:
    """Return a digest; None if there is none or it is damaged."""
    found = None if content is None else unpack_digest(content)
    return None if found is None else Digest(*found)


def load_digest(path: Path) -> Digest | None:
    """Return the digest at ``path``; None if there is none or it is damaged."""
    return unpacked(read_if_there(path))


def read_if_there(path: Path) -> bytes | None:
    """Return the content of a file; None if there is none."""
    try:
        return disk.read_bytes(path)
    except FileNotFoundError:
        return None


def replace_file(path: Path, content: bytes) -> None:
    """Write a file anew, and its directory if needed; nothing is flushed."""
    temporary = path.with_name(path.name + ".tmp")
    disk.make_directories(path.parent)
    disk.write_file(temporary, content)
    disk.replace(temporary, path)


def digest_of(root: Path, file: Path) -> Digest | None:
    """Return the digest of a file of the store, if it has one."""
    return load_digest(digest_path(root, file))
