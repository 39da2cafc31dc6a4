"""What producers did and what consumers got, to be compared after crashes."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from halfmq.client import ClientConfig, ClientError, Consumer, Message, Producer


@dataclass
class Ledger:
    """Bodies by what is known of them."""

    acknowledged: set[bytes] = field(default_factory=set)
    sent: set[bytes] = field(default_factory=set)  # acknowledged, or in doubt
    consumed: Counter[bytes] = field(default_factory=Counter)
    positions: set[tuple[str, int]] = field(default_factory=set)  # queue and queue offset


async def send_until(
    stop: asyncio.Event, ledger: Ledger, config: ClientConfig, prefix: str
) -> None:
    """Send numbered messages one after the other; note which were acknowledged."""
    number = 0
    async with Producer("crash-producer", config=config) as producer:
        while not stop.is_set():
            body = f"{prefix}-{number}".encode()
            number += 1
            ledger.sent.add(body)
            try:
                await producer.send(Message("crash", body))
            except ClientError:
                if stop.is_set():
                    return
                await asyncio.sleep(0.01)  # the broker is away; the outcome stays in doubt
            else:
                ledger.acknowledged.add(body)


async def consume_all(ledger: Ledger, config: ClientConfig, wanted: set[bytes]) -> None:
    """Consume until every wanted body has come."""
    async with Consumer(
        "crash-auditor", {"crash": "*"}, start_from="first", config=config
    ) as all_of:
        async for message in all_of:
            ledger.consumed[message.body] += 1
            position = (str(message.queue), message.queue_offset)
            assert position not in ledger.positions, f"{position} was delivered twice"
            ledger.positions.add(position)
            await message.ack()
            if wanted <= ledger.consumed.keys():
                return
