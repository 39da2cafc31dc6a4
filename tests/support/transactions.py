"""Doubles for what transactions use: a log in memory that can crash, producers, a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from halfmq.broker.config import TransactionConfig
from halfmq.broker.delay.timer_records import TimerRule
from halfmq.broker.loop.fetches import Fetch
from halfmq.broker.ports import ACK_S, OnAnswer
from halfmq.broker.transaction.checks.checker import Checker
from halfmq.broker.transaction.checks.parking import Parking
from halfmq.broker.transaction.deciding import DecisionRequest, Decisions, Ended
from halfmq.broker.transaction.destination import Destinations
from halfmq.broker.transaction.half_reader import HalfReader
from halfmq.broker.transaction.op_writer import OpWriter
from halfmq.broker.transaction.replay.snapshot import Snapshots
from halfmq.broker.transaction.state.caches import DECIDED_REMEMBERED, FinalMessageCache
from halfmq.broker.transaction.state.pending import PendingTable
from halfmq.broker.transaction.state.state_machine import TransactionEvent
from halfmq.broker.transaction.transaction_service import TransactionService
from halfmq.remoting.codes import FLAG_ONE_WAY
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import CheckTransactionStateRequestHeader
from halfmq.store.errors import StoreError
from halfmq.store.files.page_cache import Missing, NotInMemoryError
from halfmq.store.files.zero_copy import FilePart
from halfmq.store.format.flags import (
    NO_QUEUE_ENTRY,
    TRANSACTION_MASK,
    TransactionType,
    transaction_type,
)
from halfmq.store.format.ids import pack_host
from halfmq.store.format.properties import encode_properties, tags_code
from halfmq.store.format.record import (
    MAGIC_V1,
    MAGIC_V2,
    PREFIX,
    Record,
    decode_record,
    encode_record,
    new_record,
)
from halfmq.store.log.append_request import AppendRequest, AppendResult
from halfmq.store.queue.pull_selection import GetResult, GetStatus
from tests.support.broker_doubles import START_MS, Clock, FakeConnection, as_store
from tests.support.golden_store import GoldenStore

HOST = pack_host("127.0.0.1", 10911)
PEER = pack_host("127.0.0.1", 54321)


def record_of(
    request: AppendRequest, physical_offset: int, queue_offset: int, store_timestamp: int
) -> Record:
    """Return the record that a log makes of a request."""
    return new_record(
        topic=request.topic,
        queue_id=request.queue_id,
        body=request.body,
        properties=request.properties,
        born_timestamp=request.born_timestamp,
        born_host=request.born_host,
        store_timestamp=store_timestamp,
        store_host=request.store_host,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        flag=request.flag,
        sys_flag=request.sys_flag,
        reconsume_times=request.reconsume_times,
        prepared_transaction_offset=request.prepared_transaction_offset,
    )


class MemoryLog:
    """A commit log of real records in memory, with queues and a key index.

    Everything up to ``durable_offset`` survives ``crash``; after it, as many records as the test
    sets.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.encoded: dict[int, bytes] = {}
        """The bytes of each record, by its offset."""
        self._queues: dict[tuple[str, int], int] = {}
        self.min_offset = 0
        self.write_offset = 0
        self.durable_offset = 0
        self.flush_requests = 0
        self.indexed = True
        self.indexed_until = 1 << 62
        self.failing = False
        self._newest_ms = 0  # store timestamps never go back

    @property
    def reader(self) -> MemoryLog:
        return self

    @property
    def queues(self) -> MemoryLog:
        return self

    @property
    def index(self) -> MemoryLog:
        return self

    def append(
        self, group: Sequence[AppendRequest], *, contiguous: bool = False
    ) -> list[AppendResult]:
        if self.failing:
            raise StoreError("the test says no")
        return [self._append(draft) for draft in group]

    def _append(self, draft: AppendRequest) -> AppendResult:
        queue = (draft.topic, draft.queue_id)
        queue_offset = 0 if draft.sys_flag & NO_QUEUE_ENTRY else self._queues.get(queue, 0)
        record = record_of(draft, self.write_offset, queue_offset, self._next_timestamp())
        self.put(encode_record(record))
        return AppendResult(
            record.physical_offset, record.total_size, record.queue_offset, record.store_timestamp
        )

    def _next_timestamp(self) -> int:
        self._newest_ms = max(self._clock(), self._newest_ms)
        return self._newest_ms

    def put(self, encoded: bytes) -> None:
        """Append an encoded record, which has its own offsets."""
        record = decode_record(encoded)
        assert record.physical_offset >= self.write_offset
        self.encoded[record.physical_offset] = encoded
        self.write_offset = record.end
        if not record.sys_flag & NO_QUEUE_ENTRY:
            self._queues[record.topic, record.queue_id] = record.queue_offset + 1

    def request_flush(self) -> None:
        self.flush_requests += 1

    def flush(self) -> None:
        self.durable_offset = self.write_offset

    def crash(self, survivors: int = 0) -> MemoryLog:
        """Return the log as a restart finds it, with so many records that were not flushed."""
        after = MemoryLog(self._clock)
        after.min_offset = self.min_offset
        after._newest_ms = self._newest_ms  # of the same class
        for offset, encoded in self.encoded.items():
            if offset >= self.durable_offset:
                if not survivors:
                    break
                survivors -= 1
            after.put(encoded)
        after.flush()
        return after

    def delete_before(self, offset: int) -> None:
        """Delete records as retention does."""
        self.min_offset = offset
        for gone in [at for at in self.encoded if at < offset]:
            del self.encoded[gone]

    def read_cold(self, ranges: Iterable[tuple[int, int]]) -> bytes:
        pieces = []
        for start, length in ranges:
            if start not in self.encoded:
                raise FileNotFoundError(start)
            pieces.append(self.encoded[start][:length])
        return b"".join(pieces)

    def store_timestamp(self, physical_offset: int) -> int:
        if physical_offset not in self.encoded:
            raise FileNotFoundError(physical_offset)
        return decode_record(self.encoded[physical_offset]).store_timestamp

    def lacking(self, physical_offsets: Iterable[int]) -> NotInMemoryError:
        known = [offset for offset in physical_offsets if offset in self.encoded]
        return NotInMemoryError([Missing(Path("log"), offset, 0) for offset in known])

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        offsets = [one.queue_offset for one in self._queue(topic, queue_id)]
        return (min(offsets, default=0), max(offsets, default=-1) + 1)

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_count: int = 32,
        max_bytes: int = 1 << 62,
    ) -> GetResult:
        """Find messages as the store does; the bytes are not limited."""
        del max_bytes
        first, end = self.bounds(topic, queue_id)
        ranges = [
            (one.physical_offset, one.total_size)
            for one in self._queue(topic, queue_id)
            if offset <= one.queue_offset < offset + max_count
        ]
        size = sum(length for _, length in ranges)
        following = offset + len(ranges)
        return GetResult(GetStatus.FOUND, following, first, end, ranges, len(ranges), size)

    def _queue(self, topic: str, queue_id: int) -> list[Record]:
        records = [decode_record(encoded) for encoded in self.encoded.values()]
        return [
            one
            for one in records
            if not one.sys_flag & NO_QUEUE_ENTRY and (one.topic, one.queue_id) == (topic, queue_id)
        ]

    def has_record(
        self, topic: str, queue_id: int, offset: int, physical_offset: int, size: int
    ) -> bool:
        encoded = self.encoded.get(physical_offset)
        found = None if encoded is None else decode_record(encoded)
        return found is not None and (
            (found.topic, found.queue_id, found.queue_offset, found.total_size)
            == (topic, queue_id, offset, size)
        )

    def named_record(self, physical_offset: int) -> bytes | None:
        return self.record_bytes(physical_offset)

    def record_bytes(self, physical_offset: int) -> bytes | None:
        return self.encoded.get(physical_offset)

    def unchecked_bytes(self, physical_offset: int) -> bytes | None:
        return self.encoded.get(physical_offset)

    def record_at(self, physical_offset: int) -> Record | None:
        encoded = self.record_bytes(physical_offset)
        return None if encoded is None else decode_record(encoded)

    def scan(self, start: int, end: int | None = None) -> Iterator[Record]:
        for offset, encoded in self.encoded.items():
            if offset >= start and (end is None or offset < end):
                yield decode_record(encoded)

    def scan_transactions(self, start: int) -> Iterator[Record]:
        return self.scan(start)

    def records(self) -> list[Record]:
        return list(self.scan(0))

    @property
    def last_update(self) -> tuple[int, int]:
        return (self._newest_ms, min(max(self.encoded, default=0), self.indexed_until))

    def query(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> list[int]:
        return [
            record.physical_offset
            for record in self.scan(0)
            if self.indexed
            and record.physical_offset <= self.indexed_until
            and transaction_type(record.sys_flag) is not TransactionType.ROLLBACK
            and record.topic == topic
            and record.property_map.get("UNIQ_KEY") == key
            and begin_ms <= record.store_timestamp <= end_ms
        ][:max_count]


def fetch_at_once(missing: NotInMemoryError, on_fetched: Callable[[bool], None]) -> None:
    """Fetch as the broker's threads do, and wait for it."""
    missing.fetch()
    on_fetched(True)


class Connected(FakeConnection):
    """A producer's connection that records the checks it gets."""

    def __init__(
        self,
        name: str = "127.0.0.1:54321",
        *,
        writable: bool = True,
        acknowledges: bool = False,
    ) -> None:
        super().__init__("127.0.0.1:54321")
        self.name = name
        self.language = 0
        self.writable = writable
        self.acknowledges = acknowledges
        self.unacknowledged: list[OnAnswer] = []  # checks that the test must acknowledge
        self.room = 1_000  # how many of them there may be
        self.checks: list[tuple[int, CheckTransactionStateRequestHeader, bytes]] = []
        self.waiting: list[tuple[int, bytes]] = []

    def send_request(self, code: int, header: object, body: bytes = b"") -> bool:
        assert isinstance(header, CheckTransactionStateRequestHeader)
        if self.closed or not self.writable:
            return False
        self.checks.append((code, header, body))
        return True

    def ask(
        self,
        code: int,
        header: object,
        body: bytes,
        on_answer: OnAnswer,
        *,
        seconds: float = ACK_S,
    ) -> bool:
        if len(self.unacknowledged) >= self.room or not self.send_request(code, header, body):
            return False
        self.unacknowledged.append(on_answer)
        return True

    def acknowledge(self, code: int | None = 0) -> None:
        """Answer all checks with a code; with None, let them time out."""
        waiting, self.unacknowledged = self.unacknowledged, []
        for on_answer in waiting:
            on_answer(None if code is None else RemotingCommand(code=code))

    def answered(self, answer: RemotingCommand) -> None:
        raise AssertionError("answers come through the test")

    def write(self, data: bytes | memoryview) -> None:
        raise AssertionError("nothing is written directly")

    def write_part(self, head: bytes, part: FilePart) -> None:
        raise AssertionError("nothing is written directly")

    def respond(self, request: RemotingCommand, reply: bytes, durable_at: int = 0) -> None:
        if request.flag & FLAG_ONE_WAY:
            self.unanswered.append(durable_at)
        else:
            self.waiting.append((durable_at, reply))

    @property
    def checked_offsets(self) -> list[int]:
        return [header.commit_log_offset for _, header, _ in self.checks]


def end_now(decisions: Decisions, request: DecisionRequest) -> Ended:
    """Apply a producer's decision alone; raise if it is refused."""
    planned = decisions.plan(request)
    assert planned is not None, "another decision about the transaction is planned"
    return planned if isinstance(planned, Ended) else decisions.carry_out(planned)


class Directory:
    """The connected producers."""

    def __init__(self) -> None:
        self.groups: dict[str, list[Connected]] = {}
        self.left: set[tuple[str, object]] = set()

    def join(self, group: str, producer: Connected) -> Connected:
        self.groups.setdefault(group, []).append(producer)
        return producer

    def producers_of(self, group: str) -> Sequence[Connected]:
        return self.groups.get(group, ())

    def has_left(self, group: str, connection: object) -> bool:
        return (group, connection) in self.left


def gone() -> Connected:
    """Return a connection that was lost."""
    connected = Connected()
    connected.closed = True
    return connected


def message(
    topic: str = "orders",
    body: bytes = b"row 1",
    *,
    key: str = "7F000001A1B2C3D4E5F600000001",
    group: str = "pg",
    queue_id: int = 1,
    born_ms: int = START_MS,
    properties: Mapping[str, str] | None = None,
) -> AppendRequest:
    """Return the request that the send handler makes of a transactional message."""
    raw = encode_properties(
        {"TRAN_MSG": "true", "PGROUP": group, "UNIQ_KEY": key, "WAIT": "true"}
        | dict(properties or {})
    )
    return AppendRequest(
        topic=topic,
        queue_id=queue_id,
        body=body,
        properties=raw,
        tags_code=tags_code(raw),
        flag=7,
        sys_flag=0x4,
        born_timestamp=born_ms,
        born_host=PEER,
        store_host=HOST,
        reconsume_times=2,
    )


class Placed(Destinations):
    """Destinations that are the prepared topic and queue, unless the test sets another."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._rule = TimerRule(40 * 86_400_000, now_ms=now_ms)
        self.elsewhere: dict[tuple[str, int], tuple[str, int]] = {}
        self.error: Exception | None = None

    def resolve(self, final: AppendRequest) -> AppendRequest:
        if self.error is not None:
            raise self.error
        place = final.topic, final.queue_id
        final.topic, final.queue_id = self.elsewhere.get(place, place)
        if b"TRANSACTION_DEL" not in final.properties:
            return final
        return self._rule.after_commit(final)

    def ensure_parked_topic(self) -> None:
        """It exists."""


class ServiceParts:
    """The parts of a transaction service that tests compare before and after a restart.

    Private names are used here alone: no answer, metric or file shows the whole table, the
    timetable of checks or what is in memory only, and the service needs no door to them.
    """

    service: TransactionService

    @property
    def table(self) -> PendingTable:
        return self.service._table

    @property
    def checker(self) -> Checker:
        return self.service._checker

    @property
    def snapshots(self) -> Snapshots:
        return self.service._snapshots

    @property
    def is_taking_snapshot(self) -> bool:
        return self.snapshots._work is not None

    def abandon_snapshot(self) -> None:
        """Leave the unfinished file as a killed process would."""
        if self.snapshots._work is not None:
            self.snapshots._work.close()
            self.snapshots._work = None

    @property
    def ops(self) -> OpWriter:
        return self.service._ops

    @property
    def parking(self) -> Parking:
        return self.service._parking

    @property
    def finals(self) -> FinalMessageCache:
        return self.service.prepares._finals

    def forget_finals(self) -> None:
        """Have the next decisions read their halves from the log, as late ones do."""
        for generation in self.finals._generations:  # the parts share this cache
            generation.clear()


class Broker(ServiceParts):
    """A transaction service over a log in memory, and a way to crash and restart it."""

    def __init__(
        self,
        directory: Path,
        *,
        config: TransactionConfig | None = None,
        decided: int = DECIDED_REMEMBERED,
    ) -> None:
        self.clock = Clock()
        self.log = MemoryLog(self.clock)
        self.producers = Directory()
        self.config = config or TransactionConfig()
        self.snapshot_path = directory / "config" / "halfmqTransactions"
        self.snapshot_log_bytes = 0
        self._decided = decided
        self._keys = 0
        self.jitter = Random(0)
        self.fetch: Fetch = fetch_at_once
        self.wake: Callable[[], None] = lambda: None
        self.destination = Placed(self.clock)
        self.flushes = True  # within milliseconds, as a disk does
        self.service = self._service()

    def _service(self) -> TransactionService:
        service = TransactionService(
            as_store(self.log),
            self.producers,
            self.destination,
            self.config,
            broker_name="broker-a",
            store_host=HOST,
            now_ms=self.clock,
            monotonic_ms=self.clock.monotonic,
            snapshot_path=self.snapshot_path,
            record_size_max=1 << 30,
            fetch=lambda missing, on_fetched: self.fetch(missing, on_fetched),  # noqa: PLW0108 -- a test sets another
            wake=lambda: self.wake(),  # noqa: PLW0108 -- a test sets another
            snapshot_log_bytes=self.snapshot_log_bytes,
            decided_remembered=self._decided,
            jitter=self.jitter,
        )
        service.rebuild()
        return service

    def park(self, half: AppendResult) -> bool:
        """Have it give up asking about a half."""
        entry, stored = (
            self.table.get(half.physical_offset),
            HalfReader(as_store(self.log)).read(half.physical_offset),
        )
        assert entry is not None
        assert stored is not None
        return self.parking.park(entry, stored)

    def restart(self, *, survivors: int = 0, drained: bool = False) -> None:
        """Stop in order, or crash with so many unflushed records left; then start again."""
        if drained:
            self.service.drain()
            self.log.flush()
        self.log = self.log.crash(survivors)
        self.service = self._service()

    def prepare(
        self,
        producer: Connected | None = None,
        *,
        group: str = "pg",
        key: str = "",
        born_ms: int = 0,
        **properties: str,
    ) -> AppendResult:
        """Store a half message; its unique key is new unless given.

        Without a producer it comes from a connection that is gone when it is asked about.
        """
        self._keys += 1
        key = key or f"{self._keys:032X}"
        one = message(key=key, group=group, born_ms=born_ms or self.clock(), properties=properties)
        (half,) = self.service.prepares.prepare_group([(one, key)], group, producer or gone())
        return half

    def prepare_group(
        self, count: int, producer: Connected | None = None, *, group: str = "pg", **properties: str
    ) -> list[AppendResult]:
        """Store several messages of one transaction, with bodies `0`, `1`, ... in turn."""
        messages = []
        for number in range(count):
            self._keys += 1
            key = f"{self._keys:032X}"
            body = b"%d" % number
            one = message(
                f"topic{number % 3}",
                body,
                key=key,
                group=group,
                born_ms=self.clock(),
                properties=properties,
            )
            messages.append((one, key))
        return self.service.prepares.prepare_group(messages, group, producer or gone())

    def end(self, half: AppendResult, event: TransactionEvent, *, group: str = "pg") -> int:
        """Send a decision; return the log position that its answer waits for."""
        return self.ended(half, event, group=group).position

    def ended(self, half: AppendResult, event: TransactionEvent, *, group: str = "pg") -> Ended:
        return end_now(
            self.service.decisions,
            DecisionRequest(half.physical_offset, half.queue_offset, group, event),
        )

    def wait(self, milliseconds: int) -> None:
        """Let time pass and do everything that is due, however many ticks it takes."""
        self.clock.now += milliseconds
        if self.flushes:
            self.log.flush()
        while self.service.tick() == 0:
            pass

    def finals_of(self, half: AppendResult) -> list[Record]:
        return [
            record
            for record in self.log.records()
            if record.sys_flag & TRANSACTION_MASK == 0x8
            and record.prepared_transaction_offset == half.physical_offset
        ]

    def records_of(self, topic: str) -> list[Record]:
        return [record for record in self.log.records() if record.topic == topic]


def golden_log(store: GoldenStore) -> MemoryLog:
    """Read the commit log of a golden store into memory, up to its first unwritten byte."""
    log = MemoryLog(Clock())
    for first, segment in store.segments():
        position = 0
        while position + 8 <= len(segment):
            size, magic = PREFIX.unpack_from(segment, position)
            if magic not in {MAGIC_V1, MAGIC_V2}:
                break
            log.put(segment[position : position + size])
            assert log.write_offset == first + position + size
            position += size
    log.flush()
    return log
