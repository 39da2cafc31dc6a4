"""Official clients and ours share the queues of a group, whoever joins or leaves."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from halfmq.client import ClientConfig, Consumer, Message, Producer
from halfmq.client.blocking import Admin
from halfmq.client.testing import broker_process
from tests.support.features import feature
from tests.support.java_clients import JavaClient, Kind, class_path, java_client
from tests.support.patience import until

pytestmark = pytest.mark.campaign

TOPIC, GROUP = "mixed", "mixed-readers"
QUEUES = 6


class JavaMember:
    """A Java consumer of the group."""

    def __init__(self, client: JavaClient) -> None:
        self._client = client
        self._run = client.start("share", TOPIC, GROUP)
        self._queues: list[int] = []
        self._bodies: set[str] = set()

    def _hear(self) -> None:
        for line in self._client.heard(self._run):
            if line["event"] == "owns":
                self._queues = json.loads(line["queues"])
            elif line["event"] == "consumed":
                self._bodies.add(line["body"])

    def queues(self) -> list[int]:
        self._hear()
        return self._queues

    def bodies(self) -> set[str]:
        self._hear()
        return self._bodies


class OurMember:
    """A consumer of ours, for the length of an ``async with``."""

    def __init__(self, config: ClientConfig) -> None:
        self._consumer = Consumer(GROUP, {TOPIC: "*"}, start_from="first", config=config)
        self._bodies: set[str] = set()

    async def start(self) -> None:
        await self._consumer.start()
        self._task = asyncio.create_task(self._receive())

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._consumer.close()

    async def _receive(self) -> None:
        async for message in self._consumer:
            self._bodies.add(message.body.decode())
            await message.ack()

    def queues(self) -> list[int]:
        return [one.queue_id for one in self._consumer.assignment if one.topic == TOPIC]

    def bodies(self) -> set[str]:
        return self._bodies


Member = JavaMember | OurMember


async def settle(members: list[Member], gone: list[Member], producer: Producer) -> None:
    """Wait until each queue has one owner, and each member a queue; all consume what is sent."""
    await until(lambda: _is_shared([member.queues() for member in members]))
    sent = {f"{len(members)}-{len(gone)}-{number}" for number in range(2 * QUEUES)}
    for body in sorted(sent):
        await producer.send(Message(TOPIC, body.encode(), tags="T"))
    readers = (*members, *gone)
    await until(lambda: sent <= {body for reader in readers for body in reader.bodies()})


def _is_shared(queues: list[list[int]]) -> bool:
    owners = Counter(queue for owned in queues for queue in owned)
    return owners == Counter(range(QUEUES)) and all(queues)


@feature("one group with members of several clients", "Java 5.3.3", "Java 4.9.8")
async def test_every_queue_has_one_owner_whoever_joins_and_leaves(tmp_path: Path) -> None:
    """And every message is consumed; a JVM leaves without a farewell, ours with one."""
    for version in ("5.3.3", "4.9.8"):
        class_path(version)
    with broker_process(tmp_path / "b") as broker, ExitStack() as running:
        config = ClientConfig(namesrv=broker.address)

        def java(version: str, name: str) -> JavaMember:
            client = java_client(Kind(version), broker.address, tmp_path / name)
            return JavaMember(running.enter_context(client))

        with Admin(namesrv=broker.address) as admin:
            admin.create_topic(TOPIC, queues=QUEUES)
        async with Producer("writers", config=config) as producer:
            newer, ours = java("5.3.3", "newer"), OurMember(config)
            await settle([newer], [], producer)
            with java_client(Kind("4.9.8"), broker.address, tmp_path / "older") as client:
                older = JavaMember(client)
                await settle([newer, older], [], producer)
                await ours.start()
                await settle([newer, older, ours], [], producer)
            await settle([newer, ours], [older], producer)
            again = java("4.9.8", "again")
            await settle([newer, ours, again], [older], producer)
            await ours.leave()
            await settle([newer, again], [older, ours], producer)


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
