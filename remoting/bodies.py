"""The JSON bodies of requests and answers: encoders, decoders and their structs.

Decoders accept what every official client writes, encoders write what every official client reads:
no white space, number keys quoted, object keys in fastjson's raw form (see ``fastjson``), absent
fields instead of null. A decoder raises ``BodyError`` for a body that it cannot read. The frame
around it is valid, so the broker answers with an error and keeps the connection open.

Source: RocketMQ ``remoting/protocol/body``, ``protocol/heartbeat``, ``protocol/route``,
``protocol/admin``; recorded frames of the Java, Go and C++ clients.
"""

from collections.abc import Iterable, Mapping
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec

from .errors import BodyError, SubscriptionError
from .ext_fields import Int32, Int64, Name
from .fastjson import convert, dump, object_keyed_map, parse
from .request_sizes import NAME_LENGTH_MAX

S = TypeVar("S")
E = TypeVar("E", bound=Enum)

TAG: Final = "TAG"
SQL92: Final = "SQL92"
SUBSCRIBE_ALL: Final = "*"
EXPRESSION_LENGTH_MAX: Final = 65_536
"""Characters of a filter; enough for a list of three thousand order numbers after IN."""


class _Body(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of the structs that are one JSON object on the wire."""


class ConsumeType(StrEnum):
    """How a consumer gets its messages. The C++ client sends the index in this list."""

    CONSUME_ACTIVELY = "CONSUME_ACTIVELY"  # pull
    CONSUME_PASSIVELY = "CONSUME_PASSIVELY"  # push
    CONSUME_POP = "CONSUME_POP"


class MessageModel(StrEnum):
    """Whether each member of a group gets all messages. Order as in ``ConsumeType``."""

    BROADCASTING = "BROADCASTING"
    CLUSTERING = "CLUSTERING"


class ConsumeFromWhere(StrEnum):
    """Where a group without offsets starts. Order as in ``ConsumeType``."""

    CONSUME_FROM_LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST = (
        "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST"
    )
    CONSUME_FROM_MIN_OFFSET = "CONSUME_FROM_MIN_OFFSET"
    CONSUME_FROM_MAX_OFFSET = "CONSUME_FROM_MAX_OFFSET"
    CONSUME_FROM_FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    CONSUME_FROM_TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class SubscriptionData(_Body, frozen=True, kw_only=True):
    """A consumer's subscription to one topic. Create it with :func:`subscription_data`."""

    class_filter_mode: bool = False
    code_set: frozenset[int] = frozenset()  # Java hash of each tag, signed 32 bits
    expression_type: str = TAG
    sub_string: str = SUBSCRIBE_ALL
    sub_version: Int64 = 0  # creation time in ms (Go: ns); larger is newer
    tags_set: frozenset[str] = frozenset()
    topic: str

    @property
    def codes(self) -> frozenset[int] | None:
        """Tag hashes of which a message must have one; None if it selects all messages."""
        return self.code_set or None


class ProducerData(_Body, frozen=True, kw_only=True):
    """A producer group of the client."""

    group_name: str


class ConsumerData(_Body, frozen=True, kw_only=True):
    """A consumer group of the client and its subscriptions."""

    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    consume_type: ConsumeType = ConsumeType.CONSUME_PASSIVELY
    group_name: str
    message_model: MessageModel = MessageModel.CLUSTERING
    subscription_data_set: tuple[SubscriptionData, ...] = ()
    unit_mode: bool = False


class HeartbeatData(_Body, frozen=True, kw_only=True):
    """Body of HEART_BEAT (34): all groups of one client."""

    client_id: str = msgspec.field(default="", name="clientID")
    consumer_data_set: tuple[ConsumerData, ...] = ()
    heartbeat_fingerprint: Int32 = 0
    producer_data_set: tuple[ProducerData, ...] = ()
    without_sub: bool = False


_TAG_CACHED_LENGTH_MAX: Final = 64
"""Characters of a tag up to which its hash is cached; others may have hundreds of thousands."""


def tag_code(tag: str) -> int:
    """Return Java's hash of a tag, which the broker stores as the message's tags code."""
    return _cached_code(tag) if len(tag) <= _TAG_CACHED_LENGTH_MAX else _code(tag)


def _code(tag: str) -> int:
    code = 0
    units = memoryview(tag.encode("utf-16-le", "surrogatepass")).cast("H")
    for unit in units:
        code = (code * 31 + unit) & 0xFFFFFFFF
    return code - (1 << 32) if code >= 1 << 31 else code


# Tags are few and recur in every heartbeat and pull.
_cached_code: Final = lru_cache(maxsize=4096)(_code)


def subscription_data(
    topic: str, expression: str | None, expression_type: str | None = None, sub_version: int = 0
) -> SubscriptionData:
    """Return the subscription for a filter expression.

    Raises:
        SubscriptionError: The expression names no tag ("||").
    """
    kind = expression_type or TAG
    if kind != TAG or not expression or expression == SUBSCRIBE_ALL:
        return SubscriptionData(
            topic=topic,
            sub_string=expression or SUBSCRIBE_ALL,
            sub_version=sub_version,
            expression_type=kind,
        )
    tags = frozenset(tag for part in expression.split("||") if (tag := part.strip()))
    if not tags:
        raise SubscriptionError(expression)
    return SubscriptionData(
        topic=topic,
        sub_string=expression,
        sub_version=sub_version,
        tags_set=tags,
        code_set=frozenset(tag_code(tag) for tag in tags),
    )


def encode_heartbeat(data: HeartbeatData) -> bytes:
    """Return the body of HEART_BEAT (34)."""
    return dump(data)


def decode_heartbeat(body: bytes) -> HeartbeatData:
    """Decode the body of HEART_BEAT (34) of any official client.

    Tag hashes are computed from the expression, because the C++ client sends wrong ones. As in the
    official broker, an unknown enum value becomes the default and an expression that names no tag
    subscribes to everything.

    Raises:
        BodyError: The body is not a heartbeat.
    """
    fields = _object(parse(body))
    return HeartbeatData(
        client_id=_name(fields, "clientID"),
        heartbeat_fingerprint=_integer(fields, "heartbeatFingerprint"),
        without_sub=_boolean(fields, "withoutSub"),
        producer_data_set=tuple(
            ProducerData(group_name=_name(producer, "groupName"))
            for producer in _objects(fields, "producerDataSet")
        ),
        consumer_data_set=tuple(map(_consumer, _objects(fields, "consumerDataSet"))),
    )


def decode_subscription(body: bytes) -> tuple[str, str, SubscriptionData]:
    """Decode client id, group and subscription of CHECK_CLIENT_CONFIG (46).

    Raises:
        BodyError: The body is not of this request.
    """
    fields = _object(parse(body))
    subscription = _object(fields.get("subscriptionData"))
    return _name(fields, "clientId"), _name(fields, "group"), _subscription(subscription)


def encode_subscription_check(client_id: str, group: str, data: SubscriptionData) -> bytes:
    """Return the body of CHECK_CLIENT_CONFIG (46)."""
    return dump({"clientId": client_id, "group": group, "subscriptionData": data})


def _consumer(fields: Mapping[str, Any]) -> ConsumerData:
    return ConsumerData(
        group_name=_name(fields, "groupName"),
        consume_type=_enum(fields, "consumeType", ConsumeType.CONSUME_PASSIVELY),
        message_model=_enum(fields, "messageModel", MessageModel.CLUSTERING),
        consume_from_where=_enum(
            fields, "consumeFromWhere", ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
        ),
        unit_mode=_boolean(fields, "unitMode"),
        subscription_data_set=tuple(map(_subscription, _objects(fields, "subscriptionDataSet"))),
    )


def _subscription(fields: Mapping[str, Any]) -> SubscriptionData:
    topic, expression = _name(fields, "topic"), _string(fields, "subString")
    kind, version = _name(fields, "expressionType"), _integer(fields, "subVersion")
    if len(expression) > EXPRESSION_LENGTH_MAX:
        raise BodyError(
            f"a filter has {len(expression)} characters, the limit is {EXPRESSION_LENGTH_MAX}"
        )
    try:
        return subscription_data(topic, expression, kind, version)
    except SubscriptionError:
        return SubscriptionData(topic=topic, sub_string=expression, sub_version=version)


class QueueKey(_Body, frozen=True, kw_only=True):
    """One queue of a topic on one broker: RocketMQ's ``MessageQueue``, hashable."""

    broker_name: Name
    queue_id: Int32
    topic: Name


class LockBatchBody(_Body, frozen=True, kw_only=True):
    """Body of LOCK_BATCH_MQ (41) and UNLOCK_BATCH_MQ (42): the queues to lock or unlock."""

    client_id: Name
    consumer_group: Name
    mq_set: tuple[QueueKey, ...] = ()
    only_this_broker: bool = False


def encode_lock_batch(data: LockBatchBody) -> bytes:
    """Return the body of LOCK_BATCH_MQ (41) or UNLOCK_BATCH_MQ (42)."""
    return dump(data)


def decode_lock_batch(body: bytes) -> LockBatchBody:
    """Decode the body of LOCK_BATCH_MQ (41) or UNLOCK_BATCH_MQ (42). Raises BodyError."""
    return convert(parse(body), LockBatchBody)


def encode_locked_queues(queues: Iterable[QueueKey]) -> bytes:
    """Return the body of the answer to 41: queues of the request that the client now holds."""
    return dump({"lockOKMQSet": list(queues)})


def decode_locked_queues(body: bytes) -> list[QueueKey]:
    """Decode the queues of an answer to LOCK_BATCH_MQ (41). Raises BodyError."""
    return convert(_object(parse(body)).get("lockOKMQSet") or [], list[QueueKey])


def encode_consumer_list(client_ids: Iterable[str]) -> bytes:
    """Return the body of the answer to GET_CONSUMER_LIST_BY_GROUP (38)."""
    return dump({"consumerIdList": list(client_ids)})


def decode_consumer_list(body: bytes) -> list[str]:
    """Decode the client ids of an answer to GET_CONSUMER_LIST_BY_GROUP (38). Raises BodyError."""
    return convert(_object(parse(body)).get("consumerIdList") or [], list[str])


class AssignmentQuery(_Body, frozen=True, kw_only=True):
    """Body of QUERY_ASSIGNMENT (400): a consumer asks which queues of a topic are its own."""

    client_id: Name
    consumer_group: Name
    message_model: MessageModel = MessageModel.CLUSTERING
    strategy_name: Name
    topic: Name


def decode_assignment_query(body: bytes) -> AssignmentQuery:
    """Decode the body of QUERY_ASSIGNMENT (400). Raises BodyError."""
    return convert(parse(body), AssignmentQuery)


def encode_assignments(queues: Iterable[QueueKey] | None, mode: str = "PULL") -> bytes:
    """Return the body of the answer to 400; None tells the client to keep what it has."""
    if queues is None:
        return dump({})
    assignments = [{"messageQueue": queue, "mode": mode} for queue in queues]
    return dump({"messageQueueAssignments": assignments})


class QueueData(_Body, frozen=True, kw_only=True):
    """How many queues of a topic one broker has, and their permissions."""

    broker_name: str
    perm: Int32  # 4 read, 2 write, 1 inherit
    read_queue_nums: Int32
    topic_sys_flag: Int32 = 0
    write_queue_nums: Int32


class BrokerData(_Body, frozen=True, kw_only=True):
    """One broker and its replicas."""

    broker_addrs: dict[int, str]  # broker id to "ip:port"; 0 is the master
    broker_name: str
    cluster: str = ""
    enable_acting_master: bool = False
    zone_name: str | None = None


class TopicRouteData(_Body, frozen=True, kw_only=True):
    """Body of the answer to GET_ROUTEINFO_BY_TOPIC (105)."""

    broker_datas: tuple[BrokerData, ...] = ()
    filter_server_table: dict[str, list[str]] = {}
    order_topic_conf: str | None = None
    queue_datas: tuple[QueueData, ...] = ()


class ClusterInfo(_Body, frozen=True, kw_only=True):
    """Body of the answer to GET_BROKER_CLUSTER_INFO (106)."""

    broker_addr_table: dict[str, BrokerData] = {}
    cluster_addr_table: dict[str, list[str]] = {}


def encode_route(route: TopicRouteData) -> bytes:
    """Return the body of an answer to 105, readable by every official client."""
    return dump(_without_nulls(route))


def decode_route(body: bytes) -> TopicRouteData:
    """Decode the route in an answer to 105, with broker ids quoted or bare. Raises BodyError."""
    fields = _object(parse(body))
    for queue in _objects(fields, "queueDatas"):
        if "topicSynFlag" in queue:  # its name before 4.9
            queue.setdefault("topicSysFlag", queue["topicSynFlag"])
    return convert(fields, TopicRouteData)


def encode_cluster_info(info: ClusterInfo) -> bytes:
    """Return the body of an answer to GET_BROKER_CLUSTER_INFO (106)."""
    return dump(_without_nulls(info))


def decode_cluster_info(body: bytes) -> ClusterInfo:
    """Decode the body of an answer to GET_BROKER_CLUSTER_INFO (106). Raises BodyError."""
    return convert(_object(parse(body)), ClusterInfo)


def encode_member_group(broker: BrokerData) -> bytes:
    """Return the body of an answer to GET_BROKER_MEMBER_GROUP (901)."""
    group = {
        "brokerAddrs": {str(number): text for number, text in broker.broker_addrs.items()},
        "brokerName": broker.broker_name,
        "cluster": broker.cluster,
    }
    return dump({"brokerMemberGroup": group})


def decode_member_group(body: bytes) -> dict[int, str]:
    """Return the addresses in an answer to GET_BROKER_MEMBER_GROUP (901), by broker id.

    Raises:
        BodyError: It is none.
    """
    group = _object(_object(parse(body)).get("brokerMemberGroup") or {})
    return convert(group.get("brokerAddrs") or {}, dict[int, str])


class TopicOffset(_Body, frozen=True, kw_only=True):
    """The offset range of one queue, in an answer to GET_TOPIC_STATS_INFO (202)."""

    last_update_timestamp: Int64  # ms
    max_offset: Int64
    min_offset: Int64


class OffsetWrapper(_Body, frozen=True, kw_only=True):
    """The progress of a group in one queue, in an answer to GET_CONSUME_STATS (208)."""

    broker_offset: Int64
    consumer_offset: Int64
    last_timestamp: Int64  # ms
    pull_offset: Int64 = 0  # absent before 5.0


def encode_offset_table(offsets: Mapping[QueueKey, int]) -> bytes:
    """Return the body of 220 to Java and Go clients and of the answer to 222."""
    return b'{"offsetTable":%b}' % object_keyed_map(offsets.items())


def encode_offset_list(offsets: Mapping[QueueKey, int]) -> bytes:
    """Return the body of 220 to C++ clients, which cannot read object keys."""
    items = [
        {"brokerName": q.broker_name, "queueId": q.queue_id, "topic": q.topic, "offset": offset}
        for q, offset in offsets.items()
    ]
    return dump({"offsetTable": items})


def decode_offset_table(body: bytes) -> dict[QueueKey, int]:
    """Decode the offsets of 220 or of an answer to 222, in any form. Raises BodyError."""
    table = _table(body).get("offsetTable") or {}
    if isinstance(table, list):
        return dict(map(_listed_offset, table))
    return _queue_keyed(table, Int64)


def encode_consumer_status(offsets: Mapping[QueueKey, int]) -> bytes:
    """Return the body of a client's answer to GET_CONSUMER_STATUS_FROM_CLIENT (221)."""
    return b'{"messageQueueTable":%b}' % object_keyed_map(offsets.items())


def decode_consumer_status(body: bytes) -> dict[QueueKey, int]:
    """Decode the offsets in a client's answer to 221. Raises BodyError."""
    return _queue_keyed(_table(body).get("messageQueueTable") or {}, Int64)


def encode_consumer_statuses(statuses: Mapping[str, Mapping[QueueKey, int]]) -> bytes:
    """Return the body of an answer to 223: the offsets of each client id."""
    clients = b",".join(
        b"%b:%b" % (dump(client_id), object_keyed_map(offsets.items()))
        for client_id, offsets in statuses.items()
    )
    return b'{"consumerTable":{%b},"messageQueueTable":{}}' % clients


def encode_topic_stats(
    offsets: Mapping[QueueKey, TopicOffset], topic_put_tps: float = 0.0
) -> bytes:
    """Return the body of an answer to GET_TOPIC_STATS_INFO (202)."""
    table = object_keyed_map(offsets.items())
    return b'{"offsetTable":%b,"topicPutTps":%b}' % (table, dump(topic_put_tps))


def decode_topic_stats(body: bytes) -> dict[QueueKey, TopicOffset]:
    """Decode the body of an answer to GET_TOPIC_STATS_INFO (202). Raises BodyError."""
    return _queue_keyed(_table(body).get("offsetTable") or {}, TopicOffset)


def decode_consume_stats(body: bytes) -> dict[QueueKey, OffsetWrapper]:
    """Decode the body of an answer to GET_CONSUME_STATS (208). Raises BodyError."""
    return _queue_keyed(_table(body).get("offsetTable") or {}, OffsetWrapper)


def encode_table(table: Mapping[str, str]) -> bytes:
    """Return ``{"table":{...}}``, the body of answers to 28, 103 and 219."""
    return dump({"table": dict(table)})


def decode_table(body: bytes) -> dict[str, str]:
    """Decode the body of an answer to 28, 103 or 219. Raises BodyError."""
    return convert(_object(parse(body)).get("table") or {}, dict[str, str])


def encode_topic_list(topics: Iterable[str], broker_addr: str | None = None) -> bytes:
    """Return the body of answers to 206, 224, 304, 305 and 311 to 313."""
    address = {} if broker_addr is None else {"brokerAddr": broker_addr}
    return dump(address | {"topicList": list(topics)})


def decode_topic_list(body: bytes) -> list[str]:
    """Decode the topics in an answer to 206, 224, 304, 305 or 311 to 313. Raises BodyError."""
    return convert(_object(parse(body)).get("topicList") or [], list[str])


def _table(body: bytes) -> dict[str, Any]:
    """Parse a table that the reader has asked for, of any size."""
    return _object(parse(body, relaxed_size_max=len(body)))


def _listed_offset(item: Any) -> tuple[QueueKey, int]:
    """Read the C++ form (an object with queue and offset) or the Go form (a pair of both)."""
    if isinstance(item, list) and len(item) == 2:
        queue, offset = item
    else:
        queue, offset = item, _object(item).get("offset")
    return convert(queue, QueueKey), convert(offset, int)


def _queue_keyed(table: Any, kind: Any) -> dict[QueueKey, Any]:
    """Read a map whose keys are queues as JSON text, as ``parse`` returns them."""
    return {
        convert(parse(key.encode()), QueueKey): convert(value, kind)
        for key, value in _object(table).items()
    }


def _without_nulls(value: object) -> Any:
    """Convert to builtins without None values: official encoders leave such fields out."""
    return _drop_nulls(msgspec.to_builtins(value, str_keys=True))


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_drop_nulls(item) for item in value]
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BodyError("a JSON object was expected")
    return value


def _objects(fields: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = fields.get(name) or []
    if not isinstance(value, list):
        raise BodyError(f"{name} is no list")
    return [_object(item) for item in value]


def _string(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BodyError(f"{name} is no text")
    return value


def _name(fields: Mapping[str, Any], name: str) -> str:
    """Read a text that is kept and logged: short, and without control characters."""
    text = _string(fields, name)
    if len(text) > NAME_LENGTH_MAX:
        raise BodyError(f"{name} has {len(text)} characters, {NAME_LENGTH_MAX} are allowed")
    if not text.isprintable():
        raise BodyError(f"{name} has control characters: {text!r}")
    return text


def _integer(fields: Mapping[str, Any], name: str) -> int:
    """Read a number that the C++ client writes as text."""
    value = fields.get(name)
    try:
        return 0 if value is None else msgspec.convert(value, Int64, strict=False)
    except msgspec.ValidationError as error:
        raise BodyError(f"{name} is no number") from error


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    return value is True or value == "true"


def _enum(fields: Mapping[str, Any], name: str, default: E) -> E:
    value = fields.get(name)
    members: list[E] = list(type(default))
    if isinstance(value, int) and 0 <= value < len(members):
        return members[value]
    return next((member for member in members if member.value == value), default)
