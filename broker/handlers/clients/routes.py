"""Requests to the name server: routes (105), the cluster (106), all topics (206).

Before a broker is stopped, an operator can remove the write permission from all its routes (205);
request 327 or a restart restores it. DRAIN_BROKER (9006), halfmq's own, does so and stops it.

The broker is its own name server, so a route comes from the topic table and is never stale. Its
address is `brokerIP1`, or the one by which the client has reached the broker. Brokers that have
registered here (`brokers`) are in the same answers.

Source: RocketMQ `ClientRequestProcessor`, `DefaultRequestProcessor` of the name server.
"""

import logging
from collections.abc import Callable
from typing import Final

import msgspec
from attrs import define, field

from halfmq.remoting.admin_headers import (
    AddWritePermOfBrokerResponseHeader,
    BrokerNameRequestHeader,
    DrainBrokerRequestHeader,
    WipeWritePermOfBrokerResponseHeader,
)
from halfmq.remoting.bodies import (
    BrokerData,
    ClusterInfo,
    QueueData,
    TopicRouteData,
    encode_cluster_info,
    encode_route,
    encode_topic_list,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import RECOGNITION_FIELD, GetRouteInfoRequestHeader
from halfmq.remoting.replies import encode_reply

from ...config import TopicDefaults
from ...errors import RequestRefusedError
from ...ports import Connection, Handlers, serves
from ...tables.registered_brokers import BrokerTable
from ...tables.topic_config import PERM_WRITE, TopicConfig
from ...tables.topic_table import TopicTable

logger = logging.getLogger(__name__)

DRAIN_MS_MAX: Final = 3_600_000
"""Longest time between the routes' change and the end of a broker that is drained."""


LOOPBACK: Final = frozenset({"127.0.0.1", "[::1]"})
"""Hosts of the addresses of brokers on this machine."""


@define(eq=False, repr=False)
class RouteHandlers(Handlers):
    """Serves routes and the lists of brokers and topics."""

    _topics: TopicTable
    _brokers: BrokerTable
    _identity: TopicDefaults
    _drain: Callable[[float], None]  # begins to end the broker, after seconds for producers
    _is_writable: bool = field(init=False, default=True)  # as routes show it

    @serves(RequestCode.GET_ROUTEINFO_BY_TOPIC)
    def route(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with the brokers and queues of a topic; refuse if there is no such topic."""
        header = request.header_as(GetRouteInfoRequestHeader)
        others = self._brokers.route(header.topic)
        found = [(_as_reached(broker, connection), queues) for broker, queues in others]
        topic = self._topics.offered(header.topic)
        if topic is not None:
            found.insert(0, (self._broker(connection), self._queues(topic)))
        # A topic whose name contains the mark gets the field too, which clients ignore.
        is_asked = RECOGNITION_FIELD.encode() in request.raw_header
        mark = {RECOGNITION_FIELD: "1"} if is_asked and self._brokers.all_halfmq else None
        if not found:
            raise RequestRefusedError(
                f"No topic route info in name server for the topic: {header.topic}\n"
                "See https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details.\n"
                f"{self._topics.why_not_offered(header.topic)}",
                ResponseCode.TOPIC_NOT_EXIST,
                mark,
            )
        route = TopicRouteData(
            broker_datas=tuple(broker for broker, _ in found),
            queue_datas=tuple(queues for _, queues in found),
        )
        return encode_reply(request, header=mark, body=encode_route(route))

    @serves(RequestCode.GET_BROKER_CLUSTER_INFO)
    def cluster_info(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Answer with this broker and those that have registered here."""
        others = [_as_reached(broker, connection) for broker in self._brokers.brokers()]
        brokers = [self._broker(connection), *others]
        clusters: dict[str, list[str]] = {}
        for broker in brokers:
            clusters.setdefault(broker.cluster, []).append(broker.broker_name)
        info = ClusterInfo(
            broker_addr_table={broker.broker_name: broker for broker in brokers},
            cluster_addr_table=clusters,
        )
        return encode_reply(request, body=encode_cluster_info(info))

    @serves(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    def topic_list(self, request: RemotingCommand, _connection: Connection) -> bytes:
        own = [topic.name for topic in self._topics]
        others = sorted(self._brokers.topics().difference(own))
        return encode_reply(request, body=encode_topic_list([*own, *others]))

    @serves(RequestCode.WIPE_WRITE_PERM_OF_BROKER)
    def wipe_write_permission(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Remove the write permission from routes; messages that are still sent are stored."""
        count = self._set_writable(request, connection, is_writable=False)
        header = WipeWritePermOfBrokerResponseHeader(wipe_topic_count=count)
        return encode_reply(request, header=header)

    @serves(RequestCode.ADD_WRITE_PERM_OF_BROKER)
    def add_write_permission(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Restore the write permission in routes."""
        count = self._set_writable(request, connection, is_writable=True)
        header = AddWritePermOfBrokerResponseHeader(add_topic_count=count)
        return encode_reply(request, header=header)

    @serves(RequestCode.DRAIN_BROKER)
    def drain(self, request: RemotingCommand, connection: Connection) -> bytes:
        """Remove the write permission from routes; refuse messages later, and stop then."""
        wait_ms = request.header_as(DrainBrokerRequestHeader).wait_millis
        if not 0 <= wait_ms <= DRAIN_MS_MAX:
            expected = f"waitMillis={wait_ms}: expected 0 to {DRAIN_MS_MAX}"
            raise RequestRefusedError(expected, ResponseCode.INVALID_PARAMETER)
        logger.warning("event=drain_asked wait_ms=%d peer=%s", wait_ms, connection.name)
        self._is_writable = False
        self._drain(wait_ms / 1_000)
        return encode_reply(request)

    def _set_writable(
        self, request: RemotingCommand, connection: Connection, *, is_writable: bool
    ) -> int:
        """Return the number of topics whose routes have changed; 0 for an unknown broker."""
        header = request.header_as(BrokerNameRequestHeader)
        name = header.broker_name
        if name != self._identity.broker_name:
            return self._brokers.set_writable(name, is_writable=is_writable)
        self._is_writable = is_writable
        logger.info("event=routes_changed writable=%s peer=%s", is_writable, connection.name)
        return len(self._topics)

    def _broker(self, connection: Connection) -> BrokerData:
        return BrokerData(
            broker_addrs={self._identity.broker_id: connection.broker_address},
            broker_name=self._identity.broker_name,
            cluster=self._identity.cluster_name,
        )

    def _queues(self, topic: TopicConfig) -> QueueData:
        return QueueData(
            broker_name=self._identity.broker_name,
            perm=topic.perm if self._is_writable else topic.perm & ~PERM_WRITE,
            read_queue_nums=topic.read_queue_nums,
            topic_sys_flag=topic.sys_flag,
            write_queue_nums=topic.write_queue_nums,
        )


def _as_reached(broker: BrokerData, connection: Connection) -> BrokerData:
    """Return a broker with addresses for this client.

    One that has registered over the loopback interface runs on this machine: the client reaches it
    where it has reached this broker.
    """
    host = connection.broker_address.rpartition(":")[0]
    addresses = {
        number: f"{host}:{port}" if own in LOOPBACK else f"{own}:{port}"
        for number, address in broker.broker_addrs.items()
        for own, _, port in (address.rpartition(":"),)
    }
    return msgspec.structs.replace(broker, broker_addrs=addresses)
