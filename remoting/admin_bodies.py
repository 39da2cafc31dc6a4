"""Bodies of administrative requests and answers: topics, groups, connections.

They follow the rules of ``bodies``. Entries of topics and groups are JSON objects as in
``topics.json`` and ``subscriptionGroup.json``, whose fields differ by release, so they are carried
as they are.

Source: RocketMQ ``protocol/body``, ``TopicConfigSerializeWrapper``, ``SubscriptionGroupWrapper``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from .bodies import QueueKey, SubscriptionData
from .errors import BodyError
from .fastjson import convert, dump, parse

Entry = Mapping[str, Any]
"""A topic or group as its table holds it."""


def encode_topic_table(entries: Iterable[bytes], data_version: Mapping[str, int]) -> bytes:
    """Return the body of an answer to GET_ALL_TOPIC_CONFIG (21); entries are ``encode_member``'s.

    There are no static topics, so their tables are empty.
    """
    version = dump(data_version)
    empty = dump({"counter": 0, "stateVersion": 0, "timestamp": 0})
    return (
        b'{"dataVersion":%b,"mappingDataVersion":%b,"topicConfigTable":{%b},'
        b'"topicQueueMappingDetailMap":{},"topicQueueMappingInfoMap":{}}'
    ) % (version, empty, b",".join(entries))


def encode_group_table(
    entries: Iterable[bytes], forbidden: Entry, data_version: Mapping[str, int]
) -> bytes:
    """Return the body of an answer to 201; entries are ``encode_member``'s."""
    return b'{"dataVersion":%b,"forbiddenTable":%b,"subscriptionGroupTable":{%b}}' % (
        dump(data_version),
        dump(forbidden),
        b",".join(entries),
    )


def encode_offset_members(members: Iterable[bytes], data_version: Mapping[str, int]) -> bytes:
    """Return the body of an answer to 43 or 45; members are ``encode_member``'s."""
    return b'{"dataVersion":%b,"offsetTable":{%b}}' % (dump(data_version), b",".join(members))


def encode_member(name: str, entry: object) -> bytes:
    """Return one member of a table: its name and its entry."""
    return b"%b:%b" % (dump(name), dump(entry))


def decode_topic_table(body: bytes) -> dict[str, Entry]:
    """Decode the topics in an answer to GET_ALL_TOPIC_CONFIG (21). Raises BodyError."""
    return _entries(body, "topicConfigTable")


def decode_group_table(body: bytes) -> dict[str, Entry]:
    """Decode the groups in an answer to 201. Raises BodyError."""
    return _entries(body, "subscriptionGroupTable")


def encode_entry(entry: Entry) -> bytes:
    """Return the body of answers to 351 and 352, and of request 200."""
    return dump(entry)


def decode_entry(body: bytes) -> Entry:
    """Decode a body that is one topic or group. Raises BodyError."""
    return _checked(parse(body))


def decode_entries(body: bytes, name: str) -> list[Entry]:
    """Decode the list of this name in requests 18 and 225. Raises BodyError."""
    found = _checked(parse(body)).get(name) or []
    if not isinstance(found, list):
        raise BodyError(f"{name} is no list")
    return [_checked(one) for one in found]


def encode_group_list(groups: Iterable[str]) -> bytes:
    """Return the body of an answer to QUERY_TOPIC_CONSUME_BY_WHO (300)."""
    return dump({"groupList": list(groups)})


def decode_group_list(body: bytes) -> list[str]:
    """Decode the groups in an answer to QUERY_TOPIC_CONSUME_BY_WHO (300). Raises BodyError."""
    found = _checked(parse(body)).get("groupList") or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise BodyError("groupList is no list of names")
    return found


def encode_consumer_connections(
    connections: Sequence[Entry],
    consume_from_where: str,
    consume_type: str,
    message_model: str,
    subscriptions: Mapping[str, SubscriptionData],
) -> bytes:
    """Return the body of an answer to GET_CONSUMER_CONNECTION_LIST (203)."""
    return dump(
        {
            "connectionSet": connections,
            "consumeFromWhere": consume_from_where,
            "consumeType": consume_type,
            "messageModel": message_model,
            "subscriptionTable": subscriptions,
        }
    )


def encode_producer_connections(connections: Sequence[Entry]) -> bytes:
    """Return the body of an answer to GET_PRODUCER_CONNECTION_LIST (204)."""
    return dump({"connectionSet": connections})


def encode_producers(groups: Mapping[str, Sequence[Entry]]) -> bytes:
    """Return the body of an answer to GET_ALL_PRODUCER_INFO (328)."""
    return dump({"data": groups})


