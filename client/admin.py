"""Admin: decide transactions; administer topics, groups, offsets, users, permissions, settings.

::

    async with Admin() as admin:
        async for transaction in admin.transactions(state="parked"):
            print(transaction.transaction_id, transaction.age, transaction.parked_reason)
        await admin.commit(transaction.half_message_id, reason="the order is in the database")

A transaction has two ids. Its ``transaction_id`` is the unique key of the (first) message, and is
``tx.id`` for the producer, ``message.transaction_id`` for the checker, and the id of the ledger's
row. Its ``half_message_id`` is the offset id of its half, and is ``message.half_message_id`` for
consumers. Methods accept either; only the second also identifies a decided transaction. They query
all brokers of the cluster.

Requests about undecided transactions and ``groups`` are halfmq's own: a broker of Apache RocketMQ
refuses them, except ``resume`` for a parked message. The other requests are RocketMQ's.
"""

from __future__ import annotations

from typing import Final, Unpack

from halfmq.remoting.bodies import HeartbeatData

from .administration.delayed import DelayedCalls, DelayedMessage
from .administration.diagnosis import Diagnosis, DiagnosisCalls
from .administration.running_consumers import RunningConsumerCalls
from .administration.settings import Counted, Traffic
from .administration.topics import Topic
from .administration.transactions import (
    PAGE_SIZE,
    Action,
    PendingTransaction,
    State,
)
from .administration.users import UserCalls
from .config import ConnectionOptions
from .errors import ConnectError
from .net.session import Session

__all__ = [
    "PAGE_SIZE",
    "Action",
    "Admin",
    "Counted",
    "DelayedMessage",
    "Diagnosis",
    "PendingTransaction",
    "State",
    "Topic",
    "Traffic",
]

GROUP: Final = "halfmq-admin"
"""The name of this client in errors; it is not sent to brokers."""


class Admin(
    DiagnosisCalls,
    RunningConsumerCalls,
    DelayedCalls,
    UserCalls,
):
    """Decides transactions and administers the brokers of a cluster.

    Every method raises `ClientError` if a broker does not answer, or refuses; then a call that
    creates, changes, resets, deletes or decides may be repeated. Listed with a method is what else
    it raises, or which refusals to expect.
    """

    def __init__(
        self,
        **connection: Unpack[ConnectionOptions],
    ) -> None:
        """Create a client for all brokers of a cluster.

        Args:
            connection: Addresses, credentials, TLS and settings.

        Raises:
            ConfigurationError: An argument cannot be used; says which.
        """
        super().__init__(GROUP, **connection)

    def _new_session(self) -> Session:
        return Session(self.config, _make_heartbeat, {}, {})

    async def _start_session(self, session: Session) -> None:
        await session.start(whole_cluster=True)
        if not session.routes.brokers:
            raise ConnectError(";".join(self.config.namesrv_addresses), "it knows no broker")


def _make_heartbeat(client_id: str) -> HeartbeatData:
    return HeartbeatData(client_id=client_id)
