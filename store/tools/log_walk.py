"""Read the log of a store that a broker may be using, from its first record to its last.

At a position without a record the log ends or is damaged. So the walk searches for the next valid
record, with a magic, consistent lengths, a body that matches its CRC, and its own physical offset.
The bytes in between are a ``DamagedRange``; if no record follows, the log ends. Unlike the scan of
a recovery, which decides how a broker continues, this uses no checkpoint and reports what it finds.

A running broker may change the store during the walk: the files are those that existed when it
began, and a file that retention has deleted since is skipped.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from typing import Final, NamedTuple

from ..errors import CorruptRecordError
from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..format.record import (
    BLANK_SIZE,
    MAGIC_AT,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PREFIX,
    decode_record,
    store_timestamp,
)
from ..log.log_scan import SCAN_CHUNK, Found, find_records

_SEARCH_PIECE: Final = 1 << 20  # bytes read at once in a search for the next record
# Most of it is the unwritten end of a file; comparing takes a twentieth of a search.
_ZEROS: Final = bytes(_SEARCH_PIECE + PREFIX.size)
_MAGICS: Final = tuple(magic.to_bytes(4, "big") for magic in (MAGIC_V1, MAGIC_V2))
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


class DamagedRange(NamedTuple):
    """A range of the log without a valid record, followed by more of the log."""

    start: int
    end: int
    reason: str


class LogWalk:
    """One walk over a log; iterate it once, then read its attributes."""

    def __init__(
        self,
        files: MappedFileQueue,
        *,
        start: int | None = None,
        end: int | None = None,
        reaches: int = 0,
        live: bool = False,
    ) -> None:
        """A record or file begins at ``start``; the log must reach to ``reaches`` at least.

        In a ``live`` store, a damaged position is read again for ``SETTLE_TIME``.
        """
        self.files = files
        self.start = start if start is not None else (files.bases[0] if files.bases else 0)
        self.end_offset = self.start  # after the last valid record
        self.records = 0
        self.last_timestamp = 0  # ms, store time of the last record
        self._end = end
        self._reaches = reaches
        self._live = live

    def __iter__(self) -> Iterator[Chunk | DamagedRange]:
        """Yield chunks of records and the damaged ranges between them, in log order."""
        at = self.start
        waited_at, deadline = -1, 0.0
        while self.files.bases:
            try:
                yield from self._chunks(at)
            except FileNotFoundError:  # deleted by age while we were reading
                at = self.end_offset = self._next_file()
                continue
            at = self.end_offset
            if self._end is not None and at + PREFIX.size > self._end:
                return
            damaged = self._damaged_range(at)
            if damaged is None:
                return
            if self._live and (waited_at != at or time.monotonic() < deadline):
                if waited_at != at:
                    waited_at, deadline = at, time.monotonic() + SETTLE_TIME
                time.sleep(SETTLE_PAUSE)
                continue
            yield damaged
            at = self.end_offset = damaged.end

    def _chunks(self, start: int) -> Iterator[Chunk]:
        """Yield chunks up to the first position without a record, which is ``end_offset``."""
        self.end_offset = start
        file_size = self.files.file_size
        while (base := self.files.base_of(self.end_offset)) in self.files.bases:
            if not (yield from self._chunks_of(base)) or base + file_size not in self.files.bases:
                return
            self.end_offset = base + file_size

    def _chunks_of(self, base: int) -> Generator[Chunk, None, bool]:
        """Yield the chunks of one file; return whether a blank ends it."""
        file_size = self.files.file_size
        end = file_size if self._end is None else min(file_size, self._end - base)
        with disk.opened(self.files.path(base)) as fd:
            while (position := self.end_offset - base) + PREFIX.size <= end:
                content = disk.pread(fd, min(SCAN_CHUNK, end - position), position)
                if len(content) < PREFIX.size:
                    return False
                size, magic = PREFIX.unpack_from(content)
                if magic == MAGIC_BLANK:
                    return bool(size == file_size - position)
                if len(content) < size <= end - position and magic in {MAGIC_V1, MAGIC_V2}:
                    content = disk.pread(fd, size, position)
                found = find_records(content, self.end_offset, check_crc=True)
                if not found:
                    return False
                chunk = Chunk(self.end_offset, content, found)
                self._note(chunk)
                yield chunk
        return False

    def _note(self, chunk: Chunk) -> None:
        self.records += len(chunk.found)
        self.end_offset = chunk.end
        position, _, sys_flag, *_ = chunk.found[-1]
        self.last_timestamp = store_timestamp(chunk.content, position, sys_flag)

    def _next_file(self) -> int:
        """Drop the file that was deleted; return the begin of the next one."""
        base = self.files.base_of(self.end_offset)
        self.files.bases = [later for later in self.files.bases if later > base]
        return self.files.bases[0] if self.files.bases else self.end_offset

    # After a position without a record --------------------------------------------------------

    def _damaged_range(self, at: int) -> DamagedRange | None:
        """Return the damaged range at a position without a record; None if the log ends there."""
        base = self.files.base_of(at)
        if base in self.files.bases and self._is_blank(at):
            later = next((later for later in self.files.bases if later > base), None)
            missing = base + self.files.file_size
            return None if later is None else DamagedRange(missing, later, "the file is missing")
        following = self._search(at)
        if following is not None and self._is_stale(following):
            following = None
        if following is None and at < self._reaches:
            following = self._reaches
        return None if following is None else DamagedRange(at, following, self.what_is_at(at))

    def _is_stale(self, following: int) -> bool:
        """Return whether the record that follows is older, so that it was cut off once.

        RocketMQ cuts a log without zeroing what it cuts off.
        """
        if following < self._reaches:
            return False
        stored = self._stored_at(following)
        return stored is not None and stored < self.last_timestamp

    def _search(self, at: int) -> int | None:
        """Return the offset of the next record, blank or used file; None if there is none."""
        base = self.files.base_of(at)
        if base in self.files.bases:
            found = self._search_file(base, at - base + 1)
            if found is not None:
                return found
        for later in self.files.bases:
            if later > base and self._is_begun(later):
                return later
        return None

    def _search_file(self, base: int, start: int) -> int | None:
        size = self.files.file_size
        with disk.opened(self.files.path(base)) as fd:
            position = start
            while position + PREFIX.size <= size:
                # Overlap, so that a prefix across the end of a piece is found.
                piece = disk.pread(fd, _SEARCH_PIECE + PREFIX.size, position)
                for candidate in _candidates(piece):
                    if self._begins_something(fd, base, position + candidate):
                        return base + position + candidate
                position += _SEARCH_PIECE
        return None

    def _begins_something(self, fd: int, base: int, position: int) -> bool:
        prefix = disk.pread(fd, PREFIX.size, position)
        if len(prefix) < PREFIX.size:
            return False
        size, magic = PREFIX.unpack(prefix)
        if magic == MAGIC_BLANK:
            return bool(size == self.files.file_size - position and size >= BLANK_SIZE)
        if not 0 < size <= self.files.file_size - position:
            return False
        return bool(find_records(disk.pread(fd, size, position), base + position, check_crc=True))

    def _is_begun(self, base: int) -> bool:
        """Return whether a file has data at its start; a prepared file has zeros."""
        try:
            with disk.opened(self.files.path(base)) as fd:
                return any(disk.pread(fd, PREFIX.size, 0))
        except FileNotFoundError:
            return False

    def ends_with_blank(self, end: int) -> bool:
        """Return whether a blank ends the last file, so that bytes after it do not count."""
        return self.files.base_of(end) in self.files.bases and self._is_blank(end)

    def _is_blank(self, at: int) -> bool:
        size, magic = PREFIX.unpack(self.read(at, PREFIX.size).ljust(PREFIX.size, b"\0"))
        left = self.files.base_of(at) + self.files.file_size - at
        return bool(magic == MAGIC_BLANK and size == left)

    def _stored_at(self, at: int) -> int | None:
        """Return the store time of the record at an offset; None if none begins there."""
        prefix = self.read(at, PREFIX.size)
        if len(prefix) < PREFIX.size:
            return None
        size, _ = PREFIX.unpack(prefix)
        content = self.read(at, size) if size > 0 else b""
        found = find_records(content, at, check_crc=False)
        return store_timestamp(content, 0, found[0][2]) if found else None

    def read(self, at: int, size: int) -> bytes:
        """Read from the file of an offset; less or nothing if it ends or is missing."""
        base = self.files.base_of(at)
        try:
            with disk.opened(self.files.path(base)) as fd:
                wanted = min(size, self.files.file_size - (at - base))
                return disk.pread(fd, wanted, at - base)
        except FileNotFoundError:
            return b""

    def what_is_at(self, at: int) -> str:
        """Return why no record is at an offset."""
        base = self.files.base_of(at)
        if base not in self.files.bases:
            return "the file is missing"
        prefix = self.read(at, PREFIX.size)
        if len(prefix) < PREFIX.size:
            return "too little is left of the file for a record or a blank"
        size, magic = PREFIX.unpack(prefix)
        if magic == MAGIC_BLANK:
            return f"a blank of {size} bytes where {base + self.files.file_size - at} are left"
        content = self.read(at, size) if size > 0 else prefix
        try:
            record = decode_record(content)
        except CorruptRecordError as error:
            return error.reason
        return f"a record that says it lies at {record.physical_offset}"

    def tail_size(self, end: int) -> int:
        """Return how many bytes after an offset are in use, up to the last that is not zero.

        Only the file that the offset falls into is read.
        """
        base = self.files.base_of(end)
        if base not in self.files.bases:
            return 0
        written = 0
        at = end
        while at < base + self.files.file_size:
            piece = self.read(at, min(_SEARCH_PIECE, base + self.files.file_size - at))
            if not piece:
                break
            if not _ZEROS.startswith(piece):
                written = at - end + len(piece.rstrip(b"\0"))
            at += len(piece)
        return written


def _candidates(piece: bytes) -> Sequence[int]:
    """Return where in a piece a record or a blank may begin, judged by the magic alone."""
    if _ZEROS.startswith(piece):
        return ()
    places: list[int] = []
    for magic in (*_MAGICS, MAGIC_BLANK.to_bytes(4, "big")):
        at = piece.find(magic, MAGIC_AT)
        while at >= 0:
            places.append(at - MAGIC_AT)
            at = piece.find(magic, at + 1)
    return sorted(places)
