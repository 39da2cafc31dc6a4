"""TransactionLedger: one row per local transaction, by which checks answer themselves.

A broker that has heard no decision asks what became of a local transaction. To a checker of one's
own "no row" is a trap: it may mean "rolled back" or "still running", and whoever says ROLLBACK of a
transaction that commits a moment later has lost its message. The ledger closes that: the local
transaction inserts a row under the transaction's id; a check inserts a *tombstone* under the same
id. The primary key lets one of them in.

* The row is there: the local transaction has committed, so COMMIT.
* The tombstone is committed: ROLLBACK, and the local transaction, should it still run, fails when
  it inserts its row.
* Somebody holds a lock on that row or has inserted it and not yet committed: UNKNOWN, the broker
  asks again.

The check inserts before it reads. Read first, it could see a row that is not committed, where the
database is set so; the insert waits for whoever holds the key.

Old rows are pruned, and the same transaction moves a *horizon*, which is a row of the table too.
A transaction prepared before the horizon may have had a row, so its check says UNKNOWN instead of
ROLLBACK. A check reads the horizon in a new transaction, after the one that committed the
tombstone. This is right at every isolation level, also in autocommit mode:

* If the row was pruned, the tombstone can be inserted only once that prune has committed: until
  then the key is taken, or locked, and the insert waits. (In autocommit mode a prune commits the
  horizon before it deletes.)
* A transaction sees all that was committed before it began, at every level. So this check, and
  every later one that finds the tombstone, sees the horizon of that prune or a later one; it never
  moves back.
* Tombstones are not removed, except by a prune when they are old: another check may have answered
  ROLLBACK because of them.

Any DB-API driver, asyncpg and SQLAlchemy will do, as long as the database keeps what it has
committed, and ``connect`` leads to where the rows are written, not to a replica.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from typing import Any, Final, TypeAlias, TypeVar

from .arguments import check_callable, check_kind, check_optional_text, check_text
from .errors import AutocommitError, ConfigurationError, TransactionFencedError
from .message import Decision, MessageView
from .transactional.databases import (
    MYSQL,
    PARAMSTYLES,
    POSTGRESQL,
    SQLITE,
    Connection,
    Cursor,
    Database,
    Statement,
    check_blocking,
    complete,
    is_database_error,
    is_duplicate,
    open_database,
    opened,
    written,
)
from .transactional.recording import checks_table, note_recorded

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCK_SECONDS: Final = 2.0
"""How long a check waits for a row that somebody is writing; the broker asks again anyway."""
KEPT_MIN: Final = timedelta(days=1)
"""No row may be pruned before: a local transaction that runs longer would find no tombstone."""
CLOCKS_APART_MAX: Final = timedelta(days=1)
"""How much the clocks of brokers and programs may differ."""

COMMITTED: Final = "committed"
TOMBSTONE: Final = "fenced"
_HORIZON: Final = "horizon"  # id and state of the row that says how far the ledger was pruned
_CLOCKS_APART_MS: Final = CLOCKS_APART_MAX // timedelta(milliseconds=1)

_INSERT: Final = "insert into TABLE (id, state, recorded_at) values ({}, {}, {})"
_INSERT_WITHIN: Final = (
    "insert into TABLE (id, state, recorded_at) "
    "select {}, {}, {} from set_config('lock_timeout', {}, true)"
)
"""PostgreSQL's, with a limit in milliseconds that ends with its transaction, also if the statement
is one by itself in autocommit mode."""

Target: TypeAlias = Cursor | Connection
"""A cursor or connection of a driver, or SQLAlchemy's ``Session`` or ``Connection``."""


