"""Administration of topics: create, update, delete (17, 18, 215, 216), lists, queue offsets.

The broker is its own name server, so the requests to both are here. A deleted topic has no route to
this broker any more; request 216 deletes its routes to brokers registered here.

Source: RocketMQ 5.3.3 `AdminBrokerProcessor`, `DefaultRequestProcessor` of the name server.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from attrs import define

from halfmq.remoting.admin_bodies import (
    Entry,
    decode_entries,
    encode_consume_queue,
    encode_entry,
    encode_member,
    encode_topic_table,
)
from halfmq.remoting.admin_headers import (
    CreateTopicRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    GetAllTopicConfigResponseHeader,
    GetTopicsByClusterRequestHeader,
    QueryConsumeQueueRequestHeader,
    TopicRequestHeader,
)
from halfmq.remoting.bodies import QueueKey, TopicOffset, encode_topic_list, encode_topic_stats
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.queue_entry import QueueEntry
from halfmq.store.format.topics import validate_topic
from halfmq.store.message_store import MessageStore

from ...config import TopicDefaults
from ...errors import RequestRefusedError, invalid_parameter
from ...limits.long_answers import collect
from ...loop.slices import in_slices
from ...ports import Connection, Handlers, serves
from ...tables.attributes import altered, parse_change
from ...tables.client_registry import ClientRegistry
from ...tables.consumer_offsets import ConsumerOffsetTable
from ...tables.registered_brokers import BrokerTable
from ...tables.topic_config import TopicConfig
from ...tables.topic_table import QUEUES_MAX, TopicTable
from .change_queue import ChangeQueue

logger = logging.getLogger(__name__)

TOPICS_PER_REQUEST_MAX: Final = 1_000
"""Topics in one UPDATE_AND_CREATE_TOPIC_LIST; each takes the event loop some 10 us."""

_PERM_MAX: Final = 7  # read, write, inherit
_UNIT: Final = 1  # bits of topicSysFlag
_UNIT_SUB: Final = 2
_UNIT_FLAGS: Final = {  # request → bits to look at, and those that are set
    RequestCode.GET_UNIT_TOPIC_LIST: (_UNIT, _UNIT),
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: (_UNIT_SUB, _UNIT_SUB),
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: (_UNIT | _UNIT_SUB, _UNIT_SUB),
}


@define(eq=False, repr=False, slots=False)
class TopicHandlers(Handlers):
    """Serves queries and changes of topics."""

    _topics: TopicTable
    _offsets: ConsumerOffsetTable
    _brokers: BrokerTable
    _store: MessageStore
    _changes: ChangeQueue
    _identity: TopicDefaults
    _stored_per_second: Callable[[str], float]
    _search_again: Callable[[Iterable[tuple[str, int]]], None]
    """Answers the held pulls of queues, by topic and queue id."""

    def __attrs_post_init__(self) -> None:
        self._broker_name = self._identity.broker_name
        self._cluster_name = self._identity.cluster_name

    @serves(RequestCode.UPDATE_AND_CREATE_TOPIC)
    def update_topic(self, request: RemotingCommand, connection: Connection) -> None:
        """Create a topic, or replace its settings; attributes that are not named stay."""
        header = request.header_as(CreateTopicRequestHeader)
        wanted = TopicConfig(
            name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            filter_type=header.topic_filter_type,
            sys_flag=header.topic_sys_flag or 0,
            order=header.order,
        )
        attributes = parse_change(header.attributes or "")
        what = f"topic {wanted.name}"
        self._changes.make(request, connection, what, self._update, wanted, attributes)

    @serves(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST)
    def update_topics(self, request: RemotingCommand, connection: Connection) -> None:
        """Create or replace several topics; if one is refused, those before it are changed."""
        entries = decode_entries(request.body, "topicConfigList")
        if len(entries) > TOPICS_PER_REQUEST_MAX:
            raise invalid_parameter(f"{len(entries)} topics, the limit is {TOPICS_PER_REQUEST_MAX}")
        wanted = [(_listed(entry), _listed_attributes(entry)) for entry in entries]

        async def update_all() -> None:
            for topic, attributes in wanted:
                await self._update(topic, attributes)

        names = [topic.name for topic, _ in wanted]
        self._changes.make(request, connection, f"topics {names[:20]}", update_all)

    async def _update(self, wanted: TopicConfig, attributes: Mapping[str, str | None]) -> None:
        self._check_name(wanted.name)
        _check(wanted)
        known = self._topics.get(wanted.name)
        wanted = replace(
            wanted,
            attributes=altered(None if known is None else known.attributes, attributes),
            unknown={} if known is None else known.unknown,
        )
        if wanted == known:
            return
        logger.info("event=topic_changed topic=%s old=%s new=%s", wanted.name, known, wanted)
        await self._topics.change(wanted)

    @serves(RequestCode.DELETE_TOPIC_IN_BROKER)
    def delete_topic(self, request: RemotingCommand, connection: Connection) -> None:
        """Delete a topic, the offsets of its consumers, and its messages for all readers."""
        header = request.header_as(TopicRequestHeader)
        name = header.topic
        if not name or name.isspace():
            raise invalid_parameter("The specified topic is blank.")
        self._check_system(name)
        self._changes.make(request, connection, f"deleted topic {name}", self._delete, name)

    async def _delete(self, name: str) -> None:
        has_queues = any(topic == name for topic, _ in self._store.queues.names())
        if not (name in self._topics or has_queues or self._topics.is_deleting(name)):
            return
        topic = self._topics.get(name)
        queues = 0 if topic is None else topic.read_queue_nums
        await self._topics.delete(name, self._store.write_offset)
        try:
            await asyncio.wrap_future(self._store.delete_topic(name))
        except OSError as error:
            raise RequestRefusedError(
                f"topic[{name}] is deleted, but not its queue files: {error}; delete it again",
                ResponseCode.SERVICE_NOT_AVAILABLE,
            ) from error
        await in_slices(self._offsets.forget(topic=name))
        self._topics.end_deletion(name)
        # Their offsets are those of the deleted topic: in a new one they would skip messages.
        self._search_again((name, queue_id) for queue_id in range(queues))
        await self._offsets.save_now()

    @serves(RequestCode.DELETE_TOPIC_IN_NAMESRV)
    def delete_route(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Delete the routes to other brokers; a topic that exists here keeps its route."""
        header = request.header_as(DeleteTopicFromNamesrvRequestHeader)
        self._brokers.delete_topic(header.topic, header.cluster_name)
        return encode_reply(request)

    def _check_name(self, name: str) -> None:
        reason = validate_topic(name)
        if reason is not None:
            raise invalid_parameter(reason)
        self._check_system(name)

    def _check_system(self, name: str) -> None:
        if self._topics.is_system(name):
            raise invalid_parameter(f"The topic[{name}] is conflict with system topic.")

    @serves(RequestCode.GET_ALL_TOPIC_CONFIG)
    def all_topics(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the whole table."""
        entries = collect(
            request,
            connection,
            lambda: list(self._topics),
            lambda topic: encode_member(topic.name, topic.to_json()),
        )
        return encode_reply(
            request,
            header=GetAllTopicConfigResponseHeader(),
            body=encode_topic_table(entries, self._topics.data_version),
        )

    @serves(RequestCode.GET_TOPIC_CONFIG)
    def topic_config(self, request: RemotingCommand, _connection: Connection) -> bytes:
        header = request.header_as(TopicRequestHeader)
        topic = self._topics.existing(header.topic, "No topic in this broker. topic: {}")
        return encode_reply(request, body=encode_entry(topic.to_json()))

    @serves(RequestCode.GET_TOPIC_STATS_INFO)
    def topic_stats(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the offset range of each queue, and the time of its last message."""
        header = request.header_as(TopicRequestHeader)
        topic = self._topics.existing(header.topic)
        count = max(topic.read_queue_nums, topic.write_queue_nums)
        rows = collect(
            request, connection, lambda: range(count), partial(self._queue_stats, topic.name)
        )
        per_second = self._stored_per_second(topic.name)
        return encode_reply(request, body=encode_topic_stats(dict(rows), per_second))

    def _queue_stats(self, topic: str, queue_id: int) -> tuple[QueueKey, TopicOffset]:
        queues = self._store.queues
        first, end = queues.bounds(topic, queue_id)
        stored_ms = queues.store_time_at(topic, queue_id, end - 1) if first < end else 0
        queue = QueueKey(broker_name=self._broker_name, queue_id=queue_id, topic=topic)
        return queue, TopicOffset(
            last_update_timestamp=max(stored_ms, 0),
            max_offset=end,
            min_offset=queues.first_offset(topic, queue_id),
        )

    @serves(RequestCode.GET_TOPICS_BY_CLUSTER)
    def topics_by_cluster(self, request: RemotingCommand, _connection: Connection) -> bytes:
        header = request.header_as(GetTopicsByClusterRequestHeader)
        names = self._brokers.topics(header.cluster)
        if header.cluster == self._cluster_name:
            names.update(topic.name for topic in self._topics)
        return encode_reply(request, body=encode_topic_list(sorted(names)))

    @serves(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS)
    def cluster_topics(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the names of clusters and brokers, which are topics, and this address."""
        others = self._brokers.brokers()
        clusters = {self._cluster_name, *(broker.cluster for broker in others)}
        names = [*sorted(clusters), self._broker_name, *(one.broker_name for one in others)]
        return encode_reply(request, body=encode_topic_list(names, connection.broker_address))

    @serves(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    def system_topics(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with the names of the broker's own topics."""
        return encode_reply(request, body=encode_topic_list(self._topics.system_names))

    @serves(*_UNIT_FLAGS)
    def unit_topics(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with the topics that belong to a unit, or that consumers of units subscribe to."""
        mask, flags = _UNIT_FLAGS[RequestCode(request.code)]
        names = [topic.name for topic in self._topics if topic.sys_flag & mask == flags]
        return encode_reply(request, body=encode_topic_list(names))


def _listed(entry: Entry) -> TopicConfig:
    name = entry.get("topicName")
    if not isinstance(name, str):
        raise invalid_parameter("a topic has no topicName")
    return replace(TopicConfig.from_json(name, entry), attributes={}, unknown={})


def _listed_attributes(entry: Entry) -> Mapping[str, str | None]:
    attributes = entry.get("attributes") or {}
    if not isinstance(attributes, dict):
        raise invalid_parameter("attributes are no object")
    text = ",".join(f"{key}={value}" if value else key for key, value in attributes.items())
    return parse_change(text)


def _check(topic: TopicConfig) -> None:
    for count in (topic.read_queue_nums, topic.write_queue_nums):
        if not 0 <= count <= QUEUES_MAX:
            raise invalid_parameter(
                f"topic[{topic.name}] has {count} queues, the limit is {QUEUES_MAX}"
            )
    if not 0 <= topic.perm <= _PERM_MAX:
        raise invalid_parameter(
            f"topic[{topic.name}] has perm {topic.perm}, expected 0 to {_PERM_MAX}"
        )
    if topic.filter_type not in ("SINGLE_TAG", "MULTI_TAG"):
        raise RequestRefusedError(f"topicFilterType = [{topic.filter_type}] value invalid")


ENTRIES_MAX: Final = 1_000
"""Entries of one answer, about 100 bytes each."""

_EXTENSION_MAX: Final = -(2**31) - 1  # tags codes up to this are addresses of extensions


class ConsumeQueueHandlers(Handlers):
    """Serves the entries of a consume queue as they are on disk (321), for diagnosis.

    Source: RocketMQ 5.3.3 `AdminBrokerProcessor#queryConsumeQueue`.
    """

    def __init__(self, registry: ClientRegistry, store: MessageStore) -> None:
        self._registry = registry
        self._store = store

    @serves(RequestCode.QUERY_CONSUME_QUEUE)
    def query(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with entries from an index on, and with a group's subscription to the topic."""
        header = request.header_as(QueryConsumeQueueRequestHeader)
        topic, queue_id = header.topic, header.queue_id
        first, end = self._store.queues.bounds(topic, queue_id)
        if not end:
            raise RequestRefusedError(f"{queue_id}@{topic} is not exist!")
        filter_data = subscription = None
        if header.consumer_group is not None:
            subscription = self._registry.subscription_of(header.consumer_group, topic)
            # RocketMQ's answer for a filter by tags, which has no compiled form.
            filter_data = "null"
            if subscription is None:
                filter_data = f"{header.consumer_group}@{topic} is not online!"
        if not first <= header.index < end:
            body = encode_consume_queue(first, end, None, filter_data, subscription)
            remark = f"Index {header.index} of {queue_id}@{topic} is not exist!"
            return encode_reply(request, body=body, remark=remark)
        count = min(max(header.count, 0), ENTRIES_MAX)
        entries = self._store.queues.entries(topic, queue_id, header.index, count)
        body = encode_consume_queue(
            first, end, [_entry(one) for one in entries], filter_data, subscription
        )
        return encode_reply(request, body=body)


def _entry(entry: QueueEntry) -> Entry:
    fields: dict[str, object] = {
        "eval": False,
        "physicOffset": entry.physical_offset,
        "physicSize": entry.size,
        "tagsCode": entry.tags_code,
    }
    if entry.tags_code <= _EXTENSION_MAX:
        fields["msg"] = f"Cq extend not exist!addr: {entry.tags_code}"
    return fields
