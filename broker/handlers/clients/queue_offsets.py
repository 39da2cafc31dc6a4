"""Consumer offsets (14, 15) and queries of the offsets of a queue (29 to 32).

Unknown topics and queues are no error for 29 to 32: they are empty queues, as for RocketMQ.
Source: RocketMQ `ConsumerManageProcessor`, `AdminBrokerProcessor`.
"""

import os
from typing import Final

from attrs import define

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import (
    ConsumerGroupRequestHeader,
    GetEarliestMsgStoretimeResponseHeader,
    GetMaxOffsetRequestHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    QueueRequestHeader,
    SearchOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from halfmq.remoting.replies import encode_reply
from halfmq.store.message_store import MessageStore

from ...errors import RequestRefusedError
from ...ports import Connection, Handlers, serves
from ...tables.consumer_offsets import ConsumerOffsetTable
from ...tables.group_table import GroupTable
from ...tables.topic_table import TopicTable

YOUNG_SHARE_OF_MEMORY: Final = 0.4
"""Share of the machine's memory: a queue counts as young if the log after its first message is not
larger. Source: `accessMessageInMemoryMaxRatio` of `MessageStoreConfig`."""


def _share_of_memory() -> int:
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # unknown on this system: assume 8 GiB, a small server
        memory = 8 << 30
    return int(memory * YOUNG_SHARE_OF_MEMORY)


@define(eq=False, repr=False)
class OffsetHandlers(Handlers):
    """Serves the offsets of a group, and the first and last offsets of a queue."""

    _store: MessageStore
    _offsets: ConsumerOffsetTable
    _topics: TopicTable
    _groups: GroupTable
    _young_bytes: int = _share_of_memory()  # of log that count as young

    @serves(RequestCode.QUERY_CONSUMER_OFFSET)
    def query_consumer_offset(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with the committed offset; a new group begins at 0 in a young queue."""
        header = request.header_as(QueryConsumerOffsetRequestHeader)
        offset = self._offsets.query(header.consumer_group, header.topic, header.queue_id)
        if offset < 0:
            if header.set_zero_if_not_found is False:
                raise RequestRefusedError(
                    "Not found, do not set to zero, maybe this group boot first",
                    ResponseCode.QUERY_NOT_FOUND,
                )
            if not self.is_young(header.topic, header.queue_id):
                raise RequestRefusedError(
                    "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first",
                    ResponseCode.QUERY_NOT_FOUND,
                )
            offset = 0
        return encode_reply(request, header=OffsetResponseHeader(offset=offset))

    def is_young(self, topic: str, queue_id: int) -> bool:
        """Return whether the first message is still stored and recent.

        Otherwise a group that begins at the end of a new topic would miss the messages sent before
        its first consumer started.
        """
        first, end = self._store.queues.bounds(topic, queue_id)
        if first > 0 or end <= 0:
            return False
        ranges = self._store.queues.get(topic, queue_id, 0, max_count=1).ranges
        return bool(ranges) and self._store.write_offset - ranges[0][0] <= self._young_bytes

    @serves(RequestCode.UPDATE_CONSUMER_OFFSET)
    def update_consumer_offset(self, request: RemotingCommand, connection: Connection) -> bytes:
        header = request.header_as(UpdateConsumerOffsetRequestHeader)
        group, topic = header.consumer_group, header.topic
        if group not in self._groups:
            raise RequestRefusedError(
                f"Group {group} not exist!", ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
            )
        config = self._topics.get(topic)
        if config is None:
            raise RequestRefusedError(f"Topic {topic} not exist!", ResponseCode.TOPIC_NOT_EXIST)
        _, end = self._store.queues.bounds(topic, header.queue_id)
        count = max(config.read_queue_nums, config.write_queue_nums)
        # One above the count may be a queue from before the topic was made smaller.
        if header.queue_id < 0 or (header.queue_id >= count and not end):
            # RocketMQ keeps it, and answers success.
            remark = f"topic[{topic}] has no queue {header.queue_id}, it has {count}: not kept"
            return encode_reply(request, remark=remark)
        if not self._offsets.commit(group, topic, header.queue_id, header.commit_offset, end=end):
            remark = "Offset has been previously reset"
            if header.commit_offset > end:
                remark = f"{header.commit_offset} is beyond the end of the queue, {end}: not kept"
            return encode_reply(request, remark=remark)
        if self._offsets.pending_reset(group, topic, header.queue_id) is not None:
            # A client before 5.0 gives the queue up now, and would take it again at its next
            # rebalance, up to 20 s later.
            changed = ConsumerGroupRequestHeader(consumer_group=group)
            connection.send_request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, changed)
        return encode_reply(request)

    @serves(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
    def search_offset(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with the offset of the first message that was stored at a time or after it."""
        header = request.header_as(SearchOffsetRequestHeader)
        offset = self._store.queues.offset_by_time(
            header.topic, header.queue_id, header.timestamp, upper=header.boundary_type == "UPPER"
        )
        return encode_reply(request, header=OffsetResponseHeader(offset=offset))

    @serves(RequestCode.GET_MAX_OFFSET)
    def max_offset(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with the queue offset that the next message will have."""
        header = request.header_as(GetMaxOffsetRequestHeader)
        _, end = self._store.queues.bounds(header.topic, header.queue_id)
        return encode_reply(request, header=OffsetResponseHeader(offset=end))

    @serves(RequestCode.GET_MIN_OFFSET)
    def min_offset(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with the first queue offset that still has a message."""
        header = request.header_as(QueueRequestHeader)
        first = self._store.queues.first_offset(header.topic, header.queue_id)
        return encode_reply(request, header=OffsetResponseHeader(offset=first))

    @serves(RequestCode.GET_EARLIEST_MSG_STORETIME)
    def earliest_store_time(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with the time in ms at which the first message of a queue was stored, or -1."""
        header = request.header_as(QueueRequestHeader)
        topic, queue_id = header.topic, header.queue_id
        first, end = self._store.queues.bounds(topic, queue_id)
        timestamp = self._store.queues.store_time_at(topic, queue_id, first) if first < end else -1
        return encode_reply(
            request, header=GetEarliestMsgStoretimeResponseHeader(timestamp=timestamp)
        )
