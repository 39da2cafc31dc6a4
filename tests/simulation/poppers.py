"""Members of groups that share messages, and what must hold for each of their messages.

One group takes messages in any order, the other one in the order of their queues. A member handles
a message for a while, and acknowledges, extends, retries or drops it; it may be killed at any time.
Not every run has them. They draw from a chance of their own, so that the others do not change.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from halfmq.client import ClientConfig, ClientError, Consumer, MessageView
from halfmq.remoting.codes import RequestCode
from halfmq.store.config import FlushMode

from .loop import Process

if TYPE_CHECKING:
    from .world import World

SHARE_OF_RUNS: Final = 0.4
MEMBERS: Final = 2  # of each group
ACK_TIMEOUT_S: Final = 4.0
RETRY_S: Final = 0.2
GROUPS: Final = {"popper": False, "sorter": True}
"""Names of the groups, and whether they take messages in order."""


class Poppers:
    """All members, and the oracle of their groups."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self.chance = random.Random(f"poppers of {seed}")
        self.present = self.chance.random() < SHARE_OF_RUNS
        self.delivered: dict[str, Counter[str]] = {group: Counter() for group in GROUPS}
        self._done: set[tuple[str, str]] = set()  # group and first copy, acknowledged
        self._in_hand: dict[tuple[str, str], int] = {}  # of the sorters, by queue: offset

    @property
    def names(self) -> list[str]:
        """The names of the programs."""
        return [f"{group}-{n}" for group in GROUPS for n in range(MEMBERS)] if self.present else []

    async def run(self, process: Process, namesrv: str) -> None:
        """Run a member of the group that its name tells."""
        group = process.name.partition("-")[0]
        config = ClientConfig(
            namesrv=namesrv,
            instance_name=process.name,
            connect_timeout=1.0,
            heartbeat_interval=5.0,
            rebalance_interval=5.0,
            route_refresh_interval=5.0,
            pull_suspend=5.0,
        )
        while True:
            consumer = Consumer(
                group,
                dict.fromkeys(("orders", "invoices"), "*"),
                start_from="first",
                share="messages",
                ack_timeout=ACK_TIMEOUT_S,
                ordered=GROUPS[group],
                config=config,
            )
            try:
                await consumer.start()
                break
            except ClientError:
                await asyncio.sleep(RETRY_S)
        async for message in consumer:
            self._received(group, message)
            await self._handle(group, consumer, message)

    async def _handle(self, group: str, consumer: Consumer, message: MessageView) -> None:
        chance, settling = self.chance, self._world.settling
        await asyncio.sleep(0.001 if settling else chance.random() ** 4 * ACK_TIMEOUT_S * 1.2)
        mood = 1.0 if settling else chance.random()
        if mood < 0.05:
            return  # forgotten: it comes again after its time
        if mood < 0.15:
            await message.retry(timedelta(seconds=chance.choice((0.0, 0.5, 2.0))))
            return
        if mood < 0.35:
            await self._extend(group, consumer, message)
        self._in_hand.pop((group, str(message.queue)), None)
        if await message.ack():
            self._world.loop.record_event("popped", group, message.body.decode().rstrip())
            self._world.records.events["pop acknowledged"] += 1
            self._done.add((group, self._first_copy(message)))

    async def _extend(self, group: str, consumer: Consumer, message: MessageView) -> None:
        """Extend a message; then somebody sends an acknowledgement with the old handle."""
        delivery = message.deliverer
        old = delivery._popper.ack_header(delivery._handle)  # type: ignore[attr-defined]
        call = delivery._popper.call  # type: ignore[attr-defined]
        if not await message.extend(2 * ACK_TIMEOUT_S):
            return
        try:
            answer = await call(RequestCode.ACK_MESSAGE, old)
        except ClientError:
            return
        self._world.records.events["old handle"] += 1
        if answer.code == 0:
            self._world.violate(f"{group} acknowledged {old.extra_info} after its change")

    def _first_copy(self, message: MessageView) -> str:
        return message.properties.get("ORIGIN_MESSAGE_ID") or message.offset_message_id

    @property
    def _may_repeat(self) -> bool:
        """Whether a power cut may have undone what was answered, as ASYNC_FLUSH allows."""
        world = self._world
        return world.scenario.flush_mode is FlushMode.ASYNC_FLUSH and world.records.power_cuts > 0

    def _received(self, group: str, message: MessageView) -> None:
        world = self._world
        body = message.body.decode().rstrip()
        self.delivered[group][body] += 1
        world.loop.record_event("delivered to", group, body, message.queue_offset)
        if self._may_repeat:
            return
        if (group, self._first_copy(message)) in self._done:
            world.violate(f"{body} came to {group} again, after it was acknowledged")
        if not GROUPS[group]:
            return
        key, offset = (group, str(message.queue)), message.queue_offset
        if key in self._in_hand and offset > self._in_hand[key] and not world.records.archive:
            world.violate(f"{body} came to {group} before {self._in_hand[key]} of its queue")
        self._in_hand[key] = offset

    def missing(self, bodies: list[str]) -> list[str]:
        """Return which of these have not come to each group."""
        if not self.present:
            return []
        return [
            f"{body} to {group}"
            for group, delivered in self.delivered.items()
            for body in bodies
            if not delivered[body]
        ]
