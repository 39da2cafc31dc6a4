"""Tests of the shop, which need no server. Run them with ``pytest -o asyncio_mode=auto``."""

from collections.abc import AsyncIterator

import httpx
import pytest
import shop
from database import engine, ledger

from halfmq.client import TransactionProducer
from halfmq.testing import InMemoryBroker


@pytest.fixture
async def web(
    halfmq_broker: InMemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """The shop, with a producer that reaches the broker of the test."""
    checker = ledger.async_checker(engine.connect)
    producer = TransactionProducer("shop", checker, namesrv=halfmq_broker.address)
    monkeypatch.setattr(shop, "producer", producer)
    transport = httpx.ASGITransport(shop.app)
    async with (
        shop.lifespan(shop.app),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
    ):
        yield client


async def test_an_order_is_published(web: httpx.AsyncClient, halfmq_broker: InMemoryBroker) -> None:
    """With its number as the key."""
    answer = await web.post("/orders", json={"number": "o-1", "customer": "c-1"})
    assert answer.status_code == 201
    [message] = await halfmq_broker.messages("orders")
    assert message.keys == "o-1"


async def test_an_order_that_exists_is_not_published(
    web: httpx.AsyncClient, halfmq_broker: InMemoryBroker
) -> None:
    """Its row was refused, so there is no message."""
    for status in (201, 409):
        answer = await web.post("/orders", json={"number": "o-2", "customer": "c-1"})
        assert answer.status_code == status
    assert len(await halfmq_broker.messages("orders")) == 1
