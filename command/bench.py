"""``halfmq bench``: a quick figure of what a broker does for one client of this machine."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Annotated

import typer

from halfmq.client.consumer import Consumer
from halfmq.client.message import Message
from halfmq.client.producer import Producer

from .output import print_error
from .verbs import Cli, verb


@verb("bench")
async def bench(
    cli: Cli,
    messages: Annotated[int, typer.Option(metavar="N", min=1, help="to send and receive")] = 20_000,
    size: Annotated[int, typer.Option(metavar="BYTES", min=1, help="of a body")] = 1_024,
    outstanding: Annotated[
        int, typer.Option(metavar="N", min=1, help="sends that wait for their answers")
    ] = 64,
) -> None:
    """Send and receive messages with a topic of its own, which is deleted at the end."""
    admin = await cli.admin()
    topic = group = f"halfmq-bench-{secrets.token_hex(4)}"
    await admin.create_topic(topic)
    try:
        sent_s = await _send(cli, topic, messages, bytes(size), outstanding)
        received_s = await _receive(cli, topic, group, messages)
    finally:
        await admin.delete_topic(topic)
        await admin.delete_group(group, offsets=True)
    figures = {
        "messages": messages,
        "size": size,
        "outstanding": outstanding,
        "sent_per_second": round(messages / sent_s),
        "received_per_second": round(messages / received_s),
    }
    cli.pairs(figures, {name.replace("_", " "): value for name, value in figures.items()})
    if not cli.json:
        print_error("one Python process has done all of it; benchmarks/ compares brokers")


async def _send(cli: Cli, topic: str, count: int, body: bytes, outstanding: int) -> float:
    left = count
    async with Producer("halfmq-bench", config=(await cli.admin()).config) as producer:
        await producer.send(Message(topic, body))  # connects
        left -= 1

        async def sender() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await producer.send(Message(topic, body))

        begun = time.perf_counter()
        await asyncio.gather(*(sender() for _ in range(outstanding)))
        return time.perf_counter() - begun


async def _receive(cli: Cli, topic: str, group: str, count: int) -> float:
    config = (await cli.admin()).config
    async with Consumer(group, {topic: "*"}, start_from="first", config=config) as consumer:
        first = await consumer.receive()
        begun = time.perf_counter()
        await first.ack()
        for _ in range(count - 1):
            await (await consumer.receive()).ack()
        return time.perf_counter() - begun
