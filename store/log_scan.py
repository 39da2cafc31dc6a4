"""Walking the log from record to record, at the speed that recovery needs.

Records are found in chunks of 1 MiB and described by plain tuples: building a ``Record`` for
each would double the time, and most walks look at a few fields only.
"""

import os
from bisect import bisect_left
from collections.abc import Generator, Iterator
from struct import Struct
from typing import Final
from zlib import crc32

from .format.flags import HOSTS_MASK
from .format.record import CRC_MASK, HEADS, MAGIC_BLANK, MAGIC_V1, MAGIC_V2, PREFIX
from .mapped_file_queue import MappedFileQueue

SECTOR: Final = 512  # bytes; what a disk writes as a whole, so that no less of it is missing
SCAN_CHUNK: Final = 1 << 20  # bytes read at once; more would not stay in the processor's cache
_HEAD_START: Final = Struct(">iIIiiqqi")  # the head up to the flags
_INT: Final = Struct(">i")
_LONG: Final = Struct(">q")
_SHORT: Final = Struct(">h")
# Positions in a record by its host bits >> 4.
_BODY_AT: Final = tuple(HEADS[bits].size for bits in (0x00, 0x10, 0x20, 0x30))
_STORE_TIMESTAMP_AT: Final = (56, 68, 56, 68)

# position in the chunk, size, flags, queue id, queue offset, where topic and properties begin;
# the topic ends two bytes before the properties
Found = tuple[int, int, int, int, int, int, int]


def find_records(chunk: bytes, offset: int, *, check_crc: bool) -> list[Found]:
    """Return the whole valid records at the start of a chunk that begins at ``offset``.

    A record must say that it lies where it lies: stale bytes of an earlier life do not.
    """
    found: list[Found] = []
    add = found.append
    unpack_head, unpack_int, unpack_short = (
        _HEAD_START.unpack_from,
        _INT.unpack_from,
        _SHORT.unpack_from,
    )
    chunk_size = len(chunk)
    position = 0
    while position + _BODY_AT[0] < chunk_size:
        size, magic, body_crc, queue_id, _, queue_offset, physical_offset, sys_flag = unpack_head(
            chunk, position
        )
        end = position + size
        if physical_offset != offset + position or end > chunk_size:
            break
        body_at = position + _BODY_AT[(sys_flag & HOSTS_MASK) >> 4]
        if body_at + 3 > end:
            break
        topic_at = body_at + unpack_int(chunk, body_at - 4)[0]
        if not body_at <= topic_at <= end - 3:
            break
        if magic == MAGIC_V1:
            topic_start = topic_at + 1
            topic_end = topic_start + chunk[topic_at]
        elif magic == MAGIC_V2:
            topic_start = topic_at + 2
            topic_end = topic_start + unpack_short(chunk, topic_at)[0]
        else:
            break
        if not topic_start <= topic_end <= end - 2:
            break
        properties_start = topic_end + 2
        if properties_start + unpack_short(chunk, topic_end)[0] != end:
            break
        if check_crc and crc32(chunk[body_at:topic_at]) & CRC_MASK != body_crc:
            break
        add((position, size, sys_flag, queue_id, queue_offset, topic_start, properties_start))
        position = end
    return found


def store_timestamp(chunk: bytes, position: int, sys_flag: int) -> int:
    """Return when the record at a position was stored, in ms."""
    at = position + _STORE_TIMESTAMP_AT[(sys_flag & HOSTS_MASK) >> 4]
    timestamp: int = _LONG.unpack_from(chunk, at)[0]
    return timestamp


def is_torn(chunk: bytes, position_in_file: int, found: Found) -> bool:
    """Tell whether a sector under a record's properties looks as if it was never written.

    The CRC covers the body alone. A damaged head or topic does not add up to the record's size,
    but the properties may be anything; where a power cut has kept their sector from the disk there
    are zeros, to the end of the sector or of the record.
    """
    position, size, *_, properties_at = found
    end = position + size
    sector = properties_at + -(position_in_file + properties_at) % SECTOR
    while sector < end:
        if not any(chunk[sector : min(sector + SECTOR, end)]):
            return True
        sector += SECTOR
    return False


class LogScan:
    """One walk over the log; iterate it once, then ask how far it came.

    It opens the files by itself, so any thread may walk.
    """

    def __init__(
        self,
        files: MappedFileQueue,
        start: int,
        end: int | None = None,
        *,
        check_crc: bool = True,
        torn_since: int | None = None,
    ) -> None:
        """A record begins at ``start``, or a file; ``end`` of None means as far as it goes.

        A record stored at ``torn_since`` (ms) or later ends the walk if ``is_torn`` says so. Older
        ones were on disk; what looks like that in them was put there by their sender.
        """
        self.end_offset = start  # behind the last valid record
        self.last_record = -1  # physical offset where that begins; -1 while there is none
        self.last_timestamp = 0  # when it was stored, in ms
        self.records = 0
        self._files = files
        self._end = end
        self._check_crc = check_crc
        self._torn_since = torn_since

    def __iter__(self) -> Iterator[tuple[int, bytes, list[Found]]]:
        """Give physical offset, content and records of each chunk."""
        file_size = self._files.file_size
        bases = set(self._files.bases)
        while True:
            base = self._files.base_of(self.end_offset)
            if base not in bases:
                return
            at_blank = yield from self._scan_file(base)
            if not at_blank or base + file_size not in bases:
                return
            self.end_offset = base + file_size

    def _scan_file(self, base: int) -> Generator[tuple[int, bytes, list[Found]], None, bool]:
        """Scan on in one file; return whether a blank ends it."""
        file_size = self._files.file_size
        end = file_size if self._end is None else min(file_size, self._end - base)
        fd = os.open(self._files.path(base), os.O_RDONLY | os.O_CLOEXEC)
        try:
            while (position := self.end_offset - base) + PREFIX.size <= end:
                chunk = os.pread(fd, min(SCAN_CHUNK, end - position), position)
                if len(chunk) < PREFIX.size:
                    return False
                size, magic = PREFIX.unpack_from(chunk)
                if magic == MAGIC_BLANK:
                    return bool(size == file_size - position)
                if len(chunk) < size <= end - position:
                    chunk = os.pread(fd, size, position)
                found = find_records(chunk, self.end_offset, check_crc=self._check_crc)
                if found and self._torn_since is not None:
                    found = self._whole(chunk, position, found, self._torn_since)
                if not found:
                    return False
                offset = self._note(chunk, found)
                yield offset, chunk, found
            return False
        finally:
            os.close(fd)

    @staticmethod
    def _whole(chunk: bytes, position: int, found: list[Found], torn_since: int) -> list[Found]:
        """Return the records before the first torn one; only young ones are looked at."""
        first = bisect_left(
            found, torn_since, key=lambda record: store_timestamp(chunk, record[0], record[2])
        )
        for number in range(first, len(found)):
            if is_torn(chunk, position, found[number]):
                return found[:number]
        return found

    def _note(self, chunk: bytes, found: list[Found]) -> int:
        offset = self.end_offset
        position, size, sys_flag, *_ = found[-1]
        self.records += len(found)
        self.last_record = offset + position
        self.last_timestamp = store_timestamp(chunk, position, sys_flag)
        self.end_offset = offset + position + size
        return offset
