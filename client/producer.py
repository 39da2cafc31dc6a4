"""Producer: send messages, one by one or in batches.

A send goes to one queue and returns once the broker has stored the message; on a halfmq broker that
means on disk. If an attempt fails with a retriable error (the broker is unreachable, closes the
connection, is busy), the same message is retried with the same id after a short delay, on another
broker if there is one, until ``send_timeout`` has passed. So a broker's restart costs latency and
raises no error. If an answer was lost, a message may be stored twice; consumers deduplicate by
``message_id``. ``ClientConfig(send_attempts_max=1)`` never sends twice.

Order: messages that are sent one after the other with the same ``order_key`` go to the same queue
and are stored in that order. An ordered message is never sent to another queue, and is not retried
if the failed attempt may have stored it: the copy could be stored after its successor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, Generic, Unpack

from halfmq.remoting.bodies import HeartbeatData, ProducerData
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import (
    RecallMessageRequestHeader,
    RecallMessageResponseHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from halfmq.remoting.recall_handle import parse_recall_handle
from halfmq.store.format.flags import TRANSACTION_MASK
from halfmq.store.format.topics import DEFAULT_TOPIC

from .arguments import check_kind, check_optional_text, check_seconds, check_text
from .codecs import Codec
from .config import ConnectionOptions
from .errors import (
    BrokerRefusedError,
    ClientError,
    ConfigurationError,
    InvalidMessageError,
    ReplyTimeoutError,
    RouteNotFoundError,
)
from .message import Message, MessageQueue, ReceivedMessage, SendResult, SendStatus, V
from .net.base_client import BaseClient
from .net.connection import ServerRequestHandler
from .net.message_encoding import EncodedMessage, encode_message, encode_message_batch, join_units
from .net.response_errors import error_from_response
from .net.retry import STALE_ROUTE_CODES, final_error, wait_before_retry
from .net.routes import Route
from .net.session import Session, typed, wall_clock_ms
from .net.telemetry import SEND, sending
from .producing.batching import Batcher, CollectedBatch
from .producing.replies import AwaitedReplies

logger = logging.getLogger(__name__)

STATUSES: Final = {int(status): status for status in SendStatus}
"""Response codes with which the message is stored."""


class Producer(BaseClient, Generic[V]):
    """Sends messages for a producer group.

    ::

        async with Producer("orders-producer") as producer:
            result = await producer.send(Message("orders", b"hello", tags="created"))

    Any number of tasks of one event loop may share a producer. A closed one can be started again,
    on another event loop too, as an application's is with each of its tests.
    """

    _runs_again = True

    def __init__(
        self,
        group: str,
        *,
        codec: Codec[V] | None = None,
        **connection: Unpack[ConnectionOptions],
    ) -> None:
        """Create a member of a producer group.

        Args:
            group: One name for all producers with the same purpose, such as ``orders-producer``.
            codec: Encodes the values of :meth:`message`.
            connection: Addresses, credentials, TLS and settings.

        Raises:
            ConfigurationError: An argument cannot be used; says which.
        """
        super().__init__(group, **connection)
        if codec is not None:
            check_kind("codec", codec, Codec)
        self._codec = codec
        self._batcher: Batcher | None = None
        self._replies = AwaitedReplies()

    def message(self, topic: str, value: V, **fields: Any) -> Message:
        """Return a message whose body is ``value`` as the codec encodes it, for any kind of send.

        ``fields`` are all others of :class:`Message`.

        Raises:
            InvalidMessageError: The codec cannot encode the value, or a field is wrong.
            ConfigurationError: The producer has no codec.
        """
        if self._codec is None:
            raise ConfigurationError("codec", None, "a codec of halfmq.client.codecs")
        try:
            body = self._codec.encode(value)
        except Exception as error:
            raise InvalidMessageError(f"{value!r:.200} is not encoded: {error}") from error
        return Message(topic, body, **fields)

    async def send(
        self,
        message: Message,
        *,
        order_key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 -- of all attempts
    ) -> SendResult:
        """Send a message and return where it was stored.

        Args:
            message: The message.
            order_key: Messages with the same key go to one queue, in the order of their sends.
            timeout: Seconds for all attempts together; None: ``config.send_timeout``. With it the
                message is sent at once, also if ``config.linger`` collects others.

        Raises:
            ConfigurationError: ``order_key`` or ``timeout`` cannot be used; nothing was sent.
            MessageTooLargeError: Body or properties are above their limit.
            RouteNotFoundError: No broker serves the topic, and none would create it.
            AccessDeniedError: This client may not send to the topic, or its key is unknown.
            BrokerRefusedError: The broker answered with an error code, also on the last attempt.
            ConnectError: No broker could be reached within ``send_timeout``.
            ConnectionLostError: An answer was lost; the message may be stored nevertheless.
            SendTimeoutError: No answer within ``send_timeout``; it may be stored nevertheless.
        """
        session = self._session
        _check_message(message, order_key, timeout)
        with sending(self.telemetry, SEND, [message]) as (traced,):
            key = session.new_key()
            if self._batcher is not None and timeout is None and self._batcher.takes(traced):
                return await self._batcher.add(traced, key, order_key)
            encoded = encode_message(traced, key, self.config)
            code = RequestCode.SEND_MESSAGE_V2
            return await self._transmit(session, code, encoded, order_key, [], timeout)

    async def send_batch(
        self,
        messages: Sequence[Message],
        *,
        order_key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 -- of all attempts
    ) -> SendResult:
        """Send messages of one topic to one queue in one request; all are stored or none.

        The result's ``message_id`` has their ids joined by ``,``. A batch is limited to the size of
        a single message (``message_size_max``).

        Raises:
            InvalidMessageError: The messages do not fit into one batch.
            ClientError: As :meth:`send`.
        """
        session = self._session
        given: object = messages
        if isinstance(given, str | bytes | Message) or not isinstance(given, Sequence):
            raise InvalidMessageError(f"messages is {given!r:.200}, expected a list of Messages")
        for message in messages:
            _check_message(message, order_key, timeout)
        with sending(self.telemetry, SEND, messages) as traced:
            keys = [session.new_key() for _ in traced]
            encoded = encode_message_batch(traced, keys, self.config)
            code = RequestCode.SEND_BATCH_MESSAGE
            return await self._transmit(session, code, encoded, order_key, [], timeout)

    async def send_oneway(self, message: Message, *, order_key: str | None = None) -> None:
        """Send a message without waiting for an answer; it may be lost without an error.

        Raises:
            ClientError: It could not be sent within ``send_timeout``.
        """
        session = self._session
        _check_message(message, order_key)
        with sending(self.telemetry, SEND, [message]) as (traced,):
            encoded = encode_message(traced, session.new_key(), self.config)
        topic, clock = message.topic, session.clock
        deadline = clock() + self.config.send_timeout
        failures: list[ClientError] = []
        while True:
            try:
                route = session.routes.cached(topic) or await session.route(
                    topic, deadline, failures
                )
                queue = choose_queue(route, order_key)
                address = route.addresses[queue.broker_name]
                connection = session.brokers.get_open(address)
                if connection is None:
                    connection = await session.brokers.get(address, deadline - clock())
                await connection.wait_writable(RequestCode.SEND_MESSAGE_V2, deadline - clock())
                header = self._header(encoded, queue, batch=False)
                connection.send_one_way(RequestCode.SEND_MESSAGE_V2, header, encoded.body)
            except ClientError as error:
                failures.append(error)
            else:
                return
            if not await wait_before_retry(failures, self.config, clock, deadline):
                raise failures[-1]
            self._after_failure(session, failures[-1], topic)

    async def request(
        self,
        message: Message,
        *,
        order_key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 -- of the request and its reply
    ) -> ReceivedMessage:
        """Send a message and return the reply of a consumer, which calls ``message.reply``.

        Consumers of other clients of RocketMQ reply as well.

        Args:
            message: The request.
            order_key: As of :meth:`send`.
            timeout: Seconds until the reply must be here; None: ``config.request_timeout``.

        Raises:
            ReplyTimeoutError: The message is stored, but no reply came in time.
            ClientError: As :meth:`send`.
        """
        session = self._session
        _check_message(message, order_key, timeout)
        seconds = timeout or self.config.request_timeout
        with sending(self.telemetry, SEND, [message]) as (traced,):
            encoded = encode_message(traced, session.new_key(), self.config)
            code, deadline = RequestCode.SEND_MESSAGE_V2, session.clock() + seconds
            with self._replies.awaiting(encoded, session.client_id, seconds) as (request, reply):
                await self._transmit(session, code, request, order_key, [], seconds)
                await asyncio.wait([reply], timeout=deadline - session.clock())
                if not reply.done():
                    raise ReplyTimeoutError(message.topic, encoded.unique_key, seconds)
                return reply.result()

    async def recall(self, handle: str) -> str:
        """Keep a message from being delivered at its time, and return its id.

        ``handle`` is ``result.recall_handle`` of a message that was sent with ``deliver_after`` or
        ``deliver_at``. Afterwards nobody gets the message.

        Raises:
            ConfigurationError: This is no handle.
            BrokerRefusedError: ILLEGAL_OPERATION (604): the message has been delivered already.
            ClientError: As :meth:`send`; the message may be recalled nevertheless.
        """
        check_text("handle", handle, "recall_handle of a SendResult")
        try:
            named = parse_recall_handle(handle)
        except ValueError as error:
            raise ConfigurationError("handle", handle, "recall_handle of a SendResult") from error
        session, failures = self._session, list[ClientError]()
        clock = session.clock
        deadline = clock() + self.config.send_timeout
        route = await session.route(named.topic, deadline, failures)
        address = route.addresses.get(named.broker_name)
        if address is None:
            raise RouteNotFoundError(named.topic)
        header = RecallMessageRequestHeader(
            topic=named.topic, recall_handle=handle, producer_group=self.group
        )
        answer = await session.call(address, RequestCode.RECALL_MESSAGE, header)
        return typed(answer, RecallMessageResponseHeader, address).msg_id

    async def close(self) -> None:
        """Send what lingers, unregister from the brokers and disconnect; safe to call twice."""
        if self._batcher is not None and not self._is_inherited():
            await self._batcher.flush()
        await super().close()

    # -- for sub-classes

    async def _start_session(self, session: Session) -> None:
        await super()._start_session(session)
        self._begin_batches()

    def _begin_batches(self) -> None:
        if self.config.linger is not None:
            self._batcher = Batcher(self.config, self.config.linger, self._send_collected)

    async def _send_collected(self, batch: CollectedBatch, order_key: str | None) -> SendResult:
        first = batch.messages[0]
        if len(batch.messages) == 1:
            code = RequestCode.SEND_MESSAGE_V2
            encoded = encode_message(first, batch.ids[0], self.config)
        else:
            code = RequestCode.SEND_BATCH_MESSAGE
            encoded = join_units(first, batch.ids, batch.units)
        return await self._transmit(self._session, code, encoded, order_key, [])

    def _new_session(self) -> Session:
        unregister_fields = {"producer_group": self.group}
        return Session(self.config, self._make_heartbeat, self._handlers(), unregister_fields)

    def _handlers(self) -> dict[int, ServerRequestHandler]:
        return {RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: self._replies.on_reply}

    def _make_heartbeat(self, client_id: str) -> HeartbeatData:
        groups = (ProducerData(group_name=self.group),)
        return HeartbeatData(client_id=client_id, producer_data_set=groups)

    async def _transmit(
        self,
        session: Session,
        code: int,
        encoded: EncodedMessage,
        order_key: str | None,
        failures: list[ClientError],
        timeout: float | None = None,  # noqa: ASYNC109 -- of all attempts
    ) -> SendResult:
        """Send a message until it is stored, the timeout passes, or a retry cannot help.

        ``failures`` collects the errors of all attempts, also if the last one succeeds.
        """
        clock, seconds = session.clock, timeout or self.config.send_timeout
        deadline = clock() + seconds
        topic = encoded.message.topic
        broker_name: str | None = None
        while True:
            try:
                route = session.routes.cached(topic) or await session.route(
                    topic, deadline, failures
                )
                queue = choose_queue(route, order_key, avoid_broker=broker_name)
                broker_name = queue.broker_name
                address = route.addresses[broker_name]
                connection = session.brokers.get_open(address)
                if connection is None:
                    connection = await session.brokers.get(address, deadline - clock())
                header = self._header(encoded, queue, batch=code == RequestCode.SEND_BATCH_MESSAGE)
                answer = await connection.request(
                    code, header, encoded.body, seconds=deadline - clock()
                )
                status = STATUSES.get(answer.code)
                if status is None:
                    raise error_from_response(answer)
                return send_result(answer, status, encoded.unique_key, queue, address)
            except ClientError as error:
                failures.append(error)
            # A half message takes its place in its queue when it is committed, so that a retry of
            # its prepare changes no order.
            ordered = order_key is not None and not encoded.sys_flag & TRANSACTION_MASK
            if not await wait_before_retry(failures, self.config, clock, deadline, ordered=ordered):
                raise final_error(failures, code, seconds)
            self._after_failure(session, failures[-1], topic)

    def _after_failure(self, session: Session, failure: ClientError, topic: str) -> None:
        logger.info("event=send_again topic=%s reason=%r", topic, str(failure))
        if isinstance(failure, BrokerRefusedError) and failure.code in STALE_ROUTE_CODES:
            session.routes.forget(topic)

    def _header(
        self, encoded: EncodedMessage, queue: MessageQueue, *, batch: bool
    ) -> SendMessageRequestHeaderV2:
        return SendMessageRequestHeaderV2(
            producer_group=self.group,
            topic=queue.topic,
            default_topic=DEFAULT_TOPIC,
            default_topic_queue_nums=self.config.default_topic_queues,
            queue_id=queue.queue_id,
            sys_flag=encoded.sys_flag,
            born_timestamp=wall_clock_ms(),
            flag=encoded.message.flag,
            properties=encoded.properties,
            batch=batch,
            broker_name=queue.broker_name,
        )


def _check_message(message: object, order_key: object, timeout: object = None) -> None:
    if not isinstance(message, Message):
        raise InvalidMessageError(f"message is {message!r:.200}, expected a Message")
    if order_key is not None:
        check_optional_text("order_key", order_key)
    if timeout is not None:
        check_seconds("timeout", timeout)


def choose_queue(
    route: Route, order_key: str | None, avoid_broker: str | None = None
) -> MessageQueue:
    """Return the queue of an order key, or the next one round-robin, avoiding ``avoid_broker``."""
    return route.next_queue(avoid_broker) if order_key is None else route.queue_of(order_key)


def send_result(
    answer: RemotingCommand, status: SendStatus, unique_key: str, queue: MessageQueue, address: str
) -> SendResult:
    """Convert the answer to a stored message to a ``SendResult``.

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
        stored.recall_handle,
    )
