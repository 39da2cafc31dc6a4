"""How a block and its database transaction may end, by every driver in the same way.

Each ending is a generator: what comes before its ``yield`` runs in the block, the rest afterwards,
as in a web framework that commits when the view has returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from halfmq.client.ledger import COMMITTED
from halfmq.client.transactional.databases import is_database_error
from tests.support.client_transactions import LocalError
from tests.support.ledger_books import Books
from tests.support.ledger_drivers import MARIADB, POSTGRESQL, SQLITE, Driver


@dataclass
class Work:
    """The local transaction of one block."""

    books: Books
    connection: Any
    id: str

    async def run(self, sql: str) -> list[Any]:
        return await self.books.run(self.connection, sql)

    async def order(self, name: str = "first") -> None:
        if self.books.driver.name == "asyncpg" and not self.connection.is_in_transaction():
            await self.run("begin")
        await self.run(f"insert into {self.books.orders_table} values ('{name}')")

    async def record(self) -> None:
        await self.order()
        await self.books.record(self.connection, self.id)

    async def commit(self) -> None:
        await self.books.commit(self.connection)

    async def roll_back(self) -> None:
        await self.books.roll_back(self.connection)


Ending: TypeAlias = Callable[[Work], AsyncGenerator[None, None]]


async def committed(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    await work.commit()
    yield


async def committed_and_used_again(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    await work.commit()
    await work.order("another")
    yield


async def committed_later(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    yield
    await work.commit()


async def rolled_back_later(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    yield
    await work.roll_back()


async def rolled_back(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    await work.roll_back()
    yield


async def rolled_back_and_another_row_written(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    await work.roll_back()
    await work.order("another")
    await work.commit()
    yield


async def never_ended(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    yield


async def never_recorded(work: Work) -> AsyncGenerator[None, None]:
    await work.order()
    await work.commit()
    yield


async def savepoint_rolled_back(work: Work) -> AsyncGenerator[None, None]:
    await work.order("outside")
    await work.run("savepoint inner_one")
    await work.record()
    await work.run("rollback to savepoint inner_one")
    await work.commit()
    yield


async def savepoint_kept(work: Work) -> AsyncGenerator[None, None]:
    await work.order("outside")
    await work.run("savepoint inner_one")
    await work.record()
    await work.run("release savepoint inner_one")
    await work.commit()
    yield


async def savepoint_kept_and_all_rolled_back_later(work: Work) -> AsyncGenerator[None, None]:
    await work.order("outside")
    await work.run("savepoint inner_one")
    await work.record()
    await work.run("release savepoint inner_one")
    yield
    await work.roll_back()


async def failure_swallowed(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    with suppress(Exception):
        await work.run("insert into nowhere values (1)")
    await work.commit()
    yield


async def raised_after_the_commit(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    await work.commit()
    if work.id:
        raise LocalError
    yield


async def raised_before_the_commit(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    if work.id:
        raise LocalError
    yield


async def commit_cancelled(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    block = asyncio.current_task()
    assert block is not None
    asyncio.get_running_loop().call_soon(block.cancel)
    await work.commit()
    yield


async def connection_lost(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    mysql = work.books.driver.database == MARIADB
    (session,) = await work.run("select connection_id()" if mysql else "select pg_backend_pid()")
    kill = "kill {}" if mysql else "select pg_terminate_backend({})"
    async with work.books.connected(autocommit=True) as another:
        await work.books.run(another, kill.format(session))
    await work.commit()
    yield


async def connection_lost_and_swallowed(work: Work) -> AsyncGenerator[None, None]:
    with suppress(Exception):
        async for _ in connection_lost(work):
            break
    yield


async def _with_a_broken_constraint(work: Work) -> None:
    """It is checked at the commit."""
    if work.books.driver.database == SQLITE:
        await work.run("pragma foreign_keys = on")
    parent, child = (f"{work.books.orders_table}_{name}" for name in ("a", "b"))
    await work.run(f"create table {parent} (id integer primary key)")
    refers = f"references {parent} (id) deferrable initially deferred"
    await work.run(f"create table {child} (id integer {refers})")
    await work.commit()
    await work.record()
    await work.run(f"insert into {child} values (7)")


async def constraint_deferred(work: Work) -> AsyncGenerator[None, None]:
    await _with_a_broken_constraint(work)
    await work.commit()
    yield


async def constraint_deferred_and_swallowed(work: Work) -> AsyncGenerator[None, None]:
    await _with_a_broken_constraint(work)
    with suppress(Exception):
        await work.commit()
    yield


async def or_rollback(work: Work) -> AsyncGenerator[None, None]:
    await work.run(
        f"create unique index {work.books.orders_table}_i on {work.books.orders_table} (id)"
    )
    await work.commit()
    await work.record()
    with suppress(Exception):
        await work.run(f"insert or rollback into {work.books.orders_table} values ('first')")
    await work.order("another")
    await work.commit()
    yield


async def deadlock_swallowed(work: Work) -> AsyncGenerator[None, None]:
    table = f"{work.books.orders_table}_locks"
    pymysql: Any = importlib.import_module("pymysql")
    heavier = pymysql.connect(**work.books.place.mysql, database="test")
    with contextlib.closing(heavier), heavier.cursor() as cursor:
        cursor.execute(f"create table {table} (id integer primary key, n integer)")
        cursor.executemany(f"insert into {table} values (%s, 0)", [(n,) for n in range(100)])
        heavier.commit()
        await work.record()
        await work.run(f"update {table} set n = 1 where id = 0")
        cursor.execute(f"update {table} set n = 2 where id > 50")
        meets = threading.Thread(
            target=cursor.execute, args=(f"update {table} set n = 2 where id = 0",)
        )
        meets.start()
        try:
            await work.run(f"update {table} set n = 1 where id = 99")
        except Exception as error:  # noqa: BLE001 -- every driver has its own
            assert "1213" in str(error)  # noqa: PT017
        else:
            raise AssertionError("no deadlock")
        await asyncio.to_thread(meets.join)
        heavier.rollback()
    await work.order("another")
    await work.commit()
    yield


EVERYWHERE: Final = (
    *(committed, committed_and_used_again, committed_later, never_ended, never_recorded),
    *(rolled_back, rolled_back_later, rolled_back_and_another_row_written),
    *(savepoint_kept, savepoint_rolled_back, savepoint_kept_and_all_rolled_back_later),
    *(failure_swallowed, raised_after_the_commit, raised_before_the_commit),
)
STILL_OPEN: Final = (
    *(committed_later, rolled_back_later, never_ended),
    savepoint_kept_and_all_rolled_back_later,
)
"""Those with which the connection is in its transaction when the block has ended."""
SERVERS: Final = (connection_lost, connection_lost_and_swallowed)
DEFERRED: Final = (constraint_deferred, constraint_deferred_and_swallowed)
ENDINGS: Final[dict[str, tuple[Ending, ...]]] = {
    SQLITE: (*EVERYWHERE, *DEFERRED, or_rollback),
    POSTGRESQL: (*EVERYWHERE, *DEFERRED, *SERVERS),
    MARIADB: (*EVERYWHERE, *SERVERS, deadlock_swallowed),
}


# -- the drivers' own blocks


async def force_rollback(work: Work) -> AsyncGenerator[None, None]:
    with work.connection.transaction(force_rollback=True):
        await work.record()
    yield


async def rollback_raised(work: Work) -> AsyncGenerator[None, None]:
    psycopg: Any = importlib.import_module("psycopg")
    with work.connection.transaction():
        await work.record()
        if work.id:
            raise psycopg.Rollback
    yield


async def transaction_with_a_swallowed_failure(work: Work) -> AsyncGenerator[None, None]:
    async with contextlib.AsyncExitStack() as stack:
        transaction = work.connection.transaction()
        if work.books.driver.awaited:
            await stack.enter_async_context(transaction)
        else:
            stack.enter_context(transaction)
        await work.record()
        with suppress(Exception):
            await work.run("insert into nowhere values (1)")
    yield


async def session_begun(work: Work) -> AsyncGenerator[None, None]:
    with work.connection.begin():
        await work.record()
    yield


async def session_closed(work: Work) -> AsyncGenerator[None, None]:
    await work.record()
    work.connection.close()
    yield


async def session_with_a_failing_part(work: Work) -> AsyncGenerator[None, None]:
    with work.connection.begin():
        await work.order("outside")
        with suppress(LocalError), work.connection.begin_nested():
            await work.record()
            raise LocalError
    yield


def joined(mode: str, outer_commits: bool) -> Ending:
    """A session on a connection that is in a transaction already, as tests use it."""

    async def ending(work: Work) -> AsyncGenerator[None, None]:
        orm: Any = importlib.import_module("sqlalchemy.orm")
        with work.connection.get_bind().connect() as connection, connection.begin() as outer:
            connection.exec_driver_sql(f"insert into {work.books.orders_table} values ('outside')")
            session = orm.Session(connection, join_transaction_mode=mode)
            work.books.ledger.record(session, work.id)
            session.commit()
            yield
            if not outer_commits:
                outer.rollback()

    ending.__name__ = f"joined_{mode}_{outer_commits}"
    return ending


_TRANSACTIONS: Final = (transaction_with_a_swallowed_failure,)
_MODES: Final = ("create_savepoint", "rollback_only")
_SESSIONS: Final = (
    *(session_begun, session_closed, session_with_a_failing_part),
    *(joined(mode, outer_commits) for mode in _MODES for outer_commits in (False, True)),
)
FORMS: Final[dict[str, tuple[Ending, ...]]] = {
    "psycopg": (force_rollback, rollback_raised, *_TRANSACTIONS),
    "asyncpg": _TRANSACTIONS,
    "sqlalchemy-sqlite": _SESSIONS,
    "sqlalchemy-postgresql+psycopg": _SESSIONS,
    "sqlalchemy-mysql+pymysql": _SESSIONS,
}


def endings_of(driver: Driver) -> Iterator[Ending]:
    yield from ENDINGS[driver.database]
    yield from FORMS.get(driver.name, ())
    if driver.awaited:
        yield commit_cancelled


@asynccontextmanager
async def opened(books: Books) -> AsyncIterator[Any]:
    """What a program works with: a session of SQLAlchemy, or a connection of the driver."""
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(_ignore_lost_connection)
        connection = await stack.enter_async_context(books.connected())
        if not books.driver.name.startswith("sqlalchemy"):
            yield connection
        elif books.driver.awaited:
            asyncio_orm: Any = importlib.import_module("sqlalchemy.ext.asyncio")
            yield await stack.enter_async_context(asyncio_orm.AsyncSession(connection.engine))
        else:
            orm: Any = importlib.import_module("sqlalchemy.orm")
            yield stack.enter_context(orm.Session(connection.engine))


async def _ignore_lost_connection(_kind: object, error: BaseException | None, _: object) -> bool:
    return error is not None and is_database_error(error)


async def rows(books: Books) -> list[str]:
    async with books.connected() as connection:
        return await books.run(
            connection, f"select id from {books.table} where state = '{COMMITTED}'"
        )
