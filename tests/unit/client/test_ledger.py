"""The ledger: a row or a tombstone, never both, whoever comes first and whoever dies."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from halfmq.client import (
    ConfigurationError,
    Decision,
    Message,
    MessageView,
    Transaction,
    TransactionFencedError,
    TransactionLedger,
    TransactionProducer,
    ledger,
)
from halfmq.client.ledger import COMMITTED
from halfmq.client.transactional.databases import paramstyle_of
from tests.support.client_loops import on_both_loops
from tests.support.client_transactions import QUICK, ROLLBACK
from tests.support.fake_broker import FakeBroker, until
from tests.support.ledger_checks import DAY_MS, asked_about


class Books:
    """A database file with orders and a ledger, and the checker of any process."""

    def __init__(self, path: Path, paramstyle: str | None = None) -> None:
        self.path = path
        self.ledger = TransactionLedger(paramstyle=paramstyle)
        self.check: Callable[[MessageView], Decision] = self.ledger.checker(self.connect)
        with closing(self.connect()) as connection:
            self.ledger.create_table(connection)
            self.ledger.create_table(connection)  # as every process does at its start
            connection.execute("create table orders (id text primary key)")

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path)

    def order(self, transaction_id: str) -> None:
        """The local transaction."""
        with closing(self.connect()) as connection, connection:
            connection.execute("insert into orders values (?)", (transaction_id,))
            self.ledger.record(connection.cursor(), transaction_id)

    def orders(self) -> set[str]:
        with closing(self.connect()) as connection:
            return {row[0] for row in connection.execute("select id from orders")}


@pytest.fixture(params=[None, "named"])
def books(tmp_path: Path, request: pytest.FixtureRequest) -> Books:
    return Books(tmp_path / "orders.db", request.param)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that does not wait for a lock."""
    monkeypatch.setattr(ledger, "LOCK_SECONDS", 0.01)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("commits", [True, False])
def test_a_row_that_is_not_committed_is_unknown(books: Books, commits: bool) -> None:
    """A later check has the right answer."""
    with closing(books.connect()) as running:
        books.ledger.record(running.cursor(), "t-1")
        assert books.check(asked_about("t-1")) is Decision.UNKNOWN
        if commits:
            running.commit()
        else:
            running.rollback()

    assert books.check(asked_about("t-1")) is (Decision.COMMIT if commits else Decision.ROLLBACK)


