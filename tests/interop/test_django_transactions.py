"""``halfmq.integrations.django`` in a project of its own, on SQLite and PostgreSQL."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.client.blocking import Admin, Consumer
from halfmq.client.testing import broker_process
from tests.support.ledger_drivers import POSTGRESQL, SQLITE
from tests.support.patience import PATIENCE_S
from tests.support.python import python

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

with transaction() as tx:
    insert("added")
    tx.add(Message("orders", b"added"))

try:
    with transaction() as tx:
        tx.add(Message("orders", b"marked"))
        insert("marked")
        set_rollback(True)
except Exception:
    pass


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


OF_TWO_DATABASES = """
import os
import sys
import django
from django.conf import settings

directory, namesrv, step = sys.argv[1:]
settings.configure(
    INSTALLED_APPS=["halfmq.integrations.django"],
    DATABASES={
        name: {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{directory}/{name}.db"}
        for name in ("default", "other")
    },
    HALFMQ={"GROUP": "orders-tx", "NAMESRV": namesrv},
)
django.setup()

from django.core.management import call_command
from django.db import transaction as django_transaction

from halfmq.client import Message
from halfmq.integrations.django import producer, transaction

if step == "dies after the commit":
    for name in ("default", "other"):
        call_command("migrate", database=name, verbosity=0)
    with transaction(Message("orders", b"other"), using="other"):
        django_transaction.on_commit(lambda: os._exit(9), using="other")
producer()
if step == "asks the other":
    producer("other")
print("ready", flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextlib.contextmanager
def answering(script: Path, *arguments: str) -> Iterator[None]:
    """Run a program whose producers answer checks."""
    command = [sys.executable, str(script), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        process.stdin.close()


def test_a_check_is_answered_from_the_database_of_its_transaction(tmp_path: Path) -> None:
    """A producer of another database would find no row, and roll back what is committed."""
    script = tmp_path / "project.py"
    script.write_text(OF_TWO_DATABASES)
    settings = {"transactionTimeOut": 100, "transactionCheckInterval": 100}
    with (
        broker_process(tmp_path / "broker", **settings) as broker,
        Admin(namesrv=broker.address) as admin,
    ):
        place = str(tmp_path), broker.address
        dead = [sys.executable, str(script), *place, "dies after the commit"]
        assert subprocess.run(dead, check=False).returncode == 9
        (undecided,) = admin.transactions()
        with answering(script, *place, "asks the default one"):
            assert [one.producers for one in admin.transactions()] == [0]
        with (
            answering(script, *place, "asks the other"),
            Consumer("g", {"orders": "*"}, start_from="first", namesrv=broker.address) as mail,
        ):
            message = mail.receive(timeout=PATIENCE_S)
    assert message is not None
    assert message.transaction_id == undecided.transaction_id


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
        done = python(script, *place, broker.address)
        assert done.returncode == 0, done.stderr
        said = done.stdout.splitlines()
        rows = {"in a block", "added", "by a decorator", "with a part"}
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
