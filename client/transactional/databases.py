"""Database drivers for the ledger: DB-API, asyncpg and SQLAlchemy behind one interface.

A :class:`Database` executes statements on one connection. Its methods are coroutines for every
driver, so that each sequence of statements is written once. With a blocking driver no ``await``
ever suspends, and :func:`run_blocking` runs the coroutine to its end without an event loop.

Statements are templates in which ``{}`` stands for a value.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from ..errors import ConfigurationError

T = TypeVar("T")

SQLITE: Final = "sqlite"
POSTGRESQL: Final = "postgresql"
MYSQL: Final = "mysql"
"""MySQL or MariaDB."""

_DRIVERS: Final[Mapping[str, str]] = {
    "sqlite3": SQLITE,
    "aiosqlite": SQLITE,
    "psycopg": POSTGRESQL,
    "psycopg2": POSTGRESQL,
    "pg8000": POSTGRESQL,
    "asyncpg": POSTGRESQL,
    "pymysql": MYSQL,
    "MySQLdb": MYSQL,
    "mysql": MYSQL,
    "mariadb": MYSQL,
    "aiomysql": MYSQL,
    "asyncmy": MYSQL,
}
"""The top-level package of a driver's classes, and its database."""

_AWAITED: Final = frozenset({"aiosqlite", "asyncpg", "aiomysql", "asyncmy"})
"""Drivers that are only asynchronous; psycopg and SQLAlchemy have both kinds of classes."""

_PLACEHOLDERS: Final[Mapping[str, str]] = {
    "qmark": "?",
    "format": "%s",
    "numeric": ":{number}",
    "numeric_dollar": "${number}",
    "named": ":p{number}",
    "pyformat": "%(p{number})s",
}
"""The placeholder of each paramstyle. Source: PEP 249; ``numeric_dollar`` is PostgreSQL's own."""

PARAMSTYLES: Final = tuple(_PLACEHOLDERS)

_STYLES: Final[Mapping[str, str]] = {"django": "format", "aiomysql": "pyformat"}
"""Paramstyles of packages that do not declare one; Django's cursors always take ``%s``."""

_UNIQUE_VIOLATION: Final = "23505"  # Source: PostgreSQL, errcodes.txt
_NO_TABLE: Final = frozenset({"42P01", 1146})
"""The table does not exist. Source: errcodes.txt; MySQL's ER_NO_SUCH_TABLE. SQLite has no code."""
_NO_TRANSACTION: Final = frozenset({"25P01", 1305})
"""The savepoint does not exist. Source: errcodes.txt; MySQL's ER_SP_DOES_NOT_EXIST."""
_LEGACY_TRANSACTION_CONTROL: Final = -1  # Source: sqlite3, Python 3.12
_IN_TRANSACTION: Final = frozenset({1, 2, 3})
"""ACTIVE, INTRANS and INERROR. Source: PostgreSQL, libpq's PGTransactionStatusType."""
_SERVER_STATUS_IN_TRANS: Final = 1  # Source: MySQL, mysql_com.h
_CLOCKS: Final[Mapping[str | None, str]] = {
    SQLITE: "cast((julianday('now') - 2440587.5) * 86400000 as integer)",
    POSTGRESQL: "cast(extract(epoch from clock_timestamp()) * 1000 as bigint)",
    MYSQL: "timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000",
}
"""Milliseconds since 1970, by the database's own clock."""
_ERRORS: Final = frozenset({"Error", "SQLAlchemyError", "PostgresError", "InterfaceError"})
"""Names of the base classes of driver errors: DB-API, SQLAlchemy, asyncpg."""

Statement: TypeAlias = tuple[str, tuple[object, ...] | dict[str, object]]
"""SQL and its parameters: ``cursor.execute(*statement)``."""


class Cursor(Protocol):
    """Executes statements: a DB-API cursor, or SQLAlchemy's ``Session`` or ``Connection``."""

    @property
    def execute(self) -> Callable[..., Any]: ...


