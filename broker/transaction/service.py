"""Transactions as the rest of the broker sees them.

The send handler hands over half messages, the transaction handler decisions, the registry news of
producers; a ticker calls ``tick``. Everything runs on the event loop's thread.

A decision is one append. Only when it has been made does the table change, so a refused append
(disk full, broker stopping) leaves the transaction undecided and the client free to try again. The
answer waits until the record is on disk, in every flush mode: a client that has been told
"committed" may forget the transaction, so the broker may not.

``CHECK_IMMUNITY_TIME_IN_SECONDS`` only sets when the first check is due. RocketMQ also refuses
(604) a decision that comes later than that, because a check copy might be on its way to a second
commit. A transaction here has one identity and one decision, so a late decision is as good as an
early one, and is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Final, NamedTuple, Protocol

from msgspec.structs import replace

from halfmq.store.draft import Appended, Draft
from halfmq.store.errors import StoreError
from halfmq.store.format.flags import TRANSACTION_MASK, TransactionType
from halfmq.store.format.properties import get_property
from halfmq.store.format.topics import HALF_TOPIC, SCHEDULE_TOPIC

from ..config import TransactionConfig
from .admission import admitted
from .checker import RESTART_GRACE_MS, Checker, ProducerDirectory
from .cold_halves import FIRST_READ, OnRead
from .errors import (
    DecidedOtherwiseError,
    DecisionForgottenError,
    HalfMismatchError,
    HalfNotFoundError,
)
from .half import (
    StoredHalf,
    final_draft,
    half_draft,
    immunity_s,
    is_copy,
    parked_draft,
    parse_half,
    prepared_final,
    real_topic,
    rollback_draft,
    unique_key,
)
from .op_writer import OpWriter
from .pending import (
    DECIDED_REMEMBERED,
    PARKING_REASONS,
    Decision,
    Event,
    ParkedReason,
    Pending,
    PendingTable,
    Producer,
    State,
    Verdict,
    outcome,
)
from .recent import RecentFinals
from .replay import ReplayLog, replay
from .snapshot import LOG_BYTES_MIN, Snapshots
from .twins import FirstHalf, HalfLog, Twins, twin_key

logger = logging.getLogger(__name__)

IDLE_TICK_MS: Final = 250
"""Longest pause between two ticks: how late a check may be that was planned during the pause."""

ODD_IMMUNITIES_LOGGED_MAX: Final = 100
"""Values of CHECK_IMMUNITY_TIME_IN_SECONDS that are no number and logged once each; a producer that
sends ever new ones is logged each time."""

INDEX_HITS_MAX: Final = 64
"""Records looked at to find an old decision: those with the same unique key, in practice one."""

WAITS_INDEXED_MAX: Final = 1_000
"""Records looked at to find a decision whose message was delayed: it is stored once per level it
waited in, 480 times for the longest delay under the default levels."""

_ASKS_DELAY: Final = b"TRANSACTION_DEL"  # how the names of both properties begin
_COMMITTED: Final = State.COMMITTED  # looking a member up in its class is a tenth of a microsecond
_DECIDE: Final = Verdict.DECIDE
_DECISION_NAMES: Final = {State.COMMITTED: "committed", State.ROLLED_BACK: "rolled back"}


class TransactionLog(ReplayLog, HalfLog, Protocol):
    """What transactions need of the store."""

    @property
    def index_last_update(self) -> tuple[int, int]: ...

    def append(self, group: Sequence[Draft], *, contiguous: bool = False) -> list[Appended]: ...

    def read(self, ranges: Iterable[tuple[int, int]]) -> bytes | None: ...

    def query_index(
        self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int
    ) -> list[int]: ...


@dataclass(slots=True)
class Counters:
    """Events since the start."""

    prepared: int = 0
    committed: int = 0
    rolled_back: int = 0
    unknown: int = 0  # decisions that said "not known yet"
    repeated: int = 0  # decisions that had been taken before
    refused: int = 0  # decisions opposite to the first one
    parked: int = 0
    expired: int = 0  # undecided when the log deleted them by age
    twins: int = 0  # halves that came again and were answered with the ids of the first


class PlannedDecision(NamedTuple):
    """A first decision whose record is not in the log yet."""

    draft: Draft
    entry: Pending
    state: State


class TransactionService:
    """Takes half messages and decisions, and sees to it that every half gets one."""

    def __init__(
        self,
        log: TransactionLog,
        producers: ProducerDirectory,
        config: TransactionConfig,
        *,
        broker_name: str,
        store_host: bytes,
        now_ms: Callable[[], int],
        snapshot_path: Path,
        before_parking: Callable[[], object] = lambda: None,
        read_cold: Callable[[int, OnRead], None] | None = None,
        jitter: Random | None = None,
        hurry: Callable[[], None] = lambda: None,
        delayed: Callable[[Draft, int], Draft] = lambda final, _now_ms: final,
        snapshot_log_bytes: int = LOG_BYTES_MIN,
        decided_remembered: int = DECIDED_REMEMBERED,
    ) -> None:
        """Wire the parts.

        ``before_parking`` has the topic of parked messages created; ``delayed`` turns a final
        message that asks for a delay into what its commit stores, now; ``read_cold`` reads a half
        that is not in memory and calls back; ``jitter`` spreads the checks; ``hurry`` has ``tick``
        called soon.
        """
        self._log = log
        self._append = log.append
        self._read = log.read
        self._config = config
        self._now_ms = now_ms
        self._snapshot_path = snapshot_path
        self._before_parking = before_parking
        self._delayed = delayed
        self._table = PendingTable(decided_remembered)
        self._find = self._table.get
        self._recent = RecentFinals()
        self.twins = self._twins = Twins()
        self._odd_immunities: set[bytes] = set()
        self._min_offset = 0
        self._ops = OpWriter(log.append, config, store_host)
        self._checker = Checker(
            self._table,
            producers,
            config,
            broker_name=broker_name,
            read_half=self._half_in_memory,
            read_cold=read_cold or (lambda offset, on_read: on_read(self._half_at(offset))),
            park=self._park,
            random=jitter or Random(),  # noqa: S311 - spreads load, keeps no secret
            hurry=hurry,
        )
        self._snapshots = Snapshots(
            snapshot_path,
            log,
            self._table,
            lambda: self._ops.waiting,
            log_bytes_min=snapshot_log_bytes,
        )
        self._counters = Counters()
        self._parked_by = dict.fromkeys(PARKING_REASONS, 0)
        self._planned: set[int] = set()  # halves whose decision waits for its group

    # --- start and stop

    def rebuild(self) -> None:
        """Fill the table from the log; call it once, when the store is open and nothing runs."""
        started = perf_counter()
        position, unmirrored = replay(self._log, self._table, self._snapshot_path)
        self._min_offset = self._log.min_offset
        gone = self._table.drop_before(self._min_offset)
        self._ops.add_all(unmirrored)
        not_before_ms = self._now_ms() + RESTART_GRACE_MS
        for entry in self._table:
            if entry.state is State.PREPARED:
                self._checker.schedule_first(entry, not_before_ms)
        self._snapshots.covered(position)
        self._twins.refill(self._log)
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
        """Write what waits in memory; call it at an ordered stop, after the last request."""
        self._ops.drain(self._now_ms())
        self._snapshots.take_now()

    # --- half messages

    @property
    def reject(self) -> bool:
        """Whether half messages are refused by configuration."""
        return self._config.reject

    def prepare(
        self, message: Draft, producer_group: str, unique_key: str, connection: Producer
    ) -> Appended:
        """Store a transactional message as half; answer its sender when that is durable.

        Raises:
            RequestRefusedError: It asks for what halves cannot have, or leaves no room for more.
            StoreError: It could not be appended; nothing has changed.
        """
        half = self.half_of(message, unique_key)
        (appended,) = self._append((half,))
        key = twin_key(producer_group, unique_key)
        self.prepared(message, half, appended, producer_group, key, connection)
        return appended

    def half_of(self, message: Draft, unique_key: str) -> Draft:
        """Return what is to be appended for a transactional message.

        Raises:
            RequestRefusedError: It asks for what halves cannot have, or leaves no room for more.
        """
        properties = admitted(message.properties, self._now_ms())
        if properties is not message.properties:
            message = replace(message, properties=properties)
        return half_draft(message, unique_key)

    def prepared(
        self,
        message: Draft,
        half: Draft,
        appended: Appended,
        producer_group: str,
        key: str,
        connection: Producer,
    ) -> None:
        """Enter a transaction whose half has been appended; ``key`` is its ``twin_key``."""
        properties = half.properties
        offset = appended.physical_offset
        entry = self._table.add(
            offset,
            appended.queue_offset,
            appended.store_timestamp,
            producer_group,
            immunity_s=self._immunity_s(half) if b"CHECK_IMMUNITY" in properties else 0,
            owner=connection,
        )
        self._recent.add(offset, prepared_final(message, half, offset))
        self._checker.schedule_first(entry)
        self._twins.note(key, offset)
        self._counters.prepared += 1

    def _immunity_s(self, half: Draft) -> int:
        """Return for how long the producer asked not to be checked; log a wish that is none."""
        value = get_property(half.properties, b"CHECK_IMMUNITY_TIME_IN_SECONDS")
        if value is not None and not value.isdigit() and value not in self._odd_immunities:
            if len(self._odd_immunities) < ODD_IMMUNITIES_LOGGED_MAX:
                self._odd_immunities.add(value)
            # RocketMQ takes its default as well, and says nothing.
            logger.warning(
                "event=immunity_ignored CHECK_IMMUNITY_TIME_IN_SECONDS=%r expected='whole seconds'",
                value[:40],
            )
        return immunity_s(half.properties)

    def twin(self, message: Draft, producer_group: str, unique_key: str) -> FirstHalf | None:
        """Return the half that this message repeats; None when it begins a new transaction.

        It does when the first one was rolled back: the producer has not run its local transaction
        yet, and must not be told ids that will be refused. Where the end of the first cannot be
        told any more it does as well: a duplicate is better than a message that never comes.
        """
        offset = self._twins.find(twin_key(producer_group, unique_key))
        if offset is None:
            return None
        half = self._stored_half(offset)
        if half is None or self._state_of(offset, half) is State.ROLLED_BACK:
            return None
        queue_id = get_property(half.properties, b"REAL_QID") or b"0"
        if real_topic(half) != message.topic or half.body != message.body:
            logger.warning(
                "event=unique_key_reused half_offset=%d group=%s unique_key=%s topic=%s",
                offset,
                producer_group,
                unique_key,
                message.topic,
            )
            return None
        self._counters.twins += 1
        return FirstHalf(offset, half.queue_offset, int(queue_id), half.store_host)

    def _stored_half(self, offset: int) -> StoredHalf | None:
        """Read a half that may not be durable yet, so that a look at the log would not find it."""
        try:
            size = int.from_bytes(self._log.read_cold(((offset, 4),)), "big")
            return parse_half(self._log.read_cold(((offset, size),)), offset)
        except OSError:  # its file has been deleted
            return None

    def _state_of(self, offset: int, half: StoredHalf) -> State:
        """Say where a transaction stands; ROLLED_BACK when that cannot be told."""
        first = self._table.first_of(offset)
        entry = self._find(first)
        if entry is not None:
            return entry.state
        decision = self._table.decided.find(first) or self._decision_in_log(first, half)
        return State.ROLLED_BACK if decision is None else decision.state

    # --- decisions

    def end(self, offset: int, queue_offset: int, producer_group: str, event: Event) -> int:
        """Apply a producer's decision; return the log position whose durability is the answer.

        Args:
            offset: Physical offset of the half, or of a check copy of it.
            queue_offset: Of the same record in the half topic.
            producer_group: Must be the group that prepared it.
            event: COMMIT, ROLLBACK or UNKNOWN.

        Raises:
            TransactionError: The request is refused; the transaction is as it was.
            StoreError: The decision could not be appended; the transaction is as it was.
        """
        entry = self._find(offset)
        if entry is None:
            return self._end_other(offset, queue_offset, producer_group, event)
        if entry.queue_offset != queue_offset:
            raise HalfMismatchError(offset, "The transaction state table offset wrong")
        return self._decide(entry, producer_group, event)

    def _decide(self, entry: Pending, producer_group: str, event: Event) -> int:
        if entry.group != producer_group:
            raise HalfMismatchError(entry.offset, "The producer group wrong")
        state, verdict = outcome(entry.state, event)
        if verdict is not _DECIDE:
            self._counters.unknown += 1
            return 0
        draft = self._decision_draft(entry, state)
        (appended,) = self._append((draft,))
        return self._decided(entry, state, appended)

    def _decision_draft(self, entry: Pending, state: State) -> Draft:
        final = self._recent.take(entry.offset) or self._final_of(entry)
        if state is not _COMMITTED:
            return rollback_draft(final)
        return self._delayed(final, self._now_ms()) if _ASKS_DELAY in final.properties else final

    def _decided(self, entry: Pending, state: State, appended: Appended) -> int:
        """Take note of a decision that has been appended; return where its record ends."""
        if state is _COMMITTED:
            self._counters.committed += 1
        else:
            self._counters.rolled_back += 1
        for queue_offset in self._table.names_of(entry):
            self._ops.add(queue_offset)
        position = appended.physical_offset
        self._table.decide(entry, state, position)
        return position + appended.size

    def plan(
        self, offset: int, queue_offset: int, producer_group: str, event: Event
    ) -> PlannedDecision | None:
        """Return the record of a first decision, to be appended together with others.

        None when the request is anything else than the first decision about an undecided half, or
        one is planned already: `end` knows what to do then.
        """
        entry = self._find(offset)
        if (
            entry is None
            or entry.queue_offset != queue_offset
            or entry.group != producer_group
            or offset in self._planned
        ):
            return None
        state, verdict = outcome(entry.state, event)
        if verdict is not _DECIDE:
            return None
        planned = PlannedDecision(self._decision_draft(entry, state), entry, state)
        self._planned.add(offset)
        return planned

    def decided(self, planned: PlannedDecision, appended: Appended) -> int:
        """Carry out a planned decision, whose record is in the log now; return its end."""
        self._planned.discard(planned.entry.offset)
        return self._decided(planned.entry, planned.state, appended)

    def abandon(self, planned: PlannedDecision) -> None:
        """Forget a planned decision: its record could not be appended."""
        self._planned.discard(planned.entry.offset)

    def _final_of(self, entry: Pending) -> Draft:
        half = self._half_at(entry.offset)
        if half is None:
            raise HalfNotFoundError(entry.offset)
        return final_draft(half)

    def _half_in_memory(self, offset: int) -> StoredHalf | None:
        """Read a half without waiting for the disk; None when that cannot be done."""
        chunk = self._read(((offset, FIRST_READ),))
        if chunk is None:
            return None
        size = int.from_bytes(chunk[:4], "big")  # a record begins with its size
        if size > FIRST_READ:
            chunk = self._read(((offset, size),))
        return None if chunk is None else parse_half(chunk, offset)

    def _half_at(self, offset: int) -> StoredHalf | None:
        """Read the half record at an offset; None when there is none, or none that is sound."""
        # Its size is not known, and keeping it would cost memory per transaction. One read of
        # common length, from the page cache, does for most.
        chunk = self._read(((offset, FIRST_READ),))
        if chunk is not None:
            half = parse_half(chunk, offset)
            if half is not None:
                return half
        record = self._log.record_bytes(offset)
        return None if record is None else parse_half(record, offset)

    def _end_other(self, offset: int, queue_offset: int, group: str, event: Event) -> int:
        """Apply a decision about a half that is not undecided under this offset."""
        record = self._log.record_bytes(offset)
        if record is None:
            raise HalfNotFoundError(offset)
        half = parse_half(record, offset)
        if half is None:
            raise HalfMismatchError(offset, "The record is not a half message")
        if half.queue_offset != queue_offset:
            raise HalfMismatchError(offset, "The transaction state table offset wrong")
        if get_property(half.properties, b"PGROUP") != group.encode():
            raise HalfMismatchError(offset, "The producer group wrong")
        first = self._table.first_of(offset)
        entry = self._find(first)
        if entry is not None:
            return self._decide(entry, group, event)
        return self._answer_decided(first, half, event)

    def _answer_decided(self, first: int, half: StoredHalf, event: Event) -> int:
        """Answer a decision about a transaction that has one.

        Every undecided half is in the table. This one is not, so whatever is found here, nothing is
        appended.
        """
        decision = self._table.decided.find(first) or self._decision_in_log(first, half)
        if decision is None:
            raise DecisionForgottenError(first)
        _, verdict = outcome(decision.state, event)
        if verdict is Verdict.REPEAT:
            self._counters.repeated += 1
            # A flush covers whole records: what is durable beyond its first byte is durable.
            return decision.position + 1
        if verdict is Verdict.REFUSE:
            self._counters.refused += 1
            record = self._log.record_at(decision.position) if decision.position >= 0 else None
            decided_ms = 0 if record is None else record.store_timestamp
            raise DecidedOtherwiseError(first, _DECISION_NAMES[decision.state], decided_ms)
        self._counters.unknown += 1
        return 0

    def _decision_in_log(self, first: int, half: StoredHalf) -> Decision | None:
        """Find out how a transaction ended that the memory has forgotten; None: not to be told.

        A final message is in the index. If it is not, while the index has the half and reaches as
        far as anything forgotten, then there is none: the transaction was rolled back.
        """
        topic, key = real_topic(half), unique_key(half)
        if topic is None or key is None:
            return None
        for position in self._finals_indexed(topic, key, half):
            final = self._log.record_at(position)
            if (
                final is not None
                and final.topic in {topic, SCHEDULE_TOPIC}
                and final.sys_flag & TRANSACTION_MASK == TransactionType.COMMIT
                and self._is_link_to(first, final.prepared_transaction_offset, half, key)
            ):
                return Decision(State.COMMITTED, position)
        _, indexed_until = self._log.index_last_update
        if (
            half.physical_offset in self._indexed(HALF_TOPIC, key, half.store_timestamp)
            and indexed_until >= self._table.decided.forgotten_final
        ):
            return Decision(State.ROLLED_BACK, -1)
        return None

    def _finals_indexed(self, topic: str, key: str, half: StoredHalf) -> list[int]:
        """Return where the index has records among which is the final message of a half."""
        found = self._indexed(topic, key, half.store_timestamp)
        if _ASKS_DELAY in half.properties:
            # The first of the records that waited is the one that decided.
            found += self._indexed(SCHEDULE_TOPIC, key, half.store_timestamp, WAITS_INDEXED_MAX)
        return found

    def _indexed(
        self, topic: str, key: str, since_ms: int, hits_max: int = INDEX_HITS_MAX
    ) -> list[int]:
        # Index times are whole seconds from the file's first entry, and clocks may step.
        begin_ms = since_ms - 60_000
        return self._log.query_index(topic, key, hits_max, begin_ms, self._now_ms() + 60_000)

    def _is_link_to(self, first: int, linked_offset: int, half: StoredHalf, key: str) -> bool:
        """Tell whether a final's link leads to a transaction, of which ``half`` is one name.

        RocketMQ's finals may lead to any check copy. A twin, sent again by a producer that got no
        answer, has the same key and is another transaction; so of two records with one key, one
        must be a copy.
        """
        if linked_offset in {first, half.physical_offset} or is_copy(half):
            return True
        linked = self._half_at(linked_offset)
        return linked is not None and unique_key(linked) == key and is_copy(linked)

    # --- what happens by itself

    def tick(self) -> float:
        """Do what is due, in a slice; return the seconds until this should be called again."""
        now_ms = self._now_ms()
        if self._log.min_offset > self._min_offset:
            self._drop_expired()
        waits = [
            self._checker.tick(now_ms),
            self._ops.tick(now_ms),
            self._snapshots.tick(now_ms),
            IDLE_TICK_MS,
        ]
        return min(wait for wait in waits if wait is not None) / 1_000

    def on_producer(self, group: str, _connection: Producer | None = None) -> None:
        """Have a group asked at the next tick about what is due; a producer of it connected."""
        self._checker.on_producer(group)

    def _park(self, entry: Pending, event: Event = Event.GIVE_UP) -> bool:
        """Give up asking; False when that could not be recorded, and must be tried again."""
        reason = ParkedReason.UNKNOWN if entry.answered else ParkedReason.NO_ANSWER
        if event is Event.EXPIRED:
            reason = ParkedReason.EXPIRED
        half = self._half_at(entry.offset)
        if half is None:
            logger.error("event=half_unreadable half_offset=%d", entry.offset)
            return False
        try:
            self._before_parking()
            self._append((parked_draft(half, reason),))
        except StoreError as error:
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
        )
        return True

    def _drop_expired(self) -> None:
        self._min_offset = self._log.min_offset
        for entry in self._table.drop_before(self._min_offset):
            self._counters.expired += 1
            logger.error(
                "event=transaction_expired half_offset=%d group=%s reason='deleted undecided'",
                entry.offset,
                entry.group,
            )

    # --- what others may know

    @property
    def pending(self) -> int:
        """How many transactions are undecided, parked ones among them."""
        return len(self._table)

    @property
    def oldest_pending_offset(self) -> int | None:
        """Physical offset of the oldest undecided half: the log before it holds none."""
        oldest = self._table.oldest
        return None if oldest is None else oldest.offset

    def metrics(self) -> dict[str, int]:
        """Return counters and gauges by name."""
        oldest = self._table.oldest
        return {
            **asdict(self._counters),
            "pending": len(self._table),
            "pending_parked": self._table.parked,
            **{f"parked_{reason.name.lower()}": count for reason, count in self._parked_by.items()},
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
