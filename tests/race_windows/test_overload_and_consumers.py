"""Overload, a crash between work and offset, and queue locks when clocks step."""

from __future__ import annotations

import json
import sqlite3

import pytest

from halfmq.broker.limits.kept import UNFLUSHED_BYTES
from halfmq.broker.net import reply_release
from halfmq.client import Consumer, MessageView
from halfmq.remoting.codes import RequestCode, ResponseCode
from tests.support.peers import COMMIT, until
from tests.support.race_windows import DAY_MS, Rig, windowed

BODY = b"x" * 50_000


@windowed()
async def test_w06_under_overload_prepares_are_refused_and_decisions_taken(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one connection, after the messages that reached the limit: no decision is lost."""
    monkeypatch.setattr(reply_release, "UNFLUSHED_BYTES", UNFLUSHED_BYTES._replace(most=200_000))
    monkeypatch.setattr(reply_release, "UNFLUSHED_DECISIONS_MAX", 2_000_000)
    producer = await rig.peer()
    halves = [await producer.prepare(f"K{number}", BODY) for number in range(6)]
    rig.disk.held = True
    late = [
        producer.send(RequestCode.SEND_MESSAGE_V2, *producer.half_request(f"L{number}", BODY))
        for number in range(20)
    ]
    for half in halves:
        producer.end_one_way(half, COMMIT)
    waiting = rig.release
    await until(waiting.over_limit)
    assert rig.metrics["committed"] == 0  # what is not read cannot be served
    rig.loop.now_ms += int(reply_release.STALLED_S_MAX * 1_000)
    await until(lambda: rig.metrics["committed"] == len(halves))
    await producer.sync()

    answered = [opaque for opaque in late if producer.answered(opaque)]
    assert answered, "refusals need not wait for the disk"
    for opaque in answered:
        answer = await producer.answer(opaque)
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert "wait for the disk" in (answer.remark or "")

    rig.disk.held = False
    await rig.settle()
    assert sorted(rig.bodies()) == [BODY] * len(halves)
    assert (await producer.prepare("after", BODY)).offset > 0


@windowed(pending_max=2)
async def test_w06_a_full_table_refuses_prepares_and_not_decisions(rig: Rig) -> None:
    """The refusal names the limit and the remedy, and a decision makes room."""
    producer = await rig.peer()
    first = await producer.prepare("K1")
    await producer.prepare("K2")
    header, body = producer.half_request("K3")
    refused = await producer.call(RequestCode.SEND_MESSAGE_V2, header, body)
    again = await producer.prepare("K1")

    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert "transactionPendingMax=2" in (refused.remark or "")
    assert again == first  # what is stored already needs no room

    assert (await producer.end(first, COMMIT)).code == ResponseCode.SUCCESS
    await producer.prepare("K3")


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
