"""Prepares: half messages are validated, stored once however often they are sent, and scheduled.

``CHECK_IMMUNITY_TIME_IN_SECONDS`` only sets when the first check is due. RocketMQ also refuses
(604) a decision that arrives later, because a check copy might lead to a second commit. A
transaction here has one identity and one decision, so a late decision is accepted.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from attrs import define

from halfmq.store.format.ids import offset_message_id, parse_offset_message_id
from halfmq.store.format.properties import get_property
from halfmq.store.log.append_request import AppendRequest, AppendResult
from halfmq.store.message_store import MessageStore

from ..config import TransactionConfig
from ..ports import Connection
from .admission import (
    FINAL_RESERVE,
    GROUP_DECISION_RESERVE,
    GROUP_RESERVE,
    RequestedDelays,
    group_limit_refusal,
    prepare_refusal,
    refuse_delays,
    require_few_properties,
    require_room,
)
from .decision_lookup import DecisionLookup
from .deduplication import DuplicateFinder, FirstHalf, RecentPrepares, deduplication_key
from .half import GroupMembership, half_request, immunity_s, mark_in_group
from .half_reader import HalfReader
from .half_records import committed_again, prepared_final
from .state.caches import FinalMessageCache
from .state.counters import Counters
from .state.pending import MemberHalf, Pending, PendingTable
from .state.state_machine import State

logger = logging.getLogger(__name__)

INVALID_IMMUNITIES_LOGGED_MAX: Final = 100
"""Invalid values of CHECK_IMMUNITY_TIME_IN_SECONDS that are logged only once each; further values
are logged each time."""


@define(eq=False, repr=False, slots=False)
class Prepares:
    """Accepts half messages."""

    _log: MessageStore
    _table: PendingTable
    _finals: FinalMessageCache
    _halves: HalfReader
    _lookup: DecisionLookup
    _counters: Counters
    _config: TransactionConfig
    _schedule_first: Callable[[Pending], None]  # schedules the first check of a transaction
    _now_ms: Callable[[], int]
    _record_size_max: int  # the largest record the log takes, in bytes

    def __attrs_post_init__(self) -> None:
        self._append = self._log.append
        self.pending_max = 0 if self._config.reject else self._config.pending_max
        self._invalid_immunities: set[bytes] = set()
        self.unflushed_topics = self._config.unflushed_topics
        self.recent_prepares = RecentPrepares()
        self._duplicates = DuplicateFinder(
            self._halves.read, self.recent_prepares, self._lookup.state_of
        )

    def configure(self, config: TransactionConfig) -> None:
        """Apply new limits."""
        self._config = config
        self.pending_max = 0 if config.reject else config.pending_max

    def refill(self) -> None:
        """Read the newest halves of the log at a start: they may be sent again."""
        self.recent_prepares.refill(self._halves)

    def refuse_prepares(self, group: str, broker_address: str) -> None:
        """Raise if half messages of a producer group are not accepted now.

        Raises:
            RequestRefusedError: Halves are forbidden, or the group or the table is full.
        """
        limit = self._config.group_pending_max
        is_full = self._table.weight >= self.pending_max
        if not is_full and (not limit or self._table.count_of(group) < limit):
            return
        self._counters.prepares_refused += not self._config.reject
        if not is_full:
            raise group_limit_refusal(group, limit)
        raise prepare_refusal(self._config, self._table.halves, broker_address)

    def refuse_delays(self, sent: RequestedDelays) -> None:
        """Raise if a message to be prepared requests a delay that halves cannot have.

        Raises:
            RequestRefusedError: The delay is not supported for halves, or not valid.
        """
        refuse_delays(sent, self._now_ms())

    def half_of(
        self, message: AppendRequest, unique_key: str, *, reserve: int = FINAL_RESERVE
    ) -> AppendRequest:
        """Return the half to append for a transactional message.

        Raises:
            RequestRefusedError: It leaves no room for the records made from it.
        """
        require_few_properties(message.properties, reserve=reserve)
        half = half_request(message, unique_key)
        require_room(half, message.topic, record_size_max=self._record_size_max)
        return half

    def prepared(
        self,
        message: AppendRequest,
        half: AppendRequest,
        appended: AppendResult,
        producer_group: str,
        key: int,
        connection: Connection,
    ) -> None:
        """Add a transaction whose half has been appended; ``key`` is its ``deduplication_key``.

        The message becomes the final one: the caller must not use it afterwards.
        """
        properties = half.properties
        offset = appended.physical_offset
        entry = self._table.add(
            offset,
            appended.queue_offset,
            appended.store_timestamp,
            producer_group,
            message.topic,
            immunity_s=self._immunity_s(half) if properties.rfind(b"CHECK_IMMUNITY") >= 0 else 0,
            owner=connection,
        )
        self._finals.add(offset, prepared_final(message, half, offset))
        self._schedule_first(entry)
        self.recent_prepares.add(key, offset)
        self._counters.prepared += 1

    def prepare_group(
        self,
        messages: Sequence[tuple[AppendRequest, str]],
        producer_group: str,
        connection: Connection,
    ) -> list[AppendResult]:
        """Store the messages of one transaction as halves, all or none, the leader first.

        Args:
            messages: Each with its unique key.
            producer_group: The group that checks are sent to.
            connection: Sender of the request.

        Raises:
            RequestRefusedError: One leaves no room for the records made from it.
            StoreError: The halves could not be appended; nothing has changed.
        """
        leader_key, total = messages[0][1].encode(), len(messages)
        halves = [self.half_of(one, key, reserve=GROUP_RESERVE) for one, key in messages]
        if total > 1:
            for number, (half, (message, _)) in enumerate(zip(halves, messages, strict=True)):
                mark_in_group(half, GroupMembership(leader_key, number, total))
                require_room(
                    half,
                    message.topic,
                    record_size_max=self._record_size_max,
                    reserve=GROUP_DECISION_RESERVE,
                )
        appended = self._append(halves, contiguous=True)
        keys = [deduplication_key(producer_group, key) for _, key in messages]
        leader = appended[0].physical_offset
        self.prepared(messages[0][0], halves[0], appended[0], producer_group, keys[0], connection)
        rest = list(zip(messages, halves, appended, keys, strict=True))[1:]
        for (message, _), half, one, key in rest:
            self._table.add_member(leader, MemberHalf(one.physical_offset, one.queue_offset))
            self._finals.add(
                one.physical_offset, prepared_final(message, half, one.physical_offset)
            )
            self.recent_prepares.add(key, one.physical_offset)
        self._counters.groups += total > 1
        return appended

    def _immunity_s(self, half: AppendRequest) -> int:
        """Return the requested seconds without a check; log an invalid value."""
        value = get_property(half.properties, b"CHECK_IMMUNITY_TIME_IN_SECONDS")
        if value is not None and not value.isdigit() and value not in self._invalid_immunities:
            if len(self._invalid_immunities) < INVALID_IMMUNITIES_LOGGED_MAX:
                self._invalid_immunities.add(value)
            # RocketMQ uses its default as well, without a warning.
            logger.warning(
                "event=immunity_ignored CHECK_IMMUNITY_TIME_IN_SECONDS=%r expected='whole seconds'",
                value[:40],
            )
        return immunity_s(half.properties)

    def find_duplicate(
        self,
        messages: Sequence[tuple[AppendRequest, str]],
        producer_group: str,
        connection: Connection,
    ) -> list[FirstHalf] | None:
        """Return the halves that these messages repeat; None if they begin a new transaction.

        Args:
            messages: All of one transaction, the leader first, each with its unique key.
            producer_group: The group of their producer.
            connection: Sender of the request; checks go to it first if the previous one is closed.
        """
        found = self._duplicates.find(messages, producer_group)
        if found is None:
            return None
        self._counters.prepares_repeated += 1
        entry = self._table.get(self._table.transaction_of(found[0].physical_offset))
        if entry is not None and (entry.owner is None or entry.owner.closed):
            entry.owner = connection
        return found

    def committed_message(self, half_message_id: str) -> AppendRequest | None:
        """Return a committed message for another append, for a retry.

        None unless the id is that of a committed half in this log.
        """
        try:
            offset = parse_offset_message_id(half_message_id).physical_offset
        except ValueError:
            return None
        half = self._halves.named(offset)
        if (
            half is None
            or offset_message_id(half.store_host, offset) != half_message_id
            or self._lookup.state_of(offset, half) is not State.COMMITTED
        ):
            return None
        return committed_again(half)
