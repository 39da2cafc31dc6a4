"""Walking the log from record to record, at the speed that recovery needs.

Records are found in chunks of 1 MiB and described by plain tuples: building a ``Record`` for
each would double the time, and most walks look at a few fields only.

Where no whole record begins, the walk goes on with the next one that does (``log_search``), and
what lies between is noted as damaged. If none follows, the log ends there: what a power cut has
torn is at its end. Three things need more care than that:

* The CRC covers the body alone. A damaged head or topic does not add up to the record's size, but
  properties may be anything; ``is_torn`` says when they look as if they had not been written.
* Behind what is known to have been on disk, a power cut may have kept some sectors and lost
  others before them. Nobody was told of any of it, so the log ends at the first bad record there;
  those behind it might be decisions about what is lost.
* Records behind the end that an earlier start has cut off, but not zeroed, are whole as well and
  lie where they say. They are older than what was written since.
"""

from bisect import bisect_left
from collections.abc import Generator, Iterator
from enum import Enum
from typing import Final, NamedTuple

from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..format.crc import crc32
from ..format.flags import HOSTS_MASK, has_queue_entry
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
from .resync import Damage, LogFile, candidate_at, candidates, find_true, what_is_wrong

SECTOR: Final = 512  # bytes; what a disk writes as a whole, so that no less of it is missing
SCAN_CHUNK: Final = 1 << 20  # bytes read at once; more would not stay in the processor's cache
_CRC_TAIL_BYTE: Final = CRC_TAIL_START[0]
# What a walk looks at; with IPv6 hosts the length of the body lies elsewhere.
_HEAD: Final = struct_of(
    "total_size", "magic", "body_crc", "queue_id", "queue_offset", "physical_offset", "sys_flag",
    "body_size",
)  # fmt: skip
_BODY_SIZE: Final = {hosts: struct_of("body_size", hosts=hosts) for hosts in HOST_MIXES}

# position in the chunk, size, flags, queue id, queue offset, where the topic begins and ends, and
# where the properties begin
Found = tuple[int, int, int, int, int, int, int, int]


