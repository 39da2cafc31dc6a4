"""The other brokers that have registered here: this broker can be their name server.

A registration ends with its connection, or if no heartbeat arrives within the broker's timeout. It
is only in memory: brokers repeat it every 30 seconds and with each new connection. Topics are added
to those registered before, because a broker of RocketMQ may send only the changed ones; one of
halfmq sends all. A topic is removed if its route is deleted (216), if a halfmq broker does not send
it any more, or with its broker.

Source: RocketMQ ``RouteInfoManager``.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from halfmq.remoting.bodies import BrokerData, QueueData
from halfmq.remoting.headers import RegisterBrokerRequestHeader
from halfmq.remoting.registration_bodies import DataVersion, RegisteredTopic, Registration

from ..errors import RequestRefusedError
from ..limits.kept import REGISTERED_BROKERS, REGISTERED_TOPICS, Kept
from ..ports import Connection
from .topic_config import PERM_WRITE

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_MS: Final = 120_000
"""Milliseconds without a heartbeat after which a broker is removed, unless it names its timeout."""

MASTER_ID: Final = 0


@dataclass(slots=True)
class _Process:
    """One process of a broker: the master, or a replica."""

    address: str
    ha_address: str
    version: DataVersion
    is_halfmq: bool
    connection: Connection
    timeout_ms: int
    seen_ms: int


@dataclass(slots=True)
class _Broker:
    """Processes with one broker name, by broker id, and their topics."""

    cluster: str
    members: dict[int, _Process] = field(default_factory=dict)
    topics: dict[str, QueueData] = field(default_factory=dict)


class BrokerTable:
    """Registered brokers by name; this broker itself is not among them."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        """Wire it; ``now_ms`` is monotonic."""
        self._now_ms = now_ms
        self._brokers: dict[str, _Broker] = {}
        self.on_created: Callable[[str, str, RegisteredTopic], None] = lambda *_: None
        """Called with broker, name and topic when a known broker registers a new one."""

    @property
    def all_halfmq(self) -> bool:
        members = (one for broker in self._brokers.values() for one in broker.members.values())
        return all(member.is_halfmq for member in members)

    @property
    def members_count(self) -> int:
        """Number of registered brokers, replicas included."""
        return sum(len(one.members) for one in self._brokers.values())

    @property
    def topics_count(self) -> int:
        """Number of their topics; one of several brokers counts for each."""
        return sum(len(one.topics) for one in self._brokers.values())

    def register(
        self,
        header: RegisterBrokerRequestHeader,
        registration: Registration,
        connection: Connection,
        *,
        is_halfmq: bool,
    ) -> None:
        """Add a broker and its topics, or renew it.

        Raises:
            RequestRefusedError: There are too many.
        """
        name, broker_id = header.broker_name, header.broker_id
        known = self._brokers.get(name)
        broker = known or _Broker(header.cluster_name)
        before = broker.members.get(broker_id)
        if (
            before is not None
            and before.address != header.broker_addr
            and before.version.state_version > registration.version.state_version
        ):
            return  # as RocketMQ: a master that was replaced
        is_first = before is None or before.address != header.broker_addr
        topics = registration.topics
        if before is None and len(topics) == 1:  # as RocketMQ: one topic only is an addition
            raise RequestRefusedError(
                "register broker failed: a broker must register all its topics first"
            )
        self._check_room(broker, topics, adds=before is None)
        if broker_id == MASTER_ID or MASTER_ID not in broker.members:
            changed = is_first or before is None or before.version != registration.version
            if is_halfmq:
                for topic in broker.topics.keys() - topics.keys():
                    del broker.topics[topic]
            created = () if before is None else topics.keys() - broker.topics.keys()
            for topic, entry in topics.items():
                if changed or topic not in broker.topics:
                    broker.topics[topic] = _queues(name, entry)
            for topic in created:
                self.on_created(name, topic, topics[topic])
        broker.cluster = header.cluster_name
        broker.members[broker_id] = _Process(
            header.broker_addr,
            header.ha_server_addr,
            registration.version,
            is_halfmq,
            connection,
            header.heartbeat_timeout_millis or HEARTBEAT_TIMEOUT_MS,
            self._now_ms(),
        )
        self._brokers[name] = broker
        if is_first:
            logger.info(
                "event=broker_registered broker=%s id=%d address=%s topics=%d",
                *(name, broker_id, header.broker_addr, len(broker.topics)),
            )

    def unregister(self, name: str, broker_id: int) -> None:
        """Remove a broker that stops; an unknown one is no error."""
        broker = self._brokers.get(name)
        if broker is not None and broker_id in broker.members:
            self._remove(name, broker_id, "it stops")

    def renew(self, name: str, address: str) -> DataVersion | None:
        """Record a heartbeat; return the registered version, None if the broker is unknown."""
        member = self._member(name, address)
        if member is None:
            return None
        member.seen_ms = self._now_ms()
        return member.version

    def connection_lost(self, connection: Connection) -> None:
        """Remove the brokers whose last registration came on this connection."""
        lost = [one for one in self._processes() if one[2].connection is connection]
        for name, broker_id, _member in lost:
            self._remove(name, broker_id, "its connection is closed")

    def expire(self) -> Iterator[None]:
        """Remove the brokers without a heartbeat within their timeout."""
        now_ms = self._now_ms()
        for name, broker_id, member in list(self._processes()):
            if now_ms - member.seen_ms > member.timeout_ms:
                self._remove(name, broker_id, "it is silent")
            yield

    def set_writable(self, name: str, *, is_writable: bool) -> int:
        """Change the write permission in the routes of a broker; return the number of topics.

        The broker's next registration with another version of its topics resets them.
        """
        broker = self._brokers.get(name)
        if broker is None:
            return 0
        for topic, queues in broker.topics.items():
            perm = queues.perm | PERM_WRITE if is_writable else queues.perm & ~PERM_WRITE
            broker.topics[topic] = msgspec.structs.replace(queues, perm=perm)
        return len(broker.topics)

    def add_topic(self, topic: str, queues: QueueData) -> None:
        """Add a new topic of a registered broker; ignore one of an unknown broker."""
        broker = self._brokers.get(queues.broker_name)
        if broker is not None:
            self._check_room(broker, [topic], adds=False)
            broker.topics[topic] = queues

    def delete_topic(self, topic: str, cluster: str | None) -> None:
        """Delete the routes of a topic, in one cluster if it is named."""
        for broker in self._brokers.values():
            if cluster is None or broker.cluster == cluster:
                broker.topics.pop(topic, None)

    def brokers(self) -> list[BrokerData]:
        return [_data(name, broker) for name, broker in self._brokers.items()]

    def get(self, name: str) -> BrokerData | None:
        broker = self._brokers.get(name)
        return None if broker is None else _data(name, broker)

    def route(self, topic: str) -> list[tuple[BrokerData, QueueData]]:
        return [
            (_data(name, broker), broker.topics[topic])
            for name, broker in self._brokers.items()
            if topic in broker.topics
        ]

    def topics(self, cluster: str | None = None) -> set[str]:
        """Return the names of their topics, of one cluster if it is named."""
        found: set[str] = set()
        for broker in self._brokers.values():
            if cluster is None or broker.cluster == cluster:
                found.update(broker.topics)
        return found

    def master_of(self, name: str) -> tuple[str, str] | None:
        """Return the address of a broker's master, and its address for replicas."""
        broker = self._brokers.get(name)
        master = None if broker is None else broker.members.get(MASTER_ID)
        return None if master is None else (master.address, master.ha_address)

    def _processes(self) -> Iterator[tuple[str, int, _Process]]:
        for name, broker in self._brokers.items():
            for broker_id, member in broker.members.items():
                yield name, broker_id, member

    def _member(self, name: str, address: str) -> _Process | None:
        broker = self._brokers.get(name)
        members = () if broker is None else broker.members.values()
        return next((one for one in members if one.address == address), None)

    def _remove(self, name: str, broker_id: int, reason: str) -> None:
        broker = self._brokers[name]
        del broker.members[broker_id]
        if not broker.members:
            del self._brokers[name]
        logger.info("event=broker_removed broker=%s id=%d reason=%r", name, broker_id, reason)

    def _check_room(self, broker: _Broker, topics: Iterable[str], *, adds: bool) -> None:
        if adds and self.members_count >= REGISTERED_BROKERS.most:
            raise RequestRefusedError(
                f"{REGISTERED_BROKERS.most} brokers are registered, no more may be"
            )
        count = self.topics_count + sum(topic not in broker.topics for topic in topics)
        limit = REGISTERED_TOPICS.most
        if count > limit:
            raise RequestRefusedError(
                f"all brokers would have {count} topics, the limit is {limit}"
            )

    def kept(self) -> Kept:
        return {REGISTERED_BROKERS: self.members_count, REGISTERED_TOPICS: self.topics_count}


def _queues(broker_name: str, topic: RegisteredTopic) -> QueueData:
    return QueueData(
        broker_name=broker_name,
        perm=topic.perm,
        read_queue_nums=topic.read_queue_nums,
        topic_sys_flag=topic.topic_sys_flag,
        write_queue_nums=topic.write_queue_nums,
    )


def _data(name: str, broker: _Broker) -> BrokerData:
    addresses = {broker_id: one.address for broker_id, one in sorted(broker.members.items())}
    return BrokerData(broker_addrs=addresses, broker_name=name, cluster=broker.cluster)