class DbapiConnection(Protocol):
    """A DB-API connection, blocking or asynchronous."""

    @property
    def cursor(self) -> Callable[..., Any]: ...

    @property
    def commit(self) -> Callable[[], Any]: ...

    @property
    def rollback(self) -> Callable[[], Any]: ...

    @property
    def close(self) -> Callable[..., Any]: ...


class Database(ABC):
    """One open connection, independent of its driver."""

    kind: str | None
    """The kind of database; None: unknown, so only standard SQL may be used."""

    @abstractmethod
    async def execute(self, sql: str, *values: object) -> int:
        """Execute a statement and return how many rows it changed."""

    @abstractmethod
    async def fetch(self, sql: str, *values: object) -> Sequence[Any]:
        """Execute a query and return its rows."""

    @abstractmethod
    async def begin(self) -> None:
        """Begin a transaction, unless the next statement does; none is open."""

    async def flush(self) -> None:  # noqa: B027 -- a driver's connection keeps nothing back
        """Execute what the session has kept back; errors of it are raised here."""

    @abstractmethod
    async def commit(self) -> None:
        """End the transaction, if one is open."""

    @abstractmethod
    async def rollback(self) -> None:
        """End the transaction, if one is open."""

    @abstractmethod
    async def autocommits(self) -> bool:
        """Return whether the next statement would commit by itself; False also if unknown."""

    @abstractmethod
    def transaction_watch(self) -> Callable[[], bool]:
        """Return a function that tells, as far as the driver does, if this transaction is open."""

    async def close(self) -> None:  # noqa: B027 -- most open nothing
        """Close what was opened for these statements; the connection is its owner's."""


def has_open_transaction(target: Any) -> bool:
    """Return whether a session or connection is in a transaction, its own or somebody else's.

    False also if its driver does not tell.
    """
    target = getattr(target, "registry", lambda: target)()  # of a scoped_session
    target = getattr(target, "sync_session", None) or getattr(target, "sync_connection", target)
    if _driver_of(target) == "asyncpg":
        return bool(target.is_in_transaction())
    if hasattr(target, "get_transaction"):  # SQLAlchemy's Session or Connection
        bind = getattr(target, "bind", None)  # of a Session; a Connection has its own transaction
        outer = getattr(bind, "in_transaction", lambda: False)
        return bool(target.in_transaction()) or bool(outer())
    connection = target if hasattr(target, "commit") else getattr(target, "connection", target)
    return _in_transaction(_DRIVERS.get(_driver_of(connection)), connection)


def check_ownable(session: object, remedy: str) -> None:
    """Reject a session whose next transaction halfmq cannot begin and commit.

    Raises:
        ConfigurationError: It is in a transaction, or has several engines.
    """
    if has_open_transaction(session):
        raise ConfigurationError(
            "session",
            session,
            "one without an open transaction, since halfmq commits it: end that one first, "
            f"take another session, or {remedy}",
        )
    check_engines(session)


def check_engines(target: Any) -> None:
    """Reject SQLAlchemy's sessions with several engines, which commit one after the other.

    Called before such a session is used, and again with the connections that it has used: a session
    may choose its engine for each statement. SQLAlchemy has no public way to ask either.

    Raises:
        ConfigurationError: One commit may fail after another has succeeded.
    """
    target = getattr(target, "registry", lambda: target)()  # of a scoped_session
    target = getattr(target, "sync_session", target)
    if not hasattr(target, "twophase") or target.twophase:
        return
    used = {one[1] for one in getattr(target.get_transaction(), "_connections", {}).values()}
    binds = getattr(target, "binds", None) or getattr(target, "_Session__binds", {})
    bound = {one.engine for one in (target.bind, *binds.values()) if one is not None}
    if len(used) > 1 or len(bound) > 1:
        raise ConfigurationError(
            "session",
            target,
            "one with a single engine, or twophase=True: several commit one after the other",
        )


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that uses a blocking driver, which never suspends it."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise ConfigurationError("connection", work, "one of a blocking driver")


