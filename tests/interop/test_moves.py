"""Moves of a store: from Apache RocketMQ to halfmq and back, and from one broker to several.

The steps are those of docs/deployment.md and docs/scaling.md.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from halfmq.client import ClientConfig, Decision, Message, MessageView
from halfmq.client.blocking import Consumer, Producer, TransactionProducer
from halfmq.client.testing import broker_process
from halfmq.command.main import main
from tests.support.broker_pair import wait_for_route
from tests.support.patience import PATIENCE_S
from tests.support.rocketmq_broker import rocketmq_broker, rocketmq_name_server

FORMAT: Final = {
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 20_000,
    "maxHashSlotNum": 1_000,
    "maxIndexNum": 4_000,
}
COUNT: Final = 8


def _commit(_message: MessageView) -> Decision:
    return Decision.COMMIT


@contextlib.contextmanager
def _halfmq(home: Path, store: Path, namesrv: str) -> Iterator[None]:
    settings = {"storePathRootDir": store, "namesrvAddr": namesrv, "brokerName": "broker-a"}
    with broker_process(home, **settings, **FORMAT):
        yield


@contextlib.contextmanager
def _rocketmq(home: Path, store: Path, namesrv: str) -> Iterator[None]:
    settings = {"timerWheelEnable": "true", "autoCreateTopicEnable": "true"}
    with rocketmq_broker(store, home, namesrvAddr=namesrv, **settings, **FORMAT):
        yield


@pytest.mark.campaign
def test_clients_stay_while_the_broker_changes_to_halfmq_and_back(tmp_path: Path) -> None:
    """The name server is RocketMQ's all the time; each message comes once, and goes on in order."""
    store, found = tmp_path / "store", Counter[bytes]()
    with rocketmq_name_server(tmp_path / "namesrv") as namesrv:
        config = ClientConfig(namesrv=namesrv, heartbeat_interval=1.0)
        with contextlib.ExitStack() as clients:
            producer: TransactionProducer | None = None
            consumer: Consumer | None = None
            for number, run in enumerate((_rocketmq, _halfmq, _rocketmq)):
                with run(tmp_path / f"run-{number}", store, namesrv):
                    wait_for_route(namesrv, "TBW102", {"broker-a"})
                    if producer is None or consumer is None:
                        producer = clients.enter_context(
                            TransactionProducer("movers", _commit, config=config)
                        )
                        consumer = clients.enter_context(
                            Consumer("readers", {"moved": "*"}, start_from="first", config=config)
                        )
                    sent = [f"{number}-{count}".encode() for count in range(COUNT)]
                    for body in sent:
                        with producer.transaction(Message("moved", body)):
                            pass
                    while not found.keys() >= set(sent):
                        message = consumer.receive(PATIENCE_S)
                        assert message is not None, found
                        found[message.body] += 1
                        message.ack()
                assert main(["store", "verify", str(store)]) == 0
    assert set(found.values()) == {1}
    assert len(found) == 3 * COUNT


def test_one_broker_becomes_the_first_of_several(tmp_path: Path) -> None:
    """Its directory is moved; its messages are there, and the others get its topics."""
    with broker_process(tmp_path / "one") as one:
        with Producer("writers", namesrv=one.address) as producer:
            producer.send(Message("moved", b"before"))
        one.stop()
    root = tmp_path / "several"
    root.mkdir()
    (tmp_path / "one" / "store").rename(root / "broker-a-0")
    with broker_process(tmp_path / "more", brokers=2, storePathRootDir=root) as both:
        with Producer("writers", namesrv=both.address) as producer:
            names = {producer.send(Message("moved", b"after")).queue.broker_name for _ in range(32)}
        assert names == {"broker-a-0", "broker-a-1"}
        with Consumer("r", {"moved": "*"}, namesrv=both.address, start_from="first") as consumer:
            bodies = Counter[bytes]()
            for _ in range(33):
                message = consumer.receive(PATIENCE_S)
                assert message is not None, bodies
                bodies[message.body] += 1
    assert bodies == {b"before": 1, b"after": 32}
