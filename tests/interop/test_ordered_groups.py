"""A group that consumes in order, with a member of the Java client and one of ours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from halfmq.client import ClientConfig, Consumer, Message, Producer
from halfmq.client.blocking import Admin
from halfmq.client.testing import broker_process
from tests.support.features import feature
from tests.support.java_clients import Kind, class_path, java_client
from tests.support.patience import until

pytestmark = pytest.mark.campaign

TOPIC, GROUP = "ordered", "ordered-readers"
QUEUES, PER_QUEUE = 4, 5
TAKEN_OVER_S = 90.0
"""A broker gives the locks of a killed member away after 30 s; its queues are asked for again."""


@feature("one group with members of several clients", "Java 5.3.3")
async def test_a_java_member_and_ours_keep_the_order_of_each_queue(tmp_path: Path) -> None:
    """Queues move when ours joins and when the JVM is killed; each is consumed in its order."""
    class_path("5.3.3")
    ours: list[tuple[int, int]] = []
    theirs: list[tuple[int, int]] = []

    async def receive(consumer: Consumer) -> None:
        async for message in consumer:
            if message.queue_offset % 3 == 1 and message.delivery_attempt == 1:
                await message.retry(reason="the first time it fails")
                continue
            ours.append((message.queue.queue_id, message.queue_offset))
            await message.ack()

    with broker_process(tmp_path / "b") as broker:
        config = ClientConfig(namesrv=broker.address)
        with Admin(namesrv=broker.address) as admin:
            admin.create_topic(TOPIC, queues=QUEUES)
        async with Producer("writers", config=config) as producer:
            sent: set[tuple[int, int]] = set()

            async def send() -> None:
                for number in range(QUEUES * PER_QUEUE):
                    message = Message(TOPIC, b"m-%d" % number, tags="T")
                    result = await producer.send(message, order_key=f"key-{number % QUEUES}")
                    sent.add((result.queue.queue_id, result.queue_offset))

            with java_client(Kind("5.3.3"), broker.address, tmp_path / "java") as client:
                run = client.start("member", TOPIC, GROUP, "orderly", "4,2,99")
                client.said(run, "owns", count=QUEUES)

                def hear() -> set[tuple[int, int]]:
                    theirs.extend(
                        (line["queue"], line["queue_offset"])
                        for line in client.heard(run)
                        if line["event"] == "consumed"
                    )
                    return set(theirs) | set(ours)

                await send()
                await until(lambda: sent <= hear(), TAKEN_OVER_S)
                consumer = Consumer(
                    GROUP, {TOPIC: "*"}, start_from="first", ordered=True, config=config
                )
                async with consumer:
                    task = asyncio.create_task(receive(consumer))
                    await until(lambda: _owned(consumer) == QUEUES // 2, TAKEN_OVER_S)
                    await send()
                    await until(lambda: sent <= hear(), TAKEN_OVER_S)
                    assert ours
                    assert len(theirs) > QUEUES * PER_QUEUE
                    client.kill()
                    await send()
                    await until(lambda: sent <= set(theirs) | set(ours), TAKEN_OVER_S)
                    assert _owned(consumer) == QUEUES
                    task.cancel()

    for queue in {queue for queue, _ in sent}:
        offsets = [offset for one, offset in (*theirs, *ours) if one == queue]
        assert list(dict.fromkeys(offsets)) == sorted(set(offsets))


def _owned(consumer: Consumer) -> int:
    return sum(queue.topic == TOPIC for queue in consumer.assignment)
