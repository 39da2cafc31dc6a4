"""TransactionLedger: one row per local transaction, by which checks answer themselves.

A broker that has heard no decision asks what became of a local transaction. To a checker of one's
own "no row" is a trap: it may mean "rolled back" or "still running", and whoever says ROLLBACK of a
transaction that commits a moment later has lost its message. The ledger closes that: the local
transaction inserts a row under the transaction's id; a check inserts a *tombstone* under the same
id. The primary key lets one of them in.

* The row is there: the local transaction has committed, so COMMIT.
* The tombstone went in and is committed: ROLLBACK, and the local transaction, should it still run,
  fails when it inserts its row.
* Somebody holds a lock on that row or has inserted it and not yet committed: UNKNOWN, the broker
  asks again.

The check inserts before it reads. Read first, it could see a row that is not committed, where the
database is set so; the insert waits for whoever holds the key.

Nothing here is a driver: any DB-API connection will do (sqlite3, psycopg, PyMySQL, …), as long as
the database keeps what it has committed, and ``connect`` leads to where the rows are written, not
to a replica.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any, Final, Protocol, TypeAlias

from .errors import ConfigurationError, TransactionFencedError
from .message import Decision, MessageView
from .recording import checks_table, note_recorded

logger = logging.getLogger(__name__)

LOCK_SECONDS: Final = 2.0
"""How long a check waits for a row that somebody is writing; the broker asks again anyway."""
KEPT_MIN: Final = timedelta(days=1)
"""No row may be pruned before: a local transaction that runs longer would find no tombstone."""
CLOCKS_APART_MAX: Final = timedelta(days=1)
"""How much the clocks of brokers and programs may differ."""

COMMITTED: Final = "committed"
TOMBSTONE: Final = "fenced"
_HORIZON: Final = "horizon"  # id and state of the row that says how far the ledger was pruned

Statement: TypeAlias = tuple[str, tuple[object, ...] | dict[str, object]]
"""SQL and its parameters: ``cursor.execute(*statement)``."""


class Cursor(Protocol):
    """A DB-API cursor."""

    @property
    def execute(self) -> Callable[..., object]: ...

    @property
    def fetchall(self) -> Callable[[], Sequence[Any]]: ...

    @property
    def rowcount(self) -> int: ...


class Connection(Protocol):
    """A DB-API connection."""

    @property
    def cursor(self) -> Callable[[], Any]: ...

    @property
    def commit(self) -> Callable[[], object]: ...

    @property
    def rollback(self) -> Callable[[], object]: ...

    @property
    def close(self) -> Callable[[], object]: ...


class TransactionLedger:
    """A table that tells which local transactions have committed.

    ::

        ledger = TransactionLedger()
        checker = ledger.checker(lambda: sqlite3.connect("orders.db"))

        with TransactionProducer("orders-tx", checker=checker) as producer:
            with producer.transaction(Message("orders", b"o-2")) as tx, database:
                database.execute("insert into orders values ('o-2')")
                ledger.record(database.cursor(), tx.id)

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
            paramstyle: The DB-API's name for how the driver writes parameters; None: looked up in
                the module that the cursor comes from.
            clock: Seconds since 1970, for the age of rows.

        Raises:
            ConfigurationError: The name needs quoting, or nobody knows this parameter style.
        """
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", table, re.ASCII):
            raise ConfigurationError("table", table, "a name that needs no quotes")
        if paramstyle is not None and paramstyle not in _PLACEHOLDERS:
            raise ConfigurationError("paramstyle", paramstyle, ", ".join(_PLACEHOLDERS))
        self._table = table
        self._paramstyle = paramstyle
        self._clock = clock

    def create_table(self, connection: Connection) -> None:
        """Create the table if it is missing, and commit."""
        connection.cursor().execute(
            f"create table if not exists {self._table} (id varchar(128) not null primary key, "
            "state varchar(16) not null, recorded_at bigint not null)"
        )
        connection.commit()

    def record(self, cursor: Cursor, transaction_id: str) -> None:
        """Insert the row that says "committed" when the user's own transaction is.

        ``cursor`` must be of the connection whose transaction does the rest of the work, and that
        may not be in autocommit mode: with SQLAlchemy ``session.connection().connection.cursor()``,
        with Django ``connection.cursor()`` and ``paramstyle="format"``. Called early, it makes a
        check wait for the outcome; called late, a check may come first, and the work is in vain.

        Raises:
            TransactionFencedError: A check has been answered ROLLBACK; roll back.
        """
        try:
            cursor.execute(*self._insert(transaction_id, COMMITTED, self._style(cursor)))
        except Exception as error:
            if _is_duplicate(error):
                raise TransactionFencedError(transaction_id) from error
            raise
        note_recorded(self._table, transaction_id)

    def statement(self, transaction_id: str, paramstyle: str) -> Statement:
        """What :meth:`record` executes, for drivers that are awaited.

        There the driver's own error for a duplicate key says that a check came first.
        """
        note_recorded(self._table, transaction_id)
        return self._insert(transaction_id, COMMITTED, paramstyle)

    def checker(self, connect: Callable[[], Connection]) -> Callable[[MessageView], Decision]:
        """A checker for :class:`TransactionProducer`, which runs it in a worker thread.

        Each check opens a connection, shortens the time it waits for locks where it knows how, and
        closes it; SQLAlchemy's ``engine.raw_connection`` will do.
        """

        def check(message: MessageView) -> Decision:
            transaction_id = message.transaction_id
            assert transaction_id is not None, "what is checked is a transactional message"
            try:
                with closing(connect()) as connection:
                    return self._decide(connection, transaction_id, message.record.store_timestamp)
            except Exception as error:
                if not _is(error, "Error"):  # the DB-API's: locked, away, no such table …
                    raise
                logger.warning(
                    "event=ledger_undecided transaction=%s reason=%r", transaction_id, error
                )
                return Decision.UNKNOWN

        return checks_table(check, self._table)

    def prune(self, connection: Connection, older_than: timedelta = timedelta(days=30)) -> int:
        """Delete rows of this age, commit, and return how many they were.

        A check of a transaction from before that time gets no answer any more, because nobody can
        tell; an operator decides it in the end. ``producer.pending()`` shows whether there is any.

        Raises:
            ConfigurationError: Less than a day.
        """
        if older_than < KEPT_MIN:
            raise ConfigurationError("older_than", older_than, f"at least {KEPT_MIN}")
        until_ms = self._now_ms() - older_than // timedelta(milliseconds=1)
        cursor = connection.cursor()
        try:
            if self._horizon_ms(cursor) is None:
                insert = self._insert(_HORIZON, _HORIZON, self._style(cursor), until_ms)
                cursor.execute(*insert)
            self._run(
                cursor,
                "update {} set recorded_at = {} where id = {} and recorded_at < {}",
                (until_ms, _HORIZON, until_ms),
            )
            self._run(
                cursor,
                "delete from {} where recorded_at < {} and id <> {}",
                (until_ms, _HORIZON),
            )
            pruned: int = cursor.rowcount
            connection.commit()
        except BaseException:
            connection.rollback()
            raise
        return pruned

    # -- a check

    def _decide(self, connection: Connection, transaction_id: str, prepared_ms: int) -> Decision:
        cursor = connection.cursor()
        try:
            _limit_waiting(connection, cursor)
            return self._fence(connection, cursor, transaction_id, prepared_ms)
        except BaseException:
            connection.rollback()
            raise

    def _fence(
        self, connection: Connection, cursor: Cursor, transaction_id: str, prepared_ms: int
    ) -> Decision:
        now_ms = self._now_ms()
        try:
            tombstone = self._insert(transaction_id, TOMBSTONE, self._style(cursor), now_ms)
            cursor.execute(*tombstone)
        except Exception as error:
            if not _is_duplicate(error):
                raise
            connection.rollback()  # PostgreSQL reads nothing more in this transaction
            return self._recorded(connection, cursor, transaction_id)
        horizon_ms = self._horizon_ms(cursor)
        if horizon_ms is not None and prepared_ms < horizon_ms + _CLOCKS_APART_MS:
            connection.rollback()
            self._run(  # what rollback has not undone, in autocommit mode
                cursor,
                "delete from {} where id = {} and state = {} and recorded_at = {}",
                (transaction_id, TOMBSTONE, now_ms),
            )
            connection.commit()
            logger.warning("event=ledger_pruned transaction=%s", transaction_id)
            return Decision.UNKNOWN
        connection.commit()
        return Decision.ROLLBACK

    def _recorded(self, connection: Connection, cursor: Cursor, transaction_id: str) -> Decision:
        """What the row says that was in the way; UNKNOWN if it is gone again."""
        self._run(cursor, "select state from {} where id = {}", (transaction_id,))
        rows = cursor.fetchall()
        connection.rollback()
        if not rows:
            return Decision.UNKNOWN
        return Decision.COMMIT if rows[0][0] == COMMITTED else Decision.ROLLBACK

    # -- statements

    def _insert(
        self, row_id: str, state: str, style: str, recorded_ms: int | None = None
    ) -> Statement:
        if recorded_ms is None:
            recorded_ms = self._now_ms()
        sql = "insert into {} (id, state, recorded_at) values ({}, {}, {})"
        return _written(sql, self._table, (row_id, state, recorded_ms), style)

    def _horizon_ms(self, cursor: Cursor) -> int | None:
        self._run(cursor, "select recorded_at from {} where id = {}", (_HORIZON,))
        rows = cursor.fetchall()
        return int(rows[0][0]) if rows else None

    def _run(self, cursor: Cursor, sql: str, values: tuple[object, ...]) -> None:
        cursor.execute(*_written(sql, self._table, values, self._style(cursor)))

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _style(self, cursor: Cursor) -> str:
        return self._paramstyle or paramstyle_of(cursor)


_UNIQUE_VIOLATION: Final = "23505"  # Source: PostgreSQL, errcodes.txt
_CLOCKS_APART_MS: Final = CLOCKS_APART_MAX // timedelta(milliseconds=1)

_PLACEHOLDERS: Final[Mapping[str, str]] = {
    "qmark": "?",
    "format": "%s",
    "numeric": ":{number}",
    "numeric_dollar": "${number}",
    "named": ":p{number}",
    "pyformat": "%(p{number})s",
}
"""How a parameter is written. Source: PEP 249; ``numeric_dollar`` is PostgreSQL's own."""


