"""The table's snapshot: a file that saves a start from replaying the whole log.

**It is optional.** A snapshot that is missing, damaged, of another version or of another log is
ignored, and the table is replayed from the log's minimum, with the same result.

**It may be taken while the table changes.** ``position`` is the log's end when the snapshot begins
and ``log_end`` when it is complete. All changes between them are in the log after ``position``,
where replay continues, and a record that the table already reflects changes nothing. So rows are
written in slices while the broker works.

**Only it has the counts of checks.** Checks write nothing to the log, so a snapshot is also taken
if checks were counted since the last one. A kill loses the counts of the last interval.
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from attrs import define

from halfmq.store.files.page_cache import NotInMemoryError, allowed_to_wait
from halfmq.store.message_store import MessageStore

from ...loop.slices import Slice
from ..state.pending import PendingTable
from .snapshot_file import (
    COPIES,
    GROUPS,
    MAGIC,
    OPS,
    PENDING,
    VERSION,
    Anchor,
    CopyRow,
    GroupRow,
    SnapshotHeader,
    SnapshotWriter,
    anchor_at,
    pending_rows,
)

logger = logging.getLogger(__name__)

INTERVAL_MS: Final = 30_000
"""Shortest time between two snapshots."""

LOG_BYTES_MIN: Final = 64 << 20
"""Log written since the last snapshot before another one is taken: replaying so much at a start
takes well under a second."""

ROWS_PER_STEP: Final = 100
"""Rows of a group in the file, written in one step: a tenth of a millisecond."""

POLL_MS: Final = 5
"""Time between two polls for a disk operation that a snapshot waits for."""


@define(eq=False, repr=False, slots=False)
class Snapshots:
    """Takes snapshots of a table: in slices while the broker runs, at once at a stop."""

    path: Path
    _log: MessageStore
    _table: PendingTable
    _ops: Callable[[], Sequence[int]]
    _counted: Callable[[], int] = lambda: 0  # the number of checks counted since the start
    _log_bytes_min: int = LOG_BYTES_MIN

    def __attrs_post_init__(self) -> None:
        self._counted_in_latest = 0  # value of `counted` in the latest snapshot
        self._latest_position = 0  # log position of the latest snapshot
        self._next_ms = 0
        self._work: Generator[bool] | None = None  # yields whether it waits for the disk
        self.taken = 0

    def set_replayed_from(self, position: int) -> None:
        """Count new log bytes from ``position``, where a start began to replay the log."""
        self._latest_position = position

    def tick(self, now_ms: int, time_slice: Slice) -> int:
        """Do the next slice of work; return the milliseconds until the next call."""
        if self._work is None:
            if now_ms < self._next_ms:
                return self._next_ms - now_ms
            is_short = self._log.write_offset - self._latest_position < self._log_bytes_min
            if is_short and self._counted() == self._counted_in_latest:
                return INTERVAL_MS
            self._next_ms = now_ms + INTERVAL_MS
            self._work = self._take(background=True)
        try:
            for is_waiting in self._work:
                if is_waiting:
                    return POLL_MS
                if time_slice.is_over:
                    return 0
        except OSError as error:  # for example a full disk: the log suffices
            logger.warning("event=snapshot_failed file=%s error=%r", self.path, str(error))
        self._work = None
        return INTERVAL_MS

    def take_now(self) -> None:
        """Take a snapshot in one go, at the end of the broker's run."""
        if self._work is not None:
            self._work.close()
            self._work = None
        try:
            for _ in self._take(background=False):
                pass
        except OSError as error:
            logger.warning("event=snapshot_failed file=%s error=%r", self.path, str(error))

    def _take(self, *, background: bool) -> Generator[bool]:
        log = self._log
        position, newest = log.write_offset, self._table.newest_offset
        counted = self._counted()
        newest_final = self._table.decided.newest_final
        writer = SnapshotWriter(self.path, SnapshotHeader(MAGIC, VERSION, position, newest_final))
        try:
            if background:
                yield from _in_background(writer.open)
            else:
                writer.open()
            yield from self._write_rows(writer, position)
            log_end = log.write_offset
            if background:
                log.request_flush()  # without traffic nothing else requests a flush
                while log.durable_offset < log_end:
                    yield True
            anchor = yield from self._anchor(newest, background=background)
            writer.finish(log_end, anchor)
            if background:
                yield from _in_background(writer.publish)
            else:
                writer.publish()
        except BaseException:  # also when the generator is closed
            writer.abandon()
            raise
        self._latest_position, self._counted_in_latest = position, counted
        self.taken += 1
        logger.info("event=snapshot_taken position=%d log_end=%d", position, log_end)

    def _anchor(self, offset: int, *, background: bool) -> Generator[bool, None, Anchor]:
        """Read the anchor; after hours without traffic it has to be fetched from the disk first.

        Only the fetch is done on another thread, because the log may be read on this one only.
        """
        try:
            with allowed_to_wait(not background):
                return anchor_at(offset, self._log)
        except NotInMemoryError as missing:
            yield from _in_background(missing.fetch)
        return anchor_at(offset, self._log)

    def _write_rows(self, writer: SnapshotWriter, end: int) -> Iterator[bool]:
        """Write the transactions with offsets before ``end``, and all copies."""
        table = self._table
        last = -1
        while entries := [one for one in table.after(last, ROWS_PER_STEP) if one.offset < end]:
            last = entries[-1].offset
            writer.add(PENDING, pending_rows(entries))
            if table.groups:
                leaders = [entry.offset for entry in entries if entry.offset in table.groups]
                writer.add(GROUPS, [GroupRow(leader, table.groups[leader]) for leader in leaders])
            yield False
        copies = iter(table.copies.items())  # only a start adds copies
        while part := list(islice(copies, ROWS_PER_STEP)):
            writer.add(COPIES, [CopyRow(at, one.first, one.queue_offset) for at, one in part])
            yield False
        # Last, so that every transaction decided meanwhile is among them, or has its op message
        # after `position`.
        writer.add(OPS, list(self._ops()))


def _in_background(step: Callable[[], None]) -> Iterator[bool]:
    """Run a step on a thread, so that a slow disk does not block the event loop."""
    failures: list[OSError] = []

    def attempt() -> None:
        try:
            step()
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=attempt, name="halfmq-snapshot", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            yield True
    finally:
        if thread is not threading.current_thread():  # which may drop the last reference
            thread.join()  # the step must have ended before the file is used
    if failures:
        raise failures[0]
