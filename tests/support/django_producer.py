"""A program of Django whose blocks end in every way, until a kill ends the program.

Run as ``python -m tests.support.django_producer NAMESRV FORM FILE PORT NAME SEED ROUNDS NOTES``,
the arguments of `ending_producer`; FORM is ``integration`` or ``ledger``. PORT is that of
PostgreSQL; 0 means SQLite.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import django
from django.conf import settings
from django.db import connection, transaction

from halfmq.client import Message, TransactionLedger, ledger
from halfmq.client.blocking import TransactionProducer
from tests.support.ending_producer import GROUP, LIMIT_SECONDS, TOPIC, die_later, noted
from tests.support.interruptions import InterruptionError

MESSAGE: Final = Message(TOPIC, b"order")
_turns: Final = itertools.count()
Block = Callable[[], AbstractContextManager[object]]


@contextmanager
def by_the_integration() -> Iterator[None]:
    """The block of ``halfmq.integrations.django``."""
    from halfmq.integrations.django import transaction as both  # noqa: PLC0415 -- after setup()

    adds = next(_turns) % 2
    with both(() if adds else MESSAGE) as tx:
        if adds:
            tx.add(MESSAGE)
        yield


@contextmanager
def by_the_ledger(
    producer: TransactionProducer, own: TransactionLedger, *, durable: bool = True
) -> Iterator[None]:
    """The documented block with ``atomic(durable=True)``, or a part of an outer ``atomic()``."""
    with producer.transaction(MESSAGE) as tx, transaction.atomic(durable=durable):
        with connection.cursor() as cursor:
            own.record(cursor, tx.id)
        yield


class Program:
    """Blocks and their endings."""

    def __init__(self, block: Block, part: Block, orders: str, chance: random.Random) -> None:
        self.block, self.part, self.orders, self.chance = block, part, orders, chance

    def run(self, sql: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql)

    def order(self) -> None:
        self.run(f"insert into {self.orders} values ('order')")

    def one(self) -> None:
        """Run a block with an ending by chance; it may raise."""
        endings = [self.works, self.raises, self.swallows, self.undoes_a_part, self.marks]
        endings += [self.inside_another, self.fails_later, self.loses_its_connection]
        ending = self.chance.choice(endings) if self.chance.random() < 0.6 else self.works
        if ending in (self.inside_another, self.fails_later):
            ending()
            return
        with self.block():
            self.order()
            ending()

    def works(self) -> None:
        pass

    def raises(self) -> None:
        raise ValueError

    def swallows(self) -> None:
        with suppress(Exception):
            self.run("insert into nowhere values (1)")

    def undoes_a_part(self) -> None:
        with suppress(ValueError), transaction.atomic():
            self.order()
            raise ValueError

    def marks(self) -> None:
        transaction.set_rollback(True)

    def loses_its_connection(self) -> None:
        if connection.vendor == "postgresql":
            self.run("select pg_terminate_backend(pg_backend_pid())")
        else:
            connection.connection.close()

    def inside_another(self) -> None:
        """As with ATOMIC_REQUESTS: refused, or found by the look."""
        with transaction.atomic(), self.part():
            self.order()

    def fails_later(self) -> None:
        with transaction.atomic():
            with self.part():
                self.order()
            raise ValueError


def configure(form: str, file: str, port: int, name: str, namesrv: str) -> TransactionLedger:
    """Set Django up; return the ledger of the books with this name."""
    ledger.LOCK_SECONDS = 0.05  # type: ignore[misc]  # a check soon gives up
    table = f"ledger_{name}"
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": file}
    server = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres"}
    database = server | {"HOST": "127.0.0.1", "PORT": str(port)} if port else sqlite
    settings.configure(
        DATABASES={"default": database},
        HALFMQ={"GROUP": GROUP, "NAMESRV": namesrv, "TABLE": table},
        INSTALLED_APPS=["halfmq.integrations.django"] if form == "integration" else [],
    )
    django.setup()
    return TransactionLedger(table)


def main() -> None:
    """Make blocks until they are all made, or time is up."""
    namesrv, form, file, port, name, seed, rounds, notes = sys.argv[1:]
    chance = random.Random(seed)
    die_later(chance)
    own = configure(form, file, int(port), name, namesrv)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise InterruptionError

    signal.signal(signal.SIGALRM, interrupt)
    sys.unraisablehook = lambda _lost: None  # a signal may hit a finalizer
    with ExitStack() as stack:
        block: Block = by_the_integration
        part = block
        if form == "ledger":
            producer = TransactionProducer(GROUP, own.checker(lambda: connection), namesrv=namesrv)
            stack.enter_context(producer)
            block = partial(by_the_ledger, producer, own)
            part = partial(by_the_ledger, producer, own, durable=False)
        program = Program(block, part, f"orders_{name}", chance)
        for _ in noted(Path(notes), int(rounds)):
            attempt(program, chance)
    os._exit(0)  # the integration's producer is one for the life of the process


def attempt(program: Program, chance: random.Random) -> None:
    """Make one block, with or without a time limit, and drop a connection that it has ruined."""
    seconds = chance.uniform(0.0001, LIMIT_SECONDS) if chance.random() < 0.3 else 0
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:  # noqa: SIM105 -- a signal could hit contextlib.suppress too
        program.one()
    except Exception:  # noqa: BLE001 -- as a web framework does
        pass
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _drop_ruined()
        except InterruptionError:
            continue
        return


def _drop_ruined() -> None:
    """End the connection as Django does after a request; an open transaction is rolled back."""
    broken: Any = connection
    if broken.in_atomic_block or broken.errors_occurred or broken.needs_rollback:
        broken.in_atomic_block = False
        broken.atomic_blocks = []
        broken.savepoint_ids = []
        broken.needs_rollback = False
        broken.close()


if __name__ == "__main__":
    main()
