"""Group commit: one thread flushes the log for all waiting senders.

The thread flushes the files that hold what is written so far, publishes the durable offset and
calls a listener. Records appended meanwhile are flushed by the next round, so that under load more
messages share an fdatasync. The thread also flushes every ``interval_ms`` without a request: under
ASYNC_FLUSH, and under SYNC_FLUSH for records that nobody waits for.

A failed flush is final. Linux marks the pages it could not write as clean, so that a second
attempt would succeed without having written them. If the process has no descriptor left to open the
next file, no flush has failed, and it is tried again.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from attrs import define, field

from ..errors import FlushFailedError, StoreError
from ..files import disk
from ..files.worker import ThreadWorker, WorkerFactory
from .commit_log import CommitLog

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.05
"""Seconds until a file is opened again that could not be, because too many files are open."""

_T = TypeVar("_T")


@define(eq=False, repr=False, slots=False)
class Flusher:
    """Flushes the log on its own thread and publishes how far it is durable.

    The last flush runs in ``stop``, on the thread that calls it, and so do its callbacks.
    """

    _log: CommitLog
    _interval_ms: int
    _on_durable: Callable[[int], None]  # on the flusher's thread
    _on_failure: Callable[[Exception], None]  # on the flusher's thread
    _fdatasync: Callable[[int], None] = disk.sync_data
    _worker_factory: WorkerFactory = field(alias="worker", default=ThreadWorker)

    def __attrs_post_init__(self) -> None:
        self.durable_offset = 0  # below it everything is on disk
        self.durable_timestamp = 0  # ms, store time of a record on disk
        self.failure: StoreError | None = None  # nothing more is flushed
        self._files = self._log.files
        self._interval = self._interval_ms / 1000
        self._fd = -1
        self._fd_base = -1
        self._is_retrying = self._is_last = False
        self._worker = self._worker_factory("store-flush", self._round, self._interval)
        self.request = self._worker.wake  # request a flush of what is written by now; any thread

    def start(self) -> None:
        """Start the thread; everything written before is on disk already."""
        self.durable_timestamp = self._log.last_store_timestamp
        self.durable_offset = self._log.write_offset
        self._worker.start()

    def stop(self) -> None:
        """End the thread, then flush once more."""
        if self._worker.stop() and self.failure is None:
            self._is_last = True
            self._round(True)
        if self._fd >= 0:
            disk.close(self._fd)
            self._fd = -1

    def _round(self, _woken: bool) -> float | None:
        try:
            self._flush()
        except OSError as error:
            if disk.lacks_descriptors(error) and not self._is_last:
                if not self._is_retrying:
                    logger.warning("event=flush_delayed error=%r", str(error))
                self._is_retrying = True
                return RETRY_S
            self.failure = FlushFailedError(self.durable_offset, str(error))
            logger.critical(
                "event=flush_failed durable_offset=%d error=%r", self.durable_offset, str(error)
            )
            self._notify(self._on_failure, self.failure)
            return None
        self._is_retrying = False
        return self._interval

    def _flush(self) -> None:
        timestamp = self._log.last_store_timestamp
        end = self._log.write_offset
        start = self.durable_offset
        if start == end:
            return
        for base in range(self._files.base_of(start), end, self._files.file_size):
            self._sync_file(base)
        self.durable_timestamp = timestamp
        self.durable_offset = end
        self._notify(self._on_durable, end)

    def _sync_file(self, base: int) -> None:
        if base != self._fd_base:
            path: Path = self._files.path(base)
            disk.sync_directory(path.parent)  # the file may be new, and its name not on disk yet
            fd = disk.open_file(path, disk.WRITE)
            if self._fd >= 0:
                disk.close(self._fd)
            self._fd, self._fd_base = fd, base
        self._fdatasync(self._fd)

    def _notify(self, listener: Callable[[_T], None], value: _T) -> None:
        try:
            listener(value)
        except Exception:
            # An error of a listener must not end the thread: senders wait for the next flush.
            logger.exception("event=flush_listener_failed")
