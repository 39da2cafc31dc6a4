"""The parts of transactions, wired together, and what they do at a start, in a tick and at a stop.

Handlers get the part that serves them: `Prepares` stores half messages, `Decisions` ends
transactions, `PendingView` lists them and `OperatorActions` decides in a producer's place. The
registry passes connection events of producers; a ticker calls ``tick``. Everything runs on the
event loop's thread.

The answer to a decision (see `deciding`) waits until the record is on disk, in every flush mode: a
client that was answered "committed" may forget the transaction, so the broker must not. Topics may
opt out of that.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Final

from attrs import define

from halfmq.store.message_store import MessageStore

from ..config import TransactionConfig
from ..limits.kept import FINAL_MESSAGE_BYTES, PENDING, Kept
from ..loop.fetches import Fetch
from ..loop.slices import Slice
from ..ports import Connection
from .checks.checker import RESTART_GRACE_MS, Checker, ProducerDirectory
from .checks.parking import Parking
from .deciding import Decisions
from .decision_lookup import DecisionLookup
from .destination import Destinations
from .half import StoredHalf
from .half_reader import HalfReader
from .op_writer import OpWriter
from .operator_actions import OperatorActions
from .pending_view import PendingView
from .prepares import Prepares
from .replay.log_replay import replay
from .replay.snapshot import LOG_BYTES_MIN, Snapshots
from .state.caches import DECIDED_REMEMBERED, FinalMessageCache
from .state.counters import Counters
from .state.pending import PendingTable
from .state.state_machine import State

logger = logging.getLogger(__name__)

IDLE_TICK_MS: Final = 250
"""Longest pause between two ticks: a check scheduled during the pause may be this late."""


@define(eq=False, repr=False, slots=False)
class TransactionService:
    """Accepts half messages and decisions, and checks halves that stay undecided."""

    _log: MessageStore
    _producers: ProducerDirectory
    _destinations: Destinations
    _config: TransactionConfig
    _broker_name: str
    _store_host: bytes
    _now_ms: Callable[[], int]  # the wall clock, for ages
    _monotonic_ms: Callable[[], int]  # for checks and housekeeping
    _snapshot_path: Path
    _record_size_max: int  # bytes of the largest record the log takes
    _fetch: Fetch  # reads a half into memory and calls back
    _wake: Callable[[], None] = lambda: None  # schedules ``tick`` soon
    # Gets the seconds from each half to its decision.
    _observe_age: Callable[[float], None] = lambda _seconds: None
    # Returns whether a producer may see a message that a check would show it.
    _may_see: Callable[[Connection, StoredHalf], bool] = lambda _producer, _half: True
    _jitter: Random | None = None  # spreads the checks; None: one of its own
    _snapshot_log_bytes: int = LOG_BYTES_MIN
    _decided_remembered: int = DECIDED_REMEMBERED

    def __attrs_post_init__(self) -> None:
        log, config, now_ms = self._log, self._config, self._now_ms
        self.table = self._table = table = PendingTable(self._decided_remembered)
        self._counters = counters = Counters()
        self._finals = FinalMessageCache()
        self._ops = OpWriter(log.append, config, self._store_host, now_ms)
        halves = HalfReader(log)
        lookup = DecisionLookup(log, table, read_half=halves.read, now_ms=now_ms)
        self._parking = self._make_parking(halves)
        self.on_retention_blocked = self._parking.on_retention_blocked
        self._checker = checker = self._make_checker(halves)
        self.prepares = Prepares(
            log,
            table,
            self._finals,
            halves,
            lookup,
            counters,
            config,
            schedule_first=checker.schedule_first,
            now_ms=now_ms,
            record_size_max=self._record_size_max,
        )
        self.decisions = Decisions(
            log,
            table,
            self._finals,
            self._ops,
            lookup,
            counters,
            halves=halves,
            resolve=self._destinations.resolve,
            store_host=self._store_host,
            now_ms=now_ms,
            unflushed_topics=config.unflushed_topics,
            observe_age=self._observe_age,
        )
        self.operator = OperatorActions(
            table, self.decisions, self._parking, checker, counters, now_ms=now_ms
        )
        self.view = PendingView(
            table,
            lookup,
            checker.next_check_in_ms,
            producers_of=self._producers.producers_of,
            read_half=halves.read,
            now_ms=now_ms,
            monotonic_ms=self._monotonic_ms,
        )
        self._snapshots = Snapshots(
            self._snapshot_path,
            log,
            table,
            lambda: self._ops.waiting,
            counted=lambda: checker.delivered,
            log_bytes_min=self._snapshot_log_bytes,
        )
        self._min_offset = 0  # of the log, when expired halves were last dropped

    def _make_parking(self, halves: HalfReader) -> Parking:
        return Parking(
            self._log,
            self._table,
            self._counters,
            read_half=halves.read,
            fetch=self._fetch,
            wake=self._wake,
            ensure_topic=self._destinations.ensure_parked_topic,
            store_host=self._store_host,
            now_ms=self._now_ms,
        )

    def _make_checker(self, halves: HalfReader) -> Checker:
        return Checker(
            self._table,
            self._producers,
            self._config,
            broker_name=self._broker_name,
            read_half=halves.read,
            fetch=self._fetch,
            park=self._parking.park,
            # Not a factory of attrs, which would keep the class that simulations replace.
            random=self._jitter or Random(),  # noqa: S311 -- keeps no secret
            monotonic_ms=self._monotonic_ms,
            wake=self._wake,
            is_durable=lambda offset: offset < self._log.durable_offset,
            may_see=self._may_see,
        )

    def configure(self, config: TransactionConfig) -> None:
        """Apply new limits and times of checks."""
        self.prepares.configure(config)
        self._checker.configure(config)

    def rebuild(self) -> None:
        """Fill the table from the log; call once, after the store is open and before requests."""
        started = perf_counter()
        replayed = replay(self._log, self._table, self._snapshots.path)
        position, without_op = replayed.position, replayed.without_op
        self._min_offset = self._log.min_offset
        expired = self._table.drop_before(self._min_offset)
        self._ops.add_all(without_op)
        self.decisions.roll_back_incomplete(replayed.incomplete)
        self.decisions.complete_commits(replayed.unfinished)
        now_ms = self._now_ms()
        for entry in self._table:
            if entry.state is State.PREPARED:
                age_ms = now_ms - entry.store_timestamp
                self._checker.schedule_again(entry, age_ms, grace_ms=RESTART_GRACE_MS)
        self._snapshots.set_replayed_from(position)
        self.prepares.refill()
        logger.info(
            "event=transactions_rebuilt pending=%d parked=%d expired=%d without_op=%d from=%d "
            "to=%d elapsed_ms=%d",
            len(self._table) - self._table.parked,
            self._table.parked,
            len(expired),
            len(without_op),
            position,
            self._log.write_offset,
            (perf_counter() - started) * 1_000,
        )

    def drain(self) -> None:
        """Write what waits in memory; call at an orderly stop, after the last request."""
        self._ops.drain()
        self._snapshots.take_now()

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

    def on_producer(self, group: str, _connection: Connection | None = None) -> None:
        """Send the due checks of a group at the next tick; one of its producers has connected."""
        self._checker.on_producer(group)
        self._wake()

    def _drop_expired(self) -> None:
        self._min_offset = self._log.min_offset
        for entry in self._table.drop_before(self._min_offset):
            self._counters.expired += 1
            logger.error(
                "event=transaction_expired half_offset=%d group=%s reason='deleted undecided'",
                entry.offset,
                entry.group,
            )

    @property
    def oldest_pending_offset(self) -> int | None:
        """Physical offset of the oldest undecided half; None if there is none."""
        oldest = self._table.oldest
        return None if oldest is None else oldest.offset

    def kept(self) -> Kept:
        pending = PENDING._replace(most=self.prepares.pending_max)
        return {pending: self._table.weight, FINAL_MESSAGE_BYTES: self._finals.bytes}

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
            "checks_not_taken": self._checker.not_accepted,
            "ops_written": self._ops.written,
            "ops_waiting": len(self._ops.waiting),
            "snapshots_taken": self._snapshots.taken,
        }
