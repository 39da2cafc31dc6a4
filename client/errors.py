"""Exceptions of the client, and whether a retry can help.

::

    ClientError
    ├── ConfigurationError         a setting or argument is wrong (also a ValueError)
    │   └── FilterError            a consumer's filter expression, with the position of the mistake
    ├── InvalidMessageError        the message breaks a rule of the format (also a ValueError)
    │   └── MessageTooLargeError   body or properties above their limit
    ├── ClientClosedError          used before it was started, or after it was closed
    ├── ForkedError                used in a forked child of the process that started it
    ├── WrongLoopError             used on another event loop than the one it was started on
    ├── GreenThreadsError          gevent or eventlet has replaced threads by greenlets
    ├── ConnectError               no connection: address and cause               retriable
    │   └── TlsError               TLS on one side only, or a certificate is not accepted
    ├── ConnectionLostError        the connection ended before the answer        retriable
    ├── RequestTimeoutError        no answer in time                              retriable
    │   └── SendTimeoutError       no attempt of a send was answered in time      retriable
    ├── ReplyTimeoutError          no consumer has replied to a request in time  retriable
    ├── BadAnswerError             the answer breaks the protocol
    ├── RouteNotFoundError         no broker serves this topic
    ├── BrokerRefusedError         the broker answered with an error code         by code
    │   ├── AccessDeniedError      no permission: subject, action, resource
    │   │   └── AuthenticationError  the key is unknown or missing, or the secret is wrong
    │   ├── DecisionConflictError  the transaction already has the opposite decision
    │   └── UnequalSubscriptionsError  other members of the group subscribe differently  retriable
    ├── UnsupportedRequestError    the broker does not support the request, as it is not halfmq's
    ├── TransactionNotFoundError   no broker knows the transaction
    ├── AutocommitError            the ledger's row would be committed by itself
    ├── TransactionFencedError     a check preceded the local transaction's row in the ledger
    ├── AlreadyProcessedError         an inbox has the message: its work is done
    ├── TransactionNotCommittedError  a block ended normally; its row in the ledger is not committed
    │   └── TransactionNotRecordedError  … because it was not recorded at all
    ├── HalfNotDurableError        the half message may not be on disk            retriable
    └── UnreadableBodyError        the body of a received message cannot be decompressed

``retriable`` is true if the same call may succeed a little later. It does not mean that the failed
attempt had no effect: after :class:`ConnectionLostError`, :class:`RequestTimeoutError` and
:class:`SendTimeoutError` the broker may have stored the message, so that a second send can store
it twice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Final, dataclass_transform

from halfmq.remoting.codes import RequestCode, ResponseCode

# The codes on which the official client retries, without NO_PERMISSION, which does not pass by
# itself. Source: DefaultMQProducerImpl and DefaultMQProducer (retryResponseCodes), 5.3.1;
# SYSTEM_BUSY since 5.3.0, GO_AWAY since 5.3.1.
RETRIABLE_CODES: Final = frozenset(
    {
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.GO_AWAY,
    }
)

_USER_REQUESTS: Final = range(RequestCode.AUTH_CREATE_USER, RequestCode.AUTH_LIST_ACL + 1)
_POP_REQUESTS: Final = range(RequestCode.POP_MESSAGE, RequestCode.POLLING_INFO + 1)

FILTER_EXPECTED: Final = '"*", or tags separated by || such as "created || paid"'
FILTER_SHOWN: Final = 80
"""Characters of a filter expression shown around the mistake: one line of a terminal."""


VALUE_SHOWN_MAX: Final = 200
"""Characters of a wrong value in an error: enough to recognise it."""
PEER_EXPECTED: Final = "a RocketMQ or halfmq server was expected at this address"


@dataclass_transform(eq_default=False, field_specifiers=(field,))
@dataclass(init=False, eq=False, repr=False)
class ClientError(Exception):
    """Base of all exceptions of the client: data classes, each with its facts as fields."""

    retriable = False
    _text = ""
    """The message, in which ``{name}`` stands for a field."""

    def __init_subclass__(cls) -> None:
        dataclass(eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        # Unpickling calls the constructor with these.
        self.args = tuple(getattr(self, one.name) for one in fields(self) if not one.kw_only)

    def __str__(self) -> str:
        return self._text.format_map(vars(self)) or super().__str__()


class ConfigurationError(ClientError, ValueError):
    """A setting or argument cannot be used as given."""

    name: str
    value: object
    expected: str

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > VALUE_SHOWN_MAX:
            shown = f"{shown[:VALUE_SHOWN_MAX]}…"
        return f"{self.name} is {shown}, expected {self.expected}"


class FilterError(ConfigurationError):
    """The filter expression for ``topic`` is neither ``*`` nor tags separated by ``||``.

    Or it is a wrong SQL92 expression; then it is raised by ``start``, since the broker reads it.

    ``position`` counts characters from 0: ``expression[position]`` is where parsing stopped. It is
    ``len(expression)`` if something is missing at the end.
    """

    def __init__(
        self,
        topic: str,
        expression: str,
        position: int,
        reason: str,
        expected: str = FILTER_EXPECTED,
    ) -> None:
        super().__init__("subscriptions", expression, expected)
        self.args = (topic, expression, position, reason, expected)
        self.topic, self.expression = topic, expression
        self.position, self.reason = position, reason

    def __str__(self) -> str:
        begin = max(self.position - FILTER_SHOWN // 2, 0)
        shown = self.expression[begin : begin + FILTER_SHOWN]
        line = "".join(c if c.isprintable() else "?" for c in shown)
        caret = " " * (self.position - begin) + "^"
        return (
            f"filter of topic {self.topic}, position {self.position} (the first is 0): "
            f"{self.reason}; expected {self.expected}\n    {line}\n    {caret}"
        )


class InvalidMessageError(ClientError, ValueError):
    """The message breaks a rule of the format; nothing was sent."""

    reason: str
    _text = "{reason}"


class MessageTooLargeError(InvalidMessageError):
    """``what`` (body, properties, batch) takes ``size`` bytes; ``size_max`` are allowed."""

    def __init__(self, what: str, size: int, size_max: int) -> None:
        super().__init__(f"{what} of {size} bytes is above the limit of {size_max} bytes")
        self.args = (what, size, size_max)  # unpickling calls __init__ with these
        self.what, self.size, self.size_max = what, size, size_max


class ClientClosedError(ClientError):
    """The producer or consumer is not running: not started yet, or closed."""

    what: str
    _text = "{what} is not running: it runs from `with` or start() to close(), a consumer only once"


class ForkedError(ClientError):
    """The client was started in process ``pid``, and this is a forked child of it.

    Threads and connections stay with the parent, where the client continues to work. Closing it in
    the child does nothing.
    """

    what: str
    pid: int

    def __str__(self) -> str:
        return (
            f"{self.what} was started in process {self.pid} and does not work in its forked child "
            f"{os.getpid()}: make and start a client after the fork (gunicorn: post_fork; Celery: "
            "worker_process_init; multiprocessing: an initializer, or the start method spawn)"
        )


class WrongLoopError(ClientError):
    """An async client was used on another event loop than the one it was started on."""

    what: str
    _text = (
        "{what} was started on another event loop and works only there: start one on this loop, or "
        "use halfmq.client.blocking, which any thread may call"
    )


class GreenThreadsError(ClientError):
    """``library`` has replaced threads by greenlets, in which the blocking client would hang."""

    library: str
    remedy: str
    _text = (
        "{library} has replaced threads by greenlets, and the client's event loop would stop all "
        "of them: leave threads alone with {remedy} (a call then holds up the other greenlets "
        "while it waits), or use workers that are threads or processes"
    )


class ConnectError(ClientError):
    """No connection to ``address``; ``reason`` says why."""

    address: str
    reason: str
    retriable = True
    _text = "cannot connect to {address}: {reason}"


class TlsError(ConnectError):
    """TLS on one side only, or one side does not accept the other's certificate.

    ``reason`` says which, and how to fix it. It is ``retriable`` if the handshake was cut off,
    because a restarting broker does that too.
    """

    retriable: bool = field(default=False, kw_only=True)


class ConnectionLostError(ClientError):
    """The connection to ``address`` ended before the answer; the request may have been executed."""

    address: str
    reason: str
    retriable = True
    _text = "connection to {address} lost: {reason}"


class RequestTimeoutError(ClientError):
    """``address`` did not answer request ``code`` in ``seconds``; it may have been executed.

    ``silent`` is true if nothing at all was received on that connection.
    """

    address: str
    code: int
    seconds: float
    silent: bool = field(default=False, kw_only=True)
    retriable = True

    def __str__(self) -> str:
        request = code_name(self.code, RequestCode)
        hint = f"; {PEER_EXPECTED}" if self.silent else ""
        return f"no answer from {self.address} to {request} within {self.seconds:g} s{hint}"


class SendTimeoutError(RequestTimeoutError):
    """No attempt to send was answered in time; the message may be stored nevertheless.

    The error of the last attempt is the ``__cause__``.
    """

    attempts: int

    def __str__(self) -> str:
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        return f"sent {times} within {self.seconds:g} s, last to {self.address}: no answer in time"


class ReplyTimeoutError(ClientError):
    """No consumer has replied to a request in time; the message is stored."""

    topic: str
    message_id: str
    seconds: float
    retriable = True
    _text = (
        "no reply to the request {message_id} within {seconds:g} s: does a consumer of {topic} "
        "call message.reply?"
    )


class BadAnswerError(ClientError):
    """``address`` answered with something the protocol does not allow.

    Often another kind of server listens there, such as HTTP, TLS or a database.
    """

    address: str
    reason: str
    _text = f"answer from {{address}} breaks the protocol: {{reason}}; {PEER_EXPECTED}"


class RouteNotFoundError(ClientError):
    """No broker serves ``topic``, and none creates it on a first send."""

    topic: str
    _text = "no broker serves topic {topic}, and none creates it on a first send"


class BrokerRefusedError(ClientError):
    """A broker or name server answered with ``code`` (a ``ResponseCode``) and ``remark``."""

    code: int
    remark: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.retriable = self.code in RETRIABLE_CODES

    def __str__(self) -> str:
        return f"refused with {code_name(self.code)}: {self.remark}"


class AccessDeniedError(BrokerRefusedError):
    """The signer of the request lacks the permission, so a retry does not help.

    An official broker does not report all three attributes; a missing one is empty.
    """

    subject: str = ""
    """The signer: ``User:NAME``, or ``accessKey:KEY`` with plain ACL."""
    action: str = ""
    """The missing permission: ``Pub``; or ``Sub or Get``, if one of several is enough."""
    resource: str = ""
    """``Topic:orders``, ``Group:billing``, ``Cluster:DefaultCluster``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.retriable = False


