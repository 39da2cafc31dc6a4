"""How far groups are: offsets and lag by queue, of one group (208) or of all (317).

Source: RocketMQ 5.3.3 `AdminBrokerProcessor#getConsumeStats`, `#fetchAllConsumeStatsInBroker`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from halfmq.remoting.admin_bodies import encode_broker_consume_stats
from halfmq.remoting.admin_headers import (
    GetBrokerConsumeStatsRequestHeader,
    GetConsumeStatsRequestHeader,
)
from halfmq.remoting.bodies import OffsetWrapper, QueueKey, encode_consume_stats
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply
from halfmq.store.message_store import MessageStore

from ...config import TopicDefaults
from ...ports import Connection, Handler
from ...tables.client_registry import ClientRegistry
from ...tables.consumer_offsets import ConsumerOffsetTable
from ...tables.groups import GroupTable
from ...tables.statistics import Statistics
from ...tables.topics import TopicConfig, TopicTable
from .groups import topics_of
from .sliced import collect


class ConsumptionHandlers:
    """Serves what operators ask about the progress of groups."""

    def __init__(
        self,
        topics: TopicTable,
        groups: GroupTable,
        offsets: ConsumerOffsetTable,
        registry: ClientRegistry,
        store: MessageStore,
        statistics: Statistics,
        identity: TopicDefaults,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._registry = registry
        self._store = store
        self._statistics = statistics
        self._broker_name = identity.broker_name

    def handlers(self) -> dict[int, Handler]:
        """The request codes served here."""
        return {
            RequestCode.GET_CONSUME_STATS: self.consume_stats,
            RequestCode.GET_BROKER_CONSUME_STATS: self.all_consume_stats,
        }

    def consume_stats(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer where a group and the log are in each queue of one, several or all topics.

        Without a list, topics that a connected group does not subscribe to are left out.
        """
        header = request.header
        assert isinstance(header, GetConsumeStatsRequestHeader)
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
        rows = collect(
            request,
            connection,
            lambda: [
                (name, queue_id)
                for name in dict.fromkeys(names)
                if (topic := self._topics.get(name)) is not None
                for queue_id in range(topic.read_queue_nums)
            ],
            lambda row: self._progress(group, *row),
            stage=1,
        )
        of_topics = {queue.topic for queue, _ in rows}
        per_second = sum(self._statistics.delivered_per_second(name, group) for name in of_topics)
        return encode_reply(request, body=encode_consume_stats(dict(rows), per_second))

    def all_consume_stats(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer where each group is in each topic in which it has offsets."""
        header = request.header
        assert isinstance(header, GetBrokerConsumeStatsRequestHeader)
        keys = collect(
            request, connection, self._offsets.key_batches, lambda batch: batch, is_last=False
        )
        stats = collect(
            request,
            connection,
            lambda: list(self._consumed(keys, ordered_only=header.is_order)),
            self._stats_of_topic,
            stage=1,
        )
        of_group: dict[str, list[bytes]] = {group.name: [] for group in self._groups}
        for group, body, _, _ in stats:
            of_group.setdefault(group, []).append(body)
        return encode_reply(
            request,
            body=encode_broker_consume_stats(
                of_group,
                connection.broker_address,
                sum(lag for _, _, lag, _ in stats),
                sum(in_flight for _, _, _, in_flight in stats),
            ),
        )

    def _consumed(
        self, keys: Iterable[Sequence[str]], *, ordered_only: bool
    ) -> Iterator[tuple[str, TopicConfig]]:
        """Yield the pairs of group and topic to answer for."""
        for key in chain.from_iterable(keys):
            name, _, group = key.partition("@")
            topic = self._topics.get(name)
            if topic is None or group not in self._groups or (ordered_only and not topic.order):
                continue
            connected = self._registry.consumer_groups.get(group)
            if connected is None or not connected.subscriptions or name in connected.subscriptions:
                yield group, topic

    def _stats_of_topic(self, consumed: tuple[str, TopicConfig]) -> tuple[str, bytes, int, int]:
        group, topic = consumed
        rows = dict(self._progress(group, topic.name, one) for one in range(topic.write_queue_nums))
        per_second = self._statistics.delivered_per_second(topic.name, group)
        lag = sum(row.broker_offset - row.consumer_offset for row in rows.values())
        in_flight = sum(row.pull_offset - row.consumer_offset for row in rows.values())
        return group, encode_consume_stats(rows, per_second), lag, in_flight

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
