"""Requests and their replies between this client, itself and the official one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from threading import Thread
from zlib import crc32

import pytest

from halfmq.client import (
    BrokerRefusedError,
    ClientConfig,
    Consumer,
    InvalidMessageError,
    Message,
    Producer,
    TransactionProducer,
    blocking,
)
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.features import feature
from tests.support.java_clients import Kind, class_path, java_client
from tests.support.java_scenarios import of
from tests.support.patience import PATIENCE_S

LARGE = b"a" * 6000
"""Clients compress it."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path / "broker") as process:
        yield process


@asynccontextmanager
async def replying(broker: BrokerProcess, topic: str) -> AsyncIterator[Consumer]:
    """Reply to all requests of a topic while the block runs."""
    config = ClientConfig(namesrv=broker.address)
    async with Consumer("repliers", {topic: "*"}, start_from="first", config=config) as consumer:

        async def reply() -> None:
            async for message in consumer:
                is_large = message.body == b"large"
                try:
                    await message.reply(LARGE if is_large else b"reply to " + message.body)
                except InvalidMessageError:  # was only sent
                    await message.ack()
                except BrokerRefusedError:  # a Java client that has sent no heartbeat yet
                    await message.retry(timedelta(seconds=1))
                else:
                    await message.ack()

        task = asyncio.create_task(reply())
        try:
            yield consumer
        finally:
            await consumer.stop()
            await task


@pytest.mark.parametrize("kind", [Producer, TransactionProducer])
async def test_a_request_returns_its_own_reply(broker: BrokerProcess, kind: type[Producer]) -> None:
    """Many at a time, small and compressed ones, from two clients of one group."""
    async with (
        replying(broker, "questions"),
        kind("askers", namesrv=broker.address) as one,
        kind("askers", namesrv=broker.address) as other,
    ):
        bodies = [b"%d" % number for number in range(20)]
        asked = [
            producer.request(Message("questions", body), timeout=PATIENCE_S)
            for producer in (one, other)
            for body in bodies
        ]
        replies = await asyncio.gather(*asked)
        large = await one.request(Message("questions", b"large"), timeout=PATIENCE_S)

    assert [reply.body for reply in replies] == [b"reply to " + body for body in bodies] * 2
    assert large.body == LARGE
    assert large.properties["MSG_TYPE"] == "reply"


def test_threads_request_and_reply(broker: BrokerProcess) -> None:
    address = broker.address

    def handle(message: blocking.MessageView) -> None:
        message.reply(message.body * 2)
        consumer.stop()

    with (
        blocking.Consumer("r", {"doubled": "*"}, start_from="first", namesrv=address) as consumer,
        blocking.Producer("askers", namesrv=address) as producer,
    ):
        runner = Thread(target=lambda: consumer.run(handle))
        runner.start()
        reply = producer.request(Message("doubled", b"ab"), timeout=PATIENCE_S)
        runner.join(PATIENCE_S)

    assert reply.body == b"abab"


async def test_a_reply_to_a_client_that_is_gone_is_an_error(broker: BrokerProcess) -> None:
    """The consumer learns that its work was for nothing, and settles the message as it likes."""
    config = ClientConfig(namesrv=broker.address)
    async with Consumer("late", {"questions": "*"}, start_from="first", config=config) as consumer:
        async with Producer("askers", config=config) as producer:
            asking = asyncio.create_task(producer.request(Message("questions", b"x")))
            message = await consumer.receive()
            asking.cancel()
        with pytest.raises(BrokerRefusedError, match="not found"):
            await message.reply(b"too late")
        assert await message.ack()


@feature("request-reply", "Java 5.3.3")
async def test_the_java_client_requests_and_replies(broker: BrokerProcess, tmp_path: Path) -> None:
    """It waits for our reply, and we for its."""
    kind = Kind("5.3.3")
    await asyncio.to_thread(class_path, kind.version)
    with java_client(kind, broker.address, tmp_path / "client") as java:
        async with replying(broker, "java-requesting"):
            lines = await asyncio.to_thread(java.run, "requesting")
        async with Producer("askers", namesrv=broker.address) as producer:
            await producer.send(Message("java-replying", b"founding"))
            answering = java.start("replying")
            await asyncio.to_thread(java.said, answering, "ready")
            replies = [
                await producer.request(Message("java-replying", body), timeout=PATIENCE_S)
                for body in (b"small", b"large")
            ]
            await asyncio.to_thread(java.lines, answering)

    called_back = {line["to"]: (line["size"], line["crc"]) for line in of(lines, "called_back")}
    expected = {"small": b"reply to small", "large": LARGE}
    assert called_back == {name: (len(body), crc32(body)) for name, body in expected.items()}
    assert [reply.body for reply in replies] == [b"reply to small", LARGE]
