"""A store written by our broker, opened by Apache RocketMQ's broker 5.3.3, and by ours again."""

from __future__ import annotations

import queue
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from halfmq.client import ClientConfig, Decision, Message, MessageView, blocking
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.store.format.record import Record
from halfmq.store.format.topics import HALF_TOPIC
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.rocketmq_broker import OfficialBroker, Wire, rocketmq_broker

pytestmark = pytest.mark.campaign

# File sizes are part of the format: both brokers must have the same.
FORMAT = {
    "mappedFileSizeCommitLog": 65_536,
    "mappedFileSizeConsumeQueue": 1000,
    "maxMessageSize": 16_384,
    "maxHashSlotNum": 100,
    "maxIndexNum": 200,
    "messageDelayLevel": "1s 10s",
}
IMPATIENT = {
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 1000,
    "transactionCheckMax": 1000,  # the official broker counts checks that nobody received
}
PATIENT = {"transactionTimeOut": 600_000, "transactionCheckInterval": 600_000}
TOPICS = ("plain", "batched", "decided", "delayed")
QUEUES = range(4)
GROUP = "store-producer"
READER = "store-reader"
UNDECIDED = ["undecided-rollback", "undecided-commit"]
TRANSACTIONS = 3 + 3 + len(UNDECIDED)

Content = dict[tuple[str, int], list[Record]]


class Asked:
    """A checker that keeps what it was asked about and answers by the last word of the body."""

    def __init__(self) -> None:
        self._bodies: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, message: MessageView) -> Decision:
        body = message.body.decode()
        self._bodies.put(body)
        return Decision.ROLLBACK if body.endswith("rollback") else Decision.COMMIT

    def until(self, bodies: set[str]) -> set[str]:
        """Wait until it was asked about all of these; return what it was asked about."""
        asked: set[str] = set()
        while not bodies <= asked:
            asked.add(self._bodies.get(timeout=PATIENCE_S))
        while not self._bodies.empty():
            asked.add(self._bodies.get())
        return asked


def _producer(namesrv: str, checker: Asked) -> blocking.TransactionProducer:
    config = ClientConfig(namesrv=namesrv)
    return blocking.TransactionProducer(GROUP, checker=checker, config=config)


def _write(broker: BrokerProcess) -> None:
    """Messages of every kind, over several files of the log, of queues and of the index."""
    with _producer(broker.address, Asked()) as producer:
        for number in range(150):
            body = (f"{number} " * 200).encode()
            keys = [f"order-{number}", f"customer-{number % 5}"]
            colour = {"colour": "grün"}
            tags = "ABC"[number % 3]
            producer.send(Message("plain", body, tags=tags, keys=keys, properties=colour))
        producer.send(Message("plain", b"z" * 6000, keys="packed"))
        for number in range(8):
            names = [f"batch-{number}-{unit}" for unit in range(5)]
            producer.send_batch([Message("batched", name.encode(), keys=name) for name in names])
        for number in range(3):
            _transact(producer, f"committed-{number}", Decision.COMMIT)
            _transact(producer, f"rolled-back-{number}", Decision.ROLLBACK)
        for name in UNDECIDED:
            _transact(producer, name, Decision.UNKNOWN)
    _read_some(broker)


def _transact(producer: blocking.TransactionProducer, body: str, decision: Decision) -> None:
    with producer.transaction(Message("decided", body.encode(), keys=body)) as transaction:
        transaction.decide(decision)


def _read_some(broker: BrokerProcess) -> None:
    config = ClientConfig(namesrv=broker.address)
    consumer = blocking.Consumer(READER, {"batched": "*"}, start_from="first", config=config)
    with consumer:
        for _ in range(20):
            message = consumer.receive(PATIENCE_S)
            assert message is not None
            message.ack()


def _send_delayed(broker: BrokerProcess) -> None:
    with blocking.Producer("delaying", config=ClientConfig(namesrv=broker.address)) as producer:
        producer.send(Message("delayed", b"now"))
        producer.send(Message("delayed", b"later", delay_level=2))


def _content(wire: Wire) -> Content:
    return {(topic, number): wire.records(topic, number) for topic in TOPICS for number in QUEUES}


