"""Consumers in order: one message of a queue at a time, under the lock of its group."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from halfmq.client import (
    ClientConfig,
    ConfigurationError,
    Consumer,
    Message,
    MessageView,
    Producer,
    RetryPolicy,
)
from halfmq.client.consuming import assignment, locks
from halfmq.remoting.bodies import QueueKey
from halfmq.remoting.codes import RequestCode
from tests.support.client_loops import on_both_loops
from tests.support.fake_broker import FakeBroker, Refuse, fake_broker, until
from tests.support.patience import PATIENCE_S

CONFIG = ClientConfig(
    reconnect_delay_min=0.01,
    offset_commit_interval=0.02,
    pull_suspend=2.0,
    retry_delay=0.02,
)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "REBALANCE_RETRY", 0.05)


def ordered(broker: FakeBroker, **arguments: Any) -> Consumer:
    arguments = {"subscriptions": {"orders": "*"}, "config": CONFIG, **arguments}
    return Consumer(
        "billing", namesrv=broker.address, start_from="first", ordered=True, **arguments
    )


async def publish(broker: FakeBroker, *bodies: str) -> None:
    """Send each body to the queue of its first letter."""
    async with Producer("g", namesrv=broker.address) as producer:
        for body in bodies:
            await producer.send(Message("orders", body.encode()), order_key=body[0])


async def next_of(consumer: Consumer) -> tuple[str, MessageView]:
    message = await consumer.receive(timeout=PATIENCE_S)
    assert message is not None
    return message.body.decode(), message


@on_both_loops
async def test_a_message_comes_when_the_one_before_it_is_settled() -> None:
    """Also if it failed, or was rejected; other queues go on."""
    async with fake_broker() as broker:
        await publish(broker, "a1", "a2", "a3", "b1")
        async with ordered(broker) as consumer:
            held = dict([await next_of(consumer), await next_of(consumer)])
            assert set(held) == {"a1", "b1"}
            assert await consumer.receive(0.05) is None

            await held["a1"].retry()
            body, again = await next_of(consumer)
            assert (body, again.delivery_attempt) == ("a1", 2)
            await again.reject("it cannot be")
            body, second = await next_of(consumer)
            assert body == "a2"
            assert await second.ack()
            body, third = await next_of(consumer)
            assert body == "a3"
            assert await third.ack()
            assert await held["b1"].ack()
        dead = broker.requests_of(RequestCode.CONSUMER_SEND_MSG_BACK)
        assert len(dead) == 1  # a retry stays here


async def test_run_keeps_the_order_of_each_queue_through_failures() -> None:
    """The second failure of a message is its last with retries_max=1: it is dead, others go on."""
    async with fake_broker() as broker:
        bodies = [f"{key}{number}" for number in range(6) for key in "abc"]
        await publish(broker, *bodies)
        tried: list[str] = []
        failed: set[str] = set()

        async def handle(message: MessageView) -> None:
            body = message.body.decode()
            tried.append(body)
            if body == "a2" or (body[1] == "3" and body not in failed):
                failed.add(body)
                raise ValueError(body)
            if tried.count("a5") and tried.count("b5") and tried.count("c5"):
                await consumer.stop()

        async with ordered(broker, retries_max=1) as consumer:
            policy = RetryPolicy(delays={KeyError: [timedelta(0)]})
            summary = await asyncio.wait_for(
                consumer.run(handle, policy=policy, signals=False), PATIENCE_S
            )

    for key in "abc":
        own = list(dict.fromkeys(body for body in tried if body[0] == key))
        assert own == [f"{key}{number}" for number in range(6)]
        assert tried.count(f"{key}3") == 2
    assert tried.count("a2") == 2
    assert summary.left == 0
    assert len(broker.requests_of(RequestCode.CONSUMER_SEND_MSG_BACK)) == 1


async def test_a_queue_that_another_member_has_locked_is_left_alone() -> None:
    """It is consumed as soon as it is free."""
    async with fake_broker(orders=1) as broker:
        await publish(broker, "a1")
        key = QueueKey(topic="orders", broker_name="broker-a", queue_id=0)
        broker.locks[key] = "10.0.0.1@other"
        async with ordered(broker) as consumer:
            await until(lambda: len(broker.requests_of(RequestCode.LOCK_BATCH_MQ)) > 3)
            assert [one.topic for one in consumer.assignment] == ["%RETRY%billing"]
            del broker.locks[key]
            body, message = await next_of(consumer)
            assert body == "a1"
            assert broker.locks[key] == consumer.client_id
            await message.ack()
        assert broker.locks == {}
        assert broker.offsets["billing", "orders", 0] == 1


async def test_a_queue_moves_when_the_message_in_hand_is_settled() -> None:
    """The new member begins with the next one."""
    async with fake_broker(orders=2) as broker:
        await publish(broker, "a1", "b1", "a2", "b2")
        async with ordered(broker) as first:
            held = dict([await next_of(first), await next_of(first)])
            async with ordered(broker) as second:
                await until(lambda: len(first.assignment) < 3)
                early = asyncio.ensure_future(next_of(second))
                await asyncio.sleep(0.1)
                assert not early.done()
                for message in held.values():
                    assert await message.ack()
                found = {(await early)[0], (await next_of(first))[0]}
                assert found == {"a2", "b2"}


async def test_a_lock_that_is_not_renewed_ends_the_delivery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the broker gives it to another; later it is locked again, and nothing is lost."""
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.3)
    monkeypatch.setattr(assignment, "LOCK_RENEWAL", 0.05)
    async with fake_broker(orders=1) as broker:
        await publish(broker, "a1", "a2")
        async with ordered(broker) as consumer:
            _, message = await next_of(consumer)
            broker.fail(RequestCode.LOCK_BATCH_MQ, *[Refuse(1)] * 20)
            await until(lambda: consumer.assignment == [])
            assert not await message.ack()
            broker.forgive()
            for expected in ("a1", "a2"):
                body, message = await next_of(consumer)
                assert body == expected
                assert await message.ack()


async def test_ordered_is_a_truth_value() -> None:
    with pytest.raises(ConfigurationError, match="ordered is 1"):
        Consumer("g", {"orders": "*"}, ordered=1)  # type: ignore[arg-type]
