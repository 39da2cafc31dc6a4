"""The schedule for deleting old messages, and the messages that are kept longer.

A log file is deleted if all of its messages are older than `fileReservedTime`: in the hours of
`deleteWhen`, or at any hour if the disk is scarce or an operator requests it. A younger file is
never deleted, however full the disk is (see `disk_limits`; RocketMQ deletes it).

Two kinds of messages are kept at any age, together with the log after them, because a log has no
holes: halves of undecided transactions, and delayed messages that are not delivered yet. Files that
an archive lacks are kept as well. Files kept for one of these are logged and counted.

Source: RocketMQ `DefaultMessageStore.CleanCommitLogService`.
"""

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from attrs import define

from halfmq.store.deletion import Deletion
from halfmq.store.files.page_cache import NotInMemoryError, allowed_to_wait

from ..config import StoreSettings
from ..loop.fetches import Fetch

logger = logging.getLogger(__name__)

FIRST_SCAN_S: Final = 60.0
"""Seconds from the start until the first scan: a start has more urgent work."""

SCAN_S: Final = 10.0
"""Seconds between two scans. Source: `cleanResourceInterval`."""

SCANS_PER_REQUEST: Final = 3
"""Scans after an operator's request: the first finds old files, the next deletes them."""

_HOUR_MS: Final = 3_600_000


class AgedLog(Protocol):
    """The part of the store that retention uses; see ``MessageStore``."""

    @property
    def min_offset(self) -> int: ...

    @property
    def durable_offset(self) -> int: ...

    @property
    def archived_end(self) -> int: ...

    @property
    def deletable_end(self) -> int: ...

    @property
    def deletion(self) -> Deletion: ...


def local_hour(now_ms: int) -> int:
    """Return the local hour of the day, 0 to 23, at a time in ms."""
    return time.localtime(now_ms // 1000).tm_hour


@define(eq=False, repr=False, slots=False)
class RetentionPolicy:
    """Finds and deletes old files; call `tick` after the seconds that it returns."""

    _log: AgedLog
    _settings: StoreSettings
    # Physical offset of the oldest undecided half, and of the oldest undelivered message; None
    # if there is none. The log is kept from both.
    _oldest_pending: Callable[[], int | None]
    _oldest_delayed: Callable[[], int | None]
    # Called if a half keeps files, with the offset up to which they would be deleted.
    _on_blocked: Callable[[int], None]
    _now_ms: Callable[[], int]
    _fetch: Fetch  # reads queue entries into memory and calls back on this thread
    # Stores messages again that wait longer, and returns whether there were some before an
    # offset; then the deletion waits for the next scan.
    _copy_forward: Callable[[int], bool] = lambda _end: False
    _is_scarce: Callable[[], bool] = lambda: False  # whether old files are deleted at any hour
    _hour_of: Callable[[int], int] = local_hour
    _wake: Callable[[], None] = lambda: None  # schedules `tick` soon

    def __attrs_post_init__(self) -> None:
        self.configure(self._settings)
        self._copied = False  # by the last scan
        self._started = False
        self._is_fetched = False  # after a fetch the next scan may wait for the disk
        self._requested_scans = 0  # left of an operator's request
        self._kept_from = -1  # offset from which old files are kept; -1: none
        self._delay_logged = -1  # the delayed message last logged for keeping files
        self._archive_logged = -1  # the end of the archive last logged for it

    def configure(self, settings: StoreSettings) -> None:
        """Apply new settings of how long messages are kept, and when files are deleted."""
        self._reserved_ms = settings.file_reserved_hours * _HOUR_MS
        self._hours = frozenset(map(int, settings.delete_when.split(";")))

    def request_deletion(self) -> None:
        """Delete old files soon, at any hour."""
        self._requested_scans = SCANS_PER_REQUEST
        self._started = True
        self._wake()

    def tick(self) -> float:
        """Delete the files that the last scan found, and scan again.

        Return the seconds until the next call.
        """
        if not self._started:
            self._started = True
            return FIRST_SCAN_S
        now_ms = self._now_ms()
        is_scarce = self._is_scarce()
        self._log.deletion.set_urgent(is_urgent=is_scarce)
        if self._requested_scans or self._hour_of(now_ms) in self._hours or is_scarce:
            self._requested_scans = max(self._requested_scans - 1, 0)
            # A delayed message that is not on disk yet may still wait for its delivery.
            wanted = min(self._log.deletion.expired_end, self._log.durable_offset)
            if wanted > self._log.min_offset:
                self._delete(wanted)
            self._log.deletion.find_expired(now_ms - self._reserved_ms)
        return 1.0 if self._requested_scans or self._copied else SCAN_S

    def _delete(self, wanted: int) -> None:
        try:
            # After a fetch only bytes evicted since then have to be waited for.
            with allowed_to_wait(self._is_fetched):
                self._copied = self._copy_forward(wanted)
                if self._copied:
                    return
                waiting = self._oldest_delayed()
        except NotInMemoryError as missing:
            self._fetch(missing, self._fetched)
            return
        self._is_fetched = False
        pending = self._oldest_pending()
        needed = [offset for offset in (pending, waiting) if offset is not None]
        archived = self._log.archived_end
        kept_from = min([wanted, archived, *needed])
        if pending is not None and pending < wanted:
            self._on_blocked(wanted)
        if waiting is not None and waiting < wanted and waiting != self._delay_logged:
            self._delay_logged = waiting
            logger.warning(
                "event=retention_blocked delayed_offset=%d wanted_offset=%d", waiting, wanted
            )
        if archived < wanted and archived != self._archive_logged:
            self._archive_logged = archived
            logger.warning(
                "event=retention_blocked archived_offset=%d wanted_offset=%d", archived, wanted
            )
        self._kept_from = kept_from if kept_from < wanted else -1
        self._log.deletion.delete_before(min(kept_from, self._log.deletable_end))

    def _fetched(self, _is_there: bool) -> None:
        """Continue after a fetch; if that failed, the next scan reports the error."""
        self._is_fetched = True
        self._wake()

    def metrics(self) -> dict[str, int]:
        """Return counters and gauges by name."""
        deleted = self._log.deletion.deleted
        return {
            "log_files_deleted": deleted.log_files,
            "log_bytes_deleted": deleted.log_bytes,
            "index_files_deleted": deleted.index_files,
            "queue_files_deleted": deleted.queue_files,
            "bytes_leaving": self._log.deletion.bytes_to_free,
            "blocked_at": self._kept_from,
        }
