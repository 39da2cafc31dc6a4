"""Offsets of consumer groups: show, reset and clone them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias

from halfmq.remoting.admin_bodies import Entry, decode_entries
from halfmq.remoting.admin_headers import (
    CloneGroupOffsetRequestHeader,
    GetConsumeStatsRequestHeader,
    GroupAndTopicRequestHeader,
    ResetOffsetRequestHeader,
)
from halfmq.remoting.bodies import (
    OffsetWrapper,
    QueueKey,
    decode_consume_stats,
    decode_offset_table,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.errors import ProtocolError

from ..arguments import check_count, check_kind, check_optional_text, check_text
from ..errors import ConfigurationError
from ..message import MessageQueue
from .brokers import ClusterClient, time_of

Position: TypeAlias = Literal["first", "last"] | datetime
"""The first message, the end of a queue, or the first message stored at a time or after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOffset:
    """The offset of a consumer group in one queue."""

    queue: MessageQueue
    offset: int
    """Queue offset of the next message to consume."""
    end: int
    """Queue offset of the next message to be stored."""
    consumed: datetime | None
    """When the last consumed message was stored; None: not known."""

    @property
    def lag(self) -> int:
        """Messages that are stored and not consumed."""
        return self.end - self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpan:
    """The store times of the messages in one queue, and up to when a group has consumed them."""

    queue: MessageQueue
    first_stored: datetime | None
    """None: the queue has no messages."""
    last_stored: datetime | None
    consumed: datetime | None
    """When the last consumed message was stored."""
    delay: float
    """Seconds since the first message that is not consumed was stored; 0: all are consumed."""


class OffsetCalls(ClusterClient):
    """Shows and changes the offsets of groups."""

    async def offsets(self, group: str, topic: str | None = None) -> list[GroupOffset]:
        """Return the offsets of a group, sorted by queue; ``topic`` limits them to one topic.

        Queues for which the group has no offset are left out.
        """
        check_text("group", group)
        check_optional_text("topic", topic)
        header = GetConsumeStatsRequestHeader(consumer_group=group, topic=topic)
        tables = await self._ask_each(decode_consume_stats, RequestCode.GET_CONSUME_STATS, header)
        found = [_offset(*one) for table in tables.values() for one in table.items()]
        return sorted(found, key=lambda one: one.queue)

    async def reset_offsets(self, group: str, topic: str, to: Position) -> dict[MessageQueue, int]:
        """Reset the offsets of a group in all queues of a topic; return the new ones.

        Connected consumers continue there at once, those of RocketMQ before 5.0 after ten seconds.
        With ``useServerSideResetOffset=false`` a broker resets connected consumers only.

        Args:
            group: The consumer group; it must exist.
            topic: The topic.
            to: ``"first"``: the oldest stored message; ``"last"``: the end, so that all stored
                messages are skipped; a datetime: the first message stored then or later.

        Raises:
            BrokerRefusedError: No broker has the topic, or one does not have the group.
        """
        check_text("group", group)
        check_text("topic", topic)
        header = ResetOffsetRequestHeader(
            topic=topic, group=group, timestamp=_timestamp_ms(to), is_force=True
        )
        code, absent = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ResponseCode.TOPIC_NOT_EXIST
        tables = await self._ask_each(decode_offset_table, code, header, absent=absent)
        found = [(_queue(key), at) for table in tables.values() for key, at in table.items()]
        return dict(sorted(found))

    async def reset_offset(self, group: str, queue: MessageQueue, offset: int) -> None:
        """Reset the offset of a group in one queue.

        Raises:
            BrokerRefusedError: The queue has no such offset, or the group does not exist.
        """
        check_text("group", group)
        check_kind("queue", queue, MessageQueue)
        check_count("offset", offset, range(1 << 63))
        address = self._address_of(queue.broker_name)
        header = ResetOffsetRequestHeader(
            topic=queue.topic,
            group=group,
            timestamp=0,
            is_force=True,
            queue_id=queue.queue_id,
            offset=offset,
        )
        await self._send(address, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)

    async def clone_offsets(
        self, source: str, target: str, topic: str | None = None, *, offline: bool = True
    ) -> None:
        """Set the offsets of a group to those of another one, in all topics or in one.

        Args:
            source: The group whose offsets are read.
            target: The group whose offsets are set; it must exist.
            topic: None: all topics in which ``source`` has offsets.
            offline: False leaves out topics that connected consumers of ``source`` no longer
                subscribe to.

        Raises:
            BrokerRefusedError: ``target`` does not exist.
        """
        check_text("source", source)
        check_text("target", target)
        check_optional_text("topic", topic)
        header = CloneGroupOffsetRequestHeader(
            src_group=source, dest_group=target, topic=topic, offline=offline
        )
        await self._send_each(RequestCode.CLONE_GROUP_OFFSET, header)

    async def time_spans(self, group: str, topic: str) -> list[TimeSpan]:
        """Return the store times of each queue of a topic, and how far a group lags in time.

        Raises:
            BrokerRefusedError: No broker has the topic.
        """
        check_text("group", group)
        check_text("topic", topic)
        code, absent = RequestCode.QUERY_CONSUME_TIME_SPAN, ResponseCode.TOPIC_NOT_EXIST
        header = GroupAndTopicRequestHeader(group=group, topic=topic)
        lists = await self._ask_each(_time_spans, code, header, absent=absent)
        return sorted((one for found in lists.values() for one in found), key=lambda one: one.queue)


def _queue(key: QueueKey) -> MessageQueue:
    return MessageQueue(key.topic, key.broker_name, key.queue_id)


def _offset(key: QueueKey, offsets: OffsetWrapper) -> GroupOffset:
    return GroupOffset(
        queue=_queue(key),
        offset=offsets.consumer_offset,
        end=offsets.broker_offset,
        consumed=time_of(offsets.last_timestamp),
    )


def _time_spans(body: bytes) -> list[TimeSpan]:
    try:
        return [_time_span(entry) for entry in decode_entries(body, "consumeTimeSpanSet")]
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a time span has {error}") from error


def _time_span(entry: Entry) -> TimeSpan:
    queue: Any = entry["messageQueue"]
    return TimeSpan(
        queue=MessageQueue(str(queue["topic"]), str(queue["brokerName"]), int(queue["queueId"])),
        first_stored=time_of(int(entry["minTimeStamp"])),
        last_stored=time_of(int(entry["maxTimeStamp"])),
        consumed=time_of(int(entry["consumeTimeStamp"])),
        delay=int(entry["delayTime"]) / 1000,
    )


def _timestamp_ms(to: object) -> int:
    """Return a position as request 222 has it: milliseconds, negative for the end."""
    if to == "first":
        return 0
    if to == "last":
        return -1
    if not isinstance(to, datetime) or to.tzinfo is None or to.timestamp() < 0:
        raise ConfigurationError("to", to, '"first", "last" or a datetime with a time zone')
    return int(to.timestamp() * 1000)
