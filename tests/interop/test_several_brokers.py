"""Several brokers: halfmq's that know each other, and official ones beside them.

Two halfmq brokers with the same `namesrvAddr` answer with the same routes; official brokers
register with a halfmq broker, and a halfmq broker with an official name server.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.client import Decision, Message
from halfmq.client.blocking import Admin, Consumer, Producer, TransactionProducer
from halfmq.client.testing import broker_process
from tests.support.broker_pair import BrokerPair, broker_pair, wait_for_route
from tests.support.java_clients import Kind, class_path, java_client
from tests.support.patience import PATIENCE_S
from tests.support.rocketmq_broker import rocketmq_broker

COUNT = 64


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[BrokerPair]:
    """Two halfmq brokers that register with each other."""
    with broker_pair(tmp_path) as brokers:
        yield brokers


def consume(namesrv: str, topic: str, count: int, group: str = "readers") -> Counter[bytes]:
    """Return the bodies of the messages, at least so many different ones."""
    bodies: Counter[bytes] = Counter()
    with Consumer(group, {topic: "*"}, namesrv=namesrv, start_from="first") as consumer:
        for message in consumer:
            bodies[message.body] += 1
            message.ack()
            if len(bodies) >= count:
                return bodies
    raise AssertionError


def test_clients_spread_over_two_brokers_and_survive_losing_one(pair: BrokerPair) -> None:
    """Sends go on while one is dead, which was a name server too; nothing acknowledged is lost."""
    with Admin(namesrv=pair.namesrv) as admin:
        admin.create_topic("orders")
    pair.wait_for_routes("orders", set(pair.brokers))
    sent: list[bytes] = []

    def send(producer: Producer) -> set[str]:
        names = set()
        for _ in range(COUNT):
            sent.append(b"%d" % len(sent))
            names.add(producer.send(Message("orders", sent[-1])).queue.broker_name)
        return names

    with Producer("writers", namesrv=pair.namesrv) as producer:
        assert send(producer) == set(pair.brokers)
        pair.brokers["halfmq-a"].kill()
        assert send(producer) == {"halfmq-b"}
    wait_for_route(pair.brokers["halfmq-b"].address, "orders", {"halfmq-b"})
    pair.brokers["halfmq-a"].start()
    pair.wait_for_routes("orders", set(pair.brokers))

    assert set(consume(pair.namesrv, "orders", len(sent))) == set(sent)


def test_an_operator_reaches_what_is_on_either_broker(pair: BrokerPair) -> None:
    """A topic on both, and one that only the broker has that got its first message."""
    with Admin(namesrv=pair.namesrv) as admin:
        admin.create_topic("both", queues=1)
        admin.create_group("readers")
        pair.wait_for_routes("both", set(pair.brokers))
        with Producer("writers", namesrv=pair.namesrv) as producer:
            sent = [producer.send(Message("both", b"%d" % n, keys="k")) for n in range(4)]
            (lonely,) = [producer.send(Message("lonely", b"x"))]
        queues = sorted({result.queue for result in sent})
        assert {queue.broker_name for queue in queues} == set(pair.brokers)

        assert [one.queue for one in admin.queues("both")] == queues
        assert {one.queue.broker_name for one in admin.queues("lonely")} == {
            lonely.queue.broker_name
        }
        assert admin.reset_offsets("readers", "both", "last") == dict.fromkeys(queues, 2)
        assert [one.lag for one in admin.offsets("readers", "both")] == [0, 0]
        assert sorted(one.body for one in admin.messages_with_key("both", "k")) == [
            b"%d" % number for number in range(4)
        ]
        for result in (*sent, lonely):
            found = admin.message(result.offset_message_id)
            assert found is not None
            assert found.queue == result.queue

        with Consumer("readers", {"both": "*"}, namesrv=pair.namesrv) as consumer:
            for queue in queues:
                admin.reset_offset("readers", queue, 1)
            taken = [consumer.receive(PATIENCE_S) for _ in queues]
            assert all(message is not None and message.ack() for message in taken)
            told = admin.running_consumer("readers", consumer.client_id)
            assert {one.queue for one in told.queues if one.queue.topic == "both"} == set(queues)


def test_a_transaction_is_decided_by_the_broker_that_has_its_half(pair: BrokerPair) -> None:
    with Admin(namesrv=pair.namesrv) as admin:
        admin.create_topic("orders", queues=1)
    pair.wait_for_routes("orders", set(pair.brokers))
    bodies = [b"%d" % number for number in range(8)]
    with TransactionProducer(
        "writers", namesrv=pair.namesrv, checker=lambda _: Decision.UNKNOWN
    ) as producer:
        for body in bodies:
            with producer.transaction(Message("orders", body)):
                pass  # the end of the block commits

    assert set(consume(pair.namesrv, "orders", len(bodies))) == set(bodies)


@pytest.mark.campaign
def test_an_official_broker_registers_with_halfmq(tmp_path: Path) -> None:
    """Our client and an unmodified Java client send to both brokers, and consume from both."""
    with contextlib.ExitStack() as stack:
        settings = {"brokerName": "halfmq-a", "registrationAddresses": "127.0.0.1"}
        ours = stack.enter_context(broker_process(tmp_path / "ours", **settings))
        _start_official(stack, tmp_path, namesrvAddr=ours.address)
        _check_mixed(ours.address, tmp_path)


@pytest.mark.campaign
def test_halfmq_registers_with_an_official_name_server(tmp_path: Path) -> None:
    """And is one broker among others there."""
    with contextlib.ExitStack() as stack:
        namesrv = _start_official(stack, tmp_path)
        settings = {"brokerName": "halfmq-a", "namesrvAddr": namesrv}
        stack.enter_context(broker_process(tmp_path / "ours", **settings))
        _check_mixed(namesrv, tmp_path)


def _start_official(stack: contextlib.ExitStack, home: Path, **settings: object) -> str:
    """Start an official broker; return the address of the name server that it comes with."""
    settings |= {"brokerName": "official", "autoCreateTopicEnable": "true"}
    class_path("5.3.3")
    broker = stack.enter_context(rocketmq_broker(home / "store", home / "home", **settings))
    return broker.namesrv


def _check_mixed(namesrv: str, home: Path) -> None:
    both = {"halfmq-a", "official"}
    wait_for_route(namesrv, "TBW102", both)
    with java_client(Kind("5.3.3"), namesrv, home / "java") as client:
        cluster = ["-c", "DefaultCluster", "-n"]
        update = ["updateTopic", "-t", "orders", "-r", "2", "-w", "2", *cluster, namesrv]
        (line,) = client.run("mqadmin", *update)
        assert line["text"].count("success") == 2, line
        wait_for_route(namesrv, "orders", both)
        (line,) = client.run("mqadmin", "clusterList", "-n", namesrv)
        assert all(name in line["text"] for name in both)
        consumed = [line["body"] for line in client.run("send") if line["event"] == "consumed"]
        assert sorted(consumed) == ["async-0", "async-1", "one-way", "sync-0", "sync-1"]
    with Producer("writers", namesrv=namesrv) as producer:
        sent = [b"%d" % number for number in range(COUNT)]
        results = [producer.send(Message("orders", body)) for body in sent]
    assert {result.queue.broker_name for result in results} == both
    assert set(consume(namesrv, "orders", COUNT)) == set(sent)
