"""Reading the commit log by physical offset.

The loop thread must never wait for the disk, and a page fault on a map would make it wait with
the interpreter locked. So ``LogReader.read`` returns only what is in the page cache
(``page_cache``); what is not, the caller reads with ``read_cold`` in another thread.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import tee
from operator import itemgetter
from time import monotonic
from typing import Final

from ..errors import CorruptRecordError
from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..files.page_cache import RECORD_FIRST, CachedReads, Missing, NotInMemoryError, read
from ..files.zero_copy import FilePart, PageResidency
from ..format.record import (
    HEAD_SIZE_MAX,
    MAGIC_V1,
    MAGIC_V2,
    PREFIX,
    Range,
    Record,
    decode_record,
    store_timestamp,
)
from ..format.record_fields import struct_of
from .log_scan import LogScan
from .resync import Damage
from .transaction_ranges import is_about_transactions

logger = logging.getLogger(__name__)

DESCRIPTORS_MAX: Final = 64  # files kept open for reading; consumers are rarely at more places
SCRATCH_SIZE: Final = 1 << 20  # bytes; a pull answer is a quarter of it at most
WARY_S: Final = 1.0  # seconds; see ``_is_cold``
# Bytes that nobody wants, read to spare a call: those cost a microsecond or two, in which another
# thread may take the interpreter. Messages of eight queues in turn lie this far apart.
GAP_MAX: Final = 16 << 10
PARTS_MAX: Final = 256  # read by one call; with what lies between them, half of what systems take
_MAGICS: Final = frozenset({MAGIC_V1, MAGIC_V2})
_SYS_FLAG: Final = struct_of("sys_flag")

_length_of: Final[Callable[[Range], int]] = itemgetter(1)


class LogReader:
    """The reading end of the log; one thread, except where a method says otherwise."""

    def __init__(self, files: MappedFileQueue) -> None:
        self._files = files
        self._descriptors: OrderedDict[int, int] = OrderedDict()  # by offset of the first byte
        self._scratch = memoryview(bytearray(SCRATCH_SIZE))
        self._viewed = 0  # bytes of it that views have
        self._unwanted = memoryview(bytearray(GAP_MAX))  # what is read and nobody looks at
        self._cached = CachedReads()
        self._residency = PageResidency()
        self._wary_until = 0.0  # by the monotonic clock; 0: no read has found too little lately

    def read(self, ranges: Sequence[Range], *, prefix: bytes = b"") -> bytes | None:
        """Return the bytes of all ranges joined, or None if some are not in the page cache.

        They come ``behind`` what is given: joining the two later would copy everything once more.
        """
        joined = self._joined(ranges, prefix)
        return None if joined is None else bytes(joined)

    def view(self, ranges: Sequence[Range], *, prefix: bytes = b"") -> memoryview | None:
        """Return the same in memory that is used again after ``forget_views``."""
        joined = self._joined(ranges, prefix)
        if joined is not None:
            self._viewed = min(self._viewed + len(joined), SCRATCH_SIZE)
        return joined

    def forget_views(self) -> None:
        """Use the memory of all views again."""
        self._viewed = 0

    @property
    def can_send_parts(self) -> bool:
        """Whether ``part`` may be of use on this system."""
        return self._residency.may_send

    def file_part(self, physical_offset: int, length: int) -> FilePart | None:
        """Return where bytes of one file lie, for who has them sent from there at once.

        None if some are not in the page cache, or nobody knows.

        Raises:
            OSError: The file is gone, or cannot be read.
        """
        position = physical_offset % self._files.file_size
        base = physical_offset - position
        fd = self._descriptor(base)
        if not self._residency.has(fd, base, position, length):
            return None
        return FilePart(fd, position, length)

    def _joined(self, ranges: Sequence[Range], prefix: bytes) -> memoryview | None:
        at, start = len(prefix), self._viewed
        size = at + sum(map(_length_of, ranges))
        if start + size <= SCRATCH_SIZE:
            joined = self._scratch[start : start + size]
        else:
            joined = memoryview(bytearray(size))
        joined[:at] = prefix
        if len(ranges) == 1:
            return joined if self._fill((joined[at:],), *ranges[0]) else None
        for physical_offset, length, parts in spans(ranges, self._files.file_size):
            targets: list[memoryview] = []
            reached = 0
            for start, end in parts:
                if start > reached:
                    targets.append(self._unwanted[: start - reached])
                targets.append(joined[at : at + end - start])
                at += end - start
                reached = end
            if not self._fill(targets, physical_offset, length):
                return None
        return joined

    def _fill(self, targets: Sequence[memoryview], physical_offset: int, length: int) -> bool:
        """Read so much of one file into targets of that length; False if not all is cached."""
        position = physical_offset % self._files.file_size
        fd = self._descriptor(physical_offset - position)
        if self._wary_until and self._is_cold(fd, position, length):
            return False
        if self._cached.read_into(fd, targets, position) == length:
            return True
        self._wary_until = monotonic() + WARY_S
        return False

    def _is_cold(self, fd: int, position: int, length: int) -> bool:
        """Look before a read, for a while after one that found nothing.

        Even a read that may not wait has the kernel read ahead from where it finds nothing, and
        the caller prepare that: 30 ms of processor time were seen, with 8 MiB of read-ahead.
        """
        now = monotonic()
        if now >= self._wary_until:
            self._wary_until = 0.0
            return False
        if not self._residency.lacks(fd, position, length):
            return False
        self._wary_until = now + WARY_S
        return True

    def _descriptor(self, base: int) -> int:
        fd = self._descriptors.get(base)
        if fd is None:
            fd = disk.open_file(self._files.path(base), disk.READ)
            disk.disable_readahead(fd)
            self._descriptors[base] = fd
            if len(self._descriptors) > DESCRIPTORS_MAX:
                disk.close(self._descriptors.popitem(last=False)[1])
        return fd

    def read_cold(self, ranges: Iterable[Range], *, ahead: int = 0) -> bytes:
        """Return the same, waiting for the disk where needed; any thread may call it.

        So many bytes ``ahead`` are in memory soon as well, for who reads on.
        It opens files by itself, because the loop thread may close its own at any time.
        """
        return b"".join(self._pieces(ranges, ahead))

    def _pieces(self, ranges: Iterable[Range], ahead: int = 0) -> Iterator[bytes]:
        for physical_offset, length, parts in spans(ranges, self._files.file_size):
            position = physical_offset % self._files.file_size
            with disk.opened(self._files.path(physical_offset - position)) as fd:
                disk.prefetch(fd, position, length + ahead)
                content = disk.read_fully(fd, length, position)
            for start, end in parts:
                yield content[start:end]

    def record_bytes(self, physical_offset: int, end: int) -> bytes | None:
        """Return the one whole, valid record that begins at the offset and ends by ``end``."""
        encoded = self.unchecked_bytes(physical_offset, end)
        return encoded if encoded and _decoded(encoded, physical_offset) else None

    def unchecked_bytes(self, physical_offset: int, end: int) -> bytes | None:
        """Return the same, if it has a record's first bytes; what follows them is not checked."""
        if not 0 <= physical_offset <= end - PREFIX.size:
            return None
        position = physical_offset % self._files.file_size
        try:
            fd = self._descriptor(physical_offset - position)
        except FileNotFoundError:
            return None
        path = self._files.path(physical_offset - position)
        first = read(path, fd, min(RECORD_FIRST, end - physical_offset), position, of_record=True)
        if len(first) < PREFIX.size:
            return None
        size, magic = PREFIX.unpack_from(first)
        if magic not in _MAGICS or not PREFIX.size < size <= end - physical_offset:
            return None
        return first[:size] if size <= len(first) else read(path, fd, size, position)

    def lacking(self, physical_offsets: Iterable[int]) -> NotInMemoryError:
        """Return the error whose ``fetch`` brings the records at some offsets into memory."""
        missing = []
        for offset in physical_offsets:
            position = offset % self._files.file_size
            missing.append(Missing(self._files.path(offset - position), position, 0))
        return NotInMemoryError(missing)

    def lacking_ranges(self, ranges: Iterable[Range]) -> NotInMemoryError:
        """Return the same for ranges."""
        missing = []
        for physical_offset, length, _ in spans(ranges, self._files.file_size):
            position = physical_offset % self._files.file_size
            missing.append(Missing(self._files.path(physical_offset - position), position, length))
        return NotInMemoryError(missing)

    def record_at(self, physical_offset: int, end: int) -> Record | None:
        """Return the same record, decoded."""
        encoded = self.record_bytes(physical_offset, end)
        return None if encoded is None else decode_record(encoded, check_crc=False)

    def store_timestamp(self, physical_offset: int) -> int:
        """Return when the record at this offset was stored, in ms; the record is not checked."""
        position = physical_offset % self._files.file_size
        base = physical_offset - position
        head = read(self._files.path(base), self._descriptor(base), HEAD_SIZE_MAX, position)
        (sys_flag,) = _SYS_FLAG.unpack_from(head)
        return store_timestamp(head, 0, sys_flag)

    def scan(self, start: int, end: int) -> Iterator[Record]:
        """Give the whole valid records from ``start``, where one begins, to ``end``.

        What is damaged in between is left out, and told in the log. The scan ends before ``end``
        where no valid record follows. Any thread may call it.
        """
        scan = LogScan(self._files, start, end)
        for _, chunk, found in scan:
            for position, *_ in found:
                try:
                    yield decode_record(chunk, position, check_crc=False)
                except CorruptRecordError:
                    continue  # its topic is no text; a start that scans it removes it
        for damage in scan.damages:
            _tell(damage)

    def scan_transactions(self, start: int, end: int) -> Iterator[Record]:
        """Give the same records, but only those that may say something about a transaction.

        Of all others nobody needs to know whether they are sound.
        """
        scan = LogScan(self._files, start, end, check_crc=False)
        for chunk_offset, chunk, found in scan:
            for position, size, sys_flag, _, _, topic_at, topic_end, _ in found:
                topic = chunk[topic_at:topic_end].decode(errors="replace")
                if is_about_transactions(topic, sys_flag):
                    try:
                        yield decode_record(chunk, position)
                    except CorruptRecordError as error:
                        _tell(Damage(chunk_offset + position, size, error.reason))
        for damage in scan.damages:
            _tell(damage)

    def transactions(self, ranges: Iterable[Range]) -> Iterator[Record]:
        """Give the same of records whose places are known."""
        for_telling, for_reading = tee(ranges)
        for (physical_offset, size), encoded in zip(
            for_telling, self._pieces(for_reading), strict=True
        ):
            try:
                record = decode_record(encoded)
            except CorruptRecordError as error:
                _tell(Damage(physical_offset, size, error.reason))
                continue
            if is_about_transactions(record.topic, record.sys_flag):
                yield record

    def close(self) -> None:
        """Close all descriptors."""
        while self._descriptors:
            disk.close(self._descriptors.popitem()[1])

    def forget_before(self, offset: int) -> None:
        """Close the files that end at ``offset`` or before it, so that their space becomes free."""
        for base in [base for base in self._descriptors if base + self._files.file_size <= offset]:
            disk.close(self._descriptors.pop(base))

    def forget_from(self, offset: int) -> None:
        """Close the files that begin at ``offset`` or behind it, because they were deleted."""
        for base in [base for base in self._descriptors if base >= offset]:
            disk.close(self._descriptors.pop(base))


Span = tuple[int, int, list[tuple[int, int]]]
"""Physical offset, length, and the parts of it that are wanted: where they start and end in it."""


def spans(ranges: Iterable[Range], file_size: int) -> Iterator[Span]:
    """Join ranges that are read at once, with what lies between them."""
    start = end = -1
    parts: list[tuple[int, int]] = []
    for physical_offset, length in ranges:
        following = physical_offset + length
        if (
            not 0 <= physical_offset - end <= GAP_MAX
            or following - start > SCRATCH_SIZE
            or physical_offset // file_size != start // file_size
            or len(parts) == PARTS_MAX
        ):
            if parts:
                yield start, end - start, parts
            start, parts = physical_offset, []
        parts.append((physical_offset - start, following - start))
        end = following
    if parts:
        yield start, end - start, parts


def _tell(damage: Damage) -> None:
    logger.error(
        "event=log_damaged offset=%d length=%d reason=%r",
        damage.offset,
        damage.length,
        damage.reason,
    )


def _decoded(encoded: bytes, physical_offset: int) -> Record | None:
    """Return the valid record that says it lies where it lies; else None."""
    try:
        record = decode_record(encoded)
    except CorruptRecordError:
        return None
    return record if record.physical_offset == physical_offset else None
