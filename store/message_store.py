"""MessageStore: the durable log that the broker holds.

The store is synchronous and owned by one thread, the broker's event loop; methods that other
threads may call say so. Two helper threads make only calls that release the interpreter:
the flusher (``log/flusher.py``) makes the log durable; the maintenance thread
(``files/worker.py``) prepares files, flushes queues and index, and writes the checkpoint.

Opening: lock, load, set the abort marker, recover, index, start threads. Closing undoes this in
the opposite order. The marker is removed last, when everything is on disk. A store whose disk
failed keeps its marker, so that the next start does not trust it.

Queues end at ``readable_offset``: under SYNC_FLUSH only records on disk are visible; otherwise
consumers might see messages that a power cut removes. If a slave has to confirm records, those that
it has not confirmed do not count as durable or readable: a takeover by the slave would remove them.
Records by physical offset are read as soon as they are on this disk, since decisions need them.
"""

import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from attrs import define

from .archive.archive_reader import ArchiveReader
from .archive.archiver import Archiver
from .config import FlushMode, StoreConfig
from .deletion import Deletion
from .errors import DirectoryLostError, StoreClosedError, StoreError, UnusableFileError
from .files import disk
from .files.checkpoint import (
    CONFIRMED_AT,
    Checkpoint,
    DurableMark,
    abort_marker,
    load_checkpoint,
    rebuild_marker,
)
from .files.directory_lock import DirectoryLock
from .files.mapped_file import lacks_space, make_directory
from .files.obsolete_files import remove_obsolete_files
from .files.worker import Maintenance, ThreadWorker, WorkerFactory
from .format.record import decode_record
from .format.topics import DELAYED_TOPICS
from .index.index_builder import FLUSH_EVERY, IndexBuilder, KeyIndex, NoIndex
from .index.index_service import IndexService
from .integrity.verification import Integrity
from .log.append_request import AppendRequest, AppendResult
from .log.commit_log import CommitLog
from .log.flusher import Flusher
from .log.log_reader import LogReader
from .ports import LogOffsets
from .queue.consume_queue import ConsumeQueue
from .queue.deleted_topics import TopicDeletion, load_deleted_topics
from .queue.pull_selection import GetResult, GetStatus
from .queue.queue_reader import QueueReader
from .queue.queue_table import QueueEnds, QueueTable
from .recovery.recovery import Progress, Recovery, RecoveryReport

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
EVERYTHING: Final = (1 << 63) - 1  # an offset above any log: nothing needs to be confirmed


