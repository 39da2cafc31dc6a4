"""Several brokers: halfmq's that know each other, and official ones beside them.

Two halfmq brokers with the same `namesrvAddr` answer with the same routes; official brokers
register with a halfmq broker, and a halfmq broker with an official name server.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.processes import free_ports
from benchmarks.rocketmq_peer import PeerMissingError
from halfmq.client import Decision, Message
from halfmq.client.blocking import Admin, Consumer, Producer, TransactionProducer
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.remoting.admin_headers import CreateTopicRequestHeader
from halfmq.remoting.bodies import decode_route
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import GetRouteInfoRequestHeader
from tests.support.features import feature
from tests.support.go_client import GoMissingError, go_client, going
from tests.support.java_clients import JavaMissingError, Kind, class_path, java_client
from tests.support.patience import PATIENCE_S
from tests.support.rocketmq_broker import Wire, rocketmq_broker

POLL_S = 0.1
COUNT = 64


def wait_for_route(address: str, topic: str, names: set[str]) -> None:
    """Return when the name server at an address has the topic on just these brokers."""
    deadline = time.monotonic() + PATIENCE_S
    found: set[str] = set()
    while found != names:
        assert time.monotonic() < deadline, f"{address} knows {topic} on {found}, not {names}"
        time.sleep(POLL_S)
        with Wire(address) as wire:
            header = GetRouteInfoRequestHeader(topic=topic)
            answer = wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        route = decode_route(answer.body) if answer.code == 0 else None
        found = {queues.broker_name for queues in route.queue_datas} if route else set()


class Pair:
    """Two halfmq brokers that register with each other."""

    def __init__(self, first: BrokerProcess, second: BrokerProcess) -> None:
        self.brokers = {"halfmq-a": first, "halfmq-b": second}
        self.namesrv = f"{first.address};{second.address}"

    def wait_for_routes(self, topic: str, names: set[str]) -> None:
        for name, broker in self.brokers.items():
            if name in names:
                wait_for_route(broker.address, topic, names)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    first = free_ports(6) + 2
    ports = first, first + 3
    namesrv = ";".join(f"127.0.0.1:{port}" for port in ports)
    with contextlib.ExitStack() as stack:
        brokers = [
            stack.enter_context(
                broker_process(
                    tmp_path / name, brokerName=name, listenPort=port, namesrvAddr=namesrv
                )
            )
            for name, port in zip(("halfmq-a", "halfmq-b"), ports, strict=True)
        ]
        pair = Pair(*brokers)
        pair.wait_for_routes("TBW102", set(pair.brokers))
        yield pair


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


def test_clients_spread_over_two_brokers_and_survive_losing_one(pair: Pair) -> None:
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


def test_an_operator_reaches_what_is_on_either_broker(pair: Pair) -> None:
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


def test_a_transaction_is_decided_by_the_broker_that_has_its_half(pair: Pair) -> None:
    """Whichever it is."""
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


@feature("a broker refuses or dies: its producers retry at another", "Java 5.3.3", "Java 4.9.8")
@pytest.mark.campaign
@pytest.mark.parametrize("version", ["5.3.3", "4.9.8"])
def test_java_producers_retry_at_another_broker(pair: Pair, version: str, tmp_path: Path) -> None:
    """When one refuses, as its topic is read-only now, and when it is killed: no send fails."""
    try:
        class_path(version)
    except JavaMissingError as missing:
        pytest.skip(f"{missing}; the Java client {version} is NOT tested")
    second = pair.brokers["halfmq-b"]
    losses: dict[str, Callable[[], None]] = {
        "closed": partial(_close, second.address, "closed"),
        "orders": second.kill,
    }
    with Admin(namesrv=pair.namesrv) as admin:
        for topic in losses:
            admin.create_topic(topic)
    for topic in losses:
        pair.wait_for_routes(topic, set(pair.brokers))
    with java_client(Kind(version), pair.namesrv, tmp_path / "java") as client:
        for topic, lose in losses.items():
            run = client.start("retrying", topic)
            client.said(run, "both")
            lose()  # the client knows the old route for another 30 s
            assert client.said(run, "one")["broker"] == "halfmq-a"
            client.lines(run)


@feature("a broker refuses or dies: its producers retry at another", "Go 2.1.2")
@pytest.mark.campaign
def test_go_producers_retry_at_another_broker(pair: Pair, tmp_path: Path) -> None:
    """When one is killed, no send fails."""
    try:
        go_client()
    except GoMissingError as missing:
        pytest.skip(f"{missing}; the Go client is NOT tested")
    with Admin(namesrv=pair.namesrv) as admin:
        admin.create_topic("orders")
    pair.wait_for_routes("orders", set(pair.brokers))
    with going(pair.namesrv, tmp_path, "retrying", "orders") as client:
        client.until("spread", brokers=2)
        pair.brokers["halfmq-b"].kill()
        client.until("spread", brokers=1, last="halfmq-a")


def _close(address: str, topic: str) -> None:
    """Have one broker take no more messages of a topic."""
    header = CreateTopicRequestHeader(
        topic=topic,
        default_topic="TBW102",
        read_queue_nums=4,
        write_queue_nums=4,
        perm=4,
        topic_filter_type="SINGLE_TAG",
    )
    with Wire(address) as wire:
        assert wire.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, header).code == 0


@pytest.mark.campaign
def test_an_official_broker_registers_with_halfmq(tmp_path: Path) -> None:
    """Our client and an unmodified Java client send to both brokers, and consume from both."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(broker_process(tmp_path / "ours", brokerName="halfmq-a"))
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
    try:
        class_path("5.3.3")
        broker = stack.enter_context(rocketmq_broker(home / "store", home / "home", **settings))
    except (PeerMissingError, JavaMissingError) as missing:
        pytest.skip(f"{missing}; official brokers beside ours are NOT tested")
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
