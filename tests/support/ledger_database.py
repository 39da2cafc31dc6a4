"""An application's SQLite file, shared by processes that are killed: its rows, and the ledger.

A local transaction inserts an order and its row of the :class:`TransactionLedger`; checks are
answered by the ledger alone. So orders are what messages are compared with in the end.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from halfmq.client import Checker, TransactionFencedError, TransactionLedger

BUSY_SECONDS: Final = 30.0
"""How long one process waits for another that writes."""

_SCHEMA: Final = """
create table if not exists orders (name text primary key, messages integer not null);
create table if not exists violations (what text not null);
"""


class LedgerDatabase:
    """One process's view of the file; the calls block for about a write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ledger = TransactionLedger()
        self._database = self._connect()
        self._database.execute("pragma journal_mode = wal")  # kept in the file
        self._database.executescript(_SCHEMA)
        self._ledger.create_table(self._database)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=BUSY_SECONDS)

    def close(self) -> None:
        self._database.close()

    def checker(self) -> Checker:
        """A checker for any process of the group."""
        return self._ledger.checker(self._connect)

    def begin(self, transaction_id: str, name: str, messages: int) -> bool:
        """Insert order and row, and leave the transaction open; False: a check came first."""
        cursor = self._database.cursor()
        try:
            cursor.execute("insert into orders values (?, ?)", [name, messages])
            self._ledger.record(cursor, transaction_id)
        except TransactionFencedError:
            self._database.rollback()
            return False
        return True

    def commit(self) -> None:
        self._database.commit()

    def roll_back(self) -> None:
        self._database.rollback()

    def violation(self, what: str) -> None:
        """Note something that must never happen."""
        with self._database:
            self._database.execute("insert into violations values (?)", [what])

    @property
    def violations(self) -> list[str]:
        return [what for (what,) in self._database.execute("select what from violations")]

    @property
    def committed(self) -> dict[str, int]:
        """Names of the orders, and how many messages each has."""
        return dict(self._database.execute("select name, messages from orders").fetchall())

    @property
    def fenced(self) -> int:
        """How many local transactions a check has ended, before or after their own rollback."""
        (count,) = self._database.execute(
            "select count(*) from halfmq_transactions where state = 'fenced'"
        ).fetchone()
        return int(count)
