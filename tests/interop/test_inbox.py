"""The inbox by every driver: the work of a message is committed once."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import StaticPool, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Session

from halfmq.client import (
    AlreadyProcessedError,
    AutocommitError,
    ConfigurationError,
    Consumer,
    Inbox,
    Message,
    MessageView,
    Producer,
)
from halfmq.client.blocking import Consumer as BlockingConsumer
from halfmq.client.blocking import Producer as BlockingProducer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.client_transactions import MESSAGE, LocalError, new_producer
from tests.support.fake_broker import fake_broker
from tests.support.ledger_books import Books, books_of
from tests.support.ledger_drivers import POSTGRESQL, USUAL, Driver
from tests.support.ledger_endings import Work, opened
from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with broker_process(tmp_path_factory.mktemp("inbox")) as running:
        yield running


async def _message(broker: BrokerProcess, body: bytes) -> MessageView:
    """A message of its own, as a consumer gets it."""
    topic = f"inbox-{body.decode()}"
    async with (
        Producer("p", namesrv=broker.address) as producer,
        Consumer(topic, {topic: "*"}, start_from="first", namesrv=broker.address) as consumer,
    ):
        await producer.send(Message(topic, body))
        message = await consumer.receive(timeout=PATIENCE_S)
        assert message is not None
        return message


SELECT = text("select 1")


class Mapped(DeclarativeBase):
    """What a session may bind to an engine of its own."""


async def fail() -> None:
    raise LocalError


class Desk:
    """Processes messages with a driver."""

    def __init__(self, books: Books, group: str = "shipping") -> None:
        self.books = books
        self.inbox = Inbox(group, f"inbox_{books.name}")

    async def create(self) -> None:
        await self.books.create()
        async with self.books.connected() as connection:
            if self.books.driver.awaited:
                await self.inbox.create_table_async(connection)
            else:
                self.inbox.create_table(connection)

    async def record(self, connection: Any, message: MessageView) -> None:
        if self.books.driver.awaited:
            await self.inbox.record_async(connection, message)
        else:
            self.inbox.record(connection, message)

    async def process(self, connection: Any, message: MessageView, fails: bool = False) -> None:
        try:
            if self.books.driver.name == "asyncpg":
                await self.books.run(connection, "begin")
            await self.record(connection, message)
            await Work(self.books, connection, "").order()
            await (fail() if fails else self.books.commit(connection))
        except BaseException:
            await self.books.roll_back(connection)
            raise


@pytest.mark.parametrize("driver", USUAL, ids=str)
async def test_work_is_committed_once(
    driver: Driver, broker: BrokerProcess, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """After a failure it is done again; after a commit never, but by another group."""
    desk = Desk(books_of(driver, request, tmp_path))
    await desk.create()
    message = await _message(broker, f"{driver}".replace("+", "-").encode())
    async with opened(desk.books) as connection:
        with pytest.raises(LocalError):
            await desk.process(connection, message, fails=True)
        await desk.process(connection, message)
        for _ in range(2):
            with pytest.raises(AlreadyProcessedError, match="shipping has processed"):
                await desk.process(connection, message)
        other = Desk(desk.books, "billing")
        await other.process(connection, message)

        assert await desk.books.orders() == ["first"] * 2
        await desk.books.run(connection, f"update {desk.inbox.table} set recorded_at = 0")
        await desk.books.commit(connection)
        pruned = (
            await desk.inbox.prune_async(connection)
            if driver.awaited
            else desk.inbox.prune(connection)
        )
        assert pruned == 1  # of its group
        await desk.process(connection, message)


@pytest.mark.parametrize("driver", USUAL, ids=str)
async def test_consumed_written_and_published_in_one_step(
    driver: Driver, broker: BrokerProcess, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A second delivery publishes nothing: the whole block is rolled back."""
    desk = Desk(books_of(driver, request, tmp_path))
    await desk.create()
    message = await _message(broker, f"{driver}-steps".replace("+", "-").encode())
    async with (
        fake_broker() as fake,
        opened(desk.books) as connection,
        new_producer(fake, desk.books.checker()) as producer,
    ):
        fake.create_topic("orders")
        done = 0
        for _ in range(3):
            try:
                async with producer.transaction(MESSAGE, session=connection) as tx:
                    await desk.record(connection, message)
                    await Work(desk.books, connection, tx.id).order()
            except AlreadyProcessedError:
                continue
            done += 1
        assert done == 1
        assert len(fake.messages("orders")) == 1
    assert await desk.books.orders() == ["first"]


