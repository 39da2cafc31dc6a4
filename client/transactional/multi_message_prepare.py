"""Prepare a transaction with several messages: one request stores all half messages or none.

The first message is the leader: it identifies the transaction in checks and decisions. Only a
halfmq broker supports this, and one broker must store all messages, because a decision cannot span
two logs.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from typing import Final

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FRAME_SIZE_MAX
from halfmq.remoting.own_requests import (
    GROUP_MESSAGES_MAX,
    PreparedMessage,
    TransactionsRequestHeader,
    decode_prepared_results,
    encode_entries,
)

from ..config import ClientConfig
from ..errors import (
    BadAnswerError,
    BrokerRefusedError,
    ClientError,
    ConfigurationError,
    InvalidMessageError,
    MessageTooLargeError,
)
from ..message import Message, MessageQueue, SendResult
from ..net.message_encoding import EncodedMessage
from ..net.response_errors import answer_of, expect_success
from ..net.retry import STALE_ROUTE_CODES, final_error, wait_before_retry
from ..net.routes import Route
from ..net.session import Session, wall_clock_ms

logger = logging.getLogger(__name__)

BODY_SIZE_MAX: Final = FRAME_SIZE_MAX - 4096
"""Bytes of all messages of a transaction, with properties: a frame minus room for its header."""


def check_messages(messages: Message | Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages of one transaction as a tuple.

    Raises:
        InvalidMessageError: No message, too many, or a value of another type.
    """
    if isinstance(messages, Message):
        return (messages,)
    given: object = messages  # a program without type checks may pass anything
    if not isinstance(given, Sequence) or not all(isinstance(one, Message) for one in given):
        raise InvalidMessageError(f"{given!r:.80} is neither a Message nor a list of them")
    if not 1 <= len(messages) <= GROUP_MESSAGES_MAX:
        raise InvalidMessageError(
            f"{len(messages)} messages in one transaction, expected 1 to {GROUP_MESSAGES_MAX}"
        )
    return tuple(messages)


def check_supported(messages: Sequence[Message], *, halfmq: bool) -> None:
    """Raise ConfigurationError if the messages need a halfmq broker and this is an official one."""
    if halfmq:
        return
    if len(messages) > 1:
        raise ConfigurationError(
            "messages", len(messages), "one: only halfmq brokers take several in a transaction"
        )
    (message,) = messages
    for name, value in (
        ("deliver_after", message.deliver_after),
        ("deliver_at", message.deliver_at),
    ):
        if value is not None:
            raise ConfigurationError(
                name, value, "None: only halfmq brokers delay a message from its commit on"
            )


async def prepare_messages(
    session: Session,
    config: ClientConfig,
    group: str,
    encoded_messages: Sequence[EncodedMessage],
    order_keys: Sequence[str | None],
    failures: list[ClientError],
) -> list[SendResult]:
    """Store the half messages, the leader's first, and return where each is stored.

    Retried with the same ids like any send; a halfmq broker deduplicates them. ``failures``
    collects the errors of all attempts, also if the last one succeeds.

    Raises:
        ConfigurationError: No single broker serves all the topics.
        MessageTooLargeError: Together they do not fit into one request.
        ClientError: As :meth:`Producer.send`.
    """
    topics = [encoded.message.topic for encoded in encoded_messages]
    deadline = session.clock() + config.send_timeout
    code = RequestCode.PREPARE_TRANSACTION
    broker_name: str | None = None
    while True:
        try:
            queues, address = await _choose(
                session, topics, order_keys, deadline, failures, broker_name
            )
            broker_name = queues[0].broker_name
            header = TransactionsRequestHeader(producer_group=group, broker_name=broker_name)
            body = _encoded(encoded_messages, queues)
            seconds = deadline - session.clock()
            answer = await session.call(address, code, header, body, seconds=seconds)
            return _results(answer, encoded_messages, queues, address)
        except ClientError as error:
            failures.append(error)
        if not await wait_before_retry(failures, config, session.clock, deadline):
            raise final_error(failures, code, config.send_timeout)
        failure = failures[-1]
        logger.info("event=send_again topics=%s reason=%r", ",".join(topics), str(failure))
        if isinstance(failure, BrokerRefusedError) and failure.code in STALE_ROUTE_CODES:
            for topic in topics:
                session.routes.forget(topic)


