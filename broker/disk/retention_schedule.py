"""When old messages are deleted, and what keeps them longer.

In the hours named by `deleteWhen`, files of the log are deleted all of whose messages are older
than `fileReservedTime`; at any hour, when the disk gets scarce or an operator asks for it. Age is
what counts: a younger file is never deleted, however full the disk (`disk_limits` says what
happens then; RocketMQ deletes it).

Two kinds of message are kept whatever their age, and everything behind them with them, because a
log has no holes: halves of undecided transactions, and delayed messages that have not been
delivered yet. That this keeps files is logged and counted.

Source: RocketMQ `DefaultMessageStore.CleanCommitLogService`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

from halfmq.store.files.page_cache import NotInMemoryError, allowed_to_wait
from halfmq.store.retention import Deleted

from ..config import StoreSettings
from ..loop.fetches import Fetch

logger = logging.getLogger(__name__)

FIRST_LOOK_S: Final = 60.0
"""Seconds after the start until the first look: at a start there is more urgent work."""

LOOK_S: Final = 10.0
"""Seconds between two looks. Source: `cleanResourceInterval`."""

LOOKS_WHEN_ASKED: Final = 3
"""Looks that a request of an operator stands for: the first finds what is old, the next deletes."""

_HOUR_MS: Final = 3_600_000


class Log(Protocol):
    """What this needs of the store."""

    @property
    def min_offset(self) -> int: ...

    @property
    def durable_offset(self) -> int: ...

    @property
    def expired_end(self) -> int: ...

    @property
    def deleted(self) -> Deleted: ...

    def find_expired(self, stored_before_ms: int) -> None: ...

    def delete_before(self, end: int) -> None: ...

    def set_deletion_urgent(self, *, is_urgent: bool) -> None: ...

    @property
    def bytes_to_free(self) -> int: ...


class Transactions(Protocol):
    """What this needs of the transaction service."""

    @property
    def oldest_pending_offset(self) -> int | None: ...

    def on_retention_blocked(self, min_wanted_offset: int) -> None: ...


class Delays(Protocol):
    """What this needs of delayed delivery."""

    def oldest_waiting_offset(self) -> int | None: ...


def local_hour(now_ms: int) -> int:
    """Return the hour of the day, 0 to 23, at a time in ms, where this machine is."""
    return time.localtime(now_ms // 1000).tm_hour


class RetentionSchedule:
    """Looks for old files and has them deleted; call `tick` when it asks for it."""

    def __init__(
        self,
        log: Log,
        settings: StoreSettings,
        transactions: Transactions,
        delays: Delays,
        *,
        is_scarce: Callable[[], bool] = lambda: False,
        now_ms: Callable[[], int],
        fetch: Fetch,
        hour_of: Callable[[int], int] = local_hour,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Wire it.

        `is_scarce` tells whether old files are deleted at any hour. `fetch` has in memory what
        `tick` lacks and calls back on this thread; `wake` has `tick` called soon.
        """
        self._log = log
        self._reserved_ms = settings.file_reserved_hours * _HOUR_MS
        self._hours = frozenset(map(int, settings.delete_when.split(";")))
        self._transactions = transactions
        self._delays = delays
        self._is_scarce = is_scarce
        self._now_ms = now_ms
        self._fetch = fetch
        self._hour_of = hour_of
        self._wake = wake
        self._started = False
        self._is_fetched = False  # what the last look lacked: the next one may wait for the disk
        self._asked = 0  # looks that are left of an operator's request
        self._kept_from = -1  # offset from which on old files are kept; -1: none are
        self._delays_told = -1  # the delayed message that last kept some

    def ask(self) -> None:
        """Have old files deleted soon, whatever the hour."""
        self._asked = LOOKS_WHEN_ASKED
        self._started = True
        self._wake()

    def tick(self) -> float:
        """Have deleted what the last look has found, and look again; return seconds until then."""
        if not self._started:
            self._started = True
            return FIRST_LOOK_S
        now_ms = self._now_ms()
        is_scarce = self._is_scarce()
        self._log.set_deletion_urgent(is_urgent=is_scarce)
        if self._asked or self._hour_of(now_ms) in self._hours or is_scarce:
            self._asked = max(self._asked - 1, 0)
            # What is not on disk yet may wait for its delivery unseen.
            wanted = min(self._log.expired_end, self._log.durable_offset)
            if wanted > self._log.min_offset:
                self._delete(wanted)
            self._log.find_expired(now_ms - self._reserved_ms)
        return 1.0 if self._asked else LOOK_S

    def _delete(self, wanted: int) -> None:
        try:
            # After a fetch only what has left memory since is waited for, which is next to nothing.
            with allowed_to_wait(self._is_fetched):
                waiting = self._delays.oldest_waiting_offset()
        except NotInMemoryError as missing:
            self._fetch(missing, self._fetched)
            return
        self._is_fetched = False
        pending = self._transactions.oldest_pending_offset
        needed = [offset for offset in (pending, waiting) if offset is not None]
        kept_from = min([wanted, *needed])
        if pending is not None and pending < wanted:
            self._transactions.on_retention_blocked(wanted)
        if waiting is not None and waiting < wanted and waiting != self._delays_told:
            self._delays_told = waiting
            logger.warning(
                "event=retention_blocked delayed_offset=%d wanted_offset=%d", waiting, wanted
            )
        self._kept_from = kept_from if kept_from < wanted else -1
        self._log.delete_before(kept_from)

    def _fetched(self, _is_there: bool) -> None:
        """Go on; if the disk refused something, the look says what, or finds that it is gone."""
        self._is_fetched = True
        self._wake()

    def metrics(self) -> dict[str, int]:
        """Return counters and gauges by name."""
        deleted = self._log.deleted
        return {
            "log_files_deleted": deleted.log_files,
            "log_bytes_deleted": deleted.log_bytes,
            "index_files_deleted": deleted.index_files,
            "queue_files_deleted": deleted.queue_files,
            "bytes_leaving": self._log.bytes_to_free,
            "blocked_at": self._kept_from,
        }
