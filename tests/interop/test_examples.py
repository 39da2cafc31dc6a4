"""The applications in `examples/`, as a team would run them: with a broker and a database."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path
from typing import Any, Final

import httpx
import psycopg
import pytest
from aiosmtpd.controller import Controller

from halfmq.client import Admin
from halfmq.client.blocking import Message, Producer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.patience import wait_until
from tests.support.programs import Program, free_port, running, wait_for_web
from tests.support.python import python

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
ORDERS: Final = [f"o-{number}" for number in range(25)]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path / "broker") as running_broker:
        yield running_broker


class Database:
    """A new database on the PostgreSQL of the tests."""

    engine, user, first = "postgresql", "postgres", "postgres"

    def __init__(self, port: int) -> None:
        self.port, self.name = port, f"shop_{os.getpid()}_{free_port()}"
        self._run(self.first, f"create database {self.name}")

    def _connect(self, name: str) -> Any:
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user=self.user, dbname=name, autocommit=True
        )

    def _run(self, name: str, sql: str) -> list[Any]:
        with contextlib.closing(self._connect(name)) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return [] if cursor.description is None else list(cursor.fetchall())

    def column(self, query: str) -> list[Any]:
        return [row[0] for row in self._run(self.name, query)]


class MariaDatabase(Database):
    """A new database on the MariaDB of the tests."""

    engine, user, first = "mysql", "root", "test"

    def _connect(self, name: str) -> Any:
        pymysql: Any = importlib.import_module("pymysql")  # it has no types
        return pymysql.connect(
            host="127.0.0.1", port=self.port, user=self.user, database=name, autocommit=True
        )


@pytest.fixture
def database(postgresql: int) -> Database:
    return Database(postgresql)


def test_the_shop_with_fastapi_and_sqlalchemy(
    broker: BrokerProcess, database: Database, tmp_path: Path
) -> None:
    """Each order has one parcel, also when the shipping department is killed in between."""
    folder, port = EXAMPLES / "fastapi_shop", free_port()
    url = f"postgresql+asyncpg://postgres@127.0.0.1:{database.port}/{database.name}?ssl=disable"
    environment = {"DATABASE_URL": url, "NAMESRV_ADDR": broker.address}
    serve = [sys.executable, "-m", "uvicorn", "shop:app", "--port", port]
    ship = [sys.executable, "shipping.py"]
    with running(serve, folder, environment, tmp_path / "shop.log") as shop:
        wait_for_web(f"http://127.0.0.1:{port}/healthz", shop)
        with (
            httpx.Client(base_url=f"http://127.0.0.1:{port}") as web,
            running(ship, folder, environment, tmp_path / "first.log") as first,
            running(ship, folder, environment, tmp_path / "second.log") as second,
        ):
            assert web.get("/healthz").json() == {"connected": True}
            for place, number in enumerate(ORDERS):
                new = {"number": number, "customer": f"c-{place % 7}"}
                assert web.post("/orders", json=new).status_code == 201, shop.output
                if place == len(ORDERS) // 2:
                    first.process.kill()
            assert web.post("/orders", json=new).status_code == 409
            all_shipped(database, 'select "order" from parcels', second)
            assert second.end() == 0
            assert " handled, 0 retried" in second.output
        assert shop.end() in (0, -signal.SIGTERM)  # uvicorn raises the signal again
    assert sorted(database.column("select number from orders")) == sorted(ORDERS)
    assert "Traceback" not in shop.output


def all_shipped(database: Database, query: str, program: Program) -> None:
    def shipped() -> bool:
        assert program.process.poll() is None, program.output
        return len(database.column(query)) >= len(ORDERS)

    wait_until(shipped, program.output)
    assert sorted(database.column(query)) == sorted(ORDERS)


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_the_shop_with_django(
    kind: str, broker: BrokerProcess, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Migrations, views under gunicorn with two processes, and the command that ships."""
    if kind == "mariadb":
        pytest.importorskip("MySQLdb", reason="needs MySQLdb: pip install mysqlclient")
    new_database = Database if kind == "postgresql" else MariaDatabase
    database = new_database(request.getfixturevalue(kind))
    folder, port = EXAMPLES / "django_shop", free_port()
    environment = {
        "NAMESRV_ADDR": broker.address,
        "DATABASE_ENGINE": f"django.db.backends.{database.engine}",
        "DATABASE_NAME": database.name,
        "DATABASE_USER": database.user,
        "DATABASE_HOST": "127.0.0.1",
        "DATABASE_PORT": str(database.port),
    }
    for words in (["migrate"], ["makemigrations", "--check"], ["check"]):
        python("manage.py", *words, check=True, cwd=folder, env={**os.environ, **environment})
    serve = [sys.executable, "-m", "gunicorn", "-w2", "-b", f"127.0.0.1:{port}", "shop.wsgi"]
    ship = [sys.executable, "manage.py", "ship"]
    with (
        running(serve, folder, environment, tmp_path / "shop.log") as shop,
        running(ship, folder, environment, tmp_path / "ship.log") as department,
    ):
        wait_for_web(f"http://127.0.0.1:{port}/orders/o", shop)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as web:
            for number in ORDERS:
                assert web.post(f"/orders/{number}").status_code == 201, shop.output
            assert web.post("/orders/o-3").status_code == 409
            assert web.get("/orders/o-3").json() == {"exists": True}
        all_shipped(database, "select order_id from orders_parcel", department)
        assert department.end() == 0
        assert f"{len(ORDERS)} handled, 0 retried" in department.output
        assert shop.end() == 0
    assert database.column("select count(*) from halfmq_transactions") == [len(ORDERS)]