def test_a_row_of_a_process_that_was_killed_is_none(books: Books) -> None:
    """Its database transaction has not committed and never will."""
    program = (
        "import os, signal, sqlite3, sys\n"
        "from halfmq.client import TransactionLedger\n"
        "connection = sqlite3.connect(sys.argv[1])\n"
        "TransactionLedger().record(connection.cursor(), 't-1')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(books.path)], check=False)

    assert done.returncode < 0
    assert books.check(asked_about("t-1")) is Decision.ROLLBACK


def test_what_was_told_and_what_was_committed_never_differ(tmp_path: Path) -> None:
    """Local transactions and checks of the same ids race in many threads."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed={seed}")
    chance = random.Random(seed)
    books = Books(tmp_path / "orders.db")
    identities = [f"t-{n}" for n in range(120)]
    told: dict[str, set[Decision]] = {identity: set() for identity in identities}
    work: list[Callable[[], None]] = []

    def local(identity: str) -> Callable[[], None]:
        def run() -> None:
            try:
                books.order(identity)
            except TransactionFencedError:
                told[identity].add(Decision.ROLLBACK)

        return run

    def check(identity: str) -> Callable[[], None]:
        return lambda: told[identity].add(books.check(asked_about(identity)))

    for identity in identities:
        work += [local(identity), *[check(identity)] * 3]
    # Near each other, so that they meet.
    order = sorted(range(len(work)), key=lambda n: n // 4 + chance.uniform(0, 2))
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work[n]) for n in order]:
            done.result()

    orders = books.orders()
    assert {identity for identity in identities if Decision.COMMIT in told[identity]} <= orders
    assert not {i for i in identities if Decision.ROLLBACK in told[i]} & orders
    for identity in identities:
        final = books.check(asked_about(identity))
        assert final is (Decision.COMMIT if identity in orders else Decision.ROLLBACK)


def test_in_autocommit_mode_a_check_keeps_its_promises_too(books: Books) -> None:
    """``connect`` may return such a connection."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(books.path, isolation_level=None)

    check = books.ledger.checker(connect)
    books.order("t-1")
    with closing(books.connect()) as connection:
        books.ledger.prune(connection, timedelta(days=2))

    now_ms = int(time.time() * 1000)
    assert check(asked_about("t-1")) is Decision.COMMIT
    for _ in range(2):
        assert check(asked_about("pruned", now_ms - 2 * DAY_MS)) is Decision.UNKNOWN
        assert check(asked_about("t-2", now_ms)) is Decision.ROLLBACK


@pytest.mark.parametrize(
    ("paramstyle", "sql", "mapped"),
    [
        ("qmark", "?, ?, ?", False),
        ("format", "%s, %s, %s", False),
        ("numeric", ":1, :2, :3", False),
        ("numeric_dollar", "$1, $2, $3", False),
        ("named", ":p1, :p2, :p3", True),
        ("pyformat", "%(p1)s, %(p2)s, %(p3)s", True),
    ],
)
def test_statements_are_written_as_the_driver_wants_them(
    paramstyle: str, sql: str, mapped: bool
) -> None:
    """The paramstyles of PEP 249, and PostgreSQL's own."""
    written, values = TransactionLedger("app.ledger").statement("t", paramstyle)

    assert written == f"insert into app.ledger (id, state, recorded_at) values ({sql})"
    assert isinstance(values, dict) is mapped
    given = list(values.values() if isinstance(values, dict) else values)
    assert given[:2] == ["t", COMMITTED]
    assert isinstance(given[2], int)


def test_the_parameter_style_is_the_drivers_own() -> None:
    """For a cursor of a wrapper, which does not declare one, it must be given."""
    with closing(sqlite3.connect(":memory:")) as connection:
        assert paramstyle_of(connection.cursor()) == "qmark"
    with pytest.raises(ConfigurationError, match="paramstyle"):
        paramstyle_of(object())
    with pytest.raises(ConfigurationError, match="paramstyle"):
        TransactionLedger(paramstyle="%s")
    for name in ("orders; drop table x", "a.b.c", "", "größe"):
        with pytest.raises(ConfigurationError, match="table"):
            TransactionLedger(name)


@pytest.fixture
def shared(tmp_path: Path) -> Books:
    return Books(tmp_path / "orders.db")


@on_both_loops
async def test_a_check_that_comes_first_fails_the_local_transaction(
    broker: FakeBroker, shared: Books
) -> None:
    """Another producer of the group is asked while the work is being done: neither row nor message.

    Without the fence the row would be there, and its message refused.
    """
    worker, other = [
        TransactionProducer("orders-tx", shared.check, namesrv=broker.address, config=QUICK)
        for _ in range(2)
    ]
    async with worker, other:
        (asked,) = [
            peer
            for peer in broker.producers("orders-tx")
            if peer.heartbeat.client_id == other.client_id
        ]

        async def work(tx: Transaction) -> None:
            async with tx:
                half = broker.half_of(tx.id)
                broker.check(half, asked=asked)
                await until(lambda: half.decisions == [ROLLBACK])
                await asyncio.to_thread(shared.order, tx.id)

        tx = worker.transaction(Message("orders", b"o-1"))
        with pytest.raises(TransactionFencedError):
            await work(tx)

    assert (tx.decision, tx.decided) == (Decision.ROLLBACK, True)
    assert shared.orders() == set()
    assert broker.messages("orders") == []


@on_both_loops
async def test_a_producer_that_died_after_its_row_is_spoken_for(
    broker: FakeBroker, shared: Books
) -> None:
    """Any other producer of the group can answer from the row."""
    threads: list[threading.Thread] = []

    def check(message: MessageView) -> Decision:
        threads.append(threading.current_thread())
        return shared.check(message)

    first = TransactionProducer("orders-tx", check, namesrv=broker.address)
    async with first, first.transaction(Message("orders", b"o-1")) as tx:
        shared.order(tx.id)
        tx.decide(Decision.UNKNOWN)
    async with TransactionProducer("orders-tx", check, namesrv=broker.address):
        broker.check(broker.half_of(tx.id))
        await until(lambda: len(broker.messages("orders")) == 1)

    assert threads[0] is not threading.main_thread()
