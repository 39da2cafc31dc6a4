"""Reading the commit log by physical offset.

The event loop must never wait for the disk, and a page fault on a map would stop all threads of the
interpreter. So ``LogReader.read`` returns only data in the page cache (``page_cache``); other data
the caller reads with ``read_cold`` in another thread.
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
from ..ports import LogOffsets
from .log_scan import LogScan
from .resync import Damage
from .transaction_ranges import TransactionRanges, is_about_transactions

logger = logging.getLogger(__name__)

DESCRIPTORS_MAX: Final = 64  # files kept open for reading; consumers rarely read more at a time
SCRATCH_SIZE: Final = 1 << 20  # bytes; four pull answers of the largest size
CHECK_FIRST_S: Final = 1.0  # seconds; see ``_is_cold``
# Bytes between two ranges that are read to save a call, which costs a microsecond or two and may
# lose the interpreter to another thread. Messages of eight queues in turn lie this far apart.
GAP_MAX: Final = 16 << 10
PARTS_MAX: Final = 256  # ranges of one call; with the gaps, half of what systems accept
_MAGICS: Final = frozenset({MAGIC_V1, MAGIC_V2})
_SYS_FLAG: Final = struct_of("sys_flag")

_length_of: Final[Callable[[Range], int]] = itemgetter(1)


class _FilePositions:
    """The extent of the files, for tools that do not know where the log ends."""

    def __init__(self, files: MappedFileQueue) -> None:
        self.files = files

    @property
    def min_offset(self) -> int:
        return self.files.bases[0] if self.files.bases else 0

    @property
    def write_offset(self) -> int:
        return self.files.bases[-1] + self.files.file_size if self.files.bases else 0

    @property
    def readable_offset(self) -> int:
        return self.write_offset


class LogReader:
    """The reading end of the log; one thread, except where a method says otherwise."""

    def __init__(self, files: MappedFileQueue, log: LogOffsets | None = None) -> None:
        self._files = files
        self._log = log or _FilePositions(files)
        self.known_transactions = TransactionRanges()  # found by recovery, for the first scan
        self._descriptors: OrderedDict[int, int] = OrderedDict()  # by offset of the first byte
        self._scratch = memoryview(bytearray(SCRATCH_SIZE))
        self._viewed = 0  # bytes of it in use by views
        self._gap_target = memoryview(bytearray(GAP_MAX))  # gaps between ranges are read into it
        self._cached = CachedReads()
        self._residency = PageResidency()
        self._check_until = 0.0  # monotonic; 0: no read has missed the page cache lately

    def read(self, ranges: Sequence[Range], *, prefix: bytes = b"") -> bytes | None:
        """Return the bytes of all ranges joined, or None if some are not in the page cache.

        The result begins with ``prefix``; adding it later would copy everything again.
        """
        joined = self._joined(ranges, prefix)
        return None if joined is None else bytes(joined)

    def view(self, ranges: Sequence[Range], *, prefix: bytes = b"") -> memoryview | None:
        """Return what ``read`` returns as a view; valid until ``forget_views``."""
        joined = self._joined(ranges, prefix)
        if joined is not None:
            self._viewed = min(self._viewed + len(joined), SCRATCH_SIZE)
        return joined

    def forget_views(self) -> None:
        """Release the memory of all views for reuse."""
        self._viewed = 0

    @property
    def can_send_parts(self) -> bool:
        """Whether the system supports sending file parts; see ``file_part``."""
        return self._residency.may_send

    def file_part(self, physical_offset: int, length: int) -> FilePart | None:
        """Return a range of one file, to be sent at once without a copy.

        None if a part of it is not in the page cache, or that is unknown.

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
                    targets.append(self._gap_target[: start - reached])
                targets.append(joined[at : at + end - start])
                at += end - start
                reached = end
            if not self._fill(targets, physical_offset, length):
                return None
        return joined

    def _fill(self, targets: Sequence[memoryview], physical_offset: int, length: int) -> bool:
        """Read ``length`` bytes of one file into targets; return False if not all is cached."""
        position = physical_offset % self._files.file_size
        fd = self._descriptor(physical_offset - position)
        if self._check_until and self._is_cold(fd, position, length):
            return False
        if self._cached.read_into(fd, targets, position) == length:
            return True
        self._check_until = monotonic() + CHECK_FIRST_S
        return False

    def _is_cold(self, fd: int, position: int, length: int) -> bool:
        """Return whether a range is not cached; asked only for a while after a read that missed.

        Even a read that may not wait makes the kernel start to read ahead, which takes processor
        time of the caller: 30 ms were measured with 8 MiB of read-ahead.
        """
        now = monotonic()
        if now >= self._check_until:
            self._check_until = 0.0
            return False
        if not self._residency.lacks(fd, position, length):
            return False
        self._check_until = now + CHECK_FIRST_S
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

    def read_cold(self, ranges: Iterable[Range]) -> bytes:
        """Return the bytes of all ranges joined, waiting for the disk; any thread.

        Files are opened for this call, because the loop thread may close its own at any time.
        """
        return b"".join(self._pieces(ranges))

    def _pieces(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        for physical_offset, length, parts in spans(ranges, self._files.file_size):
            position = physical_offset % self._files.file_size
            with disk.opened(self._files.path(physical_offset - position)) as fd:
                disk.disable_readahead(fd)
                content = disk.read_fully(fd, length, position)
            for start, end in parts:
                yield content[start:end]

    def record_bytes(self, physical_offset: int, end: int | None = None) -> bytes | None:
        """Return the valid record that begins at an offset; else None.

        It ends by ``end``, which is the end of the readable log if not given.
        """
        end = self._log.readable_offset if end is None else end
        encoded = self.unchecked_bytes(physical_offset, end)
        return encoded if encoded and _decoded(encoded, physical_offset) else None

    def unchecked_bytes(self, physical_offset: int, end: int | None = None) -> bytes | None:
        """Return the record at an offset, readable or not; only its size and magic are checked."""
        end = self._log.write_offset if end is None else end
        if not self._log.min_offset <= physical_offset <= end - PREFIX.size:
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
        """Return an error whose ``fetch`` loads the records at some offsets into memory.

        Offsets outside the log are left out.
        """
        missing = []
        for offset in physical_offsets:
            if self._log.min_offset <= offset < self._log.write_offset:
                position = offset % self._files.file_size
                missing.append(Missing(self._files.path(offset - position), position, 0))
        return NotInMemoryError(missing)

    def lacking_ranges(self, ranges: Iterable[Range]) -> NotInMemoryError:
        """Return an error whose ``fetch`` loads ranges of the log into memory."""
        missing = []
        for physical_offset, length, _ in spans(ranges, self._files.file_size):
            position = physical_offset % self._files.file_size
            missing.append(Missing(self._files.path(physical_offset - position), position, length))
        return NotInMemoryError(missing)

    def record_at(self, physical_offset: int, end: int | None = None) -> Record | None:
        """Return the record that ``record_bytes`` returns, decoded; else None."""
        encoded = self.record_bytes(physical_offset, end)
        return None if encoded is None else decode_record(encoded, check_crc=False)

    def missing_part(self, physical_offset: int, length: int) -> NotInMemoryError | None:
        """Return an error whose ``fetch`` loads a part of the log; None if it is in memory.

        A part that begins after the end of the log counts as in memory.
        """
        position = physical_offset % self._files.file_size
        in_file = self._files.file_size - position
        length = min(length, in_file, self._log.write_offset - physical_offset)
        base = physical_offset - position
        if length <= 0 or base not in self._files.bases:
            return None
        if not self._residency.lacks(self._descriptor(base), position, length):
            return None
        return self.lacking_ranges([(physical_offset, length)])

    def store_timestamp(self, physical_offset: int) -> int:
        """Return the store time in ms of the record at an offset; readable or not, and unchecked.

        Raises:
            OSError: The file is gone, or cannot be read.
        """
        position = physical_offset % self._files.file_size
        base = physical_offset - position
        head = read(self._files.path(base), self._descriptor(base), HEAD_SIZE_MAX, position)
        (sys_flag,) = _SYS_FLAG.unpack_from(head)
        return store_timestamp(head, 0, sys_flag)

    def scan(self, start: int, end: int | None = None) -> Iterator[Record]:
        """Yield the valid records in log order; any thread.

        A record or a file begins at ``start``, which is raised to the start of the log. Without
        ``end`` the scan goes to the current end of the log, readable or not. Damaged ranges are
        left out and logged.
        """
        end = self._log.write_offset if end is None else end
        scan = LogScan(self._files, max(start, self._log.min_offset), end)
        for _, chunk, found in scan:
            for position, *_ in found:
                try:
                    yield decode_record(chunk, position, check_crc=False)
                except CorruptRecordError:
                    continue  # the topic is not UTF-8; the next start that scans it removes it
        for damage in scan.damages:
            _log_damage(damage)

    def scan_transactions(self, start: int) -> Iterator[Record]:
        """Yield the records of ``scan`` that may belong to a transaction.

        The first call reads the ranges that recovery has found, and scans only the rest of the
        log. A damaged record may be missing without an entry in the log; each yielded one is valid.
        """
        known, self.known_transactions = self.known_transactions, TransactionRanges()
        start, end = max(start, self._log.min_offset), self._log.write_offset
        yield from self._scan_transactions(start, min(known.start, end))
        yield from self._transactions(known.ranges(start))
        yield from self._scan_transactions(max(start, known.end), end)

    def _scan_transactions(self, start: int, end: int) -> Iterator[Record]:
        """Yield transaction records of a part of the log; the CRCs of others are not checked."""
        scan = LogScan(self._files, start, end, check_crc=False)
        for chunk_offset, chunk, found in scan:
            for position, size, sys_flag, _, _, topic_at, topic_end, _ in found:
                topic = chunk[topic_at:topic_end].decode(errors="replace")
                if is_about_transactions(topic, sys_flag):
                    try:
                        yield decode_record(chunk, position)
                    except CorruptRecordError as error:
                        _log_damage(Damage(chunk_offset + position, size, error.reason))
        for damage in scan.damages:
            _log_damage(damage)

    def _transactions(self, ranges: Iterable[Range]) -> Iterator[Record]:
        """Yield the valid transaction records at known ranges."""
        for_errors, for_reading = tee(ranges)
        for (physical_offset, size), encoded in zip(
            for_errors, self._pieces(for_reading), strict=True
        ):
            try:
                record = decode_record(encoded)
            except CorruptRecordError as error:
                _log_damage(Damage(physical_offset, size, error.reason))
                continue
            if is_about_transactions(record.topic, record.sys_flag):
                yield record

    def close(self) -> None:
        while self._descriptors:
            disk.close(self._descriptors.popitem()[1])

    def forget_before(self, offset: int) -> None:
        """Close the files that end at or before ``offset``, so that their space becomes free."""
        for base in [base for base in self._descriptors if base + self._files.file_size <= offset]:
            disk.close(self._descriptors.pop(base))

    def forget_from(self, offset: int) -> None:
        """Close the files that begin at or after ``offset``, because they were deleted."""
        for base in [base for base in self._descriptors if base >= offset]:
            disk.close(self._descriptors.pop(base))


Span = tuple[int, int, list[tuple[int, int]]]
"""Physical offset, length, and begin and end of each requested range within it."""


def spans(ranges: Iterable[Range], file_size: int) -> Iterator[Span]:
    """Join ranges that lie close together, so that one read covers them and the gaps between."""
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


def _log_damage(damage: Damage) -> None:
    logger.error(
        "event=log_damaged offset=%d length=%d reason=%r",
        damage.offset,
        damage.length,
        damage.reason,
    )


def _decoded(encoded: bytes, physical_offset: int) -> Record | None:
    """Return the record if it is valid and holds its own physical offset; else None."""
    try:
        record = decode_record(encoded)
    except CorruptRecordError:
        return None
    return record if record.physical_offset == physical_offset else None
