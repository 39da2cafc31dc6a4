"""Race windows of consumers: a crash between work and offset, and queue locks when clocks step."""

from __future__ import annotations

import json
import sqlite3

import pytest

from halfmq.client import Consumer, MessageView
from halfmq.remoting.codes import RequestCode
from tests.support.peers import COMMIT
from tests.support.race_windows import DAY_MS, Rig, windowed


async def _first(consumer: Consumer) -> MessageView:
    async for message in consumer:
        return message
    raise AssertionError("the consumer ended")


@windowed()
async def test_w29_an_inbox_keyed_by_the_transaction_id_sees_each_message_once(rig: Rig) -> None:
    """Delivered again after a crash, the message has the same id, that of its half."""
    producer = await rig.peer()
    half = await producer.prepare("K1")
    await producer.end(half, COMMIT)
    inbox = sqlite3.connect(":memory:")
    inbox.execute("create table inbox (half_message_id text primary key)")
    deliveries, worked = [], 0

    for _ in range(2):
        consumer = Consumer("billing", {"orders": "*"}, start_from="first", config=rig.client())
        await rig.patiently(consumer.__aenter__())
        message = await rig.patiently(_first(consumer))
        deliveries.append(message)
        with inbox:
            row = [message.half_message_id]
            worked += inbox.execute("insert or ignore into inbox values (?)", row).rowcount
        await rig.patiently(consumer.close())  # without ack: it had done its work, and died
        await rig.kill()

    assert worked == 1
    assert [one.half_message_id for one in deliveries] == [half.message_id] * 2
    assert deliveries[0].inbox_id == deliveries[1].inbox_id


@windowed()
async def test_w29_a_retry_keeps_the_transaction_id(rig: Rig) -> None:
    """A message sent back for a retry is a new record with the same transaction id."""
    producer = await rig.peer()
    half = await producer.prepare("K1")
    await producer.end(half, COMMIT)
    consumer = Consumer("billing", {"orders": "*"}, start_from="first", config=rig.client())
    await rig.patiently(consumer.__aenter__())
    first = await rig.patiently(_first(consumer))
    await rig.patiently(first.retry())
    await rig.wait(15_000)
    second = await rig.patiently(_first(consumer))
    await rig.patiently(second.ack())
    await rig.patiently(consumer.close())

    assert second.offset_message_id != first.offset_message_id
    assert first.half_message_id == second.half_message_id == half.message_id
    assert first.inbox_id == second.inbox_id


@pytest.mark.parametrize("step_ms", [-10 * DAY_MS, 10 * DAY_MS])
@windowed()
async def test_w30_a_step_of_the_brokers_clock_moves_no_lock_of_a_queue(
    rig: Rig, step_ms: int
) -> None:
    """A consumer in order keeps its queue; a dead one loses it after a minute."""
    consumer = await rig.peer()

    async def lock(client_id: str) -> int:
        queue = {"topic": "orders", "brokerName": "broker-a", "queueId": 0}
        body = {"consumerGroup": "g", "clientId": client_id, "mqSet": [queue]}
        answer = await consumer.call(RequestCode.LOCK_BATCH_MQ, None, json.dumps(body).encode())
        return len(json.loads(answer.body)["lockOKMQSet"])

    assert await lock("first") == 1
    rig.clock_ahead_ms = step_ms
    assert await lock("second") == 0
    await rig.wait(61_000)
    assert await lock("second") == 1
