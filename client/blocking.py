"""The blocking client: the names of ``halfmq.client`` without ``await``.

::

    with Producer("orders-producer") as producer:
        result = producer.send(Message("orders", b"hello"))

    with TransactionProducer("orders-tx", checker=checker) as producer:
        with producer.transaction(Message("orders", b"o-2", keys="o-2")) as tx:
            save_order(tx.id)

    try:
        with Consumer("billing", {"orders": "*"}) as consumer:
            for message in consumer:
                message.ack()
    except KeyboardInterrupt:  # Ctrl-C; without this, Python prints a traceback
        raise SystemExit(130)

These classes wrap the async client, which runs on the event loop of a background thread. All
objects of this module share the thread, and it ends when the last of them is closed. Methods may be
called from any thread. Messages are handed over many at a time, so that most calls of ``receive``
and ``ack`` need not wait for the background thread.

A process that forks (gunicorn ``--preload``, Celery, ``multiprocessing``) must start its clients
after the fork: in a child, a client that the parent started raises ``ForkedError``. Only a
``receive`` without a timeout can wait forever: each call has the limits of the async client, and
fails within a minute if the background thread is blocked or has ended.

The block of a transaction runs in the thread that entered it, and so does a listener's
``execute_local_transaction``, so that both may use a database connection of that thread. Checkers
are called in worker threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Generic, Self, cast, overload

from . import message as aio_message
from .access import Acl, AclEntry, PolicyType, User
from .admin import Counted, DelayedMessage, PendingTransaction, Topic, Traffic
from .administration.dead_letters import DeadLetter, DeadLetterCause, Redriven
from .administration.group_offsets import GroupOffset, TimeSpan
from .administration.groups import ConsumerGroup, GroupMember
from .administration.running_consumers import ConsumedQueue, DirectConsumption, RunningConsumer
from .administration.topics import QueueRange
from .arguments import OrderKeys, check_callable, check_count, check_seconds
from .config import ClientConfig, Credentials, CredentialsSource
from .consumer import RECEIVE_MAX
from .consuming.delivery import CONSUMER_CLOSED, Delivery, log_late_ack
from .consuming.filters import SqlFilter
from .consuming.flow import QueuePosition
from .consuming.handover import Handover
from .consuming.runner import RetryPolicy, RunSummary, ending_on_signals, is_async
from .errors import ClientClosedError, ClientError, ConfigurationError, ForkedError
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
    ReceivedMessage,
    SendResult,
    SendStatus,
    V,
)
from .threads.calls import AdminCalls, ConsumerCalls, ProducerCalls, TransactionProducerCalls
from .transactional.check_back import Checker, as_decision, call_user_function
from .transactional.inbox import Inbox
from .transactional.owned_transaction import BlockingOwnedBlock
from .transactional.transaction_block import Transaction, TransactionListener

__all__ = [
    "Acl",
    "AclEntry",
    "Admin",
    "Assigned",
    "Checker",
    "ClientConfig",
    "Connected",
    "ConnectionLost",
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
    "DelayedMessage",
    "DeliveryRefused",
    "DirectConsumption",
    "GroupMember",
    "GroupOffset",
    "Health",
    "Inbox",
    "Lagging",
    "Message",
    "MessageQueue",
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
    "Retried",
    "RetryPolicy",
    "Revoked",
    "RunSummary",
    "RunningConsumer",
    "SendResult",
    "SendStatus",
    "SqlFilter",
    "TimeSpan",
    "Topic",
    "TopicMissing",
    "Traffic",
    "Transaction",
    "TransactionLedger",
    "TransactionListener",
    "TransactionProducer",
    "UnequalSubscriptions",
    "User",
    "receive_any",
]


logger = logging.getLogger(__name__)

_turns: Final = itertools.count()


class Producer(ProducerCalls[V]):
    """Sends messages for a producer group; see ``halfmq.client.Producer``."""


class TransactionProducer(TransactionProducerCalls[V]):
    """Sends transactional messages; see ``halfmq.client.TransactionProducer``."""

    def transaction(
        self,
        messages: Message | Sequence[Message] = (),
        *,
        order_key: OrderKeys = None,
        session: object = None,
    ) -> contextlib.AbstractContextManager[Transaction]:
        """Return the context manager of one local transaction; its block runs in this thread.

        With ``session`` (SQLAlchemy's ``Session`` or ``Connection``, or a connection of a driver)
        the producer owns the database transaction too: see the asynchronous one.
        """
        if session is None:
            return BlockingTransaction(
                self, self.asynchronous.transaction(messages, order_key=order_key)
            )
        block = self.prepared(messages, order_key)
        return BlockingOwnedBlock(block, self.asynchronous.ledger, session)

    def prepared(
        self, messages: Message | Sequence[Message], order_key: OrderKeys = None
    ) -> BlockingTransaction:
        """Return the half messages of a database transaction that an integration owns.

        Without messages, the block adds them, and ``store`` prepares them.
        """
        half = Transaction(self.asynchronous, messages, order_key, collects=not messages)
        return BlockingTransaction(self, half)

    def send_in_transaction(
        self,
        messages: Message | Sequence[Message],
        listener: TransactionListener | None = None,
        arg: object = None,
        *,
        order_key: OrderKeys = None,
    ) -> Transaction:
        """Run a transaction with a listener, as in RocketMQ; a plain one runs in this thread."""
        listener = self.asynchronous.use_listener(listener)
        execute = listener.execute_local_transaction
        entered = Transaction(self.asynchronous, messages, order_key)
        with BlockingTransaction(self, entered) as transaction:
            transaction.decide(Decision.UNKNOWN)
            if inspect.iscoroutinefunction(execute):
                transaction.take_outcome(self.wait(call_user_function(execute, transaction, arg)))
            else:
                try:
                    transaction.take_outcome(as_decision(execute(transaction, arg), execute))
                except Exception:
                    logger.exception(
                        "event=user_function_failed function=%r counts_as=UNKNOWN", str(execute)
                    )
        return transaction


class BlockingTransaction(contextlib.AbstractContextManager[Transaction]):
    """The context manager of a transaction whose block runs in the caller's thread.

    A signal handler may raise at any point in its methods.
    """

    def __init__(self, producer: TransactionProducer[Any], transaction: Transaction) -> None:
        self._producer = producer
        self.transaction = transaction
        self._entered = False

    def __enter__(self) -> Transaction:
        if self._entered:
            raise ClientError("a transaction can be entered only once")
        self._entered = True
        try:
            self._producer.wait(self.transaction.__aenter__())
            return self.transaction  # noqa: TRY300 -- a signal may still raise here
        except BaseException:
            self._abandon()
            raise

    def store(self) -> None:
        """Store the half messages that the block has added."""
        try:
            self._producer.wait(self.transaction.store())
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        self.transaction.running = False  # interrupted by a signal, it may have been stored
        self._producer.hand_over(self.transaction.abandon())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        transaction = self.transaction
        transaction.running = False  # first, so that the checker may decide whatever happens here
        if isinstance(error, GeneratorExit):
            # Garbage collection closes a generator, perhaps on the background thread itself.
            transaction.decision = Decision.UNKNOWN
            return
        try:
            self._producer.wait(transaction.__aexit__(kind, error, trace))
        except (ClientClosedError, ForkedError) as closed:
            # Closed by another thread: the checker will decide. In a forked child: the parent will.
            logger.warning(
                "event=decision_not_delivered transaction=%s reason=%r", transaction.id, str(closed)
            )


class MessageView(ReceivedMessage, Generic[V]):
    """A message handed to a blocking consumer."""

    __slots__ = ("_consumer", "_delivery", "settled")

    def __init__(self, delivery: Delivery, consumer: Consumer[V]) -> None:
        super().__init__(delivery.record, delivery.window.queue.broker_name)
        self.delivery_attempt += delivery.attempts - 1
        self._delivery = delivery
        self._consumer = consumer
        self.settled = False
        """Whether ``ack``, ``retry`` or ``reject`` was called."""

    @property
    def value(self) -> V:
        """What the consumer's codec has made of the body; without a codec, the body."""
        return cast("V", self.body if self.decoded is None else self.decoded[0])

    def ack(self) -> bool:
        """Acknowledge the message: it was processed and need not be redelivered.

        Returns:
            Whether it counts; False if it is too late, which is logged. See
            ``halfmq.client.MessageView.ack``.
        """
        self.settled = True
        handover = self._consumer.asynchronous.handover
        if handover is not None and handover.acknowledge(self._delivery):
            return True
        try:
            return self._consumer.wait(self._on_loop(self._view().ack))
        except ClientClosedError:  # another thread closed the consumer
            log_late_ack(self.queue, self.queue_offset, CONSUMER_CLOSED)
            return False

    def retry(
        self, delay: timedelta | None = None, *, reason: str | None = None, delay_level: int = 0
    ) -> None:
        """Report that processing failed, and have the message redelivered after a delay.

        See ``halfmq.client.MessageView.retry``.
        """
        view = self._view()
        with contextlib.suppress(ClientClosedError):  # then it is redelivered anyway
            self._consumer.wait(view.retry(delay, reason=reason, delay_level=delay_level))
        self.settled = True

    def reject(self, reason: str | None = None) -> None:
        """Report that processing can never succeed: the message becomes a dead letter at once.

        See ``halfmq.client.MessageView.reject``.
        """
        with contextlib.suppress(ClientClosedError):  # then it is redelivered
            self._consumer.wait(self._view().reject(reason))
        self.settled = True

    def extend(self, seconds: float) -> bool:
        """Let the handler have the message for ``seconds`` from now; False if it is too late.

        See ``halfmq.client.MessageView.extend``.
        """
        try:
            return self._consumer.wait(self._on_loop(self._view().extend, seconds))
        except ClientClosedError:
            return False

    def reply(self, body: bytes, properties: Mapping[str, str] | None = None) -> None:
        """Send a reply to the client that sent this message with ``request``, and waits for it.

        See ``halfmq.client.MessageView.reply``.
        """
        self._consumer.wait(self._view().reply(body, properties))

    def _view(self) -> aio_message.MessageView:
        return aio_message.MessageView(self.record, self.queue.broker_name, self._delivery)

    async def _on_loop(
        self, call: Callable[..., Coroutine[Any, Any, bool]], *given: object
    ) -> bool:
        """Make a call after all that threads have done with messages so far."""
        if self._consumer.asynchronous.handover is not None:
            self._consumer.asynchronous.handover.collect()
        return await call(*given)


class Consumer(ConsumerCalls[V]):
    """Consumes topics for a group; see ``halfmq.client.Consumer``.

    ``for message in consumer`` ends when another thread or a signal handler stops the consumer, or
    another thread closes it. An exception of a signal handler loses no message: one that the call
    has not returned yet comes next. ``on_event`` is called on the background thread.
    """

    def inbox(
        self, message: MessageView, *, session: Any, table: str = "halfmq_inbox"
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context manager of a block that processes a message once.

        ``session`` is SQLAlchemy's ``Session`` or ``Connection``, or a connection of a blocking
        driver. See ``halfmq.client.Consumer.inbox``.
        """
        return Inbox(self.asynchronous.group, table).processing_blocking(
            session, message, message.ack
        )

    @overload
    def receive(self, timeout: None = None) -> MessageView[V]: ...

    @overload
    def receive(self, timeout: float) -> MessageView[V] | None: ...

    def receive(self, timeout: float | None = None) -> MessageView[V] | None:
        """Return the next message; with a timeout, None if there is none in so many seconds.

        Once the consumer is stopped or closed, a call with a timeout returns None at once.

        Raises:
            ClientClosedError: The consumer was never started. Without a timeout, also: it was
                stopped or closed.
            UnequalSubscriptionsError: A broker now refuses this consumer.
            AccessDeniedError: This consumer may not consume any more.
        """
        # No call may follow this one: a signal handler that raises there would lose the message.
        found = receive_any((self,), timeout)
        return None if found is None else found[1]

    def receive_many(self, messages_max: int, timeout: float | None = None) -> list[MessageView[V]]:
        """Wait for a message, and return it with those that follow without waiting.

        See ``halfmq.client.Consumer.receive_many``.
        """
        check_count("messages_max", messages_max, range(1, RECEIVE_MAX + 1))
        found: list[MessageView[V]] = []
        try:
            one = self.receive() if timeout is None else self.receive(timeout)
            while one is not None:
                found.append(one)
                one = self.receive(0) if len(found) < messages_max else None
        except ClientClosedError:
            if not self.client_id:
                raise
        return found

    def run(
        self,
        handler: Callable[[MessageView[V]], object],
        *,
        concurrency: int = 8,
        ordered_by: Callable[[ReceivedMessage], Hashable] | None = None,
        policy: RetryPolicy | None = None,
        drain_seconds: float = 30.0,
        signals: bool = True,
    ) -> RunSummary:
        """Call a plain handler, in threads, for each message until the consumer is stopped.

        ``ordered_by`` is called on the background thread, so it must return at once. All else is
        as in ``halfmq.client.Consumer.run``.
        """
        check_callable("handler", handler)
        if is_async(handler):
            raise ConfigurationError(
                "handler", handler, "a plain function; halfmq.client.Consumer takes async ones"
            )

        def handle(view: aio_message.MessageView[V]) -> None:
            delivery = view.deliverer
            assert isinstance(delivery, Delivery), "of a consumer's message"
            message = MessageView(delivery, self)
            message.decoded = view.decoded
            try:
                handler(message)
            finally:
                view.settled |= message.settled

        async def running() -> RunSummary:
            if self.asynchronous.handover is not None:
                self.asynchronous.handover.return_all()
            return await self.asynchronous.run(
                handle,
                concurrency=concurrency,
                ordered_by=ordered_by,
                policy=policy,
                drain_seconds=drain_seconds,
            )

        with ending_on_signals(self.stop, wanted=signals):
            return self.wait(running())

    def stop(self) -> None:
        """Hand out no more messages: loops end, and ``receive`` returns at once.

        The consumer keeps its queues, and acknowledgements of messages in hand still count; then
        ``close`` commits the offsets and leaves the group. A signal handler may call this.
        """
        if self.asynchronous.handover is not None:
            self.asynchronous.handover.stopped = True
        self.hand_over(self.asynchronous.stop())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MessageView[V]:
        try:
            return self.receive()
        except ClientClosedError:
            if not self.client_id:
                raise
            raise StopIteration from None


@overload
def receive_any(
    consumers: Sequence[Consumer[V]], timeout: None = None
) -> tuple[Consumer[V], MessageView[V]]: ...


@overload
def receive_any(
    consumers: Sequence[Consumer[V]], timeout: float
) -> tuple[Consumer[V], MessageView[V]] | None: ...


def receive_any(
    consumers: Sequence[Consumer[V]], timeout: float | None = None
) -> tuple[Consumer[V], MessageView[V]] | None:
    """Return the next message of any of several consumers, and which one it is from.

    While several have messages, none waits for the others. With a timeout it returns None if there
    is no message in so many seconds, or if all consumers are stopped or closed.

    Raises:
        ConfigurationError: An argument cannot be used.
        ClientClosedError: A consumer was never started. Without a timeout, also: all of them were
            stopped or closed.
        ClientError: Of ``Consumer.receive``.
    """
    if not consumers:
        raise ConfigurationError("consumers", consumers, "one or more")
    if timeout is not None:
        check_seconds("timeout", timeout, zero=True)
    deadline = None if timeout is None else time.monotonic() + timeout
    slot: list[Delivery] = []
    taker: Consumer[V] | None = None
    try:
        while True:
            for taker in _in_turn(consumers):
                handover = _handover(taker)
                if handover.has_more and not handover.take(slot):
                    _fill((taker,), 0.0)  # now, or others with messages would come first
                if slot or handover.take(slot):
                    message = MessageView(slot[0], taker)
                    slot[0].taken_at = time.monotonic()
                    codec = taker.asynchronous.codec
                    wrong = None if codec is None else message.decode(codec.decode)
                    if wrong is None:
                        return taker, message
                    message.reject(wrong)
                    slot.clear()
                    break
            if not _fill(consumers, deadline):
                break
    except BaseException:
        if slot and taker is not None:
            _handover(taker).put_back(slot)
        raise
    if timeout is None:
        raise ClientClosedError(
            " and ".join(f"Consumer {one.asynchronous.group}" for one in consumers)
        )
    return None


def _in_turn(consumers: Sequence[Consumer[V]]) -> Sequence[Consumer[V]]:
    """Return the consumers, each call beginning with another one."""
    if len(consumers) == 1:
        return consumers
    first = next(_turns) % len(consumers)
    return (*consumers[first:], *consumers[:first])


def _handover(consumer: Consumer[Any]) -> Handover:
    handover = consumer.asynchronous.handover
    if handover is None:
        raise ClientClosedError(f"Consumer {consumer.asynchronous.group}")
    return handover


def _fill(consumers: Sequence[Consumer[Any]], deadline: float | None) -> bool:
    """Wait until a consumer has messages; return False at the deadline, or if all are stopped."""
    seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
    for consumer in consumers:
        with contextlib.suppress(ClientClosedError):  # by another thread, so the next one may wait
            return consumer.wait(_fill_any([_handover(one) for one in consumers], seconds))
    return False


async def _fill_any(handovers: Sequence[Handover], seconds: float | None) -> bool:
    if len(handovers) == 1:
        return await handovers[0].fill(seconds)
    fills = [asyncio.ensure_future(one.fill(seconds)) for one in handovers]
    try:
        for fill in asyncio.as_completed(fills):
            if await fill:
                return True
        return False
    finally:
        for task in fills:
            task.cancel()


class Admin(AdminCalls):
    """Decides transactions, administers topics, groups and users; see ``halfmq.client.Admin``."""
