"""What the tests of the client's transactions share: a quick producer, checkers, requests seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from halfmq.client import ClientConfig, Message, MessageView, TransactionProducer
from halfmq.client.message import Decision
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import EndTransactionRequestHeader
from halfmq.testing import InMemoryBroker
from tests.support.fake_broker import FakeBroker
from tests.support.patience import PATIENCE_S

SEND = RequestCode.SEND_MESSAGE_V2
END = RequestCode.END_TRANSACTION
ENDS = RequestCode.END_TRANSACTIONS
COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
MESSAGE = Message("orders", b"o-2", keys="o-2", tags="created")
QUICK = ClientConfig(
    send_timeout=PATIENCE_S,
    request_timeout=PATIENCE_S,
    own_check_timeout=PATIENCE_S,
    reconnect_delay_min=0.01,
    reconnect_delay_max=0.02,
)
IMPATIENT = replace(QUICK, send_timeout=0.3, request_timeout=0.1)
"""For answers that never come, in steady time."""


class LocalError(Exception):
    """What a local transaction may raise."""


async def commits(_message: MessageView) -> Decision:
    """The row is there."""
    return Decision.COMMIT


async def never(_message: MessageView) -> Decision:
    """For tests in which a check must not reach the checker."""
    raise AssertionError("nobody should have asked")


def ends(broker: FakeBroker) -> list[EndTransactionRequestHeader]:
    """The decisions that came one by one."""
    headers = [request.header for request in broker.requests_of(END)]
    return [header for header in headers if isinstance(header, EndTransactionRequestHeader)]


def new_producer(
    broker: FakeBroker | InMemoryBroker,
    checker: Callable[[MessageView], object] | None = never,
    config: ClientConfig = QUICK,
) -> TransactionProducer:
    """A producer of the group ``orders-tx``, not yet started."""
    return TransactionProducer(
        "orders-tx",
        checker=checker,  # type: ignore[arg-type] # some checkers are wrong on purpose
        namesrv=broker.address,
        config=config,
    )


async def undecided(producer: TransactionProducer, message: Message = MESSAGE) -> str:
    """Prepare a transaction and leave it to the checker."""
    async with producer.transaction(message) as tx:
        tx.decide(Decision.UNKNOWN)
    return tx.id