def _mapped_queues_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAPPED_QUEUES_MAX
    return max(1, min(MAPPED_QUEUES_MAX, soft // _DESCRIPTORS_PER_MAPPED_QUEUE))


@define(eq=False, repr=False, slots=False)
class MessageStore:
    """Life cycle and appends of the messages in one directory.

    ``reader`` reads the log by physical offset, ``queues`` finds messages by queue offset and
    ``index`` by key; ``deletion`` deletes old files.
    """

    _config: StoreConfig
    _now_ms: Callable[[], int]
    # Gets the offset below which everything is on disk; called on the flusher's thread.
    _on_durable: Callable[[int], None] = lambda offset: None
    # Called on that thread or by an append; then the store refuses all appends.
    _on_failure: Callable[[Exception], None] = lambda error: None
    # Called by each successful append with its records, which are in the log and perhaps not on
    # disk yet.
    _on_append: Callable[[Sequence[AppendRequest]], object] = lambda group: None
    _fdatasync: Callable[[int], None] = disk.sync_data  # flushes a file by its descriptor
    _worker: WorkerFactory = ThreadWorker  # makes the helper threads

    def __attrs_post_init__(self) -> None:
        self._sync_mode = self._config.flush_mode is FlushMode.SYNC_FLUSH
        self._lock = DirectoryLock(self._config.root)
        self._abort = abort_marker(self._config.root)
        self._checkpoint_path = self._config.root / "checkpoint"
        self._durable_mark = DurableMark(self._checkpoint_path)
        self._confirmed_mark = DurableMark(self._checkpoint_path, CONFIRMED_AT)
        self.confirmed_offset = EVERYTHING  # below it a slave has the log, if it has to
        self.failure: Exception | None = None  # set when appends are refused
        self.directory_lost = False  # nothing more is written: another broker may use it
        self._queue_table = QueueTable(
            self._config.root / "consumequeue",
            self._config.consume_queue_file_size,
            maps_max=_mapped_queues_max(),
            special_topics=DELAYED_TOPICS,
            all_special=self._config.append_property_crc,
        )
        self._log = CommitLog(self._config, self._queue_table, self._now_ms)
        self._log.on_failure = self._fail
        self._log.flushes_awaited = self._flushes_awaited
        self._flusher = Flusher(
            self._log,
            interval_ms=self._config.flush_interval_ms,
            on_durable=self._save_durable,
            on_failure=self._fail,
            fdatasync=self._fdatasync,
            worker=self._worker,
        )
        on_disk = _OnDisk(self._log, self._flusher, self._sync_mode)
        self.reader = LogReader(self._log.files, on_disk)
        self.queues = QueueReader(
            self._queue_table, self, store_timestamp=self.reader.store_timestamp
        )
        self.index: KeyIndex = self._make_index(on_disk)
        self.deletion = Deletion(
            self._log,
            self._queue_table,
            self.reader,
            self.index,
            request_flush=self._flusher.request,
            worker=self._worker,
        )
        self.archiver: Archiver | None = None
        self.archive: ArchiveReader | None = None
        if self._config.archive_url:
            self._make_archive()
        self._integrity = Integrity(
            self._config.root, self._log.files, self._queue_table, self._config.max_hash_slots
        )
        self._flush_requested = False
        self._queues_flushed = -FLUSH_EVERY  # when all queues were flushed last, in seconds
        self._maintenance: Maintenance | None = None
        self._checkpoint = Checkpoint()
        self._confirm_offset = 0  # begin of the last record that recovery found
        self._doubted: set[str] = set()  # directories of which a flush has failed
        self._queues_durable = 0  # physical offset up to which the queues are on disk
        self._queued_record = -1  # last record at the last flush of the queues
        self._queue_ends = QueueEnds()
        self._topic_deletion = TopicDeletion(
            self._config.root / "consumequeue", self._queue_table, forget=self._forget_queues
        )
        self._opened = False
        self.recovery = Progress()  # progress of ``open``; for other threads

    def _make_index(self, log: LogOffsets) -> KeyIndex:
        config = self._config
        if not config.index_enabled:
            return NoIndex()
        service = IndexService(
            config.root / "index",
            config.max_hash_slots,
            config.max_index_items,
            now_ms=self._now_ms,
        )
        return IndexBuilder(service, self._log.files, log)

    def _make_archive(self) -> None:
        try:
            from .archive.objects import Objects  # noqa: PLC0415 -- it is an extra
        except ImportError as error:
            reason = "archiveUrl needs pip install 'halfmq[archive]'"
            raise UnusableFileError(self._config.root, reason) from error
        objects = Objects(self._config.archive_url)
        self.archiver = Archiver(
            objects,
            self._config.root,
            self,
            self._log.files,
            self._queue_table,
            lambda: self.deletion.queues_begin_for,
            worker=self._worker,
        )
        self.archive = ArchiveReader(
            objects, self.archiver, self._log.files, self._queue_table, self.reader
        )
        self.queues.archived_from = self.archive.first_offset

    def named_record(self, physical_offset: int) -> bytes | None:
        """Return the record at an offset that a request names; None if none was appended there.

        Every offset of a peer comes through here, or through ``queues.has_record``: a sender can
        put a record into a message's body, with lengths that reach into the records after it.
        """
        encoded = self.reader.record_bytes(physical_offset)
        if encoded is None:
            return None
        record = decode_record(encoded, check_crc=False)
        queue = record.topic, record.queue_id, record.queue_offset
        return encoded if self.queues.has_record(*queue, physical_offset, len(encoded)) else None

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
        deque(self.queues.take_appended(), maxlen=0)  # what is found is not new
        self._start()
        self._opened = True
        return report

    def _recover(self) -> RecoveryReport:
        make_directory(self._config.commit_log_directory)
        make_directory(self._config.root / "consumequeue")
        files = self._log.files
        wrong_sizes = files.load()
        missing = files.missing()
        if missing is not None:
            raise UnusableFileError(files.path(missing), "is missing from the log")
        for path, size in wrong_sizes.items():
            raise UnusableFileError(
                path,
                f"has {size} bytes instead of {files.file_size}. If mappedFileSizeCommitLog was "
                f"{size} until now, set it so. Otherwise the file was cut or extended: restore "
                f"it, or run 'truncate -s {files.file_size} {path}' and start again; then only "
                f"records of the missing part are lost",
            )
        rebuild = rebuild_marker(self._config.root, "consumequeue")
        self._queue_table.load(rebuild=rebuild.is_set())
        deleted = load_deleted_topics(self._config.root)
        self._topic_deletion.finish(deleted)
        remove_obsolete_files(self._config)
        clean = not self._abort.is_set()
        # From here on files change; a crash during recovery must not look like a clean stop.
        self._abort.create()
        self._checkpoint = load_checkpoint(self._checkpoint_path)
        # A checkpoint of RocketMQ has a flush time, and none of our own fields.
        is_ours = self._checkpoint.is_ours or not self._checkpoint.log_timestamp
        self._integrity.before_recovery(is_ours=is_ours)
        recovery = Recovery(
            self._config,
            files,
            self._queue_table,
            self.reader,
            self.recovery,
            repair_log=self._integrity.repair_log,
            deleted_topics=deleted,
        )
        durable_offset = self._durable_mark.load() if self._checkpoint.is_ours else -1
        report = recovery.run(self._checkpoint, clean=clean, durable_offset=durable_offset)
        self.reader.known_transactions = recovery.transactions
        self._integrity.before_index(
            report.end_offset,
            report.damages,
            clean=clean and self._checkpoint.is_ours,
            queues_rebuilt=report.queues_rebuilt,
        )
        self._log.start(
            report.end_offset, recovery.last_timestamp, last_record=recovery.last_record
        )
        self.index.recover(
            clean=clean, log_end=report.end_offset, index_timestamp=self._checkpoint.index_timestamp
        )
        self._confirm_offset = max(recovery.last_record, 0)
        last = self._queued_record = recovery.last_record
        offset = last if last >= 0 else self._checkpoint.queues_offset
        self._queue_ends.start(self._queue_table.values(), offset)
        for queue in self._queue_table.values():
            queue.forget_known()
        self.deletion.queues_begin_for = self.min_offset
        if not self._checkpoint.is_ours:
            self._checkpoint = replace(self._checkpoint, is_ours=True)
            self._checkpoint.save(self._checkpoint_path)
        self._durable_mark.start(report.end_offset)
        return report

    def _save_durable(self, offset: int) -> None:
        """Save how far the log is on disk; called on the flusher's thread."""
        self._durable_mark.move(offset)
        self._on_durable(offset)

    def _fail(self, error: Exception) -> None:
        """Refuse all further appends."""
        self.failure = error
        self._on_failure(error)

    def check_directory(self) -> None:
        """Stop writing if the directory is gone, or another broker could lock it.

        Call it often: a second broker must not write before this one has noticed.
        """
        if self._opened and not self.directory_lost and not self._lock.is_intact():
            self.directory_lost = True
            error = self._flusher.failure = DirectoryLostError(self._config.root)
            self._fail(error)

    def _start(self) -> None:
        self._integrity.start(self.index.extents())
        self._maintenance = Maintenance(
            prepare=self._prepare,
            maintain=self._maintain,
            interval_ms=self._config.flush_interval_consume_queue_ms,
            worker=self._worker,
        )
        self._log.wake_helper = self._wake_helpers
        self._flusher.start()
        self._maintenance.start()
        self.deletion.start()
        if self.archiver is not None:
            self.archiver.start()

    def close(self, *, clean: bool = True) -> None:
        """Flush everything, remove the abort marker and unlock the directory; idempotent.

        If a flush fails, or the caller passes ``clean=False``, the abort marker stays and the next
        start recovers.
        """
        if not self._opened:
            return
        self._opened = False
        assert self._maintenance is not None
        if self.archiver is not None:
            self.archiver.stop()
        self.deletion.stop()
        self._maintenance.stop()
        self._flusher.stop()
        if self.directory_lost:  # its files may be another broker's
            self._lock.release()
            return
        self._topic_deletion.work()
        try:
            clean = self.failure is None and self._close_derived() and clean
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

    def _close_derived(self) -> bool:
        """Flush queues, index and checkpoint; return whether they are complete."""
        complete = self.index.finish()
        self._confirmed_mark.move(self.confirmed_offset)
        self._flush_derived(closed=True)
        self._integrity.close(self._flusher.durable_offset, self.index.extents())
        return complete

    def _close_files(self) -> None:
        self.index.close()
        self._queue_table.close()
        self._log.close_files()
        self.reader.close()
        self._durable_mark.close()
        self._confirmed_mark.close()

    def delete_topic(self, topic: str) -> Future[None]:
        """Delete the queues of a topic whose deletion the topic table has on disk.

        The result is there when their files are removed; nothing may be appended to the topic
        before. If it is an OSError, some are left: delete the topic again, or restart.
        """
        self._check_usable()
        assert self._maintenance is not None
        done = self._topic_deletion.begin(topic)
        self._maintenance.wake()
        return done

    def _forget_queues(self, queues: Sequence[ConsumeQueue]) -> None:
        self._queue_ends.forget(queues)
        self._integrity.forget(queues)

    def _prepare(self) -> None:
        """Do what the loop thread has asked for; called on the maintenance thread."""
        if not self.directory_lost and self._topic_deletion.work():
            self._flush_derived()  # until then a start after a kill rebuilds all queues
        self._log.prepare_ahead()

    def _maintain(self) -> None:
        """Flush queues and index and write the checkpoint; called on the maintenance thread.

        The flush of many queues includes the index, whose pages the appender then gets back one by
        one, by a fault each. So it is as rare as the flush of the index.
        """
        if not self.directory_lost:
            self._confirmed_mark.move(self.confirmed_offset)
            is_due = time.monotonic() >= self._queues_flushed + FLUSH_EVERY
            if is_due or not self._queue_table.flushes_file_system:
                self._flush_derived()
            self._integrity.work(self._flusher.durable_offset, self.index.extents())

    @contextmanager
    def _flushing(self, name: str) -> Iterator[None]:
        """Flush a directory of the store that follows from the log.

        After a failure the kernel takes pages for clean that it could not write, so that a later
        flush proves nothing. It may succeed, but the next start rebuilds the directory.
        """
        if name in self._doubted:
            rebuild_marker(self._config.root, name).create()
            self._doubted.remove(name)
            logger.warning(
                "event=rebuilt_at_next_start directory=%s note='a flush of it failed'", name
            )
        try:
            yield
        except OSError as error:
            if not disk.lacks_descriptors(error):  # then a file was not opened, and nothing is lost
                self._doubted.add(name)
            raise

    def _flush_derived(self, *, closed: bool = False) -> None:
        timestamp = self._log.last_store_timestamp  # read first: it covers what is flushed below
        last_record, written = self._log.last_record, self._log.write_offset
        with self._flushing("consumequeue"):
            self._queue_table.sync()
        self._queues_flushed = time.monotonic()
        queues = list(self._queue_table.values())
        self._queues_durable = written
        # If the last record is not durable yet, the last one of the previous flush counts.
        durable = self._flusher.durable_offset
        queued = [one for one in (last_record, self._queued_record) if 0 <= one < durable]
        self._queued_record = last_record
        self._queue_ends.move(queues, queued[0] if queued else self._queue_ends.offset)
        log_start = self.deletion.queues_begin_for  # read first: queues may begin later meanwhile
        index_timestamp = self._checkpoint.index_timestamp
        with self._flushing("index"):
            index_timestamp = self.index.flush(index_timestamp)
        checkpoint = Checkpoint(
            log_timestamp=self._flusher.durable_timestamp,
            queues_timestamp=timestamp,
            index_timestamp=index_timestamp,
            confirm_offset=self._confirm_offset,
            closed_offset=self._log.write_offset if closed else -1,
            queues_offset=self._queue_ends.offset,
            queue_ends=self._queue_ends.checksum,
            log_start=log_start,
            queue_begins=sum([queue.min_offset for queue in queues]),
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
        if done:
            self.index.add(group, done)
        self._on_append(group)
        return done

    def begin_confirmation(self) -> None:
        """Hold what no slave has confirmed from now on; call it after others have read the store.

        What was confirmed before the start remains so, as of the last second. Without a replicated
        run before, everything that the log has now counts as confirmed.
        """
        known = self._confirmed_mark.load()
        end = self._flusher.durable_offset
        self.confirmed_offset = min(known, end) if known >= 0 else end
        self._confirmed_mark.start(self.confirmed_offset)

    def confirm(self, offset: int) -> None:
        """Release what is on a slave up to an offset; what is released stays so."""
        self.confirmed_offset = max(self.confirmed_offset, offset)

    def _check_usable(self) -> None:
        if not self._opened:
            raise StoreClosedError
        if self.failure is not None:
            raise self.failure

    def _wake_helpers(self) -> None:
        """Prepare what the appender will need; the appender calls this every few MiB."""
        assert self._maintenance is not None
        self._maintenance.wake()
        if self._log.write_offset - self._flusher.durable_offset > FLUSH_BYTES:
            self._flusher.request()

    def request_flush(self) -> None:
        """Request a flush of everything appended so far; any thread, never waits."""
        self._flush_requested = True
        self._flusher.request()

    def _flushes_awaited(self) -> bool:
        """Return whether a flush was requested since the last call; on the maintenance thread."""
        requested, self._flush_requested = self._flush_requested, False
        return requested or self._sync_mode

    def tick(self, budget_ms: float = TICK_MS) -> bool:
        """Do deferred work for about ``budget_ms``; return whether there is more.

        The rest is not urgent if ``index.lags``.
        """
        self.deletion.work(min(self._flusher.durable_offset, self._queues_durable))
        return self.index.work(budget_ms)

    @property
    def reserved_ahead(self) -> int:
        """Bytes of log that can still be written without allocating disk space."""
        return self._log.reserved_ahead

    @property
    def min_offset(self) -> int:
        """The physical offset of the first byte of the log."""
        return self._log.min_offset

    @property
    def write_offset(self) -> int:
        """The physical offset after the last record."""
        return self._log.write_offset

    @property
    def archived_end(self) -> int:
        """The physical offset up to which an archive has the log, if there is to be one."""
        return EVERYTHING if self.archiver is None else self.archiver.end

    @property
    def deletable_end(self) -> int:
        """The physical offset up to which no archive needs the files here any more."""
        return EVERYTHING if self.archiver is None else self.archiver.deletable_end

    @property
    def durable_offset(self) -> int:
        """The physical offset below which everything is on disk, and confirmed if it must be."""
        flushed, confirmed = self._flusher.durable_offset, self.confirmed_offset
        # Each reply asks, and min() takes five times as long.
        return flushed if flushed < confirmed else confirmed  # noqa: FURB136

    @property
    def flushed_offset(self) -> int:
        """The physical offset below which everything is on this disk."""
        return self._flusher.durable_offset

    @property
    def readable_offset(self) -> int:
        """The physical offset below which consumers see messages."""
        return self.durable_offset if self._sync_mode else self._log.write_offset


@define(eq=False, repr=False)
class _OnDisk:
    """How far the log can be read by physical offset, whatever a slave has confirmed."""

    _log: CommitLog
    _flusher: Flusher
    _sync_mode: bool

    @property
    def min_offset(self) -> int:
        return self._log.min_offset

    @property
    def write_offset(self) -> int:
        return self._log.write_offset

    @property
    def readable_offset(self) -> int:
        return self._flusher.durable_offset if self._sync_mode else self._log.write_offset
