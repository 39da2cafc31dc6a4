"""Read messages that are no longer in the store from its archive.

Entries and records are taken from the store's own files as long as those are there; otherwise
ranges of the archived ones are fetched, compared with their digests and kept in a cache. All of it
waits for the disk or the network: only helper threads read.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from attrs import define, field

from ..errors import ArchiveFailedError
from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..format.queue_entry import ENTRY_SIZE, PRE_BLANK, unpack_entry
from ..format.record import Range
from ..integrity.file_digest import unpacked
from ..log.log_reader import LogReader
from ..queue.consume_queue import ConsumeQueue
from ..queue.pull_selection import SCAN_COUNT_MAX, GetResult, GetStatus, walk
from ..queue.queue_table import QueueTable
from .archiver import Archiver, digest_name, log_name

if TYPE_CHECKING:
    from .objects import Objects

CHUNK: Final = 1 << 20  # bytes of one request; four pulls of the largest size
CACHE_BYTES_MAX: Final = 32 << 20  # of chunks and digests: as many consumers can replay at once

_Key: TypeAlias = tuple[ConsumeQueue | None, str, int]


@define(eq=False, repr=False)
class ArchiveReader:
    """What a pull gets of archived messages."""

    _objects: "Objects"
    _archiver: Archiver
    _files: MappedFileQueue  # of the log
    _queues: QueueTable
    _log: LogReader
    # Chunks by name and number; with -1, the packed digest of an object. A queue that was deleted
    # and created again has the same names for other files.
    _cache: OrderedDict[_Key, bytes] = field(factory=OrderedDict, init=False)
    cached_bytes: int = field(default=0, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    requests: int = field(default=0, init=False)  # of objects, since the start

    def first_offset(self, queue: ConsumeQueue) -> int:
        """Return the queue offset of the first message that is archived or local; never waits.

        As long as the archive could not be opened, all are taken for archived.
        """
        archiver = self._archiver
        if archiver.is_open and archiver.begin == archiver.end:
            return queue.min_offset
        begin = archiver.queue_begins.get(f"{queue.topic}/{queue.queue_id}", 0)
        return min(begin, queue.min_offset)

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        high: int,
        *,
        max_count: int,
        max_bytes: int,
        tag_codes: frozenset[int] | None,
    ) -> GetResult:
        """Select messages from a queue offset on, of those below ``high``.

        Raises:
            ArchiveFailedError: The archive cannot be read.
            OSError: A local file cannot be read.
        """
        if not self._archiver.is_open:
            raise ArchiveFailedError("of old messages", self._archiver.failure)
        queue = self._queues.get((topic, queue_id))
        if queue is None:  # the topic was deleted
            return GetResult(GetStatus.NO_MATCHED_LOGIC_QUEUE, 0, 0, 0, [], 0, 0)
        low, begin = self.first_offset(queue), self._archiver.begin
        try:
            entries = self._entries(queue, offset, min(high - offset, SCAN_COUNT_MAX))
        except FileNotFoundError:  # a rule of the object store has deleted it
            following = queue.next_file_offset(offset)
            return GetResult(GetStatus.OFFSET_TOO_SMALL, following, low, high, [], 0, 0)
        return walk(entries, offset, low, high, begin, max_count, max_bytes, tag_codes)

    def _entries(self, queue: ConsumeQueue, offset: int, count: int) -> bytes:
        """Return entries of one file, local or archived, at most ``count``."""
        files, position = queue.files, offset * ENTRY_SIZE
        base = files.base_of(position)
        length = min(count * ENTRY_SIZE, base + files.file_size - position)
        path, start, is_local = files.path(base), position - base, True
        try:
            with disk.opened(path) as fd:
                entries = disk.read_fully(fd, length, start)
            if unpack_entry(entries) != PRE_BLANK:
                return entries
        except FileNotFoundError:
            is_local = False
        name = f"consumequeue/{queue.topic}/{queue.queue_id}/{path.name}"
        try:
            return self._range(name, start, length, files.file_size, owner=queue)
        except FileNotFoundError as error:
            if not is_local:
                raise
            reason = f"a rebuild lost its entries before {queue.min_offset}: reset the group"
            raise ArchiveFailedError(name, reason) from error

    def read(self, ranges: Sequence[Range]) -> bytes:
        """Return the bytes of ranges of the log, joined.

        Raises:
            ArchiveFailedError: The archive cannot be read.
            OSError: A local file cannot be read.
        """
        return b"".join([self._read(*one) for one in ranges])

    def _read(self, physical_offset: int, length: int) -> bytes:
        try:
            return self._log.read_cold([(physical_offset, length)])
        except FileNotFoundError:
            base, size = self._files.base_of(physical_offset), self._files.file_size
        try:
            return self._range(log_name(base), physical_offset - base, length, size)
        except FileNotFoundError as error:  # a rule of the object store has deleted it
            self._archiver.begin = max(self._archiver.begin, base + size)
            raise ArchiveFailedError(log_name(base), "is gone; pull again") from error

    def _range(
        self, name: str, start: int, length: int, size: int, *, owner: ConsumeQueue | None = None
    ) -> bytes:
        """Return bytes of an archived file of ``size`` bytes.

        Raises:
            FileNotFoundError: It is not in the archive.
        """
        first, last = start // CHUNK, (start + length - 1) // CHUNK
        chunks = [
            self._cached((owner, name, number), partial(self._chunk, owner, name, number, size))
            for number in range(first, last + 1)
        ]
        return b"".join(chunks)[start - first * CHUNK :][:length]

    def _chunk(self, owner: ConsumeQueue | None, name: str, number: int, size: int) -> bytes:
        start, end = number * CHUNK, min((number + 1) * CHUNK, size)
        chunk = self._objects.get_range(name, start, end)
        packed = self._cached((owner, name, -1), lambda: self._objects.get(digest_name(name)))
        digest = unpacked(packed)
        if digest is None or len(chunk) != end - start or not digest.covers(start, chunk):
            raise ArchiveFailedError(name, f"bytes {start} to {end} are damaged")
        return chunk

    def _cached(self, key: _Key, fetch: Callable[[], bytes]) -> bytes:
        with self._lock:
            content = self._cache.get(key)
            if content is not None:
                self._cache.move_to_end(key)
                return content
            self.requests += 1
        content = fetch()
        with self._lock:
            if key not in self._cache:  # another thread may have fetched it, too
                self._cache[key] = content
                self.cached_bytes += len(content)
            while self.cached_bytes > CACHE_BYTES_MAX:
                self.cached_bytes -= len(self._cache.popitem(last=False)[1])
        return content
