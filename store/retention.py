"""Deleting the oldest files of the log, and what leads into them.

How long messages are kept is not decided here: the broker asks which files are old enough
(``look``), and says up to where it needs nothing of the log any more (``delete``). Whole files go,
the oldest first; the last one always stays.

A deletion runs in this order, and a crash between any two steps leaves a directory that opens, here
and in RocketMQ:

1. Everything appended by now gets durable, its queue entries too. What allows a file to go may be
   as young as that, the decision about a half in it for one: a power cut would take that, and the
   half were gone as well. And where an idle queue ends is told by its file alone then.
2. The log begins later, in memory. From here on nobody is sent into the files.
3. Their names are removed, oldest first, with a flush of the directory behind each one. Otherwise a
   power cut could bring back an old one without its successor, and a log with a hole does not open.
4. So are index files and queue files all of whose records are gone, and queues begin later. If a
   crash prevents that, the next opening finds where queues begin, and the next deletion makes up
   for the rest.

Files are unlinked and not truncated. Whoever reads one, a cold pull or another program, reads it to
its end; its space is free when the last of them has closed it. One is ``leaving``, which gives the
memory of a large file back slowly.

The loop thread changes what is in memory, which takes microseconds. Everything that may wait for
the disk is done by a helper thread, in small pieces: to free a gigabyte takes a quarter second, and
it only makes calls that release the interpreter.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol, TypeVar

from .files import disk
from .files.deferred_delete import DeferredDeletes
from .files.mapped_file_queue import MappedFileQueue
from .files.worker import WorkerFactory
from .format.record import store_timestamp
from .index.index_file import IndexFile
from .log.log_reader import LogReader
from .log.log_scan import LogScan
from .queue.consume_queue import ConsumeQueue, QueueTable

logger = logging.getLogger(__name__)

PIECE_PAUSE: Final = 0.005  # seconds between two pieces, in which others have disk and interpreter
PIECE_TIME: Final = 0.002  # seconds after which a piece ends
PIECE_COUNT_MAX: Final = 256  # queues looked at, or queue files unlinked, in a piece
_IDLE: Final = 3600.0  # seconds; nothing is done unless asked for


class KeyFiles(Protocol):
    """What this needs of the index."""

    def forget_before(self, log_start: int) -> list[IndexFile]: ...


@dataclass(slots=True)
class Deleted:
    """What was deleted since the store was opened."""

    log_files: int = 0
    log_bytes: int = 0
    index_files: int = 0
    queue_files: int = 0


class Retention:
    """Deletes when it is told to; one thread, the loop's, calls everything but ``_round``."""

    def __init__(
        self,
        files: MappedFileQueue,
        queues: QueueTable,
        reader: LogReader,
        *,
        worker: WorkerFactory,
    ) -> None:
        self.deleted = Deleted()
        self.expired_end = 0  # physical offset below which the last look found old files only
        self.keys: KeyFiles | None = None  # set when the index is open
        self._files = files
        self._queues = queues
        self._reader = reader
        # Where the log is to begin, and up to where it has to be durable before that.
        self._wanted: list[tuple[int, int]] = []
        self._first_times: dict[int, int] = {}  # ms, of the first record, by offset of the file
        # Pieces of work for the helper, in order; each returns whether it is done.
        self._jobs: deque[Callable[[], bool]] = deque()
        self._deferred = DeferredDeletes()
        self._doomed: deque[int] = deque()  # log files off the row whose names still exist
        self._begun: deque[tuple[ConsumeQueue, int]] = deque()  # queues, and where they begin
        self._worker = worker("store-retention", self._round, _IDLE)

    def start(self) -> None:
        """Start the helper thread."""
        self._worker.start()

    def stop(self) -> None:
        """End the helper thread; what it has not deleted yet, the next deletion will."""
        self._worker.stop()
        self._deferred.close()

    # On the loop thread ---------------------------------------------------------------------

    def find_expired(self, stored_before_ms: int) -> None:
        """Have it found out which files hold nothing younger; ``expired_end`` will tell."""
        if self._doomed:  # their deletion has failed, or it is still going on
            self._do(self._delete_log_file)
        self._do(lambda: self._find_next_expired(stored_before_ms))

    def delete(self, end: int, log_end: int) -> None:
        """Let go of the files that end at ``end`` or before it, once ``log_end`` is durable."""
        # The first of those that wait is kept, or who asks all the time would never be heard.
        self._wanted[1:] = [(end, log_end)]

    def set_urgent(self, *, is_urgent: bool) -> None:
        """Have the space of deleted files freed at once, or not."""
        self._deferred.is_urgent = is_urgent
        if is_urgent and self._deferred.bytes:
            self._worker.wake()

    @property
    def bytes_to_free(self) -> int:
        """Bytes of deleted files whose space is not free yet."""
        return self._deferred.bytes

    def work(self, durable_offset: int) -> None:
        """Do what is to be done in memory, in a few microseconds.

        Log and queues are on disk as far as the log goes up to ``durable_offset``.
        """
        while self._begun:
            queue, queue_offset = self._begun.popleft()
            paths = queue.begin_at(queue_offset)
            if paths:
                self._do(self._deletion_of_queue_files(paths))
        while self._wanted and self._wanted[0][1] <= durable_offset:
            self._delete(self._wanted.pop(0)[0])

    def _delete(self, end: int) -> None:
        gone = self._files.forget_before(end)
        if gone:
            start = self._files.bases[0]
            self._reader.forget_before(start)
            self._doomed.extend(gone)
            self._do(self._delete_log_file)
            for base in gone:
                self._first_times.pop(base, None)
            if self.keys is not None:
                self._do(self._deletion_of_index_files(self.keys.forget_before(start)))
            self._do(self._search_of_queues(start))
            logger.info("event=log_begins_later from=%d to=%d files=%d", gone[0], start, len(gone))

    def _do(self, job: Callable[[], bool]) -> None:
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
            # The files stay; nobody is led to them any more, and a later deletion tries again.
            logger.error("event=deletion_failed error=%r", str(error))  # noqa: TRY400
            done = True
        if not done:
            self._jobs.appendleft(job)
        return PIECE_PAUSE if self._jobs or self._deferred.bytes else _IDLE

    def _find_next_expired(self, stored_before_ms: int) -> bool:
        """Go on by one file; those before it are known by now."""
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
        """Return when the first whole record from a file on was stored: none before it is younger.

        None when no record of that file is whole.
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
        """Remove the name of the oldest file that is to go."""
        if not self._doomed:
            return True
        base = self._doomed[0]
        path = self._files.path(base)
        self._deferred.keep(path)
        disk.remove(path)
        disk.sync_directory(self._files.directory)
        self._doomed.popleft()
        self.deleted.log_files += 1
        self.deleted.log_bytes += self._files.file_size
        logger.info("event=log_file_deleted offset=%d", base)
        return not self._doomed

    def _deletion_of_index_files(self, expired: list[IndexFile]) -> Callable[[], bool]:
        def delete_next() -> bool:
            if expired:
                file = expired.pop(0)
                self._deferred.keep(file.path)
                disk.remove(file.path)
                self.deleted.index_files += 1
                logger.info("event=index_file_deleted path=%s reason=expired", file.path)
            return not expired

        return delete_next

    def _search_of_queues(self, log_start: int) -> Callable[[], bool]:
        """Find, a few at a time, where queues begin in a log that begins at ``log_start``."""
        queues: list[ConsumeQueue] | None = None

        def search_some() -> bool:
            nonlocal queues
            if queues is None:
                queues = list(self._queues.values())
            return _in_pieces(queues, lambda queue: self._search(queue, log_start))

        return search_some

    def _search(self, queue: ConsumeQueue, log_start: int) -> None:
        begin = queue.first_at_or_after(log_start)
        if begin > queue.min_offset:
            self._begun.append((queue, begin))

    def _deletion_of_queue_files(self, paths: list[Path]) -> Callable[[], bool]:
        def delete(path: Path) -> None:
            disk.remove(path)
            self.deleted.queue_files += 1

        paths.reverse()  # they are taken from the end
        return lambda: _in_pieces(paths, delete)


_Thing = TypeVar("_Thing")


def _in_pieces(things: list[_Thing], work: Callable[[_Thing], None]) -> bool:
    """Do the work for some things, from the end of a list on; return whether all are done."""
    deadline = time.monotonic() + PIECE_TIME
    for _ in range(PIECE_COUNT_MAX):
        if not things:
            return True
        work(things.pop())
        if time.monotonic() >= deadline:
            break
    return not things
