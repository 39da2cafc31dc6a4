"""Consumer: deliver each message of a group to one of its members until it is acknowledged.

The queues of a topic are assigned to the members of the group (``rebalance``). Each member pulls
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
import ssl
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final, Self, overload

from halfmq.remoting.bodies import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumeType,
    HeartbeatData,
    MessageModel,
    SubscriptionData,
    decode_consumer_list,
    encode_subscription_check,
    subscription_data,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.headers import (
    ConsumerSendMsgBackRequestHeader,
    GetConsumerListByGroupRequestHeader,
    HeartbeatResponseHeader,
)
from halfmq.store.format.topics import RETRY_PREFIX, retry_topic

from .arguments import INT32, check_callable, check_count, check_kind, check_seconds
from .config import ClientConfig
from .consuming.delivery import Delivery, DeliveryBuffer
from .consuming.filters import SQL92, SqlFilter, normalise_filter, sql_error
from .consuming.handover import Handover
from .consuming.in_flight import InFlightWindow
from .consuming.offsets import (
    BrokerOffsets,
    LocalOffsets,
    OffsetStore,
    StartFrom,
    broker_address,
    commit_end,
)
from .consuming.operator_requests import OperatorRequests
from .consuming.pulling import QueuePuller
from .consuming.rebalance import allocate_averagely
from .consuming.runner import RetryPolicy, Runner, RunSummary, ending_on_signals
from .credentials import CredentialsSource
from .errors import (
    FILTER_EXPECTED,
    AccessDeniedError,
    BadAnswerError,
    BrokerRefusedError,
    ClientClosedError,
    ClientError,
    ConfigurationError,
    ConnectError,
    ConnectionLostError,
    UnequalSubscriptionsError,
)
from .events import ConsumerEvent, TopicMissing, UnequalSubscriptions
from .message import MessageQueue, MessageView, is_topic, topic_error
from .net.base_client import BaseClient
from .net.connection import BrokerConnection
from .net.response_errors import error_from_response
from .net.routes import nearest_topics
from .net.session import Session, expect_success, typed, wall_clock_ms

logger = logging.getLogger(__name__)

REBALANCE_RETRY: Final = 1.0
"""Seconds until the next attempt after a rebalance has failed."""
MISSING_TOPIC_INTERVAL: Final = 0.5
"""Seconds between two look-ups of a missing topic, so that its first message is not late."""
REMINDER_INTERVAL: Final = 55.0
"""Minimum seconds between two warnings about unequal subscriptions, which come with every second
heartbeat, once a minute."""
MISSING_TOPIC_RATE: Final = 20
"""Maximum look-ups of missing topics per second; more than ten such topics wait longer."""


class Consumer(BaseClient):
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
        broadcasting: bool = False,
        offsets_file: str | os.PathLike[str] | None = None,
        on_event: Callable[[ConsumerEvent], object] | None = None,
        namesrv: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        credentials: CredentialsSource | None = None,
        tls: bool | ssl.SSLContext | None = None,
        config: ClientConfig | None = None,
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
            broadcasting: Every member gets all messages, stores its own offsets, and has no retry
                topic: only this consumer redelivers its unacknowledged messages.
            offsets_file: Where a broadcasting consumer stores its offsets. Without it, every run
                starts by ``start_from``.
            on_event: Called with each ``TopicMissing`` and ``UnequalSubscriptions``, which are
                also logged as warnings. It runs on the event loop, so it must return at once.
            namesrv: ``host:port``, several with ``;`` or ``,``; overrides ``config``.
            access_key: Signs every request; overrides ``config``, as do the next three.
            secret_key: The secret of ``access_key``.
            credentials: A function that returns both, called again if a broker rejects them.
            tls: Whether connections are encrypted; or an ``ssl.SSLContext``.
            config: All other settings.

        Raises:
            FilterError: A filter of tags is not valid; says at which character. ``start`` raises it
                for an ``SqlFilter``.
            ConfigurationError: Another argument cannot be used; says which.
        """
        super().__init__(
            group,
            namesrv=namesrv,
            access_key=access_key,
            secret_key=secret_key,
            credentials=credentials,
            tls=tls,
            config=config,
        )
        self._start_from = start_from
        self._ack_timeout = ack_timeout
        self._retries_max = retries_max
        self._broadcasting = broadcasting
        self._on_event = on_event
        self._check_arguments(offsets_file)
        self._subscriptions = _subscribe(subscriptions)
        if not broadcasting:
            own = subscription_data(retry_topic(group), "*", sub_version=wall_clock_ms())
            self._subscriptions[own.topic] = own
        self._offsets: OffsetStore = (
            LocalOffsets(Path(offsets_file) if offsets_file else None)
            if broadcasting
            else BrokerOffsets(group, start_from)
        )
        self._buffer: DeliveryBuffer | None = None
        self.handover: Handover | None = None
        """Hands messages to other threads, once the consumer is started."""
        self._stopping = False
        self._operators: OperatorRequests | None = None
        self._pullers: dict[MessageQueue, tuple[QueuePuller, asyncio.Task[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._rebalance_wanted = asyncio.Event()
        self._missing_topics: set[str] = set()  # without a route
        self._known_topics: set[str] = set()  # had a route, or were reported missing
        self._created_topics: set[str] = set()  # did not exist at the first look-up
        self._started_at = datetime.now(UTC)
        self._last_error = ""
        self._unequal: dict[str, UnequalSubscriptions] = {}  # by broker
        self._denials: dict[str | MessageQueue, BrokerRefusedError] = {}  # by address, topic, queue
        self._reminder_due = 0.0  # on the loop's clock

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues that are assigned to this consumer now."""
        return sorted(self._pullers)

    @overload
    async def receive(self, timeout: None = None) -> MessageView: ...  # noqa: ASYNC109

    @overload
    async def receive(self, timeout: float) -> MessageView | None: ...  # noqa: ASYNC109

    async def receive(self, timeout: float | None = None) -> MessageView | None:  # noqa: ASYNC109
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

    async def _take(self) -> MessageView | None:
        if self._buffer is None:
            raise ClientClosedError(self._name)
        self._check_binding()
        return await self._buffer.take()

    async def run(
        self,
        handler: Callable[[MessageView], object],
        *,
        concurrency: int = 8,
        ordered_by: Callable[[MessageView], Hashable] | None = None,
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
        )
        end = partial(asyncio.get_running_loop().call_soon_threadsafe, runner.end)
        if self._buffer is None:
            raise ClientClosedError(self._name)
        stopped = self._buffer.wait_stopped
        with ending_on_signals(end, wanted=signals):
            return await runner.run(self._take, stopped, self.stop, self._ack_timeout)

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
        await _cancel([task for _, task in self._pullers.values()])

    async def commit(self) -> None:
        """Commit the offsets of acknowledged messages now.

        Without this call they are committed every ``offset_commit_interval``.

        Raises:
            ClientError: A broker did not accept an offset; the others were committed.
        """
        session = self._session
        windows = [puller.window for puller, _ in self._pullers.values()]
        try:
            await _gather(self._commit_window(session, window) for window in windows)
        finally:
            await self._offsets.flush()

    async def close(self) -> None:
        """End the loops, commit the offsets, release the queues; safe to call twice.

        Messages that are in hand are redelivered to the group. To finish them first, call ``stop``.
        """
        if self._is_inherited():
            return
        try:
            if self._buffer is not None:
                await self._buffer.close()
            await _cancel(self._tasks)
            if self._running is not None:
                await self._revoke(self._running, list(self._pullers))
                await self._offsets.flush()
        finally:  # nothing keeps running, even if this call is cancelled
            for task in (*self._tasks, *(task for _, task in self._pullers.values())):
                task.cancel()
            if self._operators is not None:
                self._operators.stop()
            await super().close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MessageView:
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
        check_kind("broadcasting", self._broadcasting, bool)
        if self._on_event is not None:
            check_callable("on_event", self._on_event)
        if offsets_file is not None and not isinstance(offsets_file, str | os.PathLike):
            raise ConfigurationError("offsets_file", offsets_file, "a path")

    def _new_session(self) -> Session:
        def members_changed(_command: RemotingCommand, _connection: BrokerConnection) -> None:
            self._rebalance_wanted.set()

        self._operators = self._operator_requests()
        handlers = self._operators.handlers()
        handlers[RequestCode.NOTIFY_CONSUMER_IDS_CHANGED] = members_changed

        def on_heartbeat_answer(address: str, answer: RemotingCommand) -> None:
            self._on_heartbeat_answer(session.client_id, address, answer)

        unregister_fields = {"consumer_group": self.group}
        session = Session(
            self.config, self._make_heartbeat, handlers, unregister_fields, on_heartbeat_answer
        )
        return session

    def _operator_requests(self) -> OperatorRequests:
        properties = {
            "PROP_CONSUMEORDERLY": "false",
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
            lambda: [puller.window for puller, _ in self._pullers.values()],
            lambda: self._buffer,
            self._seek,
        )

    async def _start_session(self, session: Session) -> None:
        await session.start(topics=tuple(self._subscriptions))
        for refused in self._denials.values():
            raise refused
        await self._check_sql_filters(session)
        if self._start_from == "last":
            await self._commit_ends(session)
        self._buffer = DeliveryBuffer(self.config, self._ack_timeout, self._send_back)
        self.handover = Handover(self._buffer)
        if self._stopping:
            self._buffer.stop()
        self._tasks = [
            asyncio.create_task(self._rebalance_forever(session), name=f"rebalance {self.group}"),
            asyncio.create_task(self._commit_forever(session), name=f"commit {self.group}"),
        ]

    async def _commit_ends(self, session: Session) -> None:
        """Make sure that the group consumes what is sent from now on, to queues of any member."""
        self._started_at = datetime.now(UTC)
        routes = (session.routes.cached(topic) for topic in self._subscriptions)
        queues = [queue for route in routes if route is not None for queue in route.consume_queues]
        commits = (commit_end(session, self._offsets, queue) for queue in queues)
        for error in await asyncio.gather(*commits, return_exceptions=True):
            if not isinstance(error, ClientError | None):
                raise error
            if error is not None:  # the rebalance meets the same error, and reports it
                logger.debug("event=end_not_committed group=%s reason=%r", self.group, str(error))

    async def _check_sql_filters(self, session: Session) -> None:
        """Send the SQL92 filters to every broker, which checks them.

        Raises:
            FilterError: A filter is wrong.
            BrokerRefusedError: A broker does not support SQL92 filters.
        """
        filters = [one for one in self._subscriptions.values() if one.expression_type == SQL92]
        for subscription, address in product(filters, sorted(session.routes.addresses)):
            body = encode_subscription_check(session.client_id, self.group, subscription)
            answer = await session.call(address, RequestCode.CHECK_CLIENT_CONFIG, None, body)
            if answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
                raise sql_error(subscription.topic, subscription.sub_string, answer.remark or "")
            if answer.code != ResponseCode.SUCCESS:
                raise error_from_response(answer)

    def _make_heartbeat(self, client_id: str) -> HeartbeatData:
        if isinstance(self._start_from, datetime):
            where = ConsumeFromWhere.CONSUME_FROM_TIMESTAMP
        elif self._start_from == "first":
            where = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
        else:
            where = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
        model = MessageModel.BROADCASTING if self._broadcasting else MessageModel.CLUSTERING
        group = ConsumerData(
            group_name=self.group,
            consume_from_where=where,
            consume_type=ConsumeType.CONSUME_PASSIVELY,
            message_model=model,
            subscription_data_set=tuple(self._subscriptions.values()),
        )
        return HeartbeatData(client_id=client_id, consumer_data_set=(group,))

    # -- answers to heartbeats, denied access

    def _on_heartbeat_answer(self, client_id: str, address: str, answer: RemotingCommand) -> None:
        """Process the answer to a heartbeat, which reports unequal subscriptions and refusals."""
        self._denials.pop(address, None)
        was_unequal = self._unequal.pop(address, None) is not None
        event = self._subscription_difference(client_id, address, answer)
        if answer.code != ResponseCode.SUCCESS and event is None:
            error = error_from_response(answer)
            if isinstance(error, AccessDeniedError):
                self._denials[address] = error
        elif event is None:
            if was_unequal and not self._unequal:
                logger.info("event=subscriptions_equal group=%s", self.group)
        elif answer.code == ResponseCode.SUCCESS:
            self._unequal[address] = event
            now = asyncio.get_running_loop().time()
            if now >= self._reminder_due:
                self._reminder_due = now + REMINDER_INTERVAL
                self._emit(event)
        else:
            filters = event.topic, event.filter, event.other_client_id, event.other_filter
            remark = answer.remark or str(event)
            self._denials[address] = UnequalSubscriptionsError(answer.code, remark, *filters)
        self._update_buffer_error()

    def _record_access(self, what: MessageQueue | str, error: AccessDeniedError | None) -> None:
        """Record that access to a queue or topic is denied, or with None that it is allowed."""
        if self._denials.pop(what, None) is None and error is None:
            return
        if error is not None:
            self._denials[what] = error
        self._update_buffer_error()

    def _update_buffer_error(self) -> None:
        if self._buffer is not None:
            self._buffer.set_error(next(iter(self._denials.values()), None))

    def _subscription_difference(
        self, client_id: str, address: str, answer: RemotingCommand
    ) -> UnequalSubscriptions | None:
        try:
            header = typed(answer, HeartbeatResponseHeader, address)
        except BadAnswerError as error:
            logger.debug("event=heartbeat_answer_unreadable reason=%r", str(error))
            return None
        topic, other = header.unequal_topic, header.unequal_client_id
        if topic is None or other is None:
            return None
        own = self._subscriptions.get(topic)
        return UnequalSubscriptions(
            group=self.group,
            topic=topic,
            client_id=client_id,
            filter=None if own is None else own.sub_string,
            other_client_id=other,
            other_filter=header.unequal_filter,
        )

    # -- rebalancing

    async def _rebalance_forever(self, session: Session) -> None:
        while True:
            self._rebalance_wanted.clear()
            settled = True
            for topic in self._subscriptions:
                settled = await self._rebalance(session, topic) and settled
            for topic in sorted(self._missing_topics - self._known_topics):
                await self._report_missing(session, topic)
            await self._wait(
                session, self.config.rebalance_interval if settled else REBALANCE_RETRY
            )

    async def _wait(self, session: Session, seconds: float) -> None:
        """Wait until the next rebalance is due; look up missing topics meanwhile."""
        clock = asyncio.get_running_loop().time
        due = clock() + seconds
        while (left := due - clock()) > 0:
            if self._missing_topics:
                left = min(left, missing_topic_interval(len(self._missing_topics)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._rebalance_wanted.wait()
                    return
            for topic in list(self._missing_topics):
                if not await self._rebalance(session, topic):
                    due = min(due, clock() + REBALANCE_RETRY)

    async def _rebalance(self, session: Session, topic: str) -> bool:
        """Update the queues of a topic, if it exists; return False if it must be retried soon."""
        held = {queue for queue in self._pullers if queue.topic == topic}
        try:
            assigned = await self._assigned_queues(session, topic)
            if assigned is None:  # a topic with assigned queues is unknown if its broker is down
                if not held and not topic.startswith(RETRY_PREFIX):
                    self._missing_topics.add(topic)
                self._record_access(topic, None)
                return True
            self._missing_topics.discard(topic)
            self._known_topics.add(topic)
            await self._revoke(session, sorted(held.difference(assigned)))
            await _gather(self._assign(session, queue) for queue in assigned if queue not in held)
        except ClientError as error:
            # The session reports a lost broker, in one line for all topics and queues.
            reported = isinstance(error, ConnectError | ConnectionLostError)
            is_known = reported or str(error) == self._last_error
            level = logging.DEBUG if is_known else logging.WARNING
            self._last_error = str(error)
            logger.log(level, "event=rebalance_failed topic=%s reason=%r", topic, str(error))
            self._record_access(topic, error if isinstance(error, AccessDeniedError) else None)
            return False
        self._record_access(topic, None)
        if held != set(assigned):
            logger.info(
                "event=assigned topic=%s queues=%d before=%d", topic, len(assigned), len(held)
            )
        return True

    async def _report_missing(self, session: Session, topic: str) -> None:
        names = await session.routes.topic_names()
        if names:  # otherwise the name server has just started, and the topic may be an old one
            self._created_topics.add(topic)
        nearest = await asyncio.to_thread(nearest_topics, topic, names)
        self._known_topics.add(topic)
        self._emit(TopicMissing(self.group, topic, nearest))

    def _emit(self, event: ConsumerEvent) -> None:
        logger.warning("event=%s group=%s reason=%r", event.name, self.group, str(event))
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                logger.exception("event=user_function_failed function=%r", str(self._on_event))

    async def _assigned_queues(self, session: Session, topic: str) -> list[MessageQueue] | None:
        """Return the queues of a topic that are assigned to this consumer; None without a topic."""
        route = await session.routes.existing(topic)
        if route is None:
            return None
        if self._broadcasting or not route.consume_queues:
            return list(route.consume_queues)
        address = broker_address(session, route.consume_queues[0])
        header = GetConsumerListByGroupRequestHeader(consumer_group=self.group)
        answer = await session.call(address, RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)
        try:
            members = decode_consumer_list(expect_success(answer).body)
        except ProtocolError as error:
            raise BadAnswerError(address, str(error)) from error
        return allocate_averagely(route.consume_queues, members, session.client_id)

    async def _assign(self, session: Session, queue: MessageQueue) -> None:
        """Start to pull a queue from the group's offset."""
        default = self._start_from
        if default == "last":  # the queue is new, or its broker did not answer at the start
            is_new = queue.topic in self._created_topics
            default = "first" if is_new else self._started_at
        start = await self._offsets.start_offset(session, queue, default)
        if self._stopping:
            return
        assert self._buffer is not None
        window = InFlightWindow(queue, start.offset, start.stored)
        subscription = self._subscriptions[queue.topic]
        on_access_change = partial(self._record_access, queue)
        puller = QueuePuller(
            session, self.group, subscription, window, self._buffer, on_access_change
        )
        self._pullers[queue] = puller, self._pull(puller)

    def _seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue a queue at another offset, if it is assigned."""
        if queue not in self._pullers:
            return
        puller, task = self._pullers[queue]
        logger.info(
            "event=offset_reset queue=%s from=%d to=%d", queue, puller.window.next_offset, offset
        )
        task.cancel()
        puller.seek(offset)
        if not self._stopping:
            self._pullers[queue] = puller, self._pull(puller)

    def _pull(self, puller: QueuePuller) -> asyncio.Task[None]:
        return asyncio.create_task(puller.run(), name=f"pull {puller.window.queue}")

    async def _revoke(self, session: Session, queues: list[MessageQueue]) -> None:
        """Stop pulling queues and commit their offsets."""
        lost = [self._pullers.pop(queue) for queue in queues if queue in self._pullers]
        await _cancel([task for _, task in lost])
        for queue in queues:
            self._record_access(queue, None)
        errors = await asyncio.gather(
            *(self._release(session, puller.window) for puller, _ in lost)
        )
        failed = [error for error in errors if error is not None]
        if failed:
            logger.warning(
                "event=offsets_not_written group=%s queues=%d reason=%r",
                self.group,
                len(failed),
                str(failed[0]),
            )

    async def _release(self, session: Session, window: InFlightWindow) -> ClientError | None:
        if self._buffer is not None:  # first, or what is acknowledged meanwhile would not count
            self._buffer.drop(window)
        try:
            await self._commit_window(session, window)
        except ClientError as error:
            return error
        return None

    # -- offsets

    async def _commit_forever(self, session: Session) -> None:
        failure = ""
        while True:
            await asyncio.sleep(self.config.offset_commit_interval)
            before, failure = failure, ""
            try:
                await self.commit()
            except (ClientError, OSError) as error:
                failure = str(error)
                if self._running is session and failure != before:
                    logger.warning(
                        "event=offsets_not_written group=%s reason=%r", self.group, failure
                    )

    async def _commit_window(self, session: Session, window: InFlightWindow) -> None:
        if self.handover is not None:
            self.handover.collect()
        offset = window.commit_offset
        if offset != window.committed:
            await self._offsets.commit(session, window.queue, offset)
            window.committed = offset

    # -- redelivery

    async def _send_back(self, delivery: Delivery, delay_level: int) -> bool:
        """Send a message back to the broker for redelivery; return whether it was accepted."""
        session, record, queue = self._running, delivery.record, delivery.window.queue
        if self._broadcasting and delay_level < 0:
            logger.warning(
                "event=message_dropped queue=%s offset=%d reason=%r",
                queue,
                record.queue_offset,
                delivery.reason,
            )
            return True
        if self._broadcasting or session is None:
            return False
        header = ConsumerSendMsgBackRequestHeader(
            offset=record.physical_offset,
            group=self.group,
            delay_level=delay_level,
            origin_msg_id=MessageView(record, queue.broker_name).message_id,
            origin_topic=queue.topic,
            max_reconsume_times=self._retries_max,
            broker_name=queue.broker_name,
            reason=delivery.reason,
        )
        try:
            address = broker_address(session, queue)
            code = RequestCode.CONSUMER_SEND_MSG_BACK
            expect_success(await session.call(address, code, header))
        except ClientError as error:
            logger.info("event=message_not_taken_back queue=%s reason=%r", queue, str(error))
            return False
        return True


def missing_topic_interval(missing: int) -> float:
    """Return the seconds between two look-ups of that many missing topics."""
    return max(MISSING_TOPIC_INTERVAL, missing / MISSING_TOPIC_RATE)


def _subscribe(subscriptions: Mapping[str, str | SqlFilter]) -> dict[str, SubscriptionData]:
    given: object = subscriptions
    if not isinstance(given, Mapping) or not given:
        raise ConfigurationError(
            "subscriptions", given, 'a mapping of topics to filters, such as {"orders": "*"}'
        )
    version = wall_clock_ms()
    found: dict[str, SubscriptionData] = {}
    for topic, expression in subscriptions.items():
        if not is_topic(topic):
            raise ConfigurationError("subscriptions", topic, f"a topic: {topic_error(topic)}")
        if isinstance(expression, SqlFilter):
            found[topic] = subscription_data(topic, expression.expression, SQL92, version)
            continue
        if not isinstance(expression, str):
            raise ConfigurationError("subscriptions", expression, f"text, {FILTER_EXPECTED}")
        wanted = normalise_filter(topic, expression)
        found[topic] = subscription_data(topic, wanted, sub_version=version)
    return found


async def _gather(works: Iterable[Coroutine[object, object, None]]) -> None:
    """Await all coroutines, and only then raise the first error, so that none keeps running."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
