"""Progress of groups: offsets and lag by queue, of one group (208) or of all (317).

Source: RocketMQ 5.3.3 `AdminBrokerProcessor#getConsumeStats`, `#fetchAllConsumeStatsInBroker`.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Final, TypeAlias

from attrs import define

from halfmq.remoting.admin_bodies import encode_broker_consume_stats, encode_consume_stats_of
from halfmq.remoting.admin_headers import (
    GetBrokerConsumeStatsRequestHeader,
    GetConsumeStatsRequestHeader,
)
from halfmq.remoting.bodies import OffsetWrapper, QueueKey
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.fastjson import object_keyed_members
from halfmq.remoting.replies import encode_reply
from halfmq.store.message_store import MessageStore

from ...config import TopicDefaults
from ...errors import RequestRefusedError
from ...limits.long_answers import collect
from ...ports import Connection, Handlers, serves
from ...tables.client_registry import ClientRegistry
from ...tables.consumer_offsets import ConsumerOffsetTable
from ...tables.group_table import GroupTable
from ...tables.message_statistics import Statistics
from ...tables.topic_config import TopicConfig
from ...tables.topic_table import TopicTable
from .groups import topics_of

ROWS_MAX: Final = 80_000
"""Queues in an answer, about 200 bytes each: clients take no frame of more than 16 MiB."""

QUEUES_PER_STEP: Final = 64
"""Queues processed in one step, in some 0.3 ms."""

_ASK_BY_GROUP: Final = "ask for one group after the other"
_ASK_BY_TOPIC: Final = "ask for one topic after the other"

_Part: TypeAlias = tuple[str, TopicConfig, int]
"""A group, a topic, and the number of its queues in the answer."""


@define(eq=False, repr=False, slots=False)
class ConsumptionHandlers(Handlers):
    """Serves queries about the progress of groups."""

    _topics: TopicTable
    _groups: GroupTable
    _offsets: ConsumerOffsetTable
    _registry: ClientRegistry
    _store: MessageStore
    _statistics: Statistics
    _identity: TopicDefaults

    def __attrs_post_init__(self) -> None:
        self._broker_name = self._identity.broker_name

    @serves(RequestCode.GET_CONSUME_STATS)
    def consume_stats(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the offsets of a group and of the log in the queues of one or more topics.

        Without a list, topics that a connected group does not subscribe to are left out.
        """
        header = request.header_as(GetConsumeStatsRequestHeader)
        group = header.consumer_group
        names = [name for name in (header.topic_list or "").split(";") if name]
        if not names:
            names = (
                [header.topic]
                if header.topic and not header.topic.isspace()
                else topics_of(request, connection, self._offsets, group, is_last=False)
            )
            connected = self._registry.consumer_groups.get(group)
            if connected is not None and connected.subscriptions:
                names = [name for name in names if name in connected.subscriptions]
        topics = [
            topic for name in dict.fromkeys(names) if (topic := self._topics.get(name)) is not None
        ]
        parts = [(group, topic, topic.read_queue_nums) for topic in topics]
        steps = collect(
            request,
            connection,
            lambda: _steps(parts, _ASK_BY_TOPIC),
            self._stats_of_queues,
            stage=1,
        )
        per_second = sum(
            self._statistics.delivered_per_second(topic.name, group) for topic in topics
        )
        members = b",".join(step[2] for step in steps if step[2])
        return encode_reply(request, body=encode_consume_stats_of(members, per_second))

    @serves(RequestCode.GET_BROKER_CONSUME_STATS)
    def all_consume_stats(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the progress of each group in each topic in which it has offsets."""
        header = request.header_as(GetBrokerConsumeStatsRequestHeader)
        batches = collect(
            request,
            connection,
            self._offsets.key_batches,
            partial(self._consumed, ordered_only=header.is_order),
            is_last=False,
        )
        steps = collect(
            request,
            connection,
            lambda: _steps(list(chain.from_iterable(batches)), _ASK_BY_GROUP),
            self._stats_of_queues,
            stage=1,
        )
        stats: dict[str, list[tuple[float, bytes]]] = {group.name: [] for group in self._groups}
        for (group, topic), parts in groupby(steps, key=itemgetter(0, 1)):
            per_second = self._statistics.delivered_per_second(topic, group)
            table = b",".join(part[2] for part in parts if part[2])
            stats.setdefault(group, []).append((per_second, table))
        return encode_reply(
            request,
            body=encode_broker_consume_stats(
                stats,
                connection.broker_address,
                sum(lag for *_, lag, _ in steps),
                sum(in_flight for *_, in_flight in steps),
            ),
        )

    def _consumed(self, keys: Sequence[str], *, ordered_only: bool) -> list[_Part]:
        """Return the groups and topics of the answer, and the number of queues of each."""
        pairs: list[_Part] = []
        for key in keys:
            name, _, group = key.partition("@")
            topic = self._topics.get(name)
            if topic is None or group not in self._groups or (ordered_only and not topic.order):
                continue
            connected = self._registry.consumer_groups.get(group)
            if connected is None or not connected.subscriptions or name in connected.subscriptions:
                pairs.append((group, topic, topic.write_queue_nums))
        return pairs

    def _stats_of_queues(
        self, step: tuple[str, TopicConfig, range]
    ) -> tuple[str, str, bytes, int, int]:
        """Return group, topic, rows of some of its queues, their lag and messages in flight."""
        group, topic, queue_ids = step
        rows = [self._progress(group, topic.name, queue_id) for queue_id in queue_ids]
        lag = sum(row.broker_offset - row.consumer_offset for _, row in rows)
        in_flight = sum(row.pull_offset - row.consumer_offset for _, row in rows)
        return group, topic.name, object_keyed_members(rows), lag, in_flight

    def _progress(self, group: str, topic: str, queue_id: int) -> tuple[QueueKey, OffsetWrapper]:
        _, end = self._store.queues.bounds(topic, queue_id)
        consumed = max(self._offsets.query(group, topic, queue_id), 0)
        stored_ms = (
            self._store.queues.store_time_at(topic, queue_id, consumed - 1) if consumed else 0
        )
        queue = QueueKey(broker_name=self._broker_name, queue_id=queue_id, topic=topic)
        return queue, OffsetWrapper(
            broker_offset=end,
            consumer_offset=consumed,
            last_timestamp=max(stored_ms, 0),
            pull_offset=max(consumed, self._statistics.pulled_offset(topic, group, queue_id)),
        )


def _steps(parts: Sequence[_Part], instead: str) -> list[tuple[str, TopicConfig, range]]:
    """Return group, topic and some of its queues for each step.

    Raises:
        RequestRefusedError: There are too many queues for one answer.
    """
    total = sum(count for _, _, count in parts)
    if total > ROWS_MAX:
        raise RequestRefusedError(
            f"these are {total} queues, and an answer has at most {ROWS_MAX}: {instead}"
        )
    return [
        (group, topic, range(begin, min(begin + QUEUES_PER_STEP, count)))
        for group, topic, count in parts
        for begin in range(0, max(count, 1), QUEUES_PER_STEP)
    ]
