"""Consume-queue entries: where the messages of one topic and queue lie in the commit log.

A queue is a plain array of 20-byte entries, the one of queue offset q at byte q * 20 of the
queue's files. Unwritten space is zero, so a scan ends at the first entry that is not valid.
A queue whose first message has offset q > 0 is filled up to it with ``PRE_BLANK``.
"""

from collections.abc import Iterator
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

LAYOUT: Final = Struct(">qiq")
ENTRY_SIZE: Final = LAYOUT.size
assert ENTRY_SIZE == 20  # RocketMQ's CQ_STORE_UNIT_SIZE; another size is another file format
PHYSICAL_OFFSET: Final = Struct(">q")  # the first field alone
# Physical offset, size, and the tags code as filters see it: its low 32 bits, as a Java int.
FILTERED: Final = Struct(">qi4xi")
FILTERED_DTYPE: Final = (  # the same for numpy
    ("physical_offset", ">i8"),
    ("size", ">i4"),
    ("tags_code_high", ">i4"),
    ("tags_code", ">i4"),
)
DTYPE: Final = (("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8"))  # for numpy


class QueueEntry(NamedTuple):
    """Where one record lies. Source: RocketMQ ``ConsumeQueue.java``."""

    physical_offset: int  # bytes from the start of the commit log
    size: int  # bytes, the record's total_size
    tags_code: int  # Java hash of TAGS; of a delayed message, its due time in ms

    @property
    def is_valid(self) -> bool:
        """Whether the entry was written; RocketMQ ends its scans at the first unwritten one."""
        return self.physical_offset >= 0 and self.size > 0

    def pack(self) -> bytes:
        return LAYOUT.pack(*self)


PRE_BLANK: Final = QueueEntry(physical_offset=0, size=0x7FFF_FFFF, tags_code=0)


def unpack_entry(buffer: bytes | bytearray | memoryview, position: int = 0) -> QueueEntry:
    """Read the entry at a byte position, valid or not."""
    return QueueEntry._make(LAYOUT.unpack_from(buffer, position))


def unpack_entries(buffer: bytes | bytearray | memoryview) -> Iterator[QueueEntry]:
    """Read all entries of a buffer whose size is a multiple of 20, valid or not."""
    return map(QueueEntry._make, LAYOUT.iter_unpack(buffer))


@lru_cache
def offsets_of(count: int) -> Struct:
    """Return a ``Struct`` that unpacks the physical offsets of ``count`` entries."""
    return Struct(">" + "q12x" * count)


@lru_cache
def sizes_of(count: int) -> Struct:
    """Return a ``Struct`` that unpacks the sizes of ``count`` entries."""
    return Struct(">" + "8xi8x" * count)


@lru_cache
def tags_codes_of(count: int) -> Struct:
    """Return a ``Struct`` that unpacks the tags codes of ``count`` entries, as ``FILTERED``."""
    return Struct(">" + "16xi" * count)
