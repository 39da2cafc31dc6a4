"""Transactions over a real store: files, flushes, restarts, and stores of the official broker."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.broker.config import TransactionConfig
from halfmq.broker.transaction.deciding import DecisionRequest
from halfmq.broker.transaction.errors import DecidedOtherwiseError
from halfmq.broker.transaction.state.state_machine import TransactionEvent
from halfmq.broker.transaction.transaction_service import TransactionService
from halfmq.store.config import FlushMode, StoreConfig
from halfmq.store.format.record import Record
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.log.append_request import AppendResult
from halfmq.store.message_store import MessageStore
from tests.support.broker_doubles import Clock
from tests.support.golden_store import GoldenStore, unpack
from tests.support.patience import PATIENCE_S
from tests.support.stores import crash
from tests.support.transactions import (
    HOST,
    Connected,
    Directory,
    Placed,
    ServiceParts,
    end_now,
    fetch_at_once,
    gone,
    message,
)


class StoredBroker(ServiceParts):
    """A transaction service over a store directory."""

    def __init__(self, root: Path, **settings: int) -> None:
        self.root = root
        self.clock = Clock()
        self.producers = Directory()
        self._settings = settings
        self._keys = 0
        self.open(root)

    def open(self, root: Path) -> None:
        self.root = root
        self.store = MessageStore(
            StoreConfig(
                root=root,
                flush_mode=FlushMode.SYNC_FLUSH,
                commit_log_file_size=self._settings.get("log", 16_384),
                consume_queue_file_size=self._settings.get("queue", 1_000),
                max_hash_slots=100,
                max_index_items=400,
            ),
            now_ms=self.clock,
        )
        self.store.open()
        self.service = TransactionService(
            self.store,
            self.producers,
            Placed(self.clock),
            TransactionConfig(),
            broker_name="broker-a",
            store_host=HOST,
            now_ms=self.clock,
            monotonic_ms=self.clock.monotonic,
            snapshot_path=root / "config" / "halfmqTransactions",
            record_size_max=1 << 30,
            fetch=fetch_at_once,
            decided_remembered=2,
        )
        self.service.rebuild()

    def prepare(
        self, body: bytes = b"row 1", *, queue_id: int = 0, flushed: bool = True
    ) -> AppendResult:
        self._keys += 1
        key = f"{self._keys:032X}"
        one = message(key=key, body=body, queue_id=queue_id)
        (half,) = self.service.prepares.prepare_group([(one, key)], "pg", gone())
        if flushed:
            self.flush()
        return half

    def request(self, half: AppendResult, event: TransactionEvent) -> DecisionRequest:
        return DecisionRequest(half.physical_offset, half.queue_offset, "pg", event)

    def end(self, half: AppendResult, event: TransactionEvent) -> int:
        ended = end_now(self.service.decisions, self.request(half, event))
        self.flush()
        return ended.position

    def flush(self) -> None:
        """Wait for the disk, and index what was stored."""
        while self.store.tick():
            pass
        deadline = time.monotonic() + PATIENCE_S
        while self.store.durable_offset < self.store.write_offset:
            assert time.monotonic() < deadline
            self.store.request_flush()
            time.sleep(0.001)

    def stop(self) -> None:
        self.service.drain()
        self.store.close()

    def restart(self) -> None:
        """Stop in order and start again."""
        self.stop()
        self.open(self.root)

    def kill(self, target: Path) -> None:
        """Continue with the files as a killed process leaves them."""
        crash(self.root, target)
        self.store.close()
        self.open(target)

    def wait(self, milliseconds: int) -> None:
        self.clock.now += milliseconds
        while self.service.tick() == 0:
            pass
        self.flush()

    def consumed(self, topic: str = "orders", queue_id: int = 0) -> list[Record]:
        """Return the messages that a consumer of the queue gets."""
        found = self.store.queues.get(topic, queue_id, 0, max_count=1_000, max_bytes=1 << 20)
        return [
            record
            for start, length in found.ranges
            for record in self.store.reader.scan(start, start + length)
        ]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[StoredBroker]:
    """A broker on an empty directory."""
    broker = StoredBroker(tmp_path / "store")
    yield broker
    broker.store.close()


def test_a_message_is_consumed_after_its_commit_only(broker: StoredBroker) -> None:
    """No queue that consumers read has a half, a rollback or an op record."""
    committed, rolled_back, open_half = (broker.prepare(body) for body in (b"1", b"2", b"3"))
    assert broker.consumed() == []

    broker.end(rolled_back, TransactionEvent.ROLLBACK)
    broker.end(committed, TransactionEvent.COMMIT)
    broker.service.drain()
    broker.flush()

    assert [record.body for record in broker.consumed()] == [b"1"]
    assert [record.queue_offset for record in broker.consumed()] == [0]
    assert broker.store.queues.bounds(HALF_TOPIC, 0) == (0, 3)
    assert broker.store.queues.bounds(OP_TOPIC, 0) == (0, 1)
    assert open_half.queue_offset == 2


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_restart_keeps_every_decision(broker: StoredBroker, tmp_path: Path, how: str) -> None:
    """Over several log files, with a cache of only two decisions."""
    halves = [broker.prepare(b"%d" % number * 300) for number in range(40)]
    for number, half in enumerate(halves):
        if number % 4 < 2:
            broker.end(half, TransactionEvent.COMMIT if number % 4 else TransactionEvent.ROLLBACK)
    broker.kill(tmp_path / "after") if how == "killed" else broker.restart()

    assert broker.service.metrics()["pending"] == 20
    producer = broker.producers.join("pg", Connected())
    broker.wait(60_000)
    assert producer.checked_offsets == [
        half.physical_offset for number, half in enumerate(halves) if number % 4 >= 2
    ]
    for number, half in enumerate(halves):
        event, opposite = TransactionEvent.COMMIT, TransactionEvent.ROLLBACK
        if number % 4 == 0:
            event, opposite = opposite, event
        broker.end(half, event)
        with pytest.raises(DecidedOtherwiseError):
            broker.end(half, opposite)
    assert sorted(record.body for record in broker.consumed()) == sorted(
        b"%d" % number * 300 for number in range(40) if number % 4
    )


@pytest.mark.parametrize("event", [TransactionEvent.COMMIT, TransactionEvent.ROLLBACK])
def test_a_repeated_decision_is_answered_before_the_first_is_on_disk(
    broker: StoredBroker, event: TransactionEvent
) -> None:
    """A topic that opts out of the flush is answered at once; the client may repeat at once."""
    half = broker.prepare(flushed=False)
    first = end_now(broker.service.decisions, broker.request(half, event))

    repeated = end_now(broker.service.decisions, broker.request(half, event))

    assert broker.store.durable_offset <= half.physical_offset
    assert repeated.final_offset == first.final_offset
    assert repeated.position > half.physical_offset


def test_large_halves_are_committed_whole(broker: StoredBroker) -> None:
    """Their size is unknown before they are read, and they may end with a file."""
    bodies = [bytes([65 + number]) * size for number, size in enumerate((7_000, 1_600, 8_192, 1))]
    halves = [broker.prepare(body) for body in bodies]
    broker.forget_finals()  # have them read from the log
    for half in halves:
        broker.end(half, TransactionEvent.COMMIT)
    assert [record.body for record in broker.consumed()] == bodies


def test_a_parked_message_can_be_read(broker: StoredBroker) -> None:
    """Operators read it from its topic, as any message."""
    producer = broker.producers.join("pg", Connected())
    broker.prepare()
    for _ in range(17):
        broker.wait(700_000)  # longer than the longest pause between two checks
    assert len(producer.checks) == 15
    (parked,) = broker.consumed(TRANS_CHECK_MAX_TIME_TOPIC)
    assert parked.body == b"row 1"


def test_a_full_log_file_is_not_reported_as_damage(
    broker: StoredBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The log may end at the end of a file."""
    first_file = broker.root / "commitlog" / f"{0:020d}"
    size = 16_384  # of a file, in these stores
    halves = [broker.prepare(b"x" * 1_000)]
    while halves[-1].physical_offset < size:
        halves.append(broker.prepare(b"x" * 1_000))
    broker.stop()
    (broker.root / "config" / "halfmqTransactions").unlink()
    second_file = first_file.with_name(f"{size:020d}")
    second_file.write_bytes(bytes(size))
    (broker.root / "abort").touch()

    broker.open(broker.root)

    assert [entry.offset for entry in broker.table] == [
        half.physical_offset for half in halves[:-1]
    ]
    assert "event=log_damaged" not in caplog.text