def paramstyle_of(cursor: object) -> str:
    """How the driver of a cursor writes parameters.

    Raises:
        ConfigurationError: Its module does not say, as for a cursor wrapped by a framework.
    """
    kind = type(cursor)
    parts = kind.__module__.split(".")
    while parts:
        style = getattr(sys.modules.get(".".join(parts)), "paramstyle", None)
        if style in _PLACEHOLDERS:
            return str(style)
        parts.pop()
    raise ConfigurationError(
        "paramstyle", None, f"one of {', '.join(_PLACEHOLDERS)}: {kind.__module__} does not say"
    )


def _written(sql: str, table: str, values: tuple[object, ...], style: str) -> Statement:
    """The statement in a driver's parameter style: ``{}`` are the table, then the values."""
    placeholder = _PLACEHOLDERS[style]
    marks = [placeholder.replace("{number}", str(n)) for n in range(1, len(values) + 1)]
    written = sql.format(table, *marks)
    if style in {"named", "pyformat"}:
        return written, {f"p{n}": value for n, value in enumerate(values, 1)}
    return written, values


def _limit_waiting(connection: Connection, cursor: Cursor) -> None:
    """Have a check wait for a locked row no longer than LOCK_SECONDS, where we know how."""
    # The cursor tells, for a pool's connection is often a wrapper.
    driver = type(cursor).__module__.partition(".")[0]
    if driver == "sqlite3":
        cursor.execute(f"pragma busy_timeout = {int(LOCK_SECONDS * 1000)}")
    elif driver in {"psycopg", "psycopg2", "pg8000"}:
        local = "" if getattr(connection, "autocommit", False) else "local "
        cursor.execute(f"set {local}lock_timeout = {int(LOCK_SECONDS * 1000)}")
    elif driver in {"pymysql", "MySQLdb", "mysql", "mariadb"}:
        cursor.execute(f"set session innodb_lock_wait_timeout = {int(LOCK_SECONDS)}")


def _is(error: BaseException, name: str) -> bool:
    """Whether it is this kind of error: each driver has classes of its own by these names."""
    return any(kind.__name__ == name for kind in type(error).__mro__)


def _is_duplicate(error: BaseException) -> bool:
    """Whether the key was there before; pg8000 tells by PostgreSQL's code only."""
    facts = error.args[0] if error.args else None
    code = facts.get("C") if isinstance(facts, dict) else None
    return code == _UNIQUE_VIOLATION or _is(error, "IntegrityError")