def check_blocking(target: object, remedy: str) -> None:
    """Reject connections and cursors whose methods must be awaited.

    Raises:
        ConfigurationError: ``target`` belongs to an asynchronous driver; ``remedy`` says what to
            call instead.
    """
    methods = (getattr(target, name, None) for name in ("execute", "commit"))
    if (
        _driver_of(target) in _AWAITED
        or inspect.isawaitable(target)
        or hasattr(target, "__aenter__")
        or any(map(inspect.iscoroutinefunction, methods))
    ):
        raise ConfigurationError("connection", target, f"a blocking one; this needs {remedy}")


async def open_database(target: Any, paramstyle: str | None) -> Database:
    """Wrap a cursor, connection or session as a ``Database``, which must be closed."""
    if _driver_of(target) == "asyncpg":
        return _Asyncpg(target)
    if hasattr(target, "fetchall"):
        # pg8000 emits a warning for the documented attribute, cursor.connection.
        connection = getattr(target, "_c", None) or getattr(target, "connection", None)
        return _Dbapi(connection, target, paramstyle)
    if hasattr(target, "cursor"):
        cursor = await _await_if_needed(target.cursor())
        return _Dbapi(target, cursor, paramstyle, closes=True)
    return _SqlAlchemy(target)


@asynccontextmanager
async def managed_connection(opening: Any) -> AsyncIterator[Any]:
    """Enter or await what a user's ``connect`` returned, and close the connection at the end."""
    if hasattr(opening, "__aenter__"):
        async with opening as target:
            yield target
        return
    target = await _await_if_needed(opening)
    try:
        yield target
    finally:
        await _await_if_needed(target.close())


class _Dbapi(Database):
    """A cursor of PEP 249, or an asynchronous one with the same methods."""

    def __init__(
        self, connection: Any, cursor: Any, style: str | None, *, closes: bool = False
    ) -> None:
        self._connection, self._cursor, self._style = connection, cursor, style
        self._closes = closes
        self.kind = _DRIVERS.get(_driver_of(cursor))

    async def execute(self, sql: str, *values: object) -> int:
        if self._style is None:
            self._style = paramstyle_of(self._cursor)
        await _await_if_needed(self._cursor.execute(*render(sql, values, self._style)))
        changed: int = self._cursor.rowcount
        return changed

    async def fetch(self, sql: str, *values: object) -> Sequence[Any]:
        await self.execute(sql, *values)
        rows: Sequence[Any] = await _await_if_needed(self._cursor.fetchall())
        return rows

    async def begin(self) -> None:
        if await self.autocommits():
            await self.execute("begin")

    async def commit(self) -> None:
        await _await_if_needed(self._connection.commit())

    async def rollback(self) -> None:
        await _await_if_needed(self._connection.rollback())

    async def autocommits(self) -> bool:
        return await _autocommits(self, self._connection)

    def transaction_watch(self) -> Callable[[], bool]:
        return partial(_in_transaction, self.kind, self._connection)

    async def close(self) -> None:
        # An error that is kept holds its frames, and they hold the cursor: while one is open,
        # SQLite keeps the locks of a closed connection.
        if self._closes:
            with contextlib.suppress(Exception):  # of a broken connection: it was raised before
                await _await_if_needed(self._cursor.close())


