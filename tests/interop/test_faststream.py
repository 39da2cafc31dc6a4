"""halfmq as a broker of FastStream: handlers, failures, requests, transactions, FastAPI."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import AsyncIterator
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from faststream import AckPolicy
from faststream.exceptions import NackMessage, RejectMessage
from faststream.specification import AsyncAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from halfmq.client import ClientError, Consumer, Message, Producer
from halfmq.client.ledger import TransactionLedger
from halfmq.client.testing import broker_process
from halfmq.integrations.faststream import (
    HalfmqBroker,
    HalfmqMessage,
    HalfmqResponse,
    HalfmqRouter,
    TestHalfmqBroker,
)
from halfmq.integrations.faststream.fastapi import HalfmqFastAPIRouter
from halfmq.testing import InMemoryBroker
from tests.support.patience import PATIENCE_S

SOURCES = "https://codeload.github.com/ag2ai/faststream/tar.gz/refs/tags"
CONFORMANCE = Path(__file__).parent / "faststream_conformance.txt"


@pytest.fixture
async def broker(halfmq_broker: InMemoryBroker) -> AsyncIterator[HalfmqBroker]:
    made = HalfmqBroker(halfmq_broker.address, logger=None)
    yield made
    await made.stop()


async def test_a_handler_publishes_what_it_returns(
    broker: HalfmqBroker, halfmq_broker: InMemoryBroker
) -> None:
    """With tag, headers and correlation id; types are converted; a router has its prefix."""
    router, seen = HalfmqRouter("shop-"), []

    @router.subscriber("orders", tags="paid")
    @router.publisher("invoices", tags="new", headers={"by": "billing"})
    async def bill(order: dict[str, int]) -> dict[str, int]:
        return {"total": order["price"] * 2}

    @router.subscriber("invoices")
    async def file(invoice: dict[str, int], message: HalfmqMessage) -> None:
        seen.append((invoice, message.headers["by"], message.correlation_id))

    broker.include_router(router)
    await broker.start()
    await broker.publish({"price": 1}, "shop-orders", tags="open")
    await broker.publish({"price": 21}, "shop-orders", tags="paid", correlation_id="c-1")
    await _until(lambda: seen)

    assert seen == [({"total": 42}, "billing", "c-1")]
    [stored] = await halfmq_broker.messages("shop-invoices")
    assert (stored.tags, stored.properties["content-type"]) == ("new", "application/json")


async def test_failures_are_retried_delayed_or_rejected(
    broker: HalfmqBroker, halfmq_broker: InMemoryBroker
) -> None:
    calls: list[str] = []

    @broker.subscriber("orders", group="billing")
    async def handle(name: str) -> None:
        calls.append(name)
        if name == "raises" and calls.count(name) == 1:
            raise ValueError(name)
        if name == "waits" and calls.count(name) == 1:
            raise NackMessage(delay=timedelta(minutes=10))
        if name == "never":
            raise RejectMessage

    @broker.subscriber("sloppy", ack_policy=AckPolicy.ACK)
    async def fail(name: str) -> None:
        calls.append(name)
        raise ValueError(name)

    await broker.start()
    for name in ("raises", "waits", "never"):
        await broker.publish(name, "orders")
    await broker.publish("sloppy", "sloppy")
    await _until(lambda: {"raises", "waits", "never", "sloppy"} <= set(calls))
    await halfmq_broker.advance(300)
    assert sorted(calls) == ["never", "raises", "raises", "sloppy", "waits"]
    await halfmq_broker.advance(301)
    assert calls.count("waits") == 2
    assert [one.body for one in await halfmq_broker.messages("%DLQ%billing")] == [b"never"]


async def test_nothing_is_a_message(broker: HalfmqBroker) -> None:
    """A handler that returns None publishes an empty body, which RocketMQ's protocol lacks."""
    seen: list[bytes] = []

    @broker.subscriber("in")
    @broker.publisher("out")
    async def pass_on(_body: str) -> None:
        return None

    @broker.subscriber("out")
    async def take(message: HalfmqMessage) -> None:
        seen.append(message.body)

    await broker.start()
    await broker.publish("x", "in")
    await _until(lambda: seen)

    assert seen == [b""]


async def test_requests_are_answered(broker: HalfmqBroker, halfmq_broker: InMemoryBroker) -> None:
    """By handlers, for handlers and for clients that know no FastStream; or in no time."""

    @broker.subscriber("square")
    async def square(number: int) -> HalfmqResponse:
        return HalfmqResponse(number * number, headers={"by": "square"})

    await broker.start()
    reply = await broker.request(7, "square")
    assert (await reply.decode(), reply.headers["by"]) == (49, "square")
    async with Producer("plain", namesrv=halfmq_broker.address) as producer:
        answer = await producer.request(Message("square", b"3"))
    assert answer.body == b"9"
    with pytest.raises(TimeoutError):
        await broker.request(7, "nobody", timeout=0.1)


async def test_rows_and_messages_commit_together(halfmq_broker: InMemoryBroker) -> None:
    """What a handler publishes in a transaction is delivered if its rows are there, else not."""
    engine, ledger = create_async_engine("sqlite+aiosqlite://"), TransactionLedger()
    async with engine.begin() as connection:
        await connection.execute(text("create table parcels (name text)"))
        await ledger.create_table_async(connection)
    broker = HalfmqBroker(
        halfmq_broker.address, checker=ledger.async_checker(engine.connect), logger=None
    )
    handled: list[str] = []

    @broker.subscriber("orders", ack_policy=AckPolicy.ACK)
    async def ship(name: str) -> None:
        try:
            async with AsyncSession(engine) as session, broker.transaction(session):
                await broker.publish(name, "shipped", order_key=name)
                await broker.publish(name, "invoices")
                await session.execute(text(f"insert into parcels values ('{name}')"))
                if name == "lost":
                    raise ValueError(name)
        finally:
            handled.append(name)

    async with broker:
        await broker.start()
        for name in ("lost", "kept"):
            await broker.publish(name, "orders")
        await _until(lambda: len(handled) == 2)
    async with engine.connect() as connection:
        rows = (await connection.execute(text("select name from parcels"))).scalars().all()
    await engine.dispose()

    assert rows == ["kept"]
    for topic in ("shipped", "invoices"):
        assert [one.body for one in await halfmq_broker.messages(topic)] == [b"kept"]


