"""The interface of transactions to the rest of the broker.

The send handler passes half messages, the transaction handler decisions, the registry connection
events of producers; a ticker calls ``tick``. Everything runs on the event loop's thread.

The answer to a decision (see `deciding`) waits until the record is on disk, in every flush mode: a
client that was answered "committed" may forget the transaction, so the broker must not. Topics may
opt out of that.

``CHECK_IMMUNITY_TIME_IN_SECONDS`` only sets when the first check is due. RocketMQ also refuses
(604) a decision that arrives later, because a check copy might lead to a second commit. A
transaction here has one identity and one decision, so a late decision is accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Final, Protocol

from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.ids import offset_message_id, parse_offset_message_id
from halfmq.store.format.properties import get_property
from halfmq.store.log.append_request import AppendRequest, AppendResult

from ..config import TransactionConfig
from ..loop.fetches import Fetch
from ..loop.slices import Slice
from .admission import (
    FINAL_RESERVE,
    GROUP_DECISION_RESERVE,
    GROUP_RESERVE,
    Delays,
    group_is_full,
    leave_room,
    not_taken,
    refuse_delays,
    refuse_large,
)
from .checks.checker import RESTART_GRACE_MS, Checker, ProducerDirectory
from .checks.parking import Parking
from .counters import Counters
from .deciding import Decisions, Ended
from .decision_lookup import DecisionLookup, DecisionLookupLog
from .deduplication import DuplicateFinder, FirstHalf, RecentPrepares, deduplication_key
from .half import GroupMembership, StoredHalf, half_draft, immunity_s, in_group
from .half_reader import HalfLog, HalfReader
from .half_records import committed_again, prepared_final
from .op_writer import OpWriter
from .pending_view import PendingView
from .replay.snapshot import LOG_BYTES_MIN, Snapshots
from .replay.start import ReplayLog, replay
from .state.decision_cache import DECIDED_REMEMBERED
from .state.final_message_cache import FinalMessageCache
from .state.pending import MemberHalf, PendingTable, Producer
from .state.state_machine import Event, State

logger = logging.getLogger(__name__)

IDLE_TICK_MS: Final = 250
"""Longest pause between two ticks: a check scheduled during the pause may be this late."""

ODD_IMMUNITIES_LOGGED_MAX: Final = 100
"""Invalid values of CHECK_IMMUNITY_TIME_IN_SECONDS that are logged only once each; further values
are logged each time."""


class TransactionLog(ReplayLog, HalfLog, DecisionLookupLog, Protocol):
    """The part of the store that transactions use."""

    def append(
        self, group: Sequence[AppendRequest], *, contiguous: bool = False
    ) -> list[AppendResult]: ...

    def lacking(self, physical_offsets: Iterable[int]) -> NotInMemoryError: ...


class TransactionService:
    """Accepts half messages and decisions, and checks halves that stay undecided."""

    def __init__(
        self,
        log: TransactionLog,
        producers: ProducerDirectory,
        config: TransactionConfig,
        *,
        broker_name: str,
        store_host: bytes,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        snapshot_path: Path,
        record_size_max: int,
        fetch: Fetch,
        before_parking: Callable[[], object] = lambda: None,
        destination: Callable[[str, int], tuple[str, int]] = lambda topic, queue_id: (
            topic,
            queue_id,
        ),
        delayed: Callable[[AppendRequest, int], AppendRequest] = lambda final, _now_ms: final,
        jitter: Random | None = None,
        wake: Callable[[], None] = lambda: None,
        snapshot_log_bytes: int = LOG_BYTES_MIN,
        decided_remembered: int = DECIDED_REMEMBERED,
        may_ask: Callable[[Producer, StoredHalf], bool] = lambda _producer, _half: True,
    ) -> None:
        """Wire the parts.

        Checks and housekeeping use ``monotonic_ms``; ages use the wall clock, ``now_ms``.
        ``record_size_max`` is the largest record the log takes, in bytes. ``before_parking``
        creates the topic of parked messages. ``destination`` returns the topic and queue where the
        final message for a topic and queue is stored. ``delayed`` turns a final message that
        requests a delay into what its commit stores now. ``fetch`` reads a half into memory and
        calls back. ``jitter`` spreads the checks. ``wake`` schedules ``tick`` soon. ``may_ask``
        returns whether a producer may see a message that a check would show it.
        """
        self._log = log
        self._append = log.append
        self._config = config
        self._now_ms, self._monotonic_ms = now_ms, monotonic_ms
        self._snapshot_path = snapshot_path
        self._record_size_max = record_size_max
        self._table = PendingTable(decided_remembered)
        self._counters = Counters()
        self._recent = FinalMessageCache()
        self.recent_prepares = self._recent_prepares = RecentPrepares()
        self._halves = HalfReader(log)
        self._duplicate_finder = DuplicateFinder(
            self._halves.read, self._recent_prepares, self._state_of
        )
        self._odd_immunities: set[bytes] = set()
        self._pending_max = 0 if config.reject else config.pending_max
        self._min_offset = 0
        self._ops = OpWriter(log.append, config, store_host, now_ms)
        self._lookup = DecisionLookup(log, self._table, read_half=self._halves.read, now_ms=now_ms)
        self._decisions = decisions = Decisions(
            log,
            self._table,
            self._recent,
            self._ops,
            self._lookup,
            self._counters,
            halves=self._halves,
            destination=destination,
            delayed=delayed,
            store_host=store_host,
            now_ms=now_ms,
            unflushed_topics=config.unflushed_topics,
        )
        self.unflushed_topics = config.unflushed_topics
        self.end, self.decide = decisions.end, decisions.decide
        self.plan, self.decided, self.abandon = (
            decisions.plan,
            decisions.decided,
            decisions.abandon,
        )
        self._parking = Parking(
            log,
            self._table,
            self._counters,
            read_half=self._halves.read,
            fetch=fetch,
            wake=wake,
            ensure_topic=before_parking,
            store_host=store_host,
            now_ms=now_ms,
        )
        self.on_retention_blocked = self._parking.on_retention_blocked
        self._checker = Checker(
            self._table,
            producers,
            config,
            broker_name=broker_name,
            read_half=self._halves.read,
            fetch=fetch,
            park=self._parking.park,
            random=jitter or Random(),  # noqa: S311 - spreads load, keeps no secret
            monotonic_ms=monotonic_ms,
            wake=wake,
            is_durable=lambda offset: offset < log.durable_offset,
            may_ask=may_ask,
        )
        self._snapshots = Snapshots(
            snapshot_path,
            log,
            self._table,
            lambda: self._ops.waiting,
            counted=lambda: self._checker.delivered,
            log_bytes_min=snapshot_log_bytes,
        )
        self._view = PendingView(
            self._table, self._lookup, self._checker, read_half=self._halves.read, now_ms=now_ms
        )
        self.page, self.find = self._view.page, self._view.find

    # --- start and stop

    def rebuild(self) -> None:
        """Fill the table from the log; call once, after the store is open and before requests."""
        started = perf_counter()
        replayed = replay(self._log, self._table, self._snapshot_path)
        position, unmirrored = replayed.position, replayed.unmirrored
        self._min_offset = self._log.min_offset
        gone = self._table.drop_before(self._min_offset)
        self._ops.add_all(unmirrored)
        self._decisions.roll_back_incomplete(replayed.incomplete)
        self._decisions.finish(replayed.unfinished)
        now_ms = self._now_ms()
        for entry in self._table:
            if entry.state is State.PREPARED:
                age_ms = now_ms - entry.store_timestamp
                self._checker.schedule_again(entry, age_ms, grace_ms=RESTART_GRACE_MS)
        self._snapshots.covered(position)
        self._recent_prepares.refill(self._halves)
        logger.info(
            "event=transactions_rebuilt pending=%d parked=%d expired=%d without_op=%d from=%d "
            "to=%d elapsed_ms=%d",
            len(self._table) - self._table.parked,
            self._table.parked,
            len(gone),
            len(unmirrored),
            position,
            self._log.write_offset,
            (perf_counter() - started) * 1_000,
        )

    def drain(self) -> None:
        """Write what waits in memory; call at an orderly stop, after the last request."""
        self._ops.drain()
        self._snapshots.take_now()

    # --- half messages

    def takes_prepares(self, group: str) -> bool:
        """Return whether halves of a producer group are accepted now."""
        limit = self._config.group_pending_max
        return self._table.halves < self._pending_max and (
            not limit or self._table.count_of(group) < limit
        )

    def refuse_prepares(self, group: str, broker_address: str) -> None:
        """Raise if half messages of a producer group are not accepted now.

        Raises:
            RequestRefusedError: Halves are forbidden, or the group or the table is full.
        """
        if self.takes_prepares(group):
            return
        self._counters.prepares_refused += not self._config.reject
        if self._table.halves < self._pending_max:
            raise group_is_full(group, self._config.group_pending_max)
        raise not_taken(self._config, self._table.halves, broker_address)

    def refuse_delays(self, sent: Delays) -> None:
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
        refuse_large(message.properties, reserve=reserve)
        half = half_draft(message, unique_key)
        leave_room(half, message.topic, record_size_max=self._record_size_max)
        return half

    def prepared(
        self,
        message: AppendRequest,
        half: AppendRequest,
        appended: AppendResult,
        producer_group: str,
        key: int,
        connection: Producer,
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
            immunity_s=self._immunity_s(half) if properties.rfind(b"CHECK_IMMUNITY") >= 0 else 0,
            owner=connection,
        )
        self._recent.add(offset, prepared_final(message, half, offset))
        self._checker.schedule_first(entry)
        self._recent_prepares.add(key, offset)
        self._counters.prepared += 1

    def prepare_group(
        self,
        messages: Sequence[tuple[AppendRequest, str]],
        producer_group: str,
        connection: Producer,
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
                in_group(half, GroupMembership(leader_key, number, total))
                leave_room(
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
            self._recent.add(
                one.physical_offset, prepared_final(message, half, one.physical_offset)
            )
            self._recent_prepares.add(key, one.physical_offset)
        self._counters.groups += total > 1
        return appended

    def _immunity_s(self, half: AppendRequest) -> int:
        """Return the requested seconds without a check; log an invalid value."""
        value = get_property(half.properties, b"CHECK_IMMUNITY_TIME_IN_SECONDS")
        if value is not None and not value.isdigit() and value not in self._odd_immunities:
            if len(self._odd_immunities) < ODD_IMMUNITIES_LOGGED_MAX:
                self._odd_immunities.add(value)
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
        connection: Producer,
    ) -> list[FirstHalf] | None:
        """Return the halves that these messages repeat; None if they begin a new transaction.

        Args:
            messages: All of one transaction, the leader first, each with its unique key.
            producer_group: The group of their producer.
            connection: Sender of the request; checks go to it first if the previous one is closed.
        """
        found = self._duplicate_finder.find(messages, producer_group)
        if found is None:
            return None
        self._counters.twins += 1
        entry = self._table.get(self._table.first_of(found[0].physical_offset))
        if entry is not None and (entry.owner is None or entry.owner.closed):
            entry.owner = connection
        return found

    def _state_of(self, offset: int, half: StoredHalf) -> State:
        """Return the state of a transaction; ROLLED_BACK if its decision is unknown."""
        first = self._table.first_of(offset)
        entry = self._table.get(first)
        if entry is not None:
            return entry.state
        decision = self._lookup.find(first, half)
        return State.ROLLED_BACK if decision is None else decision.state

    # --- decisions

    def resume(self, offset: int) -> Ended:
        """Resume the checks of a parked transaction, from the first one.

        Nothing happens if it is not parked.

        Raises:
            TransactionError: There is no such transaction, or it is decided.
            StoreError: That could not be recorded; the transaction stays parked.
        """
        entry = self._table.get(self._table.first_of(offset))
        if entry is None:
            return self._decisions.refuse_decided(offset, Event.RESUME)
        position = self._parking.resume(entry)
        if position:
            self._checker.schedule_again(entry, self._now_ms() - entry.store_timestamp)
        return Ended(position)

    def committed_message(self, half_message_id: str) -> AppendRequest | None:
        """Return a committed message for another append, for a retry.

        None unless the id is that of a committed half in this log.
        """
        try:
            offset = parse_offset_message_id(half_message_id).physical_offset
        except ValueError:
            return None
        half = self._halves.read(offset)
        if (
            half is None
            or offset_message_id(half.store_host, offset) != half_message_id
            or self._state_of(offset, half) is not State.COMMITTED
        ):
            return None
        return committed_again(half)

    # --- housekeeping

    def tick(self) -> float:
        """Do what is due, in one slice for all kinds of work; each advances by at least a step.

        Return the seconds until the next call.
        """
        now_ms, time_slice = self._monotonic_ms(), Slice()
        if self._log.min_offset > self._min_offset:
            self._drop_expired()
        waits = [
            self._checker.tick(now_ms, time_slice),
            self._parking.tick(time_slice),
            self._ops.tick(now_ms),
            self._snapshots.tick(now_ms, time_slice),
            IDLE_TICK_MS,
        ]
        return min(wait for wait in waits if wait is not None) / 1_000

    def on_producer(self, group: str, _connection: Producer | None = None) -> None:
        """Send the due checks of a group at the next tick; one of its producers has connected."""
        self._checker.on_producer(group)

    def _drop_expired(self) -> None:
        self._min_offset = self._log.min_offset
        for entry in self._table.drop_before(self._min_offset):
            self._counters.expired += 1
            logger.error(
                "event=transaction_expired half_offset=%d group=%s reason='deleted undecided'",
                entry.offset,
                entry.group,
            )

    # --- metrics

    @property
    def pending(self) -> int:
        """Number of undecided transactions, including parked ones."""
        return len(self._table)

    @property
    def oldest_pending_offset(self) -> int | None:
        """Physical offset of the oldest undecided half; None if there is none."""
        oldest = self._table.oldest
        return None if oldest is None else oldest.offset

    def metrics(self) -> dict[str, int]:
        """Return counters and gauges by name."""
        oldest = self._table.oldest
        return {
            **asdict(self._counters),
            "pending": len(self._table),
            "pending_parked": self._table.parked,
            **self._parking.metrics(),
            "pending_oldest_age_ms": (
                0 if oldest is None else max(self._now_ms() - oldest.store_timestamp, 0)
            ),
            "waiting_for_producers": self._checker.waiting_for_producers,
            "checks_sent": self._checker.sent,
            "checks_delivered": self._checker.delivered,
            "checks_not_taken": self._checker.not_taken,
            "ops_written": self._ops.written,
            "ops_waiting": len(self._ops.waiting),
            "snapshots_taken": self._snapshots.taken,
        }
