"""Listing and lookup of undecided transactions for operators."""

from collections.abc import Callable, Iterator, Sized
from typing import Final, NamedTuple

from attrs import define

from halfmq.remoting.own_requests import TransactionInfo
from halfmq.store.files.page_cache import Missing, NotInMemoryError
from halfmq.store.format.ids import offset_message_id, parse_offset_message_id
from halfmq.store.format.properties import get_property
from halfmq.store.format.topics import HALF_TOPIC

from .decision_lookup import DecisionLookup
from .half import real_topic, unique_key
from .half_reader import ReadHalf
from .state.pending import Pending, PendingTable
from .state.state_machine import State

STATE_NAMES: Final = {State.PREPARED: "prepared", State.PARKED: "parked"}
_STATES: Final = {name: state for state, name in STATE_NAMES.items()}

PAGE_MS: Final = 5
"""Milliseconds after which a page ends early: sends wait for as long."""

SKIPPED_PER_CLOCK_READ: Final = 1_024
"""Transactions skipped between two reads of the clock, in a fraction of a millisecond."""


class Page(NamedTuple):
    """A part of a listing."""

    infos: list[TransactionInfo]
    next_after: int | None  # offset after which the next page begins; None: this is the last


@define(eq=False, repr=False)
class PendingView:
    """Describes undecided transactions.

    Ages are by ``now_ms``, and ``monotonic_ms`` limits the time of a page. ``producers_of`` returns
    the connected producers of a group.
    """

    _table: PendingTable
    _lookup: DecisionLookup
    _next_check_in_ms: Callable[[Pending], int | None]
    _producers_of: Callable[[str], Sized]
    _read_half: ReadHalf
    _now_ms: Callable[[], int]
    _monotonic_ms: Callable[[], int]

    def page(
        self, after: int, max_count: int, group: str | None = None, state: str | None = None
    ) -> Page:
        """Return undecided transactions in log order, with offsets larger than ``after``.

        Args:
            after: ``next_after`` of the previous page; -1 for the first page.
            max_count: Most transactions to return.
            group: Only those of this producer group.
            state: Only those in this state, "prepared" or "parked".

        Raises:
            NotInMemoryError: With all halves that the page needs.
        """
        if state == STATE_NAMES[State.PARKED] and not self._table.parked:
            return Page([], None)
        wanted = None if state is None else _STATES[state]
        stop_ms = self._monotonic_ms() + PAGE_MS
        found: list[TransactionInfo] = []
        missing: list[Missing] = []
        next_after = None
        for passed, entry in enumerate(self._entries_after(after), 1):
            if (group is None or entry.group == group) and wanted in (None, entry.state):
                try:
                    found.append(self._info(entry))
                except NotInMemoryError as error:
                    missing += error.missing
                is_over = len(found) + len(missing) >= max_count or self._monotonic_ms() >= stop_ms
            else:
                is_over = not passed % SKIPPED_PER_CLOCK_READ and self._monotonic_ms() >= stop_ms
            if is_over:
                next_after = entry.offset
                break
        if missing:
            raise NotInMemoryError(missing)
        return Page(found, next_after)

    def find(self, transaction_id: str) -> TransactionInfo | None:
        """Return the undecided transaction with this UNIQ_KEY, or offset id of a half.

        None if there is none, or if its key is so new that it is not in the index yet.
        """
        entry = self._by_offset_id(transaction_id) or self._by_key(transaction_id)
        return None if entry is None else self._info(entry)

    def _entries_after(self, after: int) -> Iterator[Pending]:
        while entries := self._table.after(after):
            yield from entries
            after = entries[-1].offset

    def _by_offset_id(self, transaction_id: str) -> Pending | None:
        try:
            named = parse_offset_message_id(transaction_id)
        except ValueError:
            return None
        entry = self._table.get(self._table.transaction_of(named.physical_offset))
        if entry is None:
            return None
        # A unique key has the same form, and may look like the id of another offset.
        half = self._read_half(entry.offset)
        return entry if half is not None and half.store_host == named.store_host else None

    def _by_key(self, key: str) -> Pending | None:
        oldest = self._table.oldest
        if oldest is None:
            return None
        for offset in reversed(self._lookup.indexed(HALF_TOPIC, key, oldest.store_timestamp)):
            entry = self._table.get(self._table.transaction_of(offset))
            half = None if entry is None else self._read_half(offset)
            if half is not None and unique_key(half) == key:
                return entry
        return None

    def _info(self, entry: Pending) -> TransactionInfo:
        now_ms = self._now_ms()
        half = self._read_half(entry.offset)
        owner = entry.owner
        return TransactionInfo(
            offset=entry.offset,
            queue_offset=entry.queue_offset,
            message_id="" if half is None else offset_message_id(half.store_host, entry.offset),
            transaction_id="" if half is None else unique_key(half) or "",
            producer_group=entry.group,
            topic="" if half is None else real_topic(half) or "",
            keys="" if half is None else _text(get_property(half.properties, b"KEYS")),
            state=STATE_NAMES[entry.state],
            age_ms=max(now_ms - entry.store_timestamp, 0),
            store_timestamp=entry.store_timestamp,
            owner=None if owner is None or owner.closed else owner.name,
            checks_sent=entry.sent,
            checks_delivered=entry.checks,
            checks_answered=entry.answered,
            next_check_ms=self._next_check_in_ms(entry),
            parked_reason=entry.parked_reason.text,
            messages=1 + len(self._table.groups.get(entry.offset, ())),
            producers=len(self._producers_of(entry.group)),
        )


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode(errors="replace")