def test_messages_of_one_transaction_become_visible_together(
    broker: StoredBroker, tmp_path: Path
) -> None:
    """Of several topics, across log files, and with one flush for all of them."""
    bodies = [bytes([65 + number]) * 2_500 for number in range(5)]
    for attempt in range(4):
        messages = []
        for number, body in enumerate(bodies):
            key = f"{attempt}-{number}"
            messages.append((message(f"topic{number}", body, key=key, queue_id=0), key))
        halves = broker.service.prepares.prepare_group(messages, "pg", gone())
        broker.flush()
        broker.prepare(b"in between" * 100)
        if attempt % 2:
            broker.restart()

        end_now(
            broker.service.decisions,
            DecisionRequest(
                halves[0].physical_offset, halves[0].queue_offset, "pg", TransactionEvent.COMMIT
            ),
        )
        seen = [len(broker.consumed(f"topic{number}")) for number in range(5)]
        assert seen in ([attempt] * 5, [attempt + 1] * 5)  # the flusher may have been as fast
        broker.flush()

        assert [
            [record.body for record in broker.consumed(f"topic{number}")] for number in range(5)
        ] == [[body] * (attempt + 1) for body in bodies]
    broker.kill(tmp_path / "after")
    assert broker.service.metrics()["pending"] == 4
    assert [len(broker.consumed(f"topic{number}")) for number in range(5)] == [4] * 5


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_commit_that_is_on_disk_in_part_is_completed(
    broker: StoredBroker, tmp_path: Path, cut: int
) -> None:
    """The power failed during the write; the rest is appended before any request is served."""
    keys = [f"{number}" for number in range(4)]
    messages = [(message(f"topic{key}", key.encode(), key=key, queue_id=0), key) for key in keys]
    halves = broker.service.prepares.prepare_group(messages, "pg", gone())
    broker.flush()
    start = broker.store.write_offset
    broker.end(halves[0], TransactionEvent.COMMIT)
    ends = [record.end for record in broker.store.reader.scan(start)]
    log = broker.root / "commitlog" / f"{0:020d}"
    after = tmp_path / "after"
    crash(broker.root, after)
    data = bytearray(log.read_bytes())
    data[ends[cut - 1] :] = bytes(len(data) - ends[cut - 1])
    (after / "commitlog" / log.name).write_bytes(data)
    broker.store.close()

    broker.open(after)
    broker.flush()

    assert [[one.body for one in broker.consumed(f"topic{key}")] for key in keys] == [
        [key.encode()] for key in keys
    ]
    assert broker.service.metrics()["pending"] == 0


