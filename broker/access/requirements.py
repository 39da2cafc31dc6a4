"""Request code → what its sender must be allowed to do. Every code that is served has a row.

``()`` means: a valid signature and no permission, as for routes. A row is a function of the typed
header and the body. Where the resource is known only when a record has been read (a decision names
an offset, not a topic), the row is ``()`` and says so: the handler asks ``Subject.require``.

Rows follow RocketMQ 5.3 (``DefaultAuthorizationContextBuilder`` and the ``RocketMQAction`` of each
header) except where that is too lax: settings, groups, configuration and lists of connections need
rights of their own, a retry topic belongs to its group whoever asks, and the broker's internal
topics belong to the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

from halfmq.remoting.bodies import decode_heartbeat, decode_lock_batch, decode_subscription
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.transactions import decode_prepared_messages
from halfmq.store.format.topics import (
    CLIENTS_MAY_NOT_SEND,
    RETRY_PREFIX,
)

from .rules import Action, Kind, Requirement, Resource

PUB, SUB = Action.PUB, Action.SUB
CREATE, UPDATE, DELETE, GET, LIST = (
    Action.CREATE,
    Action.UPDATE,
    Action.DELETE,
    Action.GET,
    Action.LIST,
)

Row: TypeAlias = Callable[[Any, bytes], Sequence[Requirement]]
"""Typed header and body of one request → all that it needs."""

ANY_CLUSTER: Final = "*"
"""Stands for this broker's own cluster, whose name is a setting."""


@lru_cache(maxsize=4096)  # topics are few, and to make one takes as long as to meet it
def topic(name: str, *actions: Action) -> Requirement:
    """Need one of these actions on a topic.

    A retry topic belongs to its group, and what a consumer does there is SUB; the broker's own
    topics hold messages of all others and belong to the cluster.
    """
    if name.startswith(RETRY_PREFIX):
        as_group = tuple(SUB if action is PUB else action for action in actions)
        return Requirement(Resource(Kind.GROUP, name[len(RETRY_PREFIX) :]), as_group)
    if name in CLIENTS_MAY_NOT_SEND:
        return cluster(GET if PUB not in actions else UPDATE)
    return Requirement(Resource(Kind.TOPIC, name), actions)


@lru_cache(maxsize=4096)
def group(name: str, *actions: Action) -> Requirement:
    """Need one of these actions on a group."""
    return Requirement(Resource(Kind.GROUP, name.removeprefix(RETRY_PREFIX)), actions)


def cluster(*actions: Action) -> Requirement:
    """Need one of these actions on the broker as a whole."""
    return Requirement(Resource(Kind.CLUSTER, ANY_CLUSTER), actions)


def _signature(_header: Any, _body: bytes) -> Sequence[Requirement]:
    return ()


def _cluster(*actions: Action) -> Row:
    needed = (cluster(*actions),)
    return lambda _header, _body: needed


def _topic(*actions: Action) -> Row:
    return lambda header, _body: (topic(header.topic, *actions),)


def _group(field: str, *actions: Action) -> Row:
    return lambda header, _body: (group(getattr(header, field), *actions),)


def _group_and_topic(field: str, *actions: Action) -> Row:
    def row(header: Any, _body: bytes) -> Sequence[Requirement]:
        return topic(header.topic, *actions), group(getattr(header, field), *actions)

    return row


def _consumer_group(header: Any, _body: bytes) -> Sequence[Requirement]:
    return (group(header.consumer_group, SUB),) if header.consumer_group else ()


def _heartbeat(_header: Any, body: bytes) -> Sequence[Requirement]:
    return tuple(_of_consumers(body))


def _of_consumers(body: bytes) -> Iterator[Requirement]:
    for consumer in decode_heartbeat(body).consumer_data_set:
        yield group(consumer.group_name, SUB)
        for subscription in consumer.subscription_data_set:
            yield topic(subscription.topic, SUB)


def _locks(_header: Any, body: bytes) -> Sequence[Requirement]:
    data = decode_lock_batch(body)
    topics = {queue.topic for queue in data.mq_set}
    return group(data.consumer_group, SUB), *(topic(name, SUB) for name in sorted(topics))


def _subscription_check(_header: Any, body: bytes) -> Sequence[Requirement]:
    _client_id, name, subscription = decode_subscription(body)
    return group(name, SUB), topic(subscription.topic, SUB)


def _prepare(_header: Any, body: bytes) -> Sequence[Requirement]:
    names = {message.topic for message in decode_prepared_messages(body)}
    return tuple(topic(name, PUB) for name in sorted(names))


