"""Producer: sends messages, one by one or in batches, and tells when they are stored.

A send goes to one queue and is answered when the broker has stored the message; on a halfmq broker
that means on disk. When an attempt fails in a way that another may mend (the broker cannot be
reached, hangs up, is busy), the same message, with the same id, is sent again after a short pause,
to another broker if there is one, until ``send_timeout`` is over. So a broker's restart costs
latency and no error. A message may be stored twice when an answer was lost; consumers can tell by
its ``message_id``. ``ClientConfig(send_attempts_max=1)`` never sends twice.

Order: messages sent one after the other with the same ``order_key`` go to the same queue and are
stored in that order. An ordered message never moves to another queue, and is not sent again when
the first attempt may have worked, since the copy could land behind its successor.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from typing import Final

from halfmq.remoting.bodies import HeartbeatData, ProducerData
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import SendMessageRequestHeaderV2, SendMessageResponseHeader
from halfmq.store.format.ids import java_string_hash
from halfmq.store.format.topics import DEFAULT_TOPIC

from .arguments import check_optional_text
from .config import ClientConfig
from .credentials import CredentialsSource
from .errors import (
    BrokerRefusedError,
    ClientError,
    InvalidMessageError,
)
from .message import Message, MessageQueue, SendResult, SendStatus
from .net.connection import ServerRequestHandler
from .net.encoding import Draft, draft_batch, draft_message
from .net.lifecycle import Client
from .net.refusals import refusal
from .net.retry import ROUTE_IS_OLD, final_error, may_try_again
from .net.routes import Route
from .net.session import Session, typed, wall_clock_ms

logger = logging.getLogger(__name__)

STATUSES: Final = {int(status): status for status in SendStatus}
"""By response code: the message is stored."""


class Producer(Client):
    """Sends messages for a producer group.

    ::

        async with Producer("orders-producer") as producer:
            result = await producer.send(Message("orders", b"hello", tags="created"))

    One producer serves any number of tasks of one event loop.
    """

    def __init__(
        self,
        group: str,
        *,
        namesrv: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        credentials: CredentialsSource | None = None,
        tls: bool | ssl.SSLContext | None = None,
        config: ClientConfig | None = None,
    ) -> None:
        """Take part in a producer group; brokers know producers by its name.

        Args:
            group: One name for all producers of one purpose, as ``orders-producer``.
            namesrv: ``host:port``, several with ``;`` or ``,``; wins over the one in ``config``.
            access_key: Signs every request; wins over ``config``, as do the next three.
            secret_key: The secret of ``access_key``.
            credentials: A function that gives both, asked again when they are refused.
            tls: Whether connections are encrypted; an ``ssl.SSLContext`` says whom to trust.
            config: Everything else.

        Raises:
            ConfigurationError: An argument cannot be used; says which.
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

    async def send(self, message: Message, *, order_key: str | None = None) -> SendResult:
        """Store a message and say where.

        Raises:
            MessageTooLargeError: Body or properties are above their limit.
            RouteNotFoundError: Nobody serves the topic, and nobody would create it.
            AccessDeniedError: This client may not send to the topic, or nobody knows its key.
            BrokerRefusedError: The broker said no, and the last attempt did not change that.
            ConnectError: No broker could be reached within ``send_timeout``.
            ConnectionLostError: An answer was lost; the message may be stored all the same.
            SendTimeoutError: No answer within ``send_timeout``; it may be stored all the same.
        """
        session = self._session
        _check_message(message, order_key)
        draft = draft_message(message, session.new_key(), self.config)
        return await self._transmit(session, RequestCode.SEND_MESSAGE_V2, draft, order_key, [])

    async def send_batch(
        self, messages: Sequence[Message], *, order_key: str | None = None
    ) -> SendResult:
        """Store messages of one topic in one queue, all or none, in one request.

        The result's ``message_id`` joins their ids with ``,``. A batch may hold as many bytes as a
        single message (``message_size_max``).

        Raises:
            InvalidMessageError: The messages do not fit into one batch.
            ClientError: As :meth:`send`.
        """
        session = self._session
        given: object = messages
        if isinstance(given, str | bytes | Message) or not isinstance(given, Sequence):
            raise InvalidMessageError(f"messages is {given!r:.200}, expected a list of Messages")
        for message in messages:
            _check_message(message, order_key)
        keys = [session.new_key() for _ in messages]
        draft = draft_batch(messages, keys, self.config)
        return await self._transmit(session, RequestCode.SEND_BATCH_MESSAGE, draft, order_key, [])

    async def send_oneway(self, message: Message, *, order_key: str | None = None) -> None:
        """Send without asking what became of it; a refusal or a crash loses it unseen.

        Raises:
            ClientError: It could not even be sent within ``send_timeout``.
        """
        session = self._session
        _check_message(message, order_key)
        draft = draft_message(message, session.new_key(), self.config)
        topic, clock = message.topic, session.clock
        deadline = clock() + self.config.send_timeout
        failures: list[ClientError] = []
        while True:
            try:
                route = session.routes.known(topic) or await session.route(
                    topic, deadline, failures
                )
                queue = choose_queue(route, order_key)
                address = route.addresses[queue.broker_name]
                connection = session.brokers.live(address)
                if connection is None:
                    connection = await session.brokers.get(address, deadline - clock())
                await connection.drained(RequestCode.SEND_MESSAGE_V2, deadline - clock())
                header = self._header(draft, queue, batch=False)
                connection.send_one_way(RequestCode.SEND_MESSAGE_V2, header, draft.body)
            except ClientError as error:
                failures.append(error)
            else:
                return
            if not await may_try_again(failures, self.config, clock, deadline):
                raise failures[-1]
            self._note_attempt(session, failures[-1], topic)

    # -- for sub-classes

    def _new_session(self) -> Session:
        farewell = {"producer_group": self.group}
        return Session(self.config, self._announce, self._handlers(), farewell)

    def _handlers(self) -> dict[int, ServerRequestHandler]:
        return {}

    def _announce(self, client_id: str) -> HeartbeatData:
        groups = (ProducerData(group_name=self.group),)
        return HeartbeatData(client_id=client_id, producer_data_set=groups)

    async def _transmit(
        self,
        session: Session,
        code: int,
        draft: Draft,
        order_key: str | None,
        failures: list[ClientError],
    ) -> SendResult:
        """Send a draft until it is stored, time runs out, or trying is pointless.

        ``failures`` is filled with what went wrong on the way, also when it ends well.
        """
        clock = session.clock
        deadline = clock() + self.config.send_timeout
        topic = draft.message.topic
        broker_name: str | None = None
        while True:
            try:
                route = session.routes.known(topic) or await session.route(
                    topic, deadline, failures
                )
                queue = choose_queue(route, order_key, avoid_broker=broker_name)
                broker_name = queue.broker_name
                address = route.addresses[broker_name]
                connection = session.brokers.live(address)
                if connection is None:
                    connection = await session.brokers.get(address, deadline - clock())
                header = self._header(draft, queue, batch=code == RequestCode.SEND_BATCH_MESSAGE)
                answer = await connection.request(
                    code, header, draft.body, seconds=deadline - clock()
                )
                status = STATUSES.get(answer.code)
                if status is None:
                    raise refusal(answer)
                return send_result(answer, status, draft.unique_key, queue, address)
            except ClientError as error:
                failures.append(error)
            ordered = order_key is not None
            if not await may_try_again(failures, self.config, clock, deadline, ordered=ordered):
                raise final_error(failures, code, self.config.send_timeout)
            self._note_attempt(session, failures[-1], topic)

    def _note_attempt(self, session: Session, failure: ClientError, topic: str) -> None:
        logger.info("event=send_again topic=%s reason=%s", topic, failure)
        if isinstance(failure, BrokerRefusedError) and failure.code in ROUTE_IS_OLD:
            session.routes.forget(topic)

    def _header(
        self, draft: Draft, queue: MessageQueue, *, batch: bool
    ) -> SendMessageRequestHeaderV2:
        return SendMessageRequestHeaderV2(
            producer_group=self.group,
            topic=queue.topic,
            default_topic=DEFAULT_TOPIC,
            default_topic_queue_nums=self.config.default_topic_queues,
            queue_id=queue.queue_id,
            sys_flag=draft.sys_flag,
            born_timestamp=wall_clock_ms(),
            flag=draft.message.flag,
            properties=draft.properties,
            batch=batch,
            broker_name=queue.broker_name,
        )


