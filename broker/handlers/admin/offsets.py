"""Reset of a group's offsets (222), in the broker: also for a group that is not connected.

The new offsets are committed at once. A consumer that is connected goes there at its next pull, at
most one suspension of a pull later (15 s); until then its own commits are ignored.

Source: RocketMQ 5.3.3 `AdminBrokerProcessor#resetOffsetInner`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from halfmq.remoting.admin_headers import ResetOffsetRequestHeader
from halfmq.remoting.bodies import QueueKey, encode_offset_table
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.store.message_store import MessageStore

from ...errors import RequestRefusedError
from ...ports import Connection, Handler
from ...tables.consumer_offsets import ConsumerOffsetTable
from ...tables.groups import GroupTable
from ...tables.topics import Identity, TopicConfig, TopicTable
from .changes import Changes
from .sliced import collect


class OffsetResetHandlers:
    """Sends groups to other messages."""

    def __init__(
        self,
        topics: TopicTable,
        groups: GroupTable,
        offsets: ConsumerOffsetTable,
        store: MessageStore,
        changes: Changes,
        identity: Identity,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._store = store
        self._changes = changes
        self._broker_name = identity.broker_name

    def handlers(self) -> dict[int, Handler]:
        """The request codes served here."""
        return {RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self.reset}

    def reset(self, request: RemotingCommand, connection: Connection) -> None:
        """Set the offsets of a group in one or all queues of a topic, and answer with them."""
        header = request.header
        assert isinstance(header, ResetOffsetRequestHeader)
        topic = self._topics.get(header.topic)
        if topic is None:
            raise RequestRefusedError(
                ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} does not exist"
            )
        if header.group not in self._groups:
            raise RequestRefusedError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {header.group} does not exist"
            )
        rows = collect(
            request,
            connection,
            lambda: _queues(topic, header),
            lambda queue_id: (queue_id, self._target(header, queue_id)),
        )
        if not rows:
            raise RequestRefusedError(ResponseCode.SYSTEM_ERROR, "No queues to reset.")
        targets = dict(rows)
        change = partial(self._reset, header.group, header.topic, targets)
        what = f"offsets of group {header.group} in topic {header.topic}: {targets}"
        self._changes.make(change, what, request, connection)

    def _target(self, header: ResetOffsetRequestHeader, queue_id: int) -> int:
        queues = self._store.queues
        first, end = queues.bounds(header.topic, queue_id)
        if header.queue_id >= 0 and header.offset is not None and header.offset != -1:
            if not first <= header.offset <= end + 1:
                raise RequestRefusedError(
                    ResponseCode.SYSTEM_ERROR,
                    f"Target offset {header.offset} not in consume queue range [{first}-{end}]",
                )
            return header.offset
        if header.timestamp < 0:
            return end
        return queues.offset_by_time(header.topic, queue_id, header.timestamp)

    async def _reset(self, group: str, topic: str, targets: Mapping[int, int]) -> bytes:
        for queue_id, offset in targets.items():
            self._offsets.reset(group, topic, queue_id, offset)
        await self._offsets.save_now()
        return encode_offset_table(
            {
                QueueKey(broker_name=self._broker_name, queue_id=queue_id, topic=topic): offset
                for queue_id, offset in targets.items()
            }
        )


def _queues(topic: TopicConfig, header: ResetOffsetRequestHeader) -> range:
    if header.queue_id >= 0:
        return range(header.queue_id, header.queue_id + 1)
    return range(topic.read_queue_nums)