def _bodies(content: Content, topic: str) -> list[str]:
    records = [record for key, found in content.items() if key[0] == topic for record in found]
    return sorted(record.body.decode() for record in records)


def _found(wire: Wire) -> list[list[Record]]:
    """Answers to key queries; the last ones are by the unique keys of single messages."""
    keys = [("plain", f"customer-{number}") for number in range(5)]
    keys += [("plain", "order-0"), ("plain", "order-149"), ("plain", "packed"), ("plain", "none")]
    keys += [("batched", "batch-7-4"), ("decided", "committed-1"), ("decided", "rolled-back-1")]
    first = [
        next(record for number in QUEUES for record in wire.records(topic, number))
        for topic in ("plain", "batched", "decided")
    ]
    return [wire.by_key(topic, key) for topic, key in keys] + [
        wire.by_key(record.topic, record.property_map["UNIQ_KEY"], unique=True) for record in first
    ]


def _committed(wire: Wire) -> list[int]:
    return [wire.committed(READER, "batched", number) for number in QUEUES]


class State:
    """What a broker answered to all questions."""

    def __init__(self, address: str) -> None:
        with Wire(address) as wire:
            wait_until(lambda: len(wire.by_key("decided", "committed-1")) == 1, "nothing happened")
            self.content = _content(wire)
            self.found = _found(wire)
            self.committed = _committed(wire)


def _check_written(state: State) -> None:
    """Guard against a comparison of nothing with nothing."""
    assert len(_bodies(state.content, "batched")) == 40
    assert _bodies(state.content, "decided") == [f"committed-{number}" for number in range(3)]
    assert [len(records) for records in state.found] == [30] * 5 + [1, 1, 1, 0, 1, 1, 0] + [1] * 3
    assert sum(offset for offset in state.committed if offset > 0) == 20


def test_a_store_that_was_closed_goes_on_in_rocketmq(tmp_path: Path) -> None:
    """It serves and finds every message and asks only about what is undecided; then so do we."""
    with broker_process(tmp_path / "ours", **FORMAT, **PATIENT) as ours:
        _write(ours)
        _send_delayed(ours)
        before = State(ours.address)
        _check_written(before)
        assert _bodies(before.content, "delayed") == ["now"]
        assert ours.stop() == 0
        copy = shutil.copytree(tmp_path / "ours" / "store", tmp_path / "copy")

    with rocketmq_broker(copy, tmp_path / "theirs", **FORMAT, **IMPATIENT) as official:
        _check_served(before, State(official.address))
        _decide_there(official)
        with Wire(official.address) as wire:
            wait_until(
                lambda: _bodies(_content(wire), "delayed") == ["later", "now"], "it did not happen"
            )
        after = State(official.address)
    assert _bodies(after.content, "decided")[-1] == "undecided-commit"
    assert _bodies(after.content, "batched")[-1] == "sent-to-rocketmq"

    with broker_process(tmp_path / "again", storePathRootDir=copy, **FORMAT, **IMPATIENT) as again:
        _check_served(after, State(again.address), delayed=True)
        _check_asked(again, {"marker-commit"})


def _check_served(expected: State, seen: State, *, delayed: bool = False) -> None:
    for key, records in expected.content.items():
        if delayed or key[0] != "delayed":  # else it may have been delivered in between
            assert seen.content[key] == records
    assert seen.found == expected.found
    assert seen.committed == expected.committed


def _decide_there(official: OfficialBroker) -> None:
    asked = Asked()
    official.wait_for_route("batched")
    with _producer(official.namesrv, asked) as producer:
        producer.send(Message("batched", b"sent-to-rocketmq"))
        assert asked.until(set(UNDECIDED)) == set(UNDECIDED)
        with Wire(official.address) as wire:
            wait_until(
                lambda: "undecided-commit" in _bodies(_content(wire), "decided"),
                "it did not happen",
            )


def _check_asked(broker: BrokerProcess, expected: set[str]) -> None:
    """A broker of ours asks about these, a new transaction among them, and nothing else."""
    asked = Asked()
    with _producer(broker.address, asked) as producer:
        _transact(producer, "marker-commit", Decision.UNKNOWN)
        assert asked.until(expected) == expected


