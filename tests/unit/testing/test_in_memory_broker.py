"""What a user's test can rely on: production behaviour, at once, with faults that it orders."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import uvloop
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from halfmq.client import (
    BrokerRefusedError,
    ClientConfig,
    Consumer,
    Decision,
    Message,
    MessageView,
    Producer,
    TransactionProducer,
)
from halfmq.client.consuming import assignment
from halfmq.client.ledger import TransactionLedger
from halfmq.testing import InMemoryBroker

ORDER = Message("orders", b"4711", keys=["4711"])


def _consumer(broker: InMemoryBroker, **settings: Any) -> Consumer:
    return Consumer("billing", {"orders": "*"}, namesrv=broker.address, **settings)


def _bodies(messages: Sequence[Any]) -> list[bytes]:
    return [message.body for message in messages]


async def _nothing(consumer: Consumer) -> bool:
    return await consumer.receive(timeout=0.01) is None


async def test_a_new_topic_is_consumed_at_once(
    halfmq_broker: InMemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer that waits for the topic need not look for it again."""
    monkeypatch.setattr(assignment, "MISSING_TOPIC_INTERVAL", 1e6)

    async with (
        _consumer(halfmq_broker) as consumer,
        Producer("shop", namesrv=halfmq_broker.address) as producer,
    ):
        await producer.send(ORDER)
        received = await consumer.receive()

    assert isinstance(received, MessageView)
    assert received.body == b"4711"


async def test_time_passes_when_the_test_says_so(halfmq_broker: InMemoryBroker) -> None:
    """A delayed message and a retry arrive when they are due, and not before."""
    async with (
        Producer("shop", namesrv=halfmq_broker.address) as producer,
        _consumer(halfmq_broker) as consumer,
    ):
        await producer.send(Message("orders", b"late", deliver_after=timedelta(minutes=10)))
        await halfmq_broker.advance(599)
        assert await _nothing(consumer)
        await halfmq_broker.advance(2)
        late = await consumer.receive()
        await late.retry(delay=timedelta(seconds=10), reason="try later")
        await halfmq_broker.advance(9)
        assert await _nothing(consumer)
        await halfmq_broker.advance(2)
        again = await consumer.receive()

    assert (late.body, again.body, again.delivery_attempt) == (b"late", b"late", 2)


async def test_an_undecided_transaction_is_asked_about(halfmq_broker: InMemoryBroker) -> None:
    asked: list[str] = []

    def check(message: MessageView) -> Decision:
        asked.append(message.keys)
        return Decision.UNKNOWN if len(asked) < 3 else Decision.COMMIT

    async with TransactionProducer("shop", check, namesrv=halfmq_broker.address) as producer:
        async with producer.transaction(ORDER) as transaction:
            transaction.decide(Decision.UNKNOWN)
        assert await halfmq_broker.messages("orders") == []
        await halfmq_broker.advance(600)

    assert asked == ["4711"] * 3
    assert _bodies(await halfmq_broker.messages("orders")) == [b"4711"]


async def test_databases_work_in_the_same_loop(halfmq_broker: InMemoryBroker) -> None:
    """A row and its message, while the clock jumps over the life of the producer's connections."""
    engine = create_async_engine("sqlite+aiosqlite://")
    ledger = TransactionLedger()
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE orders (id TEXT)"))
        await ledger.create_table_async(connection)
    check = ledger.async_checker(engine.connect)

    async with TransactionProducer("shop", check, namesrv=halfmq_broker.address) as producer:
        await halfmq_broker.advance(600)
        async with AsyncSession(engine) as session, producer.transaction(ORDER, session=session):
            await session.execute(text("INSERT INTO orders VALUES ('4711')"))
        with suppress(ValueError):
            async with (
                AsyncSession(engine) as session,
                producer.transaction(ORDER, session=session),
            ):
                await session.execute(text("INSERT INTO orders VALUES ('4712')"))
                raise ValueError
        async with engine.connect() as connection:
            rows = (await connection.execute(text("SELECT id FROM orders"))).all()
    await engine.dispose()

    assert [tuple(row) for row in rows] == [("4711",)]
    assert _bodies(await halfmq_broker.messages("orders")) == [b"4711"]


async def test_a_killed_broker_keeps_what_it_acknowledged(halfmq_broker: InMemoryBroker) -> None:
    """Clients wait for it, and an acknowledgement that was not committed is repeated."""
    async with (
        Producer("shop", namesrv=halfmq_broker.address) as producer,
        _consumer(halfmq_broker) as consumer,
    ):
        await producer.send(ORDER)
        await (await consumer.receive()).ack()
        await halfmq_broker.kill()
        with pytest.raises(ConnectionRefusedError):
            await halfmq_broker.messages("orders")
        await halfmq_broker.start()
        await halfmq_broker.advance(30)
        await producer.send(Message("orders", b"4712"))
        received = await consumer.receive()

    assert received.body == b"4712"
    assert sorted(_bodies(await halfmq_broker.messages("orders"))) == [b"4711", b"4712"]