def _check_message(message: object, order_key: object) -> None:
    if not isinstance(message, Message):
        raise InvalidMessageError(f"message is {message!r:.200}, expected a Message")
    if order_key is not None:
        check_optional_text("order_key", order_key)


def choose_queue(
    route: Route, order_key: str | None, avoid_broker: str | None = None
) -> MessageQueue:
    """The queue of an order key, or the next in turn on another broker than ``avoid_broker``.

    The key's queue is the one that RocketMQ's ``SelectMessageQueueByHash`` takes, so that Java and
    Python producers of one topic agree. It changes when the topic's number of queues does.
    """
    if order_key is None:
        return route.next_queue(avoid_broker)
    return route.publish_queues[abs(java_string_hash(order_key)) % len(route.publish_queues)]


def send_result(
    answer: RemotingCommand, status: SendStatus, unique_key: str, queue: MessageQueue, address: str
) -> SendResult:
    """The answer to a stored message as users see it.

    Raises:
        BadAnswerError: Fields are missing.
    """
    stored = typed(answer, SendMessageResponseHeader, address)
    if stored.queue_id != queue.queue_id:
        queue = queue._replace(queue_id=stored.queue_id)
    return SendResult(
        unique_key,
        queue,
        stored.queue_offset,
        stored.msg_id,
        status,
        stored.transaction_id,
        stored.msg_region,
    )
