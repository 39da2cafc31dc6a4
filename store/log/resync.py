"""Find the next valid record after a damaged position of the log.

Every record holds its own physical offset, and its body has a CRC. A position with a magic, the
right offset, consistent lengths and a matching CRC is a record of this log: a copy of a record in
the body of a message has another offset, and so has old data from an earlier use of the file,
unless it was at the same position (``log_scan``).

The ends that follow from the size and the lengths of the damaged record are tried first, so that
its body is not searched, even if it was made to look like a record. Then the rest of the file is
searched, and the following files.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from ..errors import CorruptRecordError
from ..files import disk
from ..files.mapped_file import data_ranges
from ..files.mapped_file_queue import MappedFileQueue
from ..format.flags import HOSTS_MASK
from ..format.record import (
    HEAD_SIZE_MAX,
    MAGIC_AT,
    MAGIC_START,
    MAGIC_V1,
    MAGIC_V2,
    PREFIX,
    decode_record,
)
from ..format.record_fields import (
    HOST_BITS_AT,
    LAYOUTS,
    PROPERTIES_LENGTH,
    TOPIC_LENGTH_V1,
    TOPIC_LENGTH_V2,
    struct_of,
)

_PIECE: Final = 1 << 20  # bytes searched at once
_CANDIDATE: Final = struct_of("total_size", "magic", "physical_offset")
_REASON_READ: Final = 8 << 20  # bytes of a damaged record that are read to find the reason


class Damage(NamedTuple):
    """A range of the log without a valid record, followed by valid ones."""

    offset: int  # physical
    length: int  # bytes
    reason: str

    @property
    def end(self) -> int:
        return self.offset + self.length


class OpenLogFile(NamedTuple):
    """One file of the log, open for reading up to ``limit``."""

    fd: int
    base: int
    limit: int  # position after the last byte to read

    def read(self, position: int, size: int) -> bytes:
        return disk.pread(self.fd, max(min(size, self.limit - position), 0), position)


def find_valid(
    files: MappedFileQueue, start: int, end: int | None, is_valid_at: Callable[[bytes, int], bool]
) -> int | None:
    """Return the physical offset of the next valid record after ``start``; None if there is none.

    ``is_valid_at`` gets the bytes of a candidate and its physical offset, and decides. With ``end``
    only records below it are found.
    """
    first = files.base_of(start)
    for base in [base for base in files.bases if base >= first]:
        limit = files.file_size if end is None else min(files.file_size, end - base)
        if limit <= 0:
            return None
        fd = disk.open_file(files.path(base), disk.READ)
        try:
            file = OpenLogFile(fd, base, limit)
            positions = _positions(file, start - base) if base == first else candidates(file, 0)
            for position in positions:
                if is_valid_at(candidate_at(file, position), base + position):
                    return base + position
        finally:
            disk.close(fd)
    return None


def _positions(file: OpenLogFile, damaged: int) -> Iterator[int]:
    """Yield the positions after the damaged record at which a record may begin."""
    yield from sorted({end for end in _claimed_ends(file, damaged) if damaged < end < file.limit})
    yield from candidates(file, damaged + 1)


def _claimed_ends(file: OpenLogFile, start: int) -> Iterator[int]:
    """Yield the end of a record by its size, and by its lengths; either may be damaged.

    The caller tries the nearer one first: a size that is too large may lead to the end of a later
    record.
    """
    head = file.read(start, HEAD_SIZE_MAX)
    if len(head) < PREFIX.size:
        return
    size, magic = PREFIX.unpack_from(head)
    yield start + size
    if len(head) <= HOST_BITS_AT:
        return
    body_size = LAYOUTS[head[HOST_BITS_AT] & HOSTS_MASK]["body_size"]  # the head ends with it
    if len(head) < body_size.end:
        return
    topic_at = start + body_size.end + _number(head[body_size.position : body_size.end])
    length_size = (TOPIC_LENGTH_V2 if magic == MAGIC_V2 else TOPIC_LENGTH_V1).size
    topic_end = topic_at + length_size + _number(file.read(topic_at, length_size))
    length_size = PROPERTIES_LENGTH.size
    yield topic_end + length_size + _number(file.read(topic_end, length_size))


def _number(length: bytes) -> int:
    """Return a length as an unsigned number; only a damaged one has a sign."""
    return int.from_bytes(length, "big")


def candidates(file: OpenLogFile, start: int) -> Iterator[int]:
    """Yield the positions from ``start`` on at which a magic suggests a record."""
    for begin, end in data_ranges(file.fd, start + MAGIC_AT, file.limit):
        position = begin
        while position < end:
            piece = file.read(position, min(_PIECE, end - position))
            # In zeros, a search for one byte is twenty times as fast as for three.
            at = piece.find(MAGIC_START[0])
            while at >= 0:
                if piece.startswith(MAGIC_START, at):
                    yield position + at - MAGIC_AT
                at = piece.find(MAGIC_START[0], at + 1)
            # Overlap, so that a magic across the end of a piece is found in the next.
            position += max(len(piece) - len(MAGIC_START) + 1, len(MAGIC_START))


def candidate_at(file: OpenLogFile, position: int) -> bytes:
    """Return the bytes of a candidate that holds its own physical offset; else no bytes."""
    head = file.read(position, _CANDIDATE.size)
    if len(head) < _CANDIDATE.size:
        return b""
    size, magic, physical_offset = _CANDIDATE.unpack(head)
    if magic not in {MAGIC_V1, MAGIC_V2} or physical_offset != file.base + position:
        return b""
    return file.read(position, size) if 0 < size <= file.limit - position else b""


def invalid_reason(files: MappedFileQueue, offset: int) -> str:
    """Return why the bytes at an offset are not a valid record."""
    base = files.base_of(offset)
    with disk.opened(files.path(base)) as fd:
        size = min(files.file_size - (offset - base), _REASON_READ)
        content = disk.pread(fd, size, offset - base)
    try:
        record = decode_record(content)
    except CorruptRecordError as error:
        return error.reason
    if record.physical_offset != offset:
        return f"a record that says it lies at {record.physical_offset}"
    return "properties that were not written completely"
