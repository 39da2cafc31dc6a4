"""A shop in two programs: one sells, one ships; each is killed after some transactions.

`main` is a program, with the arguments ROLE NAMESRV DRIVER FILE PORT NAME SEED ROUNDS NOTES.
``sell`` writes an order and its message in transactions that `session=` owns, while
deadlocks, lock time-outs, lost connections and time limits end some of them; ``ship`` writes a
parcel for each message, through the inbox. NAME is that of the books; NOTES gets a byte for each
transaction that was begun, and says when there are enough. DRIVER may be ``django-`` and the
driver that looks at Django's database.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from halfmq.client import (
    ClientConfig,
    Consumer,
    Message,
    MessageView,
    RetryPolicy,
    TransactionProducer,
    blocking,
    ledger,
)
from halfmq.client.transactional.databases import run_blocking
from tests.support.client_transactions import LocalError
from tests.support.ending_producer import GROUP, LIMIT_SECONDS, TOPIC, die_later
from tests.support.ledger_books import Books
from tests.support.ledger_drivers import DRIVERS, MARIADB, POSTGRESQL, Driver, Place
from tests.support.ledger_endings import Work, opened

ACCOUNTS: Final = 4
"""Rows that every order changes two of, in any order: deadlocks and conflicts are usual."""
AT_ONCE: Final = 3
"""Transactions at a time in one program."""
CONFIG: Final = {"send_timeout": 2.0, "connect_timeout": 1.0, "heartbeat_interval": 0.5}
"""A client that soon notices a killed broker."""
JOBS_MAX: Final = 60
"""Transactions or parcels in the life of a program …"""
DEATH_SECONDS: Final = (0.0, 0.1)
"""… which ends so soon after the last one has begun: at any of its statements."""
MESSAGE: Final = Message(TOPIC, b"order")
AGAIN: Final = RetryPolicy(delays={Exception: [timedelta(milliseconds=200)]})


@dataclass
class Shop:
    """What both programs are about."""

    books: Books
    namesrv: str
    chance: random.Random
    notes: Path
    rounds: int
    jobs_left: int = -1
    """Transactions or parcels after which this program is soon killed; below 0: it is not."""

    @property
    def config(self) -> ClientConfig:
        return ClientConfig(namesrv=self.namesrv, **CONFIG)  # type: ignore[arg-type]

    @property
    def parcels(self) -> str:
        return f"parcels_{self.books.name}"

    @property
    def inbox(self) -> str:
        return f"inbox_{self.books.name}"

    @property
    def accounts(self) -> str:
        return f"accounts_{self.books.name}"

    def begun(self) -> int:
        return self.notes.stat().st_size

    def left(self) -> bool:
        return self.begun() < self.rounds

    def note(self) -> None:
        with self.notes.open("ab", buffering=0) as file:
            file.write(b".")
        self._count()

    def _count(self) -> None:
        """Count a job; a busy machine starts programs slowly, so they do not die by the clock."""
        self.jobs_left -= 1
        if self.jobs_left == 0:
            die_later(self.chance, DEATH_SECONDS)

    async def order(self, work: Work) -> None:
        """The local transaction: it may fail at any statement, and by chance it does."""
        ends = self.chance.choice((self._works,) * 5 + self._endings())
        if self.chance.random() < 0.2:
            await self._impatient(work)
        await work.run(f"insert into {self.books.orders_table} values ('{work.id}')")
        for number in self.chance.sample(range(ACCOUNTS), 2):
            await work.run(f"update {self.accounts} set sold = sold + 1 where id = {number}")
        await ends(work)

    def _endings(self) -> tuple[Callable[[Work], Awaitable[None]], ...]:
        lost = () if self.books.driver.database not in (POSTGRESQL, MARIADB) else (self._lost,)
        return (self._raises, self._swallows, self._undoes_a_part, *lost)

    async def _works(self, _work: Work) -> None:
        pass

    async def _raises(self, _work: Work) -> None:
        raise LocalError

    async def _swallows(self, work: Work) -> None:
        with suppress(Exception):
            await work.run("insert into nowhere values (1)")

    async def _undoes_a_part(self, work: Work) -> None:
        await work.run("savepoint inner_one")
        await work.run(f"update {self.accounts} set sold = sold + 1 where id = 0")
        await work.run("rollback to savepoint inner_one")

    async def _lost(self, work: Work) -> None:
        """An operator ends the session, or a proxy closes it, between the row and COMMIT."""
        mysql = self.books.driver.database == MARIADB
        asked = "select connection_id()" if mysql else "select pg_backend_pid()"
        (session,) = await work.run(asked)
        kill = "kill {}" if mysql else "select pg_terminate_backend({})"
        async with self.books.connected(autocommit=True) as another:
            await self.books.run(another, kill.format(session))

    async def _impatient(self, work: Work) -> None:
        if self.books.driver.database == POSTGRESQL:
            limit = self.chance.choice(("lock_timeout", "statement_timeout"))
            await work.run(f"set local {limit} = '15ms'")
        elif self.books.driver.database == MARIADB:
            await work.run("set innodb_lock_wait_timeout = 1")

    async def parcel(
        self,
        connection: Any,
        message: MessageView | blocking.MessageView,
        *,
        may_swallow: bool = True,
    ) -> None:
        """The work for a message; it may fail, and where a look at the row follows, unseen."""
        self._count()
        work = Work(self.books, connection, "")
        await work.run(f"insert into {self.parcels} values ('{message.transaction_id}')")
        if self.chance.random() < 0.05:
            raise LocalError
        if may_swallow and self.chance.random() < 0.05:
            await self._swallows(work)


@asynccontextmanager
async def shipping(shop: Shop) -> AsyncIterator[Any]:
    """What `opened` opens; a lost connection fails the handler, which `opened` overlooks."""
    done = False
    async with opened(shop.books) as connection:
        yield connection
        done = True
    if not done:
        raise ConnectionError


# -- with an asynchronous driver


async def sell(shop: Shop) -> None:
    async with TransactionProducer(GROUP, shop.books.checker(), config=shop.config) as producer:

        async def some() -> None:
            while shop.left():
                limit = (
                    shop.chance.uniform(0, LIMIT_SECONDS) if shop.chance.random() < 0.2 else None
                )
                try:
                    async with (
                        asyncio.timeout(limit),
                        opened(shop.books) as connection,
                        producer.transaction(MESSAGE, session=connection) as half,
                    ):
                        shop.note()
                        await shop.order(Work(shop.books, connection, half.id))
                except Exception:  # noqa: BLE001 -- as a web framework does
                    await asyncio.sleep(0.01)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))


async def ship(shop: Shop) -> None:
    async with Consumer(
        "shipping", {TOPIC: "*"}, start_from="first", config=shop.config
    ) as consumer:

        async def handle(message: MessageView) -> None:
            if message.transaction_id is None:
                return
            async with (
                shipping(shop) as connection,
                consumer.inbox(message, session=connection, table=shop.inbox),
            ):
                await shop.parcel(connection, message)

        await consumer.run(handle, concurrency=AT_ONCE, policy=AGAIN)


# -- with a blocking driver


def sell_blocking(shop: Shop) -> None:
    checker = shop.books.ledger.checker(lambda: shop.books.driver.connect(shop.books.place, False))
    with blocking.TransactionProducer(GROUP, checker, config=shop.config) as producer:

        async def one() -> None:
            async with opened(shop.books) as connection:
                with producer.transaction(MESSAGE, session=connection) as half:
                    shop.note()
                    await shop.order(Work(shop.books, connection, half.id))

        sell_in_threads(shop, one)


def sell_in_threads(shop: Shop, one: Callable[[], Coroutine[Any, Any, None]]) -> None:
    def some() -> None:
        while shop.left():
            try:
                run_blocking(one())
            except Exception:  # noqa: BLE001 -- as a web framework does
                threading.Event().wait(0.01)

    threads = [threading.Thread(target=some) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ship_blocking(shop: Shop) -> None:
    with blocking.Consumer(
        "shipping", {TOPIC: "*"}, start_from="first", config=shop.config
    ) as consumer:

        def handle(message: blocking.MessageView) -> None:
            if message.transaction_id is not None:
                run_blocking(one(message))

        async def one(message: blocking.MessageView) -> None:
            async with shipping(shop) as connection:
                with consumer.inbox(message, session=connection, table=shop.inbox):
                    await shop.parcel(connection, message)

        consumer.run(handle, concurrency=AT_ONCE, policy=AGAIN)


def driver_named(name: str) -> Driver:
    """Return a driver; of Django, the one that looks at its database."""
    wanted = name.removeprefix("django-")
    return next(driver for driver in DRIVERS if driver.name == wanted)


def main(*words: str) -> None:
    """Sell or ship until it is killed, or there is nothing left to sell; say nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    role, namesrv, name, file, port, books_name, seed, rounds, notes = words
    driver = driver_named(name)
    chance = random.Random(seed)
    ledger.LOCK_SECONDS = 0.05  # type: ignore[misc]  # a check soon gives up
    books = Books(driver, Place(Path(file), int(port)), books_name)
    lives = -1 if float(seed) == 1 else chance.randrange(1, JOBS_MAX)  # 1: it is not killed
    shop = Shop(books, namesrv, chance, Path(notes), int(rounds), lives)
    if name.startswith("django-"):
        from tests.support import both_in_django  # noqa: PLC0415 -- Django may be missing

        both_in_django.run(role, shop)
    elif driver.awaited:
        asyncio.run({"sell": sell, "ship": ship}[role](shop))
    else:
        {"sell": sell_blocking, "ship": ship_blocking}[role](shop)
