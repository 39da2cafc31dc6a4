"""Group commit: one thread that makes the log durable for all who wait.

The thread takes what is written so far, flushes the files it lies in, publishes the offset and
tells the owner. Whatever is appended meanwhile is gathered by the next round, so the busier the
broker, the more messages share an fdatasync. Under ASYNC_FLUSH the same thread also wakes by
itself, every ``interval_ms``; so it does under SYNC_FLUSH for records that nobody waits for.

A failed flush is final. Linux marks the pages it could not write as clean, so that a second try
would succeed without having written them.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from ..errors import FlushFailedError
from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..files.worker import ThreadWorker, WorkerFactory

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Written(Protocol):
    """How far the log is written; both move while the flusher looks."""

    write_offset: int
    last_store_timestamp: int


class Flusher:
    """The thread, and how far it got."""

    def __init__(
        self,
        written: Written,
        files: MappedFileQueue,
        *,
        interval_ms: int,
        on_durable: Callable[[int], None],
        on_failure: Callable[[Exception], None],
        fdatasync: Callable[[int], None] = disk.sync_data,
        worker: WorkerFactory = ThreadWorker,
    ) -> None:
        """``on_durable`` and ``on_failure`` are called on the flusher's thread.

        The last flush, at ``stop``, is made by the thread that stops it, and told there.
        """
        self.durable_offset = 0  # below it everything is on disk
        self.durable_timestamp = 0  # ms, store time of a record that is
        self.failure: FlushFailedError | None = None
        self._written = written
        self._files = files
        self._interval = interval_ms / 1000
        self._on_durable = on_durable
        self._on_failure = on_failure
        self._fdatasync = fdatasync
        self._fd = -1
        self._fd_base = -1
        self._worker = worker("store-flush", self._round, self._interval)
        self.request = self._worker.wake  # ask for a flush of what is written by now; any thread

    def start(self) -> None:
        """Start flushing; what is written by now is on disk already."""
        self.durable_timestamp = self._written.last_store_timestamp
        self.durable_offset = self._written.write_offset
        self._worker.start()

    def stop(self) -> None:
        """End the thread, then flush once more."""
        if self._worker.stop() and self.failure is None:
            self._round(True)
        if self._fd >= 0:
            disk.close(self._fd)
            self._fd = -1

    def _round(self, _woken: bool) -> float | None:
        try:
            self._flush()
        except OSError as error:
            self.failure = FlushFailedError(self.durable_offset, str(error))
            logger.critical(
                "event=flush_failed durable_offset=%d error=%r", self.durable_offset, str(error)
            )
            self._tell(self._on_failure, self.failure)
            return None
        return self._interval

    def _flush(self) -> None:
        timestamp = self._written.last_store_timestamp
        end = self._written.write_offset
        start = self.durable_offset
        if start == end:
            return
        for base in range(self._files.base_of(start), end, self._files.file_size):
            self._sync_file(base)
        self.durable_timestamp = timestamp
        self.durable_offset = end
        self._tell(self._on_durable, end)

    def _sync_file(self, base: int) -> None:
        if base != self._fd_base:
            path: Path = self._files.path(base)
            fd = disk.open_file(path, disk.WRITE)
            if self._fd >= 0:
                disk.close(self._fd)
            self._fd, self._fd_base = fd, base
            disk.sync_directory(path.parent)  # the file may be new, and its name not on disk yet
        self._fdatasync(self._fd)

    def _tell(self, listener: Callable[[_T], None], value: _T) -> None:
        try:
            listener(value)
        except Exception:
            # The thread must outlive its listeners: others wait for the next flush.
            logger.exception("event=flush_listener_failed")
