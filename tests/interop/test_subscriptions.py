"""What consumers subscribe to, against a broker of its own process."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from halfmq.client import ClientConfig, Consumer, ConsumerEvent, Message, Producer, TopicMissing
from halfmq.client.connection import Connection, ConnectionPool
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.remoting.bodies import ConsumerData, HeartbeatData, SubscriptionData, encode_heartbeat
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import HeartbeatRequestHeader, PullMessageRequestHeader
from tests.support.fake_broker import until

SQL_REMARK = "The broker does not support consumer to filter message by SQL92"
WAIT = 20.0
"""Seconds after which a message that has not come will not come; the machine may be busy."""

_numbers = itertools.count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("broker")) as started:
        yield started


@pytest.fixture
def topic() -> str:
    return f"orders-{next(_numbers)}"


@asynccontextmanager
async def official_client(broker: BrokerProcess) -> AsyncIterator[Connection]:
    """A connection on which the test sends what an official client would, with JSON headers."""
    pool = ConnectionPool(ClientConfig(), {})
    try:
        yield await pool.get(broker.address, 3.0)
    finally:
        await pool.close()


async def heartbeat(
    connection: Connection, group: str, *subscriptions: SubscriptionData, client_id: str = "java"
) -> RemotingCommand:
    consumer = ConsumerData(group_name=group, subscription_data_set=subscriptions)
    body = encode_heartbeat(HeartbeatData(client_id=client_id, consumer_data_set=(consumer,)))
    return await connection.request(
        RequestCode.HEART_BEAT, HeartbeatRequestHeader(), body, seconds=3
    )


async def pull(
    connection: Connection, group: str, topic: str, queue_id: int, subscription: str | None = None
) -> RemotingCommand:
    """Pull without waiting; with ``subscription`` as C++ clients do, else as registered."""
    header = PullMessageRequestHeader(
        consumer_group=group,
        topic=topic,
        queue_id=queue_id,
        queue_offset=0,
        max_msg_nums=32,
        sys_flag=0 if subscription is None else 4,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription=subscription,
        sub_version=0,
    )
    return await connection.request(RequestCode.PULL_MESSAGE, header, seconds=3)


@pytest.mark.parametrize(
    ("kind", "expression", "code", "remark"),
    [
        ("SQL92", "a > 5", ResponseCode.SYSTEM_ERROR, SQL_REMARK),
        ("TAG", "a > 5", ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
        ("TAG", "a,b || ", ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
        ("TAG", "||", ResponseCode.SUCCESS, "FOUND"),
        ("", "", ResponseCode.SUCCESS, "FOUND"),
    ],
)
async def test_official_clients_are_refused_sql_and_no_odd_tags(
    broker: BrokerProcess, topic: str, kind: str, expression: str, code: int, remark: str
) -> None:
    """They hear what an official broker without property filters says: 1, with the reason."""
    async with Producer("g", namesrv=broker.address) as producer:
        sent = await producer.send(Message(topic, b"x"))
    wanted = SubscriptionData(topic=topic, sub_string=expression, expression_type=kind)
    async with official_client(broker) as connection:
        heard = await heartbeat(connection, f"g-{topic}", wanted)
        answer = await pull(connection, f"g-{topic}", topic, sent.queue.queue_id)

    assert heard.code == ResponseCode.SUCCESS
    assert (answer.code, answer.remark) == (code, remark)


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
            other = await consumer.receive(timeout=WAIT)
            await until(lambda: bool(events))
            await producer.send(Message(later, b"first"))
            first = await consumer.receive(timeout=WAIT)

    assert other is not None
    assert first is not None
    assert (other.body, first.body) == (b"other", b"first")
    (event,) = events
    assert isinstance(event, TopicMissing)
    assert event.topic == later
    assert topic in event.nearest
