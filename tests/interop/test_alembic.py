"""Alembic creates the tables of ledger and inbox, as the documentation shows, and stays quiet."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config

from tests.support.documents import examples

ENVIRONMENT = """
from alembic import context
from sqlalchemy import Column, Integer, MetaData, Table, create_engine

metadata = MetaData()
Table("orders", metadata, Column("id", Integer, primary_key=True))

{filter}

with create_engine("sqlite:///shop.db").connect() as connection:
    context.configure(
        connection=connection, target_metadata=metadata, include_name=include_name
    )
    with context.begin_transaction():
        context.run_migrations()
"""

ORDERS = """
revision, down_revision = "1", None

from alembic import op
from sqlalchemy import Column, Integer

def upgrade():
    op.create_table("orders", Column("id", Integer, primary_key=True))
"""

TABLES = """
revision, down_revision = "2", "1"

{migration}
"""


def test_migrations_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`upgrade` makes the tables, `check` wants no change, `downgrade` drops them."""
    monkeypatch.chdir(tmp_path)
    code = [one.code for one in examples("docs/ledger.md")]
    [migration] = [one for one in code if "op.execute" in one]
    [include] = [one for one in code if "def include_name" in one]
    versions = tmp_path / "alembic/versions"
    versions.mkdir(parents=True)
    (tmp_path / "alembic/env.py").write_text(ENVIRONMENT.format(filter=include))
    (versions / "1.py").write_text(ORDERS)
    (versions / "2.py").write_text(TABLES.format(migration=migration))
    config = Config()
    config.set_main_option("script_location", str(tmp_path / "alembic"))

    command.upgrade(config, "head")
    assert _tables() == {"alembic_version", "orders", "halfmq_transactions", "halfmq_inbox"}
    command.check(config)  # raises if anything would change
    command.downgrade(config, "1")
    assert _tables() == {"alembic_version", "orders"}


def _tables() -> set[Any]:
    with sqlite3.connect("shop.db") as database:
        found = database.execute("select name from sqlite_master where type = 'table'").fetchall()
    database.close()
    return {name for (name,) in found}
