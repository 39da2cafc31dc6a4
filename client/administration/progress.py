"""What groups have consumed: their lag, and what became of one message in each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from halfmq.remoting.admin_bodies import decode_group_table
from halfmq.remoting.codes import INT64_MAX, RequestCode
from halfmq.remoting.pop import pop_retry_topic
from halfmq.store.format.properties import PROPERTY_REAL_TOPIC
from halfmq.store.format.topics import (
    BUILT_IN_GROUPS,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    dead_letter_topic,
    retry_topic,
)

from ..errors import UnsupportedRequestError
from ..message import ReceivedMessage
from .dead_letters import DeadLetterCalls
from .group_offsets import OffsetCalls
from .groups import ConsumerGroup, GroupCalls
from .messages import MESSAGES_MAX

Fate: TypeAlias = Literal["consumed", "waiting", "retrying", "dead letter", "never consumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLag:
    """How far a group lags in one topic."""

    topic: str
    messages: int
    seconds: float
    """Since the oldest message that is not consumed was stored; 0 if all are consumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLag:
    """How far a consumer group lags."""

    group: str
    members: int
    """Connected consumers; 0 also for a group at brokers of Apache RocketMQ."""
    topics: tuple[TopicLag, ...]
    """Topics in which it has offsets, by name; its retry topic too."""

    @property
    def messages(self) -> int:
        """Messages in all topics that are stored and not consumed."""
        return sum(one.messages for one in self.topics)

    @property
    def seconds(self) -> float:
        """The longest lag in time of a topic."""
        return max((one.seconds for one in self.topics), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """What became of a message in a group that consumes its topic."""

    group: str
    fate: Fate
    attempts: int
    """Deliveries that failed so far."""


class ProgressCalls(DeadLetterCalls, GroupCalls, OffsetCalls):
    """Shows what groups have consumed."""

    async def group_names(self, *, built_in: bool = False) -> list[str]:
        """Return the names of all consumer groups of all brokers, with members or without.

        Groups that every broker has, for RocketMQ's tools, are left out unless ``built_in``.
        """
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        found = set().union(*(await self._ask_each(decode_group_table, code)).values())
        return sorted(found if built_in else found.difference(BUILT_IN_GROUPS))

    async def connected_groups(self, group: str | None = None) -> dict[str, ConsumerGroup]:
        """Return the groups with connected consumers by name; with ``group`` only that one.

        Brokers of Apache RocketMQ do not tell them.
        """
        try:
            return {one.name: one for one in await self.groups(group)}
        except UnsupportedRequestError:
            return {}

    async def lag(self, group: str) -> GroupLag:
        """Return how far a group lags, in messages and in time."""
        behind: dict[str, int] = {}
        for one in await self.offsets(group):
            behind[one.queue.topic] = behind.get(one.queue.topic, 0) + max(one.lag, 0)
        topics = []
        for topic, messages in sorted(behind.items()):
            spans = await self.time_spans(group, topic) if messages else []
            seconds = max((span.delay for span in spans), default=0.0)
            topics.append(TopicLag(topic=topic, messages=messages, seconds=seconds))
        connected = await self.connected_groups(group)
        members = sum(len(one.members) for one in connected.values())
        return GroupLag(group=group, members=members, topics=tuple(topics))

    async def consumption(self, message: ReceivedMessage) -> list[Consumption]:
        """Return what became of a stored message in each group that consumes its topic.

        ``consumed`` says that the group's offset is past it: a consumer that filters it out, or an
        operator who moves the offset, has the same effect.
        """
        found = []
        for group in await self.groups_of(message.topic):
            fate, attempts = await self._fate(message, group)
            found.append(Consumption(group=group, fate=fate, attempts=attempts))
        return found

    async def _fate(self, message: ReceivedMessage, group: str) -> tuple[Fate, int]:
        message_id, topic = message.message_id, message.topic
        popped = (pop_retry_topic(topic, group, version_2=two) for two in (False, True))
        retries = retry_topic(group), *popped
        dead = await self._copies(dead_letter_topic(group), message_id)
        if dead:
            return "dead letter", dead[-1].delivery_attempt - 1
        offsets = {one.queue: one.offset for one in await self.offsets(group)}
        waiting = [
            one
            for name in (SCHEDULE_TOPIC, TIMER_TOPIC)
            for one in await self._copies(name, message_id)
            if one.properties.get(PROPERTY_REAL_TOPIC) in retries
        ]
        retried = [one for name in retries for one in await self._copies(name, message_id)]
        failed = max((one.delivery_attempt - 1 for one in (*waiting, *retried)), default=0)
        delivered = [one for one in retried if one.delivery_attempt - 1 == failed]
        if failed and not any(offsets.get(one.queue, 0) > one.queue_offset for one in delivered):
            return "retrying", failed
        if message.queue not in offsets:
            return "never consumed", 0
        return ("consumed" if offsets[message.queue] > message.queue_offset else "waiting"), failed

    async def _copies(self, topic: str, message_id: str) -> list[ReceivedMessage]:
        """Return the stored copies of a message in a topic, the newest last."""
        found = await self._query(topic, message_id, MESSAGES_MAX, 0, INT64_MAX, is_unique_key=True)
        return sorted(found, key=lambda one: one.store_timestamp)
