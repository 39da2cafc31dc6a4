"""However a block and its database transaction end: delivered if and only if the row is there."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from halfmq.client import (
    ClientError,
    TransactionLedger,
    TransactionNotCommittedError,
    TransactionNotRecordedError,
    blocking,
    ledger,
)
from halfmq.client.ledger import COMMITTED
from tests.support.broker_thread import BrokerThread
from tests.support.client_transactions import COMMIT, MESSAGE, QUICK, LocalError, new_producer
from tests.support.fake_broker import FakeBroker, fake_broker, until
from tests.support.ledger_books import Books, books_of
from tests.support.ledger_drivers import (
    MARIADB,
    POSTGRESQL,
    SQLITE,
    USUAL,
    Driver,
    Place,
    django_connections,
)
from tests.support.ledger_endings import (
    STILL_OPEN,
    Ending,
    Work,
    endings_of,
    never_recorded,
    opened,
    rows,
)


async def observe(broker: FakeBroker, books: Books, connection: Any, ending: Ending) -> None:
    """Run a block with this ending; compare what it raised with the row, and row with message."""
    later: list[AsyncGenerator[None, None]] = []
    there = False
    async with new_producer(broker, books.checker()) as producer:
        tx = producer.transaction(MESSAGE)

        async def block() -> None:
            nonlocal there
            async with tx:
                later.append(ending(Work(books, connection, tx.id)))
                await anext(later[0])
                there = bool(await rows(books))

        (done,), _ = await asyncio.wait([asyncio.ensure_future(block())])
        raised = asyncio.CancelledError() if done.cancelled() else done.exception()
        half = broker.half_of(tx.id)
        at_the_end = list(half.decisions)
        with suppress(StopAsyncIteration):
            await anext(later[0])
        with suppress(Exception):  # as a pool does with what nobody has ended
            await books.roll_back(connection)
        await until(lambda: any(half.decisions) or not broker.check(half))
    assert len(broker.messages("orders")) == len(await rows(books))
    if there:
        assert (raised, at_the_end) == (None, [COMMIT])
    elif raised is None or isinstance(raised, ClientError):  # by nothing else than the look
        assert isinstance(raised, TransactionNotCommittedError)
        assert isinstance(raised, TransactionNotRecordedError) is (ending is never_recorded)
        assert at_the_end == []
        if ending in STILL_OPEN:
            assert raised.still_open


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check soon gives up when somebody holds the row."""
    monkeypatch.setattr(ledger, "LOCK_SECONDS", 0.05)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # lost connections
@pytest.mark.parametrize(
    ("driver", "ending"),
    [(driver, ending) for driver in USUAL for ending in endings_of(driver)],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
async def test_a_message_is_delivered_if_and_only_if_its_row_is_there(
    driver: Driver, ending: Ending, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """However the transaction of the database ends, and whoever ends it."""
    books = books_of(driver, request, tmp_path)
    await books.create()
    async with fake_broker() as broker, opened(books) as connection:
        broker.create_topic("orders")
        await observe(broker, books, connection, ending)


# -- Django, whose transactions nest


def in_one_block(tx_id: str, django: Django) -> Iterator[None]:
    with django.atomic(durable=True):
        django.record(tx_id)
    yield


def in_an_outer_block_that_commits_later(tx_id: str, django: Django) -> Iterator[None]:
    with django.atomic():
        with django.atomic():
            django.record(tx_id)
        yield


def in_an_outer_block_that_fails_later(tx_id: str, django: Django) -> Iterator[None]:
    with suppress(LocalError), django.atomic():
        with django.atomic():
            django.record(tx_id)
        yield
        raise LocalError


def in_a_part_that_fails(tx_id: str, django: Django) -> Iterator[None]:
    with django.atomic(), suppress(LocalError), django.atomic():
        django.record(tx_id)
        raise LocalError
    yield


def with_set_rollback(tx_id: str, django: Django) -> Iterator[None]:
    with django.atomic():
        django.record(tx_id)
        django.connection.set_rollback(True)
    yield


def with_a_swallowed_failure(tx_id: str, django: Django) -> Iterator[None]:
    with django.atomic():
        django.record(tx_id)
        with suppress(Exception), django.connection.cursor() as cursor:
            cursor.execute("insert into nowhere values (1)")
    yield


OUTER: Final = (in_an_outer_block_that_commits_later, in_an_outer_block_that_fails_later)


class Django:
    """Django with one database."""

    def __init__(self, database: str, place: Place) -> None:
        self.connect = django_connections(database, place)
        self.connection = self.connect()
        self.atomic: Any = importlib.import_module("django.db.transaction").atomic
        # Where atomic() looks.
        importlib.import_module("django.db").connections["default"] = self.connection
        self.table = f"ledger_{uuid.uuid4().hex[:12]}"
        self.ledger = TransactionLedger(self.table)
        self.ledger.create_table(self.connection)

    def record(self, tx_id: str) -> None:
        with self.connection.cursor() as cursor:
            self.ledger.record(cursor, tx_id)

    @property
    def rows(self) -> int:
        with self.connection.cursor() as cursor:
            cursor.execute(f"select count(*) from {self.table} where state = '{COMMITTED}'")
            return int(cursor.fetchone()[0])


@pytest.mark.parametrize("database", [SQLITE, POSTGRESQL, MARIADB])
@pytest.mark.parametrize(
    "ending",
    [in_one_block, *OUTER, in_a_part_that_fails, with_set_rollback, with_a_swallowed_failure],
    ids=lambda ending: ending.__name__,
)
def test_django_delivers_if_and_only_if_the_row_is_there(
    ending: Callable[[str, Django], Iterator[None]],
    database: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """In ``atomic()``, inside of another one, and with what it rolls back without an error."""
    port = 0 if database == SQLITE else request.getfixturevalue(database)
    django = Django(database, Place(tmp_path / "orders.db", port))
    checker = django.ledger.checker(django.connect)
    served = BrokerThread()
    broker, error = served.broker, None
    address = broker.address
    with (
        contextlib.closing(served),
        contextlib.closing(django.connection),
        blocking.TransactionProducer("g", checker, namesrv=address, config=QUICK) as producer,
    ):
        transaction = producer.transaction(MESSAGE)
        try:
            with transaction as tx:
                steps = ending(tx.id, django)
                next(steps)
        except TransactionNotCommittedError as raised:
            error = raised
        half = broker.half_of(tx.id)
        assert half.decisions == ([] if error else [COMMIT])
        tells = database != MARIADB  # mysqlclient does not tell whether a transaction is open
        assert error is None or error.still_open is (tells and ending in OUTER)
        assert next(steps, None) is None
        served.run(until(lambda: any(half.decisions) or not broker.check(half)))
        assert len(broker.messages("orders")) == django.rows