def _transactions_of(header: Any, _body: bytes) -> Sequence[Requirement]:
    if header.producer_group:  # of its own group, whose name the user has a right on
        return (group(header.producer_group, PUB, SUB, GET),)
    return (cluster(GET),)


REQUIREMENTS: Final[Mapping[int, Row]] = {
    # -- messages
    RequestCode.SEND_MESSAGE: _topic(PUB),
    RequestCode.SEND_MESSAGE_V2: _topic(PUB),
    RequestCode.SEND_BATCH_MESSAGE: _topic(PUB),
    RequestCode.PULL_MESSAGE: _group_and_topic("consumer_group", SUB),
    RequestCode.LITE_PULL_MESSAGE: _group_and_topic("consumer_group", SUB),
    RequestCode.CONSUMER_SEND_MSG_BACK: _group("group", SUB),  # and SUB on the record's topic
    RequestCode.QUERY_MESSAGE: _topic(SUB, GET),
    RequestCode.VIEW_MESSAGE_BY_ID: _signature,  # and GET or SUB on the record's topic
    # -- transactions
    RequestCode.END_TRANSACTION: _signature,  # and PUB on the half's real topic
    RequestCode.END_TRANSACTIONS: _signature,  # likewise for each
    RequestCode.PREPARE_TRANSACTION: _prepare,
    RequestCode.QUERY_TRANSACTIONS: _transactions_of,
    RequestCode.DECIDE_TRANSACTION: _cluster(UPDATE),
    RequestCode.RESUME_CHECK_HALF_MESSAGE: _cluster(UPDATE),
    # -- clients
    RequestCode.HEART_BEAT: _heartbeat,
    RequestCode.UNREGISTER_CLIENT: _consumer_group,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: _group("consumer_group", SUB, GET),
    RequestCode.CHECK_CLIENT_CONFIG: _subscription_check,
    RequestCode.LOCK_BATCH_MQ: _locks,
    RequestCode.UNLOCK_BATCH_MQ: _locks,
    # -- offsets
    RequestCode.QUERY_CONSUMER_OFFSET: _group_and_topic("consumer_group", SUB, GET),
    RequestCode.UPDATE_CONSUMER_OFFSET: _group_and_topic("consumer_group", SUB, UPDATE),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _topic(PUB, SUB, GET),
    RequestCode.GET_MAX_OFFSET: _topic(PUB, SUB, GET),
    RequestCode.GET_MIN_OFFSET: _topic(PUB, SUB, GET),
    RequestCode.GET_EARLIEST_MSG_STORETIME: _topic(PUB, SUB, GET),
    # -- routes
    RequestCode.GET_ROUTEINFO_BY_TOPIC: _signature,
    RequestCode.GET_BROKER_CLUSTER_INFO: _signature,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _cluster(GET, LIST),
    # -- access
    RequestCode.AUTH_CREATE_USER: _cluster(UPDATE),
    RequestCode.AUTH_UPDATE_USER: _cluster(UPDATE),
    RequestCode.AUTH_DELETE_USER: _cluster(UPDATE),
    RequestCode.AUTH_GET_USER: _cluster(GET),
    RequestCode.AUTH_LIST_USER: _cluster(GET),
    RequestCode.AUTH_CREATE_ACL: _cluster(UPDATE),
    RequestCode.AUTH_UPDATE_ACL: _cluster(UPDATE),
    RequestCode.AUTH_DELETE_ACL: _cluster(UPDATE),
    RequestCode.AUTH_GET_ACL: _cluster(GET),
    RequestCode.AUTH_LIST_ACL: _cluster(GET),
    RequestCode.UPDATE_AND_CREATE_ACL_CONFIG: _cluster(UPDATE),
    RequestCode.DELETE_ACL_CONFIG: _cluster(UPDATE),
    RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: _cluster(UPDATE),
    RequestCode.GET_BROKER_CLUSTER_ACL_INFO: _cluster(GET),
    # -- the broker
    RequestCode.GET_BROKER_RUNTIME_INFO: _cluster(GET),
    RequestCode.DELETE_EXPIRED_COMMITLOG: _cluster(UPDATE),
}


def requirements_of(code: int, header: object, body: bytes) -> Sequence[Requirement] | None:
    """Return what a request needs; None for a code without a row, which nobody may use.

    Raises:
        RemotingError: The body cannot be understood.
    """
    row = REQUIREMENTS.get(code)
    return None if row is None else row(header, body)
