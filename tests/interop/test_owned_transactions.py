"""Transactions whose session the producer owns: both are committed, or none, however it ends."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from halfmq.client import (
    ClientError,
    ConfigurationError,
    InvalidMessageError,
    TransactionNotCommittedError,
    ledger,
)
from halfmq.client.blocking import TransactionProducer as BlockingProducer
from halfmq.client.transactional.owned_transaction import OPEN
from tests.support.broker_thread import BrokerThread
from tests.support.client_transactions import COMMIT, MESSAGE, ROLLBACK, LocalError, new_producer
from tests.support.fake_broker import fake_broker, until
from tests.support.ledger_books import Books, books_of
from tests.support.ledger_drivers import MARIADB, POSTGRESQL, SQLITE, USUAL, Driver, Place
from tests.support.ledger_endings import Work, opened, rows

Block = Callable[[Work], Awaitable[None]]


async def works(work: Work) -> None:
    await work.order()


async def does_nothing(_work: Work) -> None:
    pass


async def raises(work: Work) -> None:
    await work.order()
    raise LocalError


async def swallows_a_failure(work: Work) -> None:
    await work.order()
    with suppress(Exception):
        await work.run("insert into nowhere values (1)")


async def undoes_a_part(work: Work) -> None:
    await work.order()
    await work.run("savepoint inner_one")
    await work.order("inner")
    await work.run("rollback to savepoint inner_one")


async def commits(work: Work) -> None:
    await work.order()
    await work.commit()


async def commits_and_works_on(work: Work) -> None:
    await commits(work)
    if work.books.driver.name == "asyncpg":
        await work.run("begin")
    await work.order("another")


async def commits_and_raises(work: Work) -> None:
    await commits(work)
    raise LocalError


async def rolls_back(work: Work) -> None:
    await work.order()
    await work.roll_back()


async def rolls_back_and_works_again(work: Work) -> None:
    await rolls_back(work)
    await work.order("another")


async def rolls_back_and_raises(work: Work) -> None:
    await rolls_back(work)
    raise LocalError


async def is_cancelled(work: Work) -> None:
    await work.order()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.Event().wait()


async def is_cancelled_at_the_end(work: Work) -> None:
    await work.order()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)


async def loses_its_connection(work: Work) -> None:
    await work.order()
    mysql = work.books.driver.database == MARIADB
    (session,) = await work.run("select connection_id()" if mysql else "select pg_backend_pid()")
    kill = "kill {}" if mysql else "select pg_terminate_backend({})"
    async with work.books.connected(autocommit=True) as another:
        await work.books.run(another, kill.format(session))


async def breaks_a_deferred_constraint(work: Work) -> None:
    if work.books.driver.database == SQLITE:
        await work.run("pragma defer_foreign_keys = on")
    parent, child = (f"{work.books.orders_table}_{name}" for name in ("a", "b"))
    await work.run(f"create table {parent} (id integer primary key)")
    refers = f"references {parent} (id) deferrable initially deferred"
    await work.run(f"create table {child} (id integer {refers})")
    await work.run(f"insert into {child} values (7)")


async def is_rolled_back_by_sqlite(work: Work) -> None:
    table = work.books.orders_table
    await work.run(f"create unique index {table}_i on {table} (id)")
    await work.order()
    with suppress(Exception):
        await work.run(f"insert or rollback into {table} values ('first')")
    await work.order("another")


EVERYWHERE: Final = (
    *(works, does_nothing, raises, swallows_a_failure, undoes_a_part, is_cancelled),
    *(commits, commits_and_works_on, commits_and_raises, is_cancelled_at_the_end),
    *(rolls_back, rolls_back_and_works_again, rolls_back_and_raises),
)
BLOCKS: Final[dict[str, tuple[Block, ...]]] = {
    SQLITE: (*EVERYWHERE, is_rolled_back_by_sqlite),
    POSTGRESQL: (*EVERYWHERE, breaks_a_deferred_constraint, loses_its_connection),
    MARIADB: (*EVERYWHERE, loses_its_connection),
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check soon gives up when somebody holds the row."""
    monkeypatch.setattr(ledger, "LOCK_SECONDS", 0.05)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # lost connections
