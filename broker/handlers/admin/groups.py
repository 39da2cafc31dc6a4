"""Administration of consumer groups: create, update, delete (200, 225, 207), forbid topics (353).

Also queries of their members, producers and subscriptions.

Source: RocketMQ 5.3.3 `AdminBrokerProcessor`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from attrs import define

from halfmq.remoting.admin_bodies import (
    Entry,
    decode_entries,
    decode_entry,
    encode_consumer_connections,
    encode_entry,
    encode_forbidden,
    encode_group_list,
    encode_group_table,
    encode_member,
    encode_producer_connections,
    encode_producers,
    encode_subscription,
)
from halfmq.remoting.admin_headers import (
    DeleteSubscriptionGroupRequestHeader,
    GetSubscriptionGroupConfigRequestHeader,
    GroupAndTopicRequestHeader,
    GroupForbiddenRequestHeader,
    ProducerGroupRequestHeader,
    TopicRequestHeader,
)
from halfmq.remoting.bodies import encode_topic_list
from halfmq.remoting.codes import LanguageCode, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import ConsumerGroupRequestHeader
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.topics import BUILT_IN_GROUPS, validate_group

from ...errors import RequestRefusedError, invalid_parameter
from ...limits.long_answers import collect
from ...loop.slices import in_slices
from ...ports import Connection, Handlers, serves
from ...tables.client_registry import ClientRegistry
from ...tables.consumer_offsets import ConsumerOffsetTable
from ...tables.group_members import Member
from ...tables.group_table import GroupConfig, GroupTable
from ...tables.topic_table import QUEUES_MAX, TopicTable
from .change_queue import ChangeQueue

logger = logging.getLogger(__name__)

GROUPS_PER_REQUEST_MAX: Final = 1_000
"""Groups in one UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST; each takes the event loop some 10 us."""

GROUP_BYTES_MAX: Final = 16_384
"""Bytes of the entry of one group, in which the retry policy lists delays and topics are listed."""

_KEPT: Final = ("groupRetryPolicy", "subscriptionDataSet")
"""Fields that halfmq does not interpret and keeps for RocketMQ."""


@define(eq=False, repr=False)
class GroupHandlers(Handlers):
    """Serves queries and changes of groups, and queries of their members."""

    _groups: GroupTable
    _topics: TopicTable
    _offsets: ConsumerOffsetTable
    _registry: ClientRegistry
    _changes: ChangeQueue
    _now_ms: Callable[[], int]
    _monotonic_ms: Callable[[], int]  # the clock of the registry

    @serves(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN)
    def group_forbidden(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Forbid or allow a group to consume a topic, if requested; answer whether it may."""
        header = request.header_as(GroupForbiddenRequestHeader)
        group, topic, readable = header.group, header.topic, header.readable
        if readable is None:
            body = encode_forbidden(group, topic, readable=self._groups.may_read(group, topic))
            return encode_reply(request, body=body)
        if group not in self._groups:
            raise RequestRefusedError(
                f"Group {group} does not exist", ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
            )
        self._topics.existing(topic, "Topic {} does not exist")

        async def change() -> bytes:
            await self._groups.forbid_reading(group, topic, forbidden=not readable)
            return encode_forbidden(group, topic, readable=readable)

        what = f"group {group} may consume topic {topic}: {readable}"
        self._changes.make(request, connection, what, change)
        return None

    @serves(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP)
    def update_group(self, request: RemotingCommand, connection: Connection) -> None:
        """Create a group, or replace its settings."""
        wanted = _group(decode_entry(request.body))
        self._changes.make(request, connection, f"group {wanted.name}", self._update, wanted)

    @serves(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST)
    def update_groups(self, request: RemotingCommand, connection: Connection) -> None:
        """Create or replace several groups; if one cannot be saved, those before it are."""
        entries = decode_entries(request.body, "groupConfigList")
        if len(entries) > GROUPS_PER_REQUEST_MAX:
            raise invalid_parameter(f"{len(entries)} groups, the limit is {GROUPS_PER_REQUEST_MAX}")
        wanted = [_group(entry) for entry in entries]

        async def update_all() -> None:
            for group in wanted:
                await self._update(group)

        names = [group.name for group in wanted]
        self._changes.make(request, connection, f"groups {names[:20]}", update_all)

    async def _update(self, wanted: GroupConfig) -> None:
        known = self._groups.get(wanted.name)
        if wanted != known:
            logger.info("event=group_changed group=%s old=%s new=%s", wanted.name, known, wanted)
            await self._groups.change(wanted)

    @serves(RequestCode.DELETE_SUBSCRIPTIONGROUP)
    def delete_group(self, request: RemotingCommand, connection: Connection) -> None:
        """Delete a group, with ``cleanOffset`` its offsets too; an unknown one is no error."""
        header = request.header_as(DeleteSubscriptionGroupRequestHeader)
        name = header.group_name
        if name in BUILT_IN_GROUPS:
            raise invalid_parameter(f"The group[{name}] is conflict with system group.")
        what = f"deleted group {name}"
        self._changes.make(request, connection, what, self._delete, header)

    async def _delete(self, header: DeleteSubscriptionGroupRequestHeader) -> None:
        name = header.group_name
        await self._groups.delete(name)
        if header.clean_offset:
            await in_slices(self._offsets.forget(group=name))
            await self._offsets.save_now()

    @serves(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    def all_groups(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the whole table."""
        entries = collect(
            request,
            connection,
            lambda: list(self._groups),
            lambda group: encode_member(group.name, group.to_json()),
        )
        body = encode_group_table(entries, self._groups.forbidden, self._groups.data_version)
        return encode_reply(request, body=body)

    @serves(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG)
    def group_config(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with one group, which is created if groups are created at their first use."""
        header = request.header_as(GetSubscriptionGroupConfigRequestHeader)
        group = self._groups.ensure(header.group)
        if group is None:
            raise RequestRefusedError(
                "No group in this broker", ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
            )
        return encode_reply(request, body=encode_entry(group.to_json()))

    @serves(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    def consumer_connections(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the connected members of a group and what they subscribe to."""
        header = request.header_as(ConsumerGroupRequestHeader)
        name = header.consumer_group
        group = self._registry.consumer_groups.get(name)
        if group is None:
            raise RequestRefusedError(
                f"the consumer group[{name}] not online", ResponseCode.CONSUMER_NOT_ONLINE
            )
        found = collect(request, connection, lambda: list(group.members.values()), _connection)
        body = encode_consumer_connections(
            found,
            group.data.consume_from_where,
            group.data.consume_type,
            group.data.message_model,
            group.subscriptions,
        )
        return encode_reply(request, body=body)

    @serves(RequestCode.GET_PRODUCER_CONNECTION_LIST)
    def producer_connections(self, request: RemotingCommand, connection: Connection) -> bytes:
        header = request.header_as(ProducerGroupRequestHeader)
        members = self._registry.producer_groups.get(header.producer_group)
        if not members:
            raise RequestRefusedError(f"the producer group[{header.producer_group}] not exist")
        found = collect(request, connection, lambda: list(members.values()), _connection)
        return encode_reply(request, body=encode_producer_connections(found))

    @serves(RequestCode.GET_ALL_PRODUCER_INFO)
    def producers(self, request: RemotingCommand, connection: Connection) -> bytes:
        rows = collect(
            request,
            connection,
            lambda: [
                (name, member)
                for name, members in self._registry.producer_groups.items()
                for member in members.values()
            ],
            self._producer,
        )
        table: dict[str, list[Entry]] = {}
        for name, entry in rows:
            table.setdefault(name, []).append(entry)
        return encode_reply(request, body=encode_producers(table))

    def _producer(self, row: tuple[str, Member]) -> tuple[str, Entry]:
        name, member = row
        entry = _connection(member)
        silent_ms = self._monotonic_ms() - member.seen_ms
        return name, {
            "clientId": entry["clientId"],
            "language": entry["language"],
            "lastUpdateTimestamp": self._now_ms() - silent_ms,
            "remoteIP": f"/{entry['clientAddr']}",  # as Java prints an address
            "version": entry["version"],
        }

    @serves(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO)
    def groups_of_topic(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the groups that subscribe to a topic or have offsets in it."""
        header = request.header_as(TopicRequestHeader)
        suffix, topic = f"{header.topic}@", header.topic
        subscribing = [
            group.name
            for group in self._registry.consumer_groups.values()
            if topic in group.subscriptions
        ]
        batches = collect(
            request,
            connection,
            self._offsets.key_batches,
            lambda keys: [key.removeprefix(suffix) for key in keys if key.startswith(suffix)],
        )
        names = {*subscribing, *(name for batch in batches for name in batch)}
        return encode_reply(request, body=encode_group_list(sorted(names)))

    @serves(RequestCode.QUERY_TOPICS_BY_CONSUMER)
    def topics_of_group(self, request: RemotingCommand, connection: Connection) -> bytes:
        header = request.header_as(GetSubscriptionGroupConfigRequestHeader)
        names = topics_of(request, connection, self._offsets, header.group)
        body = encode_topic_list(sorted(names), connection.broker_address)
        return encode_reply(request, body=body)

    @serves(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER)
    def subscription(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with a group's subscription to a topic; without data if it does not subscribe."""
        header = request.header_as(GroupAndTopicRequestHeader)
        data = self._registry.subscription_of(header.group, header.topic)
        return encode_reply(request, body=encode_subscription(header.group, header.topic, data))


def topics_of(
    request: RemotingCommand,
    connection: Connection,
    offsets: ConsumerOffsetTable,
    group: str,
    *,
    is_last: bool = True,
) -> list[str]:
    """Return the topics in which a group has offsets; raises what ``collect`` raises."""
    suffix = f"@{group}"
    batches = collect(
        request,
        connection,
        offsets.key_batches,
        lambda keys: [key.removesuffix(suffix) for key in keys if key.endswith(suffix)],
        is_last=is_last,
    )
    return [name for batch in batches for name in batch]


def _connection(member: Member) -> Entry:
    peer = member.connection
    return {
        "clientAddr": peer.name,
        "clientId": member.client_id,
        "language": _language(peer.language),
        "version": peer.version,
    }


def _language(code: int) -> str:
    try:
        return LanguageCode(code).name
    except ValueError:
        return LanguageCode.OTHER.name


def _group(entry: Entry) -> GroupConfig:
    name = entry.get("groupName")
    if not isinstance(name, str):
        raise invalid_parameter("a group has no groupName")
    reason = validate_group(name)
    if reason is not None:
        raise invalid_parameter(reason)
    for key in _attributes(entry):  # RocketMQ 5.3.3 knows none of groups
        raise RequestRefusedError(f"unsupported key: {key[1:]}")
    size = len(encode_entry(entry))
    if size > GROUP_BYTES_MAX:
        raise invalid_parameter(f"group[{name}] has {size} bytes, the limit is {GROUP_BYTES_MAX}")
    made = GroupConfig.from_json(name, entry)
    if not 0 <= made.retry_queue_nums <= QUEUES_MAX:
        raise invalid_parameter(
            f"group[{name}] has {made.retry_queue_nums} retry queues, the limit is {QUEUES_MAX}"
        )
    kept = {key: entry[key] for key in _KEPT if entry.get(key) is not None}
    return replace(made, unknown={**GroupConfig(name=name).unknown, **kept})


def _attributes(entry: Entry) -> Mapping[str, object]:
    attributes = entry.get("attributes")
    return attributes if isinstance(attributes, dict) else {}