@pytest.mark.parametrize("what", ["body", "length", "blank", "file"])
def test_damage_in_the_log_hides_no_later_half(
    broker: StoredBroker, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A half that is not in the table would count as decided, and its message would be lost."""
    halves = [broker.prepare(b"%d" % number * 300) for number in range(60)]
    for half in halves[::2]:
        broker.end(half, TransactionEvent.COMMIT)
    pending = {half.physical_offset for half in halves[1::2]}
    broker.stop()
    (broker.root / "config" / "halfmqTransactions").unlink()
    damaged = halves[5]
    first_file = broker.root / "commitlog" / f"{0:020d}"
    data = bytearray(first_file.read_bytes())
    if what == "body":
        data[damaged.physical_offset + 200] ^= 1
    elif what == "length":
        data[damaged.physical_offset + 1] ^= 1
    elif what == "blank":
        next_file = max(
            half.physical_offset + half.size for half in halves if half.physical_offset < 16_384
        )
        data[next_file : next_file + 8] = bytes(8)
    else:
        data = bytearray(len(data))
    first_file.write_bytes(data)

    broker.open(broker.root)

    lost = {
        offset
        for offset in pending
        if (what == "file" and offset < 16_384)
        or (what in {"body", "length"} and offset == damaged.physical_offset)
    }
    assert {entry.offset for entry in broker.table} == pending - lost
    assert "event=log_damaged" in caplog.text
    for half in halves[7::2]:
        if half.physical_offset not in lost:
            broker.end(half, TransactionEvent.COMMIT)


# --- stores of the official broker


@pytest.fixture(params=["tx-midway-killed", "tx-midway-clean", "v4-tx"])
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> GoldenStore:
    """A store with undecided transactions."""
    return unpack(request.param, tmp_path)


def test_a_store_of_rocketmq_opens_in_the_middle_of_transactions(golden: GoldenStore) -> None:
    """Exactly the undecided are checked; decided ones stay decided."""
    broker = StoredBroker(golden.root)
    broker.producers.join("pg_tx", producer := Connected())
    broker.producers.join("pg_other", producer)
    broker.wait(3_600_000_000 * 100)  # the recordings are of a later year than the test's clock
    by_state: dict[str, set[str]] = {}
    for transaction in golden.truth["transactions"]:
        by_state.setdefault(transaction["state_in_the_log"], set()).add(transaction["uniqKey"])

    assert {header.transaction_id for _, header, _ in producer.checks} == by_state["UNDECIDED"]
    assert broker.service.metrics()["pending_parked"] == len(by_state["DISCARDED"])
    for transaction in golden.truth["transactions"]:
        half = transaction["halves"][-1]
        finals = len(transaction["finals"])
        event = (
            TransactionEvent.ROLLBACK
            if transaction["state_in_the_log"] == "ROLLED_BACK"
            else TransactionEvent.COMMIT
        )
        end = broker.store.write_offset

        end_now(
            broker.service.decisions,
            DecisionRequest(
                half["commitLogOffset"], half["queueOffset"], transaction["producerGroup"], event
            ),
        )
        broker.flush()

        undecided = transaction["state_in_the_log"] in {"UNDECIDED", "DISCARDED"}
        assert (broker.store.write_offset > end) is undecided, transaction["what"]
        assert undecided or finals or event is TransactionEvent.ROLLBACK
    broker.stop()

    broker.open(golden.root)  # and once more, now from the snapshot
    assert broker.service.metrics()["pending"] == 0
    broker.store.close()
