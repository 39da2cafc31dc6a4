"""A table of halfmq in the user's database, used through the user's own connections."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from ..arguments import check_kind, check_optional_text, check_text
from ..errors import ConfigurationError
from .databases import (
    PARAMSTYLES,
    Cursor,
    Database,
    DbapiConnection,
    check_blocking,
    open_database,
    run_blocking,
)

T = TypeVar("T")

Target: TypeAlias = Cursor | DbapiConnection
"""A cursor or connection of a driver, or SQLAlchemy's ``Session`` or ``Connection``."""


KEPT_MIN: Final = timedelta(days=1)
"""The minimum age of pruned rows: a local transaction that runs longer would find no tombstone, and
a message may come again so much later."""


class DatabaseTable(ABC):
    """One table; any number of threads may share the object."""

    def __init__(self, table: str, paramstyle: str | None) -> None:
        check_text("table", table, "a name that needs no quotes")
        check_optional_text("paramstyle", paramstyle)
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", table, re.ASCII):
            raise ConfigurationError("table", table, "a name that needs no quotes")
        if paramstyle is not None and paramstyle not in PARAMSTYLES:
            raise ConfigurationError("paramstyle", paramstyle, ", ".join(PARAMSTYLES))
        self._table = table
        self._paramstyle = paramstyle

    @property
    def table(self) -> str:
        """The table's name."""
        return self._table

    @property
    @abstractmethod
    def create_statement(self) -> str:
        """The statement that creates the table if it is missing, for migrations."""

    def create_table(self, connection: Target) -> None:
        """Create the table if it is missing, and commit."""
        self.run_blocking_work(connection, self._create_table, "`await create_table_async(…)`")

    async def create_table_async(self, connection: object) -> None:
        """As :meth:`create_table`, for an asynchronous connection."""
        await self.run_async(connection, self._create_table)

    async def _create_table(self, database: Database) -> None:
        await database.execute(self.create_statement)
        await database.commit()

    def prune(self, connection: Target, older_than: timedelta = timedelta(days=30)) -> int:
        """Delete rows that are older, commit, and return how many; the class says what follows.

        Their age is by the database's clock, if it is SQLite, PostgreSQL, MySQL or MariaDB.

        Raises:
            ConfigurationError: ``older_than`` is less than a day.
        """
        work = partial(self._prune, _age_ms(older_than))
        return self.run_blocking_work(connection, work, "`await prune_async(…)`")

    async def prune_async(
        self, connection: object, older_than: timedelta = timedelta(days=30)
    ) -> int:
        """As :meth:`prune`, for an asynchronous connection."""
        return await self.run_async(connection, partial(self._prune, _age_ms(older_than)))

    @abstractmethod
    async def _prune(self, age_ms: int, database: Database) -> int:
        """Delete rows of this age, commit, and return how many."""

    def _sql(self, template: str, clock: str | None = None) -> str:
        """Fill in the table, and the expression for the time; None: it is a value."""
        return template.replace("NOW", clock or "{}").replace("TABLE", self._table, 1)

    def run_blocking_work(
        self, target: Any, work: Callable[[Database], Coroutine[Any, Any, T]], remedy: str
    ) -> T:
        """Run statements in a blocking session or connection; called by the producer."""
        check_blocking(target, remedy)

        return run_blocking(self._run(target, work))

    async def run_async(self, target: Any, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
        """Run statements in an asynchronous session or connection; called by the producer."""
        target = getattr(target, "registry", lambda: target)()  # of async_scoped_session
        if hasattr(target, "run_sync"):  # SQLAlchemy's, which awaits for blocking code
            result: T = await target.run_sync(self.run_blocking_work, work, "")
            return result
        return await self._run(target, work)

    async def _run(self, target: Any, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
        database = await open_database(target, self._paramstyle)
        try:
            return await work(database)
        finally:
            await database.close()


def _age_ms(older_than: timedelta) -> int:
    check_kind("older_than", older_than, timedelta)
    if older_than < KEPT_MIN:
        raise ConfigurationError("older_than", older_than, f"at least {KEPT_MIN}")
    return older_than // timedelta(milliseconds=1)


def host_ms() -> int:
    """Return the time by this program's clock, in ms since 1970."""
    return int(time.time() * 1000)
