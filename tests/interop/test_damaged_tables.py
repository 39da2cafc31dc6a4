"""A broker whose tables were damaged while it was stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.client.blocking import Consumer, Message, Producer
from halfmq.client.testing import BrokerProcess, BrokerStartError, broker_process

COUNT = 5
SPOILT = b'{"dataVersion'
STORE_UNUSABLE = 4  # exit code


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker with some messages, half of them consumed, that has been stopped."""
    with broker_process(tmp_path, storePathRootDir=tmp_path / "store") as running:
        with Producer("p", namesrv=running.address) as producer:
            for number in range(COUNT):
                producer.send(Message("orders", b"%d" % number))
        consume(running, COUNT)
        running.stop()
        yield running


def consume(broker: BrokerProcess, count: int) -> list[bytes]:
    bodies: list[bytes] = []
    with Consumer("billing", {"orders": "*"}, namesrv=broker.address) as consumer:
        while len(bodies) < count and (message := consumer.receive(10)) is not None:
            bodies.append(message.body)
            message.ack()
    return sorted(bodies)


def spoil(broker: BrokerProcess, *names: str) -> None:
    config = broker.directory / "store" / "config"
    for name in names:
        for path in (config / name, config / f"{name}.bak"):
            path.write_bytes(SPOILT)


def test_topics_and_groups_come_back_from_the_messages(broker: BrokerProcess) -> None:
    """Offsets go on, and what is sent to the old topic is consumed by the old group."""
    spoil(broker, "topics.json", "subscriptionGroup.json")
    broker.start(autoCreateTopicEnable="false", autoCreateSubscriptionGroup="false")
    with Producer("p", namesrv=broker.address) as producer:
        producer.send(Message("orders", b"after"))

    assert consume(broker, 1) == [b"after"]
    assert "event=topics_rebuilt" in broker.log
    assert "event=groups_rebuilt" in broker.log


@pytest.mark.parametrize("name", ["consumerOffset.json", "delayOffset.json"])
def test_without_offsets_the_broker_does_not_start(broker: BrokerProcess, name: str) -> None:
    """It says which file, and what happens without it; then the operator decides."""
    spoil(broker, name)
    with pytest.raises(BrokerStartError) as refused:
        broker.start()
    assert refused.value.exit_code == STORE_UNUSABLE
    assert name in refused.value.log
    assert "remove both" in refused.value.log

    config = broker.directory / "store" / "config"
    (config / name).unlink()
    (config / f"{name}.bak").unlink()
    broker.start()
    with Producer("p", namesrv=broker.address) as producer:
        producer.send(Message("orders", b"after"))
    assert b"after" in consume(broker, 1 if name == "delayOffset.json" else COUNT + 1)
