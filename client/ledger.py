"""TransactionLedger: one row per local transaction, which answers checks reliably.

If a broker has received no decision, it checks the outcome of the local transaction. For a checker
without a ledger, a missing row is ambiguous: it may mean "rolled back" or "still running", and if
the checker answers ROLLBACK and the transaction commits a moment later, the message is lost. The
ledger prevents this: the local transaction inserts a row with the transaction's id; a check inserts
a *tombstone* with the same id. The primary key lets only one of them succeed.

* The row exists: the local transaction has committed, so the answer is COMMIT.
* The tombstone is committed: the answer is ROLLBACK, and the local transaction, if it still runs,
  fails when it inserts its row.
* Another transaction holds a lock on the row, or has inserted it and not yet committed: the answer
  is UNKNOWN, and the broker checks again.

The check inserts before it reads. If it read first, it could see an uncommitted row at some
isolation levels; the insert waits for the transaction that holds the key.

Old rows are pruned, and the same transaction moves a *horizon*, which is also a row of the table.
A transaction prepared before the horizon may have had a row, so its check answers UNKNOWN instead
of ROLLBACK. A check reads the horizon in a new transaction, after the one that committed the
tombstone. This is correct at every isolation level, also in autocommit mode:

* If the row was pruned, the tombstone can be inserted only after that prune has committed: until
  then the key exists, or is locked, and the insert waits. (In autocommit mode a prune commits the
  horizon before it deletes.)
* A transaction sees everything that was committed before it began, at every level. So this check,
  and every later one that finds the tombstone, sees the horizon of that prune or a later one; the
  horizon never moves back.
* Tombstones are only removed by a prune, once they are old: another check may have answered
  ROLLBACK because of them.

The age of rows is measured by the database's own clock, so that no program whose clock is wrong
prunes young rows or moves the horizon too far. (SQLite has the clock of its host; for a database
that the ledger does not know, it is the program's.) The horizon is compared with the time at which
the broker stored the half message, by the broker's clock: within a day of it the answer is UNKNOWN.

A block that ends normally has not shown that its row is committed: somebody else may commit later,
or a savepoint with the row was rolled back, or a statement failed and its exception was swallowed,
so that PostgreSQL answered COMMIT with a rollback and no driver said so. So the producer *looks* at
the row, in a new transaction, before it sends COMMIT. A look inserts nothing: if it finds no row,
the transaction may still commit, so that it decides nothing, and the broker will check.

Any DB-API driver, asyncpg and SQLAlchemy can be used, if the database does not lose committed
transactions and ``connect`` opens the primary database, not a replica.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

from .arguments import check_text
from .errors import AutocommitError, ConfigurationError, TransactionFencedError
from .message import Decision, MessageView
from .transactional.database_table import DatabaseTable, Target, host_ms
from .transactional.databases import (
    MYSQL,
    PARAMSTYLES,
    POSTGRESQL,
    SQLITE,
    Database,
    Statement,
    check_blocking,
    clock_of,
    is_database_error,
    is_duplicate,
    is_missing_table,
    managed_connection,
    render,
)
from .transactional.recorded_transactions import LedgerLook, attach_look, mark_recorded

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCK_SECONDS: Final = 1.0
"""How long a check waits for a locked row; then it is UNKNOWN, and the broker checks again. Less
than ``ClientConfig.own_check_timeout``, so that a check ends by itself and no thread is left."""
CLOCKS_APART_MAX: Final = timedelta(days=1)
"""The largest tolerated difference between the clocks of brokers and databases."""

COMMITTED: Final = "committed"
TOMBSTONE: Final = "fenced"
_HORIZON: Final = "horizon"  # id and state of the row with the time up to which rows were pruned
_CLOCKS_APART_MS: Final = CLOCKS_APART_MAX // timedelta(milliseconds=1)

_INSERT: Final = "insert into TABLE (id, state, recorded_at) values ({}, {}, NOW)"
_INSERT_WITHIN: Final = (
    "insert into TABLE (id, state, recorded_at) "
    "select {}, {}, NOW from set_config('lock_timeout', {}, true)"
)
"""The insert for PostgreSQL, with a lock timeout in milliseconds for its transaction. In autocommit
mode the statement is a transaction by itself."""


class TransactionLedger(DatabaseTable):
    """A database table with the local transactions that have committed.

    ::

        ledger = TransactionLedger()
        checker = ledger.checker(lambda: sqlite3.connect("orders.db"))

        with TransactionProducer("orders-tx", checker=checker) as producer:
            with producer.transaction(Message("orders", b"o-2")) as tx, database:
                database.execute("insert into orders values ('o-2')")
                ledger.record(database, tx.id)

    With SQLAlchemy pass :meth:`record` the ``Session`` or ``Connection``, with Django
    ``connection.cursor()``. With an asynchronous driver or session await :meth:`record_async`, and
    use :meth:`async_checker`.

    Checks of transactions from before the time up to which :meth:`prune` has deleted rows are
    answered UNKNOWN, because their rows may be among them; in the end an operator decides them.
    ``producer.pending()`` shows whether there are any. A tombstone of such a transaction has no
    meaning.

    Any number of threads and producers may share a ledger.
    """

    def __init__(
        self, table: str = "halfmq_transactions", *, paramstyle: str | None = None
    ) -> None:
        """Create a ledger for a table; nothing is executed yet.

        Args:
            table: Its name, with a schema if necessary.
            paramstyle: The driver's DB-API paramstyle, for drivers and wrappers that do not declare
                one.

        Raises:
            ConfigurationError: The name needs quoting, or the paramstyle is unknown.
        """
        super().__init__(table, paramstyle)

    @property
    def create_statement(self) -> str:
        """The statement that creates the table if it is missing, for migrations."""
        return self._sql(
            "create table if not exists TABLE (id varchar(128) not null primary key, "
            "state varchar(16) not null, recorded_at bigint not null)"
        )

    def record(self, target: Target, transaction_id: str) -> None:
        """Insert the row that is committed together with the local transaction.

        ``target`` is the cursor, connection or session whose transaction does the rest of the work.
        If called early in the transaction, a concurrent check waits for the outcome; if called
        late, a check may come first and make this call fail.

        Raises:
            AutocommitError: No transaction is open, so the row would be committed by itself. It was
                not inserted.
            TransactionFencedError: A check has been answered ROLLBACK; roll back.
            ConfigurationError: ``target`` is asynchronous, or its paramstyle is unknown.
        """
        check_text("transaction_id", transaction_id)
        insert = partial(self._record, transaction_id)
        self.run_blocking_work(target, insert, "`await ledger.record_async(…)`")

    async def record_async(self, target: object, transaction_id: str) -> None:
        """As :meth:`record`, for asynchronous sessions, connections and cursors.

        Supported are SQLAlchemy's ``AsyncSession`` and ``AsyncConnection``, connections of asyncpg,
        and connections and cursors of psycopg, aiosqlite, aiomysql and asyncmy.
        """
        check_text("transaction_id", transaction_id)
        await self.run_async(target, partial(self._record, transaction_id))

    def statement(self, transaction_id: str, paramstyle: str) -> Statement:
        """Return the statement of :meth:`record`, for drivers that it does not support.

        The driver's own error for a duplicate key means that a check came first. Whether a
        transaction is open is not checked, and the row's time is that of this program's clock.
        """
        check_text("transaction_id", transaction_id)
        if paramstyle not in PARAMSTYLES:
            raise ConfigurationError("paramstyle", paramstyle, ", ".join(PARAMSTYLES))
        mark_recorded(self._table, transaction_id, lambda: False)
        values = (transaction_id, COMMITTED, host_ms())
        return render(self._sql(_INSERT, None), values, paramstyle)

    def checker(
        self, connect: Callable[[], Target | AbstractContextManager[Target]]
    ) -> Callable[[MessageView], Decision]:
        """Return a checker for :class:`TransactionProducer`, which runs it in a worker thread.

        Each check, and the look at the end of each block, calls ``connect`` for a connection, which
        it closes, or a context manager: ``lambda: sqlite3.connect(path)``, SQLAlchemy's
        ``engine.connect``, psycopg's ``pool.connection``. It must be another connection than the
        one that records, to the same database. On SQLite, PostgreSQL, MySQL and MariaDB a check
        waits a second for a lock, and then restores the connection's own setting.
        """

        def connected(work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
            opening: Any = connect()
            check_blocking(opening, "`ledger.async_checker(connect)`")
            closes = hasattr(opening, "close")
            with contextlib.closing(opening) if closes else opening as connection:
                return self.run_blocking_work(connection, work, "`ledger.async_checker(connect)`")

        def check(message: MessageView) -> Decision:
            transaction_id, prepared_ms = _transaction_of(message)
            try:
                return connected(partial(self._decide, transaction_id, prepared_ms))
            except Exception as error:  # noqa: BLE001 -- raised again unless from the database
                return _unknown_on_database_error(transaction_id, error)

        def look(transaction_id: str) -> bool:
            return connected(partial(self._look, transaction_id, connect))

        return attach_look(check, LedgerLook(self._table, look, self))

    def async_checker(
        self,
        connect: Callable[[], Awaitable[object] | AbstractAsyncContextManager[object]],
    ) -> Callable[[MessageView], Coroutine[Any, Any, Decision]]:
        """As :meth:`checker`, for an asynchronous connection.

        ``connect`` returns an async context manager, or an awaitable connection that is closed
        after use: SQLAlchemy's ``engine.connect``, asyncpg's ``pool.acquire``, psycopg's
        ``pool.connection``, ``lambda: aiosqlite.connect(path)``. It is called on the event loop of
        the producer; the blocking client has a loop of its own, where pools of another loop do not
        work.
        """

        async def connected(work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
            async with managed_connection(connect()) as connection:
                return await self.run_async(connection, work)

        async def check(message: MessageView) -> Decision:
            transaction_id, prepared_ms = _transaction_of(message)
            try:
                return await connected(partial(self._decide, transaction_id, prepared_ms))
            except Exception as error:  # noqa: BLE001 -- raised again unless from the database
                return _unknown_on_database_error(transaction_id, error)

        async def look(transaction_id: str) -> bool:
            return await connected(partial(self._look, transaction_id, connect))

        return attach_look(check, LedgerLook(self._table, look, self))

    # -- statements of a transaction that a producer owns; see `owned_transaction`

    async def insert_row(self, transaction_id: str, database: Database) -> None:
        """Insert the row of a transaction; called by the producer."""
        await self._record(transaction_id, database)

    async def has_row(self, transaction_id: str, database: Database) -> bool:
        """Return whether the row is visible in this transaction; called by the producer."""
        return await self._state(database, transaction_id) == COMMITTED

    # -- statements in a connection

    async def _record(self, transaction_id: str, database: Database) -> None:
        if await database.autocommits():
            raise AutocommitError(transaction_id)
        try:
            await self._insert(database, transaction_id, COMMITTED)
        except Exception as error:
            if is_duplicate(error):
                raise TransactionFencedError(transaction_id) from error
            raise
        mark_recorded(self._table, transaction_id, database.transaction_watch())

    async def _insert(self, database: Database, transaction_id: str, state: str) -> None:
        clock = clock_of(database)
        values = (transaction_id, state) if clock else (transaction_id, state, host_ms())
        await database.execute(self._sql(_INSERT, clock), *values)

    async def _prune(self, age_ms: int, database: Database) -> int:
        try:
            until_ms = await _now_ms(database) - age_ms
            if await self._horizon_ms(database) is None:
                await database.execute(self._sql(_INSERT, None), _HORIZON, _HORIZON, until_ms)
            move = "update TABLE set recorded_at = {} where id = {} and recorded_at < {}"
            await database.execute(self._sql(move), until_ms, _HORIZON, until_ms)
            delete = "delete from TABLE where recorded_at < {} and id <> {}"
            pruned = await database.execute(self._sql(delete), until_ms, _HORIZON)
            await database.commit()
        except BaseException:
            await database.rollback()
            raise
        return pruned

    async def _decide(self, transaction_id: str, prepared_ms: int, database: Database) -> Decision:
        own_limit = await _limit_lock_wait(database)

        async def restore() -> None:
            await database.rollback()
            if own_limit is not None:
                await database.execute(own_limit)

        try:
            decision = await self._fence(database, transaction_id, prepared_ms)
        except BaseException:
            with contextlib.suppress(Exception):  # with some drivers cancellation breaks it
                await restore()
            raise
        await restore()
        return decision

    async def _fence(self, database: Database, transaction_id: str, prepared_ms: int) -> Decision:
        try:
            await self._insert_tombstone(database, transaction_id)
        except Exception as error:
            if not is_duplicate(error):
                raise
            await database.rollback()  # PostgreSQL executes nothing more in this transaction
            state = await self._state(database, transaction_id)
            if state is None:
                return Decision.UNKNOWN  # its transaction was rolled back meanwhile
            if state == COMMITTED:
                return Decision.COMMIT
            await database.rollback()  # the horizon must be read in a new transaction
        else:
            await database.commit()
        horizon_ms = await self._horizon_ms(database)
        if horizon_ms is not None and prepared_ms < horizon_ms + _CLOCKS_APART_MS:
            logger.warning("event=ledger_pruned transaction=%s", transaction_id)
            return Decision.UNKNOWN
        return Decision.ROLLBACK

    async def _insert_tombstone(self, database: Database, transaction_id: str) -> None:
        if database.kind == POSTGRESQL:
            limit_ms = str(int(LOCK_SECONDS * 1000))
            insert = self._sql(_INSERT_WITHIN, clock_of(database))
            await database.execute(insert, transaction_id, TOMBSTONE, limit_ms)
        else:
            await self._insert(database, transaction_id, TOMBSTONE)

    async def _look(self, transaction_id: str, connect: object, database: Database) -> bool:
        """Return whether the row is committed, as a new transaction sees it."""
        await database.rollback()  # a transaction that began before may not see the row
        if database.kind == MYSQL:  # at READ UNCOMMITTED it would see rows that are not committed
            await database.execute("set transaction isolation level read committed")
        try:
            return await self._state(database, transaction_id) == COMMITTED
        except Exception as error:
            if not is_missing_table(error):
                raise
            raise ConfigurationError(
                "connect",
                connect,
                f"a function that connects to the database in which blocks record; this one has no "
                f"table {self._table} (each connection to :memory: is a database of its own)",
            ) from error
        finally:
            with contextlib.suppress(Exception):  # with some drivers cancellation breaks it
                await database.rollback()

    async def _state(self, database: Database, transaction_id: str) -> str | None:
        select = "select state from TABLE where id = {}"
        rows = await database.fetch(self._sql(select), transaction_id)
        return str(rows[0][0]) if rows else None

    async def _horizon_ms(self, database: Database) -> int | None:
        select = "select recorded_at from TABLE where id = {}"
        rows = await database.fetch(self._sql(select), _HORIZON)
        return int(rows[0][0]) if rows else None


async def _now_ms(database: Database) -> int:
    """Return the time by the database's clock; by this program's if the ledger cannot ask it."""
    clock = clock_of(database)
    if clock is None:
        return host_ms()
    ((now_ms,),) = await database.fetch(f"select {clock}")
    return int(now_ms)


def _transaction_of(message: MessageView) -> tuple[str, int]:
    """Return the transaction id, and when the broker stored the half message (ms since 1970)."""
    assert message.transaction_id is not None, "a checked message is transactional"
    return message.transaction_id, message.record.store_timestamp


def _unknown_on_database_error(transaction_id: str, error: Exception) -> Decision:
    """Return UNKNOWN for an error of the database; raise any other error again."""
    if not is_database_error(error):
        raise error
    logger.warning("event=ledger_undecided transaction=%s reason=%r", transaction_id, error)
    return Decision.UNKNOWN


async def _limit_lock_wait(database: Database) -> str | None:
    """Limit lock waits to LOCK_SECONDS; return the statement that restores the setting, if any.

    On PostgreSQL the limit is part of the insert statement.
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