class _Asyncpg(Database):
    """A connection of asyncpg, where a statement outside a transaction commits by itself."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.kind: str | None = POSTGRESQL

    async def execute(self, sql: str, *values: object) -> int:
        tag: str = await self._connection.execute(*self._render(sql, values))
        changed = tag.rpartition(" ")[2]  # "DELETE 3"
        return int(changed) if changed.isdigit() else -1

    async def fetch(self, sql: str, *values: object) -> Sequence[Any]:
        rows: Sequence[Any] = await self._connection.fetch(*self._render(sql, values))
        return rows

    def _render(self, sql: str, values: tuple[object, ...]) -> tuple[object, ...]:
        text, parameters = render(sql, values, "numeric_dollar")
        return text, *parameters

    async def begin(self) -> None:
        await self._connection.execute("begin")

    async def commit(self) -> None:
        if self._connection.is_in_transaction():
            await self._connection.execute("commit")

    async def rollback(self) -> None:
        if self._connection.is_in_transaction():
            await self._connection.execute("rollback")

    async def autocommits(self) -> bool:
        return not self._connection.is_in_transaction()

    def transaction_watch(self) -> Callable[[], bool]:
        is_open: Callable[[], bool] = self._connection.is_in_transaction
        return is_open


class _SqlAlchemy(Database):
    """SQLAlchemy's ``Session`` or ``Connection``; for async ones, the one ``run_sync`` passes."""

    def __init__(self, target: Any) -> None:
        self._target = getattr(target, "registry", lambda: target)()  # of a scoped_session
        # A Session's; one whose flush has failed refuses to give a connection until its rollback.
        bind = getattr(self._target, "get_bind", lambda: self._target)()
        name: str = bind.dialect.name
        self.kind: str | None = MYSQL if name == "mariadb" else name

    def _connection(self) -> Any:
        connection = self._target.connection  # a Session's method; a Connection's driver
        return connection() if callable(connection) else self._target

    def _execute(self, sql: str, values: tuple[object, ...]) -> Any:
        from sqlalchemy import text  # noqa: PLC0415 -- only where SQLAlchemy is in use

        sql, parameters = render(sql, values, "named")
        return self._target.execute(text(sql), parameters)

    async def execute(self, sql: str, *values: object) -> int:
        changed: int = self._execute(sql, values).rowcount
        return changed

    async def fetch(self, sql: str, *values: object) -> Sequence[Any]:
        rows: Sequence[Any] = self._execute(sql, values).fetchall()
        return rows

    async def begin(self) -> None:
        self._connection()

    async def flush(self) -> None:
        flush = getattr(self._target, "flush", None)  # a Session's
        if flush is not None:
            flush()
            check_engines(self._target)

    async def commit(self) -> None:
        self._target.commit()

    async def rollback(self) -> None:
        self._target.rollback()

    async def autocommits(self) -> bool:
        connection = self._connection()
        if not connection.in_transaction():
            connection.begin()  # as the next statement would; an event handler may emit BEGIN
        pooled = connection.connection
        driver = pooled.driver_connection
        if _driver_of(driver) == "asyncpg":
            # SQLAlchemy begins its transaction just before the first statement.
            return bool(pooled.dbapi_connection.autocommit) and not driver.is_in_transaction()
        return await _autocommits(self, driver)

    def transaction_watch(self) -> Callable[[], bool]:
        begun = self._target.get_transaction()  # after its end a statement begins another one
        return lambda: begun is not None and self._target.get_transaction() is begun


async def _autocommits(database: Database, connection: Any) -> bool:
    """Return whether a driver's connection is in autocommit mode and in no transaction."""
    if database.kind == SQLITE:
        return _sqlite_autocommits(connection)
    if database.kind == POSTGRESQL:
        return bool(getattr(connection, "autocommit", False)) and await _is_idle(database)
    if database.kind == MYSQL:
        get_autocommit = getattr(connection, "get_autocommit", None)  # not in every driver
        if get_autocommit is not None and not get_autocommit():
            return False
        return await _is_idle(database)
    return False


def _sqlite_autocommits(connection: Any) -> bool:
    if connection.in_transaction:
        return False
    control = getattr(connection, "autocommit", _LEGACY_TRANSACTION_CONTROL)
    if control == _LEGACY_TRANSACTION_CONTROL:
        return connection.isolation_level is None
    return bool(control)


