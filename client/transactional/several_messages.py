"""Several messages in one transaction: their halves are stored by one request, all or none.

The first one leads: by it the transaction is named, checked and decided. Only a halfmq broker can
do this, and one broker has to hold all of them, since no decision can span two logs.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from typing import Final

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.framing import FRAME_SIZE_MAX
from halfmq.remoting.transaction_bodies import (
    GROUP_MESSAGES_MAX,
    PreparedMessage,
    decode_prepared_results,
    encode_entries,
)
from halfmq.remoting.transaction_headers import PrepareTransactionRequestHeader

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
from ..net.encoding import Draft
from ..net.refusals import refusal
from ..net.retry import ROUTE_IS_OLD, final_error, may_try_again
from ..net.routes import Route
from ..net.session import Session, wall_clock_ms

logger = logging.getLogger(__name__)

BODY_SIZE_MAX: Final = FRAME_SIZE_MAX - 4096
"""Bytes of all messages of a transaction, with properties: a frame less room for its header."""


def check_messages(messages: Message | Sequence[Message]) -> tuple[Message, ...]:
    """The messages of one transaction.

    Raises:
        InvalidMessageError: None at all, too many, or something else.
    """
    if isinstance(messages, Message):
        return (messages,)
    given: object = messages  # whatever a program without types has handed over
    if not isinstance(given, Sequence) or not all(isinstance(one, Message) for one in given):
        raise InvalidMessageError(f"{given!r:.80} is neither a Message nor a list of them")
    if not 1 <= len(messages) <= GROUP_MESSAGES_MAX:
        raise InvalidMessageError(
            f"{len(messages)} messages in one transaction, expected 1 to {GROUP_MESSAGES_MAX}"
        )
    return tuple(messages)


def check_supported(messages: Sequence[Message], *, halfmq: bool) -> None:
    """Raise ConfigurationError for what an official broker cannot do."""
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


async def prepare_several(
    session: Session,
    config: ClientConfig,
    group: str,
    drafts: Sequence[Draft],
    failures: list[ClientError],
) -> list[SendResult]:
    """Store the half messages, the leader's first, and say where each is.

    Tried again under the same ids like any send, which a halfmq broker recognises. ``failures`` is
    filled with what went wrong on the way, also when it ends well.

    Raises:
        ConfigurationError: No single broker serves all the topics.
        MessageTooLargeError: Together they do not fit into one request.
        ClientError: As :meth:`Producer.send`.
    """
    topics = [draft.message.topic for draft in drafts]
    deadline = session.clock() + config.send_timeout
    code = RequestCode.PREPARE_TRANSACTION
    broker_name: str | None = None
    while True:
        try:
            queues, address = await _choose(session, topics, deadline, failures, broker_name)
            broker_name = queues[0].broker_name
            header = PrepareTransactionRequestHeader(producer_group=group, broker_name=broker_name)
            body = _encoded(drafts, queues)
            seconds = deadline - session.clock()
            answer = await session.call(address, code, header, body, seconds=seconds)
            return _results(answer, drafts, queues, address)
        except ClientError as error:
            failures.append(error)
        if not await may_try_again(failures, config, session.clock, deadline):
            raise final_error(failures, code, config.send_timeout)
        failure = failures[-1]
        logger.info("event=send_again topics=%s reason=%s", ",".join(topics), failure)
        if isinstance(failure, BrokerRefusedError) and failure.code in ROUTE_IS_OLD:
            for topic in topics:
                session.routes.forget(topic)


async def _choose(
    session: Session,
    topics: Sequence[str],
    deadline: float,
    failures: Sequence[ClientError],
    avoid_broker: str | None,
) -> tuple[list[MessageQueue], str]:
    """A queue for each message, all on one broker, and that broker's address."""
    known = session.routes.known
    routes = [known(topic) or await session.route(topic, deadline, failures) for topic in topics]
    queues = choose_queues(routes, avoid_broker)
    return queues, routes[0].addresses[queues[0].broker_name]


def choose_queues(routes: Sequence[Route], avoid_broker: str | None = None) -> list[MessageQueue]:
    """The next queue of each route, all on one broker: another than ``avoid_broker`` if possible.

    Raises:
        ConfigurationError: No single broker serves all the topics.
    """
    shared = set.intersection(
        *({queue.broker_name for queue in route.publish_queues} for route in routes)
    )
    if not shared:
        topics = ", ".join(route.topic for route in routes)
        raise ConfigurationError("messages", topics, "topics that one broker serves all of")
    if len(shared) > 1:
        shared.discard(avoid_broker or "")
    first = _next_queue(routes[0], shared)
    return [first, *(_next_queue(route, {first.broker_name}) for route in routes[1:])]


def _next_queue(route: Route, broker_names: Container[str]) -> MessageQueue:
    queue = route.next_queue()
    while queue.broker_name not in broker_names:  # they come in turn, and some of them fit
        queue = route.next_queue()
    return queue


def _encoded(drafts: Sequence[Draft], queues: Sequence[MessageQueue]) -> bytes:
    born_timestamp = wall_clock_ms()
    body = encode_entries(
        [
            PreparedMessage(
                queue.topic,
                queue.queue_id,
                draft.message.flag,
                draft.sys_flag,
                born_timestamp,
                draft.properties,
                draft.body,
            )
            for draft, queue in zip(drafts, queues, strict=True)
        ]
    )
    if len(body) > BODY_SIZE_MAX:
        raise MessageTooLargeError("transaction", len(body), BODY_SIZE_MAX)
    return body


def _results(
    answer: RemotingCommand,
    drafts: Sequence[Draft],
    queues: Sequence[MessageQueue],
    address: str,
) -> list[SendResult]:
    if answer.code != ResponseCode.SUCCESS:
        raise refusal(answer)
    try:
        stored = decode_prepared_results(answer.body)
    except ProtocolError as error:
        raise BadAnswerError(address, str(error)) from error
    if len(stored) != len(drafts):
        raise BadAnswerError(address, f"{len(stored)} places for {len(drafts)} messages")
    return [
        SendResult(
            draft.unique_key,
            queue._replace(queue_id=one.queue_id),
            one.queue_offset,
            one.message_id,
            transaction_id=drafts[0].unique_key,
        )
        for draft, queue, one in zip(drafts, queues, stored, strict=True)
    ]