def test_a_store_of_a_killed_broker_goes_on_in_rocketmq(tmp_path: Path) -> None:
    """What we acknowledged is served there too. It does not know what we decided, but we still do.

    Without op messages it takes every half message for undecided, copies each again and again, and
    finds nobody to ask.
    """
    with broker_process(tmp_path / "ours", **FORMAT, **PATIENT) as ours:
        _write(ours)
        before = State(ours.address)
        _check_written(before)
        ours.kill()
        copy = shutil.copytree(tmp_path / "ours" / "store", tmp_path / "copy")

    with rocketmq_broker(copy, tmp_path / "theirs", **FORMAT, **IMPATIENT) as official:
        after = State(official.address)
        before.committed = after.committed  # written every 5 s: a crash costs the last ones
        _check_served(before, after)
        with Wire(official.address) as wire:
            wait_until(lambda: wire.end(HALF_TOPIC, 0) >= 2 * TRANSACTIONS, "nothing happened")

    with broker_process(tmp_path / "again", storePathRootDir=copy, **FORMAT, **IMPATIENT) as again:
        _check_served(after, State(again.address), delayed=True)
        _check_asked(again, {*UNDECIDED, "marker-commit"})


def test_it_goes_on_with_popped_messages_and_timers(tmp_path: Path) -> None:
    """What was acknowledged or recalled never comes; the rest comes, in flight, waiting or not."""
    with broker_process(tmp_path, **FORMAT) as broker:
        done = _leave_in_flight(broker.address)
    with rocketmq_broker(tmp_path / "store", tmp_path / "rocketmq", **FORMAT, **TIMERS) as theirs:
        theirs.wait_for_route("tasks")
        _check_in_flight(theirs.namesrv, done)


def test_we_go_on_with_its_popped_messages_and_timers(tmp_path: Path) -> None:
    """The same, from its store to ours."""
    with rocketmq_broker(tmp_path / "store", tmp_path / "rocketmq", **FORMAT, **TIMERS) as theirs:
        theirs.wait_for_route("TBW102")  # it has registered
        with blocking.Admin(namesrv=theirs.namesrv) as admin:
            admin.create_topic("tasks", queues=2)
        theirs.wait_for_route("tasks")
        done = _leave_in_flight(theirs.namesrv)
    with broker_process(tmp_path, **FORMAT) as broker:
        _check_in_flight(broker.address, done)


TIMERS = {"timerWheelEnable": "true", "recallMessageEnable": "true"}


def _leave_in_flight(namesrv: str) -> list[bytes]:
    """Send and recall timers, and pop; return what was acknowledged."""
    with blocking.Producer("writers", namesrv=namesrv) as producer:
        for number in range(6):
            producer.send(Message("tasks", b"task-%d" % number), order_key="one queue")
        soon = timedelta(seconds=20)
        producer.send(Message("tasks", b"timer", deliver_after=soon))
        recalled = producer.send(Message("tasks", b"recalled", deliver_after=soon))
        assert recalled.recall_handle is not None
        producer.recall(recalled.recall_handle)
    with _sharing(namesrv) as consumer:
        popped = [consumer.receive(timeout=PATIENCE_S) for _ in range(4)]
        done = [one.body for one in popped[:2] if one is not None and one.ack()]
    assert len(done) == 2
    return done


def _check_in_flight(namesrv: str, done: list[bytes]) -> None:
    with _sharing(namesrv) as consumer:
        found: set[bytes] = set()
        while len(found) < 5:
            message = consumer.receive(timeout=PATIENCE_S)
            assert message is not None, found
            assert message.body not in done
            found.add(message.body)
            message.ack()
        while (message := consumer.receive(timeout=5)) is not None:
            assert message.body in found
            message.ack()
    assert found == {b"timer", *(b"task-%d" % number for number in range(6))} - set(done)


def _sharing(namesrv: str) -> blocking.Consumer:
    wanted = {"tasks": "*"}
    return blocking.Consumer(
        "sharing", wanted, start_from="first", share="messages", ack_timeout=30, namesrv=namesrv
    )
