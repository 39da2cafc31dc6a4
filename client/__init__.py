"""The client library: producers, transactional producers and consumers, async first.

::

    async with Producer("orders-producer") as producer:
        result = await producer.send(Message("orders", b"hello", tags="created", keys="o-1"))

    ledger = TransactionLedger()  # a table in the database that also has the orders
    async with TransactionProducer("orders-tx", ledger.checker(connect)) as producer:
        async with producer.transaction(Message("orders", b"o-2", keys="o-2")) as tx:
            save_order(ledger, tx.id)  # normal end: commit; exception: the ledger decides

    async with Consumer("billing", {"orders": "created || paid"}) as consumer:
        async for message in consumer:
            await message.ack()

    async with Admin() as admin:
        undecided = [transaction async for transaction in admin.transactions()]

``halfmq.client.blocking`` has the same names without ``await``; ``halfmq.client.testing`` starts a
broker for tests; ``halfmq.client.errors`` shows the hierarchy of exceptions. The library works with
halfmq and, with JSON headers, with Apache RocketMQ.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from .config import ClientConfig, Credentials, CredentialsSource
from .consumer import Consumer
from .consuming.filters import SqlFilter
from .consuming.flow import QueuePosition
from .consuming.runner import RetryPolicy, RunSummary
from .errors import (
    AccessDeniedError,
    AlreadyProcessedError,
    AuthenticationError,
    AutocommitError,
    BadAnswerError,
    BrokerRefusedError,
    ClientClosedError,
    ClientError,
    ConfigurationError,
    ConnectError,
    ConnectionLostError,
    DecisionConflictError,
    FilterError,
    ForkedError,
    GreenThreadsError,
    HalfNotDurableError,
    InvalidMessageError,
    MessageTooLargeError,
    ReplyTimeoutError,
    RequestTimeoutError,
    RouteNotFoundError,
    SendTimeoutError,
    TlsError,
    TransactionFencedError,
    TransactionNotCommittedError,
    TransactionNotFoundError,
    TransactionNotRecordedError,
    UnequalSubscriptionsError,
    UnreadableBodyError,
    UnsupportedRequestError,
    WrongLoopError,
)
from .events import (
    Assigned,
    Connected,
    ConnectionLost,
    ConsumerEvent,
    DeliveryRefused,
    Health,
    Lagging,
    QueueHealth,
    Rejected,
    Retried,
    Revoked,
    TopicMissing,
    UnequalSubscriptions,
)
from .ledger import TransactionLedger
from .message import (
    Decision,
    Message,
    MessageQueue,
    MessageView,
    ReceivedMessage,
    SendResult,
    SendStatus,
)
from .producer import Producer
from .transaction import TransactionProducer
from .transactional.check_back import Checker
from .transactional.inbox import Inbox
from .transactional.transaction_block import Transaction, TransactionListener

if TYPE_CHECKING:
    from .access import Acl, AclEntry, PolicyType, User
    from .admin import Admin, Counted, DelayedMessage, PendingTransaction, Topic, Traffic
    from .administration.dead_letters import DeadLetter, DeadLetterCause, Redriven
    from .administration.group_offsets import GroupOffset, TimeSpan
    from .administration.groups import ConsumerGroup, GroupMember
    from .administration.running_consumers import ConsumedQueue, DirectConsumption, RunningConsumer
    from .administration.topics import QueueRange

__all__ = [
    "AccessDeniedError",
    "Acl",
    "AclEntry",
    "Admin",
    "AlreadyProcessedError",
    "Assigned",
    "AuthenticationError",
    "AutocommitError",
    "BadAnswerError",
    "BrokerRefusedError",
    "Checker",
    "ClientClosedError",
    "ClientConfig",
    "ClientError",
    "ConfigurationError",
    "ConnectError",
    "Connected",
    "ConnectionLost",
    "ConnectionLostError",
    "ConsumedQueue",
    "Consumer",
    "ConsumerEvent",
    "ConsumerGroup",
    "Counted",
    "Credentials",
    "CredentialsSource",
    "DeadLetter",
    "DeadLetterCause",
    "Decision",
    "DecisionConflictError",
    "DelayedMessage",
    "DeliveryRefused",
    "DirectConsumption",
    "FilterError",
    "ForkedError",
    "GreenThreadsError",
    "GroupMember",
    "GroupOffset",
    "HalfNotDurableError",
    "Health",
    "Inbox",
    "InvalidMessageError",
    "Lagging",
    "Message",
    "MessageQueue",
    "MessageTooLargeError",
    "MessageView",
    "PendingTransaction",
    "PolicyType",
    "Producer",
    "QueueHealth",
    "QueuePosition",
    "QueueRange",
    "ReceivedMessage",
    "Redriven",
    "Rejected",
    "ReplyTimeoutError",
    "RequestTimeoutError",
    "Retried",
    "RetryPolicy",
    "Revoked",
    "RouteNotFoundError",
    "RunSummary",
    "RunningConsumer",
    "SendResult",
    "SendStatus",
    "SendTimeoutError",
    "SqlFilter",
    "TimeSpan",
    "TlsError",
    "Topic",
    "TopicMissing",
    "Traffic",
    "Transaction",
    "TransactionFencedError",
    "TransactionLedger",
    "TransactionListener",
    "TransactionNotCommittedError",
    "TransactionNotFoundError",
    "TransactionNotRecordedError",
    "TransactionProducer",
    "UnequalSubscriptions",
    "UnequalSubscriptionsError",
    "UnreadableBodyError",
    "UnsupportedRequestError",
    "User",
    "WrongLoopError",
]

_OF_ADMIN: Final = {
    "access": {"Acl", "AclEntry", "PolicyType", "User"},
    "admin": {"Admin", "Counted", "DelayedMessage", "PendingTransaction", "Topic", "Traffic"},
    "administration.dead_letters": {"DeadLetter", "DeadLetterCause", "Redriven"},
    "administration.group_offsets": {"GroupOffset", "TimeSpan"},
    "administration.groups": {"ConsumerGroup", "GroupMember"},
    "administration.running_consumers": {"ConsumedQueue", "DirectConsumption", "RunningConsumer"},
    "administration.topics": {"QueueRange"},
}
"""What operators' programs need, imported on first use: a third of the time of the import."""


def __getattr__(name: str) -> object:
    for module, names in _OF_ADMIN.items():
        if name in names:
            value: object = getattr(import_module(f".{module}", __name__), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
