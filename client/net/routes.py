"""Topic routes: which brokers serve a topic with which queues.

A name server knows the topics of all brokers; a halfmq broker is its own name server. Routes are
fetched on first use of a topic and again every ``route_refresh_interval``. An unknown topic has no
route; producers then use the route of ``TBW102``, a topic that lists the brokers which create
topics on a first send, and their send creates the topic.

Route requests also detect halfmq: they carry the ext field ``halfmq``, which an official name
server ignores and a halfmq broker returns if all brokers are halfmq's. They get MSGPACK headers,
unless the configuration says otherwise, and support halfmq's own requests.
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from halfmq.remoting.bodies import (
    TopicRouteData,
    decode_cluster_info,
    decode_route,
    decode_topic_list,
)
from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.headers import RECOGNITION_FIELD
from halfmq.store.format.ids import java_string_hash
from halfmq.store.format.topics import (
    DEAD_LETTER_PREFIX,
    DEFAULT_TOPIC,
    RETRY_PREFIX,
    is_system_topic,
)

from ..config import ClientConfig
from ..errors import ClientClosedError, ClientError, RouteNotFoundError
from ..message import MessageQueue
from .connection_pool import ConnectionPool
from .name_servers import NameServers
from .response_errors import answer_of, expect_success

logger = logging.getLogger(__name__)

PERM_READ: Final = 4  # Source: RocketMQ PermName.java
PERM_WRITE: Final = 2
MASTER_ID: Final = 0


NEAREST_MAX: Final = 3
COMPARED_MAX: Final = 20_000
"""Topic names to compare with: takes a quarter of a second, on a thread."""


@dataclass(frozen=True, slots=True)
class Route:
    """The brokers and queues that serve one topic."""

    topic: str
    publish_queues: tuple[MessageQueue, ...]
    """The queues that a producer may send to, sorted."""
    consume_queues: tuple[MessageQueue, ...]
    """The queues that are assigned to the members of a group, sorted."""
    addresses: Mapping[str, str]
    """Broker name to the address of its master."""
    _round_robin: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)

    def next_queue(self, avoid_broker: str | None = None) -> MessageQueue:
        """Return the queues round-robin; avoid those of ``avoid_broker`` if there are others."""
        queues = self.publish_queues
        for _ in queues:
            queue = queues[next(self._round_robin) % len(queues)]
            if queue.broker_name != avoid_broker:
                return queue
        return queues[next(self._round_robin) % len(queues)]

    def queue_of(self, order_key: str) -> MessageQueue:
        """Return the queue of an order key.

        It is the one of RocketMQ's ``SelectMessageQueueByHash``, so that Java and Python producers
        of one topic agree. It changes with the topic's number of queues.
        """
        queues = self.publish_queues
        return queues[abs(java_string_hash(order_key)) % len(queues)]


def build_route(topic: str, answer: TopicRouteData, *, first_queue: int = 0) -> Route:
    """Convert a name server's answer to a route."""
    addresses = {
        broker.broker_name: broker.broker_addrs[MASTER_ID]
        for broker in answer.broker_datas
        if MASTER_ID in broker.broker_addrs
    }
    publish: list[MessageQueue] = []
    consume: list[MessageQueue] = []
    for data in answer.queue_datas:
        name = data.broker_name
        if name in addresses and data.perm & PERM_WRITE:
            publish += [MessageQueue(topic, name, n) for n in range(data.write_queue_nums)]
        if name in addresses and data.perm & PERM_READ:
            consume += [MessageQueue(topic, name, n) for n in range(data.read_queue_nums)]
    turn = itertools.count(first_queue)
    return Route(
        topic, tuple(sorted(publish)), tuple(sorted(consume)), addresses, _round_robin=turn
    )


def assumed_route(topic: str, template: Route, queues_max: int, *, first_queue: int = 0) -> Route:
    """Return the route that a topic will have once a send has created it like ``template``."""
    queues = tuple(
        MessageQueue(topic, broker_name, queue_id)
        for _, broker_name, queue_id in template.publish_queues
        if queue_id < queues_max
    )
    turn = itertools.count(first_queue)
    return Route(topic, queues, queues, template.addresses, _round_robin=turn)


def nearest_topics(topic: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of users' topics that are most similar to ``topic``, ignoring case."""
    by_lower_case = {
        name.lower(): name
        for name in islice(names, COMPARED_MAX)
        if not name.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)) and not is_system_topic(name)
    }
    close = difflib.get_close_matches(topic.lower(), by_lower_case, n=NEAREST_MAX)
    return tuple(by_lower_case[name] for name in close)