def find_records(chunk: bytes, offset: int, *, check_crc: bool) -> list[Found]:
    """Return the whole valid records that a chunk begins with.

    The chunk begins at the physical offset ``offset``. A record must say that it lies where it
    lies: stale bytes of an earlier life do not.
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
            head = _BODY_SIZE[sys_flag & HOSTS_MASK]  # it ends where the head ends
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
                chunk[tail_at] == _CRC_TAIL_BYTE  # a call costs every record a tenth of all this
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
    """What is known of the last life of a log, apart from the log; nothing is the default."""

    durable_offset: int = -1  # below it everything was on disk; -1 when that is not known
    durable_since: int = 0  # else: records stored before this time, in ms, were on disk
    closed_offset: int = -1  # where the log ended at an ordered stop
    fresh_offset: int = -1  # what lies behind it was written after the last recovery, not before
    fresh_timestamp: int = 0  # so it is no older than this, in ms


def is_torn(chunk: bytes, position_in_file: int, found: Found) -> bool:
    """Tell whether a sector under a record's properties looks as if it was never written.

    Where a power cut has kept it from the disk there are zeros, to the end of the sector or of
    the record.
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
    """Tell whether properties that continue in another sector are none there.

    In the sector where they begin, garbage would have met something else. Senders may put anything
    into properties, so this is no proof that they were garbled.
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


class _Stop(Enum):
    """Why no record was found."""

    BLANK = "the file ends, and the next one goes on"
    BAD = "what begins here is no whole record"
    TORN = "a whole record whose properties are not as they were"
    STALE = "a whole record that was cut off once"


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
        trust: Trust | None = None,
        sound_end: int = -1,
    ) -> None:
        """A record begins at ``start``, or a file; ``end`` of None means as far as it goes.

        Without ``trust`` whatever is whole counts. Up to ``sound_end`` digests say that all is as
        it was written, so CRCs are not checked there.
        """
        self.end_offset = start  # behind the last valid record
        self.last_record = -1  # physical offset where that begins; -1 while there is none
        self.last_timestamp = 0  # when it was stored, in ms
        self.records = 0
        self.damages: list[Damage] = []  # stretches left out, in order
        self._files = files
        self._end = end
        self._check_crc = check_crc
        self._trust = trust
        self._sound_end = sound_end

    def __iter__(self) -> Iterator[tuple[int, bytes, list[Found]]]:
        """Give physical offset, content and records of each chunk."""
        file_size = self._files.file_size
        bases = set(self._files.bases)
        while True:
            base = self._files.base_of(self.end_offset)
            if base not in bases or (self._end is not None and self.end_offset >= self._end):
                return
            stop = yield from self._scan_file(base)
            if stop is _Stop.BLANK:
                if base + file_size not in bases:
                    return
                self.end_offset = base + file_size
            elif not self._goes_on(stop):
                return

    def _scan_file(self, base: int) -> Generator[tuple[int, bytes, list[Found]], None, _Stop]:
        """Scan on in one file; return what ends that."""
        file_size = self._files.file_size
        end = file_size if self._end is None else min(file_size, self._end - base)
        fd = disk.open_file(self._files.path(base), disk.READ)
        try:
            while (start := self.end_offset - base) + PREFIX.size <= end:
                chunk = disk.pread(fd, min(SCAN_CHUNK, end - start), start)
                if len(chunk) < PREFIX.size:
                    return _Stop.BAD
                size, magic = PREFIX.unpack_from(chunk)
                if magic == MAGIC_BLANK and size == file_size - start:
                    return _Stop.BLANK
                if len(chunk) < size <= end - start and magic in {MAGIC_V1, MAGIC_V2}:
                    chunk = disk.pread(fd, size, start)
                found, stop = self._counting(chunk, base + start)
                if found:
                    self._note(chunk, base + start, found)
                    yield base + start, chunk, found
                if not found or stop is not _Stop.BAD:
                    return stop
            return _Stop.BAD
        finally:
            disk.close(fd)

    def _counting(self, chunk: bytes, offset: int) -> tuple[list[Found], _Stop]:
        """Return the records of a chunk that count, and why no more follow in it."""
        check_crc = self._check_crc and offset + len(chunk) > self._sound_end
        found = find_records(chunk, offset, check_crc=check_crc)
        if found and self._trust is not None:
            return self._trusted(chunk, offset, found, self._trust)
        return found, _Stop.BAD

    def _note(self, chunk: bytes, offset: int, found: list[Found]) -> None:
        position, size, sys_flag, *_ = found[-1]
        self.records += len(found)
        self.last_record = offset + position
        self.last_timestamp = store_timestamp(chunk, position, sys_flag)
        self.end_offset = offset + position + size

    # What is whole and yet does not count ---------------------------------------------------

    def _trusted(
        self, chunk: bytes, offset: int, found: list[Found], trust: Trust
    ) -> tuple[list[Found], _Stop]:
        """Return the records before the first that does not count, and why that one does not."""
        position = offset - self._files.base_of(offset)
        stale = self._first_stale(chunk, found, offset, trust)
        if stale < len(found):
            return found[:stale], _Stop.STALE
        last = found[-1]
        known = trust.durable_offset >= 0
        for number in range(self._first_young(chunk, found, offset, trust), len(found)):
            record = found[number]
            if is_torn(chunk, position, record):
                return found[:number], _Stop.TORN
            # A sender's own garbage is told from the disk's only where nothing can have been
            # acknowledged, or at the end of the log.
            if (
                (known or record is last)
                and is_garbled(chunk, position, record)
                and (known or self._next_true(offset + record[0]) is None)
            ):
                return found[:number], _Stop.TORN
        return found, _Stop.BAD

    def _first_stale(self, chunk: bytes, found: list[Found], offset: int, trust: Trust) -> int:
        """Return the number of the first of those at the end that were cut off once.

        They are older than what was written since. A single older one among those is none.
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
        if number == len(found) or self._next_true(offset + found[-1][0]) is None:
            return number
        return len(found)

    @staticmethod
    def _first_young(chunk: bytes, found: list[Found], offset: int, trust: Trust) -> int:
        """Return the number of the first record that may not have been on disk."""
        if trust.durable_offset >= 0:
            return bisect_left(found, trust.durable_offset - offset, key=lambda record: record[0])
        return bisect_left(
            found,
            trust.durable_since,
            key=lambda record: store_timestamp(chunk, record[0], record[2]),
        )

    # Behind a damaged place -----------------------------------------------------------------

    def _goes_on(self, stop: _Stop) -> bool:
        """Go on behind the place where no record counts; tell whether there is anything."""
        files, trust, start = self._files, self._trust, self.end_offset
        if stop is _Stop.STALE:
            return False
        if self._end is not None and start + PREFIX.size > self._end:
            return False
        if trust is not None and trust.closed_offset == start and self._is_unwritten(start):
            return False  # as expected, so no need to search what lies behind
        if trust is not None and 0 <= trust.durable_offset <= start:
            return False
        end = self._next_true(start)
        if end is None:
            return False
        self.damages.append(Damage(start, end - start, what_is_wrong(files, start)))
        self.end_offset = end
        return True

    def _is_unwritten(self, offset: int) -> bool:
        base = self._files.base_of(offset)
        with disk.opened(self._files.path(base)) as fd:
            return not any(disk.pread(fd, PREFIX.size, offset - base))

    def _next_true(self, damaged: int) -> int | None:
        """Return where the next record behind the one at ``damaged`` begins that counts."""
        return find_true(self._files, damaged, self._end, self._is_true)

    def _is_true(self, candidate: bytes, offset: int) -> bool:
        """Tell whether the bytes at an offset are a whole record that counts."""
        found = find_records(candidate, offset, check_crc=True)
        if not found:
            return False
        trust = self._trust
        if trust is None or not 0 <= trust.fresh_offset <= offset:
            return True
        return store_timestamp(candidate, 0, found[0][2]) >= trust.fresh_timestamp


class QueuePlace(NamedTuple):
    """Where a record belongs."""

    topic: str
    queue_id: int
    queue_offset: int


def legible(files: MappedFileQueue, start: int, end: int) -> Iterator[QueuePlace]:
    """Give the places of the records in a damaged stretch, within one file, that add up."""
    base = files.base_of(start)
    fd = disk.open_file(files.path(base), disk.READ)
    try:
        file = LogFile(fd, base, end - base)
        for position in candidates(file, start - base):
            candidate = candidate_at(file, position)
            for found in find_records(candidate, base + position, check_crc=False):
                _, _, sys_flag, queue_id, queue_offset, topic_at, topic_end, _ = found
                if has_queue_entry(sys_flag):
                    topic = candidate[topic_at:topic_end].decode(errors="replace")
                    yield QueuePlace(topic, queue_id, queue_offset)
    finally:
        disk.close(fd)