class AuthenticationError(AccessDeniedError):
    """The request is not signed, its access key is unknown, or the secret is wrong.

    Give the client an ``access_key`` and ``secret_key``, or ``credentials``. ``subject`` is empty
    if the request was not signed; ``action`` and ``resource`` are always empty.
    """


class DecisionConflictError(BrokerRefusedError):
    """The transaction already has the opposite decision, which stands.

    If ``wanted`` is COMMIT, a checker of the group answered ROLLBACK while the local transaction
    was still running: the row exists and the message will not be delivered. Send it again. With a
    ``TransactionLedger`` the local transaction fails instead.
    """

    transaction_id: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.wanted} of transaction {self.transaction_id} comes too late: {self.remark}"


class UnequalSubscriptionsError(BrokerRefusedError):
    """The broker refuses this consumer: another member of its group subscribes differently.

    The broker has ``refuseUnequalSubscriptions=true``. Give all members the same subscription, or
    wait until ``other_client_id`` has left. A filter is None if its client does not subscribe to
    ``topic``.
    """

    topic: str
    filter: str | None
    other_client_id: str
    other_filter: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.retriable = True


class UnsupportedRequestError(ClientError):
    """The broker at ``address`` does not support request ``code``.

    Either only halfmq brokers support it, or it is about users and the broker has none, or it is
    one of pop, which older brokers than RocketMQ 5 do not have.
    """

    address: str
    code: int

    def __str__(self) -> str:
        request = code_name(self.code, RequestCode)
        why = "it is not halfmq's"
        if self.code in _USER_REQUESTS:
            why = "it has no users, which need authenticationEnabled=true"
        if self.code in _POP_REQUESTS:
            why = 'it has no pop, which share="messages" needs: use share="queues"'
        return f"the broker at {self.address} does not know {request}: {why}"


