"""How far groups are: offsets and lag by queue (208).

Source: RocketMQ 5.3.3 `AdminBrokerProcessor#getConsumeStats`.
"""

from __future__ import annotations

from halfmq.remoting.admin_headers import GetConsumeStatsRequestHeader
from halfmq.remoting.bodies import OffsetWrapper, QueueKey, encode_consume_stats
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply
from halfmq.store.message_store import MessageStore

from ...ports import Connection, Handler
from ...tables.client_registry import ClientRegistry
from ...tables.consumer_offsets import ConsumerOffsetTable
from ...tables.topics import Identity, TopicTable
from .groups import topics_of
from .sliced import collect


class ConsumptionHandlers:
    """Serves what operators ask about the progress of groups."""

    def __init__(
        self,
        topics: TopicTable,
        offsets: ConsumerOffsetTable,
        registry: ClientRegistry,
        store: MessageStore,
        identity: Identity,
    ) -> None:
        self._topics = topics
        self._offsets = offsets
        self._registry = registry
        self._store = store
        self._broker_name = identity.broker_name

    def handlers(self) -> dict[int, Handler]:
        """The request codes served here."""
        return {RequestCode.GET_CONSUME_STATS: self.consume_stats}

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
        return encode_reply(request, body=encode_consume_stats(dict(rows)))

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
            pull_offset=consumed,
        )
