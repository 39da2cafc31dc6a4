"""Scan the log from record to record, at the speed that recovery needs.

Records are found in chunks of 1 MiB and described by plain tuples: building a ``Record`` for each
would double the time, and most callers need only a few fields.

If no valid record begins at a position, the scan continues with the next one (``resync``), and the
range in between is reported as damage. If none follows, the log ends there: a power cut tears
records at the end of the log. Three cases need more care:

* The CRC covers only the body. If the head or topic is damaged, the lengths do not add up to the
  size of the record, but properties may hold any bytes; ``is_torn`` detects unwritten ones.
* Above the durable offset, a power cut may have kept some sectors and lost others before them. None
  of these records was acknowledged, so the log ends at the first invalid one; later records might
  be decisions about transactions that are lost.
* Records after the end of the log that an earlier start has cut off, but not zeroed, are valid and
  have the right offset. They are older than records written since.
"""

from bisect import bisect_left
from collections.abc import Generator, Iterator
from typing import Final, NamedTuple

from attrs import define, field

from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..format.crc import crc32
from ..format.flags import HOSTS_MASK
from ..format.record import (
    CRC_MASK,
    CRC_TAIL_SIZE,
    CRC_TAIL_START,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PREFIX,
    crc_tail_matches,
    store_timestamp,
)
from ..format.record_fields import (
    HOST_MIXES,
    PROPERTIES_LENGTH,
    TOPIC_LENGTH_V1,
    TOPIC_LENGTH_V2,
    struct_of,
)
from .resync import Damage, find_valid, invalid_reason

SECTOR: Final = 512  # bytes; a disk writes a sector as a whole
SCAN_CHUNK: Final = 1 << 20  # bytes read at once; more would not fit in the processor's cache
_CRC_TAIL_BYTE: Final = CRC_TAIL_START[0]
# The fields that a scan reads; with IPv6 hosts the body length is at another position.
_HEAD: Final = struct_of(
    "total_size", "magic", "body_crc", "queue_id", "queue_offset", "physical_offset", "sys_flag",
    "body_size",
)  # fmt: skip
_BODY_SIZE: Final = {hosts: struct_of("body_size", hosts=hosts) for hosts in HOST_MIXES}

# position in the chunk, size, flags, queue id, queue offset, begin and end of the topic, begin of
# the properties
Found = tuple[int, int, int, int, int, int, int, int]


def find_records(chunk: bytes, offset: int, *, check_crc: bool) -> list[Found]:
    """Return the valid records at the beginning of a chunk, up to the first invalid one.

    The chunk begins at the physical offset ``offset``. A record is valid only if it holds its own
    physical offset, which old data from an earlier use of the file does not.
    """
    found: list[Found] = []
    add = found.append
    unpack_head, unpack_topic_length = _HEAD.unpack_from, TOPIC_LENGTH_V2.unpack_from
    length_v1, length_v2 = TOPIC_LENGTH_V1.size, TOPIC_LENGTH_V2.size
    properties_length = PROPERTIES_LENGTH.size
    lengths_min = length_v1 + properties_length
    chunk_size = len(chunk)
    position = 0
    while position + _HEAD.size < chunk_size:
        (
            size, magic, body_crc, queue_id, queue_offset, physical_offset, sys_flag, body_size,
        ) = unpack_head(chunk, position)  # fmt: skip
        end = position + size
        if physical_offset != offset + position or end > chunk_size:
            break
        body_at = position + _HEAD.size
        if sys_flag & HOSTS_MASK:
            # The body length is the last field of the head.
            head = _BODY_SIZE[sys_flag & HOSTS_MASK]
            body_at = position + head.size
            if body_at > chunk_size:
                break
            body_size = head.unpack_from(chunk, position)[0]
        topic_at = body_at + body_size
        if not body_at <= topic_at <= end - lengths_min:
            break
        if magic == MAGIC_V1:
            topic_start = topic_at + length_v1
            topic_end = topic_start + chunk[topic_at]
        elif magic == MAGIC_V2:
            topic_start = topic_at + length_v2
            topic_end = topic_start + unpack_topic_length(chunk, topic_at)[0]
        else:
            break
        if not topic_start <= topic_end <= end - properties_length:
            break
        properties_start = topic_end + properties_length
        if properties_start + (chunk[topic_end] << 8 | chunk[topic_end + 1]) != end:
            break
        if check_crc:
            if crc32(chunk[body_at:topic_at]) & CRC_MASK != body_crc:
                break
            tail_at = end - CRC_TAIL_SIZE
            if (
                chunk[tail_at] == _CRC_TAIL_BYTE  # saves a call, a tenth of the time per record
                and chunk.startswith(CRC_TAIL_START, tail_at)
                and not crc_tail_matches(chunk[position:end])
            ):
                break
        add((
            position, size, sys_flag, queue_id, queue_offset, topic_start, topic_end,
            properties_start,
        ))  # fmt: skip
        position = end
    return found