class TransactionLedger:
    """A table that tells which local transactions have committed.

    ::

        ledger = TransactionLedger()
        checker = ledger.checker(lambda: sqlite3.connect("orders.db"))

        with TransactionProducer("orders-tx", checker=checker) as producer:
            with producer.transaction(Message("orders", b"o-2")) as tx, database:
                database.execute("insert into orders values ('o-2')")
                ledger.record(database, tx.id)

    With SQLAlchemy give :meth:`record` the ``Session`` or ``Connection``, with Django
    ``connection.cursor()``. With an asynchronous driver or session await :meth:`record_async`, and
    use :meth:`async_checker`.

    One may be used by any number of threads and producers.
    """

    def __init__(
        self,
        table: str = "halfmq_transactions",
        *,
        paramstyle: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Choose the table.

        Args:
            table: Its name, with a schema if need be.
            paramstyle: The DB-API's name for how the driver writes parameters, for cursors of
                drivers and wrappers that do not tell.
            clock: Seconds since 1970, for the age of rows.

        Raises:
            ConfigurationError: The name needs quoting, or nobody knows this parameter style.
        """
        check_text("table", table, "a name that needs no quotes")
        check_optional_text("paramstyle", paramstyle)
        check_callable("clock", clock)
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", table, re.ASCII):
            raise ConfigurationError("table", table, "a name that needs no quotes")
        if paramstyle is not None and paramstyle not in PARAMSTYLES:
            raise ConfigurationError("paramstyle", paramstyle, ", ".join(PARAMSTYLES))
        self._table = table
        self._paramstyle = paramstyle
        self._clock = clock

    def create_table(self, connection: Target) -> None:
        """Create the table if it is missing, and commit."""
        self._blocking(connection, self._create_table, "`await ledger.create_table_async(…)`")

    async def create_table_async(self, connection: object) -> None:
        """As :meth:`create_table`, for an asynchronous connection."""
        await self._awaited(connection, self._create_table)

    def record(self, target: Target, transaction_id: str) -> None:
        """Insert the row that says "committed" when the user's own transaction is.

        ``target`` is the cursor, connection or session whose transaction does the rest of the work.
        Called early, it makes a check wait for the outcome; called late, a check may come first,
        and the work is in vain.

        Raises:
            AutocommitError: No transaction would be open, so the row would be committed by itself.
                It was not inserted.
            TransactionFencedError: A check has been answered ROLLBACK; roll back.
            ConfigurationError: It is asynchronous, or its driver does not say how it writes
                parameters.
        """
        check_text("transaction_id", transaction_id)

        async def insert(database: Database) -> None:
            await self._record(database, transaction_id)

        self._blocking(target, insert, "`await ledger.record_async(…)`")

    async def record_async(self, target: object, transaction_id: str) -> None:
        """As :meth:`record`, for asynchronous sessions, connections and cursors.

        SQLAlchemy's ``AsyncSession`` and ``AsyncConnection``, connections of asyncpg, connections
        and cursors of psycopg, aiosqlite, aiomysql and asyncmy.
        """
        check_text("transaction_id", transaction_id)

        async def insert(database: Database) -> None:
            await self._record(database, transaction_id)

        await self._awaited(target, insert)

    def statement(self, transaction_id: str, paramstyle: str) -> Statement:
        """What :meth:`record` executes, for drivers that it does not know.

        There the driver's own error for a duplicate key says that a check came first, and nobody
        tells whether a transaction is open.
        """
        check_text("transaction_id", transaction_id)
        if paramstyle not in PARAMSTYLES:
            raise ConfigurationError("paramstyle", paramstyle, ", ".join(PARAMSTYLES))
        note_recorded(self._table, transaction_id)
        values = (transaction_id, COMMITTED, self._now_ms())
        return written(self._sql(_INSERT), values, paramstyle)

    def checker(
        self, connect: Callable[[], Target | AbstractContextManager[Target]]
    ) -> Callable[[MessageView], Decision]:
        """A checker for :class:`TransactionProducer`, which runs it in a worker thread.

        Each check calls ``connect``, for a connection that it closes or a context manager that it
        leaves: ``lambda: sqlite3.connect(path)``, SQLAlchemy's ``engine.connect``, psycopg's
        ``pool.connection``. On SQLite, PostgreSQL, MySQL and MariaDB it waits two seconds for a
        lock, and the connection has its own setting again afterwards.
        """

        def check(message: MessageView) -> Decision:
            transaction_id, prepared_ms = _asked_about(message)

            async def decide(database: Database) -> Decision:
                return await self._decide(database, transaction_id, prepared_ms)

            try:
                opening: Any = connect()
                check_blocking(opening, "`ledger.async_checker(connect)`")
                closes = hasattr(opening, "close")
                with contextlib.closing(opening) if closes else opening as connection:
                    return self._blocking(connection, decide, "`ledger.async_checker(connect)`")
            except Exception as error:  # noqa: BLE001 -- raised again if it is not the database's
                return _undecided(transaction_id, error)

        return checks_table(check, self._table)

    def async_checker(
        self,
        connect: Callable[[], Awaitable[object] | AbstractAsyncContextManager[object]],
    ) -> Callable[[MessageView], Coroutine[Any, Any, Decision]]:
        """As :meth:`checker`, for an asynchronous connection.

        ``connect`` returns what is entered with ``async with`` or awaited and then closed:
        SQLAlchemy's ``engine.connect``, asyncpg's ``pool.acquire``, psycopg's ``pool.connection``,
        ``lambda: aiosqlite.connect(path)``. It is called on the event loop of the producer; with
        the blocking client that is a loop of its own, where pools of another loop do not work.
        """

        async def check(message: MessageView) -> Decision:
            transaction_id, prepared_ms = _asked_about(message)

            async def decide(database: Database) -> Decision:
                return await self._decide(database, transaction_id, prepared_ms)

            try:
                async with opened(connect()) as connection:
                    return await self._awaited(connection, decide)
            except Exception as error:  # noqa: BLE001 -- raised again if it is not the database's
                return _undecided(transaction_id, error)

        return checks_table(check, self._table)

    def prune(self, connection: Target, older_than: timedelta = timedelta(days=30)) -> int:
        """Delete rows of this age, commit, and return how many they were.

        A check of a transaction from before that time gets no answer any more, because nobody can
        tell; an operator decides it in the end. ``producer.pending()`` shows whether there is any.
        What a tombstone says of such a transaction means nothing.

        Raises:
            ConfigurationError: Less than a day.
        """
        until_ms = self._until_ms(older_than)

        async def prune(database: Database) -> int:
            return await self._prune(database, until_ms)

        return self._blocking(connection, prune, "`await ledger.prune_async(…)`")

    async def prune_async(
        self, connection: object, older_than: timedelta = timedelta(days=30)
    ) -> int:
        """As :meth:`prune`, for an asynchronous connection."""
        until_ms = self._until_ms(older_than)

        async def prune(database: Database) -> int:
            return await self._prune(database, until_ms)

        return await self._awaited(connection, prune)

    # -- blocking and asynchronous connections

    def _blocking(
        self, target: Any, work: Callable[[Database], Coroutine[Any, Any, T]], remedy: str
    ) -> T:
        check_blocking(target, remedy)

        async def run() -> T:
            return await work(await open_database(target, self._paramstyle))

        return complete(run())

    async def _awaited(self, target: Any, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
        target = getattr(target, "registry", lambda: target)()  # of async_scoped_session
        if hasattr(target, "run_sync"):  # SQLAlchemy's, which awaits for blocking code
            result: T = await target.run_sync(self._blocking, work, "")
            return result
        return await work(await open_database(target, self._paramstyle))

    # -- statements in a connection

    async def _create_table(self, database: Database) -> None:
        await database.execute(
            self._sql(
                "create table if not exists TABLE (id varchar(128) not null primary key, "
                "state varchar(16) not null, recorded_at bigint not null)"
            )
        )
        await database.commit()

    async def _record(self, database: Database, transaction_id: str) -> None:
        if await database.autocommits():
            raise AutocommitError(transaction_id)
        values = (transaction_id, COMMITTED, self._now_ms())
        try:
            await database.execute(self._sql(_INSERT), *values)
        except Exception as error:
            if is_duplicate(error):
                raise TransactionFencedError(transaction_id) from error
            raise
        note_recorded(self._table, transaction_id)

    async def _prune(self, database: Database, until_ms: int) -> int:
        try:
            if await self._horizon_ms(database) is None:
                await database.execute(self._sql(_INSERT), _HORIZON, _HORIZON, until_ms)
            move = "update TABLE set recorded_at = {} where id = {} and recorded_at < {}"
            await database.execute(self._sql(move), until_ms, _HORIZON, until_ms)
            delete = "delete from TABLE where recorded_at < {} and id <> {}"
            pruned = await database.execute(self._sql(delete), until_ms, _HORIZON)
            await database.commit()
        except BaseException:
            await database.rollback()
            raise
        return pruned

    async def _decide(self, database: Database, transaction_id: str, prepared_ms: int) -> Decision:
        own_limit = await _limit_waiting(database)

        async def leave() -> None:
            await database.rollback()
            if own_limit is not None:
                await database.execute(own_limit)

        try:
            decision = await self._fence(database, transaction_id, prepared_ms)
        except BaseException:
            with contextlib.suppress(Exception):  # cancellation breaks connections of some drivers
                await leave()
            raise
        await leave()
        return decision

    async def _fence(self, database: Database, transaction_id: str, prepared_ms: int) -> Decision:
        try:
            await self._insert_tombstone(database, transaction_id)
        except Exception as error:
            if not is_duplicate(error):
                raise
            await database.rollback()  # PostgreSQL reads nothing more in this transaction
            state = await self._state(database, transaction_id)
            if state is None:
                return Decision.UNKNOWN  # it is gone again
            if state == COMMITTED:
                return Decision.COMMIT
            await database.rollback()  # the horizon is read in a transaction of its own
        else:
            await database.commit()
        horizon_ms = await self._horizon_ms(database)
        if horizon_ms is not None and prepared_ms < horizon_ms + _CLOCKS_APART_MS:
            logger.warning("event=ledger_pruned transaction=%s", transaction_id)
            return Decision.UNKNOWN
        return Decision.ROLLBACK

    async def _insert_tombstone(self, database: Database, transaction_id: str) -> None:
        values = (transaction_id, TOMBSTONE, self._now_ms())
        if database.kind == POSTGRESQL:
            limit_ms = str(int(LOCK_SECONDS * 1000))
            await database.execute(self._sql(_INSERT_WITHIN), *values, limit_ms)
        else:
            await database.execute(self._sql(_INSERT), *values)

    async def _state(self, database: Database, transaction_id: str) -> str | None:
        select = "select state from TABLE where id = {}"
        rows = await database.fetch(self._sql(select), transaction_id)
        return str(rows[0][0]) if rows else None

    async def _horizon_ms(self, database: Database) -> int | None:
        select = "select recorded_at from TABLE where id = {}"
        rows = await database.fetch(self._sql(select), _HORIZON)
        return int(rows[0][0]) if rows else None

    def _sql(self, template: str) -> str:
        return template.replace("TABLE", self._table, 1)

    def _until_ms(self, older_than: timedelta) -> int:
        check_kind("older_than", older_than, timedelta)
        if older_than < KEPT_MIN:
            raise ConfigurationError("older_than", older_than, f"at least {KEPT_MIN}")
        return self._now_ms() - older_than // timedelta(milliseconds=1)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _asked_about(message: MessageView) -> tuple[str, int]:
    """The id of the transaction, and when the broker stored its half message."""
    assert message.transaction_id is not None, "what is checked is a transactional message"
    return message.transaction_id, message.record.store_timestamp


def _undecided(transaction_id: str, error: Exception) -> Decision:
    """UNKNOWN if the database is at fault; raise what is a mistake in the program."""
    if not is_database_error(error):
        raise error
    logger.warning("event=ledger_undecided transaction=%s reason=%r", transaction_id, error)
    return Decision.UNKNOWN


async def _limit_waiting(database: Database) -> str | None:
    """Have a check wait LOCK_SECONDS for a lock; return the statement that undoes it.

    On PostgreSQL the statement that waits has the limit in it.
    """
    if database.kind == SQLITE:
        ((own_ms,),) = await database.fetch("pragma busy_timeout")
        await database.execute(f"pragma busy_timeout = {int(LOCK_SECONDS * 1000)}")
        return f"pragma busy_timeout = {own_ms}"
    if database.kind == MYSQL:
        ((own_s,),) = await database.fetch("select @@innodb_lock_wait_timeout")
        await database.execute(f"set innodb_lock_wait_timeout = {max(1, int(LOCK_SECONDS))}")
        return f"set innodb_lock_wait_timeout = {own_s}"
    return None
