"""The drivers with which the ledger is tested, and how each connects to which database."""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

SQLITE: Final = "sqlite"
POSTGRESQL: Final = "postgresql"
MARIADB: Final = "mariadb"

EXTRAS: Final = frozenset({"psycopg2", "MySQLdb", "asyncmy"})
"""Drivers that no extra of ours installs; tested where they happen to be there."""


@dataclass(frozen=True)
class Place:
    """Where one test's database is: a file, or the port of a server."""

    file: Path
    port: int = 0

    @property
    def mysql(self) -> dict[str, Any]:
        """How drivers of MySQL call it."""
        return {"host": "127.0.0.1", "port": self.port, "user": "root"}

    def url(self, dialect: str) -> str:
        """How SQLAlchemy calls it."""
        if dialect.startswith("sqlite"):
            return f"{dialect}:///{self.file}"
        user, database = ("postgres",) * 2 if dialect.startswith("postgresql") else ("root", "test")
        return f"{dialect}://{user}@127.0.0.1:{self.port}/{database}"


@dataclass(frozen=True)
class Driver:
    """One way to reach a database."""

    name: str
    database: str
    modules: tuple[str, ...]
    connect: Callable[[Place, bool], Any]
    """Connects, or returns what is awaited for it; the second says whether in autocommit mode."""
    awaited: bool = False

    def __str__(self) -> str:
        return self.name

    def check_installed(self) -> None:
        """Skip the test without the driver."""
        for module in self.modules:
            pytest.importorskip(module, reason=f"needs {module}: pip install -e '.[test]'")


def _sqlite(place: Place, autocommit: bool) -> Any:
    # Checks run in other threads than the test.
    level: Any = None if autocommit else ""
    return sqlite3.connect(place.file, isolation_level=level, check_same_thread=False)


def _aiosqlite(place: Place, autocommit: bool) -> Any:
    module: Any = importlib.import_module("aiosqlite")
    return module.connect(place.file, isolation_level=None if autocommit else "")


def _psycopg(place: Place, autocommit: bool) -> Any:
    module: Any = importlib.import_module("psycopg")
    return module.connect(_libpq(place), autocommit=autocommit)


def _psycopg_async(place: Place, autocommit: bool) -> Any:
    module: Any = importlib.import_module("psycopg")
    return module.AsyncConnection.connect(_libpq(place), autocommit=autocommit)


def _psycopg2(place: Place, autocommit: bool) -> Any:
    module: Any = importlib.import_module("psycopg2")
    connection = module.connect(_libpq(place))
    connection.autocommit = autocommit
    return connection


def _libpq(place: Place) -> str:
    return f"host=127.0.0.1 port={place.port} user=postgres dbname=postgres"


def _pg8000(place: Place, autocommit: bool) -> Any:
    module: Any = importlib.import_module("pg8000.dbapi")
    connection = module.connect(user="postgres", host="127.0.0.1", port=place.port)
    connection.autocommit = autocommit
    return connection


def _asyncpg(place: Place, _autocommit: bool) -> Any:
    module: Any = importlib.import_module("asyncpg")
    return module.connect(
        user="postgres", host="127.0.0.1", port=place.port, database="postgres", ssl=False
    )


def _mysql(module_name: str, database: str = "database") -> Callable[[Place, bool], Any]:
    def connect(place: Place, autocommit: bool) -> Any:
        module: Any = importlib.import_module(module_name)
        return module.connect(**place.mysql, **{database: "test"}, autocommit=autocommit)

    return connect


def _alchemy(dialect: str) -> Callable[[Place, bool], Any]:
    def connect(place: Place, autocommit: bool) -> Any:
        module: Any = importlib.import_module("sqlalchemy")
        pool: Any = importlib.import_module("sqlalchemy.pool")
        options = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
        return module.create_engine(
            place.url(dialect), poolclass=pool.NullPool, **options
        ).connect()

    return connect


def _async_alchemy(dialect: str) -> Callable[[Place, bool], Any]:
    def connect(place: Place, autocommit: bool) -> Any:
        module: Any = importlib.import_module("sqlalchemy.ext.asyncio")
        pool: Any = importlib.import_module("sqlalchemy.pool")
        options = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
        return module.create_async_engine(
            place.url(dialect), poolclass=pool.NullPool, **options
        ).connect()

    return connect