async def _choose(
    session: Session,
    topics: Sequence[str],
    order_keys: Sequence[str | None],
    deadline: float,
    failures: Sequence[ClientError],
    avoid_broker: str | None,
) -> tuple[list[MessageQueue], str]:
    """Choose a queue for each message, all on one broker; return them and its address."""
    known = session.routes.cached
    routes = [known(topic) or await session.route(topic, deadline, failures) for topic in topics]
    queues = choose_queues(routes, order_keys, avoid_broker)
    return queues, routes[0].addresses[queues[0].broker_name]


def choose_queues(
    routes: Sequence[Route], order_keys: Sequence[str | None], avoid_broker: str | None = None
) -> list[MessageQueue]:
    """Choose a queue of each route, all on one broker, if possible not ``avoid_broker``.

    An order key has its queue, as for every other message; the other messages get the next ones.

    Raises:
        ConfigurationError: No single broker serves all the topics, or has the queues of all keys.
    """
    ordered = [
        None if key is None else route.queue_of(key)
        for route, key in zip(routes, order_keys, strict=True)
    ]
    shared = set.intersection(
        *(
            {queue.broker_name for queue in (route.publish_queues if own is None else [own])}
            for route, own in zip(routes, ordered, strict=True)
        )
    )
    if not shared:
        topics = ", ".join(route.topic for route in routes)
        keys = ", with the queues of their order keys" if any(ordered) else ""
        raise ConfigurationError("messages", topics, f"topics that one broker serves all of{keys}")
    if len(shared) > 1:
        shared.discard(avoid_broker or "")
    broker_name: str | None = None
    queues: list[MessageQueue] = []
    for route, own in zip(routes, ordered, strict=True):
        queue = own or _next_queue(route, {broker_name} if broker_name else shared)
        broker_name = queue.broker_name
        queues.append(queue)
    return queues


def _next_queue(route: Route, broker_names: Container[str]) -> MessageQueue:
    queue = route.next_queue()
    while queue.broker_name not in broker_names:  # round-robin reaches one of these brokers
        queue = route.next_queue()
    return queue


def _encoded(encoded_messages: Sequence[EncodedMessage], queues: Sequence[MessageQueue]) -> bytes:
    born_timestamp = wall_clock_ms()
    body = encode_entries(
        [
            PreparedMessage(
                queue.topic,
                queue.queue_id,
                encoded.message.flag,
                encoded.sys_flag,
                born_timestamp,
                encoded.properties,
                encoded.body,
            )
            for encoded, queue in zip(encoded_messages, queues, strict=True)
        ]
    )
    if len(body) > BODY_SIZE_MAX:
        raise MessageTooLargeError("transaction", len(body), BODY_SIZE_MAX)
    return body


def _results(
    answer: RemotingCommand,
    encoded_messages: Sequence[EncodedMessage],
    queues: Sequence[MessageQueue],
    address: str,
) -> list[SendResult]:
    expect_success(answer)
    with answer_of(address):
        stored = decode_prepared_results(answer.body)
    if len(stored) != len(encoded_messages):
        raise BadAnswerError(address, f"{len(stored)} results for {len(encoded_messages)} messages")
    return [
        SendResult(
            encoded.unique_key,
            queue._replace(queue_id=one.queue_id),
            one.queue_offset,
            one.message_id,
            transaction_id=encoded_messages[0].unique_key,
        )
        for encoded, queue, one in zip(encoded_messages, queues, stored, strict=True)
    ]
