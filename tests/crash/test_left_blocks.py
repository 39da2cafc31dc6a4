"""Blocks that are left in the middle, against a broker process: a row is there iff its message is.

Time limits end blocks whose worker thread or database server continues, drivers raise after their
commit, signal handlers raise at any point of a blocking program. By default a few rounds of each
form; as a campaign `HALFMQ_ROUNDS` (2000). The seed is printed and can be set by `HALFMQ_SEED`; it
determines the times, not the points that they hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol, TypeAlias

import pytest

from halfmq.client import (
    Checker,
    Consumer,
    Message,
    TransactionLedger,
    TransactionProducer,
    blocking,
)
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.database_servers import postgresql
from tests.support.interruptions import InterruptionError
from tests.support.order_book import OrderBook
from tests.support.seeds import printed_seed

SETTINGS: Final = {
    "mappedFileSizeCommitLog": 16 << 20,
    "transactionTimeOut": 300,
    "transactionCheckInterval": 300,
    "transactionCheckMax": 1_000_000,
}
TOPIC: Final = "orders"
QUEUES: Final = 4
"""Queues of a topic that the first send creates."""
ROUNDS: Final = 40
AT_ONCE: Final = 4
"""Blocks of one program at a time, so that they wait for each other's locks."""
LIMIT: Final = (0.05, 1.3)
"""Time until a block is ended, as a fraction of the time of a whole one."""
AGAIN: Final = (0.01, 0.5)
"""The same for a second signal, after the first one."""
WHOLE_EVERY: Final = 10
"""One block in so many is not interrupted, to measure how long they take …"""
WHOLE_FIRST: Final = 20
"""… and neither are the first so many."""
PAUSE_SECONDS: Final = 0.05
GROUP: Final = "left-blocks"
ENDS: Final = (KeyboardInterrupt, InterruptionError)
"""Exceptions of the signal handlers."""


class DriverError(Exception):
    """The connection broke when the answer to a commit was due."""


Block: TypeAlias = Callable[[TransactionProducer, int, bool], Awaitable[None]]


class Book(Protocol):
    """The database of an application, and its ledger."""

    @property
    def check(self) -> Checker: ...

    @property
    def saved(self) -> set[str]: ...


class ServerBook:
    """Like :class:`OrderBook`, in PostgreSQL with an asynchronous driver."""

    def __init__(self, psycopg: Any, port: int) -> None:
        self._psycopg = psycopg
        self._address = f"host=127.0.0.1 port={port} user=postgres dbname=postgres"
        self.ledger = TransactionLedger()
        self.check = self.ledger.checker(self.connect)
        with self.connect() as connection:
            connection.execute("create table orders (id text primary key)")
            self.ledger.create_table(connection)

    def connect(self) -> Any:
        return self._psycopg.connect(self._address)

    async def save(self, transaction_id: str) -> None:
        """Run the local transaction: store an order with the transaction's id."""
        connection = await self._psycopg.AsyncConnection.connect(self._address)
        async with connection:
            await connection.execute("insert into orders values (%s)", [transaction_id])
            await self.ledger.record_async(connection, transaction_id)

    @property
    def saved(self) -> set[str]:
        with self.connect() as connection:
            return {row[0] for row in connection.execute("select id from orders")}


class Run:
    """One run of one form."""

    def __init__(self, broker: BrokerProcess, book: Book, rounds: int, seed: int) -> None:
        self.broker, self.book, self.rounds = broker, book, rounds
        self.chance = random.Random(seed)
        self.ended: Counter[str] = Counter()
        self.took: list[float] = []  # seconds of the whole blocks

    def message(self, number: int) -> Message:
        return Message(TOPIC, f"{number}".encode())

    def some_of_a_block(self, part: tuple[float, float]) -> float:
        """Return a fraction of the time that the last whole blocks took."""
        return statistics.median(self.took[-WHOLE_FIRST:]) * self.chance.uniform(*part)

    @property
    def numbers(self) -> Iterator[tuple[int, bool]]:
        """The number of each block, and whether it stays whole."""
        for number in range(self.rounds + WHOLE_FIRST):
            yield number, number < WHOLE_FIRST or number % WHOLE_EVERY == 0

    def note(self, ended: str) -> None:
        self.ended[ended] += 1

    async def settle(self) -> None:
        """Wait until all transactions are decided; compare rows with deliveries."""
        address = self.broker.address
        async with TransactionProducer(GROUP, self.book.check, namesrv=address) as producer:
            while await producer.pending():  # noqa: ASYNC110 -- there is no event for it
                await asyncio.sleep(PAUSE_SECONDS)
            # The last message of each queue: after these a consumer has everything.
            last = [await producer.send(Message(TOPIC, b"last")) for _ in range(QUEUES)]
        ahead = {str(result.queue) for result in last}
        assert len(ahead) == QUEUES
        saved = self.book.saved
        delivered: Counter[str] = Counter()
        async with Consumer("g", {TOPIC: "*"}, start_from="first", namesrv=address) as consumer:
            while ahead:
                message = await anext(consumer)
                if message.transaction_id is None:
                    ahead.discard(str(message.queue))
                else:
                    delivered[message.transaction_id] += 1
                await message.ack()
        print(f"{dict(self.ended)} rows={len(saved)} messages={len(delivered)}")
        assert (saved - delivered.keys(), delivered.keys() - saved) == (set(), set())
        assert set(delivered.values()) <= {1}


