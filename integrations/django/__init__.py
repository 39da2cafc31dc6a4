"""Django: your rows and your message in one block.

::

    INSTALLED_APPS = [..., "halfmq.integrations.django"]   # its migration creates the ledger
    HALFMQ = {"GROUP": "orders-tx", "NAMESRV": "127.0.0.1:9876"}

    with transaction(Message("orders", order.number.encode())):
        order.save()

``HALFMQ`` takes GROUP and, in capitals, the arguments of ``TransactionProducer``; TABLE names the
ledger's table. The group of a database that is not the default one is "GROUP-alias". Each process
starts its producer with its first transaction.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from django.conf import settings
from django.core.signals import setting_changed
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.transaction import atomic

from halfmq.client import Transaction
from halfmq.client.blocking import TransactionProducer
from halfmq.client.errors import ConfigurationError, TransactionNotCommittedError
from halfmq.client.ledger import TransactionLedger
from halfmq.client.message import Decision, Message
from halfmq.client.transactional.owned_transaction import OPEN

__all__ = ["ledger", "producer", "transaction"]

_lock: Final = threading.Lock()
_producers: Final[dict[tuple[int, str], TransactionProducer]] = {}


def ledger() -> TransactionLedger:
    """Return the ledger; its table is created by the migration."""
    return TransactionLedger(_settings().get("TABLE", "halfmq_transactions"))


def producer(using: str = DEFAULT_DB_ALIAS) -> TransactionProducer:
    """Return this process's producer for a database, started; after a fork a new one.

    Raises:
        ConfigurationError: ``settings.HALFMQ`` has no GROUP, or a wrong value.
        ClientError: No broker answers.
    """
    with _lock:
        key = os.getpid(), using
        found = _producers.get(key)
        if found is None:
            given = _settings()
            if "GROUP" not in given:
                expected = 'a mapping with "GROUP", the name of the producer group'
                raise ConfigurationError("settings.HALFMQ", given, expected)
            more = {
                name.lower(): value
                for name, value in given.items()
                if name not in ("GROUP", "TABLE")
            }
            checker = ledger().checker(lambda: connections[using])
            # Checks of a group may reach any of its producers: all must look in one database.
            group = given["GROUP"] if using == DEFAULT_DB_ALIAS else f"{given['GROUP']}-{using}"
            found = TransactionProducer(group, checker, **more)
            found.start()
            _producers[key] = found
        return found


def _close_producers(*, setting: str, **_signal: object) -> None:
    """Close the producers when a test changes their settings."""
    if setting == "HALFMQ":
        with _lock:
            while _producers:
                _producers.popitem()[1].close()


setting_changed.connect(_close_producers)


@contextmanager
def transaction(
    messages: Message | Sequence[Message] = (),
    *,
    order_key: str | Sequence[str | None] | None = None,
    using: str = DEFAULT_DB_ALIAS,
) -> Iterator[Transaction]:
    """Commit the database's rows of the block and deliver the messages, or neither.

    It is ``atomic(durable=True)`` for the database ``using``, with the ledger's row, and a look at
    it as the last statement before COMMIT. Also a decorator. Messages that depend on what the block
    does are left out: the block calls ``add`` of the transaction.

    Raises:
        ConfigurationError: The connection is in a transaction, which somebody else would commit.
        TransactionNotCommittedError: The row is gone: a part of the block was rolled back with it.
        ClientError: The half message cannot be stored; the block has not run.
    """
    connection = connections[using]
    if connection.in_atomic_block or not connection.get_autocommit():
        raise ConfigurationError(
            "using",
            using,
            "a connection without an open transaction, since halfmq commits it: not inside another "
            "atomic(); with ATOMIC_REQUESTS decorate the view with non_atomic_requests; in tests "
            "use TransactionTestCase",
        )
    own = ledger()
    commits = False
    with (block := producer(using).prepared(messages, order_key)) as half:
        try:
            with atomic(using=using, durable=True):
                with connection.cursor() as cursor:
                    own.record(cursor, half.id)
                outer = OPEN.get()  # of another database
                OPEN.set(half)
                try:
                    yield half
                finally:
                    OPEN.set(outer)
                block.store()
                _look(connection, own, half.id)
                commits = True
        except BaseException:
            if not commits:  # Django has rolled back, and nobody has sent COMMIT
                half.decide(Decision.ROLLBACK)
            raise
        if half.chosen is None:
            half.decide(Decision.COMMIT)


def _look(connection: Any, own: TransactionLedger, transaction_id: str) -> None:
    with connection.cursor() as cursor:
        if not own.run_blocking_work(cursor, partial(own.has_row, transaction_id), ""):
            raise TransactionNotCommittedError(transaction_id)


def _settings() -> dict[str, Any]:
    return dict(getattr(settings, "HALFMQ", {}))
