"""``halfmq.integrations.django`` in a project of its own, on SQLite and PostgreSQL."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from halfmq.client.blocking import Consumer
from halfmq.client.testing import broker_process
from tests.support.ledger_drivers import POSTGRESQL, SQLITE
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("django") is None,
    reason="Django is missing: pip install 'halfmq[django]'; its integration is NOT tested",
)

PROJECT = """
import sys
import django
from django.conf import settings

engine, name, port, namesrv = sys.argv[1:]
settings.configure(
    INSTALLED_APPS=["halfmq.integrations.django"],
    DATABASES={"default": {"ENGINE": f"django.db.backends.{engine}", "NAME": name,
                           "USER": "postgres", "HOST": "127.0.0.1", "PORT": port}},
    HALFMQ={"GROUP": "orders-tx", "NAMESRV": namesrv},
)
django.setup()

from django.core.management import call_command
from django.db import IntegrityError, connection
from django.db.transaction import atomic, set_rollback

from halfmq.client import ClientError, ConfigurationError, Message, TransactionNotCommittedError
from halfmq.integrations.django import ledger, producer, transaction

call_command("migrate", verbosity=0)
call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def insert(number):
    with connection.cursor() as cursor:
        cursor.execute("insert into orders values (%s)", [number])


with connection.cursor() as cursor:
    cursor.execute("create table orders (number varchar(20) primary key)")

with transaction(Message("orders", b"in a block")) as tx:
    insert("in a block")


@transaction(Message("orders", b"by a decorator"))
def decorated():
    insert("by a decorator")


decorated()

for name in ("raises", "swallowed", "marked", "with a part"):
    try:
        with transaction(Message("orders", name.encode())):
            insert(name)
            if name == "raises":
                raise ValueError
            if name == "swallowed":
                try:
                    insert(name)
                except IntegrityError:
                    pass
            if name == "marked":
                set_rollback(True)
            if name == "with a part":
                try:
                    with atomic():
                        insert("part")
                        raise ValueError
                except ValueError:
                    pass
    except Exception as error:
        print(name, type(error).__name__)
    else:
        print(name, "ends normally")

with atomic():
    try:
        transaction(Message("orders", b"inside")).__enter__()
    except ConfigurationError as error:
        assert "ATOMIC_REQUESTS" in str(error)
        print("inside refused")

with connection.cursor() as cursor:
    cursor.execute("select number from orders order by number")
    print("rows", [row[0] for row in cursor.fetchall()])
call_command("halfmq_prune", days=1)
producer().close()
"""


@pytest.mark.parametrize("database", [SQLITE, POSTGRESQL])
def test_rows_and_messages_are_the_same(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """However a block ends; migrations stay quiet; an outer transaction is refused."""
    if database == SQLITE:
        place = "sqlite3", str(tmp_path / "orders.db"), ""
    else:
        place = "postgresql", "postgres", str(request.getfixturevalue(database))
    script = tmp_path / "project.py"
    script.write_text(PROJECT)
    with broker_process(tmp_path / "broker") as broker:
        done = subprocess.run(
            [sys.executable, str(script), *place, broker.address],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout.splitlines()
        rows = {"in a block", "by a decorator", "with a part"}
        if database == SQLITE:  # where a statement that fails leaves the transaction as it was
            rows.add("swallowed")
        assert said[0] == "raises ValueError"
        assert said[1].startswith("swallowed ends" if database == SQLITE else "swallowed ")
        assert said[2] == "marked TransactionManagementError"
        assert said[3:5] == ["with a part ends normally", "inside refused"]
        assert said[5] == f"rows {sorted(rows)}"
        assert said[6] == "pruned 0"
        with Consumer("mail", {"orders": "*"}, start_from="first", namesrv=broker.address) as mail:
            bodies = set()
            for _ in rows:
                message = mail.receive(timeout=PATIENCE_S)
                assert message is not None
                bodies.add(message.body.decode())
                message.ack()
            assert mail.receive(timeout=1.0) is None
    assert bodies == rows
