"""Read the log of a store that a broker may be using, from its first record to its last.

Unlike the scan of a recovery, which decides how a broker continues, this uses no checkpoint and
reports what it finds: ranges without a valid record, and missing files.

A running broker may change the store during the walk: the files are those that existed when it
began, and a file that retention has deleted since is skipped.
"""

import time
from collections.abc import Generator, Iterator
from typing import Final, NamedTuple

from attrs import define

from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..format.record import MAGIC_BLANK, PREFIX, store_timestamp
from ..log.log_scan import Found, LogScan
from ..log.resync import Damage, invalid_reason

_PIECE: Final = 1 << 20  # bytes read at once after the end of the log
_ZEROS: Final = bytes(_PIECE)
SETTLE_TIME: Final = 1.0  # seconds that a broker may take to finish what it is writing
SETTLE_PAUSE: Final = 0.02  # seconds


class Chunk(NamedTuple):
    """Consecutive valid records."""

    offset: int  # physical offset of the first byte of ``content``
    content: bytes
    found: list[Found]

    @property
    def end(self) -> int:
        """The physical offset after its last record."""
        position, size, *_ = self.found[-1]
        return self.offset + position + size

    def stored(self, number: int) -> int:
        """Return the store time in ms of one of its records."""
        position, _, sys_flag, *_ = self.found[number]
        return store_timestamp(self.content, position, sys_flag)


@define(eq=False, repr=False, slots=False)
class LogWalk:
    """One walk over a log; iterate it once, then read its attributes."""

    files: MappedFileQueue
    _start: int | None = None  # a record or file begins here
    _end: int | None = None
    _reaches: int = 0  # the log must reach to this offset at least
    _live: bool = False  # in a live store, a damaged position is read again for ``SETTLE_TIME``

    def __attrs_post_init__(self) -> None:
        first = self.files.bases[0] if self.files.bases else 0
        self.start = first if self._start is None else self._start
        self.end_offset = self.start  # after the last valid record
        self.records = 0
        self.last_timestamp = 0  # ms, store time of the last record
        self._unsettled = -1  # offset of the last damage found
        self._settled_at = 0.0  # monotonic; from then on it counts

    def __iter__(self) -> Iterator[Chunk | Damage]:
        """Yield chunks of records and the damaged ranges between them, in log order."""
        while self.files.bases:
            try:
                while (yield from self._scan()):
                    time.sleep(SETTLE_PAUSE)
                damage = self._missing()
            except FileNotFoundError:  # deleted by age while we were reading
                base = self.files.base_of(self.end_offset)
                self.files.bases = [later for later in self.files.bases if later > base]
                self.end_offset = (self.files.bases or [self.end_offset])[0]
                continue
            if damage is None:
                return
            yield damage
            self.end_offset = damage.end

    def _scan(self) -> Generator[Chunk | Damage, None, bool]:
        """Yield what follows up to the last valid record, or a missing file.

        Returns True if a broker may be writing what looks like damage, to be read again.
        """
        scan = LogScan(self.files, self.end_offset, self._end)
        for chunk in map(Chunk._make, scan):
            if scan.damages:
                damage = scan.damages.pop()
                if damage.end >= self._reaches and chunk.stored(0) < self.last_timestamp:
                    return False  # RocketMQ cuts a log without zeroing what it cuts off
                if self._live and not self._has_settled(damage.offset):
                    return True
                yield damage
            self.records += len(chunk.found)
            self.end_offset, self.last_timestamp = chunk.end, chunk.stored(-1)
            yield chunk
        self.end_offset = scan.end_offset
        return False

    def _has_settled(self, offset: int) -> bool:
        """Return whether a broker has had the time to finish writing at an offset."""
        if offset != self._unsettled:
            self._unsettled, self._settled_at = offset, time.monotonic() + SETTLE_TIME
        return time.monotonic() >= self._settled_at

    def _missing(self) -> Damage | None:
        """Return the range without records after the last one; None if the log ends there."""
        at = self.end_offset
        if self._end is not None and at + PREFIX.size > self._end:
            return None
        later = next((base for base in self.files.bases if base > at), self._reaches)
        if self.ends_with_blank(at):
            at, reason = self.files.base_of(at) + self.files.file_size, "the file is missing"
        else:
            later = self._reaches  # no later file has a record
            reason = invalid_reason(self.files, at) if at < later else ""
        return Damage(at, later - at, reason) if at < later else None

    def ends_with_blank(self, end: int) -> bool:
        """Return whether a blank ends the file here, so that bytes after it do not count."""
        prefix = self.read(end, PREFIX.size)
        left = self.files.base_of(end) + self.files.file_size - end
        return prefix == PREFIX.pack(left, MAGIC_BLANK)

    def read(self, at: int, size: int) -> bytes:
        """Read from the file of an offset; less or nothing if it ends or is missing."""
        base = self.files.base_of(at)
        try:
            with disk.opened(self.files.path(base)) as fd:
                wanted = min(size, self.files.file_size - (at - base))
                return disk.pread(fd, wanted, at - base)
        except FileNotFoundError:
            return b""

    def tail_size(self, end: int) -> int:
        """Return how many bytes after an offset are in use, up to the last that is not zero.

        Only the file that the offset falls into is read.
        """
        written, at = 0, end
        file_end = self.files.base_of(end) + self.files.file_size
        while at < file_end and (piece := self.read(at, min(_PIECE, file_end - at))):
            if not _ZEROS.startswith(piece):  # most of it is unwritten, and comparing is fast
                written = at - end + len(piece.rstrip(b"\0"))
            at += len(piece)
        return written
