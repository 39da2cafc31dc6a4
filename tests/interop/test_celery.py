"""``halfmq.integrations.celery``: real workers, killed, and tasks of database transactions."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from halfmq.client.blocking import Admin, Consumer, Producer
from halfmq.client.message import Message
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.access import certificate
from tests.support.patience import PATIENCE_S
from tests.support.python import python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("celery") is None,
    reason="Celery is missing: pip install 'halfmq[celery]'; its transport is NOT tested",
)

APP = """
import os
import sqlite3
import sys
import time

from celery import Celery

import halfmq.integrations.celery
from halfmq.client import ConfigurationError
from halfmq.client.blocking import TransactionLedger, TransactionProducer

app = Celery("shop", broker=f"halfmq://{os.environ['ACCOUNT']}{os.environ['BROKER']}//",
             task_cls="halfmq.integrations.celery:Task")
authority = os.environ["AUTHORITY"]
app.conf.update(
    broker_use_ssl={"ca_certs": authority} if authority else False,
    task_acks_late=True, task_ignore_result=True, worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 6},
)


@app.task
def note(number, seconds=0.0):
    write("begun", number)
    time.sleep(seconds)
    write("done", number)


def write(*words):
    descriptor = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, " ".join(map(str, words)).encode() + b"\\n")
    os.close(descriptor)
"""

PLACES: Final = 4
"""Tasks of one worker at a time, and so the most that it has not acknowledged."""

WITH_ROWS = """
import sys
from shop import *

ledger = TransactionLedger()
connection = sqlite3.connect("orders.db")
connection.execute("create table if not exists orders (number integer primary key)")
ledger.create_table(connection)
connection.commit()


def order(producer, ending):
    with producer.transaction(session=connection):
        number = connection.execute("insert into orders values (null)").lastrowid
        note.delay_on_commit(number)
        note.apply_async_on_commit((number,), countdown=3_600)
        if ending == "raises":
            raise ValueError


class Dying(sqlite3.Connection):
    def commit(self):
        super().commit()
        if sys.argv[1] == "dies after the commit":
            os._exit(9)


with TransactionProducer("orders-tx", ledger.checker(lambda: sqlite3.connect("orders.db")),
                         namesrv=os.environ["BROKER"]) as producer:
    try:
        note.delay_on_commit(1)
    except ConfigurationError as error:
        assert "producer.transaction(session=" in str(error)
    if sys.argv[1] == "answers checks":
        print("ready", flush=True)
        sys.stdin.read()
    elif sys.argv[1] == "dies after the commit":
        connection = sqlite3.connect("orders.db", factory=Dying)
        order(producer, "commits")
    else:
        order(producer, "commits")
        try:
            order(producer, "raises")
        except ValueError:
            pass
"""


class Shop:
    """A folder with the application, and what its tasks have written down."""

    def __init__(
        self, folder: Path, broker: BrokerProcess, account: str = "", authority: str = ""
    ) -> None:
        self.folder, self.broker, self.notes = folder, broker, folder / "notes"
        self._account, self._authority = account, authority
        (folder / "shop.py").write_text(APP)
        (folder / "rows.py").write_text(WITH_ROWS)
        self.notes.touch()

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            **os.environ,
            "BROKER": self.broker.address,
            "NOTES": str(self.notes),
            "ACCOUNT": self._account,
            "AUTHORITY": self._authority,
        }

    def run(self, *words: str) -> str:
        done = python(*words, cwd=self.folder, env=self.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def send(self, numbers: range, seconds: float) -> None:
        code = f"import shop\nfor i in {numbers!r}: shop.note.delay(i, {seconds})"
        self.run("-c", code)

    def noted(self, word: str) -> Counter[int]:
        lines = [line.split() for line in self.notes.read_text().splitlines()]
        return Counter(int(number) for what, number in lines if what == word)

    def wait_for(self, word: str, count: int) -> None:
        """Wait until so many different tasks have written a word."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.noted(word)) < count:
            assert time.monotonic() < deadline, self.notes.read_text()
            time.sleep(0.02)

    @contextmanager
    def worker(self, pool: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker with four places; what is left of it is killed."""
        command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "shop",
            "worker",
            "-P",
            pool,
            "-c",
            str(PLACES),
        ]
        with (
            (self.folder / f"worker-{time.monotonic_ns()}.log").open("wb") as log,
            subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            try:
                yield process
            finally:
                kill(process)


def kill(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker with its children."""
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with broker_process(
        tmp_path / "broker", transactionTimeOut=100, transactionCheckInterval=100
    ) as broker:
        yield Shop(tmp_path, broker)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_killed_worker_loses_no_task_and_repeats_only_what_it_had(pool: str, shop: Shop) -> None:
    """Also if a long task lies among the short ones; a living worker keeps what it has."""
    long = 1_000
    with shop.worker(pool) as first:
        shop.send(range(long, long + 1), 8.0)  # longer than visibility_timeout
        shop.send(range(20), 0.2)
        shop.wait_for("done", 6)
        kill(first)
    with shop.worker(pool) as second:
        shop.wait_for("done", 21)  # the twenty and the long one, some of them twice
        second.send_signal(signal.SIGTERM)
        assert second.wait(PATIENCE_S) == 0
    begun = shop.noted("begun")
    assert begun[long] == 2
    assert shop.noted("done")[long] == 1
    assert begun.total() - len(begun) <= PLACES  # what the worker had when it was killed


ACCOUNTS: Final = """
accounts:
- accessKey: celery-worker
  secretKey: secret-of-worker
  topicPerms:
  - celery=PUB|SUB
  - celery%2Epidbox=PUB|SUB
  - reply%2Ecelery%2Epidbox=PUB|SUB
  groupPerms:
  - celery=SUB
  - celery%2Epidbox=SUB
  - reply%2Ecelery%2Epidbox=SUB
"""
"""What `docs/celery.md` says that a worker needs."""


def test_tls_and_access_control(tmp_path: Path) -> None:
    """Credentials are those of the URL, and Celery's own setting says whom to trust."""
    conf = tmp_path / "broker.conf"
    conf.write_text("aclEnable=true\ntlsServerMode=enforcing\n")
    (tmp_path / "plain_acl.yml").write_text(ACCOUNTS)
    with broker_process(tmp_path / "broker", conf=conf, **certificate(tmp_path)) as broker:
        allowed = Shop(
            tmp_path, broker, "celery-worker:secret-of-worker@", str(tmp_path / "ca.pem")
        )
        remote_control_and_tasks(allowed)


def test_several_brokers(tmp_path: Path) -> None:
    """A queue is spread over all of them, and a command reaches all workers."""
    with broker_process(tmp_path / "broker", brokers=2) as both:
        remote_control_and_tasks(shop := Shop(tmp_path, both))
        with Admin(namesrv=both.address) as admin:
            brokers = {one.queue.broker_name for one in admin.offsets("celery", "celery")}
        assert len(brokers) == 2
        assert "No messages purged" in shop.run("-m", "celery", "-A", "shop", "purge", "-f")


def test_remote_control_and_purge(shop: Shop) -> None:
    """All workers hear a command, and the caller their answers; a purged queue is empty."""
    shop.send(range(5), 0.0)
    assert "Purged 5 messages" in shop.run("-m", "celery", "-A", "shop", "purge", "-f")
    remote_control_and_tasks(shop)


def remote_control_and_tasks(shop: Shop) -> None:
    """Two workers execute tasks, and answer a command."""
    with shop.worker("threads") as one, shop.worker("threads") as another:
        shop.send(range(10), 0.0)
        shop.wait_for("done", 10)
        said = shop.run("-c", "import shop\nprint(len(shop.app.control.ping(timeout=10, limit=2)))")
        for worker in (one, another):
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE_S) == 0
    assert said.split() == ["2"]
    assert shop.noted("done") == dict.fromkeys(range(10), 1)