class RouteTable:
    """The routes of all topics in use, and the addresses of all brokers in them."""

    def __init__(
        self, config: ClientConfig, servers: NameServers, brokers: ConnectionPool, first_queue: int
    ) -> None:
        self._config = config
        self._servers = servers
        self._brokers = brokers
        # Producers should not all start at queue 0.
        self._first_queue = first_queue
        self._round_robin = itertools.count(first_queue)
        self._routes: dict[str, Route] = {}
        self._template: Route | None = None
        self._cluster: dict[str, str] = {}
        self.clusters: dict[str, list[str]] = {}
        """The names of the brokers of each cluster, if they are loaded."""
        self._fetches: dict[str, asyncio.Task[Route | None]] = {}
        self.halfmq = False
        """Whether the brokers are halfmq's; known after the first answer."""

    @property
    def addresses(self) -> set[str]:
        """The master addresses of all known brokers."""
        found = set(self._cluster.values())
        for route in self._all_routes():
            found.update(route.addresses.values())
        return found

    @property
    def brokers(self) -> dict[str, str]:
        """The names of all known brokers, each with the address of its master."""
        found = dict(self._cluster)
        for route in self._all_routes():
            found.update(route.addresses)
        return found

    def cached(self, topic: str) -> Route | None:
        """Return the cached route of a topic, if any."""
        return self._routes.get(topic)

    def forget(self, topic: str) -> None:
        """Drop a stale route, so that the next use of the topic fetches it again."""
        self._routes.pop(topic, None)

    def address_of(self, broker_name: str) -> str | None:
        """Return the address of a broker's master, from any route."""
        for route in self._all_routes():
            if broker_name in route.addresses:
                return route.addresses[broker_name]
        return self._cluster.get(broker_name)

    async def existing(self, topic: str) -> Route | None:
        """Return the route of a topic, fetched if necessary; None if the topic does not exist.

        Raises:
            ClientError: No name server answers.
        """
        return self._routes.get(topic) or await self.fetch(topic)

    async def for_sending(self, topic: str) -> Route:
        """Return a route with at least one queue to send to; the send may create the topic.

        Raises:
            RouteNotFoundError: The topic does not exist and no broker would create it.
            ClientError: No name server answers.
        """
        route = await self.existing(topic)
        if route is None:
            # Not cached: once the send has created the topic, the real route may differ.
            template = await self.fetch(DEFAULT_TOPIC)
            if template is None:
                raise RouteNotFoundError(topic)
            route = assumed_route(
                topic,
                template,
                self._config.default_topic_queues,
                first_queue=next(self._round_robin),
            )
        if not route.publish_queues:
            raise RouteNotFoundError(topic)
        return route

    async def fetch(self, topic: str) -> Route | None:
        """Fetch a route from a name server; concurrent calls for one topic share the request.

        Raises:
            ClientError: No name server answers, or none with a valid answer.
        """
        task = self._fetches.get(topic)
        if task is None:
            task = asyncio.create_task(self._fetch(topic), name=f"route {topic}")
            self._fetches[topic] = task
            task.add_done_callback(lambda done: self._fetch_done(topic, done))
        await asyncio.wait([task])  # if close() cancels it, the waiters are not cancelled
        if task.cancelled():
            raise ClientClosedError("the client")
        return task.result()

    async def refresh(self) -> ClientError | None:
        """Fetch the routes of all topics in use again; return why not if no server answers."""
        topics = [DEFAULT_TOPIC] if self._template is not None else []
        for topic in [*topics, *self._routes]:
            try:
                await self.fetch(topic)
            except ClientError as error:
                return error
        return None

    async def load_cluster(self) -> None:
        """Load the addresses of all brokers of the cluster, also of those that create no topics."""
        try:
            answer = await self._servers.request(RequestCode.GET_BROKER_CLUSTER_INFO)
            expect_success(answer)
            cluster = decode_cluster_info(answer.body)
        except (ClientError, ProtocolError) as error:
            logger.info("event=cluster_unknown reason=%r", str(error))
            return
        self.clusters = cluster.cluster_addr_table
        self._cluster = {
            name: data.broker_addrs[MASTER_ID]
            for name, data in cluster.broker_addr_table.items()
            if MASTER_ID in data.broker_addrs
        }
        for address in self._cluster.values():
            self._choose_header_type(address)

    async def topic_names(self) -> list[str]:
        """Return the names of all topics, system topics included; empty if no server answers."""
        try:
            answer = await self._servers.request(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
            expect_success(answer)
            return decode_topic_list(answer.body)
        except (ClientError, ProtocolError) as error:
            logger.info("event=topics_unknown reason=%r", str(error))
            return []

    def close(self) -> None:
        """Cancel the requests in flight."""
        for task in list(self._fetches.values()):
            task.cancel()

    def _all_routes(self) -> Iterator[Route]:
        yield from self._routes.values()
        if self._template is not None:
            yield self._template

    def _fetch_done(self, topic: str, task: asyncio.Task[Route | None]) -> None:
        del self._fetches[topic]
        if not task.cancelled():
            task.exception()  # if all waiters were cancelled, nobody has retrieved it

    async def _fetch(self, topic: str) -> Route | None:
        answer = await self._request_route(topic)
        if answer is None:
            self._routes.pop(topic, None)
            if topic == DEFAULT_TOPIC:
                self._template = None
            return None
        route = build_route(topic, answer, first_queue=self._first_queue)
        for address in route.addresses.values():
            self._choose_header_type(address)
        if topic == DEFAULT_TOPIC:
            self._template = route
            return route
        if self._routes.get(topic) != route:
            brokers = ",".join(f"{name}@{address}" for name, address in route.addresses.items())
            queues = len(route.publish_queues)
            logger.info("event=route_changed topic=%s queues=%d brokers=%s", topic, queues, brokers)
            self._routes[topic] = route
        return self._routes[topic]

    async def _request_route(self, topic: str) -> TopicRouteData | None:
        fields = {"topic": topic, "acceptStandardJsonOnly": "true", RECOGNITION_FIELD: "1"}
        answer = await self._servers.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields)
        if isinstance(answer.header, dict):
            self.halfmq = answer.header.get(RECOGNITION_FIELD) == "1"
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        expect_success(answer)
        with answer_of(self._servers.address):
            return decode_route(answer.body)

    def _choose_header_type(self, address: str) -> None:
        choice = self._config.header_type
        msgpack = choice == "msgpack" or (choice == "auto" and self.halfmq)
        self._brokers.set_header_type(address, HeaderType.MSGPACK if msgpack else HeaderType.JSON)
