"""A ledger in SQLite, shared by processes that are killed: which local transactions committed.

A row says how a transaction ended, and there is at most one. The local transaction writes
``committed``; the checker of any process of the group, finding no row, writes ``fenced`` before it
answers ROLLBACK. So whichever comes second fails, and the two can never disagree.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from halfmq.client import Decision

BUSY_SECONDS: Final = 30.0
"""How long one process waits for another that writes."""

_SCHEMA: Final = """
create table if not exists ledger (
    transaction_id text primary key, name text not null, messages integer, outcome text not null
);
create table if not exists violations (what text not null);
"""


class LedgerDatabase:
    """One process's view of the ledger; the calls block for about a write."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
        self._database.execute("pragma journal_mode = wal")
        self._database.executescript(_SCHEMA)

    def close(self) -> None:
        self._database.close()

    def begin(self, transaction_id: str, name: str, messages: int) -> bool:
        """Insert the row and leave the local transaction open; False: a checker was first."""
        self._database.execute("begin immediate")
        try:
            self._database.execute(
                "insert into ledger values (?, ?, ?, 'committed')", [transaction_id, name, messages]
            )
        except sqlite3.IntegrityError:
            self._database.execute("rollback")
            return False
        return True

    def commit(self) -> None:
        self._database.execute("commit")

    def roll_back(self) -> None:
        self._database.execute("rollback")

    def check(self, transaction_id: str, name: str) -> Decision:
        """Tell how the local transaction ended; one that has not ended can only fail from now."""
        self._database.execute(
            "insert or ignore into ledger values (?, ?, null, 'fenced')", [transaction_id, name]
        )
        (outcome,) = self._database.execute(
            "select outcome from ledger where transaction_id = ?", [transaction_id]
        ).fetchone()
        return Decision.COMMIT if outcome == "committed" else Decision.ROLLBACK

    def violation(self, what: str) -> None:
        """Note something that must never happen."""
        self._database.execute("insert into violations values (?)", [what])

    @property
    def violations(self) -> list[str]:
        return [what for (what,) in self._database.execute("select what from violations")]

    @property
    def committed(self) -> dict[str, int]:
        """Names of committed local transactions, and how many messages each has."""
        rows = self._database.execute(
            "select name, messages from ledger where outcome = 'committed'"
        )
        return dict(rows.fetchall())

    @property
    def fenced(self) -> int:
        """How many local transactions a checker has ended."""
        (count,) = self._database.execute(
            "select count(*) from ledger where outcome = 'fenced'"
        ).fetchone()
        return int(count)
