"""Delete the oldest files of the log, and the index and queue files that refer to them.

The broker decides how long messages are kept: it asks which files are old enough
(``find_expired``) and says up to which offset files may be deleted (``delete_before``). Only whole
files are deleted, the oldest first; the last one always stays.

A deletion runs in this order, and a crash between any two steps leaves a directory that opens, here
and in RocketMQ:

1. Everything appended by now becomes durable, with its queue entries. The reason why a file may be
   deleted can be that recent, such as the decision about a half message in it: a power cut would
   lose the decision, and the half message would be deleted as well. And the end of an idle queue is
   then known from its file alone.
2. The log begins at a later offset, in memory. From here on no reader is referred to the files.
3. The files are unlinked, oldest first, with a flush of the directory after each one. Otherwise a
   power cut could bring back a file without its successor, and a log with a missing file does not
   open.
4. Index files and queue files whose records are all gone are deleted too, and queues begin later.
   If a crash prevents that, the next start finds where queues begin, and the next deletion deletes
   the files.

Files are unlinked and not truncated. A reader, such as a cold pull or another program, can read to
the end; the space is free when the last reader has closed the file. ``files/deferred_delete.py``
keeps large files open and frees their space slowly.

The loop thread changes the state in memory, which takes microseconds. All work that may wait for
the disk is done by a helper thread in small pieces, because freeing a gigabyte takes a quarter
second; it only makes calls that release the interpreter.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeVar

from attrs import define, field

from .files import disk
from .files.deferred_delete import DeferredDeletes
from .files.worker import WorkerFactory
from .format.record import store_timestamp
from .index.index_builder import KeyIndex
from .index.index_file import IndexFile
from .log.commit_log import CommitLog
from .log.log_reader import LogReader
from .log.log_scan import LogScan
from .queue.consume_queue import ConsumeQueue
from .queue.queue_table import QueueTable

logger = logging.getLogger(__name__)

PIECE_PAUSE: Final = 0.005  # seconds between two pieces, for other users of disk and interpreter
PIECE_TIME: Final = 0.002  # seconds after which a piece ends
PIECE_COUNT_MAX: Final = 256  # queues searched, or queue files unlinked, in a piece
_IDLE: Final = 3600.0  # seconds; without work the helper sleeps until it is woken


@dataclass(slots=True)
class Deleted:
    """Counts of what was deleted since the store was opened."""

    log_files: int = 0
    log_bytes: int = 0
    index_files: int = 0
    queue_files: int = 0


@define(eq=False, repr=False, slots=False)
class Deletion:
    """Deletes old files; only the loop thread calls its public methods."""

    _log: CommitLog
    _queues: QueueTable
    _reader: LogReader
    _index: KeyIndex
    _request_flush: Callable[[], object]
    _worker_factory: WorkerFactory = field(alias="worker")

    def __attrs_post_init__(self) -> None:
        self.deleted = Deleted()
        self.expired_end = 0  # physical offset below which all files are expired
        self.queues_begin_for = 0  # begin of the log at which all queues begin where they should
        self._files = self._log.files
        # Requested begin of the log, and the offset that must be durable before.
        self._requests: list[tuple[int, int]] = []
        self._first_times: dict[int, int] = {}  # ms, of the first record, by offset of file
        # Pieces of work for the helper, in order; each returns whether it is done.
        self._jobs: deque[Callable[[], bool]] = deque()
        self._deferred = DeferredDeletes()
        self._to_unlink: deque[int] = deque()  # log files, by their first offsets
        # Not yet applied. Without a queue: all begin where they should, in a log from there on.
        self._new_begins: deque[tuple[ConsumeQueue | None, int]] = deque()
        self._worker = self._worker_factory("store-deletion", self._round, _IDLE)

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        """End the helper thread; a later deletion deletes what is left."""
        self._worker.stop()
        self._deferred.close()

    # On the loop thread ---------------------------------------------------------------------

    def find_expired(self, stored_before_ms: int) -> None:
        """Start a search for log files without newer records; see ``expired_end``. No wait."""
        if self._to_unlink:  # their deletion has failed, or is not finished
            self._enqueue(self._delete_log_file)
        self._enqueue(lambda: self._find_next_expired(stored_before_ms))

    def delete_before(self, end: int) -> None:
        """Delete log files that end at or before ``end``, with their index and queue files.

        Deletion begins at a ``work`` after everything appended by now is durable, queues included,
        and continues on the helper thread. The last file always stays.
        """
        # The first waiting request is kept; otherwise frequent requests would postpone it forever.
        self._requests[1:] = [(end, self._log.write_offset)]
        self._request_flush()

    def clean_queues(self) -> None:
        """Delete queue files that lead to nothing any more, on the helper thread.

        Each deletion of log files does so; this is for what an interrupted one has left.
        """
        bases = self._files.bases
        if bases:
            self._enqueue(self._queue_search_job(bases[0]))

    def set_urgent(self, *, is_urgent: bool) -> None:
        """Free the space of deleted files at once, which may stop the machine for a moment."""
        self._deferred.is_urgent = is_urgent
        if is_urgent and self._deferred.bytes:
            self._worker.wake()

    @property
    def bytes_to_free(self) -> int:
        """Bytes of deleted files whose space is not free yet; see ``files/deferred_delete.py``."""
        return self._deferred.bytes

    def work(self, durable_offset: int) -> None:
        """Do the pending work in memory, which takes a few microseconds.

        Log and queues are on disk up to ``durable_offset`` of the log.
        """
        while self._new_begins:
            queue, begin = self._new_begins.popleft()
            if queue is None:
                self.queues_begin_for = begin
                continue
            paths = queue.begin_at(begin)
            if paths:
                self._enqueue(self._queue_deletion_job(queue, paths))
        while self._requests and self._requests[0][1] <= durable_offset:
            self._delete(self._requests.pop(0)[0])

    def _delete(self, end: int) -> None:
        gone = self._files.forget_before(end)
        if gone:
            start = self._files.bases[0]
            self._reader.forget_before(start)
            self._to_unlink.extend(gone)
            self._enqueue(self._delete_log_file)
            for base in gone:
                self._first_times.pop(base, None)
            self._enqueue(self._index_deletion_job(self._index.forget_before(start)))
            self._enqueue(self._queue_search_job(start))
            logger.info("event=log_begins_later from=%d to=%d files=%d", gone[0], start, len(gone))

    def _enqueue(self, job: Callable[[], bool]) -> None:
        self._jobs.append(job)
        self._worker.wake()

    # On the helper thread -------------------------------------------------------------------

    def _round(self, _woken: bool) -> float:
        if not self._jobs:
            pause = self._deferred.work()
            return _IDLE if pause is None else pause
        job = self._jobs.popleft()
        try:
            done = job()
        except OSError as error:
            # The files stay, without references to them, and a later deletion tries again.
            logger.error("event=deletion_failed error=%r", str(error))  # noqa: TRY400
            done = True
        if not done:
            self._jobs.appendleft(job)
        return PIECE_PAUSE if self._jobs or self._deferred.bytes else _IDLE

    def _find_next_expired(self, stored_before_ms: int) -> bool:
        """Examine the next file; return whether the search is done."""
        end = 0
        for base, following in pairwise(list(self._files.bases)):
            known = following in self._first_times
            first_ms = self._first_time(following)
            if first_ms is None or first_ms > stored_before_ms:
                break
            end = base + self._files.file_size
            if not known:
                return False
        self.expired_end = end
        return True

    def _first_time(self, base: int) -> int | None:
        """Return the store time of the first valid record of a file; older files have none newer.

        None if the file has no valid record.
        """
        known = self._first_times.get(base)
        if known is not None:
            return known
        for _, chunk, found in LogScan(self._files, base, base + self._files.file_size):
            position, _, sys_flag, *_ = found[0]
            first_ms = self._first_times[base] = store_timestamp(chunk, position, sys_flag)
            return first_ms
        return None

    def _delete_log_file(self) -> bool:
        """Unlink the oldest log file; return whether all are unlinked."""
        if not self._to_unlink:
            return True
        base = self._to_unlink[0]
        path = self._files.path(base)
        self._deferred.keep(path)
        disk.remove(path)
        disk.sync_directory(self._files.directory)
        self._to_unlink.popleft()
        self.deleted.log_files += 1
        self.deleted.log_bytes += self._files.file_size
        logger.info("event=log_file_deleted offset=%d", base)
        return not self._to_unlink

    def _index_deletion_job(self, expired: list[IndexFile]) -> Callable[[], bool]:
        def delete_next() -> bool:
            if expired:
                file = expired.pop(0)
                self._deferred.keep(file.path)
                disk.remove(file.path)
                self.deleted.index_files += 1
                logger.info("event=index_file_deleted path=%s reason=expired", file.path)
            return not expired

        return delete_next

    def _queue_search_job(self, log_start: int) -> Callable[[], bool]:
        """Return a job that finds where queues begin in a log that begins at ``log_start``."""
        queues: list[ConsumeQueue] | None = None

        def search_some() -> bool:
            nonlocal queues
            if queues is None:
                queues = list(self._queues.values())
            done = _in_pieces(queues, lambda queue: self._search(queue, log_start))
            if done:
                self._new_begins.append((None, log_start))
            return done

        return search_some

    def _search(self, queue: ConsumeQueue, log_start: int) -> None:
        begin = queue.first_at_or_after(log_start)
        if begin > queue.min_offset or queue.has_obsolete_files:
            self._new_begins.append((queue, begin))

    def _queue_deletion_job(self, queue: ConsumeQueue, paths: list[Path]) -> Callable[[], bool]:
        def delete(path: Path) -> None:
            if not queue.is_deleted:  # otherwise the file may be that of a new topic
                disk.remove(path)
                self.deleted.queue_files += 1

        paths.reverse()  # they are popped from the end
        return lambda: _in_pieces(paths, delete)


_Item = TypeVar("_Item")


def _in_pieces(items: list[_Item], work: Callable[[_Item], None]) -> bool:
    """Do the work for some items from the end of a list; return whether all are done."""
    deadline = time.monotonic() + PIECE_TIME
    for _ in range(PIECE_COUNT_MAX):
        if not items:
            return True
        work(items.pop())
        if time.monotonic() >= deadline:
            break
    return not items
