"""Bodies of administrative requests and answers: topics, groups, connections.

They follow the rules of ``bodies``. Entries of topics and groups are JSON objects as in
``topics.json`` and ``subscriptionGroup.json``, whose fields differ by release, so they are carried
as they are.

Source: RocketMQ ``protocol/body``, ``TopicConfigSerializeWrapper``, ``SubscriptionGroupWrapper``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .bodies import QueueKey, SubscriptionData
from .errors import BodyError
from .fastjson import dump, parse

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


def encode_member(name: str, entry: Entry) -> bytes:
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


def encode_subscription(group: str, topic: str, data: SubscriptionData | None) -> bytes:
    """Return the body of an answer to QUERY_SUBSCRIPTION_BY_CONSUMER (345)."""
    found = {} if data is None else {"subscriptionData": data}
    return dump({"group": group, "topic": topic, **found})


def encode_time_spans(spans: Sequence[Entry]) -> bytes:
    """Return the body of an answer to QUERY_CONSUME_TIME_SPAN (303)."""
    return dump({"consumeTimeSpanSet": spans})


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
