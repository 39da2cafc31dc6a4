"""Consumer: messages of a group, each to one of its members, until acked.

Members of a group share the queues of a topic out among themselves (``rebalance``); each pulls its
queues (``pulling``) into one buffer (``delivery``) from which the user's loop takes. Acks move the
group's offset, queue by queue, over what is finished without a gap (``window``); the offset is kept
at the broker and written there every ``offset_commit_interval``, when a queue is handed over, and
at close.

So every message is delivered at least once. It comes again when it was not acked in time, was
given back with ``retry``, or was acked after the last written offset and the process died; a queue
that moves to another member brings its unacked messages along. ``message_id`` tells duplicates.

Given-back messages come from a topic of the group's own, ``%RETRY%group``, which every member
consumes too; they show the topic they were first sent to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final, Self

from halfmq.remoting.bodies import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumeType,
    HeartbeatData,
    MessageModel,
    SubscriptionData,
    decode_consumer_list,
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
from .consuming.filters import normalised_filter
from .consuming.offsets import BrokerOffsets, LocalOffsets, OffsetStore, StartFrom, broker_address
from .consuming.pulling import QueuePuller
from .consuming.rebalance import average_share
from .consuming.window import QueueWindow
from .credentials import CredentialsSource
from .errors import (
    FILTER_EXPECTED,
    AccessDeniedError,
    BadAnswerError,
    BrokerRefusedError,
    ClientClosedError,
    ClientError,
    ConfigurationError,
    UnequalSubscriptionsError,
)
from .events import ConsumerEvent, TopicMissing, UnequalSubscriptions
from .message import MessageQueue, MessageView, is_topic, topic_error
from .net.connection import Connection
from .net.lifecycle import Client
from .net.refusals import refusal
from .net.routes import nearest_topics
from .net.session import Session, expect_success, typed, wall_clock_ms

logger = logging.getLogger(__name__)

REBALANCE_RETRY: Final = 1.0
"""Seconds to the next attempt when the queues of a topic could not be shared out."""
MISSING_TOPIC_INTERVAL: Final = 0.5
"""Seconds between two looks for a missing topic, so that its first message takes less than one."""
REMINDER_INTERVAL: Final = 55.0
"""Seconds that two warnings about unequal subscriptions are apart at least: they come with every
second heartbeat, once a minute."""
MISSING_TOPIC_RATE: Final = 20
"""Looks for missing topics in a second, at most; more than ten such topics wait longer."""
RETRIES_DEFAULT: Final = 16
"""RocketMQ's: after so many retries a message goes to the group's dead letters."""


class Consumer(Client):
    """Consumes topics for a group.

    ::

        async with Consumer("billing", {"orders": "created || paid"}) as consumer:
            async for message in consumer:
                print(message.body)
                await message.ack()

    Several tasks may take from one consumer. The loop ends when the consumer is closed, also from
    another task; cancelling it loses nothing, and it may be started again.
    """

    def __init__(
        self,
        group: str,
        subscriptions: Mapping[str, str],
        *,
        start_from: StartFrom = "last",
        ack_timeout: float | None = 60.0,
        retries_max: int = RETRIES_DEFAULT,
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
        """Subscribe a group to topics; every member of a group must subscribe to the same.

        While another member does not, messages are lost to the group, and ``on_event`` is called.

        Args:
            group: The consumer group.
            subscriptions: Topic to filter: tags as in ``"created || paid"``, or ``"*"`` for all
                messages.
            start_from: Where the group starts in a queue it has no offset for. With ``"last"``,
                RocketMQ's default, brokers still begin at the first message of a topic so young
                that nothing of it has been deleted or paged out, and a topic that is created
                while the consumer waits for it is read from its first message.
            ack_timeout: Seconds after which an unacked message is delivered again; None: never.
            retries_max: Deliveries after the first before the broker gives a message up and moves
                it to the topic ``%DLQ%group``.
            broadcasting: Every member gets all messages, keeps its own offsets, and has no retry
                topic: what it does not ack is delivered again only by itself.
            offsets_file: Where a broadcasting consumer keeps its offsets. Without it, it starts
                by ``start_from`` each time.
            on_event: Called with each ``TopicMissing`` and ``UnequalSubscriptions``, which are
                also warnings in the log. It runs on the event loop, so it must return at once.
            namesrv: ``host:port``, several with ``;`` or ``,``; wins over the one in ``config``.
            access_key: Signs every request; wins over ``config``, as do the next three.
            secret_key: The secret of ``access_key``.
            credentials: A function that gives both, asked again when they are refused.
            tls: Whether connections are encrypted; an ``ssl.SSLContext`` says whom to trust.
            config: Everything else.

        Raises:
            FilterError: A filter cannot be read; says at which character.
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
            else BrokerOffsets(group)
        )
        self._buffer: DeliveryBuffer | None = None
        self._pullers: dict[MessageQueue, tuple[QueuePuller, asyncio.Task[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._rebalance_wanted = asyncio.Event()
        self._missing: set[str] = set()  # topics without a route
        self._seen: set[str] = set()  # topics that had one, or that were reported missing
        self._new: set[str] = set()  # topics that did not exist when this consumer looked first
        self._complaint = ""
        self._unequal: dict[str, UnequalSubscriptions] = {}  # by broker
        self._refusals: dict[
            str | MessageQueue, BrokerRefusedError
        ] = {}  # by address, topic, queue
        self._reminder_due = 0.0  # on the loop's clock

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues this consumer reads now."""
        return sorted(self._pullers)

    async def receive(self, timeout: float | None = None) -> MessageView | None:  # noqa: ASYNC109
        """The next message; None when ``timeout`` seconds passed or the consumer was closed.

        Raises:
            ClientClosedError: The consumer was never started.
            UnequalSubscriptionsError: A broker has come to refuse this consumer.
            AccessDeniedError: This consumer may not consume any more.
        """
        if self._buffer is None:
            raise ClientClosedError(self._name)
        self._check_binding()
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        if timeout is None:
            return await self._buffer.take()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                return await self._buffer.take()
        return None

    async def commit(self) -> None:
        """Write the offsets of what is acked now, rather than within the next seconds.

        Raises:
            ClientError: A broker did not take an offset; the others were written.
        """
        session = self._session
        windows = [puller.window for puller, _ in self._pullers.values()]
        try:
            await _all(self._commit_window(session, window) for window in windows)
        finally:
            await self._offsets.flush()

    async def close(self) -> None:
        """End the loops, write the offsets, hand the queues over; safe to call twice."""
        if self._is_the_parents():
            return
        try:
            if self._buffer is not None:
                await self._buffer.close()
            await _cancel(self._tasks)
            if self._running is not None:
                await self._lose(self._running, list(self._pullers))
                await self._offsets.flush()
        finally:  # cancelled half-way, it still leaves nothing running
            for task in (*self._tasks, *(task for _, task in self._pullers.values())):
                task.cancel()
            await super().close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MessageView:
        message = await self.receive()
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
        check_count("retries_max", self._retries_max, range(INT32.stop))
        check_kind("broadcasting", self._broadcasting, bool)
        if self._on_event is not None:
            check_callable("on_event", self._on_event)
        if offsets_file is not None and not isinstance(offsets_file, str | os.PathLike):
            raise ConfigurationError("offsets_file", offsets_file, "a path")

    def _new_session(self) -> Session:
        def members_changed(_command: RemotingCommand, _connection: Connection) -> None:
            self._rebalance_wanted.set()

        handlers = {int(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED): members_changed}

        def heard(address: str, answer: RemotingCommand) -> None:
            self._heard(session.client_id, address, answer)

        farewell = {"consumer_group": self.group}
        session = Session(self.config, self._announce, handlers, farewell, heard)
        return session

    async def _start_session(self, session: Session) -> None:
        await session.start(topics=tuple(self._subscriptions))
        for refused in self._refusals.values():
            raise refused
        self._buffer = DeliveryBuffer(self.config, self._ack_timeout, self._send_back)
        self._tasks = [
            asyncio.create_task(self._rebalance_forever(session), name=f"rebalance {self.group}"),
            asyncio.create_task(self._commit_forever(session), name=f"commit {self.group}"),
        ]

    def _announce(self, client_id: str) -> HeartbeatData:
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

    # -- what brokers say about the group

    def _heard(self, client_id: str, address: str, answer: RemotingCommand) -> None:
        """Learn from the answer to a heartbeat whether another member subscribes differently."""
        self._refusals.pop(address, None)
        was_unequal = self._unequal.pop(address, None) is not None
        event = self._difference(client_id, address, answer)
        if answer.code != ResponseCode.SUCCESS and event is None:
            error = refusal(answer)
            if isinstance(error, AccessDeniedError):
                self._refusals[address] = error
        elif event is None:
            if was_unequal and not self._unequal:
                logger.info("event=subscriptions_equal group=%s", self.group)
        elif answer.code == ResponseCode.SUCCESS:
            self._unequal[address] = event
            now = asyncio.get_running_loop().time()
            if now >= self._reminder_due:
                self._reminder_due = now + REMINDER_INTERVAL
                self._tell(event)
        else:
            wishes = event.topic, event.filter, event.other_client_id, event.other_filter
            remark = answer.remark or str(event)
            self._refusals[address] = UnequalSubscriptionsError(answer.code, remark, *wishes)
        self._tell_refusals()

    def _note_access(self, what: MessageQueue | str, error: AccessDeniedError | None) -> None:
        """Learn that pulls of a queue, or shares of a topic, are refused, or no longer are."""
        if self._refusals.pop(what, None) is None and error is None:
            return
        if error is not None:
            self._refusals[what] = error
        self._tell_refusals()

    def _tell_refusals(self) -> None:
        if self._buffer is not None:
            self._buffer.fail(next(iter(self._refusals.values()), None))

    def _difference(
        self, client_id: str, address: str, answer: RemotingCommand
    ) -> UnequalSubscriptions | None:
        try:
            header = typed(answer, HeartbeatResponseHeader, address)
        except BadAnswerError as error:
            logger.debug("event=heartbeat_answer_unreadable reason=%s", error)
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

    # -- sharing queues

    async def _rebalance_forever(self, session: Session) -> None:
        while True:
            self._rebalance_wanted.clear()
            settled = True
            for topic in self._subscriptions:
                settled = await self._rebalance(session, topic) and settled
            for topic in sorted(self._missing - self._seen):
                await self._tell_missing(session, topic)
            await self._wait(
                session, self.config.rebalance_interval if settled else REBALANCE_RETRY
            )

    async def _wait(self, session: Session, seconds: float) -> None:
        """Wait until the queues should be shared out again; look for missing topics meanwhile."""
        clock = asyncio.get_running_loop().time
        due = clock() + seconds
        while (left := due - clock()) > 0:
            if self._missing:
                left = min(left, look_interval(len(self._missing)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._rebalance_wanted.wait()
                    return
            for topic in list(self._missing):
                if not await self._rebalance(session, topic):
                    due = min(due, clock() + REBALANCE_RETRY)

    async def _rebalance(self, session: Session, topic: str) -> bool:
        """Take our share of a topic, if it exists; False when it should be tried again soon."""
        held = {queue for queue in self._pullers if queue.topic == topic}
        try:
            share = await self._share(session, topic)
            if share is None:  # only a broker that is away forgets a topic that we hold
                if not held and not topic.startswith(RETRY_PREFIX):
                    self._missing.add(topic)
                self._note_access(topic, None)
                return True
            self._missing.discard(topic)
            self._seen.add(topic)
            await self._lose(session, sorted(held.difference(share)))
            await _all(self._gain(session, queue) for queue in share if queue not in held)
        except ClientError as error:
            level = logging.DEBUG if str(error) == self._complaint else logging.WARNING
            self._complaint = str(error)
            logger.log(level, "event=rebalance_failed topic=%s reason=%s", topic, error)
            self._note_access(topic, error if isinstance(error, AccessDeniedError) else None)
            return False
        self._note_access(topic, None)
        if held != set(share):
            logger.info("event=assigned topic=%s queues=%d before=%d", topic, len(share), len(held))
        return True

    async def _tell_missing(self, session: Session, topic: str) -> None:
        names = await session.routes.topic_names()
        if names:  # else the name server has just started, and the topic may be an old one
            self._new.add(topic)
        nearest = await asyncio.to_thread(nearest_topics, topic, names)
        self._seen.add(topic)
        self._tell(TopicMissing(self.group, topic, nearest))

    def _tell(self, event: ConsumerEvent) -> None:
        logger.warning("event=%s group=%s: %s", event.name, self.group, event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                logger.exception("event=user_function_failed function=%s", self._on_event)

    async def _share(self, session: Session, topic: str) -> list[MessageQueue] | None:
        """The queues of a topic that are ours; None when the topic does not exist."""
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
        return average_share(route.consume_queues, members, session.client_id)

    async def _gain(self, session: Session, queue: MessageQueue) -> None:
        """Begin to read a queue where the group is."""
        is_new = queue.topic in self._new and self._start_from == "last"
        otherwise: StartFrom = "first" if is_new else self._start_from
        start = await self._offsets.start_of(session, queue, otherwise)
        assert self._buffer is not None
        window = QueueWindow(queue, start.offset, start.stored)
        subscription = self._subscriptions[queue.topic]
        tell = partial(self._note_access, queue)
        puller = QueuePuller(session, self.group, subscription, window, self._buffer, tell)
        task = asyncio.create_task(puller.run(), name=f"pull {queue}")
        self._pullers[queue] = puller, task

    async def _lose(self, session: Session, queues: list[MessageQueue]) -> None:
        """Stop reading queues, and leave behind how far we got."""
        lost = [self._pullers.pop(queue) for queue in queues if queue in self._pullers]
        await _cancel([task for _, task in lost])
        for queue in queues:
            self._note_access(queue, None)
        await asyncio.gather(*(self._hand_over(session, puller.window) for puller, _ in lost))

    async def _hand_over(self, session: Session, window: QueueWindow) -> None:
        try:
            await self._commit_window(session, window)
        except ClientError as error:
            logger.warning("event=offset_not_written queue=%s reason=%s", window.queue, error)
        if self._buffer is not None:
            self._buffer.drop(window)

    # -- offsets

    async def _commit_forever(self, session: Session) -> None:
        while True:
            await asyncio.sleep(self.config.offset_commit_interval)
            try:
                await self.commit()
            except (ClientError, OSError) as error:
                if self._running is session:
                    logger.warning(
                        "event=offsets_not_written group=%s reason=%s", self.group, error
                    )

    async def _commit_window(self, session: Session, window: QueueWindow) -> None:
        offset = window.commit_offset
        if offset != window.committed:
            await self._offsets.commit(session, window.queue, offset)
            window.committed = offset

    # -- giving back

    async def _send_back(self, delivery: Delivery, delay_level: int) -> bool:
        """Ask the broker to deliver a message to the group again, later."""
        session, record, queue = self._running, delivery.record, delivery.window.queue
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
        )
        try:
            address = broker_address(session, queue)
            code = RequestCode.CONSUMER_SEND_MSG_BACK
            expect_success(await session.call(address, code, header))
        except ClientError as error:
            logger.info("event=message_not_taken_back queue=%s reason=%s", queue, error)
            return False
        return True


def look_interval(missing: int) -> float:
    """Seconds between two looks for that many missing topics."""
    return max(MISSING_TOPIC_INTERVAL, missing / MISSING_TOPIC_RATE)


def _subscribe(subscriptions: Mapping[str, str]) -> dict[str, SubscriptionData]:
    given: object = subscriptions
    if not isinstance(given, Mapping) or not given:
        raise ConfigurationError(
            "subscriptions", given, 'a mapping of topics to filters, such as {"orders": "*"}'
        )
    version = wall_clock_ms()
    made: dict[str, SubscriptionData] = {}
    for topic, expression in subscriptions.items():
        if not is_topic(topic):
            raise ConfigurationError("subscriptions", topic, f"a topic: {topic_error(topic)}")
        if not isinstance(expression, str):
            raise ConfigurationError("subscriptions", expression, f"text, {FILTER_EXPECTED}")
        wanted = normalised_filter(topic, expression)
        made[topic] = subscription_data(topic, wanted, sub_version=version)
    return made


async def _all(works: Iterable[Coroutine[object, object, None]]) -> None:
    """Do all of it, and only then raise the first failure: nothing is left under way."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
