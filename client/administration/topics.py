"""Topics of all brokers: list, create and delete them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from halfmq.remoting.admin_bodies import decode_group_list, decode_topic_table
from halfmq.remoting.admin_headers import (
    CreateTopicRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    TopicRequestHeader,
)
from halfmq.remoting.bodies import QueueKey, TopicOffset, decode_topic_stats
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.store.format.topics import is_internal_topic, reply_topic

from ..arguments import check_count, check_text
from ..errors import BadAnswerError, ConfigurationError
from ..message import MessageQueue
from .brokers import ClusterClient, time_of

_DEFAULT_TOPIC: Final = "TBW102"  # as RocketMQ's tools name it; brokers ignore it here
_READ: Final = 4  # bits of a topic's perm
_WRITE: Final = 2
_QUEUES_MAX: Final = 1_024  # of a topic on one halfmq broker


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic of one broker."""

    name: str
    broker_name: str
    read_queues: int
    """Queues that consumers read; less than ``write_queues`` only for a moment, when it shrinks."""
    write_queues: int
    """Queues that producers send to."""
    readable: bool
    writable: bool
    attributes: Mapping[str, str]
    """Such as ``message.type``; see RocketMQ's ``TopicAttributes``."""

    is_internal: bool
    """Whether it is the broker's own, or holds retries or dead letters of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRange:
    """The messages of one queue."""

    queue: MessageQueue
    first: int
    """Queue offset of the oldest message that is still stored."""
    end: int
    """Queue offset of the next message."""
    last_stored: datetime | None
    """When the newest message was stored; None: there is none."""


class TopicCalls(ClusterClient):
    """Administers topics."""

    async def topics(self) -> list[Topic]:
        """Return the topics of all brokers, the brokers' own included, by name and broker name.

        Raises:
            UnsupportedRequestError: A broker does not serve this.
        """
        found: list[Topic] = []
        tables = await self._ask_each(decode_topic_table, RequestCode.GET_ALL_TOPIC_CONFIG)
        for broker_name, entries in tables.items():
            clusters = {name for name in entries if reply_topic(name) in entries}
            own = {broker_name, *clusters, *map(reply_topic, clusters)}
            try:
                found += [_topic_from_entry(*one, broker_name, own) for one in entries.items()]
            except (TypeError, ValueError, AttributeError) as error:
                address = self._session.routes.brokers[broker_name]
                raise BadAnswerError(address, f"a topic has {error}") from error
        return sorted(found, key=lambda one: (one.name, one.broker_name))

    async def create_topic(
        self,
        name: str,
        *,
        queues: int = 4,
        read_queues: int | None = None,
        readable: bool = True,
        writable: bool = True,
        attributes: Mapping[str, str] | None = None,
        cluster: str | None = None,
    ) -> None:
        """Create a topic on every broker, or replace its settings; it is on disk then.

        Args:
            name: The topic.
            queues: Queues on each broker that producers send to.
            read_queues: Queues that consumers read; None: as many. To shrink a topic, lower
                ``queues`` first, and this when the others are consumed.
            readable: Whether consumers may read it.
            writable: Whether producers may send to it.
            attributes: Attributes to set; others stay as they are.
            cluster: Only on the brokers of this cluster; None: of all.

        Raises:
            ConfigurationError: There is no such cluster.
            BrokerRefusedError: The name is no topic name, is the broker's own, or an attribute
                does not exist. The brokers before it, by name, have the topic.
        """
        check_text("name", name)
        check_count("queues", queues, range(1, _QUEUES_MAX + 1))
        if read_queues is not None:
            check_count("read_queues", read_queues, range(1, _QUEUES_MAX + 1))
        header = CreateTopicRequestHeader(
            topic=name,
            default_topic=_DEFAULT_TOPIC,
            read_queue_nums=queues if read_queues is None else read_queues,
            write_queue_nums=queues,
            perm=_READ * readable + _WRITE * writable,
            topic_filter_type="SINGLE_TAG",
            topic_sys_flag=0,
            attributes=",".join(f"+{key}={value}" for key, value in (attributes or {}).items()),
        )
        clusters = self._session.routes.clusters
        if cluster is not None and cluster not in clusters:
            raise ConfigurationError("cluster", cluster, f"one of {sorted(clusters)}")
        for broker, address in self._brokers():
            if cluster is None or broker in clusters[cluster]:
                await self._send(address, RequestCode.UPDATE_AND_CREATE_TOPIC, header)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic, its consumers' offsets and its route; an unknown topic is no error.

        Producers that still send create it again if the broker creates topics on first use.

        Raises:
            BrokerRefusedError: It is the broker's own.
        """
        check_text("name", name)
        header = TopicRequestHeader(topic=name)
        await self._send_each(RequestCode.DELETE_TOPIC_IN_BROKER, header)
        of_route = DeleteTopicFromNamesrvRequestHeader(topic=name)
        for address in self.config.namesrv_addresses:
            await self._send(address, RequestCode.DELETE_TOPIC_IN_NAMESRV, of_route)

    async def queues(self, topic: str) -> list[QueueRange]:
        """Return the queues of a topic on all brokers, and which messages each has.

        Raises:
            BrokerRefusedError: No broker has the topic.
        """
        check_text("topic", topic)
        code, header = RequestCode.GET_TOPIC_STATS_INFO, TopicRequestHeader(topic=topic)
        absent = ResponseCode.TOPIC_NOT_EXIST
        tables = await self._ask_each(decode_topic_stats, code, header, absent=absent)
        found = [_range(*one) for table in tables.values() for one in table.items()]
        return sorted(found, key=lambda one: one.queue)

    async def groups_of(self, topic: str) -> list[str]:
        """Return the consumer groups that consume a topic, or have done so, by name."""
        check_text("topic", topic)
        code, header = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicRequestHeader(topic=topic)
        lists = await self._ask_each(decode_group_list, code, header)
        return sorted({group for names in lists.values() for group in names})


def _range(key: QueueKey, offsets: TopicOffset) -> QueueRange:
    stored_ms = offsets.last_update_timestamp
    return QueueRange(
        queue=MessageQueue(key.topic, key.broker_name, key.queue_id),
        first=offsets.min_offset,
        end=offsets.max_offset,
        last_stored=time_of(stored_ms),
    )


def _topic_from_entry(
    name: str, entry: Mapping[str, Any], broker_name: str, own: Collection[str]
) -> Topic:
    perm = int(entry.get("perm", _READ | _WRITE))
    return Topic(
        name=name,
        broker_name=broker_name,
        read_queues=int(entry.get("readQueueNums", 0)),
        write_queues=int(entry.get("writeQueueNums", 0)),
        readable=perm & _READ != 0,
        writable=perm & _WRITE != 0,
        attributes={key: str(value) for key, value in (entry.get("attributes") or {}).items()},
        is_internal=is_internal_topic(name, own),
    )
