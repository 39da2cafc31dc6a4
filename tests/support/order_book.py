"""A small application's database: orders, each written with its row in the ledger."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from halfmq.client import TransactionLedger


class OrderBook:
    """An SQLite file; every call opens a connection of its own, so any thread may use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = TransactionLedger()
        self.check = self.ledger.checker(self.connect)
        with closing(self.connect()) as connection:
            connection.execute("pragma journal_mode = wal")
            connection.execute("create table if not exists orders (id text primary key)")
            self.ledger.create_table(connection)

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=30)

    def save(self, transaction_id: str) -> None:
        """The local transaction: an order under the transaction's id."""
        with closing(self.connect()) as connection, connection:
            connection.execute("insert into orders values (?)", (transaction_id,))
            self.ledger.record(connection.cursor(), transaction_id)

    @property
    def saved(self) -> set[str]:
        """The transactions that have committed."""
        with closing(self.connect()) as connection:
            return {row[0] for row in connection.execute("select id from orders")}
