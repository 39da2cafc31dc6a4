"""Offsets of groups: reset (222), clone (314), compare (308), and how late a group is (303).

A reset in the broker also works for a group that is not connected. The new offsets are committed,
and pulls that wait are answered with them, as are the next pulls; until then commits of the group
are ignored. With `useServerSideResetOffset=false` the broker changes nothing, but sends the new
offsets to the connected consumers (220). Push consumers go there and commit them.

Source: RocketMQ 5.3.3 `AdminBrokerProcessor`, `ConsumerOffsetManager`, `Broker2Client`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

from attrs import define

from halfmq.remoting.admin_bodies import (
    Entry,
    encode_correction_offsets,
    encode_time_spans,
    queue_entry,
)
from halfmq.remoting.admin_headers import (
    CloneGroupOffsetRequestHeader,
    GroupAndTopicRequestHeader,
    QueryCorrectionOffsetHeader,
    ResetOffsetRequestHeader,
)
from halfmq.remoting.bodies import QueueKey, encode_offset_list, encode_offset_table
from halfmq.remoting.codes import INT64_MAX, LanguageCode, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply
from halfmq.store.message_store import MessageStore

from ...config import TopicDefaults
from ...errors import RequestRefusedError
from ...limits.long_answers import Work, collect, complete
from ...loop.slices import in_slices
from ...ports import Connection, Handlers, serves
from ...tables.client_registry import ClientRegistry
from ...tables.consumer_offsets import ConsumerOffsetTable
from ...tables.group_table import GroupTable
from ...tables.topic_config import TopicConfig
from ...tables.topic_table import TopicTable
from .change_queue import ChangeQueue
from .groups import topics_of

RESET_VERSION_MIN: Final = 28
"""V3_0_7_SNAPSHOT: older clients do not know request 220. Source: `MQVersion`."""

RESET_CLIENTS_MAX: Final = 256
"""Consumers that are sent new offsets for one reset, at most 80 KiB each."""


@define(eq=False, repr=False, slots=False)
class GroupOffsetHandlers(Handlers):
    """Serves queries and changes of the offsets of groups."""

    _topics: TopicTable
    _groups: GroupTable
    _offsets: ConsumerOffsetTable
    _registry: ClientRegistry
    _store: MessageStore
    _changes: ChangeQueue
    _identity: TopicDefaults
    # Answers the held pulls of queues, by topic and queue id.
    _search_again: Callable[[Iterable[tuple[str, int]]], None]
    _now_ms: Callable[[], int]

    def __attrs_post_init__(self) -> None:
        self.in_broker = True
        """Whether a reset is made in the broker, or else by connected consumers."""
        self._broker_name = self._identity.broker_name

    @serves(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET)
    def reset(self, request: RemotingCommand, connection: Connection) -> bytes | None:
        """Set the offsets of a group in one or all queues of a topic, and answer with them."""
        header = request.header_as(ResetOffsetRequestHeader)
        if not self.in_broker:
            return self._reset_in_clients(request, connection, header)
        topic = self._topics.existing(header.topic, "Topic {} does not exist")
        if header.group not in self._groups:
            raise RequestRefusedError(
                f"Group {header.group} does not exist", ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
            )
        rows = collect(
            request,
            connection,
            lambda: _queues(topic, header),
            lambda queue_id: (queue_id, self._target(header, queue_id)),
        )
        if not rows:
            raise RequestRefusedError("No queues to reset.")
        targets = dict(rows)
        what = f"offsets of group {header.group} in topic {header.topic}: {targets}"
        self._changes.make(
            request, connection, what, self._reset, header.group, header.topic, targets
        )
        return None

    def _target(self, header: ResetOffsetRequestHeader, queue_id: int) -> int:
        queues = self._store.queues
        first, end = queues.bounds(header.topic, queue_id)
        first = queues.first_offset(header.topic, queue_id)
        if header.queue_id >= 0 and header.offset is not None and header.offset != -1:
            if not first <= header.offset <= end:
                raise RequestRefusedError(
                    f"Target offset {header.offset} not in consume queue range [{first}-{end}]"
                )
            return header.offset
        if header.timestamp < 0:
            return end
        return queues.offset_by_time(header.topic, queue_id, header.timestamp)

    async def _reset(self, group: str, topic: str, targets: Mapping[int, int]) -> bytes:
        for queue_id, offset in targets.items():
            self._offsets.reset(group, topic, queue_id, offset)
        await self._offsets.save_now()
        self._search_again((topic, queue_id) for queue_id in targets)
        return encode_offset_table(self._by_queue(topic, targets))

    def _by_queue(self, topic: str, targets: Mapping[int, int]) -> dict[QueueKey, int]:
        return {
            QueueKey(broker_name=self._broker_name, queue_id=queue_id, topic=topic): offset
            for queue_id, offset in targets.items()
        }

    def _reset_in_clients(
        self, request: RemotingCommand, connection: Connection, header: ResetOffsetRequestHeader
    ) -> bytes:
        """Let the connected consumers of a group continue at other offsets; answer with these.

        Leave out queues in which the group has no offset. Unless the reset is forced, no consumer
        is moved forward.
        """
        topic = self._topics.existing(
            header.topic, "[reset-offset] reset offset failed, no topic in this broker. topic={}"
        )
        rows = collect(
            request,
            connection,
            lambda: _queues(topic, header),
            lambda queue_id: (queue_id, self._target_of_clients(header, queue_id)),
        )
        targets = {queue_id: target for queue_id, target in rows if target is not None}
        if not targets:
            raise RequestRefusedError(f"THe consumer group <{header.group}> not exist")
        group = self._registry.consumer_groups.get(header.group)
        if group is None or not group.members:
            raise RequestRefusedError(
                f"Consumer not online, so can not reset offset, Group: {header.group} "
                f"Topic: {header.topic} Timestamp: {header.timestamp}",
                ResponseCode.CONSUMER_NOT_ONLINE,
            )
        members = [member.connection for member in group.members.values()]
        if len(members) > RESET_CLIENTS_MAX:
            raise RequestRefusedError(
                f"the group has {len(members)} consumers, at most {RESET_CLIENTS_MAX} are reset: "
                f"set useServerSideResetOffset=true to reset it in the broker"
            )
        for member in members:
            if member.version < RESET_VERSION_MIN:
                raise RequestRefusedError(
                    f"the client does not support this feature. version={member.version}"
                )
        offsets = self._by_queue(header.topic, targets)
        notice = ResetOffsetRequestHeader(
            topic=header.topic, group=header.group, timestamp=header.timestamp, is_force=False
        )
        table, listed = encode_offset_table(offsets), encode_offset_list(offsets)
        for member in members:
            body = listed if member.language == LanguageCode.CPP else table
            member.send_request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, notice, body)
        return encode_reply(request, body=table)

    def _target_of_clients(self, header: ResetOffsetRequestHeader, queue_id: int) -> int | None:
        """Return where to go in a queue; None if the group has no offset there."""
        consumed = self._offsets.query(header.group, header.topic, queue_id)
        if consumed < 0:
            return None
        target = self._target(header, queue_id)
        return target if header.is_force or target < consumed else consumed

    @serves(RequestCode.CLONE_GROUP_OFFSET)
    def clone(self, request: RemotingCommand, connection: Connection) -> None:
        """Copy the offsets of one group to another, in one or all of its topics.

        Unless ``offline``, leave out topics to which a connected source group does not subscribe.
        """
        header = request.header_as(CloneGroupOffsetRequestHeader)
        source, target = header.src_group, header.dest_group
        if target not in self._groups:
            raise RequestRefusedError(
                f"Group {target} does not exist", ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
            )
        names = (
            [header.topic]
            if header.topic and not header.topic.isspace()
            else topics_of(request, connection, self._offsets, source)
        )
        connected = self._registry.consumer_groups.get(source)
        if not header.offline and connected is not None and connected.subscriptions:
            names = [name for name in names if name in connected.subscriptions]
        what = f"offsets of group {target}, as of group {source} in topics {sorted(names)[:20]}"
        self._changes.make(request, connection, what, self._clone, source, target, names)

    async def _clone(self, source: str, target: str, names: Iterable[str]) -> None:
        def copy() -> Iterator[None]:
            for topic in names:
                if topic in self._topics:
                    for queue_id, offset in dict(self._offsets.queues(source, topic)).items():
                        self._offsets.place(target, topic, queue_id, offset)
                yield

        await in_slices(copy())
        await self._offsets.save_now()

    @serves(RequestCode.QUERY_CORRECTION_OFFSET)
    def correction_offsets(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the lowest offset that any group has in each queue of a topic.

        The answer is INT64_MAX for a queue in which the group to compare with has a lower offset.
        """
        header = request.header_as(QueryCorrectionOffsetHeader)
        lowest = complete(request, connection, lambda: self._lowest(header))
        compared = self._offsets.queues(header.compare_group, header.topic)
        for queue_id, offset in lowest.items():
            if offset > compared.get(queue_id, INT64_MAX):
                lowest[queue_id] = INT64_MAX
        return encode_reply(request, body=encode_correction_offsets(lowest))

    def _lowest(self, header: QueryCorrectionOffsetHeader) -> Work[dict[int, int]]:
        """Return the lowest offset that a group has in each queue; a step is some groups."""
        topic, left_out = header.topic, (header.filter_groups or "").split(",")
        lowest: dict[int, int] = {}
        for keys in self._offsets.key_batches():
            for key in keys:
                group = key.removeprefix(f"{topic}@")
                if group == key or group in left_out:
                    continue
                for queue_id, offset in self._offsets.queues_of_key(key).items():
                    if offset >= self._store.queues.bounds(topic, queue_id)[0]:
                        lowest[queue_id] = min(offset, lowest.get(queue_id, INT64_MAX))
                yield None
            yield None
        return lowest

    @serves(RequestCode.QUERY_CONSUME_TIME_SPAN)
    def time_spans(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the times of the first, last and latest consumed message of each queue."""
        header = request.header_as(GroupAndTopicRequestHeader)
        topic = self._topics.existing(header.topic)
        spans = collect(
            request,
            connection,
            lambda: range(topic.write_queue_nums),
            lambda queue_id: self._time_span(header.group, header.topic, queue_id),
        )
        return encode_reply(request, body=encode_time_spans(spans))

    def _time_span(self, group: str, topic: str, queue_id: int) -> Entry:
        queues = self._store.queues
        first, end = queues.bounds(topic, queue_id)
        consumed = self._offsets.query(group, topic, queue_id)
        oldest_ms = queues.store_time_at(topic, queue_id, first)
        consumed_ms = (
            queues.store_time_at(topic, queue_id, consumed - 1) if consumed > 0 else oldest_ms
        )
        waiting_ms = queues.store_time_at(topic, queue_id, max(consumed, first))
        times = {
            "consumeTimeStamp": consumed_ms,
            "maxTimeStamp": queues.store_time_at(topic, queue_id, end - 1),
            "minTimeStamp": oldest_ms,
        }
        queue = QueueKey(broker_name=self._broker_name, queue_id=queue_id, topic=topic)
        return {
            **times,
            **{f"{name}Str": _local_time(time_ms) for name, time_ms in times.items()},
            "delayTime": self._now_ms() - waiting_ms if waiting_ms >= 0 else 0,
            "messageQueue": queue_entry(queue),
        }


def _local_time(time_ms: int) -> str:
    """Return a time as RocketMQ prints it. Source: ``UtilAll.YYYY_MM_DD_HH_MM_SS_SSS``."""
    local = datetime.fromtimestamp(time_ms / 1_000, UTC).astimezone()
    return f"{local:%Y-%m-%d#%H:%M:%S}:{local.microsecond // 1_000:03d}"


def _queues(topic: TopicConfig, header: ResetOffsetRequestHeader) -> range:
    if header.queue_id >= 0:
        return range(header.queue_id, header.queue_id + 1)
    return range(topic.read_queue_nums)
