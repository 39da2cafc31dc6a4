"""A store that our broker wrote in the middle of transactions, opened by Apache RocketMQ 5.3.3.

What was decided stays decided: RocketMQ reads our op messages, asks about nothing they name, and
delivers nothing again. What is undecided it asks about, and carries out the answer. Then our broker
opens the store again.

Three things RocketMQ cannot know. It asks about parked transactions too, because nothing in its
format says "asked enough" of a half that it has not passed itself. It asks about every half of a
transaction of several messages, and decides each for itself. And a delay from the commit on is to
it a delay level: it delivers when the level that the message waits in is due.
"""

from __future__ import annotations

import queue
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest

from halfmq.client import ClientConfig, Decision, Message, MessageView, blocking
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.store.format.topics import HALF_TOPIC, OP_TOPIC, TIMER_TOPIC
from tests.support.ledger_log import read_log, records_of
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.rocketmq_broker import OfficialBroker, Wire, rocketmq_broker

_ANSWERS: Final = {"commit": Decision.COMMIT, "rollback": Decision.ROLLBACK}


class AnsweringByBody:
    """Keeps what it was asked about, by body, and answers by the body's last word."""

    def __init__(self) -> None:
        self._bodies: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.commits: Counter[str] = Counter()
        """How often COMMIT was answered: Apache RocketMQ asks until it reads its own op message,
        and delivers for each of these answers."""

    def __call__(self, message: MessageView) -> Decision:
        body = message.body.decode()
        for word, decision in _ANSWERS.items():
            if body.endswith(word):
                self.commits[body] += decision is Decision.COMMIT
                self._bodies.put(body)
                return decision
        self._bodies.put(body)
        return Decision.UNKNOWN

    def until(self, bodies: set[str]) -> set[str]:
        """Wait until it was asked about all of these; return what it was asked about."""
        asked: set[str] = set()
        while not bodies <= asked:
            asked.add(self._bodies.get(timeout=PATIENCE_S))
        return asked | self.asked()

    def asked(self) -> set[str]:
        """What it was asked about since it was last looked at."""
        asked: set[str] = set()
        while not self._bodies.empty():
            asked.add(self._bodies.get())
        return asked


pytestmark = pytest.mark.campaign

FORMAT: Final = {
    "mappedFileSizeCommitLog": 65_536,
    "mappedFileSizeConsumeQueue": 1000,
    "maxMessageSize": 16_384,
    "maxHashSlotNum": 100,
    "maxIndexNum": 200,
    "messageDelayLevel": "1s 10s",
    "defaultTopicQueueNums": 4,
}
OURS: Final = FORMAT | {"transactionTimeOut": 600_000, "transactionCheckInterval": 600_000}
PARKING: Final = FORMAT | {
    "transactionTimeOut": 100,
    "transactionCheckInterval": 100,
    "transactionCheckMax": 1,
}
THEIRS: Final = FORMAT | {
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 1000,
    "transactionCheckMax": 1000,  # the official broker counts checks that nobody received
    "transactionOpBatchInterval": 500,
}
GROUP: Final = "midway-producer"
TOPICS: Final = ("decided", "beside")
QUEUES: Final = range(4)

COMMITTED: Final = {f"committed-{number}" for number in range(4)}
PARKED: Final = {"parked-commit", "parked-rollback"}
SEVERAL: Final = {f"{name}-{number}" for name in ("together", "dropped") for number in range(3)}
SEVERAL_COMMITTED: Final = {name for name in SEVERAL if name.startswith("together")}
SEVERAL_UNDECIDED: Final = {f"open-{number}-commit" for number in range(3)}
UNDECIDED: Final = {"undecided-commit", "undecided-rollback"}
DELAYED: Final = {"delayed"}
ASKED_THERE: Final = UNDECIDED | SEVERAL_UNDECIDED | PARKED
COMMITTED_THERE: Final = {name for name in ASKED_THERE if name.endswith("commit")}
DELIVERED: Final = Counter(COMMITTED | SEVERAL_COMMITTED | DELAYED | COMMITTED_THERE)


