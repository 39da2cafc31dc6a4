"""What a consumer goes through while it runs: it tells of each once, and goes on by itself."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from halfmq.client import (
    AccessDeniedError,
    AclEntry,
    Admin,
    ClientConfig,
    Consumer,
    ConsumerEvent,
    Message,
    Producer,
)
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.fake_broker import until
from tests.support.guarded_broker import ADMIN, PUBLISHER, SUBSCRIBER, GuardedBroker
from tests.support.patience import PATIENCE_S

QUEUES = 8
CONFIG = ClientConfig(heartbeat_interval=0.5, request_timeout=1.0, pull_suspend=1.0)
"""A broker that vanishes without a word is noticed with the next heartbeat."""


async def kill(broker: BrokerProcess, _events: list[str]) -> Callable[[], Awaitable[object]]:
    broker.kill()
    return lambda: asyncio.to_thread(broker.restart)


async def freeze(broker: BrokerProcess, _events: list[str]) -> Callable[[], Awaitable[object]]:
    os.kill(broker.pid, signal.SIGSTOP)

    async def go_on() -> None:
        os.kill(broker.pid, signal.SIGCONT)

    return go_on


async def delete_topic(
    broker: BrokerProcess, _events: list[str]
) -> Callable[[], Awaitable[object]]:
    async with Admin(namesrv=broker.address) as admin:
        await admin.delete_topic("orders")

    async def create() -> None:
        async with Admin(namesrv=broker.address) as admin:
            await admin.create_topic("orders", queues=QUEUES)

    return create


async def send(broker_address: str, body: bytes, **access: str) -> None:
    async with Producer("g", namesrv=broker_address, **access) as producer:  # type: ignore[arg-type]
        await producer.send(Message("orders", body), order_key="one")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of the client, without those of tests' other clients."""
    ours = [one for one in caplog.records if one.name.startswith("halfmq.client")]
    return [one.message for one in ours if one.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("cause", "told"),
    [(kill, "connection_lost"), (freeze, "connection_lost"), (delete_topic, "topic_missing")],
)
async def test_a_consumer_tells_once_and_goes_on(
    cause: Callable[[BrokerProcess, list[str]], Awaitable[Callable[[], Awaitable[object]]]],
    told: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One event and one line for all its queues; nothing is lost, and nothing comes twice."""
    events: list[ConsumerEvent] = []
    with broker_process(tmp_path, mappedFileSizeCommitLog=16 << 20) as broker:
        async with Admin(namesrv=broker.address) as admin:
            await admin.create_topic("orders", queues=QUEUES)
        await send(broker.address, b"before")
        async with Consumer(
            "billing",
            {"orders": "*"},
            start_from="first",
            namesrv=broker.address,
            on_event=events.append,
            config=CONFIG,
        ) as consumer:
            before = await consumer.receive(PATIENCE_S)
            assert before is not None
            assert await before.ack()
            await consumer.commit()
            caplog.clear()
            events.clear()
            end = await cause(broker, [])
            await until(lambda: told in [event.name for event in events])
            # Two rounds of retries of all queues, which must not tell it again.
            await asyncio.sleep(2.0)
            assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
            assert [event.name for event in events].count(told) == 1
            await end()
            ended_at = time.monotonic()
            await send(broker.address, b"after")
            after = await consumer.receive(PATIENCE_S)
            print(f"{cause.__name__}: on again after {time.monotonic() - ended_at:.2f} s")
            assert after is not None
            assert after.body == b"after"
            assert await after.ack()
            assert await consumer.receive(0.3) is None


async def test_rights_are_withdrawn_and_granted_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``receive`` raises while it lasts; then the same consumer goes on."""
    events: list[ConsumerEvent] = []
    guarded = await asyncio.to_thread(GuardedBroker, tmp_path, "users")
    user = SUBSCRIBER["access_key"]
    right = AclEntry(resource="Topic:orders", actions=("Sub",))
    try:
        async with (
            Admin(namesrv=guarded.address, **ADMIN) as admin,
            Consumer(
                "billing",
                {"orders": "*"},
                start_from="first",
                namesrv=guarded.address,
                on_event=events.append,
                config=CONFIG,
                **SUBSCRIBER,
            ) as consumer,
        ):
            first = await consumer.receive(PATIENCE_S)
            assert first is not None
            assert await first.ack()
            caplog.clear()
            await admin.delete_acl(user, resource="Topic:orders")
            with pytest.raises(AccessDeniedError):
                await consumer.receive(PATIENCE_S)
            await asyncio.sleep(2.0)
            refused = [event for event in events if event.name == "refused"]
            assert len(refused) == 1
            assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
            assert (await consumer.health()).waiting_for

            await admin.update_acl(user, right)
            ended_at = time.monotonic()
            await send(guarded.address, b"after", **PUBLISHER)
            while (await consumer.health()).waiting_for:  # noqa: ASYNC110 -- it is told when asked
                await asyncio.sleep(0.02)
            after = await consumer.receive(PATIENCE_S)
            print(f"rights: on again after {time.monotonic() - ended_at:.2f} s")
            assert after is not None
            assert after.body == b"after"
    finally:
        await asyncio.to_thread(guarded.close)
