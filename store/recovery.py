"""Opening a store after any kind of stop: the true end of the log, and queues that match it.

The log is the truth. Queues are derived from it, and what they say is used only where it is
proven, so that no stop and no earlier fault can make a message unreachable:

* After a clean stop each queue's last entry must name a record that says it is that entry's,
  and if the stop was ours, all queues must end where they did. Then the scan starts where the
  newest of these records ends; records found there are dispatched.
* After a kill the scan starts with the newest file that was begun three seconds before the
  checkpoint: log and queue entries below it are on disk. Entries of records behind that point
  are removed and written anew.
* If a proof fails, or a queue lacks entries below the start, the scan is repeated from the first
  record of the log, which rebuilds all queues. Entries of records that retention has deleted
  stay, because they carry the queue offset.

The scan ends at the first byte that begins no whole record with a matching CRC, and at a record of
the last second whose properties are not on disk, which that CRC does not cover. What lies behind
is zeroed, in log and queues, before anything is appended: RocketMQ leaves it, and a later crash
then brings cut records back.

Source: RocketMQ ``CommitLog.java`` (``recoverNormally``, ``recoverAbnormally``).
"""

import logging
import time
from dataclasses import dataclass
from typing import Final

from .checkpoint import Checkpoint
from .commit_log import NO_QUEUE_ENTRY
from .config import StoreConfig
from .consume_queue import ConsumeQueue, QueueTable
from .dispatch import delivery_time
from .errors import UnusableFileError
from .format.properties import tags_code
from .format.queue_entry import LAYOUT, PRE_BLANK, QueueEntry
from .format.record import PREFIX
from .format.topics import SCHEDULE_TOPIC
from .log_reader import LogReader
from .log_scan import Found, LogScan, store_timestamp
from .mapped_file import sync_data, sync_directory, zero_tail
from .mapped_file_queue import MappedFileQueue

logger = logging.getLogger(__name__)

# The checkpoint may be ahead of what it promises by a timer's tick or two. Source: RocketMQ
# StoreCheckpoint.java, getMinTimestamp.
CHECKPOINT_MARGIN_MS: Final = 3000
PROGRESS_EVERY: Final = 2.0  # seconds between two lines of the log
_ENTRIES_HELD: Final = 1 << 16  # queue entries gathered before they are written: about 6 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What opening a store found and did."""

    clean: bool  # the last stop was an ordered one
    start_offset: int  # where the scan began
    end_offset: int  # where the log ends, and the next record goes
    records: int  # records scanned
    truncated_bytes: int  # bytes of a torn or stale tail that were removed
    queues_rebuilt: bool  # the scan had to begin with the first record of the log
    duration_ms: int


class _IncompleteError(Exception):
    """Queues lack entries, or hold wrong ones, below the point where the scan began."""


class _QueueScan:
    """Entries of one queue as the scan finds them, held back to be written in one go."""

    __slots__ = ("entries", "is_schedule", "last_end", "next_offset", "queue")

    def __init__(self, queue: ConsumeQueue) -> None:
        self.queue = queue
        self.next_offset = queue.next_offset
        self.entries: list[bytes] = []
        self.last_end = queue.last_end
        self.is_schedule = queue.topic == SCHEDULE_TOPIC

    def skip_to(self, queue_offset: int) -> None:
        """Leave out queue offsets that no record of the log has."""
        self.write()
        self.queue.skip_to(queue_offset)
        self.next_offset = queue_offset

    def write(self) -> None:
        """Write the entries gathered so far."""
        if self.entries:
            self.queue.extend(b"".join(self.entries), self.last_end)
            self.entries.clear()


