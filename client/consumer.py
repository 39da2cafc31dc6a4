"""Consumer: deliver each message of a group to one of its members until it is acknowledged.

The queues of a topic are assigned to the members of the group (``assignment``). Each member pulls
its queues (``pulling``) into one buffer (``delivery``), from which the user's loop takes messages.
Per queue, the offset to commit is that of the first message in flight (``in_flight``). Offsets are
stored at the broker and committed every ``offset_commit_interval``, when a queue is revoked, and at
close.

So every message is delivered at least once. It is redelivered if it is not acknowledged in time,
if it was returned with ``retry``, or if the process dies after the acknowledgement and before the
next commit. The unacknowledged messages of a queue that moves to another member are redelivered
there. Use ``inbox_id`` for deduplication.

Messages returned with ``retry`` come from a topic of the group, ``%RETRY%group``, which every
member also consumes; their ``topic`` is the one to which they were first sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final, Generic, Literal, Self, TypeAlias, Unpack, cast, overload

from halfmq.remoting.bodies import ConsumeType, HeartbeatData, subscription_data
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.store.format.topics import retry_topic

from .arguments import INT32, check_callable, check_count, check_kind, check_seconds
from .codecs import Codec
from .config import ConnectionOptions
from .consuming.assignment import Assignment
from .consuming.delivery import Delivery, DeliveryBuffer
from .consuming.filters import SqlFilter
from .consuming.flow import FlowCalls
from .consuming.handover import Handover
from .consuming.offsets import (
    BrokerOffsets,
    LocalOffsets,
    OffsetStore,
    PopOffsets,
    StartFrom,
    broker_address,
)
from .consuming.operator_requests import OperatorRequests
from .consuming.refusals import Refusals
from .consuming.runner import RetryPolicy, Runner, RunSummary, ending_on_signals
from .consuming.send_back import send_back
from .consuming.subscriptions import check_sql_filters, consumer_heartbeat, subscribe
from .errors import ClientClosedError, ConfigurationError
from .events import Connected, ConnectionLost, ConsumerEvent, Health, QueueHealth, Rejected, Retried
from .message import DEAD_LETTER_LEVEL, MessageView, ReceivedMessage, V
from .net.connection import BrokerConnection
from .net.session import Session, wall_clock_ms
from .net.telemetry import PROCESS, REJECT, RETRY, about
from .popping.pop_assignment import PopAssignment
from .popping.popper import INVISIBLE_MAX, PopSettings
from .producing.send_reply import send_reply
from .transactional.inbox import Inbox

logger = logging.getLogger(__name__)

Share: TypeAlias = Literal["queues", "messages"]
"""What the members of a group share."""

RECEIVE_MAX: Final = 10_000
"""Messages that one call returns; as many are unacknowledged together."""


class Consumer(FlowCalls, Generic[V]):
    """Consumes topics for a group.

    ::

        async with Consumer("billing", {"orders": "created || paid"}) as consumer:
            async for message in consumer:
                print(message.body)
                await message.ack()

    Several tasks may receive from one consumer. The loop ends when the consumer is stopped or
    closed, also by another task. Cancelling the loop loses no message, and a new loop may continue.
    """

    def __init__(
        self,
        group: str,
        subscriptions: Mapping[str, str | SqlFilter],
        *,
        start_from: StartFrom = "last",
        ack_timeout: float | None = 60.0,
        retries_max: int | None = None,
        share: Share = "queues",
        ordered: bool = False,
        broadcasting: bool = False,
        offsets_file: str | os.PathLike[str] | None = None,
        on_event: Callable[[ConsumerEvent], object] | None = None,
        codec: Codec[V] | None = None,
        **connection: Unpack[ConnectionOptions],
    ) -> None:
        """Create a member of a consumer group and subscribe it to topics.

        All members of a group must have the same subscriptions. While they do not, messages are
        lost to the group, and ``on_event`` is called.

        Args:
            group: The consumer group.
            subscriptions: Topic to filter: tags as in ``"created || paid"``, ``"*"`` for all
                messages, or properties as in ``SqlFilter("amount > 100")``.
            start_from: Where the group starts in a queue for which it has no offset. With
                ``"last"``, RocketMQ's default, it gets all messages that are sent after ``start``
                has returned, also to queues and topics that do not exist yet. It still starts at
                the first message of a topic that is so new that no message has been deleted or
                paged out.
            ack_timeout: Seconds after which an unacknowledged message is redelivered, though its
                handler may still run: a long one calls ``message.extend``. None: never.
            retries_max: Redeliveries before the broker moves a message to the dead letter queue,
                the topic ``%DLQ%group``. None: the ``max_retries`` with which the group was
                created, 16 by default.
            share: What the members of the group share. With ``"queues"`` each queue has one member
                at a time. With ``"messages"`` each message goes to whichever member waits for one,
                so that there may be more members than queues, and none gets its queues from
                another; the broker is told at once what becomes of a message, and gives it to
                another member after ``ack_timeout``. All members must share the same. It needs
                halfmq or RocketMQ 5.
            ordered: Each queue is consumed in its order: a message is delivered when the one before
                it was acknowledged or rejected, and one that is retried holds its queue. Members of
                the group lock their queues, as orderly consumers of RocketMQ's clients do. With
                ``retries_max=None`` retries do not end.
            broadcasting: Every member gets all messages, stores its own offsets, and has no retry
                topic: only this consumer redelivers its unacknowledged messages.
            offsets_file: Where a broadcasting consumer stores its offsets. Without it, every run
                starts by ``start_from``.
            on_event: Called with each event of ``halfmq.client.events``: what becomes of
                connections, queues and failed messages. It runs on the event loop, so it must
                return at once.
            codec: Decodes bodies for ``message.value``; one that does not decode is rejected.
            connection: Addresses, credentials, TLS and settings.

        Raises:
            FilterError: A filter of tags is not valid; says at which character. ``start`` raises it
                for an ``SqlFilter``.
            ConfigurationError: Another argument cannot be used; says which.
        """
        super().__init__(group, **connection)
        self._group_attribute = "messaging.consumer.group.name"
        if codec is not None:
            check_kind("codec", codec, Codec)
        self.codec = codec
        """What decodes the bodies; None: nothing does."""
        self._start_from = start_from
        self._ack_timeout = ack_timeout
        self._retries_max = retries_max
        self._share = share
        self._ordered = ordered
        self._locks_queues = bool(ordered) and share == "queues"
        self._broadcasting = broadcasting
        self._on_event = on_event
        self._check_arguments(offsets_file)
        self._subscriptions = subscribe(subscriptions)
        if not broadcasting:
            own = subscription_data(retry_topic(group), "*", sub_version=wall_clock_ms())
            self._subscriptions[own.topic] = own
        offsets: OffsetStore = (
            LocalOffsets(Path(offsets_file) if offsets_file else None)
            if broadcasting
            else (BrokerOffsets if share == "queues" else PopOffsets)(group, start_from)
        )
        self._buffer: DeliveryBuffer | None = None
        self.handover: Handover | None = None
        """Hands messages to other threads, once the consumer is started."""
        self._stopping = False
        self._operators: OperatorRequests | None = None
        self._refusals = Refusals(group, self._subscriptions, self._emit, self._set_error)
        kind = Assignment if share == "queues" else PopAssignment
        self._assigned = kind(
            group,
            self.config,
            self._subscriptions,
            start_from,
            offsets,
            self._refusals,
            self._emit,
            broadcasting=broadcasting,
            ordered=self._locks_queues,
        )

    @overload
    async def receive(self, timeout: None = None) -> MessageView[V]: ...  # noqa: ASYNC109

    @overload
    async def receive(self, timeout: float) -> MessageView[V] | None: ...  # noqa: ASYNC109

    async def receive(self, timeout: float | None = None) -> MessageView[V] | None:  # noqa: ASYNC109
        """Return the next message; with a timeout, None if there is none in so many seconds.

        Once the consumer is stopped or closed, a call with a timeout returns None at once.

        Raises:
            ClientClosedError: The consumer was never started. Without a timeout, also: it was
                stopped or closed.
            UnequalSubscriptionsError: A broker now refuses this consumer.
            AccessDeniedError: This consumer may not consume any more.
        """
        if timeout is None:
            message = await self._take()
            if message is None:
                raise ClientClosedError(self._name)
            return message
        check_seconds("timeout", timeout, zero=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                return await self._take()
        return None

    async def receive_many(
        self,
        messages_max: int,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[MessageView[V]]:
        """Wait for a message, and return it with those that follow without waiting.

        The list is empty if there is none in ``timeout`` seconds, or once the consumer is stopped
        or closed. Each message is acknowledged by itself.

        Raises:
            ConfigurationError: ``messages_max`` is not 1 to 10,000.
            ClientError: Of ``receive``.
        """
        check_count("messages_max", messages_max, range(1, RECEIVE_MAX + 1))
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        found: list[MessageView[V]] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                message = await self._take(messages_max)
                while message is not None:
                    found.append(message)
                    more = len(found) < messages_max and self._buffer is not None
                    message = await self._take_ready() if more else None
        return found

    async def _take(self, wanted: int = 1) -> MessageView[V] | None:
        if self._buffer is None:
            raise ClientClosedError(self._name)
        self._check_binding()
        take = self._buffer.take_ready
        while (message := await self._buffer.take_by(take, wanted)) is not None:
            if self.codec is None or await self._decodes(message, self.codec):
                return cast("MessageView[V]", message)
        return None

    async def _take_ready(self) -> MessageView[V] | None:
        """Take the next message if one is ready; None otherwise."""
        while self._buffer is not None and (message := self._buffer.take_ready()) is not None:
            if self.codec is None or await self._decodes(message, self.codec):
                return cast("MessageView[V]", message)
        return None

    async def _decodes(self, message: MessageView, codec: Codec[V]) -> bool:
        """Decode a message, or else reject it; return whether it has a value."""
        wrong = message.decode(codec.decode)
        if wrong is not None:
            await message.reject(wrong)
        return wrong is None

    async def run(
        self,
        handler: Callable[[MessageView[V]], object],
        *,
        concurrency: int = 8,
        ordered_by: Callable[[MessageView[V]], Hashable] | None = None,
        policy: RetryPolicy | None = None,
        drain_seconds: float = 30.0,
        signals: bool = True,
    ) -> RunSummary:
        """Call a handler for each message until the consumer is stopped, and return what was done.

        A message is acknowledged when its handler returns, and retried or rejected when it raises.
        A handler may take any time, and may itself call ``ack``, ``retry`` or ``reject``. SIGTERM,
        SIGINT and ``stop`` end the run: it takes no more messages, and waits for those in hand.
        Afterwards the consumer is stopped.

        Args:
            handler: An ``async`` function, or a plain one, which is called in a thread of its own.
                Context variables have the values of this call.
            concurrency: How many messages are handled at one time.
            ordered_by: Returns the key of a message, or None: messages of one key are handled one
                after the other in their order. A message that is retried comes after later ones.
            policy: What becomes of a message whose handler raises. None: each is retried, after
                delays that the broker chooses.
            drain_seconds: How long a stop waits for messages in hand. Handlers that need longer are
                cancelled, those in threads are abandoned, and the group gets their messages again.
            signals: Whether SIGTERM and SIGINT end the run, if this is the main thread. A second
                SIGINT has its usual effect.

        Raises:
            ConfigurationError: An argument cannot be used; says which.
            ClientError: Of ``receive``; the messages in hand were handled before it was raised.
        """
        runner = Runner(
            handler,
            concurrency=concurrency,
            ordered_by=ordered_by,
            policy=policy,
            drain_seconds=drain_seconds,
            processing=self.processing,
        )
        end = partial(asyncio.get_running_loop().call_soon_threadsafe, runner.end)
        if self._buffer is None:
            raise ClientClosedError(self._name)
        stopped = self._buffer.wait_stopped
        with ending_on_signals(end, wanted=signals):
            return await runner.run(self._take, stopped, self.stop, self._ack_timeout)

    def inbox(
        self, message: MessageView[V], *, session: object, table: str = "halfmq_inbox"
    ) -> AbstractAsyncContextManager[None]:
        """Return the context manager of a block that processes a message once.

        It begins a transaction in the session, records the message in the group's `Inbox`, looks
        at that row after the block, commits, and acknowledges. What the block raises rolls back. A
        message that was processed before is acknowledged without the block:
        `AlreadyProcessedError` is raised, which ends a handler of :meth:`run` well.

        Args:
            message: A message of this consumer.
            session: In no transaction: SQLAlchemy's ``AsyncSession`` or ``AsyncConnection``, or a
                connection of asyncpg, psycopg, aiosqlite or aiomysql.
            table: The inbox's table: ``Inbox(group, table).create_table_async(…)``.

        Raises:
            ClientError: The transaction was rolled back in the block, perhaps unseen.
            ConfigurationError: The session is in a transaction, or has several engines.
        """
        inbox = Inbox(self.group, table)
        return inbox.processing(session, message, message.ack, partial(inbox.run_async, session))

    async def stop(self) -> None:
        """Hand out no more messages: loops end, and ``receive`` returns at once.

        The first half of an orderly end. The consumer keeps its queues, and acknowledgements of
        messages in hand still count; then ``close`` commits the offsets and leaves the group. Safe
        to call twice.
        """
        if self._is_inherited():
            return
        self._stopping = True
        if self._buffer is not None:
            self._buffer.stop()
        await self._assigned.stop_pulling()

    async def commit(self) -> None:
        """Commit the offsets of acknowledged messages now.

        Without this call they are committed every ``offset_commit_interval``.

        Raises:
            ClientError: A broker did not accept an offset; the others were committed.
        """
        await self._assigned.commit(self._session)

    def processing(self, message: ReceivedMessage) -> AbstractContextManager[None]:
        """Return the context manager that reports a block as the processing of a message.

        For loops with OpenTelemetry; ``run`` does so by itself. Without a provider it does nothing.
        """
        return about(self.telemetry, PROCESS, message)

    async def health(self) -> Health:
        found = await super().health()
        if self._running is None or self._buffer is None:
            return found
        windows = sorted(self._assigned.windows, key=lambda window: window.queue)
        waits = [f"topic {topic} to be created" for topic in sorted(self._assigned.missing_topics)]
        if self._refusals.first is not None:
            waits.append(f"the refusal to end: {self._refusals.first}")
        if found.connected and not waits and not self._assigned.pullers:
            waits.append("a queue: those of the group are assigned to other members")
        waits += (wait for wait in map(self._buffer.full, windows) if wait)
        return found._replace(
            queues=tuple(map(QueueHealth.of, windows)), waiting_for=(*found.waiting_for, *waits)
        )

    async def close(self) -> None:
        """End the loops, commit the offsets, release the queues; safe to call twice.

        Messages that are in hand are redelivered to the group. To finish them first, call ``stop``.
        """
        if self._is_inherited():
            return
        try:
            if self._buffer is not None:
                await self._buffer.close()
            await self._assigned.close(self._running)
        finally:  # nothing keeps running, even if this call is cancelled
            self._assigned.abort()
            if self._operators is not None:
                self._operators.stop()
            await super().close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MessageView[V]:
        message = await self._take()
        if message is None:
            raise StopAsyncIteration
        return message

    # -- wiring

    def _check_arguments(self, offsets_file: object) -> None:
        start = self._start_from
        if isinstance(start, datetime):
            if start.tzinfo is None:
                raise ConfigurationError("start_from", start, "a datetime with a time zone")
        elif start not in ("last", "first"):  # no set: it may be unhashable
            raise ConfigurationError("start_from", start, '"last", "first" or a datetime')
        if self._ack_timeout is not None:
            check_seconds("ack_timeout", self._ack_timeout)
        if self._retries_max is not None:
            check_count("retries_max", self._retries_max, range(INT32.stop))
        if self._share not in ("queues", "messages"):
            raise ConfigurationError("share", self._share, '"queues" or "messages"')
        if self._share == "messages":
            timeout = self._ack_timeout
            if timeout is None or timeout > INVISIBLE_MAX:
                expected = f'at most {INVISIBLE_MAX:.0f} seconds, because share is "messages"'
                raise ConfigurationError("ack_timeout", timeout, expected)
            if self._broadcasting:
                raise ConfigurationError("broadcasting", True, 'False, because share is "messages"')
        check_kind("broadcasting", self._broadcasting, bool)
        check_kind("ordered", self._ordered, bool)
        if self._on_event is not None:
            check_callable("on_event", self._on_event)
        if offsets_file is not None and not isinstance(offsets_file, str | os.PathLike):
            raise ConfigurationError("offsets_file", offsets_file, "a path")

    def _new_session(self) -> Session:
        def members_changed(_command: RemotingCommand, _connection: BrokerConnection) -> None:
            self._assigned.rebalance_wanted.set()

        self._operators = self._operator_requests()
        handlers = self._operators.handlers()
        handlers[RequestCode.NOTIFY_CONSUMER_IDS_CHANGED] = members_changed

        def on_heartbeat_answer(address: str, answer: RemotingCommand) -> bool:
            return self._refusals.heartbeat_answered(session.client_id, address, answer)

        unregister_fields = {"consumer_group": self.group}
        session = Session(
            self.config,
            self._make_heartbeat,
            handlers,
            unregister_fields,
            on_heartbeat_answer,
            self._on_connection,
        )
        return session

    def _on_connection(self, address: str, lost: str | None) -> None:
        self._emit(
            Connected(self.group, address)
            if lost is None
            else ConnectionLost(self.group, address, lost)
        )

    def _operator_requests(self) -> OperatorRequests:
        properties = {
            "PROP_CONSUMEORDERLY": str(self._ordered).lower(),
            "PROP_CONSUMER_START_TIMESTAMP": str(wall_clock_ms()),
            "PROP_CONSUME_TYPE": ConsumeType.CONSUME_PASSIVELY,
            "PROP_NAMESERVER_ADDR": ";".join(self.config.namesrv_addresses),
            "ackTimeout": str(self._ack_timeout),
            "consumerGroup": self.group,
            # RocketMQ's -1: the group's value
            "maxReconsumeTimes": str(-1 if self._retries_max is None else self._retries_max),
            "messageModel": "BROADCASTING" if self._broadcasting else "CLUSTERING",
        }
        return OperatorRequests(
            self.group,
            properties,
            self._subscriptions,
            lambda: self._assigned.windows,
            lambda: self._buffer,
            self._assigned.seek,
        )

    async def _start_session(self, session: Session) -> None:
        await session.start(topics=tuple(self._subscriptions))
        if self._refusals.first is not None:
            raise self._refusals.first
        await check_sql_filters(session, self.group, self._subscriptions)
        if isinstance(self._assigned, PopAssignment):
            assert self._ack_timeout is not None  # checked
            self._assigned.settings = PopSettings(
                self._ack_timeout, self._retries_max, self._report_return, ordered=self._ordered
            )
            await self._assigned.check_brokers(session)
        if self._start_from == "last":
            await self._assigned.commit_ends(session)
        self._buffer = DeliveryBuffer(
            self.config,
            self._ack_timeout,
            self._send_back,
            self._send_reply,
            ordered=self._locks_queues,
        )
        self.handover = Handover(self._buffer)
        if self._stopping:
            self._buffer.stop()
        self._assigned.start(session, self._buffer, self.handover)

    def _make_heartbeat(self, client_id: str) -> HeartbeatData:
        return consumer_heartbeat(
            client_id,
            self.group,
            self._subscriptions,
            self._start_from,
            broadcasting=self._broadcasting,
        )

    def _set_error(self, error: Exception | None) -> None:
        if self._buffer is not None:
            self._buffer.set_error(error)

    def _emit(self, event: ConsumerEvent) -> None:
        logger.log(event.level, "event=%s group=%s reason=%r", event.name, self.group, str(event))
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                logger.exception("event=user_function_failed function=%r", str(self._on_event))

    async def _send_reply(
        self, delivery: Delivery, body: bytes, properties: Mapping[str, str] | None
    ) -> None:
        session, queue = self._session, delivery.window.queue
        place = queue.broker_name, broker_address(session, queue)
        record = delivery.record
        await send_reply(session, self.config, self.group, record, *place, body, properties)

    def _report_return(self, delivery: Delivery, delay_level: int) -> None:
        view = ReceivedMessage(delivery.record, delivery.window.queue.broker_name)
        kind = Retried if delay_level >= 0 else Rejected
        attempt = delivery.record.reconsume_times + delivery.attempts
        event = (view.queue, view.queue_offset, view.message_id, attempt, delivery.reason)
        self._emit(kind(self.group, *event))

    async def _send_back(self, delivery: Delivery, delay_level: int) -> bool:
        """Send a message back to the broker for redelivery; return whether it was accepted."""
        self._report_return(delivery, delay_level)
        view = ReceivedMessage(delivery.record, delivery.window.queue.broker_name)
        with about(self.telemetry, RETRY if delay_level >= 0 else REJECT, view):
            return await self._send_back_now(delivery, delay_level)

    async def _send_back_now(self, delivery: Delivery, delay_level: int) -> bool:
        if self._locks_queues and delay_level >= 0:
            failed = delivery.record.reconsume_times + delivery.attempts
            if self._retries_max is None or failed <= self._retries_max:
                return False  # it holds its queue
            delay_level = DEAD_LETTER_LEVEL
        if self._broadcasting and delay_level < 0:
            logger.warning(
                "event=message_dropped queue=%s offset=%d reason=%r",
                delivery.window.queue,
                delivery.record.queue_offset,
                delivery.reason,
            )
            return True
        if self._broadcasting or self._running is None:
            return False
        return await send_back(self._running, self.group, delivery, delay_level, self._retries_max)