def test_tasks_are_sent_if_and_only_if_the_rows_are_committed(shop: Shop) -> None:
    """Also if the program dies right after the commit; an ETA is the one of the call."""
    shop.run("rows.py", "lives")
    dead = python("rows.py", "dies after the commit", cwd=shop.folder, env=shop.environment)
    assert dead.returncode == 9, dead.stderr
    called = datetime.now(UTC)
    with subprocess.Popen(
        [sys.executable, "rows.py", "answers checks"],
        cwd=shop.folder,
        env=shop.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as alive:
        assert alive.stdin is not None
        assert alive.stdout is not None
        assert alive.stdout.readline() == b"ready\n"
        with (
            Admin(namesrv=shop.broker.address) as admin,
            Consumer(
                "celery", {"celery": "*"}, share="messages", namesrv=shop.broker.address
            ) as tasks,
        ):
            arguments: list[list[int]] = []
            while len(arguments) < 2:
                message = tasks.receive(timeout=PATIENCE_S)
                assert message is not None
                arguments.append(json.loads(json.loads(message.body)["body"])[0])
                message.ack()
            assert tasks.receive(timeout=0.5) is None
            later = admin.delayed("celery")
        alive.stdin.close()
    assert sorted(arguments) == [[1], [2]]
    hour = timedelta(hours=1)
    assert len(later) == 2
    assert all(abs(one.deliver_at - called - hour) < hour / 6 for one in later)


def test_what_is_no_task_becomes_a_dead_letter(shop: Shop) -> None:
    """Instead of stopping the worker, or coming again for ever."""
    with Producer("other", namesrv=shop.broker.address) as producer:
        producer.send(Message("celery", b"no task"))
    with shop.worker("threads"), Admin(namesrv=shop.broker.address) as admin:
        shop.send(range(1), 0.0)
        shop.wait_for("done", 1)
        deadline = time.monotonic() + PATIENCE_S
        while not (letters := list(admin.dead_letters("celery"))):
            assert time.monotonic() < deadline
    assert [letter.body for letter in letters] == [b"no task"]


def test_a_queue_of_a_fanout_exchange_gets_what_is_sent_after_it_is_bound(shop: Shop) -> None:
    """Not only what is sent after somebody reads it, who may do so in another channel."""
    from kombu import Connection, Exchange, Queue  # noqa: PLC0415 -- Celery may be missing

    import halfmq.integrations.celery  # noqa: F401, PLC0415

    exchange, bodies = Exchange("news", type="fanout"), []
    queues = [Queue(name, exchange) for name in ("one", "two")]
    with Connection(f"halfmq://{shop.broker.address}//") as connection:
        for queue in queues:
            queue(connection.channel()).declare()
        connection.Producer().publish("hello", exchange=exchange, declare=[exchange])
        with connection.Consumer(
            queues, callbacks=[lambda body, _message: bodies.append(body)], no_ack=True
        ):
            while len(bodies) < len(queues):
                connection.drain_events(timeout=PATIENCE_S)
    assert bodies == ["hello", "hello"]


def test_without_a_broker_a_connection_fails_as_kombu_expects() -> None:
    """So that a worker tries again, and says why."""
    from kombu import Connection  # noqa: PLC0415 -- Celery may be missing

    import halfmq.integrations.celery  # noqa: F401, PLC0415

    with (
        Connection("halfmq://127.0.0.1:1//") as connection,
        pytest.raises(connection.connection_errors, match=r"127\.0\.0\.1:1"),
    ):
        connection.connect()
