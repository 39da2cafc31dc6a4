"""The ledger on real databases, by each driver: what it promises holds for all of them.

PostgreSQL and MariaDB are started for these tests, which are skipped where they, or a driver, are
not installed.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from halfmq.client import (
    AutocommitError,
    ConfigurationError,
    Decision,
    TransactionFencedError,
    TransactionLedger,
    ledger,
)
from halfmq.client.transactional.databases import is_database_error
from halfmq.client.transactional.recorded_transactions import look_of
from tests.support.client_transactions import (
    COMMIT,
    MESSAGE,
    QUICK,
    ROLLBACK,
    LocalError,
    new_producer,
    undecided,
)
from tests.support.fake_broker import fake_broker, until
from tests.support.ledger_books import Books, books_of
from tests.support.ledger_checks import asked_about
from tests.support.ledger_drivers import (
    DRIVERS,
    MARIADB,
    POSTGRESQL,
    SQLITE,
    USUAL,
    Driver,
    Place,
    django_connections,
)

WAIT_SECONDS: Final = 60.0
"""A guard against hanging."""
OWN_LIMITS: Final = {
    SQLITE: ("pragma busy_timeout = 43000", "pragma busy_timeout"),
    POSTGRESQL: ("set lock_timeout = 43000", "show lock_timeout"),
    MARIADB: ("set innodb_lock_wait_timeout = 43", "select @@innodb_lock_wait_timeout"),
}
"""How the owner of a connection sets the limit for its locks, and sees it."""


@pytest.fixture(params=DRIVERS, ids=str)
def books(request: pytest.FixtureRequest, tmp_path: Path) -> Books:
    driver: Driver = request.param
    return books_of(driver, request, tmp_path)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check soon gives up when somebody writes."""
    monkeypatch.setattr(ledger, "LOCK_SECONDS", 0.05)


async def test_a_row_is_a_commit_and_no_row_is_a_rollback_for_ever(books: Books) -> None:
    """By every driver, without a word about its parameters."""
    await books.create()
    check = books.checker()
    async with books.connected() as connection:
        await books.order(connection, "t-1")
        await books.commit(connection)
    assert [await check(asked_about("t-1")) for _ in range(2)] == [Decision.COMMIT] * 2

    assert [await check(asked_about("t-2")) for _ in range(2)] == [Decision.ROLLBACK] * 2
    async with books.connected() as connection:
        with pytest.raises(TransactionFencedError, match="t-2"):
            await books.order(connection, "t-2")
    assert await books.orders() == ["t-1"]


async def test_a_local_transaction_that_rolls_back_leaves_no_row(books: Books) -> None:
    """The row is part of the user's own transaction."""
    await books.create()
    async with books.connected() as connection:
        await books.order(connection, "t-1")
        await books.roll_back(connection)

    assert await books.checker()(asked_about("t-1")) is Decision.ROLLBACK
    assert await books.orders() == []


async def test_in_autocommit_mode_nothing_is_recorded(books: Books) -> None:
    """A row that is committed by itself would say "committed" of work that may still fail."""
    await books.create()
    async with books.connected(autocommit=True) as connection:
        with pytest.raises(AutocommitError, match="t-1 cannot be recorded"):
            await books.record(connection, "t-1")
        await books.run(connection, f"insert into {books.orders_table} values ('usable')")

    assert await books.orders() == ["usable"]
    assert await books.checker()(asked_about("t-1")) is Decision.ROLLBACK