_BLOCKING: Final = [
    Driver("sqlite3", SQLITE, (), _sqlite),
    Driver("psycopg", POSTGRESQL, ("psycopg",), _psycopg),
    Driver("psycopg2", POSTGRESQL, ("psycopg2",), _psycopg2),
    Driver("pg8000", POSTGRESQL, ("pg8000",), _pg8000),
    Driver("pymysql", MARIADB, ("pymysql",), _mysql("pymysql")),
    Driver("MySQLdb", MARIADB, ("MySQLdb",), _mysql("MySQLdb")),
]
_ASYNC: Final = [
    Driver("aiosqlite", SQLITE, ("aiosqlite",), _aiosqlite, awaited=True),
    Driver("psycopg-async", POSTGRESQL, ("psycopg",), _psycopg_async, awaited=True),
    Driver("asyncpg", POSTGRESQL, ("asyncpg",), _asyncpg, awaited=True),
    Driver("aiomysql", MARIADB, ("aiomysql",), _mysql("aiomysql", "db"), awaited=True),
    Driver("asyncmy", MARIADB, ("asyncmy",), _mysql("asyncmy", "db"), awaited=True),
]
_ALCHEMY: Final = [
    Driver(f"sqlalchemy-{dialect}", database, ("sqlalchemy", module), _alchemy(dialect))
    for dialect, database, module in [
        ("sqlite", SQLITE, "sqlite3"),
        ("postgresql+psycopg", POSTGRESQL, "psycopg"),
        ("postgresql+pg8000", POSTGRESQL, "pg8000"),
        ("mysql+pymysql", MARIADB, "pymysql"),
    ]
]
_ASYNC_ALCHEMY: Final = [
    Driver(
        f"sqlalchemy-async-{dialect}",
        database,
        ("sqlalchemy.ext.asyncio", "greenlet", module),
        _async_alchemy(dialect),
        awaited=True,
    )
    for dialect, database, module in [
        ("sqlite+aiosqlite", SQLITE, "aiosqlite"),
        ("postgresql+psycopg", POSTGRESQL, "psycopg"),
        ("postgresql+asyncpg", POSTGRESQL, "asyncpg"),
        ("mysql+aiomysql", MARIADB, "aiomysql"),
    ]
]

DRIVERS: Final = [
    driver
    for driver in [*_BLOCKING, *_ASYNC, *_ALCHEMY, *_ASYNC_ALCHEMY]
    if all(find_spec(module) is not None for module in driver.modules if module in EXTRAS)
]


_USUAL: Final = (
    *("sqlite3", "psycopg", "asyncpg", "pymysql", "aiosqlite"),
    *("sqlalchemy-sqlite", "sqlalchemy-postgresql+psycopg", "sqlalchemy-mysql+pymysql"),
    *("sqlalchemy-async-sqlite+aiosqlite", "sqlalchemy-async-postgresql+asyncpg"),
)
USUAL: Final = [driver for driver in DRIVERS if driver.name in _USUAL]
"""One driver of each kind, for tests about how programs use it."""

_DJANGO: Final[dict[str, tuple[str, str, str, tuple[str, ...]]]] = {
    SQLITE: ("sqlite3", "", "", ()),
    POSTGRESQL: ("postgresql", "postgres", "postgres", ("psycopg",)),
    MARIADB: ("mysql", "test", "root", ("MySQLdb",)),
}


def django_entry(database: str, place: Place) -> dict[str, str]:
    """Return what DATABASES says of a database; skips the test without Django or its driver."""
    engine, name, user, modules = _DJANGO[database]
    for module in ("django", *modules):
        source = "mysqlclient" if module == "MySQLdb" else "-e '.[test]'"
        pytest.importorskip(module, reason=f"needs {module}: pip install {source}")
    return {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": name or str(place.file),
        "USER": user,
        "HOST": "127.0.0.1",
        "PORT": str(place.port),
    }


def django_connections(database: str, place: Place) -> Callable[[], Any]:
    """Return what opens a connection of Django; skips the test without Django or its driver."""
    entry = django_entry(database, place)
    settings: Any = importlib.import_module("django.conf").settings
    if not settings.configured:
        settings.configure()
        importlib.import_module("django").setup()
    handler: Any = importlib.import_module("django.db.utils").ConnectionHandler
    return lambda: handler({"default": entry})["default"]
