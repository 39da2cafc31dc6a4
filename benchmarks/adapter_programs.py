"""One transaction by each adapter, beside the same SQL without a message.

Run as a process of its own: ``python -m benchmarks.adapter_programs NAME NAMESRV URL COUNT ROUNDS``
prints a line for each round and way: ``plain`` or ``halfmq``, seconds and processor seconds. The
processor time is that of the whole program, the client's thread included.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlsplit

from halfmq.client import (
    Consumer,
    Inbox,
    Message,
    Producer,
    TransactionLedger,
    TransactionProducer,
    blocking,
)

TOPIC: Final = "adapters"
BODY: Final = b"m" * 256
INSERT: Final = "insert into adapter_orders values ('{}')"
CREATE: Final = (
    "drop table if exists adapter_orders",
    "create table adapter_orders (number varchar(40))",
    TransactionLedger().create_statement,
    Inbox(TOPIC).create_statement,
)
WARM: Final = 30
"""Transactions before the first round."""

_numbers = itertools.count()


def message() -> Message:
    """What a transaction publishes."""
    return Message(TOPIC, BODY)


def insert() -> str:
    """One order, with a number of its own."""
    return INSERT.format(next(_numbers))


@dataclass(frozen=True)
class Place:
    """Where broker and database are."""

    namesrv: str
    url: str

    @property
    def group(self) -> str:
        return f"adapters-{uuid.uuid4().hex}"

    def alchemy(self, driver: str) -> str:
        """The database's URL for a driver of SQLAlchemy."""
        return f"{self.url.partition(':')[0]}+{driver}:{self.url.partition(':')[2]}"

    @property
    def mysql(self) -> dict[str, Any]:
        """The database for PyMySQL and aiomysql."""
        parts = urlsplit(self.url)
        return {"host": parts.hostname, "port": parts.port or 3306, "user": parts.username}

    @property
    def file(self) -> str:
        """The file of SQLite."""
        return urlsplit(self.url).path


Blocking = AbstractContextManager[dict[str, Callable[[], object]]]
Awaited = AbstractAsyncContextManager[dict[str, Callable[[], Awaitable[object]]]]


# -- blocking


def connect(place: Place, driver: str) -> Any:
    """Connect with a driver of DB-API; SQLite with a write-ahead log."""
    if driver == "sqlite3":
        import sqlite3

        connection = sqlite3.connect(place.file, check_same_thread=False)
        connection.execute("pragma journal_mode = wal")
        return connection
    if driver == "psycopg":
        import psycopg

        return psycopg.connect(place.url)
    pymysql: Any = import_module("pymysql")
    return pymysql.connect(**place.mysql, database="test")


def prepare(connection: Any) -> None:
    """Create the tables, with no orders."""
    for statement in CREATE:
        connection.cursor().execute(statement)
    connection.commit()


@contextmanager
def dbapi(driver: str, place: Place) -> Iterator[dict[str, Callable[[], object]]]:
    """A connection of a driver, `session=` and the ledger by hand."""
    connection, ledger = connect(place, driver), TransactionLedger()
    prepare(connection)
    checker = ledger.checker(partial(connect, place, driver))
    with blocking.TransactionProducer(place.group, checker, namesrv=place.namesrv) as producer:

        def plain() -> None:
            connection.cursor().execute(insert())
            connection.commit()

        def halfmq() -> None:
            with producer.transaction(message(), session=connection):
                connection.cursor().execute(insert())

        def by_hand() -> None:
            with producer.transaction(message()) as half:
                connection.cursor().execute(insert())
                ledger.record(connection, half.id)
                connection.commit()

        yield {"plain": plain, "halfmq": halfmq, "by hand": by_hand}


@contextmanager
def session(place: Place, driver: str) -> Iterator[dict[str, Callable[[], object]]]:
    """SQLAlchemy's `Session`; also with a task of Celery in it."""
    from celery import Celery
    from sqlalchemy import create_engine, text
    from sqlalchemy.orm import Session

    from halfmq.integrations.celery import Task

    prepare(connect(place, driver))
    app = Celery("adapters", broker=f"halfmq://{place.namesrv}//", task_cls=Task)

    @app.task(ignore_result=True)  # type: ignore[untyped-decorator] # Celery has no types
    def note(_number: int) -> None:
        """What a worker would do."""

    engine, ledger = create_engine(place.alchemy(driver)), TransactionLedger()
    checker = ledger.checker(engine.connect)
    with blocking.TransactionProducer(place.group, checker, namesrv=place.namesrv) as producer:

        def plain() -> None:
            with Session(engine) as session, session.begin():
                session.execute(text(insert()))

        def halfmq() -> None:
            with (
                Session(engine) as session,
                producer.transaction(message(), session=session),
            ):
                session.execute(text(insert()))

        def with_task() -> None:
            with Session(engine) as session, producer.transaction(session=session):
                session.execute(text(insert()))
                note.delay_on_commit(1)

        yield {"plain": plain, "halfmq": halfmq, "celery": with_task}


