"""Request code → the permissions that its sender needs.

A `RequestCode` without a row of its own needs UPDATE on the cluster, as changes of the broker do.

Codes without a handler have a row too: so a code gets its rule before its handler, and a sender
without permission gets a refusal instead of "request type not supported".

A row is a function of the header and the body; the header is typed where
``header_tables.REQUEST_HEADERS`` has a class for the code. ``()`` means that a valid signature is
enough, as for routes. If the resource is known only after a record is read (a decision names an
offset, not a topic), the row is ``()`` with a comment, and the handler calls
``access_checks.require``.

Rows follow RocketMQ 5.3 (``DefaultAuthorizationContextBuilder`` and the ``RocketMQAction`` of each
header), except that RocketMQ requires nothing where a header has no such annotation. Here settings,
groups, configuration and lists need rights of their own, a retry topic belongs to its group for all
senders, and the broker's internal topics belong to the cluster.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec

from halfmq.remoting.bodies import (
    decode_assignment_query,
    decode_heartbeat,
    decode_lock_batch,
    decode_subscription,
)
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.errors import BodyError
from halfmq.remoting.ext_fields import Name
from halfmq.remoting.own_requests import decode_prepared_messages
from halfmq.remoting.request_sizes import NAME_LENGTH_MAX
from halfmq.store.format.topics import RETRY_PREFIX, is_broker_only

from .rules import Action, Requirement, Resource, ResourceKind

PUB, SUB = Action.PUB, Action.SUB
CREATE, UPDATE, DELETE, GET, LIST = (
    Action.CREATE,
    Action.UPDATE,
    Action.DELETE,
    Action.GET,
    Action.LIST,
)

Row: TypeAlias = Callable[[Any, bytes], Sequence[Requirement]]
"""Typed header and body of one request → all its requirements."""

ANY_CLUSTER: Final = "*"
"""Stands for the cluster of this broker, whose name is a setting."""

_CUT: Final = NAME_LENGTH_MAX + 1
"""Characters of a name that are compared. A header's typed names are no longer than one less; of
others, such as those in a list, the rest names nothing that exists. The caches below keep names."""


@lru_cache(maxsize=4096)  # topics are few, and creating one takes as long as checking it
def topic(name: str, *actions: Action) -> Requirement:
    """Require one of these actions on a topic.

    A retry topic belongs to its group, and a consumer needs only SUB to send to it. The broker's
    own topics hold messages of all others and belong to the cluster.
    """
    if name.startswith(RETRY_PREFIX):
        as_group = tuple(SUB if action is PUB else action for action in actions)
        return Requirement(Resource(ResourceKind.GROUP, name[len(RETRY_PREFIX) :]), as_group)
    if is_broker_only(name):
        return cluster(GET if PUB not in actions else UPDATE)
    return Requirement(Resource(ResourceKind.TOPIC, name), actions)


@lru_cache(maxsize=4096)
def group(name: str, *actions: Action) -> Requirement:
    """Require one of these actions on a group."""
    return Requirement(Resource(ResourceKind.GROUP, name.removeprefix(RETRY_PREFIX)), actions)


def cluster(*actions: Action) -> Requirement:
    """Require one of these actions on the broker as a whole."""
    return Requirement(Resource(ResourceKind.CLUSTER, ANY_CLUSTER), actions)


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
    if header.producer_group:  # the transactions of one group, on which a right is enough
        return (group(header.producer_group, PUB, SUB, GET),)
    return (cluster(GET),)


def _consumers_of(header: Any, _body: bytes) -> Sequence[Requirement]:
    if header.consumer_group:
        return (group(header.consumer_group, SUB, GET),)
    return (cluster(GET),)


def _group_and_optional_topic(field: str, *actions: Action) -> Row:
    def row(header: Any, _body: bytes) -> Sequence[Requirement]:
        of_group = group(getattr(header, field), *actions)
        return (of_group, topic(header.topic, *actions)) if header.topic else (of_group,)

    return row


def _consume_stats(header: Any, _body: bytes) -> Sequence[Requirement]:
    names = [header.topic, *(header.topic_list or "").split(";")]
    return group(header.consumer_group, GET), *(topic(name[:_CUT], GET) for name in names if name)


def _clone_offsets(header: Any, _body: bytes) -> Sequence[Requirement]:
    needed = (group(header.src_group, GET), group(header.dest_group, UPDATE))
    return (*needed, topic(header.topic, UPDATE)) if header.topic else needed


def _consume_queue(header: Any, _body: bytes) -> Sequence[Requirement]:
    of_topic = topic(header.topic, GET)
    return (of_topic, group(header.consumer_group, GET)) if header.consumer_group else (of_topic,)


def _correction_offsets(header: Any, _body: bytes) -> Sequence[Requirement]:
    groups = [header.compare_group, *(header.filter_groups or "").split(",")]
    return topic(header.topic, GET), *(group(name[:_CUT], GET) for name in groups if name)


# -- rows of codes whose headers have no class yet, or whose names are in the body


def _popped(header: Any, _body: bytes) -> Sequence[Requirement]:
    """Require what popping the message needed: its retry topic belongs to group and topic."""
    name = header.topic
    for separator in "_+":
        name = name.removeprefix(f"{RETRY_PREFIX}{header.consumer_group}{separator}")
    return topic(name, SUB), group(header.consumer_group, SUB)


class _Named(msgspec.Struct, rename="camel", gc=False):
    """The names in a JSON body; other fields are ignored here."""

    topic: Name = ""
    topic_name: Name = ""
    consumer_group: Name = ""
    group_name: Name = ""


class _BatchAck(msgspec.Struct, gc=False):
    """One of the acknowledgements in a body. Source: ``BatchAck``."""

    topic: Name = msgspec.field(default="", name="t")
    consumer_group: Name = msgspec.field(default="", name="c")


class _Listed(msgspec.Struct, rename="camel", gc=False):
    """Lists that a JSON body may have."""

    topic_config_list: tuple[_Named, ...] = ()
    group_config_list: tuple[_Named, ...] = ()
    acks: tuple[_BatchAck, ...] = ()


_decode_named: Final = msgspec.json.Decoder(_Named).decode
_decode_listed: Final = msgspec.json.Decoder(_Listed).decode


def _from_body(
    decode: Callable[[bytes], Any], needed: Callable[[Any], Sequence[Requirement]]
) -> Row:
    def row(_header: Any, body: bytes) -> Sequence[Requirement]:
        try:
            return needed(decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BodyError(f"not the body of this request: {error}") from error

    return row


def _each_created(
    resource: Callable[[str, Action], Requirement], names: Sequence[str]
) -> Sequence[Requirement]:
    """Require CREATE on each; for an empty list on the cluster, so that a right is needed."""
    return [resource(name, CREATE) for name in names] or (cluster(CREATE),)


def _acknowledged(listed: _Listed) -> Sequence[Requirement]:
    topics, groups = {ack.topic for ack in listed.acks}, {ack.consumer_group for ack in listed.acks}
    return (
        *(topic(name, SUB) for name in sorted(topics)),
        *(group(name, SUB) for name in sorted(groups)),
    )


REQUIREMENTS: Final[Mapping[int, Row]] = {
    **dict.fromkeys(RequestCode, _cluster(UPDATE)),
    # -- messages
    RequestCode.SEND_MESSAGE: _topic(PUB),
    RequestCode.SEND_MESSAGE_V2: _topic(PUB),
    RequestCode.SEND_BATCH_MESSAGE: _topic(PUB),
    RequestCode.PULL_MESSAGE: _group_and_topic("consumer_group", SUB),
    RequestCode.LITE_PULL_MESSAGE: _group_and_topic("consumer_group", SUB),
    RequestCode.CONSUMER_SEND_MSG_BACK: _group("group", SUB),  # and SUB on the record's topic
    RequestCode.QUERY_MESSAGE: _topic(SUB, GET),
    RequestCode.VIEW_MESSAGE_BY_ID: _signature,  # and GET or SUB on the record's topic
    RequestCode.RECALL_MESSAGE: _topic(PUB),
    RequestCode.QUERY_DELAYED: _cluster(GET),
    RequestCode.SEND_REPLY_MESSAGE: _topic(PUB),  # the topic of all replies
    RequestCode.SEND_REPLY_MESSAGE_V2: _topic(PUB),
    RequestCode.POP_MESSAGE: _group_and_topic("consumer_group", SUB),
    RequestCode.PEEK_MESSAGE: _group_and_topic("consumer_group", SUB),
    RequestCode.ACK_MESSAGE: _popped,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: _popped,
    RequestCode.NOTIFICATION: _group_and_topic("consumer_group", SUB),
    RequestCode.POLLING_INFO: _group_and_topic("consumer_group", SUB, GET),
    RequestCode.BATCH_ACK_MESSAGE: _from_body(_decode_listed, _acknowledged),
    # -- transactions
    RequestCode.END_TRANSACTION: _signature,  # and PUB on the half's real topic
    RequestCode.END_TRANSACTIONS: _signature,  # likewise for each
    RequestCode.PREPARE_TRANSACTION: _prepare,
    RequestCode.QUERY_TRANSACTIONS: _transactions_of,
    # -- clients
    RequestCode.HEART_BEAT: _heartbeat,
    RequestCode.UNREGISTER_CLIENT: _consumer_group,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: _group("consumer_group", SUB, GET),
    RequestCode.QUERY_CONSUMERS: _consumers_of,
    RequestCode.CHECK_CLIENT_CONFIG: _subscription_check,
    RequestCode.LOCK_BATCH_MQ: _locks,
    RequestCode.UNLOCK_BATCH_MQ: _locks,
    RequestCode.GET_CONSUMER_CONNECTION_LIST: _group("consumer_group", GET),
    RequestCode.GET_PRODUCER_CONNECTION_LIST: _cluster(GET),
    RequestCode.GET_ALL_PRODUCER_INFO: _cluster(GET),
    RequestCode.GET_CONSUMER_RUNNING_INFO: _group("consumer_group", GET),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: _group_and_optional_topic("consumer_group", SUB),
    RequestCode.QUERY_ASSIGNMENT: _from_body(
        _decode_named, lambda it: (topic(it.topic, SUB), group(it.consumer_group, SUB))
    ),
    # -- offsets
    RequestCode.QUERY_CONSUMER_OFFSET: _group_and_topic("consumer_group", SUB, GET),
    RequestCode.UPDATE_CONSUMER_OFFSET: _group_and_topic("consumer_group", SUB, UPDATE),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _topic(PUB, SUB, GET),
    RequestCode.GET_MAX_OFFSET: _topic(PUB, SUB, GET),
    RequestCode.GET_MIN_OFFSET: _topic(PUB, SUB, GET),
    RequestCode.GET_EARLIEST_MSG_STORETIME: _topic(PUB, SUB, GET),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: _group_and_topic("group", UPDATE),
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _group_and_topic("group", GET),
    RequestCode.CLONE_GROUP_OFFSET: _clone_offsets,
    RequestCode.GET_CONSUME_STATS: _consume_stats,
    RequestCode.QUERY_CONSUME_TIME_SPAN: _group_and_topic("group", GET),
    RequestCode.QUERY_CORRECTION_OFFSET: _correction_offsets,
    RequestCode.QUERY_CONSUME_QUEUE: _consume_queue,
    RequestCode.GET_ALL_CONSUMER_OFFSET: _cluster(GET),
    RequestCode.GET_ALL_DELAY_OFFSET: _cluster(GET),
    # -- topics and groups
    RequestCode.UPDATE_AND_CREATE_TOPIC: _topic(CREATE),
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: _from_body(
        _decode_listed,
        lambda it: _each_created(topic, [one.topic_name for one in it.topic_config_list]),
    ),
    RequestCode.DELETE_TOPIC_IN_BROKER: _topic(DELETE),
    RequestCode.GET_TOPIC_CONFIG: _topic(GET),
    RequestCode.GET_TOPIC_STATS_INFO: _topic(GET),
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: _topic(GET),
    RequestCode.GET_ALL_TOPIC_CONFIG: _cluster(GET, LIST),
    RequestCode.GET_TOPICS_BY_CLUSTER: _cluster(GET, LIST),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: _cluster(GET, LIST),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _cluster(GET, LIST),
    RequestCode.GET_UNIT_TOPIC_LIST: _cluster(GET, LIST),
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: _cluster(GET, LIST),
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: _cluster(GET, LIST),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _from_body(
        _decode_named, lambda it: (group(it.group_name, CREATE),)
    ),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _from_body(
        _decode_listed,
        lambda it: _each_created(group, [one.group_name for one in it.group_config_list]),
    ),
    RequestCode.DELETE_SUBSCRIPTIONGROUP: _group("group_name", DELETE),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: _group("group", GET),
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _cluster(GET, LIST),
    RequestCode.QUERY_TOPICS_BY_CONSUMER: _group("group", GET),
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: _group_and_optional_topic("group", GET),
    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: _group_and_topic("group", UPDATE),
    RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: _cluster(GET, LIST),
    RequestCode.SET_MESSAGE_REQUEST_MODE: _from_body(
        _decode_named, lambda it: (topic(it.topic, UPDATE), group(it.consumer_group, UPDATE))
    ),
    # -- routes
    RequestCode.GET_ROUTEINFO_BY_TOPIC: _signature,
    RequestCode.GET_BROKER_CLUSTER_INFO: _signature,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _cluster(GET, LIST),
    RequestCode.GET_KV_CONFIG: _cluster(GET),
    RequestCode.GET_KVLIST_BY_NAMESPACE: _cluster(GET),
    RequestCode.GET_NAMESRV_CONFIG: _cluster(GET),
    # -- access
    RequestCode.AUTH_GET_USER: _cluster(GET),
    RequestCode.AUTH_LIST_USER: _cluster(GET),
    RequestCode.AUTH_GET_ACL: _cluster(GET),
    RequestCode.AUTH_LIST_ACL: _cluster(GET),
    RequestCode.GET_BROKER_CLUSTER_ACL_INFO: _cluster(GET),
    # -- the broker
    RequestCode.GET_BROKER_RUNTIME_INFO: _cluster(GET),
    RequestCode.GET_BROKER_CONFIG: _cluster(GET),
    RequestCode.VIEW_BROKER_STATS_DATA: _cluster(GET),
    RequestCode.GET_BROKER_CONSUME_STATS: _cluster(GET),
    # -- between brokers and name servers
    RequestCode.QUERY_DATA_VERSION: _cluster(GET),
    RequestCode.GET_BROKER_MEMBER_GROUP: _cluster(GET),
}

LOCAL_ONLY: Final = frozenset(
    {
        RequestCode.UPDATE_BROKER_CONFIG,
        RequestCode.UPDATE_NAMESRV_CONFIG,
        RequestCode.DELETE_EXPIRED_COMMITLOG,
        RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
        RequestCode.CLEAN_UNUSED_TOPIC,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.ADD_WRITE_PERM_OF_BROKER,
        RequestCode.DRAIN_BROKER,
    }
)
"""Without access control these are served only to senders on the broker's machine: they change or
delete what belongs to all."""

CLIENT_IDS: Final[Mapping[int, Callable[[Any, bytes], str]]] = {
    RequestCode.HEART_BEAT: lambda _header, body: decode_heartbeat(body).client_id,
    RequestCode.UNREGISTER_CLIENT: lambda header, _body: header.client_id,
    RequestCode.CHECK_CLIENT_CONFIG: lambda _header, body: decode_subscription(body)[0],
    RequestCode.LOCK_BATCH_MQ: lambda _header, body: decode_lock_batch(body).client_id,
    RequestCode.UNLOCK_BATCH_MQ: lambda _header, body: decode_lock_batch(body).client_id,
    RequestCode.QUERY_ASSIGNMENT: lambda _header, body: decode_assignment_query(body).client_id,
}
"""Request code → the client in whose name a request is made. While a connection of that client is
open, only its own principal may."""


def requirements_of(code: int, header: object, body: bytes) -> Sequence[Requirement] | None:
    """Return the requirements of a request; None for a code without a row, which has no handler.

    Raises:
        RemotingError: The body cannot be decoded.
    """
    row = REQUIREMENTS.get(code)
    return None if row is None else row(header, body)