class Trust(NamedTuple):
    """What is known about the previous run from outside the log; by default nothing."""

    durable_offset: int = -1  # below it everything was on disk; -1 if unknown
    durable_since: int = 0  # otherwise records stored before this time, in ms, were on disk
    closed_offset: int = -1  # where the log ended at a clean stop
    fresh_offset: int = -1  # records from here on were written after the last recovery
    fresh_timestamp: int = 0  # and are no older than this, in ms


def is_torn(chunk: bytes, position_in_file: int, found: Found) -> bool:
    """Return whether a sector of the properties of a record looks unwritten.

    After a power cut an unwritten sector holds zeros, up to its end or the end of the record.
    """
    position, size, *_, properties_at = found
    end = position + size
    sector = properties_at + -(position_in_file + properties_at) % SECTOR
    while sector < end:
        if not any(chunk[sector : min(sector + SECTOR, end)]):
            return True
        sector += SECTOR
    return False


def is_garbled(chunk: bytes, position_in_file: int, found: Found) -> bool:
    """Return whether properties that span sectors are malformed.

    In the first sector garbage would have damaged other fields too. Senders may send malformed
    properties, so this does not prove that the disk damaged them.
    """
    position, size, *_, properties_at = found
    properties = chunk[properties_at : position + size]
    if -(position_in_file + properties_at) % SECTOR >= len(properties):
        return False
    try:
        segments = properties.decode().split("\x02")
    except UnicodeDecodeError:
        return True
    return any(segment.find("\x01") < 1 for segment in segments if segment)