class TransactionNotFoundError(ClientError):
    """No broker knows a transaction with this id; ``reason`` says which ids were searched."""

    transaction_id: str
    reason: str
    _text = "no transaction {transaction_id}: {reason}"


class AutocommitError(ClientError):
    """The ledger got a connection in autocommit mode without an open transaction.

    The ledger's row would be committed at once, independently of the rest of the local transaction.
    It was not inserted.
    """

    transaction_id: str
    _text = (
        "transaction {transaction_id} cannot be recorded: the connection is in autocommit mode and "
        "no transaction is open; begin one that also does the rest of the work, or switch "
        "autocommit mode off"
    )


class TransactionFencedError(ClientError):
    """The ledger already has an entry of this transaction: roll the local transaction back.

    A check was answered ROLLBACK while the local transaction was running, so its message will not
    be delivered; or the transaction was recorded twice.
    """

    transaction_id: str
    _text = (
        "transaction {transaction_id} cannot be recorded: a check of it was answered ROLLBACK "
        "before, or it was recorded before"
    )


class AlreadyProcessedError(ClientError):
    """An inbox has the message: its work is done. Roll back, and acknowledge it."""

    group: str
    inbox_id: str
    _text = "group {group} has processed the message {inbox_id} before"


class TransactionNotCommittedError(ClientError):
    """The block of a ledger's producer ended normally, but its row in the ledger is not committed.

    So no COMMIT was sent. The broker will check: it delivers the message if the row is committed
    meanwhile, and drops it otherwise. ``still_open`` is true if the connection that recorded the
    row says that it is in a transaction; not every driver tells.
    """

    transaction_id: str
    still_open: bool = False

    def __str__(self) -> str:
        why = (
            "is not committed, and the connection that recorded it is still in a transaction: "
            "commit it inside the block, also one that was begun outside (a session that somebody "
            "else commits, Django's ATOMIC_REQUESTS or an outer atomic())"
            if self.still_open
            else "is not in the ledger: its database transaction or a savepoint was rolled back "
            "(PostgreSQL does so without an error if a statement failed and its exception was "
            "swallowed), is not committed yet, or is in another database than the checker's"
        )
        return f"the row of transaction {self.transaction_id} {why}; the broker will check"


class TransactionNotRecordedError(TransactionNotCommittedError):
    """The block of a ledger's producer ended normally, but no row of it was recorded.

    As for every :class:`TransactionNotCommittedError`, the broker will check.
    """

    def __str__(self) -> str:
        return (
            f"transaction {self.transaction_id} was not recorded in the ledger: call "
            "ledger.record(cursor, tx.id) in the local transaction, or tx.rollback() for a block "
            "that writes nothing; the broker will check"
        )


class HalfNotDurableError(ClientError):
    """The half message may not survive a power failure, so the local transaction did not run."""

    transaction_id: str
    status: str
    retriable = True
    _text = "half message {transaction_id} was answered {status}; rolled back"


class UnreadableBodyError(ClientError):
    """The body of a received message cannot be decompressed; its other fields can be read."""

    message_id: str
    reason: str
    _text = "body of message {message_id}: {reason}"


def code_name(code: int, kind: type[IntEnum] = ResponseCode) -> str:
    """Format ``17`` as ``TOPIC_NOT_EXIST (17)``, and an unknown code as ``code 17``."""
    try:
        return f"{kind(code).name} ({code})"
    except ValueError:
        return f"code {code}"
