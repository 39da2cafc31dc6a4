"""Build the key index, some time after records are appended.

No sender waits for index items. So the keys of appended records are kept in memory and indexed in
slices: when the event loop has time, before a look-up, or when too many are pending.

An index that lacks much of the log, after a kill, a full disk or because it was deleted, *lags*:
it is filled from the log in slices, in log order, while messages are served. Meanwhile no keys are
kept in memory, and look-ups find only what is indexed.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from ..errors import DiskFullError, StoreError
from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..format.index import KeyedRecord, hashed_keys
from ..format.properties import PROPERTIES_SIZE_MAX
from ..format.record import store_timestamp
from ..log.append_request import AppendRequest, AppendResult
from ..log.log_scan import Found, LogScan
from ..ports import LogOffsets
from .index_file import IndexFile
from .index_service import IndexService

logger = logging.getLogger(__name__)

# Bytes of log not indexed yet, as far as they can be keys: short records take as much memory. Above
# it, each append indexes for ``SLICE_MS``; above twice as much, no keys are kept, and the log is
# read later.
PENDING_BYTES_MAX: Final = 8 << 20
SLICE_MS: Final = 1.0  # that an append, or a look-up in an index that lags, spends on indexing
# Indexed at once: so few that a put keeps the event loop for a millisecond or two. In a new file,
# and after a flush, each key touches a page of slots for the first time, which takes the kernel
# 4 us: 512 records with two keys each took 5 ms, 128 take 1.5. The price of fewer is that numpy's
# calls are shared by fewer: puts of 64 cost batches more processor time. The bytes stand for the
# keys; one record may have thousands.
RECORDS_PER_PUT: Final = 128
PROPERTIES_PER_PUT: Final = 24 << 10  # bytes, unless one record has more
PROGRESS_EVERY: Final = 2.0  # seconds between two lines of the log
FAILURE_LOGGED_EVERY: Final = 60.0  # seconds
# Bytes of log that a start indexes before it serves requests: a fifth of a second. To index ten
# gigabytes takes twice as long as everything else that a start does after a kill.
START_BYTES_MAX: Final = 64 << 20
# Bytes of log that a start reads for a key that a missing index file would have; that file began
# with the first one.
GAP_BYTES_MAX: Final = 64 << 20
READ_AHEAD: Final = 8 << 20  # bytes of log requested from the disk before they are indexed
RETRY_EVERY: Final = 1.0  # seconds until the next attempt after the disk was full
# Seconds between two flushes. Keys hit slots at random, so each flush writes all their pages; a
# start after a kill indexes the records of this time again.
FLUSH_EVERY: Final = 10.0


class IndexBuilder:
    """The index, and the keys that are not in it yet."""

    def __init__(self, index: IndexService, files: MappedFileQueue, log: LogOffsets) -> None:
        self._index = index
        self._files = files
        self._log = log
        self._pending: deque[KeyedRecord] = deque()
        self._lags = False  # missing keys are read from the log
        self._walk: Iterator[int] | None = None  # indexes the log up to ``_walk_end``
        self._walk_end = 0
        self._log_end = 0  # physical offset after the newest record
        self._retry_at = 0.0  # time of the next attempt after a failure
        self._logged_at = -FAILURE_LOGGED_EVERY  # when the last failure was logged
        self._flush_due = time.monotonic() + FLUSH_EVERY
        self._indexed_offset = 0  # physical offset up to which keys are in the index

    def recover(self, *, clean: bool, log_end: int, index_timestamp: int) -> None:
        """Open the index and index the missing records of the log."""
        start = self._index.recover(
            clean=clean, log_end=log_end, index_timestamp=index_timestamp, has_keys=self._has_keys
        )
        self._indexed_offset = self._log_end = log_end
        if not self._files.bases:
            return
        logged = time.monotonic()
        self._indexed_offset = self._boundary(start)
        if log_end - self._indexed_offset > START_BYTES_MAX:
            self._lags = True
            logger.info("event=index_behind offset=%d of=%d", self._indexed_offset, log_end)
            return
        try:
            for offset in self._put_log(self._indexed_offset, log_end):
                self._indexed_offset = offset
                if time.monotonic() - logged >= PROGRESS_EVERY:
                    logged = time.monotonic()
                    logger.info("event=indexing offset=%d", self._indexed_offset)
        except DiskFullError as error:
            # Stored messages can be consumed and decided without keys.
            self._fall_behind(str(error))
        else:
            self._indexed_offset = log_end

    def _has_keys(self, after: int, before: int) -> bool:
        """Return whether a record has keys between two offsets; look at ``GAP_BYTES_MAX``."""
        start = max(after, next(iter(self._files.bases), before))
        topics: dict[bytes, str] = {}
        return any(
            len(hashed_keys([_keyed(chunk, offset, one, topics) for one in found], after=after)[0])
            for offset, chunk, found in LogScan(
                self._files, start, min(before, start + GAP_BYTES_MAX), check_crc=False
            )
        )

    def _put_log(self, start: int, end: int) -> Iterator[int]:
        """Index a part of the log in pieces; yield the offset reached after each."""
        scan = LogScan(self._files, start, end, check_crc=False)
        topics: dict[bytes, str] = {}  # one string per topic, whose hash is computed once
        requested = start
        for offset, chunk, found in scan:
            if requested < offset + READ_AHEAD:
                requested = self._prefetch(max(requested, offset), offset + 2 * READ_AHEAD)
            keyed = (_keyed(chunk, offset, record, topics) for record in found)
            done = 0
            while records := _put_at_once(keyed):
                self._index.put_group(records)
                done += len(records)
                position, size, *_ = found[done - 1]
                yield offset + position + size

    def _prefetch(self, start: int, end: int) -> int:
        """Request a part of the log, within one file, from the disk; return its end."""
        base = self._files.base_of(start)
        end = min(end, base + self._files.file_size)
        if base in self._files.bases:
            disk.will_need(self._files.path(base), start - base, end - start)
        return end

    def _boundary(self, start: int) -> int:
        """Return the begin of a record at or shortly before ``start``.

        That is the newest record of the index if it fits, otherwise the begin of a file.
        """
        newest = self._index.last_update[1]
        base = max(self._files.base_of(start), self._files.bases[0])
        return newest if base <= newest <= start else base

    def add(self, group: Sequence[AppendRequest], done: Sequence[AppendResult]) -> None:
        """Add the keys of an appended group."""
        log_end = self._log_end = done[-1].end
        if self._lags:
            return
        self._pending += [
            (
                request.topic,
                request.properties,
                result.physical_offset,
                result.store_timestamp,
                request.sys_flag,
            )
            for request, result in zip(group, done, strict=True)
        ]
        if log_end - self._indexed_offset > PENDING_BYTES_MAX:
            self._bound_pending()

    def _bound_pending(self) -> None:
        keys_max = len(self._pending) * PROPERTIES_SIZE_MAX
        size = min(self._log_end - self._indexed_offset, keys_max)
        if size > 2 * PENDING_BYTES_MAX:
            self._fall_behind("messages come faster than they can be indexed")
        elif size > PENDING_BYTES_MAX:
            try:
                self._put_pending(time.monotonic() + SLICE_MS / 1000)
            except (OSError, StoreError) as error:
                # The disk is full or failing, but the records are stored, so the append succeeds.
                self._fall_behind(str(error))

    def _fall_behind(self, reason: str) -> None:
        """Drop the keys in memory and index from the log later."""
        self._lags = True
        self._pending.clear()
        self._retry_at = time.monotonic() + RETRY_EVERY
        logger.warning("event=index_behind offset=%d error=%r", self._indexed_offset, reason)

    def work(self, budget_ms: float | None = None) -> bool:
        """Index pending keys, all or for ``budget_ms``; return whether more can be done now."""
        if not self._lags and not self._pending:
            return False
        now = time.monotonic()
        if now < self._retry_at and budget_ms is not None:
            return False
        deadline = None if budget_ms is None else now + budget_ms / 1000
        try:
            return self._catch_up(deadline) or self._put_pending(deadline)
        except (OSError, StoreError) as error:
            self._log_failure(error)
            self._retry_at = now + RETRY_EVERY
            return False

    @property
    def lags(self) -> bool:
        """Whether look-ups miss records, until ``work`` has indexed them from the log."""
        return self._lags

    def _catch_up(self, deadline: float | None) -> bool:
        """Index missing records from the log; return whether there are more."""
        while self._lags:
            if self._walk is None:
                start = max(self._indexed_offset, self._files.bases[0])
                self._walk, self._walk_end = self._put_log(start, self._log_end), self._log_end
            try:
                self._indexed_offset = next(self._walk, self._walk_end)
            except BaseException:
                self._walk = None
                raise
            if self._indexed_offset == self._walk_end:
                self._walk = None
                self._lags = self._walk_end < self._log_end
            if self._lags and deadline is not None and time.monotonic() >= deadline:
                return True
            if not self._lags:
                logger.warning("event=index_caught_up offset=%d", self._indexed_offset)
        return False

    def _put_pending(self, deadline: float | None) -> bool:
        """Index keys kept in memory; return whether there are more."""
        while self._pending:
            self._put_next()
            if deadline is not None and time.monotonic() >= deadline:
                break
        return bool(self._pending)

    def _put_next(self) -> None:
        """Index the next pending records.

        Raises:
            DiskFullError: They stay pending.
        """
        records = _put_at_once(self._pending)
        self._index.put_group(records)
        for _ in records:
            self._pending.popleft()
        self._indexed_offset = self._pending[0][2] if self._pending else self._log_end

    def _log_failure(self, error: Exception) -> None:
        if time.monotonic() - self._logged_at >= FAILURE_LOGGED_EVERY:
            self._logged_at = time.monotonic()
            logger.warning("event=index_waits error=%r", str(error))

    def search(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int | None]:
        """Yield physical offsets of records with a key, newest first; None where callers may pause.

        Pending keys are indexed first; while the index lags, some may be missing. Records with
        another key of the same hash are included. Times have a resolution of a second.
        """
        while self.work(SLICE_MS) and not self._lags:
            yield None
        low, high = self._log.min_offset, self._log.readable_offset
        for hit in self._index.search(topic, key, begin_ms, end_ms):
            yield hit if hit is not None and low <= hit < high else None

    def query(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> list[int]:
        """Return what ``search`` yields, the newest ``max_count``, in log order."""
        found = (one for one in self.search(topic, key, begin_ms, end_ms) if one is not None)
        return sorted(islice(found, max_count))

    @property
    def last_update(self) -> tuple[int, int]:
        """Store timestamp and physical offset of the newest record in the index; zeros if none."""
        self.work(SLICE_MS if self._lags else None)
        return self._index.last_update

    def forget_before(self, log_start: int) -> list[IndexFile]:
        """Drop the files whose records are all deleted; see ``IndexService``."""
        return self._index.forget_before(log_start)

    def flush(self, flushed_timestamp: int) -> int:
        """Flush the index every ``FLUSH_EVERY``; return its durable time. For a helper thread."""
        if time.monotonic() < self._flush_due:
            return flushed_timestamp
        self._flush_due = time.monotonic() + FLUSH_EVERY
        return self._index.flush()

    def finish(self) -> bool:
        """Index all pending keys before closing; return whether the index is complete."""
        self._flush_due = 0.0
        self.work()
        return not self._pending and not self._lags

    def extents(self) -> list[tuple[Path, int]]:
        """Return the files and the bytes used in each; see ``IndexService``."""
        return self._index.extents()

    def close(self) -> None:
        self._index.close()


class NoIndex:
    """The index of a store without one: it finds nothing."""

    lags = False
    last_update = (0, 0)

    def recover(self, *, clean: bool, log_end: int, index_timestamp: int) -> None:
        """Leave an existing index as it is."""

    def add(self, group: Sequence[AppendRequest], done: Sequence[AppendResult]) -> None:
        """Ignore appended records."""

    def work(self, budget_ms: float | None = None) -> bool:
        return False

    def search(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int | None]:
        return iter(())

    def query(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> list[int]:
        return []

    def forget_before(self, log_start: int) -> list[IndexFile]:
        return []

    def flush(self, flushed_timestamp: int) -> int:
        """Return the given time: no start has to index older records."""
        return flushed_timestamp

    def extents(self) -> list[tuple[Path, int]]:
        return []

    def finish(self) -> bool:
        """Return True: nothing is missing."""
        return True

    def close(self) -> None:
        """Do nothing."""


KeyIndex = IndexBuilder | NoIndex


def _put_at_once(keyed: Iterable[KeyedRecord]) -> list[KeyedRecord]:
    """Return the first records, as many as are indexed at once."""
    records: list[KeyedRecord] = []
    size = 0  # bytes of properties
    for record in islice(keyed, RECORDS_PER_PUT):
        records.append(record)
        size += len(record[1])
        if size >= PROPERTIES_PER_PUT:
            break
    return records


def _keyed(chunk: bytes, offset: int, record: Found, topics: dict[bytes, str]) -> KeyedRecord:
    """Return a record of a chunk as the index takes it; the chunk begins at ``offset``."""
    position, size, sys_flag, _, _, topic_at, topic_end, properties_at = record
    name = chunk[topic_at:topic_end]
    topic = topics.get(name)
    if topic is None:
        topic = topics[name] = name.decode(errors="replace")
    return (
        topic,
        chunk[properties_at : position + size],
        offset + position,
        store_timestamp(chunk, position, sys_flag),
        sys_flag,
    )
