"""MessageStore: the durable log that the broker holds.

The store is synchronous and owned by one thread, the broker's event loop; methods that other
threads may call say so. Two helper threads make only calls that release the interpreter:
the flusher (``log/group_commit.py``) makes the log durable; the maintenance thread
(``files/maintenance.py``) prepares files, flushes queues and index, and writes the checkpoint.

Opening: lock, load, set the abort marker, recover, index, start threads. Closing undoes this in
the opposite order. The marker is removed last, when everything is on disk. A store whose disk
failed keeps its marker, so that the next start does not trust it.

Reads end at ``readable_offset``: under SYNC_FLUSH only records on disk are visible; otherwise
consumers might see messages that a power cut removes.
"""

import logging
import resource
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from .config import FlushMode, StoreConfig
from .errors import StoreClosedError, StoreError, UnusableFileError
from .files import disk
from .files.checkpoint import Checkpoint, abort_marker, load_checkpoint
from .files.directory_lock import DirectoryLock
from .files.durable_mark import DurableMark
from .files.maintenance import Maintenance
from .files.mapped_file import lacks_space, make_directory
from .files.obsolete_files import remove_leftovers
from .files.page_cache import NotInMemoryError
from .files.worker import ThreadWorker, WorkerFactory
from .files.zero_copy import FilePart
from .format.queue_entry import PRE_BLANK
from .format.record import Range, Record
from .format.topics import SCHEDULE_TOPIC
from .index.index_builder import IndexBuilder
from .index.index_service import IndexService
from .integrity.digests import IndexExtent
from .integrity.verification import Integrity
from .log.append_request import AppendRequest, AppendResult
from .log.commit_log import CommitLog
from .log.group_commit import Flusher
from .log.log_reader import LogReader
from .log.transaction_ranges import TransactionRanges
from .queue.consume_queue import ConsumeQueue, QueueTable
from .queue.pull_selection import GetResult, GetStatus, select
from .recovery.recovery import Progress, Recovery, RecoveryReport
from .retention import Deleted, Retention

__all__ = ["GetResult", "GetStatus", "MessageStore", "RecoveryReport"]

logger = logging.getLogger(__name__)

MAPPED_QUEUES_MAX: Final = 2048  # queues with open files, if the process may open so many
_DESCRIPTORS_PER_MAPPED_QUEUE: Final = 8  # two are used; the rest is for connections
# Unflushed bytes that start a flush before the interval ends. The broker stops reading requests at
# four times as much; without early flushes a fast load under ASYNC_FLUSH reached that.
FLUSH_BYTES: Final = 16 << 20
# Time of one ``tick`` on an event loop that serves requests. A put that runs at its end may take a
# millisecond more, in a new file of the index.
TICK_MS: Final = 0.5