@contextmanager
def in_django(place: Place) -> Iterator[dict[str, Callable[[], object]]]:
    """Django's `connection`."""
    import django
    from django.conf import settings

    parts = urlsplit(place.url)
    settings.configure(
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": parts.path.lstrip("/"),
                "USER": parts.username,
                "HOST": parts.hostname,
                "PORT": parts.port,
                "CONN_MAX_AGE": None,
            }
        },
        HALFMQ={"GROUP": place.group, "NAMESRV": place.namesrv},
    )
    django.setup()
    from django.db import connection
    from django.db.transaction import atomic

    from halfmq.integrations.django import producer, transaction

    prepare(connection)

    def plain() -> None:
        with atomic(), connection.cursor() as cursor:
            cursor.execute(insert())

    def halfmq() -> None:
        with transaction(message()), connection.cursor() as cursor:
            cursor.execute(insert())

    yield {"plain": plain, "halfmq": halfmq}
    producer().close()


@contextmanager
def inbox(place: Place, driver: str, count: int) -> Iterator[dict[str, Callable[[], object]]]:
    """Messages that are received, written down and acknowledged."""
    connection = connect(place, driver)
    prepare(connection)
    with blocking.Producer(place.group, namesrv=place.namesrv) as producer:
        for _ in range(count):
            producer.send(message())
    group = place.group
    with blocking.Consumer(
        group, {TOPIC: "*"}, start_from="first", namesrv=place.namesrv
    ) as consumer:

        def plain() -> None:
            received = consumer.receive()
            connection.cursor().execute(insert())
            connection.commit()
            received.ack()

        def halfmq() -> None:
            with consumer.inbox(consumer.receive(), session=connection):
                connection.cursor().execute(insert())

        yield {"plain": plain, "halfmq": halfmq}


# -- asynchronous


@asynccontextmanager
async def over_asyncpg(place: Place) -> AsyncIterator[dict[str, Callable[[], Awaitable[object]]]]:
    """A connection of asyncpg."""
    asyncpg: Any = import_module("asyncpg")
    prepare(connect(place, "psycopg"))
    connection = await asyncpg.connect(place.url)
    checker = TransactionLedger().async_checker(lambda: asyncpg.connect(place.url))
    async with TransactionProducer(place.group, checker, namesrv=place.namesrv) as producer:

        async def plain() -> None:
            async with connection.transaction():
                await connection.execute(insert())

        async def halfmq() -> None:
            async with producer.transaction(message(), session=connection):
                await connection.execute(insert())

        yield {"plain": plain, "halfmq": halfmq}
    await connection.close()


@asynccontextmanager
async def over_aiomysql(place: Place) -> AsyncIterator[dict[str, Callable[[], Awaitable[object]]]]:
    """A connection of aiomysql."""
    aiomysql: Any = import_module("aiomysql")
    prepare(connect(place, "pymysql"))
    connected = partial(aiomysql.connect, **place.mysql, db="test")
    connection = await connected()
    checker = TransactionLedger().async_checker(connected)
    async with TransactionProducer(place.group, checker, namesrv=place.namesrv) as producer:

        async def run() -> None:
            async with connection.cursor() as cursor:
                await cursor.execute(insert())

        async def plain() -> None:
            await run()
            await connection.commit()

        async def halfmq() -> None:
            async with producer.transaction(message(), session=connection):
                await run()

        yield {"plain": plain, "halfmq": halfmq}
    connection.close()