async def in_threads(run: Run, book: OrderBook) -> None:
    """Blocks with a time limit; the thread continues after it."""

    async def save(transaction_id: str) -> None:
        await asyncio.to_thread(book.save, transaction_id)

    await within_limits(run, save)


async def after_the_commit(run: Run, book: OrderBook) -> None:
    """Blocks whose driver raises although it has committed."""

    async def one(producer: TransactionProducer, number: int, _whole: bool) -> None:
        with contextlib.suppress(DriverError):
            async with producer.transaction(run.message(number)) as tx:
                await asyncio.to_thread(save, tx.id)
        run.note("raised")

    def save(transaction_id: str) -> None:
        book.save(transaction_id)
        raise DriverError

    await at_once(run, one)


async def within_limits(run: Run, save: Callable[[str], Awaitable[None]]) -> None:
    """Blocks with a time limit, after a few without one to measure how long they take."""

    async def one(producer: TransactionProducer, number: int, whole: bool) -> None:
        seconds = None if whole else run.some_of_a_block(LIMIT)
        begun = time.monotonic()
        try:
            async with (
                asyncio.timeout(seconds),
                producer.transaction(run.message(number)) as tx,
            ):
                await save(tx.id)
            if whole:
                run.took.append(time.monotonic() - begun)
            run.note("normally")
        except TimeoutError:
            run.note("cancelled")

    await at_once(run, one)


async def at_once(
    run: Run, one: Callable[[TransactionProducer, int, bool], Awaitable[None]]
) -> None:
    numbers = run.numbers

    async def work(producer: TransactionProducer) -> None:
        for number, whole in numbers:
            await one(producer, number, whole)

    address = run.broker.address
    async with TransactionProducer(GROUP, run.book.check, namesrv=address) as producer:
        await asyncio.gather(*(work(producer) for _ in range(AT_ONCE)))


def signalled(run: Run, book: OrderBook) -> None:
    """Blocks in which a signal handler raises, often a second time soon after."""
    again = False

    def handler(_number: int, _frame: FrameType | None) -> None:
        nonlocal again
        if again:
            signal.setitimer(signal.ITIMER_REAL, run.some_of_a_block(AGAIN))
        again = False
        raise run.chance.choice(ENDS)

    def one(number: int, whole: bool) -> None:
        nonlocal again
        begun = time.monotonic()
        again = not whole and run.chance.random() < 0.5
        try:
            if not whole:
                seconds = run.some_of_a_block(LIMIT)
                signal.setitimer(signal.ITIMER_REAL, seconds)
            with producer.transaction(run.message(number)) as tx:
                book.save(tx.id)
            if whole:
                run.took.append(time.monotonic() - begun)
            run.note("normally")
        except ENDS as error:
            run.note(type(error).__name__)

    before = signal.signal(signal.SIGALRM, handler)
    # A signal may hit a finalizer, whose exception is lost.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _lost: None
    address = run.broker.address
    try:
        with blocking.TransactionProducer(GROUP, run.book.check, namesrv=address) as producer:
            for number, whole in run.numbers:
                try:  # noqa: SIM105 -- a signal could hit contextlib.suppress too
                    one(number, whole)
                except ENDS:
                    pass
                while True:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                        break
                    except ENDS:
                        pass
    finally:
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


FORMS: Final[dict[str, Callable[[Run, OrderBook], None]]] = {
    "thread": lambda run, book: asyncio.run(in_threads(run, book)),
    "raises after commit": lambda run, book: asyncio.run(after_the_commit(run, book)),
    "signal": signalled,
}


def check(tmp_path: Path, form: str, rounds: int) -> None:
    book = OrderBook(tmp_path / "orders.db")
    with broker_process(tmp_path / "broker", **SETTINGS) as broker:
        run = Run(broker, book, rounds, printed_seed())
        FORMS[form](run, book)
        asyncio.run(run.settle())


def check_with_a_server(tmp_path: Path, rounds: int) -> None:
    """Cancel statements and commits that a server executes, by a time limit."""
    psycopg = pytest.importorskip("psycopg")
    with postgresql() as port, broker_process(tmp_path / "broker", **SETTINGS) as broker:
        book = ServerBook(psycopg, port)
        run = Run(broker, book, rounds, printed_seed())
        asyncio.run(within_limits(run, book.save))
        asyncio.run(run.settle())


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("form", FORMS)
def test_a_block_that_is_left_keeps_row_and_message_together(tmp_path: Path, form: str) -> None:
    """Both or neither exist, for every way to leave the block."""
    check(tmp_path, form, ROUNDS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the driver
def test_a_block_that_awaits_its_driver_keeps_row_and_message_together(tmp_path: Path) -> None:
    """The same with PostgreSQL, which may commit although its client was cancelled."""
    check_with_a_server(tmp_path, ROUNDS)


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the driver
def test_many_blocks_that_await_their_driver_keep_row_and_message_together(tmp_path: Path) -> None:
    check_with_a_server(tmp_path, many())


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("form", FORMS)
def test_many_blocks_that_are_left_keep_row_and_message_together(tmp_path: Path, form: str) -> None:
    check(tmp_path, form, many())


def many() -> int:
    return int(os.environ.get("HALFMQ_ROUNDS", "2000"))