async def test_what_a_task_publishes_after_the_block_is_sent(
    halfmq_broker: InMemoryBroker,
) -> None:
    """It has missed the transaction, and must not wait for it for ever."""
    engine, ledger = create_async_engine("sqlite+aiosqlite://"), TransactionLedger()
    async with engine.begin() as connection:
        await ledger.create_table_async(connection)
    check, ended = ledger.async_checker(engine.connect), asyncio.Event()
    broker = HalfmqBroker(halfmq_broker.address, checker=check, logger=None)

    async def publish_late() -> None:
        await ended.wait()
        await broker.publish("late", "shipped")

    async with broker:
        await broker.start()
        async with AsyncSession(engine) as session, broker.transaction(session):
            task = asyncio.ensure_future(publish_late())
            await broker.publish("in time", "shipped")
        ended.set()
        await task
    await engine.dispose()

    stored = [one.body for one in await halfmq_broker.messages("shipped")]
    assert sorted(stored) == [b"in time", b"late"]


async def test_a_transaction_without_its_parts_is_refused(halfmq_broker: InMemoryBroker) -> None:
    check = TransactionLedger().async_checker(create_async_engine("sqlite+aiosqlite://").connect)
    plain = HalfmqBroker(halfmq_broker.address)
    closed = HalfmqBroker(halfmq_broker.address, checker=check)
    for broker, reason in ((plain, "checker is None, expected"), (closed, "is not running")):
        with pytest.raises(ClientError, match=reason):
            await broker.transaction(AsyncSession()).__aenter__()


async def test_a_stop_waits_for_handlers_and_commits(halfmq_broker: InMemoryBroker) -> None:
    """What was handled is not delivered again."""
    broker, ended = HalfmqBroker(halfmq_broker.address, logger=None), []
    began = asyncio.Event()

    @broker.subscriber("orders", group="g", max_workers=3)
    async def handle(number: int) -> None:
        began.set()
        await asyncio.sleep(0.05)
        ended.append(number)

    await broker.start()
    for number in range(3):
        await broker.publish(number, "orders")
    await began.wait()
    await broker.stop()
    async with Consumer("g", {"orders": "*"}, namesrv=halfmq_broker.address) as consumer:
        again = await consumer.receive_many(10, timeout=0.3)

    assert sorted([*ended, *(int(one.body) for one in again)]) == [0, 1, 2]


async def test_fastapi_starts_it(halfmq_broker: InMemoryBroker) -> None:
    router, seen = HalfmqFastAPIRouter(halfmq_broker.address, logger=None), []

    @router.subscriber("orders")
    async def handle(order: dict[str, int]) -> None:
        seen.append(order)

    @router.post("/orders")
    async def create(order: dict[str, int]) -> str:
        await router.broker.publish(order, "orders")
        return "created"

    app = FastAPI()
    app.include_router(router)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
    ):
        assert (await client.post("/orders", json={"id": 4711})).json() == "created"
        await _until(lambda: seen)
        assert "orders" in (await client.get("/asyncapi")).text

    assert seen == [{"id": 4711}]


async def test_handlers_are_tested_without_a_broker() -> None:
    broker = HalfmqBroker()

    @broker.subscriber("orders")
    @broker.publisher("invoices")
    async def bill(price: int) -> int:
        return price * 2

    @broker.subscriber("invoices")
    async def file(total: int) -> None:
        """Called by the publisher."""

    async with TestHalfmqBroker(broker) as patched:
        await patched.publish(21, "orders")
        assert file.mock is not None
        file.mock.assert_called_once_with(42)
        assert await (await patched.request(4, "orders")).decode() == 8


def test_asyncapi_names_topics_and_servers() -> None:
    broker = HalfmqBroker("halfmq.example:9876")
    broker.subscriber("orders", title="Orders")(lambda order: order)
    schema: Any = AsyncAPI(broker).to_specification().to_jsonable()

    assert schema["servers"]["development"]["host"] == "halfmq.example:9876"
    assert schema["channels"]["Orders"]["address"] == "orders"


@pytest.mark.campaign
def test_faststreams_own_tests_pass(tmp_path: Path) -> None:
    """Its tests for brokers, from its repository at the tag that is installed."""
    try:
        url = f"{SOURCES}/{version('faststream')}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            archive = tarfile.open(fileobj=io.BytesIO(answer.read()))  # noqa: SIM115
    except OSError as error:
        pytest.skip(f"FastStream's tests cannot be downloaded here: {error}")
    archive.extractall(tmp_path, filter="data")
    [tree] = tmp_path.iterdir()
    folder = tree / "tests/brokers/halfmq"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "test_halfmq.py").write_text(CONFORMANCE.read_text())
    with broker_process() as running:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=short", str(folder), "-W", "ignore"],
            cwd=tree,
            env={**os.environ, "NAMESRV_ADDR": running.address},
            capture_output=True,
            text=True,
            check=False,
        )

    assert done.returncode == 0, done.stdout[-20_000:]


async def _until(done: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not done():  # noqa: ASYNC110 -- what handlers did, not an event of ours
            await asyncio.sleep(0.005)