@asynccontextmanager
async def async_session(
    place: Place, driver: str, prepared_by: str
) -> AsyncIterator[dict[str, Callable[[], Awaitable[object]]]]:
    """SQLAlchemy's `AsyncSession`; also as FastStream's handlers use it."""
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    from halfmq.integrations.faststream import HalfmqBroker

    prepare(connect(place, prepared_by))
    engine = create_async_engine(place.alchemy(driver))
    checker = TransactionLedger().async_checker(engine.connect)
    broker = HalfmqBroker(place.namesrv, group=place.group, checker=checker, logger=None)
    async with (
        TransactionProducer(place.group, checker, namesrv=place.namesrv) as producer,
        broker,
    ):
        await broker.start()

        async def plain() -> None:
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(text(insert()))

        async def halfmq() -> None:
            async with (
                AsyncSession(engine) as session,
                producer.transaction(message(), session=session),
            ):
                await session.execute(text(insert()))

        async def published() -> None:
            async with AsyncSession(engine) as session, broker.transaction(session):
                await session.execute(text(insert()))
                await broker.publish(BODY, TOPIC)

        yield {"plain": plain, "halfmq": halfmq, "faststream": published}
    await engine.dispose()


@asynccontextmanager
async def async_inbox(
    place: Place, count: int
) -> AsyncIterator[dict[str, Callable[[], Awaitable[object]]]]:
    """Messages that are received, written down with asyncpg and acknowledged."""
    asyncpg: Any = import_module("asyncpg")
    prepare(connect(place, "psycopg"))
    connection = await asyncpg.connect(place.url)
    async with Producer(place.group, namesrv=place.namesrv) as producer:
        for _ in range(count):
            await producer.send(message())
    async with Consumer(
        place.group, {TOPIC: "*"}, start_from="first", namesrv=place.namesrv
    ) as consumer:

        async def plain() -> None:
            received = await consumer.receive()
            async with connection.transaction():
                await connection.execute(insert())
            await received.ack()

        async def halfmq() -> None:
            async with consumer.inbox(await consumer.receive(), session=connection):
                await connection.execute(insert())

        yield {"plain": plain, "halfmq": halfmq}
    await connection.close()


# -- one program


def opened(name: str, place: Place, count: int) -> Blocking | Awaited:
    """Return the program of a name of ``benchmarks.adapters``."""
    programs: dict[str, Callable[[], Blocking | Awaited]] = {
        "sqlite3": lambda: dbapi("sqlite3", place),
        "psycopg": lambda: dbapi("psycopg", place),
        "PyMySQL": lambda: dbapi("pymysql", place),
        "asyncpg": lambda: over_asyncpg(place),
        "aiomysql": lambda: over_aiomysql(place),
        "Session, psycopg": lambda: session(place, "psycopg"),
        "AsyncSession, asyncpg": lambda: async_session(place, "asyncpg", "psycopg"),
        "AsyncSession, aiosqlite": lambda: async_session(place, "aiosqlite", "sqlite3"),
        "Django": lambda: in_django(place),
        "inbox, sqlite3": lambda: inbox(place, "sqlite3", count),
        "inbox, psycopg": lambda: inbox(place, "psycopg", count),
        "inbox, asyncpg": lambda: async_inbox(place, count),
    }
    return programs[name]()


def report(way: str, run: Callable[[], object]) -> None:
    """Run once, and print what it took."""
    began, cpu = time.perf_counter(), time.process_time()
    run()
    print(way, time.perf_counter() - began, time.process_time() - cpu, flush=True)


def main() -> None:
    """Warm up, then measure the ways in turn."""
    name, namesrv, url, count_text, rounds_text = sys.argv[1:]
    count, rounds = int(count_text), int(rounds_text)
    program = opened(name, Place(namesrv, url), 2 * WARM + 2 * count * rounds)

    def repeat(call: Callable[[], object], times: int) -> None:
        for _ in range(times):
            call()

    if isinstance(program, AbstractContextManager):
        with program as ways:
            for call in ways.values():
                repeat(call, WARM)
            for _ in range(rounds):
                for way, call in ways.items():
                    report(way, partial(repeat, call, count))
        return

    async def repeat_awaited(call: Callable[[], Awaitable[object]], times: int) -> None:
        for _ in range(times):
            await call()

    with asyncio.Runner() as runner:
        awaited = runner.run(program.__aenter__())
        for one in awaited.values():
            runner.run(repeat_awaited(one, WARM))
        for _ in range(rounds):
            for way, one in awaited.items():
                report(way, lambda one=one: runner.run(repeat_awaited(one, count)))  # type: ignore[misc]
        runner.run(program.__aexit__(None, None, None))


if __name__ == "__main__":
    main()
