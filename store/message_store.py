"""MessageStore: the durable log that the broker holds.

The store is synchronous and owned by one thread, the broker's event loop; methods that other
threads may call say so. Two helper threads make only calls that release the interpreter:
the flusher (``log/group_commit.py``) makes the log durable; the maintenance thread
(``files/maintenance.py``) prepares files, flushes queues and index, and writes the checkpoint.

Opening: lock, load, set the abort marker, recover, index, start threads. Closing undoes this in
the opposite order. The marker is removed last, when everything is on disk. A store whose disk
failed keeps its marker, so that the next start does not trust it.

What may be read ends at ``readable_offset``: under SYNC_FLUSH only records on disk are visible,
or consumers would see messages that a power cut takes back.
"""

import logging
import resource
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from .index.index_file import IndexService
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

MAPPED_QUEUES_MAX: Final = 2048  # queues with open files, if the process may have so many
_DESCRIPTORS_PER_MAPPED_QUEUE: Final = 8  # two are used; the rest is for connections
# Unflushed bytes that start a flush before its time. The broker stops reading at four times as
# much, and used to stop for a tenth of a second in each interval of a fast ASYNC_FLUSH.
FLUSH_BYTES: Final = 16 << 20
# Of one ``tick`` on an event loop that serves requests. The put under way at its end may take a
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
        fdatasync: Callable[[int], None] = disk.sync_data,
        worker: WorkerFactory = ThreadWorker,
    ) -> None:
        """``on_durable`` is called on the flusher's thread, ``on_failure`` there or by an append.

        ``on_durable`` gets the offset below which everything is on disk. After ``on_failure``
        the store takes no more records. ``fdatasync`` flushes a file by its descriptor.
        ``worker`` makes the helper threads.
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
        self._failure: Exception | None = None  # for which nothing is appended any more
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
        self._confirm_offset = 0  # where the last record begins that recovery saw
        self._upkeep_failed = False
        self._queues_durable = 0  # physical offset up to which the queues are on disk
        self._queued_record = -1  # the last one that was in a queue when those were flushed
        self._transactions = TransactionRanges()  # that the recovery has met
        self._opened = False
        self.recovery = Progress()  # how far ``open`` is; for other threads

    # Life -----------------------------------------------------------------------------------

    def open(self) -> RecoveryReport:
        """Lock the directory, recover what is in it, and start.

        Raises:
            DirectoryInUseError: Another broker works there.
            UnusableFileError: A file is not as the settings say, or missing; all stays as it is.
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
        # From here on files change. A crash during recovery must not look like a clean stop.
        self._abort.create()
        self._checkpoint = load_checkpoint(self._checkpoint_path)
        # A checkpoint of RocketMQ says when the log was flushed, and nothing of ours.
        known = self._checkpoint.is_ours or not self._checkpoint.log_timestamp
        self._integrity.before_recovery(is_ours=known)
        recovery = Recovery(
            self._config,
            files,
            self._queues,
            self._reader,
            self.recovery,
            mend_log=self._integrity.mend_log,
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
        """Note how far the log is on disk; called on the flusher's thread."""
        self._durable_mark.move(offset)
        self._on_durable(offset)

    def _fail(self, error: Exception) -> None:
        """Take no more records."""
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
        """Flush everything, leave a clean marker, and let the directory go; idempotent.

        If something could not be flushed, or all is not ``clean`` for another reason, the abort
        marker stays and the next start recovers.
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
        """Whether the disk has refused something, so that what follows proves nothing."""
        return self._failure is not None or self._upkeep_failed

    def _close_derived(self) -> bool:
        """Make queues and index durable, with the checkpoint; say whether they are complete."""
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
            # The kernel may forget what it could not write, so the checkpoint stays where it is.
            self._upkeep_failed = True
            logger.critical(
                "event=upkeep_stopped error=%r Messages are stored and served as before, but "
                "nothing is deleted by age, and the next start takes longer: restart the broker "
                "when the disk is sound again",
                str(error),
            )

    def _flush_derived(self, *, closed: bool = False) -> None:
        timestamp = self._log.last_store_timestamp  # taken first: it covers what is flushed below
        last_record, written = self._log.last_record, self._log.write_offset
        queues = list(self._queues.values())
        for queue in queues:
            queue.sync()
        self._queues_durable = written
        # The log may lag behind the queues: then it is the last record of a second ago.
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
                # What it promised stays true, and a start after a kill reads a little more.
                logger.warning("event=checkpoint_waits error=%r", str(error))
                return
            self._checkpoint = checkpoint

    # Appending ------------------------------------------------------------------------------

    def append(
        self, group: Sequence[AppendRequest], *, contiguous: bool = False
    ) -> list[AppendResult]:
        """Store the records of a group, in order; all of them or, with an error, none.

        They are not on disk before ``durable_offset`` has reached the ``end`` of the last one.
        With ``contiguous`` they follow each other in one file. Never waits for a flush.

        Raises:
            RecordTooLargeError: A record, or a contiguous group as a whole, fits into no file.
            PropertiesTooLongError: Of one of the drafts.
            DiskFullError: There is no space; a later append may find some.
            WriteFailedError: The system refused to write for another reason.
            FlushFailedError: The disk has failed; the store takes nothing any more.
            StoreClosedError: The store is not open.
        """
        self._check_usable()
        done = self._log.append(group, contiguous=contiguous)
        if self._keys is not None and done:
            self._keys.add(group, done)
        return done

    def _check_usable(self) -> None:
        if not self._opened:
            raise StoreClosedError
        if self._failure is not None:
            raise self._failure

    def _look_ahead(self) -> None:
        """Have done in time what the appender will need; it calls this every few MiB."""
        assert self._maintenance is not None
        self._maintenance.wake()
        if self._log.write_offset - self._flusher.durable_offset > FLUSH_BYTES:
            self._flusher.request()

    def request_flush(self) -> None:
        """Ask for a flush of everything appended so far; any thread, never waits."""
        self._flush_asked = True
        self._flusher.request()

    def _flushes_awaited(self) -> bool:
        """Tell whether a flush was asked for since the last time; on the maintenance thread."""
        asked, self._flush_asked = self._flush_asked, False
        return asked or self._sync_mode

    def tick(self, budget_ms: float = TICK_MS) -> bool:
        """Do deferred work for about ``budget_ms``; return whether there is more.

        That may have time, if ``index_lags``.
        """
        self._retention.work(min(self._flusher.durable_offset, self._queues_durable))
        return self._keys is not None and self._keys.work(budget_ms)

    @property
    def index_lags(self) -> bool:
        """Whether look-ups by key lack messages, until ``tick`` has read them from the log."""
        return self._keys is not None and self._keys.lags

    # Retention ------------------------------------------------------------------------------

    def find_expired(self, stored_before_ms: int) -> None:
        """Have it found out where the files of the log end that hold nothing younger; no wait."""
        self._retention.find_expired(stored_before_ms)

    @property
    def expired_end(self) -> int:
        """The physical offset of that end, as far as the look has come."""
        return self._retention.expired_end

    def delete_before(self, end: int) -> None:
        """Delete the files of the log that end at ``end`` or before it, and what leads there.

        That begins at a ``tick`` when everything appended by now is durable, queues included, and
        goes on beside the loop. The last file always stays.
        """
        self._retention.delete(end, self._log.write_offset)
        self._flusher.request()

    def set_deletion_urgent(self, *, is_urgent: bool) -> None:
        """Have the space of deleted files freed at once, though that may hold the machine up."""
        self._retention.set_urgent(is_urgent=is_urgent)

    @property
    def bytes_to_free(self) -> int:
        """Bytes of deleted files whose space is not free yet, because their memory goes slowly."""
        return self._retention.bytes_to_free

    @property
    def reserved_ahead(self) -> int:
        """How many bytes of log can still be written without asking the disk for more."""
        return self._log.reserved_ahead

    @property
    def deleted(self) -> Deleted:
        """What was deleted since the store was opened."""
        return self._retention.deleted

    # Positions ------------------------------------------------------------------------------

    @property
    def min_offset(self) -> int:
        """The physical offset where the log begins."""
        return self._log.min_offset

    @property
    def write_offset(self) -> int:
        """The physical offset behind the last record."""
        return self._log.write_offset

    @property
    def durable_offset(self) -> int:
        """The physical offset below which everything is on disk."""
        return self._flusher.durable_offset

    @property
    def readable_offset(self) -> int:
        """The physical offset at which reading ends."""
        return self._flusher.durable_offset if self._sync_mode else self._log.write_offset

    def queues(self) -> list[tuple[str, int]]:
        """Return topic and queue id of every queue that has, or had, messages."""
        return [key for key, queue in self._queues.items() if queue.next_offset]

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the queue offsets of the first message and behind the last visible one."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            return 0, 0
        return queue.min_offset, queue.visible_end(self.readable_offset)

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
        """Find messages from a queue offset on, at least one if there is one.

        Without ``wait`` the disk is not asked where they lie; see ``warm``.

        ``tag_codes`` leaves out messages whose tag has another hash (``properties.tag_hash``);
        the hashes of different tags may be equal, so consumers test again.
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
        """Have it in memory where messages from a queue offset on lie; any thread may wait for it.

        Raises:
            OSError: The disk refuses it, or the file has been deleted.
        """
        queue = self._queues.get((topic, queue_id))
        if queue is not None:
            queue.warm(offset)

    def read(self, ranges: Sequence[Range], *, prefix: bytes = b"") -> bytes | None:
        """Return the bytes of all ranges joined, or None if some would have to come from disk.

        They come ``behind`` what is given, such as the head of an answer.
        """
        return self._reader.read(ranges, prefix=prefix)

    def view(self, ranges: Sequence[Range], *, prefix: bytes = b"") -> memoryview | None:
        """Return the same without a copy; it stays as it is until ``forget_views``."""
        return self._reader.view(ranges, prefix=prefix)

    def forget_views(self) -> None:
        """Use the memory of all views again."""
        self._reader.forget_views()

    @property
    def can_send_parts(self) -> bool:
        """Whether ``part`` may be of use on this system."""
        return self._reader.can_send_parts

    def file_part(self, physical_offset: int, length: int) -> FilePart | None:
        """Return where a range lies that is in memory, for who has it sent from there at once.

        None if some of it is not.

        Raises:
            OSError: The file is gone, or cannot be read.
        """
        return self._reader.file_part(physical_offset, length)

    def read_cold(self, ranges: Iterable[Range], *, ahead: int = 0) -> bytes:
        """Return the same, waiting for the disk where needed; any thread may call it.

        So many bytes ``ahead`` are in memory soon as well, for who reads on.
        """
        return self._reader.read_cold(ranges, ahead=ahead)

    def record_bytes(self, physical_offset: int) -> bytes | None:
        """Return the record that begins at an offset; None if no whole, valid one does."""
        if physical_offset < self._log.min_offset:
            return None
        return self._reader.record_bytes(physical_offset, self.readable_offset)

    def unchecked_bytes(self, physical_offset: int) -> bytes | None:
        """Return the same, readable or not; of the record only the first bytes are checked."""
        if physical_offset < self._log.min_offset:
            return None
        return self._reader.unchecked_bytes(physical_offset, self._log.write_offset)

    def lacking(self, physical_offsets: Iterable[int]) -> NotInMemoryError:
        """Return the error whose ``fetch`` brings the records at some offsets into memory.

        Offsets at which the log has nothing are left out.
        """
        start, end = self._log.min_offset, self._log.write_offset
        return self._reader.lacking(offset for offset in physical_offsets if start <= offset < end)

    def lacking_ranges(self, ranges: Iterable[Range]) -> NotInMemoryError:
        """Return the same for ranges of the log, as ``get`` finds them."""
        return self._reader.lacking_ranges(ranges)

    def record_at(self, physical_offset: int) -> Record | None:
        """Return the same record, decoded."""
        if physical_offset < self._log.min_offset:
            return None
        return self._reader.record_at(physical_offset, self.readable_offset)

    def store_timestamp(self, physical_offset: int) -> int:
        """Return when the record at an offset was stored, in ms; readable or not, and not checked.

        Raises:
            OSError: The file is gone, or cannot be read.
        """
        return self._reader.store_timestamp(physical_offset)

    def scan(self, start: int, end: int | None = None) -> Iterator[Record]:
        """Give the whole valid records in log order; any thread may walk.

        A record or a file begins at ``start``; before the log's own start that is used instead.
        Without ``end`` it goes to where the log ends now, readable or not.
        """
        end = self._log.write_offset if end is None else end
        return self._reader.scan(max(start, self._log.min_offset), end)

    def scan_transactions(self, start: int) -> Iterator[Record]:
        """Give those of the same records that may say something about a transaction.

        The first time, those are read by their places that the scan of the start has met, and only
        the rest of the log is walked. Another record may be missing if its content is damaged; one
        that is given is sound.
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

        Other keys with the same hash are among them. Times are stored to the second.
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

        That is the first message stored at that time or later, or the offset behind the last
        one. With ``upper``, the last message stored at that time or before. Where all are newer,
        it is the first one.
        """
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            return 0
        low, high = queue.min_offset, queue.visible_end(self.readable_offset)
        following = low + bisect_left(
            range(low, high),
            timestamp + upper,
            key=lambda queue_offset: self._store_time(queue, queue_offset),
        )
        return max(following - 1, low) if upper else following

    def store_time_at(self, topic: str, queue_id: int, offset: int) -> int:
        """Return when the message at a queue offset was stored, in ms; -1 if there is none."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            return -1
        if not queue.min_offset <= offset < queue.visible_end(self.readable_offset):
            return -1
        if queue.entry(offset).size == PRE_BLANK.size:
            return -1
        return self._store_time(queue, offset)

    def _store_time(self, queue: ConsumeQueue, queue_offset: int) -> int:
        physical_offset = queue.start_of(queue_offset)
        if physical_offset < self._log.min_offset:
            return -1
        return self._reader.store_timestamp(physical_offset)