def _producer(namesrv: str, checker: AnsweringByBody | None = None) -> blocking.TransactionProducer:
    config = ClientConfig(namesrv=namesrv)
    return blocking.TransactionProducer(GROUP, checker=checker or AnsweringByBody(), config=config)


def _wait_for(address: str, expected: Counter[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while missing := expected - _bodies(address):
        assert time.monotonic() < deadline, f"{missing} of {_bodies(address)}"
        time.sleep(0.1)


def _transact(
    producer: blocking.TransactionProducer, decision: Decision, *messages: Message
) -> None:
    with producer.transaction(messages) as transaction:
        transaction.decide(decision)


def _message(body: str, deliver_after: timedelta | None = None) -> Message:
    return Message("decided", body.encode(), keys=body, deliver_after=deliver_after)


def _several(name: str, end: str = "") -> list[Message]:
    return [
        Message(TOPICS[number % 2], f"{name}-{number}{end}".encode(), keys=f"{name}-{number}")
        for number in range(3)
    ]


def _park(broker: BrokerProcess) -> None:
    """Have two transactions given up: the one check that is allowed is answered UNKNOWN."""

    class Unknowing(AnsweringByBody):
        def __call__(self, _message: object) -> Decision:
            return Decision.UNKNOWN

    with _producer(broker.address, Unknowing()) as producer:
        for name in sorted(PARKED):
            _transact(producer, Decision.UNKNOWN, _message(name))
        store = broker.directory / "store"
        wait_until(lambda: len(read_log(store).parked) == len(PARKED), "it is not parked")


TIMERS: Final = {"timerWheelEnable": "true"}
"""Of RocketMQ, by default too; the tests' brokers do without to start faster."""


def _write(broker: BrokerProcess) -> None:
    """Transactions in every state; the undecided ones last, for RocketMQ asks in this order."""
    with _producer(broker.address) as producer:
        for number in range(4):
            _transact(producer, Decision.COMMIT, _message(f"committed-{number}"))
            _transact(producer, Decision.ROLLBACK, _message(f"rolled-back-{number}"))
        _transact(producer, Decision.COMMIT, *_several("together"))
        _transact(producer, Decision.ROLLBACK, *_several("dropped"))
        _transact(producer, Decision.COMMIT, _message("delayed", timedelta(seconds=8)))
        _transact(producer, Decision.UNKNOWN, *_several("open", "-commit"))
        for name in sorted(UNDECIDED):
            _transact(producer, Decision.UNKNOWN, _message(name))


def _bodies(address: str) -> Counter[str]:
    """What consumers are given, and how often."""
    with Wire(address) as wire:
        return Counter(
            record.body.decode()
            for topic in TOPICS
            for number in QUEUES
            for record in wire.records(topic, number)
        )


@contextmanager
def _written(tmp_path: Path) -> Iterator[BrokerProcess]:
    """Our broker after writing all of it; still running."""
    with broker_process(tmp_path / "ours", **PARKING) as ours:
        _park(ours)
        ours.restart(**OURS)
        _write(ours)
        assert _bodies(ours.address) == Counter(COMMITTED | SEVERAL_COMMITTED)
        yield ours


def _check_there(official: OfficialBroker, delayed_max: int = 1) -> Counter[str]:
    """Everything undecided is asked about and carried out once; nothing else is touched."""
    asked = AnsweringByBody()
    official.wait_for_route("decided")
    with _producer(official.namesrv, asked):
        assert asked.until(ASKED_THERE) == ASKED_THERE
        _wait_for(official.address, DELIVERED)
        wait_until(lambda: _ops_cover(official), "decisions are not written down")
        assert asked.asked() <= ASKED_THERE
    bodies = _bodies(official.address)
    assert bodies <= DELIVERED | asked.commits | Counter(delayed=delayed_max)
    return bodies


def _ops_cover(official: OfficialBroker) -> bool:
    """Whether RocketMQ has written an op message for each half that it was told about."""
    with Wire(official.address) as wire:
        end = wire.end(HALF_TOPIC, 0)
        time.sleep(1.5)  # a round: it copies what it believes undecided
        return wire.end(HALF_TOPIC, 0) == end


def _check_again(copy: Path, tmp_path: Path, expected: Counter[str]) -> None:
    """With us again nobody is asked about any of it, and nothing comes twice."""
    settings = THEIRS | {"storePathRootDir": copy}
    with broker_process(tmp_path / "again", **settings) as again:
        asked = AnsweringByBody()
        with _producer(again.address, asked) as producer:
            _transact(producer, Decision.UNKNOWN, _message("marker-rollback"))
            assert asked.until({"marker-rollback"}) == {"marker-rollback"}
        assert _bodies(again.address) == expected


def test_what_we_decided_stays_decided_in_rocketmq(tmp_path: Path) -> None:
    """After an ordered stop: commits, rollbacks, parked, several messages, and a delayed one."""
    with _written(tmp_path) as ours:
        assert ours.stop() == 0
        copy = shutil.copytree(tmp_path / "ours" / "store", tmp_path / "copy")

    with rocketmq_broker(copy, tmp_path / "theirs", **THEIRS, **TIMERS) as official:
        bodies = _check_there(official)
    _check_again(copy, tmp_path, bodies)


def _mirrored(store: Path) -> bool:
    """Whether op messages name every half that we decided."""
    truth = read_log(store)
    undecided = set(truth.undecided)
    decided = {half.queue_offset for at, half in truth.halves.items() if at not in undecided}
    named = {
        int(number)
        for record in records_of(store)
        if record.topic == OP_TOPIC
        for number in record.body.decode().split(",")
        if number
    }
    return decided <= named


def _waiting(store: Path) -> list[int]:
    """Where records of the delayed message lie in the timer topic."""
    found = [record for record in records_of(store) if record.topic == TIMER_TOPIC]
    return [record.physical_offset for record in found if record.body == b"delayed"]


def test_after_a_kill_rocketmq_knows_what_op_messages_say(tmp_path: Path) -> None:
    """They follow a decision by transactionOpBatchInterval at most; from then on a kill is safe.

    But for the delayed message: RocketMQ does not see in the log that it was delivered.
    """
    with _written(tmp_path) as ours:
        store = tmp_path / "ours" / "store"
        wait_until(lambda: _mirrored(store), "op messages are missing")
        assert len(_waiting(store)) == 1
        ours.kill()
        copy = shutil.copytree(store, tmp_path / "copy")

    with rocketmq_broker(copy, tmp_path / "theirs", **THEIRS, **TIMERS) as official:
        bodies = _check_there(official, delayed_max=2)
    _check_again(copy, tmp_path, bodies)


class AnsweringForTheLeader(AnsweringByBody):
    """Knows of the first message of a transaction only."""

    def __call__(self, message: MessageView) -> Decision:
        answer = super().__call__(message)
        return answer if message.body == b"open-0-commit" else Decision.UNKNOWN


def test_what_rocketmq_decided_in_part_is_made_whole_here(tmp_path: Path) -> None:
    """It committed one message of three; with us again the other two are delivered, unasked."""
    with broker_process(tmp_path / "ours", **OURS) as ours:
        with _producer(ours.address) as producer:
            _transact(producer, Decision.UNKNOWN, *_several("open", "-commit"))
        assert ours.stop() == 0
        copy = shutil.copytree(tmp_path / "ours" / "store", tmp_path / "copy")

    with rocketmq_broker(copy, tmp_path / "theirs", **THEIRS, **TIMERS) as official:
        official.wait_for_route("decided")
        with _producer(official.namesrv, AnsweringForTheLeader()):
            _wait_for(official.address, Counter({"open-0-commit": 1}))
        assert set(_bodies(official.address)) == {"open-0-commit"}

    settings = THEIRS | {"storePathRootDir": copy}
    with broker_process(tmp_path / "again", **settings) as again:
        asked = AnsweringByBody()
        with _producer(again.address, asked) as producer:
            _transact(producer, Decision.UNKNOWN, _message("marker-rollback"))
            assert asked.until({"marker-rollback"}) == {"marker-rollback"}
        assert set(_bodies(again.address)) == SEVERAL_UNDECIDED
