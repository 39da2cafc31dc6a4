"""Books: a ledger and a table of orders in one database, used by any driver in the same way."""

from __future__ import annotations

import asyncio
import functools
import re
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from halfmq.client import Decision, MessageView, TransactionLedger
from halfmq.client.transactional.databases import Database, managed_connection
from tests.support.ledger_checks import DAY_MS
from tests.support.ledger_drivers import SQLITE, Driver, Place

Check: TypeAlias = Callable[[MessageView], Coroutine[Any, Any, Decision]]


class Books:
    """A ledger and a table of orders in one database, by one driver."""

    def __init__(self, driver: Driver, place: Place, name: str = "") -> None:
        self.driver, self.place = driver, place
        self.name = name = name or f"t{uuid.uuid4().hex[:12]}"
        self.orders_table, self.table = f"orders_{name}", f"ledger_{name}"
        self.ledger = TransactionLedger(self.table)

    @asynccontextmanager
    async def connected(self, *, autocommit: bool = False) -> AsyncIterator[Any]:
        async with managed_connection(self.driver.connect(self.place, autocommit)) as connection:
            yield connection

    async def create(self) -> None:
        async with self.connected() as connection:
            if self.driver.awaited:
                await self.ledger.create_table_async(connection)
            else:
                self.ledger.create_table(connection)
            await self.run(connection, f"create table {self.orders_table} (id varchar(64))")
            await self.commit(connection)

    async def record(self, target: Any, transaction_id: str) -> None:
        if self.driver.awaited:
            await self.ledger.record_async(target, transaction_id)
        else:
            self.ledger.record(target, transaction_id)

    async def age(self, connection: Any, days: int) -> None:
        """Make all rows so much older."""
        older = f"update {self.table} set recorded_at = recorded_at - {days * DAY_MS}"
        await self.run(connection, older)
        await self.commit(connection)

    async def prune(self, connection: Any) -> int:
        if self.driver.awaited:
            return await self.ledger.prune_async(connection)
        return self.ledger.prune(connection)

    def checker(self, connect: Callable[[], Any] | None = None) -> Check:
        """The driver's kind of checker, to be awaited, blocking or not."""
        connect = connect or (lambda: self.driver.connect(self.place, False))
        if self.driver.awaited:
            return self.ledger.async_checker(connect)
        check = self.ledger.checker(connect)

        @functools.wraps(check)
        async def awaited(message: MessageView) -> Decision:
            return await asyncio.to_thread(check, message)

        return awaited

    def keeping(self, connection: Any) -> Callable[[], Any]:
        """What a pool does: each check gets this connection, and leaves it open."""

        @contextmanager
        def blocking() -> Iterator[Any]:
            yield connection

        @asynccontextmanager
        async def awaited() -> AsyncIterator[Any]:
            yield connection

        return awaited if self.driver.awaited else blocking

    async def run(self, connection: Any, sql: str) -> list[Any]:
        """Execute any statement, and return its rows if it has some."""

        async def work(database: Database) -> list[Any]:
            if re.match(r"select|show|pragma \w+$", sql):
                return [row[0] for row in await database.fetch(sql)]
            await database.execute(sql)
            return []

        rows: list[Any] = await self._through_ledger(connection, work)
        return rows

    async def commit(self, connection: Any) -> None:
        await self._through_ledger(connection, lambda database: database.commit())

    async def roll_back(self, connection: Any) -> None:
        await self._through_ledger(connection, lambda database: database.rollback())

    async def _through_ledger(
        self, connection: Any, work: Callable[[Database], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Do what no ledger is for the way it has each driver do it."""
        return await self.ledger.run_async(connection, work)

    async def order(self, connection: Any, transaction_id: str) -> None:
        """The local transaction, not yet committed."""
        if self.driver.name == "asyncpg":
            await self.run(connection, "begin")
        await self.run(connection, f"insert into {self.orders_table} values ('{transaction_id}')")
        await self.record(connection, transaction_id)

    async def orders(self) -> list[str]:
        async with self.connected() as connection:
            return await self.run(connection, f"select id from {self.orders_table}")


def books_of(driver: Driver, request: pytest.FixtureRequest, tmp_path: Path) -> Books:
    """Return the books of a test, for which its module has fixtures with the servers' ports."""
    driver.check_installed()
    port = 0 if driver.database == SQLITE else request.getfixturevalue(driver.database)
    return Books(driver, Place(tmp_path / "orders.db", port))
