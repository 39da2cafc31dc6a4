"""What a file held when it was on disk: checksums of its parts, kept in a file beside the store's.

The format of the log has a checksum for bodies only, that of queues and index has none. A digest
has a CRC-32 for each ``BLOCK`` of such a file, up to where it was written. With it a start, or
``halfmq store verify``, finds every flipped bit. A CRC-32 even tells which bit it was, if just one.

It is written without being flushed, and carries a checksum of its own; one that did not arrive is
as good as none. Digests lie in ``digests/`` below the root, under the names of their files. Other
brokers know nothing of them and may have rewritten something: a store that one of them had last
loses its digests.
"""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..files import disk
from ..format.crc import crc32
from ..format.digest import BLOCK, DIRECTORY, find_flipped_bit, pack_digest, unpack_digest


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

    @property
    def is_sound(self) -> bool:
        """Whether it is as it was."""
        return crc32(self.content) == self.crc

    def flipped_bit(self) -> tuple[int, int] | None:
        """Return position in the file and bit in which it differs; None if it is not just one."""
        flipped = find_flipped_bit(self.content, self.crc)
        return None if flipped is None else (self.position + flipped[0], flipped[1])


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
        temporary = path.with_name(path.name + ".tmp")
        disk.make_directories(path.parent)
        disk.write_file(temporary, pack_digest(self.end, self._crcs))
        disk.replace(temporary, path)


def load_digest(path: Path) -> Digest | None:
    """Return the digest kept at ``path``; None if there is none, or not a whole one."""
    try:
        content = disk.read_bytes(path)
    except FileNotFoundError:
        return None
    unpacked = unpack_digest(content)
    return None if unpacked is None else Digest(*unpacked)


def digest_of(root: Path, file: Path) -> Digest | None:
    """Return the digest of a file of the store, if it has one."""
    return load_digest(digest_path(root, file))