@pytest.mark.parametrize(
    ("driver", "block"),
    [(driver, block) for driver in USUAL for block in BLOCKS[driver.database]],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
@pytest.mark.parametrize("adds", [False, True], ids=["given", "added"])
async def test_both_are_committed_or_none(
    driver: Driver, block: Block, adds: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The message is delivered if and only if the row is there; no error means that both are."""
    books = books_of(driver, request, tmp_path)
    await books.create()
    raised: BaseException | None = None
    async with (
        fake_broker() as broker,
        opened(books) as connection,
        new_producer(broker, books.checker()) as producer,
    ):
        broker.create_topic("orders")
        transaction: list[Any] = []

        async def run() -> None:
            messages = () if adds else MESSAGE
            async with producer.transaction(messages, session=connection) as tx:
                transaction.append(tx)
                if adds:
                    tx.add(MESSAGE)
                await block(Work(books, connection, tx.id))

        (done,), _ = await asyncio.wait([asyncio.ensure_future(run())])
        raised = asyncio.CancelledError() if done.cancelled() else done.exception()
        halves = [broker.half_of(transaction[0].id)] if broker.halves or not adds else []
        at_the_end = [decision for half in halves for decision in half.decisions]
        with suppress(Exception):
            await books.roll_back(connection)
        for half in halves:
            await until(partial(lambda one: any(one.decisions) or not broker.check(one), half))
        delivered = len(broker.messages("orders"))
    there = await rows(books)

    assert delivered == len(there)
    if raised is None:
        assert (delivered, at_the_end) == (1, [COMMIT])
    if block in (works, does_nothing, undoes_a_part, commits, commits_and_works_on):
        assert raised is None
    if block is commits_and_works_on:
        assert sorted(await books.orders()) == ["another", "first"]
    if block in (raises, commits_and_raises, rolls_back_and_raises):
        assert isinstance(raised, LocalError)
    if block in (rolls_back, rolls_back_and_works_again, is_rolled_back_by_sqlite):
        assert isinstance(raised, TransactionNotCommittedError)
        assert (await books.orders()) == []
    if block in (raises, is_cancelled):  # at once, without a check
        assert at_the_end in ([ROLLBACK], [])


async def test_a_block_inside_one_of_another_database_gives_it_back(tmp_path: Path) -> None:
    """What is sent on commit after the inner block, a task of Celery, belongs to the outer one."""
    driver = next(one for one in USUAL if one.name == "aiosqlite")
    outside, inside = (Books(driver, Place(tmp_path / name)) for name in ("outer", "inner"))
    await outside.create()
    await inside.create()
    async with (
        fake_broker() as broker,
        opened(outside) as one,
        opened(inside) as another,
        new_producer(broker, outside.checker()) as outer,
        new_producer(broker, inside.checker()) as inner,
    ):
        broker.create_topic("orders")
        async with outer.transaction(MESSAGE, session=one) as tx:
            async with inner.transaction(MESSAGE, session=another):
                assert OPEN.get() is not tx
            assert OPEN.get() is tx
        assert OPEN.get() is None
        assert len(broker.messages("orders")) == 2


@pytest.mark.parametrize("driver", [one for one in USUAL if not one.awaited], ids=str)
@pytest.mark.parametrize("adds", [False, True], ids=["given", "added"])
def test_the_blocking_client_does_the_same(
    driver: Driver, adds: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In the caller's thread, where connections of most drivers belong."""
    books = books_of(driver, request, tmp_path)
    asyncio.run(books.create())

    def connect() -> Any:
        return driver.connect(books.place, False)

    served = BrokerThread()
    try:
        served.broker.create_topic("orders")
        with BlockingProducer(
            "orders-tx", books.ledger.checker(connect), namesrv=served.broker.address
        ) as producer:
            for fails in (False, True):
                connection = connect()
                with suppress(LocalError):  # noqa: SIM117
                    with producer.transaction(() if adds else MESSAGE, session=connection) as tx:
                        asyncio.run(works(Work(books, connection, tx.id)))
                        if adds:
                            tx.add(MESSAGE)
                        if fails:
                            raise LocalError
                connection.close()
        assert len(served.broker.messages("orders")) == 1
    finally:
        served.close()
    assert asyncio.run(books.orders()) == ["first"]


@pytest.mark.parametrize("driver", USUAL, ids=str)
async def test_a_transaction_of_somebody_else_is_refused_before_anything_is_sent(
    driver: Driver, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Otherwise somebody else's rollback would come after our commit."""
    if driver.name in ("aiomysql", "pg8000"):
        pytest.skip("the driver does not tell")
    books = books_of(driver, request, tmp_path)
    await books.create()
    async with (
        fake_broker() as broker,
        opened(books) as connection,
        new_producer(broker, books.checker()) as producer,
    ):
        await Work(books, connection, "x").order()
        with pytest.raises(ConfigurationError, match="without an open transaction"):
            producer.transaction(MESSAGE, session=connection)
        assert broker.halves == {}


@pytest.mark.parametrize("flushes", [False, True])
async def test_what_a_flush_raises_rolls_back_both_at_once(tmp_path: Path, flushes: bool) -> None:
    """Also one that halfmq does; the session has no use of its connection then."""
    sqlalchemy: Any = importlib.import_module("sqlalchemy")
    orm: Any = importlib.import_module("sqlalchemy.orm")
    asyncio_orm: Any = importlib.import_module("sqlalchemy.ext.asyncio")
    engine = asyncio_orm.create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'x.db'}")
    base = orm.declarative_base()

    class Order(base):  # type: ignore[misc, valid-type] # SQLAlchemy has no types here
        __tablename__ = "orders"
        number = sqlalchemy.Column(sqlalchemy.String, primary_key=True, nullable=False)

    own = ledger.TransactionLedger()
    async with engine.begin() as connection:
        await connection.run_sync(base.metadata.create_all)
        await connection.execute(sqlalchemy.insert(Order).values(number="1"))
        await own.create_table_async(connection)  # and commit
    async with (
        fake_broker() as broker,
        new_producer(broker, own.async_checker(engine.connect)) as producer,
        asyncio_orm.AsyncSession(engine) as session,
    ):
        transaction = producer.transaction(MESSAGE, session=session)

        async def block() -> None:
            async with transaction:
                session.add(Order(number="1"))
                if flushes:
                    await session.flush()

        with pytest.raises(sqlalchemy.exc.IntegrityError):
            await block()
        (half,) = broker.halves.values()
        assert half.decisions == [ROLLBACK]
        assert not session.in_transaction()
    await engine.dispose()


async def test_a_block_that_adds_no_message_only_commits_its_rows(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """And a message is never added where nobody would send it."""
    books = books_of(next(one for one in USUAL if one.database == SQLITE), request, tmp_path)
    await books.create()
    async with (
        fake_broker() as broker,
        opened(books) as connection,
        new_producer(broker, books.checker()) as producer,
    ):
        async with producer.transaction(session=connection) as tx:
            await Work(books, connection, tx.id).order()
        with pytest.raises(ClientError, match="without messages"):
            tx.add(MESSAGE)
        async with producer.transaction(MESSAGE, session=connection) as tx:
            with pytest.raises(ClientError, match="without messages"):
                tx.add(MESSAGE)
        with pytest.raises(InvalidMessageError):
            producer.transaction(())
        assert len(broker.halves) == 1
    assert await books.orders() == ["first"]


async def test_without_a_ledger_a_session_is_refused() -> None:
    """A checker of the user's own proves nothing about the session."""
    async with fake_broker() as broker, new_producer(broker) as producer:
        with pytest.raises(ConfigurationError, match="ledger"):
            producer.transaction(MESSAGE, session=object())


@pytest.mark.parametrize("mode", ["rollback_only", "create_savepoint"])
def test_a_session_on_a_connection_in_a_transaction_is_refused(mode: str, tmp_path: Path) -> None:
    """As tests use it: the session's commit is none."""
    sqlalchemy: Any = importlib.import_module("sqlalchemy")
    orm: Any = importlib.import_module("sqlalchemy.orm")
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    own = ledger.TransactionLedger()
    served = BrokerThread()
    try:
        with (
            BlockingProducer(
                "orders-tx", own.checker(engine.connect), namesrv=served.broker.address
            ) as producer,
            engine.connect() as connection,
            connection.begin(),
            pytest.raises(ConfigurationError, match="without an open transaction"),
        ):
            producer.transaction(
                MESSAGE, session=orm.Session(connection, join_transaction_mode=mode)
            )
    finally:
        served.close()
