"""What consumers subscribe to, against a broker of its own process."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from halfmq.client import (
    Admin,
    ClientConfig,
    Consumer,
    ConsumerEvent,
    Message,
    Producer,
    TopicMissing,
    UnequalSubscriptionsError,
    blocking,
)
from halfmq.client.net.connection import BrokerConnection
from halfmq.client.net.connection_pool import ConnectionPool
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.remoting.bodies import (
    ConsumerData,
    HeartbeatData,
    SubscriptionData,
    encode_heartbeat,
    subscription_data,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import HeartbeatRequestHeader
from tests.support.consuming_process import consuming
from tests.support.fake_broker import until
from tests.support.patience import PATIENCE_S
from tests.support.python import python
from tests.support.usual_headers import pull_header

_numbers = itertools.count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("broker")) as started:
        yield started


@pytest.fixture
def topic() -> str:
    return f"orders-{next(_numbers)}"


@asynccontextmanager
async def official_client(broker: BrokerProcess) -> AsyncIterator[BrokerConnection]:
    """A connection on which the test sends what an official client would, with JSON headers."""
    pool = ConnectionPool(ClientConfig(), {})
    try:
        yield await pool.get(broker.address, 3.0)
    finally:
        await pool.close()


async def heartbeat(
    connection: BrokerConnection,
    group: str,
    *subscriptions: SubscriptionData,
    client_id: str = "java",
) -> RemotingCommand:
    consumer = ConsumerData(group_name=group, subscription_data_set=subscriptions)
    body = encode_heartbeat(HeartbeatData(client_id=client_id, consumer_data_set=(consumer,)))
    return await connection.request(
        RequestCode.HEART_BEAT, HeartbeatRequestHeader(), body, seconds=3
    )


async def pull(
    connection: BrokerConnection,
    group: str,
    topic: str,
    queue_id: int,
    subscription: str | None = None,
) -> RemotingCommand:
    """Pull without waiting; with ``subscription`` as C++ clients do, else as registered."""
    header = pull_header(
        consumer_group=group,
        topic=topic,
        queue_id=queue_id,
        sys_flag=0 if subscription is None else 4,
        subscription=subscription,
    )
    return await connection.request(RequestCode.PULL_MESSAGE, header, seconds=3)


@pytest.mark.parametrize(
    ("kind", "expression", "code", "remark"),
    [
        ("SQL92", "a > 5", ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
        ("SQL92", "a is null", ResponseCode.SUCCESS, "FOUND"),
        ("SQL92", "a > ", ResponseCode.FILTER_DATA_NOT_EXIST, "SQL92 filter is wrong"),
        ("TAG", "a > 5", ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
        ("TAG", "a,b || ", ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
        ("TAG", "||", ResponseCode.SUCCESS, "FOUND"),
        ("", "", ResponseCode.SUCCESS, "FOUND"),
    ],
)
async def test_official_clients_are_refused_a_wrong_filter_and_no_odd_tags(
    broker: BrokerProcess, topic: str, kind: str, expression: str, code: int, remark: str
) -> None:
    """They hear what an official broker says, and what is wrong with an SQL92 filter."""
    async with Producer("g", namesrv=broker.address) as producer:
        sent = await producer.send(Message(topic, b"x"))
    wanted = SubscriptionData(topic=topic, sub_string=expression, expression_type=kind)
    async with official_client(broker) as connection:
        heard = await heartbeat(connection, f"g-{topic}", wanted)
        answer = await pull(connection, f"g-{topic}", topic, sent.queue.queue_id)

    assert heard.code == ResponseCode.SUCCESS
    assert answer.code == code
    assert remark in (answer.remark or "")


@pytest.mark.parametrize("broadcasting", [False, True])
async def test_a_consumer_that_is_first_gets_the_message_that_creates_its_topic(
    broker: BrokerProcess, topic: str, broadcasting: bool
) -> None:
    """It says which topic is missing and consumes the others meanwhile."""
    events: list[ConsumerEvent] = []
    later = f"{topic}-later"
    consumer = Consumer(
        f"g-{topic}",
        {later: "*", topic: "now"},
        broadcasting=broadcasting,
        on_event=events.append,
        namesrv=broker.address,
    )
    async with Producer("g", namesrv=broker.address) as producer:
        await producer.send(Message(topic, b"before"))
        async with consumer:
            await until(lambda: any(queue.topic == topic for queue in consumer.assignment))
            await producer.send(Message(topic, b"other", tags="now"))
            other = await consumer.receive(timeout=PATIENCE_S)
            await until(lambda: any(isinstance(one, TopicMissing) for one in events))
            await producer.send(Message(later, b"first"))
            first = await consumer.receive(timeout=PATIENCE_S)

    assert other is not None
    assert first is not None
    assert (other.body, first.body) == (b"other", b"first")
    (event,) = [one for one in events if isinstance(one, TopicMissing)]
    assert event.topic == later
    assert topic in event.nearest


def halfmq(broker: BrokerProcess, *words: str) -> str:
    """What the operator's command prints."""
    done = python("-m", "halfmq.command", *words, "--namesrv", broker.address, check=True)
    return done.stdout