def _mapped_queues_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAPPED_QUEUES_MAX
    return max(1, min(MAPPED_QUEUES_MAX, soft // _DESCRIPTORS_PER_MAPPED_QUEUE))


class MessageStore:
    """Appends, finds and reads messages in one directory."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        now_ms: Callable[[], int],
        on_durable: Callable[[int], None] = lambda offset: None,
        on_failure: Callable[[Exception], None] = lambda error: None,
        on_append: Callable[[Sequence[AppendRequest]], object] = lambda group: None,
        fdatasync: Callable[[int], None] = disk.sync_data,
        worker: WorkerFactory = ThreadWorker,
    ) -> None:
        """``on_durable`` is called on the flusher's thread, ``on_failure`` there or by an append.

        ``on_durable`` gets the offset below which everything is on disk. After ``on_failure``
        the store refuses all appends. ``on_append`` is called by each successful append with its
        records, which are in the log and perhaps not on disk yet. ``fdatasync`` flushes a file by
        its descriptor. ``worker`` makes the helper threads.
        """
        self._config = config
        self._now_ms = now_ms
        self._sync_mode = config.flush_mode is FlushMode.SYNC_FLUSH
        self._lock = DirectoryLock(config.root)
        self._abort = abort_marker(config.root)
        self._checkpoint_path = config.root / "checkpoint"
        self._durable_mark = DurableMark(self._checkpoint_path)
        self._on_durable = on_durable
        self._on_failure = on_failure
        self._on_append = on_append
        self._failure: Exception | None = None  # set when appends are refused
        self._queues = QueueTable(
            config.root / "consumequeue",
            config.consume_queue_file_size,
            maps_max=_mapped_queues_max(),
            special_topics=frozenset({SCHEDULE_TOPIC}),
            all_special=config.append_property_crc,
        )
        self._log = CommitLog(config, self._queues, now_ms)
        self._log.on_failure = self._fail
        self._log.flushes_awaited = self._flushes_awaited
        self._reader = LogReader(self._log.files)
        self._flusher = Flusher(
            self._log,
            self._log.files,
            interval_ms=config.flush_interval_ms,
            on_durable=self._durable,
            on_failure=self._fail,
            fdatasync=fdatasync,
            worker=worker,
        )
        self._retention = Retention(self._log.files, self._queues, self._reader, worker=worker)
        self._integrity = Integrity(
            config.root,
            self._log.files,
            self._queues,
            config.max_hash_slots,
        )
        self._worker = worker
        self._flush_asked = False
        self._keys: IndexBuilder | None = None
        self._maintenance: Maintenance | None = None
        self._checkpoint = Checkpoint()
        self._confirm_offset = 0  # begin of the last record that recovery found
        self._upkeep_failed = False
        self._queues_durable = 0  # physical offset up to which the queues are on disk
        self._queued_record = -1  # last queued record at the last flush of the queues
        self._transactions = TransactionRanges()  # found by recovery
        self._opened = False
        self.recovery = Progress()  # progress of ``open``; for other threads

    # Life cycle -----------------------------------------------------------------------------

    def open(self) -> RecoveryReport:
        """Lock the directory, recover its content and start the helper threads.

        Raises:
            DirectoryInUseError: Another broker uses the directory.
            UnusableFileError: A file is missing or contradicts the settings; nothing was changed.
            DiskFullError: There is no space for what recovery has to write.
        """
        assert not self._opened, "a store is opened once"
        self._lock.acquire(self._now_ms())
        try:
            report = self._recover()
        except BaseException:
            try:
                self._close_files()
            finally:
                self._lock.release()
            raise
        self._start()
        self._opened = True
        return report

    def _recover(self) -> RecoveryReport:
        make_directory(self._config.commit_log_directory)
        make_directory(self._config.root / "consumequeue")
        files = self._log.files
        files.load()
        missing = files.missing()
        if missing is not None:
            raise UnusableFileError(files.path(missing), "is missing from the log")
        self._queues.load()
        remove_leftovers(self._config)
        clean = not self._abort.is_set()
        # From here on files change; a crash during recovery must not look like a clean stop.
        self._abort.create()
        self._checkpoint = load_checkpoint(self._checkpoint_path)
        # A checkpoint of RocketMQ has a flush time, and none of our own fields.
        known = self._checkpoint.is_ours or not self._checkpoint.log_timestamp
        self._integrity.before_recovery(is_ours=known)
        recovery = Recovery(
            self._config,
            files,
            self._queues,
            self._reader,
            self.recovery,
            repair_log=self._integrity.repair_log,
        )
        durable_offset = self._durable_mark.load() if self._checkpoint.is_ours else -1
        report = recovery.run(self._checkpoint, clean=clean, durable_offset=durable_offset)
        self._transactions = recovery.transactions
        self._integrity.before_index(
            report.end_offset,
            report.damages,
            clean=clean and self._checkpoint.is_ours,
            queues_rebuilt=report.queues_rebuilt,
        )
        self._log.start(
            report.end_offset, recovery.last_timestamp, last_record=recovery.last_record
        )
        if self._config.index_enabled:
            index = IndexService(
                self._config.root / "index",
                self._config.max_hash_slots,
                self._config.max_index_items,
                now_ms=self._now_ms,
            )
            self._keys = IndexBuilder(index, files)
            self._keys.recover(
                clean=clean,
                log_end=report.end_offset,
                index_timestamp=self._checkpoint.index_timestamp,
            )
            self._retention.keys = self._keys
        self._confirm_offset = max(recovery.last_record, 0)
        if not self._checkpoint.is_ours:
            self._checkpoint = replace(self._checkpoint, is_ours=True)
            self._checkpoint.save(self._checkpoint_path)
        self._durable_mark.start(report.end_offset)
        return report

    def _durable(self, offset: int) -> None:
        """Save how far the log is on disk; called on the flusher's thread."""
        self._durable_mark.move(offset)
        self._on_durable(offset)

    def _fail(self, error: Exception) -> None:
        """Refuse all further appends."""
        self._failure = error
        self._on_failure(error)

    def _index_extents(self) -> list[IndexExtent]:
        return [] if self._keys is None else self._keys.index.extents()

    def _start(self) -> None:
        self._integrity.start(self._index_extents())
        self._maintenance = Maintenance(
            prepare=self._log.prepare_ahead,
            maintain=self._maintain,
            interval_ms=self._config.flush_interval_consume_queue_ms,
            worker=self._worker,
        )
        self._log.wake_helper = self._look_ahead
        self._flusher.start()
        self._maintenance.start()
        self._retention.start()

    def close(self, *, clean: bool = True) -> None:
        """Flush everything, remove the abort marker and unlock the directory; idempotent.

        If a flush fails, or the caller passes ``clean=False``, the abort marker stays and the next
        start recovers.
        """
        if not self._opened:
            return
        self._opened = False
        assert self._maintenance is not None
        self._retention.stop()
        self._maintenance.stop()
        self._flusher.stop()
        try:
            clean = not self._failed and self._close_derived() and clean
        except (OSError, StoreError) as error:
            logger.critical("event=close_failed error=%r", str(error))
            clean = False
        try:
            self._close_files()
            if clean:
                disk.sync_directory(self._config.commit_log_directory)
                self._abort.remove()
        finally:
            self._lock.release()
        logger.info("event=store_closed offset=%d clean=%s", self._log.write_offset, clean)

    @property
    def _failed(self) -> bool:
        """Whether a write or flush has failed, so that later successes prove nothing."""
        return self._failure is not None or self._upkeep_failed

    def _close_derived(self) -> bool:
        """Flush queues, index and checkpoint; return whether they are complete."""
        complete = True
        if self._keys is not None:
            complete = self._keys.finish()
        self._flush_derived(closed=True)
        self._integrity.close(self._flusher.durable_offset, self._index_extents())
        return complete

    def _close_files(self) -> None:
        if self._keys is not None:
            self._keys.close()
        self._queues.close()
        self._log.close_files()
        self._reader.close()
        self._durable_mark.close()

    def _maintain(self) -> None:
        """Flush queues and index and write the checkpoint; called on the maintenance thread."""
        if self._upkeep_failed:
            return
        try:
            self._flush_derived()
            self._integrity.work(self._flusher.durable_offset, self._index_extents())
        except OSError as error:
            # The kernel may drop pages it could not write, so the checkpoint must not advance.
            self._upkeep_failed = True
            logger.critical(
                "event=upkeep_stopped error=%r Messages are stored and served as before, but "
                "nothing is deleted by age, and the next start takes longer: restart the broker "
                "when the disk is sound again",
                str(error),
            )

    def _flush_derived(self, *, closed: bool = False) -> None:
        timestamp = self._log.last_store_timestamp  # read first: it covers what is flushed below
        last_record, written = self._log.last_record, self._log.write_offset
        queues = list(self._queues.values())
        for queue in queues:
            queue.sync()
        self._queues_durable = written
        # If the last record is not durable yet, the last one of the previous flush counts.
        durable = self._flusher.durable_offset
        queued = [one for one in (last_record, self._queued_record) if 0 <= one < durable]
        self._queued_record = last_record
        index_timestamp = self._checkpoint.index_timestamp
        if self._keys is not None:
            index_timestamp = self._keys.flush(index_timestamp)
        checkpoint = Checkpoint(
            log_timestamp=self._flusher.durable_timestamp,
            queues_timestamp=timestamp,
            index_timestamp=index_timestamp,
            confirm_offset=self._confirm_offset,
            closed_offset=self._log.write_offset if closed else -1,
            queues_digest=self._queues.digest() if closed else 0,
            queues_offset=queued[0] if queued else self._checkpoint.queues_offset,
            queue_entries=sum([queue.flushed_offset - queue.first_offset for queue in queues]),
        )
        if checkpoint != self._checkpoint:
            try:
                checkpoint.save(self._checkpoint_path)
            except OSError as error:
                if closed or not lacks_space(error):
                    raise
                # The old checkpoint stays true, and a start after a kill reads a little more.
                logger.warning("event=checkpoint_waits error=%r", str(error))
                return
            self._checkpoint = checkpoint

    # Appending ------------------------------------------------------------------------------

    def append(
        self, group: Sequence[AppendRequest], *, contiguous: bool = False
    ) -> list[AppendResult]:
        """Append a group of records in order; all of them or, with an error, none.

        They are on disk when ``durable_offset`` has reached the ``end`` of the last one. With
        ``contiguous`` they are adjacent in one file. Never waits for a flush.

        Raises:
            RecordTooLargeError: A record, or a contiguous group as a whole, fits into no file.
            PropertiesTooLongError: The properties of one of the requests are too long.
            DiskFullError: There is no space; a later append may find some.
            WriteFailedError: The system refused to write for another reason.
            FlushFailedError: A flush has failed; the store refuses all appends.
            StoreClosedError: The store is not open.
        """
        self._check_usable()
        done = self._log.append(group, contiguous=contiguous)
        if self._keys is not None and done:
            self._keys.add(group, done)
        self._on_append(group)
        return done

    def _check_usable(self) -> None:
        if not self._opened:
            raise StoreClosedError
        if self._failure is not None:
            raise self._failure

    def _look_ahead(self) -> None:
        """Prepare what the appender will need; the appender calls this every few MiB."""
        assert self._maintenance is not None
        self._maintenance.wake()
        if self._log.write_offset - self._flusher.durable_offset > FLUSH_BYTES:
            self._flusher.request()

    def request_flush(self) -> None:
        """Request a flush of everything appended so far; any thread, never waits."""
        self._flush_asked = True
        self._flusher.request()

    def _flushes_awaited(self) -> bool:
        """Return whether a flush was requested since the last call; on the maintenance thread."""
        asked, self._flush_asked = self._flush_asked, False
        return asked or self._sync_mode

    def tick(self, budget_ms: float = TICK_MS) -> bool:
        """Do deferred work for about ``budget_ms``; return whether there is more.

        The rest is not urgent if ``index_lags``.
        """
        self._retention.work(min(self._flusher.durable_offset, self._queues_durable))
        return self._keys is not None and self._keys.work(budget_ms)

    @property
    def index_lags(self) -> bool:
        """Whether look-ups by key miss messages, until ``tick`` has indexed them from the log."""
        return self._keys is not None and self._keys.lags

    # Retention ------------------------------------------------------------------------------

    def find_expired(self, stored_before_ms: int) -> None:
        """Start a search for log files without newer records; see ``expired_end``. No wait."""
        self._retention.find_expired(stored_before_ms)

    @property
    def expired_end(self) -> int:
        """The physical offset below which log files are expired, as far as ``find_expired`` got."""
        return self._retention.expired_end

    def delete_before(self, end: int) -> None:
        """Delete log files that end at or before ``end``, with their index and queue files.

        Deletion begins at a ``tick`` after everything appended by now is durable, queues included,
        and continues on a helper thread. The last file always stays.
        """
        self._retention.delete(end, self._log.write_offset)
        self._flusher.request()

    def set_deletion_urgent(self, *, is_urgent: bool) -> None:
        """Free the space of deleted files at once, which may stop the machine for a moment."""
        self._retention.set_urgent(is_urgent=is_urgent)

    @property
    def bytes_to_free(self) -> int:
        """Bytes of deleted files whose space is not free yet; see ``files/deferred_delete.py``."""
        return self._retention.bytes_to_free

    @property
    def reserved_ahead(self) -> int:
        """Bytes of log that can still be written without allocating disk space."""
        return self._log.reserved_ahead

    @property
    def deleted(self) -> Deleted:
        """Counts of what was deleted since the store was opened."""
        return self._retention.deleted

    # Positions ------------------------------------------------------------------------------

    @property
    def min_offset(self) -> int:
        """The physical offset of the first byte of the log."""
        return self._log.min_offset

    @property
    def write_offset(self) -> int:
        """The physical offset after the last record."""
        return self._log.write_offset

    @property
    def durable_offset(self) -> int:
        """The physical offset below which everything is on disk."""
        return self._flusher.durable_offset

    @property
    def readable_offset(self) -> int:
        """The physical offset below which records can be read."""
        return self._flusher.durable_offset if self._sync_mode else self._log.write_offset

    def queues(self) -> list[tuple[str, int]]:
        """Return topic and queue id of every queue that has, or had, messages."""
        return [key for key, queue in self._queues.items() if queue.next_offset]

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the queue offsets of the first message and after the last visible one."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            return 0, 0
        return queue.begin, queue.visible_end(self.readable_offset)

    # Deleted topics -------------------------------------------------------------------------

    def queue_ends(self, topic: str, queue_ids: Iterable[int]) -> dict[int, int]:
        """Return the next queue offset of each of these queues that has, or had, messages."""
        found = ((one, self._queues.get((topic, one))) for one in queue_ids)
        return {one: queue.next_offset for one, queue in found if queue and queue.next_offset}

    def hide(self, topic: str, ends: Mapping[int, int]) -> dict[int, int]:
        """Give readers no message of a topic below these queue offsets, by queue id.

        Call it at each start: the records stay in the log until retention deletes them, and a
        recovery rebuilds their entries. So the offsets of a queue continue if a topic of the same
        name is created, and no consumer takes a new message for one that it knows.

        Return the offsets that must be remembered. They are lower than given if a power cut has
        taken the last messages, and left out if retention has deleted all of them.
        """
        left = {}
        for queue_id, wanted in ends.items():
            queue = self._queues.get((topic, queue_id))
            if queue is None:
                continue
            end = min(wanted, queue.next_offset)
            if end > queue.min_offset:
                left[queue_id] = queue.hidden_end = end
        return left

    # Reading --------------------------------------------------------------------------------

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_count: int = 32,
        max_bytes: int = 262_144,
        tag_codes: frozenset[int] | None = None,
        wait: bool = True,
    ) -> GetResult:
        """Select messages from a queue offset on, at least one if there is one.

        Without ``wait`` the queue is not read from disk; see ``warm``.

        ``tag_codes`` excludes messages whose tag has another hash (``properties.tag_hash``).
        Different tags may have equal hashes, so consumers filter again.
        """
        return select(
            self._queues.get((topic, queue_id)),
            offset,
            readable_offset=self.readable_offset,
            log_start=self._log.min_offset,
            max_count=max_count,
            max_bytes=max_bytes,
            tag_codes=tag_codes,
            wait=wait,
        )

    def warm(self, topic: str, queue_id: int, offset: int) -> None:
        """Load queue entries from an offset on into memory, waiting for the disk; any thread.

        Raises:
            OSError: The file cannot be read, or has been deleted.
        """
        queue = self._queues.get((topic, queue_id))
        if queue is not None:
            queue.warm(offset)

    def read(self, ranges: Sequence[Range], *, prefix: bytes = b"") -> bytes | None:
        """Return the bytes of all ranges joined; None if some must be read from disk.

        The result begins with ``prefix``, such as the head of a response.
        """
        return self._reader.read(ranges, prefix=prefix)

    def view(self, ranges: Sequence[Range], *, prefix: bytes = b"") -> memoryview | None:
        """Return what ``read`` returns without a copy; valid until ``forget_views``."""
        return self._reader.view(ranges, prefix=prefix)

    def forget_views(self) -> None:
        """Release the memory of all views for reuse."""
        self._reader.forget_views()

    @property
    def can_send_parts(self) -> bool:
        """Whether the system supports sending file parts; see ``file_part``."""
        return self._reader.can_send_parts

    def file_part(self, physical_offset: int, length: int) -> FilePart | None:
        """Return a range of a file, to be sent at once without a copy.

        None if a part of it is not in memory.

        Raises:
            OSError: The file is gone, or cannot be read.
        """
        return self._reader.file_part(physical_offset, length)

    def read_cold(self, ranges: Iterable[Range], *, ahead: int = 0) -> bytes:
        """Return the bytes of all ranges joined, waiting for the disk; any thread.

        Another ``ahead`` bytes after each range are loaded soon, for callers that continue there.
        """
        return self._reader.read_cold(ranges, ahead=ahead)

    def record_bytes(self, physical_offset: int) -> bytes | None:
        """Return the valid, readable record that begins at an offset; else None."""
        if physical_offset < self._log.min_offset:
            return None
        return self._reader.record_bytes(physical_offset, self.readable_offset)

    def unchecked_bytes(self, physical_offset: int) -> bytes | None:
        """Return the record at an offset, readable or not; only its size and magic are checked."""
        if physical_offset < self._log.min_offset:
            return None
        return self._reader.unchecked_bytes(physical_offset, self._log.write_offset)

    def lacking(self, physical_offsets: Iterable[int]) -> NotInMemoryError:
        """Return an error whose ``fetch`` loads the records at some offsets into memory.

        Offsets outside the log are left out.
        """
        start, end = self._log.min_offset, self._log.write_offset
        return self._reader.lacking(offset for offset in physical_offsets if start <= offset < end)

    def lacking_ranges(self, ranges: Iterable[Range]) -> NotInMemoryError:
        """Return an error whose ``fetch`` loads ranges of the log into memory."""
        return self._reader.lacking_ranges(ranges)

    def record_at(self, physical_offset: int) -> Record | None:
        """Return the valid, readable record at an offset, decoded; else None."""
        if physical_offset < self._log.min_offset:
            return None
        return self._reader.record_at(physical_offset, self.readable_offset)

    def store_timestamp(self, physical_offset: int) -> int:
        """Return the store time in ms of the record at an offset; readable or not, and unchecked.

        Raises:
            OSError: The file is gone, or cannot be read.
        """
        return self._reader.store_timestamp(physical_offset)

    def scan(self, start: int, end: int | None = None) -> Iterator[Record]:
        """Yield the valid records in log order; any thread.

        A record or a file begins at ``start``, which is raised to the start of the log. Without
        ``end`` the scan goes to the current end of the log, readable or not.
        """
        end = self._log.write_offset if end is None else end
        return self._reader.scan(max(start, self._log.min_offset), end)

    def scan_transactions(self, start: int) -> Iterator[Record]:
        """Yield the records of ``scan`` that may belong to a transaction.

        The first call reads the ranges that recovery has found, and scans only the rest of the
        log. A damaged record may be missing without an entry in the log; each yielded one is valid.
        """
        known, self._transactions = self._transactions, TransactionRanges()
        reader, start, end = self._reader, max(start, self._log.min_offset), self._log.write_offset
        yield from reader.scan_transactions(start, min(known.start, end))
        yield from reader.transactions(known.ranges(start))
        yield from reader.scan_transactions(max(start, known.end), end)

    # Searching ------------------------------------------------------------------------------

    def query_index(
        self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int
    ) -> list[int]:
        """Return physical offsets of records with a key, in log order; the newest are preferred.

        Records with another key of the same hash are included. Times have a resolution of a second.
        """
        if self._keys is None:
            return []
        hits = self._keys.query(topic, key, max_count, begin_ms, end_ms)
        low, high = self._log.min_offset, self.readable_offset
        return [hit for hit in hits if low <= hit < high]

    @property
    def index_last_update(self) -> tuple[int, int]:
        """Store timestamp and physical offset of the newest record in the index; zeros if none."""
        return self._keys.last_update if self._keys is not None else (0, 0)

    def offset_by_time(
        self, topic: str, queue_id: int, timestamp: int, *, upper: bool = False
    ) -> int:
        """Return the queue offset of a store time, in ms.

        That is the first message stored at that time or later, or the offset after the last one.
        With ``upper``, the last message stored at that time or before; the first one if all are
        newer.
        """
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            return 0
        low, high = queue.begin, queue.visible_end(self.readable_offset)
        following = low + bisect_left(
            range(low, high),
            timestamp + upper,
            key=lambda queue_offset: self._store_time(queue, queue_offset),
        )
        return max(following - 1, low) if upper else following

    def store_time_at(self, topic: str, queue_id: int, offset: int) -> int:
        """Return the store time in ms of the message at a queue offset; -1 if there is none."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            return -1
        if not queue.begin <= offset < queue.visible_end(self.readable_offset):
            return -1
        if queue.entry(offset).size == PRE_BLANK.size:
            return -1
        return self._store_time(queue, offset)

    def _store_time(self, queue: ConsumeQueue, queue_offset: int) -> int:
        physical_offset = queue.start_of(queue_offset)
        if physical_offset < self._log.min_offset:
            return -1
        return self._reader.store_timestamp(physical_offset)