def decode_producers(body: bytes) -> dict[str, list[Entry]]:
    """Decode the clients by group in an answer to GET_ALL_PRODUCER_INFO (328). Raises BodyError."""
    found = _checked(_checked(parse(body)).get("data") or {})
    if not all(isinstance(clients, list) for clients in found.values()):
        raise BodyError("data has no lists of clients")
    return {group: [_checked(one) for one in clients] for group, clients in found.items()}


def encode_subscription(group: str, topic: str, data: SubscriptionData | None) -> bytes:
    """Return the body of an answer to QUERY_SUBSCRIPTION_BY_CONSUMER (345)."""
    found = {} if data is None else {"subscriptionData": data}
    return dump({"group": group, "topic": topic, **found})


class BrokerStatsItem(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted in a period, in an answer to VIEW_BROKER_STATS_DATA (315)."""

    sum: int
    tps: float  # a second
    avgpt: float  # a time: of stored messages each, of delivered ones each pull


def encode_stats_data(
    minute: BrokerStatsItem, hour: BrokerStatsItem, day: BrokerStatsItem
) -> bytes:
    """Return the body of an answer to VIEW_BROKER_STATS_DATA (315)."""
    return dump({"statsDay": day, "statsHour": hour, "statsMinute": minute})


def decode_stats_data(body: bytes) -> dict[str, BrokerStatsItem]:
    """Decode the items in an answer to VIEW_BROKER_STATS_DATA (315). Raises BodyError."""
    return convert(parse(body), dict[str, BrokerStatsItem], "statistics")


def encode_consume_stats_of(members: bytes, consume_tps: float) -> bytes:
    """Return the body of an answer to 208 from ``object_keyed_members`` of its queues."""
    return b'{"consumeTps":%b,"offsetTable":{%b}}' % (dump(consume_tps), members)


def encode_broker_consume_stats(
    stats: Mapping[str, Iterable[tuple[float, bytes]]],
    broker_address: str,
    total_diff: int,
    in_flight: int,
) -> bytes:
    """Return the body of an answer to GET_BROKER_CONSUME_STATS (317).

    ``stats`` has for each topic of a group its messages a second and ``object_keyed_members`` of
    its queues.
    """
    groups = (
        b"{%b:[%b]}"
        % (dump(group), b",".join(encode_consume_stats_of(table, tps) for tps, table in topics))
        for group, topics in stats.items()
    )
    return b'{"brokerAddr":%b,"consumeStatsList":[%b],"totalDiff":%d,"totalInflightDiff":%d}' % (
        dump(broker_address),
        b",".join(groups),
        total_diff,
        in_flight,
    )


def encode_time_spans(spans: Sequence[Entry]) -> bytes:
    """Return the body of an answer to QUERY_CONSUME_TIME_SPAN (303)."""
    return dump({"consumeTimeSpanSet": spans})


def encode_correction_offsets(offsets: Mapping[int, int]) -> bytes:
    """Return the body of an answer to QUERY_CORRECTION_OFFSET (308), by queue id."""
    return dump({"correctionOffsets": {str(number): value for number, value in offsets.items()}})


def encode_forbidden(group: str, topic: str, *, readable: bool) -> bytes:
    """Return the body of an answer to UPDATE_AND_GET_GROUP_FORBIDDEN (353)."""
    return dump({"group": group, "readable": readable, "topic": topic})


def encode_consume_queue(
    first: int,
    end: int,
    entries: Sequence[Entry] | None,
    filter_data: str | None,
    subscription: SubscriptionData | None,
) -> bytes:
    """Return the body of an answer to QUERY_CONSUME_QUEUE (321)."""
    found: dict[str, object] = {"maxQueueIndex": end, "minQueueIndex": first}
    if filter_data is not None:
        found["filterData"] = filter_data
    if entries is not None:
        found["queueData"] = entries
    if subscription is not None:
        found["subscriptionData"] = subscription
    return dump(found)


def decode_queue_places(body: bytes) -> tuple[int, list[int]]:
    """Decode an answer to QUERY_CONSUME_QUEUE (321).

    Return the first queue offset that is stored, and the physical offsets of the entries asked for.

    Raises:
        BodyError: It is not such a body.
    """
    fields = _checked(parse(body))
    try:
        entries = fields.get("queueData") or []
        return int(fields["minQueueIndex"]), [int(one["physicOffset"]) for one in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise BodyError(f"not entries of a queue: {error!r}") from error


def queue_entry(queue: QueueKey) -> Entry:
    """Return a queue as a JSON object."""
    return {"brokerName": queue.broker_name, "queueId": queue.queue_id, "topic": queue.topic}


def _entries(body: bytes, name: str) -> dict[str, Entry]:
    found = _checked(_checked(parse(body)).get(name) or {})
    return {key: _checked(one) for key, one in found.items()}


def _checked(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BodyError("a JSON object was expected")
    return value
