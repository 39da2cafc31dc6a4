"""A handler that takes twenty minutes has its message once, in each way to consume."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from halfmq.client import Consumer, Message, MessageView, Producer
from halfmq.testing import InMemoryBroker


@pytest.mark.parametrize(
    "way",
    [{}, {"ordered": True}, {"share": "messages"}, {"share": "messages", "ordered": True}],
    ids=str,
)
async def test_a_handler_of_twenty_minutes_has_its_message_once(
    way: dict[str, Any], halfmq_broker: InMemoryBroker
) -> None:
    """The run extends it, at the broker too, and keeps the lock of its queue."""
    begun: list[tuple[bytes, int]] = []

    async def handle(message: MessageView) -> None:
        begun.append((message.body, message.delivery_attempt))
        await asyncio.sleep(1200)
        await consumer.stop()

    async with Producer("p", namesrv=halfmq_broker.address) as producer:
        await producer.send(Message("long", b"job"))
    usual: dict[str, Any] = {"start_from": "first", "namesrv": halfmq_broker.address}
    async with Consumer("g", {"long": "*"}, **usual, **way) as consumer:
        run = asyncio.create_task(consumer.run(handle))
        while not begun:
            await halfmq_broker.advance(seconds=1)
        await halfmq_broker.advance(seconds=1210)
        summary = await run
    assert begun == [(b"job", 1)]
    assert (summary.handled, summary.left) == (1, 0)