def _in_transaction(kind: str | None, connection: Any) -> bool:
    """Return whether a driver's connection says that it is in a transaction."""
    if kind == SQLITE:
        # With autocommit=False (Python 3.12) it always is.
        return bool(connection.in_transaction) and getattr(connection, "autocommit", 0) is not False
    if kind == POSTGRESQL:
        info = getattr(connection, "info", None)  # not in every driver
        return getattr(info, "transaction_status", None) in _IN_TRANSACTION
    if kind == MYSQL:
        return bool(getattr(connection, "server_status", 0) & _SERVER_STATUS_IN_TRANS)
    return False


async def _is_idle(database: Database) -> bool:
    """Return whether no transaction is open: a savepoint does not persist outside of one."""
    try:
        await database.execute("savepoint halfmq_ledger")
        await database.execute("release savepoint halfmq_ledger")
    except Exception as error:
        if not _NO_TRANSACTION.isdisjoint(_codes(error)):
            return True
        raise
    return False


# -- parameters and expressions


def clock_of(database: Database) -> str | None:
    """Return the expression for the database's own time, in ms since 1970; None if unknown."""
    return _CLOCKS.get(database.kind)


def paramstyle_of(cursor: object) -> str:
    """Return the DB-API paramstyle of a cursor's driver.

    Raises:
        ConfigurationError: Its module does not declare one, as for a cursor wrapped by a framework.
    """
    for kind in type(cursor).__mro__:
        parts = kind.__module__.split(".")
        if parts[0] in _STYLES:
            return _STYLES[parts[0]]
        while parts:
            style = getattr(sys.modules.get(".".join(parts)), "paramstyle", None)
            if style in _PLACEHOLDERS:
                return str(style)
            parts.pop()
    raise ConfigurationError(
        "paramstyle",
        None,
        f"one of {', '.join(PARAMSTYLES)}: {type(cursor).__module__} does not declare it "
        "(with SQLAlchemy, pass the Session or Connection itself)",
    )


def render(sql: str, values: tuple[object, ...], style: str) -> Statement:
    """Render a statement template in a driver's paramstyle."""
    placeholder = _PLACEHOLDERS[style]
    marks = [placeholder.replace("{number}", str(n)) for n in range(1, len(values) + 1)]
    text = sql.format(*marks)
    if style in {"named", "pyformat"}:
        return text, {f"p{n}": value for n, value in enumerate(values, 1)}
    return text, values


# -- drivers and their errors


def _driver_of(target: object) -> str:
    """Return the package of a connection's or cursor's driver, through wrappers and subclasses."""
    packages = [kind.__module__.partition(".")[0] for kind in type(target).__mro__]
    for package in packages:
        if package in _DRIVERS:
            return package
    inner = getattr(target, "cursor", None)  # of Django's cursors
    if inner is None or callable(inner):
        return packages[0]
    return _driver_of(inner)


async def _await_if_needed(value: Any) -> Any:
    """Return a method's result, awaited if the driver is asynchronous."""
    return await value if inspect.isawaitable(value) else value


def is_database_error(error: BaseException) -> bool:
    """Return whether the database or the connection to it failed: locked, down, table missing."""
    return isinstance(error, OSError) or any(
        kind.__name__ in _ERRORS for kind in type(error).__mro__
    )


def is_duplicate(error: BaseException) -> bool:
    """Return whether a statement failed because the key already exists."""
    return _UNIQUE_VIOLATION in _codes(error) or any(
        kind.__name__ == "IntegrityError" for kind in type(error).__mro__
    )


def is_missing_table(error: BaseException) -> bool:
    """Return whether a statement failed because its table does not exist."""
    return any(
        code in _NO_TABLE or (isinstance(code, str) and code.startswith("no such table"))
        for code in _codes(error)
    )


def _codes(error: BaseException) -> Iterator[object]:
    """Yield PostgreSQL's SQLSTATE or MySQL's error number, also from a wrapped driver error."""
    for each in (error, getattr(error, "orig", None), error.__cause__):
        yield getattr(each, "sqlstate", None)
        yield getattr(each, "pgcode", None)
        for fact in getattr(each, "args", ())[:1]:
            yield fact.get("C") if isinstance(fact, dict) else fact  # pg8000 has a dictionary