@pytest.mark.parametrize("driver", USUAL, ids=str)
async def test_the_consumer_owns_the_transaction(
    driver: Driver, broker: BrokerProcess, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A failure rolls back and is not acknowledged; a second delivery is, without work."""
    books = books_of(driver, request, tmp_path)
    desk = Desk(books)
    await desk.create()
    topic = f"{driver}-owned".replace("+", "-")
    async with Producer("shop", namesrv=broker.address) as producer:
        await producer.send(Message(topic, b"once"))
    settled: list[bool] = []

    async def process(consumer: Any, connection: Any, message: Any, *, fails: bool) -> None:
        work = Work(books, connection, "")
        if driver.awaited:
            async with consumer.inbox(message, session=connection, table=desk.inbox.table):
                await work.order()
                await (fail() if fails else asyncio.sleep(0))
        else:
            with desk.inbox.processing_blocking(connection, message, lambda: settled.append(True)):
                await work.order()
                await (fail() if fails else asyncio.sleep(0))

    async with (
        Consumer("shipping", {topic: "*"}, start_from="first", namesrv=broker.address) as consumer,
        opened(books) as connection,
    ):
        message = await consumer.receive()
        with pytest.raises(LocalError):
            await process(consumer, connection, message, fails=True)
        assert not message.settled
        assert not settled
        assert await books.orders() == []
        await process(consumer, connection, message, fails=False)
        assert [*settled, message.settled].count(True) == 1
        with pytest.raises(AlreadyProcessedError):
            await process(consumer, connection, message, fails=False)
        assert await books.orders() == ["first"]


LOST: Final = [
    *((driver, "rolled-back") for driver in USUAL),
    # Other databases execute what follows a failed statement.
    *((driver, "swallowed") for driver in USUAL if driver.database == POSTGRESQL),
]


@pytest.mark.parametrize(("driver", "how"), LOST, ids=str)
async def test_work_that_was_rolled_back_unseen_is_not_acknowledged(
    driver: Driver, how: str, broker: BrokerProcess, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """PostgreSQL answers COMMIT with a rollback after a failure that the work has swallowed."""
    books = books_of(driver, request, tmp_path)
    desk = Desk(books)
    await desk.create()
    message = await _message(broker, f"{driver}-{how}".replace("+", "-").encode())
    acknowledged: list[bool] = []

    async def acknowledge() -> None:
        acknowledged.append(True)

    async def work(connection: Any) -> None:
        one = Work(books, connection, "")
        await one.order()
        if how == "swallowed":
            with suppress(Exception):
                await one.run("insert into nowhere values (1)")
        else:
            await one.roll_back()
            await one.order("another")

    async def process(connection: Any) -> None:
        run = partial(desk.inbox.run_async, connection)
        if driver.awaited:
            async with desk.inbox.processing(connection, message, acknowledge, run):
                await work(connection)
        else:
            with desk.inbox.processing_blocking(
                connection, message, lambda: acknowledged.append(True)
            ):
                await work(connection)

    async with opened(books) as connection:
        with pytest.raises(Exception, match=r"aborted|the inbox has lost the row"):
            await process(connection)
    assert not acknowledged
    assert await books.orders() == []


async def test_a_handler_is_done_with_what_was_processed_before(broker: BrokerProcess) -> None:
    """It is acknowledged, not retried."""

    async def handle(message: MessageView) -> None:
        await consumer.stop()
        raise AlreadyProcessedError("g", message.inbox_id)

    async with Producer("shop", namesrv=broker.address) as producer:
        await producer.send(Message("handled", b"x"))
    async with Consumer(
        "handlers", {"handled": "*"}, start_from="first", namesrv=broker.address
    ) as consumer:
        summary = await consumer.run(handle)

    assert (summary.handled, summary.retried) == (1, 0)


def _insert_and_fail(database: sqlite3.Connection) -> None:
    database.execute("insert into parcels values ('lost')")
    raise LocalError


def test_the_blocking_consumer_owns_the_transaction(broker: BrokerProcess) -> None:
    database = sqlite3.connect(":memory:")
    Inbox("blocking").create_table(database)
    database.execute("create table parcels (content text)")
    with BlockingProducer("shop", namesrv=broker.address) as producer:
        producer.send(Message("parcels", b"p-1"))

    with BlockingConsumer(
        "blocking", {"parcels": "*"}, start_from="first", namesrv=broker.address
    ) as consumer:
        message = consumer.receive()
        block = consumer.inbox(message, session=database)
        with pytest.raises(LocalError), block:
            _insert_and_fail(database)
        settled = [message.settled]
        with consumer.inbox(message, session=database):
            database.execute("insert into parcels values ('kept')")
        settled.append(message.settled)
        with pytest.raises(AlreadyProcessedError), consumer.inbox(message, session=database):
            database.execute("insert into parcels values ('again')")

    assert settled == [False, True]
    assert database.execute("select * from parcels").fetchall() == [("kept",)]


def test_a_session_with_several_engines_is_refused(broker: BrokerProcess) -> None:
    """Before it is used if it says so, and before the commit if it chooses by itself."""
    one, other = (create_engine("sqlite://", poolclass=StaticPool) for _ in range(2))
    inbox, message = Inbox("g"), asyncio.run(_message(broker, b"engines"))
    for engine in (one, other):
        with engine.connect() as connection:
            inbox.create_table(connection)

    class Routed(Session):
        def get_bind(self, *_: Any, **given: Any) -> Any:
            return other if given.get("clause") is SELECT else one

    for session in (Session(one, binds={Mapped: other}), Routed()):
        block = inbox.processing_blocking(session, message, print)
        with (
            pytest.raises(ConfigurationError, match="one with a single engine, or twophase"),
            block,
        ):
            session.execute(SELECT)
        assert one.connect().execute(text("select * from halfmq_inbox")).all() == []


async def test_deliveries_at_the_same_time_commit_once(
    broker: BrokerProcess, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The second one waits for the first one's transaction."""
    (driver,) = [one for one in USUAL if one.name == "asyncpg"]
    desk = Desk(books_of(driver, request, tmp_path))
    await desk.create()
    message = await _message(broker, b"twice")

    async def deliver() -> bool:
        async with opened(desk.books) as connection:
            try:
                await desk.process(connection, message)
            except AlreadyProcessedError:
                return False
            return True

    assert sorted(await asyncio.gather(*(deliver() for _ in range(8)))) == [False] * 7 + [True]
    assert await desk.books.orders() == ["first"]


async def test_wrong_use_is_refused(broker: BrokerProcess, tmp_path: Path) -> None:
    """Without a transaction the row would stay if the work fails."""
    inbox = Inbox("g")
    message = await _message(broker, b"wrong")
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    inbox.create_table(connection)
    with pytest.raises(AutocommitError):
        inbox.record(connection, message)
    with pytest.raises(ConfigurationError, match="older_than"):
        inbox.prune(connection, timedelta(hours=1))
    with pytest.raises(ConfigurationError, match="group"):
        Inbox(7)  # type: ignore[arg-type]
    connection.close()