@define(eq=False, repr=False)
class LogScan:
    """One scan of the log; iterate it once, then read its attributes.

    It opens the files itself, so any thread may run it.
    """

    _files: MappedFileQueue
    # A record or a file begins at the start.
    end_offset: int = field(alias="start")  # after the last valid record
    _end: int | None = None  # without it the scan goes to the log's end
    _check_crc: bool = True
    _trust: Trust | None = None  # without it every valid record counts
    _sound_end: int = -1  # up to here digests have verified the content, so CRCs are not checked
    # physical offset of the last valid record; -1 without one
    last_record: int = field(default=-1, init=False)
    last_timestamp: int = field(default=0, init=False)  # its store time, in ms
    records: int = field(default=0, init=False)
    damages: list[Damage] = field(factory=list, init=False)  # damaged ranges, in order

    def __iter__(self) -> Iterator[tuple[int, bytes, list[Found]]]:
        """Yield physical offset, content and records of each chunk."""
        file_size = self._files.file_size
        bases = set(self._files.bases)
        while True:
            base = self._files.base_of(self.end_offset)
            if base not in bases or (self._end is not None and self.end_offset >= self._end):
                return
            is_blank = yield from self._scan_file(base)
            if is_blank:
                if base + file_size not in bases:
                    return
                self.end_offset = base + file_size
            elif not self._skip_damage():
                return

    def _scan_file(self, base: int) -> Generator[tuple[int, bytes, list[Found]], None, bool]:
        """Scan the rest of one file; return whether a blank ends it, not something invalid."""
        file_size = self._files.file_size
        end = file_size if self._end is None else min(file_size, self._end - base)
        with disk.opened(self._files.path(base)) as fd:
            while (start := self.end_offset - base) + PREFIX.size <= end:
                chunk = disk.pread(fd, min(SCAN_CHUNK, end - start), start)
                if len(chunk) < PREFIX.size:
                    return False
                size, magic = PREFIX.unpack_from(chunk)
                if magic == MAGIC_BLANK and size == file_size - start:
                    return True
                if len(chunk) < size <= end - start and magic in {MAGIC_V1, MAGIC_V2}:
                    chunk = disk.pread(fd, size, start)
                found = self._counting(chunk, base + start)
                if not found:
                    return False
                self._note(chunk, base + start, found)
                yield base + start, chunk, found
        return False

    def _counting(self, chunk: bytes, offset: int) -> list[Found]:
        """Return the records at the beginning of a chunk that count."""
        check_crc = self._check_crc and offset + len(chunk) > self._sound_end
        found = find_records(chunk, offset, check_crc=check_crc)
        if found and self._trust is not None:
            return self._trusted(chunk, offset, found, self._trust)
        return found

    def _note(self, chunk: bytes, offset: int, found: list[Found]) -> None:
        position, size, sys_flag, *_ = found[-1]
        self.records += len(found)
        self.last_record = offset + position
        self.last_timestamp = store_timestamp(chunk, position, sys_flag)
        self.end_offset = offset + position + size

    def _trusted(self, chunk: bytes, offset: int, found: list[Found], trust: Trust) -> list[Found]:
        """Return the records before the first that does not count."""
        position = offset - self._files.base_of(offset)
        stale = self._first_stale(chunk, found, offset, trust)
        if stale < len(found):
            return found[:stale]
        last = found[-1]
        known = trust.durable_offset >= 0
        for number in range(self._first_unflushed(chunk, found, offset, trust), len(found)):
            record = found[number]
            if is_torn(chunk, position, record):
                return found[:number]
            # Malformed properties count as damage by the disk only above the durable offset, where
            # nothing was acknowledged, or at the end of the log; a sender may have sent them.
            if (
                (known or record is last)
                and is_garbled(chunk, position, record)
                and (known or self._next_valid(offset + record[0]) is None)
            ):
                return found[:number]
        return found

    def _first_stale(self, chunk: bytes, found: list[Found], offset: int, trust: Trust) -> int:
        """Return the index of the first of the last records that an earlier start cut off.

        They are older than records written since. An old record with newer ones after it was not
        cut off.
        """
        number = len(found)
        while (
            0 <= trust.fresh_offset <= offset + found[number - 1][0]
            and store_timestamp(chunk, found[number - 1][0], found[number - 1][2])
            < trust.fresh_timestamp
        ):
            number -= 1
            if not number:
                break
        if number == len(found) or self._next_valid(offset + found[-1][0]) is None:
            return number
        return len(found)

    @staticmethod
    def _first_unflushed(chunk: bytes, found: list[Found], offset: int, trust: Trust) -> int:
        """Return the index of the first record that may not have been on disk."""
        if trust.durable_offset >= 0:
            return bisect_left(found, trust.durable_offset - offset, key=lambda record: record[0])
        return bisect_left(
            found,
            trust.durable_since,
            key=lambda record: store_timestamp(chunk, record[0], record[2]),
        )

    def _skip_damage(self) -> bool:
        """Continue after a position without a record; return whether another record follows."""
        files, trust, start = self._files, self._trust, self.end_offset
        if self._end is not None and start + PREFIX.size > self._end:
            return False
        if trust is not None and trust.closed_offset == start and self._is_unwritten(start):
            return False  # the log ends as expected; no need to search further
        if trust is not None and 0 <= trust.durable_offset <= start:
            return False
        end = self._next_valid(start)
        if end is None:
            return False
        self.damages.append(Damage(start, end - start, invalid_reason(files, start)))
        self.end_offset = end
        return True

    def _is_unwritten(self, offset: int) -> bool:
        base = self._files.base_of(offset)
        with disk.opened(self._files.path(base)) as fd:
            return not any(disk.pread(fd, PREFIX.size, offset - base))

    def _next_valid(self, damaged: int) -> int | None:
        """Return the offset of the next record after ``damaged`` that counts; None if none does."""
        return find_valid(self._files, damaged, self._end, self._is_valid)

    def _is_valid(self, candidate: bytes, offset: int) -> bool:
        """Return whether the bytes at an offset are a valid record that counts."""
        found = find_records(candidate, offset, check_crc=True)
        if not found:
            return False
        trust = self._trust
        if trust is None or not 0 <= trust.fresh_offset <= offset:
            return True
        return store_timestamp(candidate, 0, found[0][2]) >= trust.fresh_timestamp