def test_nobody_can_miss_that_two_members_subscribe_differently(
    broker: BrokerProcess, topic: str
) -> None:
    """Both are told, the broker logs it once, the command shows it; a deployment ends it."""
    group = f"g-{topic}"
    with blocking.Producer("g", namesrv=broker.address) as producer:
        producer.send(Message(topic, b"before", tags="created"))
    place = (broker.address, group, topic)
    with ExitStack() as running:
        old = running.enter_context(consuming(*place, "created"))
        names = {old: old.next("ready")}
        new = running.enter_context(consuming(*place, "paid || created"))
        names[new] = new.next("ready")
        for one, other in ((old, new), (new, old)):
            event = one.next("event")
            assert event["name"] == "unequal_subscriptions"
            assert (event["client_id"], event["other_client_id"]) == (names[one], names[other])
            filters = {event["filter"], event["other_filter"]}
            assert filters & {"paid || created", "created || paid"}
            assert "created" in filters
        start = f"event=unequal_subscriptions group={group} "
        (line,) = [line for line in broker.log.splitlines() if start in line]
        for text in (*names.values(), "'created'", "'created || paid'"):
            assert text in line
        (row,) = [row for row in halfmq(broker, "group", "list").splitlines() if group in row]
        assert row.split()[:6] == [group, "clustering", "2", "0", "UNEQUAL:", topic]
        shown = halfmq(broker, "group", "show", group)
        (row,) = [row for row in shown.splitlines() if names[new] in row]
        assert row.endswith(f"{topic}  created || paid")
        told = json.loads(halfmq(broker, "group", "show", group, "--json"))
        assert told["unequal_topics"] == [topic]
        assert {one["client_id"]: one["filters"][topic] for one in told["members"]} == {
            names[old]: "created",
            names[new]: "created || paid",
        }

        old.end()
        missing = {f"{number}" for number in range(8)}
        with blocking.Producer("g", namesrv=broker.address) as producer:
            for body in sorted(missing):
                producer.send(Message(topic, body.encode(), tags="paid"))
        while missing:
            missing.discard(new.next("message"))
        assert f"event=subscriptions_equal group={group}" in broker.log


@pytest.fixture
def strict_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path, refuseUnequalSubscriptions=True) as started:
        yield started


async def test_a_consumer_that_is_refused_is_told_why(strict_broker: BrokerProcess) -> None:
    """Its start fails, of ours and of official clients; when the others have left, it may come."""
    address = strict_broker.address
    async with Producer("g", namesrv=address) as producer:
        sent = await producer.send(Message("orders", b"x", tags="paid"))
    async with official_client(strict_broker) as connection:
        async with Consumer("billing", {"orders": "created"}, namesrv=address) as first:
            late = Consumer("billing", {"orders": "paid"}, namesrv=address)
            with pytest.raises(UnequalSubscriptionsError) as refusal:
                await late.start()
            error = refusal.value
            assert (error.code, error.retriable) == (ResponseCode.NO_PERMISSION, True)
            assert (error.topic, error.filter, error.other_filter) == ("orders", "paid", "created")
            assert error.other_client_id == first.client_id

            wanted = subscription_data("orders", "paid || shipped")
            answer = await heartbeat(connection, "billing", wanted)
            refused = await pull(connection, "billing", "orders", sent.queue.queue_id)
            for one in (answer, refused):
                assert one.code == ResponseCode.NO_PERMISSION
                assert one.remark == (
                    "the members of group billing subscribe differently to topic orders: "
                    f"java to 'paid || shipped', {first.client_id} to 'created'; "
                    "all members of a group must subscribe to the same"
                )
            async with Admin(namesrv=address) as admin:
                (group,) = await admin.groups()
            assert group.unequal_topics == ()
            assert [(one.client_id, one.refused) for one in group.members] == sorted(
                [("java", True), (first.client_id, False)]
            )
        assert (await heartbeat(connection, "billing", wanted)).code == ResponseCode.SUCCESS
        found = await pull(connection, "billing", "orders", sent.queue.queue_id)
        assert found.code == ResponseCode.SUCCESS