async def test_a_stopped_broker_starts_with_its_messages(halfmq_broker: InMemoryBroker) -> None:
    async with Producer("shop", namesrv=halfmq_broker.address) as producer:
        await producer.send(ORDER)
    await halfmq_broker.stop()
    await halfmq_broker.start()

    assert _bodies(await halfmq_broker.messages("orders")) == [b"4711"]


@pytest.mark.parametrize(
    ("fault", "stored"), [("drop_requests", 1), ("drop_answers", 2), ("duplicate_requests", 2)]
)
async def test_faults_of_the_network_happen_to_the_next_send(
    halfmq_broker: InMemoryBroker, fault: str, stored: int
) -> None:
    """A send whose answer is lost is repeated: at least once, as in production."""
    async with Producer("shop", namesrv=halfmq_broker.address) as producer:
        await producer.send(Message("other", b"first"))
        getattr(halfmq_broker, fault)("send")
        await producer.send(ORDER)
        await halfmq_broker.advance(0)  # a repeated request has a connection of its own
        await producer.send(Message("other", b"last"))

    assert _bodies(await halfmq_broker.messages("orders")) == [b"4711"] * stored
    assert len(await halfmq_broker.messages("other")) == 2


async def test_a_lost_decision_is_made_once(halfmq_broker: InMemoryBroker) -> None:
    def check(_message: MessageView) -> Decision:
        return Decision.COMMIT

    async with TransactionProducer("shop", check, namesrv=halfmq_broker.address) as producer:
        halfmq_broker.drop_requests("decision")
        halfmq_broker.drop_answers("decision")
        async with producer.transaction(ORDER):
            pass
        await halfmq_broker.advance(120)

    assert _bodies(await halfmq_broker.messages("orders")) == [b"4711"]


async def test_a_slow_network_delays_requests_by_the_clock(halfmq_broker: InMemoryBroker) -> None:
    async with Producer("shop", namesrv=halfmq_broker.address) as producer:
        halfmq_broker.delay_network(1.0)
        send = asyncio.ensure_future(producer.send(ORDER))
        await halfmq_broker.advance(0.9)
        assert not send.done()
        await halfmq_broker.advance(20)
        assert send.done()
        await send
        halfmq_broker.repair_network()


async def test_a_full_disk_refuses_messages_until_it_is_free(halfmq_broker: InMemoryBroker) -> None:
    impatient = ClientConfig(send_timeout=20)
    async with Producer("shop", namesrv=halfmq_broker.address, config=impatient) as producer:
        await producer.send(ORDER)
        halfmq_broker.fill_disk()
        await halfmq_broker.advance(30)
        refused = asyncio.ensure_future(producer.send(ORDER))
        await halfmq_broker.advance(60)
        with pytest.raises(BrokerRefusedError, match="disk"):
            await refused
        halfmq_broker.free_disk()
        await halfmq_broker.advance(30)
        await producer.send(ORDER)


async def test_brokers_of_one_loop_are_apart() -> None:
    async with InMemoryBroker() as one, InMemoryBroker() as other:
        async with Producer("shop", namesrv=one.address) as producer:
            await producer.send(ORDER)

        assert one.address != other.address
        assert len(await one.messages("orders")) == 1
        assert await other.messages("orders") == []


def test_other_loops_are_refused() -> None:
    """A fixture that lives longer than the loop, and a loop whose clock cannot be advanced."""

    @asynccontextmanager
    async def used(broker: InMemoryBroker) -> Any:
        async with Producer("shop", namesrv=broker.address) as producer:
            yield producer

    async def use(broker: InMemoryBroker) -> None:
        async with used(broker) as producer:
            await producer.send(ORDER)

    broker = InMemoryBroker()
    asyncio.run(use(broker))
    with pytest.raises(RuntimeError, match="another event loop: use one per test"):
        asyncio.run(use(broker))
    broker.discard()
    with pytest.raises(TypeError, match="without uvloop"):
        uvloop.run(use(InMemoryBroker()))


def test_an_unknown_kind_of_request_is_refused() -> None:
    async def use() -> None:
        InMemoryBroker().drop_requests("sends")  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="kind is 'sends', expected 'any', 'send'"):
        asyncio.run(use())