class Recovery:
    """One opening of a store, from loaded files to a log that may be appended to."""

    def __init__(
        self, config: StoreConfig, files: MappedFileQueue, queues: QueueTable, reader: LogReader
    ) -> None:
        self._config = config
        self._files = files
        self._queues = queues
        self._reader = reader
        self._scans: dict[tuple[bytes, int], _QueueScan] = {}
        self._scan_start = 0
        self._log_start = 0
        self._torn_since = 0  # ms; records stored earlier were on disk
        self.last_record = -1
        self.last_timestamp = 0

    def run(self, checkpoint: Checkpoint, *, clean: bool) -> RecoveryReport:
        """Find the end of the log, make the queues match it, and cut what is behind.

        Raises:
            UnusableFileError: A record's topic can name no directory.
            DiskFullError: There is no space for queue entries that must be written.
        """
        began = time.monotonic()
        self._torn_since = checkpoint.log_timestamp
        log_start = self._files.bases[0] if self._files.bases else 0
        if not self._files.bases:
            for queue in self._queues.values():
                queue.cut(0)  # there is no log any more that could hold their records
        rebuilt = False
        try:
            start = self._clean_start(log_start) if clean else self._checkpoint_start(checkpoint)
            scan = self._scan_from(start, log_start)
            if clean:
                self._compare(scan.end_offset, checkpoint)
        except _IncompleteError as reason:
            logger.warning("event=queues_rebuilt offset=%d reason=%r", log_start, str(reason))
            start, rebuilt = log_start, True
            scan = self._scan_from(start, log_start)
        self._find_last(scan)
        truncated = self._cut_log(start, scan.end_offset)
        for queue in self._queues.values():
            queue.min_offset = queue.find_physical(log_start)
        report = RecoveryReport(
            clean=clean,
            start_offset=start,
            end_offset=scan.end_offset,
            records=scan.records,
            truncated_bytes=truncated,
            queues_rebuilt=rebuilt or (start == log_start and scan.records > 0),
            duration_ms=round((time.monotonic() - began) * 1000),
        )
        logger.info(
            "event=recovered clean=%s start=%d end=%d records=%d truncated_bytes=%d "
            "queues_rebuilt=%s elapsed_ms=%d",
            report.clean,
            report.start_offset,
            report.end_offset,
            report.records,
            report.truncated_bytes,
            report.queues_rebuilt,
            report.duration_ms,
        )
        return report

    # Where to start -------------------------------------------------------------------------

    def _clean_start(self, log_start: int) -> int:
        """Return where the newest record ends that a queue knows; every queue must prove its end.

        Records in no queue may follow it, and, if someone's stop was not as clean as it said,
        others too: the scan goes on from here.
        """
        self._log_start = log_start
        start = log_start
        for queue in self._queues.values():
            self._prove(queue, queue.next_offset)
            start = max(start, queue.last_end)
        return start

    def _compare(self, end: int, checkpoint: Checkpoint) -> None:
        """Check that all queues end where they did at the ordered stop, if it was one of ours.

        What is lost at the end of one queue shows nowhere else: the others reach the log's end.
        """
        if 0 <= end < checkpoint.closed_offset:
            logger.error(
                "event=log_shorter_than_closed end=%d closed=%d", end, checkpoint.closed_offset
            )
        if end == checkpoint.closed_offset and self._queues.digest() != checkpoint.queues_digest:
            raise _IncompleteError("queues end elsewhere than at the last stop")

    def _prove(self, queue: ConsumeQueue, end: int) -> None:
        """Check that the last entry before ``end`` is true, if its record still exists."""
        if end <= queue.first_offset:
            return
        last = queue.entry(end - 1)
        if last == PRE_BLANK or last.physical_offset < self._log_start:
            return
        if not self._is_entry_of(queue, end - 1, last):
            raise _IncompleteError(f"entry {end - 1} of {queue.topic}:{queue.queue_id} is false")

    def _is_entry_of(self, queue: ConsumeQueue, queue_offset: int, entry: QueueEntry) -> bool:
        """Tell whether the record that an entry names says that it belongs there."""
        end = self._files.base_of(entry.physical_offset) + self._files.file_size
        record = self._reader.record_at(entry.physical_offset, end)
        return (
            record is not None
            and (record.topic, record.queue_id) == (queue.topic, queue.queue_id)
            and (record.queue_offset, record.total_size) == (queue_offset, entry.size)
        )

    def _checkpoint_start(self, checkpoint: Checkpoint) -> int:
        """Return the newest file that was begun long enough before the checkpoint."""
        trusted = min(checkpoint.log_timestamp, checkpoint.queues_timestamp) - CHECKPOINT_MARGIN_MS
        for base in reversed(self._files.bases[1:]):
            first = self._reader.record_at(base, base + self._files.file_size)
            if first is not None and 0 < first.store_timestamp <= trusted:
                return base
        return self._files.bases[0] if self._files.bases else 0

    # The scan -------------------------------------------------------------------------------

    def _scan_from(self, start: int, log_start: int) -> LogScan:
        """Dispatch every record from ``start`` on to its queue; cut queues to what was found."""
        self._scans.clear()
        self._scan_start = start
        self._log_start = log_start
        scan = LogScan(
            self._files,
            start,
            check_crc=self._config.check_crc_on_recover,
            torn_since=self._torn_since,
        )
        told = time.monotonic()
        for chunk_offset, chunk, found in scan:
            self._dispatch(chunk_offset, chunk, found)
            if time.monotonic() - told >= PROGRESS_EVERY:
                told = time.monotonic()
                logger.info("event=recovering offset=%d records=%d", scan.end_offset, scan.records)
        for queue_scan in self._scans.values():
            queue_scan.write()
        met = {queue_scan.queue for queue_scan in self._scans.values()}
        for queue in list(self._queues.values()):
            if queue not in met:
                queue.cut(self._held(queue))
        return scan

    def _dispatch(self, chunk_offset: int, chunk: bytes, found: list[Found]) -> None:
        """Gather the queue entries of the records in a chunk."""
        scans = self._scans
        levels = self._config.delay_levels_ms
        pack = LAYOUT.pack
        for position, size, sys_flag, queue_id, queue_offset, topic_at, properties_at in found:
            if sys_flag & NO_QUEUE_ENTRY:
                continue
            key = (chunk[topic_at : properties_at - 2], queue_id)
            scan = scans.get(key) or self._meet(key, queue_offset)
            if queue_offset != scan.next_offset:
                if queue_offset < scan.next_offset:
                    continue  # a repeat: the first record of a queue offset keeps it
                scan.skip_to(queue_offset)
            properties = chunk[properties_at : position + size]
            if scan.is_schedule:
                timestamp = store_timestamp(chunk, position, sys_flag)
                code = delivery_time(properties, timestamp, levels)
            else:
                code = tags_code(properties)
            physical_offset = chunk_offset + position
            scan.entries.append(pack(physical_offset, size, code))
            scan.last_end = physical_offset + size
            scan.next_offset = queue_offset + 1
        if sum(len(scan.entries) for scan in scans.values()) > _ENTRIES_HELD:
            for scan in scans.values():
                scan.write()

    def _meet(self, key: tuple[bytes, int], queue_offset: int) -> "_QueueScan":
        """Ready a queue for its first record of the scan, which has ``queue_offset``."""
        queue = self._queue(*key)
        held = self._held(queue)
        if queue_offset > held and self._scan_start > self._log_start:
            raise _IncompleteError(
                f"{queue.topic}:{queue.queue_id} lacks entries {held} to {queue_offset - 1}"
            )
        # When the scan sees the whole log, a queue that holds more than its first record says
        # holds nonsense.
        rebuilding = self._scan_start == self._log_start
        queue.cut(min(held, queue_offset) if rebuilding else held)
        scan = self._scans[key] = _QueueScan(queue)
        return scan

    def _queue(self, topic: bytes, queue_id: int) -> ConsumeQueue:
        try:
            return self._queues[topic.decode(), queue_id]
        except ValueError as error:
            raise UnusableFileError(
                self._files.directory, f"holds a record of topic {topic!r}, queue {queue_id}"
            ) from error

    def _held(self, queue: ConsumeQueue) -> int:
        """Return how many entries a queue holds of records below the scan, proven by the last.

        Raises:
            _IncompleteError: The last one names no record of this queue.
        """
        held = queue.find_physical(self._scan_start)
        self._prove(queue, held)
        return held

    # The end --------------------------------------------------------------------------------

    def _find_last(self, scan: LogScan) -> None:
        """Note the last record of the log; a scan that found none began right behind it."""
        self.last_record, self.last_timestamp = scan.last_record, scan.last_timestamp
        if scan.records:
            return
        for queue in self._queues.values():
            if queue.last_end == scan.end_offset and queue.next_offset > queue.first_offset:
                last = queue.entry(queue.next_offset - 1)
                self.last_record = last.physical_offset
                self.last_timestamp = self._reader.store_timestamp(last.physical_offset)
                return

    def _cut_log(self, start: int, end: int) -> int:
        """Remove what follows the end of the log, and make durable what precedes it."""
        files = self._files
        base = files.base_of(end)
        truncated = 0
        for later in [later for later in files.bases if later > base]:
            with files.path(later).open("rb") as file:
                # The next file is made ahead, all zeros; anything else was part of the log.
                truncated += files.file_size if any(file.read(PREFIX.size)) else 0
        self._reader.forget_from(base + 1)
        files.remove_from(base + 1)
        if base in files.bases:
            truncated += zero_tail(files.path(base), end - base)
        for scanned in [scanned for scanned in files.bases if scanned >= files.base_of(start)]:
            with files.path(scanned).open("rb+") as file:
                sync_data(file.fileno())
        if files.bases:
            sync_directory(files.directory)
        return truncated
