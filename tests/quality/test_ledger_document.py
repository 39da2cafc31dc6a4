"""The examples of docs/ledger.md run as they stand."""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from halfmq.client.testing import broker_process
from tests.support.python import python

DOCUMENT = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "number", [0, 2, 3], ids=["in five lines", "recorded, blocking", "recorded, asynchronous"]
)
def test_the_examples_commit_a_row_and_its_message(number: int, tmp_path: Path) -> None:
    """Pasted as they stand, with nothing but SQLAlchemy installed and a broker running."""
    pytest.importorskip("sqlalchemy", reason="needs SQLAlchemy: pip install -e '.[test]'")
    pytest.importorskip("aiosqlite", reason="needs aiosqlite: pip install -e '.[test]'")
    example = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)[number]
    with broker_process(tmp_path / "broker") as broker:
        done = python(
            "-c", example, cwd=tmp_path, env={**os.environ, "NAMESRV_ADDR": broker.address}
        )

    assert (done.returncode, done.stderr) == (0, "")
    with closing(sqlite3.connect(tmp_path / "orders.db")) as database:
        assert database.execute("select count(*) from orders").fetchone() == (1,)
        assert database.execute("select state from halfmq_transactions").fetchone() == (
            "committed",
        )
