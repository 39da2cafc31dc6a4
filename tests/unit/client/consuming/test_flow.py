"""Batches, pauses, positions and seeks of a consumer."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from halfmq.client import (
    ClientClosedError,
    ClientConfig,
    ConfigurationError,
    Consumer,
    Message,
    MessageQueue,
    Producer,
    QueuePosition,
)
from tests.support.client_loops import on_both_loops
from tests.support.fake_broker import FakeBroker, fake_broker, until
from tests.support.patience import PATIENCE_S

CONFIG = ClientConfig(reconnect_delay_min=0.01, offset_commit_interval=0.02, pull_suspend=2.0)
RETRIES = MessageQueue("%RETRY%billing", "broker-a", 0)


def consumer_of(broker: FakeBroker, **arguments: Any) -> Consumer:
    arguments = {"subscriptions": {"orders": "*", "bills": "*"}, **arguments}
    return Consumer(
        "billing", namesrv=broker.address, start_from="first", config=CONFIG, **arguments
    )


async def publish(broker: FakeBroker, topic: str, *bodies: str) -> MessageQueue:
    """Send messages to one queue of a topic, in order; return the queue."""
    async with Producer("g", namesrv=broker.address) as producer:
        results = [
            await producer.send(Message(topic, body.encode()), order_key="one") for body in bodies
        ]
    return results[0].queue


async def take(consumer: Consumer, count: int) -> list[str]:
    """Return the bodies of so many messages, acknowledged, as they come in batches."""
    found: list[str] = []
    while len(found) < count:
        messages = await consumer.receive_many(count - len(found), PATIENCE_S)
        assert messages, f"only {found} came"
        for message in messages:
            found.append(message.body.decode())
            assert await message.ack()
    return found


@on_both_loops
async def test_a_batch_has_what_is_there_and_at_most_so_many() -> None:
    """It waits for the first message only, and is empty after the timeout or a stop."""
    async with fake_broker() as broker:
        await publish(broker, "orders", "1", "2", "3")
        await publish(broker, "bills", "b")
        async with consumer_of(broker) as consumer:
            await until(lambda: len(consumer.assignment) > 1)
            assert sorted(await take(consumer, 4)) == ["1", "2", "3", "b"]
            assert await consumer.receive_many(2, 0.01) == []
            await publish(broker, "orders", *"45678")
            assert (await take(consumer, 2)) == ["4", "5"]
            assert (await take(consumer, 3)) == ["6", "7", "8"]
            waiting = asyncio.ensure_future(consumer.receive_many(2))
            await asyncio.sleep(0)
            await consumer.stop()
            assert await waiting == []


async def test_a_paused_topic_waits_while_others_are_consumed() -> None:
    """Nothing of it is delivered, not even what was pulled before; later it comes in its order."""
    async with fake_broker() as broker:
        await publish(broker, "orders", *"123")
        async with consumer_of(broker) as consumer:
            assert await take(consumer, 1) == ["1"]
            await consumer.pause("orders")
            await publish(broker, "orders", *"45")
            queue = await publish(broker, "bills", "b")
            assert await take(consumer, 1) == ["b"]
            assert await consumer.receive_many(9, 0.05) == []

            await consumer.pause()
            await consumer.resume("orders")
            assert await take(consumer, 4) == list("2345")
            await publish(broker, "bills", "c")
            assert await consumer.receive(0.05) is None
            waiting = asyncio.ensure_future(take(consumer, 1))
            await consumer.resume()
            assert await waiting == ["c"]
            await consumer.pause(queue)
            await publish(broker, "bills", "d")
            assert await consumer.receive(0.05) is None
            await consumer.resume(queue)
            assert await take(consumer, 1) == ["d"]


async def test_positions_tell_how_far_the_consumer_is() -> None:
    """The first message that is not acknowledged, and the end."""
    async with fake_broker() as broker:
        queue = await publish(broker, "orders", *"123")
        async with consumer_of(broker, subscriptions={"orders": "*"}) as consumer:
            first = await consumer.receive()
            second = await consumer.receive()
            await second.ack()
            found = {one.queue: one for one in await consumer.positions()}
            assert found[queue] == QueuePosition(queue, 0, 3)
            assert found[queue].lag == 3
            await first.ack()
            found = {one.queue: one for one in await consumer.positions()}
            assert found[queue].lag == 1
            assert sum(one.lag for one in found.values()) == 1


async def test_a_seek_repeats_or_skips_and_moves_the_groups_offset() -> None:
    """By offset, to an end, and of a topic."""
    async with fake_broker() as broker:
        queue = await publish(broker, "orders", *"1234")
        place = ("billing", "orders", queue.queue_id)
        async with consumer_of(broker, subscriptions={"orders": "*"}) as consumer:
            assert await take(consumer, 4) == list("1234")
            await until(lambda: broker.offsets.get(place) == 4)

            assert await consumer.seek(queue, 2) == {queue: 2}
            await until(lambda: broker.offsets.get(place) == 2)
            assert await take(consumer, 2) == list("34")
            moved = await consumer.seek("orders", "first")
            assert moved[queue] == 0
            assert set(moved) == set(consumer.assignment) - {RETRIES}
            before = await consumer.receive()
            assert (await consumer.seek("orders", "last"))[queue] == 4
            assert not await before.ack()
            await publish(broker, "orders", "5")
            assert await take(consumer, 1) == ["5"]


async def test_wrong_arguments_are_named_before_anything_is_sent() -> None:
    async with fake_broker() as broker:
        queue = await publish(broker, "orders", "1")
        other = MessageQueue("orders", "broker-x", 7)
        consumer = consumer_of(broker)
        with pytest.raises(ClientClosedError):
            await consumer.pause()
        async with consumer:
            await until(lambda: queue in consumer.assignment)
            sent = len(broker.requests)
            for call, name in (
                (consumer.pause("order"), "where is 'order', expected a topic of orders, bills"),
                (consumer.resume(other._replace(topic="x")), "where is MessageQueue"),
                (consumer.seek("orders", 3), "where is 'orders', expected a queue, because"),
                (consumer.seek(queue, -1), "to is -1"),
                (consumer.seek(queue, "end"), "to is 'end', expected \"first\""),  # type: ignore[arg-type]
                (consumer.seek(other, 1), "where is MessageQueue"),
                (consumer.seek(queue, datetime(2026, 1, 1)), "to is datetime"),  # noqa: DTZ001
                (consumer.receive_many(0), "messages_max is 0"),
                (consumer.receive_many(2, -1), "timeout is -1"),
            ):
                with pytest.raises(ConfigurationError) as raised:
                    await call
                assert str(raised.value).startswith(name)
            asked = {one.code for one in broker.requests[sent:]}
            assert not asked & {29, 30, 31}  # offsets: SEARCH, MAX, MIN
            assert await consumer.seek(queue, datetime.now(UTC))