def test_the_tests_of_the_shops(tmp_path: Path) -> None:
    """As a team runs them, with SQLite and without a broker."""
    for name, command in (
        ("fastapi_shop", ["-m", "pytest", "-o", "asyncio_mode=auto"]),
        ("django_shop", ["manage.py", "test"]),
    ):
        folder = tmp_path / name  # there, no setting of this repository counts
        shutil.copytree(EXAMPLES / name, folder)
        done = python(*command, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr


class Postbox:
    """What a mail server has got: numbers of orders by customer; a repeated mail counts once."""

    def __init__(self) -> None:
        self.orders: dict[str, list[int]] = defaultdict(list)
        self.mails: set[str] = set()

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802
        mail = message_from_bytes(envelope.content)
        if mail["Message-ID"] not in self.mails:
            self.mails.add(mail["Message-ID"])
            self.orders[mail["To"]].append(int(mail["Subject"].removeprefix("Order ")))
        return "250 OK"


def test_the_workers(broker: BrokerProcess, tmp_path: Path) -> None:
    """No mail is missing, those of a customer are in order; a killed worker is replaced."""
    box = Postbox()
    mail_server = Controller(box, hostname="127.0.0.1", port=free_port())
    mail_server.start()
    customers = [f"c{number}@example.com" for number in range(5)]
    environment = {
        "NAMESRV_ADDR": broker.address,
        "SMTP_ADDRESS": f"127.0.0.1:{mail_server.port}",
    }
    command = [sys.executable, "workers.py"]
    try:
        with (
            running(command, EXAMPLES / "workers", environment, tmp_path / "log") as workers,
            Producer("orders", namesrv=broker.address) as producer,
        ):
            producer.send(Message("orders", b"no order"))
            for number in range(100):
                customer = customers[number % len(customers)]
                body = json.dumps({"number": number, "customer": customer}).encode()
                producer.send(Message("orders", body, keys=customer), order_key=customer)
                if number == 50:
                    wait_until(lambda: len(box.mails) > 10, workers.output)
                    kill_a_child(workers)
            wait_until(lambda: len(box.mails) == 100, workers.output)
            dead = asyncio.run(dead_letters(broker))
            assert workers.end() == 0
    finally:
        mail_server.stop()
    assert {customer: sorted(found) for customer, found in box.orders.items()} == box.orders
    assert set(dead) == {b"no order"}  # again by whoever took over from the killed worker


def kill_a_child(parent: Program) -> None:
    children = Path(f"/proc/{parent.process.pid}/task/{parent.process.pid}/children").read_text()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children.split()}
    worker = next(pid for pid, command in commands.items() if re.search(b"spawn_main", command))
    os.kill(int(worker), signal.SIGKILL)


async def dead_letters(broker: BrokerProcess) -> list[bytes]:
    async with Admin(namesrv=broker.address) as admin:
        return [letter.body async for letter in admin.dead_letters("mails")]
