"""Parking: the broker stops the checks of a transaction and reports it to operators.

A parked transaction stays in the table, undecided. A copy of its message is appended to
``TRANS_CHECK_MAX_TIME_TOPIC`` with the reason; checks stop only after that append. The transaction
can be decided or resumed at any later time.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from attrs import define, field

from halfmq.store.errors import StoreError
from halfmq.store.files.page_cache import NotInMemoryError, allowed_to_wait
from halfmq.store.format.flags import TransactionType
from halfmq.store.message_store import MessageStore

from ...errors import RequestRefusedError
from ...logs import EACH
from ...loop.fetches import Fetch
from ...loop.slices import Slice
from ..half import StoredHalf, real_topic, unique_key
from ..half_records import bare_request, parked_request
from ..state.counters import Counters
from ..state.pending import Pending, PendingTable
from ..state.state_machine import (
    PARKING_REASONS,
    ParkedReason,
    State,
    TransactionEvent,
    Verdict,
    outcome,
)

logger = logging.getLogger(__name__)

ENTRIES_PER_STEP: Final = 100
"""Transactions skipped in a step, in some hundredths of a millisecond."""


@define(eq=False, repr=False)
class Parking:
    """Parks transactions and resumes them.

    ``ensure_topic`` creates the topic of parked messages. ``read_half`` raises NotInMemoryError if
    the half must be read from the disk first; ``fetch`` reads it into memory; ``wake`` schedules
    ``tick`` soon.
    """

    _log: MessageStore
    _table: PendingTable
    _counters: Counters
    _read_half: Callable[[int], StoredHalf | None]
    _fetch: Fetch
    _wake: Callable[[], None]
    _ensure_topic: Callable[[], object]
    _store_host: bytes
    _now_ms: Callable[[], int]
    _parked_by: dict[ParkedReason, int] = field(
        init=False, factory=lambda: dict.fromkeys(PARKING_REASONS, 0)
    )
    _blocked_at: int = field(init=False, default=-1)  # the half that last blocked deletion
    _blocked_end: int = field(init=False, default=0)  # halves before this offset are too old
    _passed: int = field(init=False, default=0)  # halves before this offset have been parked
    _fetching: bool = field(init=False, default=False)  # the next half to park
    _fetched: int = field(init=False, default=-1)  # the half that was fetched last

    def metrics(self) -> dict[str, int]:
        """Return the number of transactions parked since the start, by reason."""
        return {f"parked_{reason.name.lower()}": n for reason, n in self._parked_by.items()}

    def park(
        self, entry: Pending, half: StoredHalf, event: TransactionEvent = TransactionEvent.GIVE_UP
    ) -> bool:
        """Park a transaction; return False if that could not be recorded and must be retried."""
        if outcome(entry.state, event).verdict is not Verdict.TRANSITION:
            return True
        reason = ParkedReason.UNKNOWN if entry.answered else ParkedReason.NO_ANSWER
        if event is TransactionEvent.EXPIRED:
            reason = ParkedReason.EXPIRED
        try:
            self._ensure_topic()
            self._log.append((parked_request(half, reason),))
        except (StoreError, RequestRefusedError, ValueError) as error:
            logger.warning("event=not_parked half_offset=%d error=%r", entry.offset, str(error))
            return False
        self._table.park(entry, reason)
        self._counters.parked += 1
        self._parked_by[reason] += 1
        logger.warning(
            "event=transaction_parked half_offset=%d group=%s unique_key=%s topic=%s reason=%s "
            "checks_sent=%d checks=%d answered=%d",
            entry.offset,
            entry.group,
            unique_key(half),
            real_topic(half),
            reason.text,
            entry.sent,
            entry.checks,
            entry.answered,
            extra=EACH,
        )
        return True

    def resume(self, entry: Pending) -> int:
        """Resume the checks of a parked transaction, from the first one.

        Return the log position up to which the log must be durable before the answer; 0 if the
        transaction is not parked.

        Raises:
            StoreError: That could not be recorded; the transaction stays parked.
        """
        if outcome(entry.state, TransactionEvent.RESUME).verdict is not Verdict.TRANSITION:
            return 0
        resumed = bare_request(
            entry.offset,
            entry.group,
            TransactionType.PREPARED,
            now_ms=self._now_ms(),
            host=self._store_host,
        )
        (appended,) = self._log.append((resumed,))
        self._log.request_flush()
        self._table.resume(entry)
        self._counters.resumed += 1
        logger.info("event=transaction_resumed half_offset=%d group=%s", entry.offset, entry.group)
        return appended.end

    def on_retention_blocked(self, min_wanted_offset: int) -> None:
        """Handle undecided halves before the offset where retention wants the log to begin.

        They are kept, together with the log from the oldest of them. ``tick`` parks those that are
        still checked, once, so that an operator is informed. A warning is logged once for each
        oldest half.
        """
        oldest = self._table.oldest
        if oldest is None or oldest.offset >= min_wanted_offset:
            return
        if oldest.offset == self._blocked_at:
            self._blocked_end = max(self._blocked_end, min_wanted_offset)
            return
        self._blocked_at = oldest.offset
        self._blocked_end, self._passed = min_wanted_offset, 0
        self._counters.retention_blocked += 1
        logger.warning(
            "event=retention_blocked half_offset=%d group=%s wanted_offset=%d",
            oldest.offset,
            oldest.group,
            min_wanted_offset,
        )

    def tick(self, time_slice: Slice) -> int | None:
        """Park some of the halves that are too old; return 0 if there are more, else None."""
        if self._fetching or self._passed >= self._blocked_end:
            return None
        return None if time_slice.advance(self._expire()) else 0

    def _expire(self) -> Iterator[None]:
        """Park halves that are too old, continuing after the last slice."""
        while entries := self._table.after(self._passed - 1, ENTRIES_PER_STEP):
            for entry in entries:
                if entry.offset >= self._blocked_end:
                    self._passed = self._blocked_end
                    return
                offset = entry.offset
                self._passed = offset + 1
                if entry.state is State.PREPARED:
                    try:
                        with allowed_to_wait(offset == self._fetched):
                            half = self._read_half(offset)
                    except NotInMemoryError as missing:
                        self._passed = offset
                        self._fetching = True
                        self._fetch(missing, partial(self._on_fetched, offset))
                        return
                    if half is None:
                        logger.error("event=half_unreadable half_offset=%d", offset)
                    else:
                        self.park(entry, half, TransactionEvent.EXPIRED)
                    yield
            yield
        self._passed = self._blocked_end

    def _on_fetched(self, offset: int, is_there: bool) -> None:
        self._fetching = False
        self._fetched = offset
        if not is_there and self._passed == offset:
            logger.error("event=half_unreadable half_offset=%d", offset)
            self._passed = offset + 1
        self._wake()
