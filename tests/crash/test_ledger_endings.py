"""Programs whose blocks end in every way, until they are killed: as many rows as messages.

A campaign: `HALFMQ_ROUNDS` (2000) blocks with each driver. The seed is printed and can be set by
`HALFMQ_SEED`; it determines what the programs do, not the points that their kills hit.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from halfmq.client import Consumer, Message, TransactionProducer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support import database_servers
from tests.support.ending_producer import GROUP, TOPIC
from tests.support.ledger_books import Books, books_of
from tests.support.ledger_drivers import USUAL, Driver
from tests.support.ledger_endings import rows
from tests.support.seeds import printed_seed

SETTINGS: Final = {
    "mappedFileSizeCommitLog": 16 << 20,
    "transactionTimeOut": 300,
    "transactionCheckInterval": 300,
    "transactionCheckMax": 1_000_000,
}
DJANGO: Final = ("sqlite3", "psycopg")
"""Drivers of the databases with which Django is tried."""
QUEUES: Final = 4
"""Queues of a topic that the first send creates."""


@pytest.fixture(scope="module")
def postgresql() -> Iterator[int]:
    with database_servers.postgresql() as port:
        yield port


@pytest.fixture(scope="module")
def mariadb() -> Iterator[int]:
    with database_servers.mariadb() as port:
        yield port


@pytest.mark.campaign
@pytest.mark.parametrize("driver", USUAL, ids=str)
def test_many_blocks_of_programs_that_are_killed_have_as_many_rows_as_messages(
    driver: Driver, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Whatever ends a block, its database transaction or its program."""
    run("ending_producer", driver.name, books_of(driver, request, tmp_path), tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("driver", [one for one in USUAL if one.name in DJANGO], ids=str)
@pytest.mark.parametrize("form", ["integration", "ledger"])
def test_django_programs_that_are_killed_have_as_many_rows_as_messages(
    form: str, driver: Driver, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """With ``halfmq.integrations.django``, and with the ledger in ``atomic(durable=True)``."""
    pytest.importorskip("django", reason="needs django: pip install -e '.[test]'")
    run("django_producer", form, books_of(driver, request, tmp_path), tmp_path)


def run(module: str, kind: str, books: Books, tmp_path: Path) -> None:
    """Run programs until they have made all rounds; compare their rows with the messages."""
    asyncio.run(books.create())
    chance = random.Random(printed_seed())
    rounds = int(os.environ.get("HALFMQ_ROUNDS", "2000"))
    notes = tmp_path / "notes"
    notes.touch()
    program = [sys.executable, "-m", f"tests.support.{module}"]
    kills = 0
    with broker_process(tmp_path / "broker", **SETTINGS) as broker:
        while notes.stat().st_size < rounds:
            place = [str(books.place.file), str(books.place.port), books.name]
            how = [str(chance.random()), str(rounds), str(notes)]
            made = [*program, broker.address, kind, *place, *how]
            kills += subprocess.run(made, check=False, stderr=subprocess.DEVNULL).returncode < 0
        row_ids, message_ids = asyncio.run(settled(broker, books))
    print(f"{kind} {books.driver}: {kills} kills, {len(row_ids)} rows, {len(message_ids)} messages")
    assert Counter(row_ids) == message_ids


async def settled(broker: BrokerProcess, books: Books) -> tuple[list[str], Counter[str]]:
    """Wait until all is decided; return the rows, and the transactions that were delivered."""
    address = broker.address
    async with TransactionProducer(GROUP, books.checker(), namesrv=address) as producer:
        while await producer.pending():  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.05)
        # The last message of each queue: after these a consumer has everything.
        last = [await producer.send(Message(TOPIC, b"last")) for _ in range(QUEUES)]
    ahead = {str(result.queue) for result in last}
    assert len(ahead) == QUEUES
    delivered: Counter[str] = Counter()
    async with Consumer("g", {TOPIC: "*"}, start_from="first", namesrv=address) as consumer:
        while ahead:
            message = await anext(consumer)
            if message.transaction_id is None:
                ahead.discard(str(message.queue))
            else:
                delivered[message.transaction_id] += 1
            await message.ack()
    return await rows(books), delivered
