"""A program whose blocks end in every way, until a kill ends the program.

Run as ``python -m tests.support.ending_producer NAMESRV DRIVER FILE PORT NAME SEED ROUNDS NOTES``.
NAME is that of the books. NOTES is a file that gets a byte for each block that has ended, so that
the next program makes the rest of ROUNDS. Many blocks are cancelled by a time limit, and some lose
their connection.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from halfmq.client import Message, TransactionProducer, ledger
from tests.support.ledger_books import Books
from tests.support.ledger_drivers import DRIVERS, SQLITE, Place
from tests.support.ledger_endings import EVERYWHERE, SERVERS, Ending, Work, committed, opened

GROUP: Final = "endings"
TOPIC: Final = "orders"
AT_ONCE: Final = 4
"""Blocks at a time, with a driver that is awaited."""
LIMIT_SECONDS: Final = 0.05
"""Most that a block with a time limit gets: it may end at any statement."""
LIFE_SECONDS: Final = (1.0, 20.0)
"""How long a program lives."""


async def run(namesrv: str, books: Books, chance: random.Random, numbers: Iterator[int]) -> None:
    """Make one block after the other."""
    endings = [*EVERYWHERE, *(() if books.driver.database == SQLITE else SERVERS)]
    async with TransactionProducer(GROUP, books.checker(), namesrv=namesrv) as producer:

        async def some() -> None:
            for _ in numbers:
                ending = chance.choice(endings) if chance.random() < 0.6 else committed
                limit = chance.uniform(0, LIMIT_SECONDS) if chance.random() < 0.3 else None
                with suppress(Exception):
                    async with asyncio.timeout(limit), opened(books) as connection:
                        await one(producer, books, connection, ending)

        await asyncio.gather(*(some() for _ in range(AT_ONCE if books.driver.awaited else 1)))


async def one(producer: TransactionProducer, books: Books, connection: object, end: Ending) -> None:
    """Run a block, and what its ending does afterwards, also if the block has failed."""
    steps: AsyncGenerator[None, None] | None = None
    try:
        async with producer.transaction(Message(TOPIC, b"order")) as tx:
            steps = end(Work(books, connection, tx.id))
            await anext(steps)
    finally:
        if steps is not None:
            with suppress(Exception):
                await anext(steps)


def noted(notes: Path, rounds: int) -> Iterator[int]:
    """Yield the numbers of the blocks that are left, and note each when the next one is taken."""
    done = notes.stat().st_size
    with notes.open("ab", buffering=0) as file:
        for number in range(done, rounds):
            yield number
            file.write(b".")


def die_later(chance: random.Random, seconds: tuple[float, float] = LIFE_SECONDS) -> None:
    """Kill this process after some seconds; a thread, since a driver may block."""
    death = threading.Timer(chance.uniform(*seconds), os.kill, (os.getpid(), signal.SIGKILL))
    death.daemon = True
    death.start()


def main() -> None:
    """Make blocks until they are all made, or time is up."""
    namesrv, name, file, port, books_name, seed, rounds, notes = sys.argv[1:]
    (driver,) = (driver for driver in DRIVERS if driver.name == name)
    chance = random.Random(seed)
    die_later(chance)
    ledger.LOCK_SECONDS = 0.05  # type: ignore[misc]  # a check soon gives up
    books = Books(driver, Place(Path(file), int(port)), books_name)
    asyncio.run(run(namesrv, books, chance, noted(Path(notes), int(rounds))))


if __name__ == "__main__":
    main()
