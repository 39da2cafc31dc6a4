"""Recovery at a start: find the end of the log, and make the queues match it.

Queues are derived from the log. Their entries are used only after a check against the log, so that
no stop and no earlier fault can make a message unreachable:

* If halfmq wrote the checkpoint, all queues must begin and end where they did then, below the
  record that it names. So no file of a queue is missing.
* After a clean stop the last entry of each queue must refer to a record with its queue offset. Then
  the scan starts at the end of the newest of these records; records found there are dispatched.
* After a kill, log and queue entries are on disk below the newest file that was begun three seconds
  before the checkpoint, and below the record that the checkpoint names. The scan starts at that
  record if digests confirm the log between the two, otherwise at that file. Entries of records
  after the start of the scan are removed and rewritten.
* If a check fails, or a queue misses entries below the start, the scan is repeated from the first
  record of the log, which rebuilds all queues. Entries of records that retention has deleted are
  kept, because they carry the queue offset.

Before the scan, flipped bits that digests reveal are repaired (``scrub``). If the log is still
damaged, the scan continues after the damage (``log_scan``), and lost records keep their positions
in log and queues (``queue_rebuild``, ``repair``). The log ends where no valid record follows.
Everything after it is zeroed, in log and queues, before anything is appended: RocketMQ leaves it,
so that cut records can reappear after a later crash.

Source: RocketMQ ``CommitLog.java`` (``recoverNormally``, ``recoverAbnormally``).
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from attrs import define

from ..config import StoreConfig
from ..files import disk
from ..files.checkpoint import Checkpoint, rebuild_marker
from ..files.mapped_file import write_again, zero_tail
from ..files.mapped_file_queue import MappedFileQueue
from ..format.queue_entry import PRE_BLANK
from ..format.record import PREFIX, Record
from ..integrity.digests import HoleSearch
from ..integrity.expected_entries import find_batch_queues, is_sound
from ..log.log_reader import LogReader
from ..log.log_scan import LogScan, Trust
from ..log.resync import Damage
from ..log.transaction_ranges import TransactionRanges
from ..queue.consume_queue import ConsumeQueue
from ..queue.queue_table import QueueTable, checksum
from .fillers_for_lost_records import DAMAGED, Repair
from .queue_rebuild import IncompleteError, LastEntries, QueueRebuild

logger = logging.getLogger(__name__)

# The checkpoint may be ahead of the disk by a timer's tick or two. Source: RocketMQ
# StoreCheckpoint.java, getMinTimestamp.
CHECKPOINT_MARGIN_MS: Final = 3000
PROGRESS_EVERY: Final = 2.0  # seconds between two lines of the log
# Bytes after the log's end in which zeros are written again. More than a failed earlier start can
# have cut, because a broker refuses requests when 128 MiB of log are not on disk.
REWRITTEN_ZEROS: Final = 256 << 20
_NO_END: Final = 1 << 63  # after every record
DAMAGES_LOGGED_MAX: Final = 100  # damaged ranges logged in one start


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """The result of a recovery."""

    clean: bool  # the previous run stopped cleanly
    start_offset: int  # where the scan began
    end_offset: int  # where the log ends and the next record begins
    records: int  # records scanned
    truncated_bytes: int  # bytes of a torn or stale tail that were removed
    queues_rebuilt: bool  # the scan began with the first record of the log
    duration_ms: int
    damages: tuple[Damage, ...] = ()  # ranges of the log whose records are lost


@dataclass(slots=True)
class Progress:
    """Progress of a recovery; written by the thread that opens the store, read by any."""

    done: int = 0  # bytes of the log that were scanned
    total: int = 0  # bytes at most, with unwritten space; 0 if not known yet
    records: int = 0


@define(eq=False, repr=False, slots=False)
class Recovery:
    """One recovery, from loaded files to a log that can be appended to."""

    _config: StoreConfig
    _files: MappedFileQueue
    _queues: QueueTable
    _reader: LogReader
    _progress: Progress
    # Repairs flipped bits in the log from a physical offset on; returns the offset up to which
    # digests confirm the log.
    _repair_log: Callable[[int], int]
    _deleted_topics: Mapping[str, int]

    def __attrs_post_init__(self) -> None:
        self._must_rebuild = rebuild_marker(self._config.root, "consumequeue")
        self._scan_start = 0
        self._log_start = 0
        self._trust = Trust()
        self._batch_queues: frozenset[tuple[str, int]] = frozenset()
        self._before: dict[ConsumeQueue, LastEntries] = {}
        self._checked: dict[ConsumeQueue, int] = {}  # the end whose last entry was checked
        self._damages: list[Damage] = []
        self.last_record = -1
        self.last_timestamp = 0
        self.transactions = TransactionRanges()  # transaction records that the scan has found

    def run(
        self, checkpoint: Checkpoint, *, clean: bool, durable_offset: int = -1
    ) -> RecoveryReport:
        """Find the end of the log, make the queues match it, and cut everything after it.

        Below ``durable_offset`` the log was on disk; -1 if unknown.

        Raises:
            DiskFullError: There is no space for queue entries that must be written.
        """
        began = time.monotonic()
        log_start = self._log_start = self._files.bases[0] if self._files.bases else 0
        self._batch_queues = find_batch_queues(self._config.root)
        if not self._files.bases:
            for queue in self._queues.values():
                queue.cut(0)  # without a log there are no records for them
        for queue in self._queues.values():
            queue.min_offset = queue.find_physical(log_start)
        self._trust = self._trust_of(checkpoint, clean=clean, durable_offset=durable_offset)
        rebuilt = False
        try:
            self._check_markers(checkpoint)
            self._check_extents(checkpoint)
            start = self._clean_start(log_start) if clean else self._killed_start(checkpoint)
            # At a clean stop of ours nothing follows the last entries, which were just checked.
            scan = self._scan_from(start, ends_checked=clean and checkpoint.is_ours)
            if 0 <= scan.end_offset < self._trust.closed_offset:
                logger.error(
                    "event=log_shorter_than_closed end=%d closed=%d",
                    scan.end_offset,
                    self._trust.closed_offset,
                )
        except IncompleteError as reason:
            logger.warning("event=queues_rebuilt offset=%d reason=%r", log_start, str(reason))
            start, rebuilt = log_start, True
            # If this start is killed, the next one could not tell that the queues are incomplete.
            self._must_rebuild.create()
            scan = self._scan_from(start)
            self._queues.sync()
            self._must_rebuild.remove()
        self._find_last(scan)
        truncated = self._cut_log(start, scan.end_offset, clean=clean)
        for queue in self._queues.values():
            if queue.kept_end <= queue.min_offset:  # its first entries have changed
                queue.min_offset = queue.find_physical(log_start)
        report = RecoveryReport(
            clean=clean,
            start_offset=start,
            end_offset=scan.end_offset,
            records=scan.records,
            truncated_bytes=truncated,
            queues_rebuilt=rebuilt or (start == log_start and scan.records > 0),
            duration_ms=round((time.monotonic() - began) * 1000),
            damages=tuple(self._damages),
        )
        _log_report(report)
        return report

    def _trust_of(self, checkpoint: Checkpoint, *, clean: bool, durable_offset: int) -> Trust:
        """Return what is known about the end of the log in the previous run."""
        trust = Trust(
            durable_offset=_NO_END if clean else durable_offset,
            durable_since=checkpoint.log_timestamp,
            closed_offset=checkpoint.closed_offset if clean else -1,
        )
        # halfmq leaves no stale records: it zeroes what it cuts off.
        is_stale_possible = checkpoint.confirm_offset > 0 and not checkpoint.is_ours
        last = self._record_at(checkpoint.confirm_offset) if is_stale_possible else None
        if last is None:
            return trust
        # Everything after the record that was last when RocketMQ recovered is newer than the first
        # record after it; the checkpoint shows whether the clock was turned back since.
        first = self._record_at(last.end) or self._record_at(self._following(last.end))
        if first is None or not last.store_timestamp <= first.store_timestamp:
            return trust._replace(fresh_offset=last.end, fresh_timestamp=last.store_timestamp)
        if first.store_timestamp > checkpoint.queues_timestamp:
            return trust
        return trust._replace(fresh_offset=last.end, fresh_timestamp=first.store_timestamp)

    def _record_at(self, physical_offset: int) -> Record | None:
        return self._reader.record_at(physical_offset, self._following(physical_offset))

    def _following(self, offset: int) -> int:
        """Return the physical offset of the next file."""
        return self._files.base_of(offset) + self._files.file_size

    def _check_markers(self, checkpoint: Checkpoint) -> None:
        """Refuse queues that are damaged, half rebuilt, or may hold fillers queued by RocketMQ."""
        if self._must_rebuild.is_set():
            raise IncompleteError("a block is damaged, or a start was killed while it rebuilt them")
        if not checkpoint.is_ours and disk.is_directory(self._config.root / DAMAGED):
            raise IncompleteError("another broker was here, and the log has fillers")

    def _check_extents(self, checkpoint: Checkpoint) -> None:
        """Check that all queues begin and end where they did at the checkpoint, without holes.

        Otherwise a lost file is not visible: the other queues reach the log's end, and its records
        may lie before the part that is scanned.
        """
        is_written = not checkpoint.is_ours and checkpoint.log_timestamp > 0  # by RocketMQ
        if not self._files.bases or is_written:
            return
        if not checkpoint.is_ours:
            raise IncompleteError("the checkpoint is missing or damaged")
        offset, queues = checkpoint.queues_offset, self._queues.values()
        if offset < 0:
            return  # no queue had an entry, or an earlier version wrote the checkpoint
        if sum(checksum(one, one.find_physical(offset)) for one in queues) != checkpoint.queue_ends:
            raise IncompleteError("queues end elsewhere than at the checkpoint")
        is_same_log = self._log_start == checkpoint.log_start  # nothing was deleted by age since
        if is_same_log and sum(one.min_offset for one in queues) > checkpoint.queue_begins:
            raise IncompleteError("queues begin elsewhere than at the checkpoint")
        holes = HoleSearch(self._config.root)
        for queue in queues:
            if holes.has_hole(queue, queue.find_physical(offset)):
                raise IncompleteError(f"{queue.topic}:{queue.queue_id} has zeros among its entries")

    def _clean_start(self, log_start: int) -> int:
        """Return the end of the newest record in a queue, after checking the end of every queue.

        Records of no queue may follow it, and others if a stop was not really clean: the scan
        starts here.
        """
        start = log_start
        for key in self._batch_queues:
            if key not in self._queues:
                raise IncompleteError(f"{key[0]}:{key[1]} is a batch queue of RocketMQ")
        for queue in self._queues.values():
            self._check_last(queue, queue.next_offset)
            start = max(start, queue.last_end)
        return start

    def _check_last(self, queue: ConsumeQueue, end: int) -> None:
        """Check that the last entry before ``end`` fits its record, if that still exists."""
        if self._checked.get(queue) == end:
            return
        self._checked[queue] = end
        if end > queue.first_offset and not is_sound(
            queue.entry(end - 1),
            queue,
            end - 1,
            log_start=self._log_start,
            record_at=self._record_at,
        ):
            raise IncompleteError(f"entry {end - 1} of {queue.topic}:{queue.queue_id} is false")

    def _killed_start(self, checkpoint: Checkpoint) -> int:
        """Return the offset of a record or file below which log and queues can be trusted."""
        start = checkpoint_start(self._files, self._reader, checkpoint)
        offset = checkpoint.queues_offset
        if (
            start < offset < self._trust.durable_offset
            and self._repair_log(start) >= offset
            and self._record_at(offset) is not None
            and self._match_below(offset)
        ):
            return offset
        return start

    def _match_below(self, start: int) -> bool:
        """Return whether all queues pass the check of their entries for records below ``start``.

        A power cut may damage a sector that was rewritten, with entries that were on disk.
        """
        self._scan_start = start
        try:
            for queue in self._queues.values():
                self._held(queue)
        except IncompleteError:
            return False
        return True

    def _scan_from(self, start: int, *, ends_checked: bool = False) -> LogScan:
        """Dispatch every record from ``start`` on to its queue; cut queues to these records."""
        sound_end = self._repair_log(start)
        self._scan_start = start
        rebuild = QueueRebuild(
            self._queues,
            start=start,
            log_start=self._log_start,
            held=self._held,
            delay_levels_ms=self._config.delay_levels_ms,
            batch_queues=self._batch_queues,
            deleted_topics=self._deleted_topics,
            before=self._before,
            ends_checked=ends_checked,
        )
        check_crc = self._config.check_crc_on_recover
        scan = LogScan(
            self._files, start, check_crc=check_crc, trust=self._trust, sound_end=sound_end
        )
        stored = self._dispatch(scan, rebuild)
        self.transactions = rebuild.transactions
        self._repair(rebuild, list(zip(scan.damages, stored, strict=True)))
        return scan

    def _dispatch(self, scan: LogScan, rebuild: QueueRebuild) -> list[int]:
        """Dispatch the records; return the store time in ms of the record before each damage."""
        stored: list[int] = []
        before = 0
        logged = time.monotonic()
        progress, start = self._progress, self._scan_start
        ends = self._files.bases[-1:]
        progress.total = ends[0] + self._files.file_size - start if ends else 0
        for chunk_offset, chunk, found in scan:
            stored += [before] * (len(scan.damages) - len(stored))
            before = scan.last_timestamp
            rebuild.expected.take(chunk_offset, chunk, found)
            progress.done, progress.records = scan.end_offset - start, scan.records
            if time.monotonic() - logged >= PROGRESS_EVERY:
                logged = time.monotonic()
                logger.info(
                    "event=recovering offset=%d bytes=%d of=%d records=%d",
                    scan.end_offset,
                    progress.done,
                    progress.total,
                    progress.records,
                )
        return stored

    def _repair(self, rebuild: QueueRebuild, damages: list[tuple[Damage, int]]) -> None:
        """Add fillers for lost records to log and queues."""
        rebuild.finish()
        expected = rebuild.expected
        damages = sorted(damages + expected.given_up)
        self._damages += [damage for damage, _ in damages]
        repair = Repair(self._files, damages)
        blank_count = repair.fill_missing(expected.missing)
        for queue, before in self._before.items():
            repair.repair_end(queue, before)
            if queue.next_offset < before.end:
                # Removed entries must not reappear after a power cut and be trusted then.
                queue.sync()
        repair.write(self._config.root / DAMAGED)
        if blank_count or expected.left_out:
            logger.error(
                "event=queues_damaged places_without_message=%d records_without_place=%d",
                blank_count,
                expected.left_out,
            )

    def _held(self, queue: ConsumeQueue) -> int:
        """Return how many entries a queue has for records below the scan, after checking the last.

        A power cut may leave any bytes at the end of a queue; a blank entry cannot be checked.

        Raises:
            IncompleteError: The last entry refers to no record of this queue.
        """
        held = queue.find_physical(self._scan_start)
        if self._scan_start == self._log_start:
            while held > queue.first_offset and not self._may_be_expired(queue, held - 1):
                held -= 1
            return held
        if held > queue.first_offset and queue.entry(held - 1) == PRE_BLANK:
            if queue.start_of(held - 1) >= 0:
                raise IncompleteError(f"{queue.topic}:{queue.queue_id} has a blank end")
        else:
            self._check_last(queue, held)
        return held

    def _may_be_expired(self, queue: ConsumeQueue, queue_offset: int) -> bool:
        entry = queue.entry(queue_offset)
        is_expired = entry.is_valid and entry.physical_offset < self._log_start
        return entry == PRE_BLANK or is_expired

    def _find_last(self, scan: LogScan) -> None:
        """Find the last record of the log; a scan without records began at its end."""
        self.last_record, self.last_timestamp = scan.last_record, scan.last_timestamp
        if scan.records:
            return
        for queue in self._queues.values():
            if queue.last_end == scan.end_offset and queue.next_offset > queue.first_offset:
                last = queue.entry(queue.next_offset - 1)
                self.last_record = last.physical_offset
                self.last_timestamp = self._reader.store_timestamp(last.physical_offset)
                return

    def _cut_log(self, start: int, end: int, *, clean: bool) -> int:
        """Remove everything after the end of the log, and flush what the scan has read."""
        files = self._files
        base = files.base_of(end)
        truncated = 0
        for later in [later for later in files.bases if later > base]:
            with disk.opened(files.path(later)) as fd:
                # The next file is prepared ahead with zeros; anything else was part of the log.
                truncated += files.file_size if any(disk.pread(fd, PREFIX.size, 0)) else 0
        self._reader.forget_from(base + 1)
        files.remove_from(base + 1)
        if base in files.bases:
            known = self._trust.durable_offset >= 0
            rewritten = 0 if clean else REWRITTEN_ZEROS if known else files.file_size
            truncated += zero_tail(files.path(base), end - base, rewritten=rewritten)
        self._rewrite(end)
        for scanned in [scanned for scanned in files.bases if scanned >= files.base_of(start)]:
            with disk.opened(files.path(scanned), disk.WRITE) as fd:
                disk.sync_data(fd)
        if files.bases:
            disk.sync_directory(files.directory)
        return truncated

    def _rewrite(self, end: int) -> None:
        """Rewrite data that the previous run may have failed to flush.

        After a failed flush the kernel marks pages as clean that are not on disk: they can be read,
        even by this start, but no later flush writes them.
        """
        durable = self._trust.durable_offset
        files = self._files
        if not 0 <= durable < end:
            return
        for base in files.bases:
            if base < end and base + files.file_size > durable:
                write_again(
                    files.path(base), max(durable - base, 0), min(end - base, files.file_size)
                )


def _log_report(report: RecoveryReport) -> None:
    for damage in report.damages[:DAMAGES_LOGGED_MAX]:
        logger.error(
            "event=log_damaged offset=%d length=%d reason=%r",
            damage.offset,
            damage.length,
            damage.reason,
        )
    logger.info(
        "event=recovered clean=%s start=%d end=%d records=%d truncated_bytes=%d "
        "queues_rebuilt=%s damages=%d elapsed_ms=%d",
        report.clean,
        report.start_offset,
        report.end_offset,
        report.records,
        report.truncated_bytes,
        report.queues_rebuilt,
        len(report.damages),
        report.duration_ms,
    )


def checkpoint_start(files: MappedFileQueue, reader: LogReader, checkpoint: Checkpoint) -> int:
    """Return the newest file of the log that was begun long enough before the checkpoint."""
    trusted = min(checkpoint.log_timestamp, checkpoint.queues_timestamp) - CHECKPOINT_MARGIN_MS
    for base in reversed(files.bases[1:]):
        first = reader.record_at(base, base + files.file_size)
        if first is not None and 0 < first.store_timestamp <= trusted:
            return base
    return files.bases[0] if files.bases else 0
