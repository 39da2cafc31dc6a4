"""A producer process for kills: local transactions on a shared ledger, until somebody ends it.

Run as ``python -m tests.support.ledger_producer NAMESRV LEDGER NAME SEED``. Several loops prepare,
write a row or roll it back, some slowly, some without telling the broker; and now and then one
kills the process at a place that a kill from outside would seldom hit. Names of transactions begin
with NAME, which must be new for each process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from halfmq.client import (
    ClientConfig,
    ClientError,
    Decision,
    DecisionConflictError,
    Message,
    Transaction,
    TransactionProducer,
)
from tests.support.ledger_database import LedgerDatabase

GROUP: Final = "ledger-producers"
TOPICS: Final = ("ledger-a", "ledger-b")
MESSAGES_MAX: Final = 3
"""Of one transaction; they go to the topics in turn."""
LOOPS: Final = 6
SLOW_SECONDS: Final = (0.2, 1.2)
"""How long a slow local transaction takes: on both sides of the first check."""
SUICIDE: Final = 0.002
"""The chance of dying at each of the places where that is possible."""


def client_config(namesrv: str) -> ClientConfig:
    return ClientConfig(
        namesrv=namesrv, reconnect_delay_min=0.02, reconnect_delay_max=0.1, send_timeout=1.0
    )


class _RolledBackError(Exception):
    """Ends a block whose local transaction has been rolled back."""


class LedgerProducer:
    """The loops of one process."""

    def __init__(self, producer: TransactionProducer, ledger: LedgerDatabase, seed: int) -> None:
        self._producer, self._ledger = producer, ledger
        self._chance = random.Random(seed)

    async def run(self, name: str) -> None:
        """Make transactions for ever."""
        numbers = itertools.count()
        async with asyncio.TaskGroup() as group:
            for _ in range(LOOPS):
                group.create_task(self._loop(name, numbers))

    async def _loop(self, name: str, numbers: itertools.count[int]) -> None:
        while True:
            await self._transact(f"{name}-{next(numbers)}")

    async def _transact(self, name: str) -> None:
        messages = [
            Message(TOPICS[index % len(TOPICS)], f"{name}/{index}".encode(), keys=name)
            for index in range(self._chance.randint(1, MESSAGES_MAX))
        ]
        transaction = self._producer.transaction(messages)
        try:
            async with transaction:
                self._perhaps_die()  # prepared, no row
                await self._local(transaction, name, len(messages))
                self._perhaps_die()  # a row, no decision
            self._perhaps_die()  # decided
        except _RolledBackError:
            pass
        except DecisionConflictError as error:
            self._ledger.violation(f"{name}: {error}")
        except ClientError:
            await asyncio.sleep(0.02)  # the broker is away

    async def _local(self, transaction: Transaction, name: str, messages: int) -> None:
        chance = self._chance.random()
        if chance < 0.1:
            await asyncio.sleep(self._chance.uniform(*SLOW_SECONDS))
        if not self._ledger.begin(transaction.id, name, messages):
            raise _RolledBackError
        self._perhaps_die()  # a row that is not committed
        if self._chance.random() < 0.3:
            self._ledger.roll_back()
            if self._chance.random() < 0.5:
                raise _RolledBackError
            transaction.decide(Decision.UNKNOWN)
            return
        self._ledger.commit()
        if self._chance.random() < 0.1:
            transaction.decide(Decision.UNKNOWN)

    def _perhaps_die(self) -> None:
        if self._chance.random() < SUICIDE:
            os.kill(os.getpid(), signal.SIGKILL)


async def main(namesrv: str, path: str, name: str, seed: int) -> None:
    """Make transactions until the process is killed."""
    ledger = LedgerDatabase(Path(path))
    producer = await started(
        lambda: TransactionProducer(GROUP, checker=ledger.checker(), config=client_config(namesrv))
    )
    await LedgerProducer(producer, ledger, seed).run(name)


async def started(make: Callable[[], TransactionProducer]) -> TransactionProducer:
    """A producer that has started, as soon as there is a broker."""
    while True:
        producer = make()
        try:
            await producer.start()
        except ClientError:  # the broker has been killed and not yet started again
            await producer.close()
            await asyncio.sleep(0.02)
        else:
            return producer


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