async def test_a_transaction_begun_by_hand_is_one_too(books: Books) -> None:
    """What counts is whether a transaction is open, not the mode of the connection."""
    await books.create()
    for transaction_id, end, decision in [
        ("t-1", "commit", Decision.COMMIT),
        ("t-2", "rollback", Decision.ROLLBACK),
    ]:
        async with books.connected(autocommit=True) as connection:
            await books.run(connection, "begin")
            await books.run(
                connection, f"insert into {books.orders_table} values ('{transaction_id}')"
            )
            await books.record(connection, transaction_id)
            await books.run(connection, end)
        assert await books.checker()(asked_about(transaction_id)) is decision
    assert await books.orders() == ["t-1"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("autocommit", [False, True])
async def test_a_pooled_connection_has_its_own_limit_again(books: Books, autocommit: bool) -> None:
    """Whatever a check has found, and also if somebody was writing."""
    await books.create()
    own, show = OWN_LIMITS[books.driver.database]
    async with books.connected() as connection:
        await books.order(connection, "t-1")
        await books.commit(connection)
    async with books.connected(autocommit=autocommit) as pooled, books.connected() as running:
        await books.run(pooled, own)
        await books.commit(pooled)
        (limit,) = await books.run(pooled, show)
        assert "43" in str(limit)
        check = books.checker(books.keeping(pooled))

        async def answer(transaction_id: str) -> Decision:
            decision = await check(asked_about(transaction_id))
            assert await books.run(pooled, show) == [limit]
            await books.commit(pooled)
            return decision

        assert await answer("t-1") is Decision.COMMIT
        assert await answer("t-2") is Decision.ROLLBACK
        await books.order(running, "t-3")
        assert await answer("t-3") is Decision.UNKNOWN
        await books.commit(running)
        assert await answer("t-3") is Decision.COMMIT
    async with books.connected() as pooled:  # and if the table is not there
        await books.run(pooled, own)
        await books.commit(pooled)
        missing = TransactionLedger("missing")
        books.ledger = missing
        assert await books.checker(books.keeping(pooled))(asked_about("t-1")) is Decision.UNKNOWN
        assert await books.run(pooled, show) == [limit]


async def test_old_rows_can_be_pruned_and_then_decide_nothing(books: Books) -> None:
    """By every driver: how many they were, tombstones too, and UNKNOWN from then on."""
    await books.create()
    assert await books.checker()(asked_about("t-4")) is Decision.ROLLBACK
    async with books.connected() as connection:
        for transaction_id in ("t-1", "t-2"):
            await books.order(connection, transaction_id)
            await books.commit(connection)
        await books.age(connection, 31)
        assert await books.prune(connection) == 3
        assert await books.prune(connection) == 0

    check = books.checker()
    assert [await check(asked_about("t-1")) for _ in range(2)] == [Decision.UNKNOWN] * 2
    assert await check(asked_about("t-3", int(time.time() * 1000))) is Decision.ROLLBACK


async def test_no_programs_clock_decides_about_the_age_of_rows(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is behind loses no row, and one that is ahead prunes none and makes none UNKNOWN."""
    now = time.time()
    await books.create()
    async with books.connected() as connection:
        monkeypatch.setattr(time, "time", lambda: now - 60 * 86_400)
        await books.order(connection, "t-1")
        await books.commit(connection)
        monkeypatch.setattr(time, "time", lambda: now + 60 * 86_400)
        assert await books.prune(connection) == 0
        await books.commit(connection)
        monkeypatch.undo()
        assert await books.prune(connection) == 0

    check = books.checker()
    assert await check(asked_about("t-1", int(now * 1000))) is Decision.COMMIT
    assert await check(asked_about("t-2", int(now * 1000))) is Decision.ROLLBACK


async def test_a_database_that_is_away_is_unknown_and_a_mistake_is_raised(books: Books) -> None:
    """The first is not the checker's fault, and the second should not look like a lock."""
    nowhere = Place(Path("/nonexistent/x.db"), port=1)

    def connect() -> Any:
        raise ZeroDivisionError

    check = books.checker(lambda: books.driver.connect(nowhere, False))
    assert await check(asked_about("t-1")) is Decision.UNKNOWN
    with pytest.raises(ZeroDivisionError):
        await books.checker(connect)(asked_about("t-1"))
    for thread in threading.enumerate():
        if "_connection_worker" in thread.name:  # aiosqlite's, which outlives what has failed
            await asyncio.to_thread(thread.join, WAIT_SECONDS)


async def test_a_look_into_another_database_says_so(books: Books) -> None:
    """A missing table is no answer that will change."""
    ledger_look = look_of(books.checker())
    assert ledger_look is not None
    look: Any = ledger_look.is_committed
    with pytest.raises(ConfigurationError, match=f"connect is .* no table {books.table}"):
        await (look("t-1") if books.driver.awaited else asyncio.to_thread(look, "t-1"))


@pytest.mark.parametrize("driver", [driver for driver in DRIVERS if driver.awaited], ids=str)
async def test_what_must_be_awaited_is_refused_by_the_blocking_methods(
    driver: Driver, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Nothing is executed, and the error says what to call."""
    books = books_of(driver, request, tmp_path)
    await books.create()
    async with books.connected() as connection:
        with pytest.raises(ConfigurationError, match=r"await ledger\.record_async"):
            books.ledger.record(connection, "t-1")
        with pytest.raises(ConfigurationError, match=r"ledger\.async_checker"):
            books.ledger.checker(books.keeping(connection))(asked_about("t-1"))
        with pytest.raises(ConfigurationError, match=r"ledger\.async_checker"):
            books.ledger.checker(lambda: connection)(asked_about("t-1"))
    assert await books.checker()(asked_about("t-1")) is Decision.ROLLBACK


@pytest.mark.parametrize("driver", [d for d in DRIVERS if d.awaited], ids=str)
async def test_a_producer_awaits_the_asynchronous_checker(
    driver: Driver, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A broker's question about another's transaction is answered from its row."""
    books = books_of(driver, request, tmp_path)
    await books.create()
    async with fake_broker() as broker:
        broker.create_topic("orders")
        producer = new_producer(broker, books.checker())
        async with producer:
            for commits in (True, False):
                transaction_id = await undecided(producer)
                if commits:
                    async with books.connected() as connection:
                        await books.order(connection, transaction_id)
                        await books.commit(connection)
                half = broker.half_of(transaction_id)
                broker.check(half)
                await until(lambda half=half: bool(half.decisions))  # type: ignore[misc]
                assert half.decisions == [COMMIT if commits else ROLLBACK]
        assert len(broker.messages("orders")) == 1


LOCKED: Final = {
    POSTGRESQL: ("lock table {} in access exclusive mode", "rollback"),
    MARIADB: ("lock tables {} write", "unlock tables"),
}
"""How a migration locks a table, and lets it go."""


@pytest.mark.parametrize("driver", [d for d in USUAL if d.database != SQLITE], ids=str)
async def test_leaving_a_block_does_not_wait_for_a_locked_table(
    driver: Driver, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The check that has not ended in time is left to the broker."""
    books = books_of(driver, request, tmp_path)
    await books.create()
    lock, unlock = LOCKED[driver.database]
    config = replace(QUICK, own_check_timeout=0.2)
    async with fake_broker() as broker, new_producer(broker, books.checker(), config) as producer:
        broker.create_topic("orders")
        async with books.connected(autocommit=True) as migrating:
            if driver.database == POSTGRESQL:
                await books.run(migrating, "begin")
            await books.run(migrating, lock.format(books.table))
            with pytest.raises(LocalError):
                async with producer.transaction(MESSAGE) as tx:
                    raise LocalError
            half = broker.half_of(tx.id)
            assert (tx.decision, half.decisions) == (Decision.UNKNOWN, [])
            await books.run(migrating, unlock)
        await until(lambda: not broker.check(half) or half.decisions[-1:] == [ROLLBACK])


@pytest.mark.parametrize("driver", [d for d in DRIVERS if d.awaited], ids=str)
async def test_a_check_that_is_cancelled_gives_its_connection_back_whole(
    driver: Driver, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """As when the producer's ``check_timeout`` has passed; some drivers drop it altogether."""
    books = books_of(driver, request, tmp_path)
    await books.create()
    own, show = OWN_LIMITS[driver.database]
    async with books.connected() as running, books.connected() as pooled:
        limits = [await books.run(pooled, show)]
        await books.run(pooled, own)
        await books.commit(pooled)
        limits.append(await books.run(pooled, show))
        await books.commit(pooled)
        await books.order(running, "t-1")
        checking = asyncio.ensure_future(books.checker(books.keeping(pooled))(asked_about("t-1")))
        await asyncio.wait([checking], timeout=0.1)
        checking.cancel()
        await asyncio.wait([checking])
        await books.commit(running)

        assert checking.cancelled()
        try:
            limit = await books.run(pooled, show)
        except Exception as error:  # noqa: BLE001 -- it is broken, and has no limit
            assert is_database_error(error)  # noqa: PT017
        else:
            assert limit in limits
    assert await books.checker()(asked_about("t-1")) is Decision.COMMIT


class _HeldCommit:
    """A DB-API connection whose commit waits for a word from the test."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.reached, self.may_commit = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def commit(self) -> None:
        self.reached.set()
        assert self.may_commit.wait(WAIT_SECONDS)
        self._connection.commit()


LEVELS: Final = ["read uncommitted", "read committed", "repeatable read", "serializable"]
_SERVERS: Final = [d for d in DRIVERS if d.name in {"psycopg", "pymysql"}]
WAITING: Final = {
    POSTGRESQL: "select count(*) from pg_stat_activity where wait_event_type = 'Lock'",
    MARIADB: "select cast(variable_value as int) from information_schema.global_status "
    "where variable_name = 'innodb_row_lock_current_waits'",
}
AT_LEVEL: Final = {
    POSTGRESQL: "set session characteristics as transaction isolation level {}",
    MARIADB: "set session transaction isolation level {}",
}


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("driver", _SERVERS, ids=str)
async def test_a_check_that_waits_for_a_prune_rolls_nothing_back(
    driver: Driver,
    level: str,
    autocommit: bool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The row was committed and is pruned while the check waits for it: UNKNOWN at every level."""
    monkeypatch.setattr(ledger, "LOCK_SECONDS", WAIT_SECONDS)
    books = books_of(driver, request, tmp_path)
    await books.create()
    async with (
        books.connected() as pruning,
        books.connected(autocommit=autocommit) as checking,
        books.connected(autocommit=True) as watching,
    ):
        await books.order(pruning, "t-1")
        await books.commit(pruning)
        await books.run(checking, AT_LEVEL[driver.database].format(level))
        await books.commit(checking)
        await books.age(pruning, 31)
        held = _HeldCommit(pruning)
        prune = asyncio.create_task(asyncio.to_thread(books.ledger.prune, held))
        assert await asyncio.to_thread(held.reached.wait, WAIT_SECONDS)
        check = asyncio.ensure_future(books.checker(books.keeping(checking))(asked_about("t-1")))
        while not check.done() and await books.run(watching, WAITING[driver.database]) == [0]:
            await asyncio.wait([check], timeout=0.005)
        held.may_commit.set()

        assert await prune == 1
        assert await check is Decision.UNKNOWN
    assert await books.checker()(asked_about("t-1")) is Decision.UNKNOWN


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("driver", _SERVERS, ids=str)
async def test_a_check_whose_connection_saw_the_past_rolls_nothing_back(
    driver: Driver, level: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """``connect`` gives a connection in a transaction that began before the prune."""
    books = books_of(driver, request, tmp_path)
    await books.create()
    async with books.connected() as pruning, books.connected() as checking:
        await books.order(pruning, "t-1")
        await books.commit(pruning)
        await books.run(checking, AT_LEVEL[driver.database].format(level))
        await books.commit(checking)
        assert await books.run(checking, f"select id from {books.orders_table}") == ["t-1"]
        await books.age(pruning, 31)
        if (driver.database, level) == (MARIADB, "serializable"):
            await books.commit(checking)  # what it has read is locked until then
        assert await books.prune(pruning) == 1

        check = books.checker(books.keeping(checking))
        assert await check(asked_about("t-1")) is Decision.UNKNOWN
    assert await books.checker()(asked_about("t-1")) is Decision.UNKNOWN


def _alchemy(driver: Driver) -> bool:
    return driver.name.startswith("sqlalchemy")


@pytest.mark.parametrize("driver", [d for d in DRIVERS if _alchemy(d)], ids=str)
async def test_a_session_of_sqlalchemy_is_given_as_it_is(
    driver: Driver, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """``Session`` or ``AsyncSession``, also as a scoped one, to record and to check."""
    books = books_of(driver, request, tmp_path)
    await books.create()
    async with books.connected() as connection:
        engine = connection.engine
    if driver.awaited:
        await _with_async_sessions(books, importlib.import_module("sqlalchemy.ext.asyncio"), engine)
    else:
        _with_sessions(books, importlib.import_module("sqlalchemy.orm"), engine)
    assert sorted(await books.orders()) == ["t-1", "t-3"]


def _with_sessions(books: Books, orm: Any, engine: Any) -> None:
    sqlalchemy: Any = importlib.import_module("sqlalchemy")
    make = orm.sessionmaker(engine)
    check = books.ledger.checker(make)

    def order(session: Any, transaction_id: str) -> None:
        session.execute(
            sqlalchemy.text(f"insert into {books.orders_table} values (:id)"),
            {"id": transaction_id},
        )
        books.ledger.record(session, transaction_id)

    with make.begin() as session:
        order(session, "t-1")
    assert check(asked_about("t-1")) is Decision.COMMIT
    assert check(asked_about("t-2")) is Decision.ROLLBACK
    with pytest.raises(TransactionFencedError), make.begin() as session:
        order(session, "t-2")
    scoped = orm.scoped_session(make)
    order(scoped, "t-3")
    scoped.commit()
    scoped.remove()
    assert check(asked_about("t-3")) is Decision.COMMIT
    autocommits = orm.Session(engine.execution_options(isolation_level="AUTOCOMMIT"))
    with autocommits, pytest.raises(AutocommitError):
        books.ledger.record(autocommits, "t-4")


async def _with_async_sessions(books: Books, orm: Any, engine: Any) -> None:
    sqlalchemy: Any = importlib.import_module("sqlalchemy")
    engine = orm.AsyncEngine(engine.sync_engine) if hasattr(engine, "sync_engine") else engine
    make = orm.async_sessionmaker(engine)
    check = books.ledger.async_checker(make)

    async def order(session: Any, transaction_id: str) -> None:
        await session.execute(
            sqlalchemy.text(f"insert into {books.orders_table} values (:id)"),
            {"id": transaction_id},
        )
        await books.ledger.record_async(session, transaction_id)

    async with make.begin() as session:
        await order(session, "t-1")
    assert await check(asked_about("t-1")) is Decision.COMMIT
    assert await check(asked_about("t-2")) is Decision.ROLLBACK
    with pytest.raises(TransactionFencedError):
        async with make.begin() as session:
            await order(session, "t-2")
    scoped = orm.async_scoped_session(make, asyncio.current_task)
    await order(scoped, "t-3")
    await scoped.commit()
    await scoped.remove()
    assert await check(asked_about("t-3")) is Decision.COMMIT
    async with make() as session:
        with pytest.raises(ConfigurationError, match=r"await ledger\.record_async"):
            books.ledger.record(session, "t-4")
    options = {"isolation_level": "AUTOCOMMIT"}
    async with orm.AsyncSession(engine.execution_options(**options)) as session:
        with pytest.raises(AutocommitError):
            await books.ledger.record_async(session, "t-4")


async def test_a_begin_that_an_event_of_sqlalchemy_emits_counts(tmp_path: Path) -> None:
    """As in SQLAlchemy's documentation of SQLite: no isolation level, and a BEGIN of one's own."""
    sqlalchemy: Any = pytest.importorskip("sqlalchemy", reason="needs SQLAlchemy")
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'orders.db'}")

    def connected(connection: Any, _record: object) -> None:
        connection.isolation_level = None

    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    sqlalchemy.event.listen(engine, "connect", connected)
    sqlalchemy.event.listen(engine, "begin", begun)
    books = TransactionLedger()
    with engine.connect() as connection:
        books.create_table(connection)
        books.record(connection, "t-1")
        connection.rollback()
        books.record(connection, "t-2")
        connection.commit()
    check = books.checker(engine.connect)
    assert check(asked_about("t-1")) is Decision.ROLLBACK
    assert check(asked_about("t-2")) is Decision.COMMIT
    engine.dispose()


@pytest.mark.parametrize("database", [SQLITE, POSTGRESQL, MARIADB])
def test_djangos_cursor_is_given_as_it_is(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In ``atomic()``; outside of one, Django's connections commit each statement."""
    place = Place(
        tmp_path / "orders.db", 0 if database == SQLITE else request.getfixturevalue(database)
    )
    connection = django_connections(database, place)()
    atomic: Any = importlib.import_module("django.db.transaction").atomic
    # Where atomic() looks.
    importlib.import_module("django.db").connections["default"] = connection
    books = TransactionLedger("ledger_django")
    check = books.checker(lambda: connection)
    books.create_table(connection)
    with connection.cursor() as cursor, pytest.raises(AutocommitError):
        books.record(cursor, "t-1")
    with atomic(), connection.cursor() as cursor:
        books.record(cursor, "t-1")
    assert check(asked_about("t-1")) is Decision.COMMIT
    assert check(asked_about("t-2")) is Decision.ROLLBACK
    with (
        pytest.raises(TransactionFencedError),
        atomic(),
        connection.cursor() as cursor,
    ):
        books.record(cursor, "t-2")
    connection.close()
