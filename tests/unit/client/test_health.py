"""Health and events of clients, and the wait for a broker."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from halfmq.client import (
    ClientConfig,
    ConfigurationError,
    ConnectError,
    Consumer,
    ConsumerEvent,
    Message,
    Producer,
    blocking,
)
from halfmq.client.events import (
    Assigned,
    Connected,
    ConnectionLost,
    Lagging,
    Rejected,
    Retried,
    Revoked,
)
from halfmq.client.testing import free_port
from halfmq.remoting.codes import RequestCode
from tests.support.broker_thread import BrokerThread
from tests.support.client_loops import on_both_loops
from tests.support.client_parts import session_of
from tests.support.fake_broker import FakeBroker, fake_broker, until
from tests.support.patience import PATIENCE_S

CONFIG = ClientConfig(
    reconnect_delay_min=0.01,
    reconnect_delay_max=0.02,
    offset_commit_interval=0.02,
    retry_delay=0.02,
    pull_suspend=0.2,
    lagging_from=4,
)


def consumer_of(broker: FakeBroker, **arguments: Any) -> Consumer:
    arguments = {"subscriptions": {"orders": "*"}, "config": CONFIG, **arguments}
    return Consumer("billing", namesrv=broker.address, start_from="first", **arguments)


async def publish(broker: FakeBroker, count: int) -> None:
    async with Producer("g", namesrv=broker.address) as producer:
        for number in range(count):
            await producer.send(Message("orders", b"%d" % number), order_key="one")


@on_both_loops
async def test_the_health_of_a_consumer_names_its_progress_and_what_it_waits_for() -> None:
    """A probe can tell a consumer without work from one that is stuck."""
    async with fake_broker() as broker:
        await publish(broker, 3)
        config = replace(CONFIG, cached_messages_max=3)
        consumer = consumer_of(broker, config=config)
        assert (await consumer.health()).waiting_for == ("start",)
        async with consumer:
            first = await consumer.receive(PATIENCE_S)
            second = await consumer.receive(PATIENCE_S)
            assert first is not None
            assert second is not None
            stuck = await consumer.health()
            assert stuck.connected
            (wait,) = stuck.waiting_for
            assert wait == f"acknowledgements in {first.queue}: 3 messages are in hand"
            (queue,) = [one for one in stuck.queues if one.queue == first.queue]
            assert (queue.acknowledged_at, queue.unacknowledged) == (None, 3)

            assert await first.ack()
            assert await second.ack()
            third = await consumer.receive(PATIENCE_S)
            assert third is not None
            assert await third.ack()
            await until(lambda: len(broker.requests_of(RequestCode.PULL_MESSAGE)) > 5)
            well = await consumer.health()
            (queue,) = [one for one in well.queues if one.queue == first.queue]
            assert well.waiting_for == ()
            assert (queue.unacknowledged, queue.lag) == (0, 0)
            assert queue.acknowledged_at is not None
            assert queue.pulled_at is not None

            await consumer.pause("orders")
            paused = await consumer.health()
            assert f"{first.queue} to be resumed" in paused.waiting_for

            await broker.stop()
            await until(lambda: not session_of(consumer).brokers.get_open(broker.address))
            lost = await consumer.health()
            assert not lost.connected
            assert lost.waiting_for[0].startswith(f"broker {broker.address}: ")


@on_both_loops
async def test_what_becomes_of_connections_queues_and_messages_is_told() -> None:
    """In the order in which it happens."""
    async with fake_broker() as broker:
        broker.queues["orders"] = [[]]
        await publish(broker, 6)
        events: list[ConsumerEvent] = []
        async with consumer_of(broker, on_event=events.append) as consumer:
            await until(lambda: any(isinstance(one, Lagging) for one in events))
            failed, bad = await consumer.receive_many(2, PATIENCE_S)
            await failed.retry(reason="away")
            await bad.reject("wrong")
            await broker.stop()
            await until(lambda: isinstance(events[-1], ConnectionLost))
            await broker.restart()
            await until(lambda: isinstance(events[-1], Connected))

        of_topic = [one for one in events if getattr(one, "topic", "orders") == "orders"]
        names, queue = " ".join(event.name for event in of_topic), failed.queue
        assert names == (
            "connected assigned lagging retried rejected connection_lost connected revoked"
        )
        assert of_topic[1:5] == [
            Assigned("billing", "orders", (queue,)),
            Lagging("billing", queue, 6),
            Retried("billing", queue, 0, failed.message_id, 1, "away"),
            Rejected("billing", queue, 1, bad.message_id, 1, "wrong"),
        ]
        assert isinstance(of_topic[-1], Revoked)
        assert "orders@broker-a:0 was rejected after attempt 1: wrong" in str(of_topic[4])


@on_both_loops
async def test_a_service_waits_for_its_broker() -> None:
    """Before its start, and longer than ``send_timeout``."""
    port = free_port()
    broker = FakeBroker()
    config = replace(CONFIG, send_timeout=0.05, send_attempts_max=1)
    producer = Producer("g", namesrv=f"127.0.0.1:{port}", config=config)
    with pytest.raises(ConnectError, match="is the broker running"):
        await producer.wait_until_available(0.1)
    with pytest.raises(ConfigurationError, match="timeout"):
        await producer.wait_until_available(-1)

    waiting = asyncio.ensure_future(producer.wait_until_available(PATIENCE_S))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await broker.start(port)
    try:
        await waiting
        async with producer:
            await producer.wait_until_available(PATIENCE_S)
            assert (await producer.health()).connected
    finally:
        await broker.stop()


def test_the_blocking_client_waits_and_tells_its_health_too() -> None:
    """Also before its start, when it has no thread."""
    with closing(BrokerThread()) as served:
        address = served.broker.address
        consumer = blocking.Consumer("billing", {"orders": "*"}, namesrv=address)
        assert consumer.health().waiting_for == ("start",)
        consumer.wait_until_available(PATIENCE_S)
        assert "halfmq-client" not in [thread.name for thread in threading.enumerate()]
        with consumer:
            assert consumer.health().connected
