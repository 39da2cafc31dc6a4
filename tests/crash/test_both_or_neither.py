"""Orders, their messages and their parcels, while everything is killed: as many of each.

A campaign: `HALFMQ_ROUNDS` (1000) transactions with each set-up. Two programs sell and two ship;
all of them, the broker and the database are killed again and again. The seed is printed and can be
set by `HALFMQ_SEED`; it determines what the programs do, not the points that the kills hit.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections import Counter
from contextlib import ExitStack
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final

import pytest

from halfmq.client import Consumer, Inbox, Message, TransactionProducer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support import database_servers
from tests.support.both_programs import ACCOUNTS, Shop, driver_named, main
from tests.support.database_servers import Server
from tests.support.ending_producer import GROUP, TOPIC
from tests.support.ledger_books import Books
from tests.support.ledger_drivers import MARIADB, SQLITE, Place, django_entry
from tests.support.patience import PATIENCE_S
from tests.support.seeds import printed_seed

SETTINGS: Final = {
    "mappedFileSizeCommitLog": 16 << 20,
    "transactionTimeOut": 300,
    "transactionCheckInterval": 300,
    "transactionCheckMax": 1_000_000,
}
LEVELS: Final = ("read committed", "repeatable read", "serializable")
SETUPS: Final = [
    ("sqlite3", ""),
    ("aiosqlite", ""),
    ("sqlalchemy-sqlite", ""),
    ("sqlalchemy-async-sqlite+aiosqlite", ""),
    *(("psycopg", level) for level in LEVELS),
    *(("asyncpg", level) for level in LEVELS),
    *(("sqlalchemy-postgresql+psycopg", level) for level in LEVELS),
    *(("sqlalchemy-async-postgresql+asyncpg", level) for level in LEVELS),
    *(("pymysql", level) for level in LEVELS[1:]),
    ("aiomysql", LEVELS[1]),
    ("sqlalchemy-mysql+pymysql", LEVELS[1]),
    ("sqlalchemy-async-mysql+aiomysql", LEVELS[1]),
    ("django-sqlite3", ""),
    *(("django-psycopg", level) for level in LEVELS),
    ("django-pymysql", LEVELS[0]),  # the level that Django itself sets
]
FORKS: Final = multiprocessing.get_context("forkserver")
"""Where programs come from: to import all that they use takes a second, which most do not live."""
FORKS.set_forkserver_preload(
    [
        *("tests.support.both_in_django", "sqlalchemy.ext.asyncio", "sqlalchemy.pool"),
        *("aiosqlite", "psycopg", "asyncpg", "pymysql", "aiomysql"),
    ]
)
QUEUES: Final = 4
"""Queues of a topic that the first send creates."""
PAUSE: Final = (5, 40)
"""Transactions that are begun between two kills of a server."""


class Stage:
    """The programs and servers of one run, and who is killed next."""

    def __init__(
        self,
        name: str,
        shop: Shop,
        broker: BrokerProcess,
        database: Server | None,
        chance: random.Random,
    ) -> None:
        self.name = name
        self.shop, self.broker, self.database, self.chance = shop, broker, database, chance
        self.programs: dict[str, ForkServerProcess] = {}
        self.kills: Counter[str] = Counter()

    def keep_running(self, name: str, *, immortal: bool = False) -> None:
        """Start a program that is not there, or was killed."""
        process = self.programs.get(name)
        if process is not None:
            if process.exitcode is None:
                return
            self.kills[name[:4]] += process.exitcode < 0
        books, shop = self.shop.books, self.shop
        place = [str(books.place.file), str(books.place.port), books.name]
        seed = "1" if immortal else str(self.chance.random())
        how = [seed, str(shop.rounds), str(shop.notes)]
        words = (name[:4], shop.namesrv, self.name, *place, *how)
        self.programs[name] = FORKS.Process(target=main, args=words)
        self.programs[name].start()

    def play(self) -> None:
        """Keep all running, and kill servers, until enough transactions were begun."""
        next_kill = self.shop.begun() + self.chance.randrange(*PAUSE)
        while self.shop.left():
            for name in ("sell-1", "sell-2", "ship-1", "ship-2"):
                self.keep_running(name)
            time.sleep(0.05)
            if self.shop.begun() < next_kill:
                continue
            if self.database is None or self.chance.random() < 0.5:
                self.broker.kill()
                self.broker.start()
                self.kills["broker"] += 1
            else:
                self.database.kill()
                self.database.start()
                self.kills["database"] += 1
            next_kill = self.shop.begun() + self.chance.randrange(*PAUSE)

    def end_sales(self) -> None:
        """Wait for what is still under way: the sellers end when enough was begun."""
        for name in ("sell-1", "sell-2"):
            self.programs[name].join(PATIENCE_S)
            assert self.programs[name].exitcode is not None

    def end(self) -> None:
        for process in self.programs.values():
            process.kill()
            process.join()


async def create(shop: Shop) -> None:
    books = shop.books
    await books.create()
    async with books.connected() as connection:
        for statement in (
            f"create table {shop.parcels} (id varchar(64))",
            f"create table {shop.accounts} (id integer primary key, sold integer)",
            *(f"insert into {shop.accounts} values ({n}, 0)" for n in range(ACCOUNTS)),
            Inbox("shipping", shop.inbox).create_statement,
        ):
            await books.run(connection, statement)
        if books.driver.database == SQLITE:
            await books.commit(connection)
            await books.run(connection, "pragma journal_mode = wal")
        await books.commit(connection)


async def column(shop: Shop, table: str) -> Counter[str]:
    async with shop.books.connected() as connection:
        return Counter(await shop.books.run(connection, f"select id from {table}"))


async def delivered(shop: Shop) -> Counter[str]:
    """The transactions whose messages are delivered, when all are decided."""
    messages: Counter[str] = Counter()
    async with TransactionProducer(GROUP, shop.books.checker(), config=shop.config) as producer:
        while await producer.pending():  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.05)
        # The last message of each queue: after these a consumer has everything.
        ahead = {str((await producer.send(Message(TOPIC, b"last"))).queue) for _ in range(QUEUES)}
    assert len(ahead) == QUEUES
    async with Consumer("reader", {TOPIC: "*"}, start_from="first", config=shop.config) as reader:
        while ahead:
            message = await anext(reader)
            if message.transaction_id is None:
                ahead.discard(str(message.queue))
            else:
                messages[message.transaction_id] += 1
            await message.ack()
    return messages


async def settled(stage: Stage) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Orders, messages, and parcels once there are as many as there should be."""
    shop = stage.shop
    messages = await delivered(shop)
    deadline = time.monotonic() + PATIENCE_S
    while await column(shop, shop.parcels) != messages and time.monotonic() < deadline:
        for name in ("ship-1", "ship-2"):
            stage.keep_running(name, immortal=True)
        await asyncio.sleep(0.2)
    return await column(shop, shop.books.orders_table), messages, await column(shop, shop.parcels)


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "level"), SETUPS)
def test_whatever_is_killed_there_are_as_many_orders_messages_and_parcels(
    name: str, level: str, tmp_path: Path
) -> None:
    """Row if and only if message, and each message's work once."""
    driver = driver_named(name)
    driver.check_installed()
    if name.startswith("django-"):
        django_entry(driver.database, Place(tmp_path))
    chance = random.Random(printed_seed())
    rounds = int(os.environ.get("HALFMQ_ROUNDS", "1000"))
    notes = tmp_path / "notes"
    notes.touch()
    with ExitStack() as stack:
        server: Server | None = None
        if driver.database == MARIADB:
            option = f"transaction-isolation={level.replace(' ', '-').upper()}"
            server = stack.enter_context(database_servers.mariadb_server(option))
        elif driver.database != SQLITE:
            options = f"default_transaction_isolation={level}", "deadlock_timeout=20ms"
            server = stack.enter_context(database_servers.postgresql_server(*options))
        broker = stack.enter_context(broker_process(tmp_path / "broker", **SETTINGS))
        books = Books(driver, Place(tmp_path / "orders.db", server.port if server else 0))
        shop = Shop(books, broker.address, chance, notes, rounds)
        asyncio.run(create(shop))
        stage = Stage(name, shop, broker, server, chance)
        stack.callback(stage.end)
        stage.play()
        stage.end_sales()
        orders, messages, parcels = asyncio.run(settled(stage))
    kills = ", ".join(f"{count} {kind}" for kind, count in sorted(stage.kills.items()))
    print(f"{name} {level}: begun {shop.begun()}, orders {orders.total()}, kills: {kills}")
    assert orders == messages
    assert parcels == orders
