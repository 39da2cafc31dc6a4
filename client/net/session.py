"""Session: client id, routes, connections and heartbeats of one producer, consumer or ``Admin``.

A heartbeat registers a client with a broker: its client id and its producer groups, or its consumer
group with subscriptions. The broker binds them to the connection on which the heartbeat came, and
sends its own requests there (transaction checks, changes in a group). So every new connection
starts with a heartbeat, every known broker gets one each ``heartbeat_interval``, and a lost
connection is opened again at once and not on the next request: a broker must reach a transaction
producer that has nothing to send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

from halfmq.remoting.bodies import HeartbeatData, encode_heartbeat
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import H, Header
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import HeartbeatRequestHeader, UnregisterClientRequestHeader
from halfmq.store.format.ids import UniqueKeyFactory, pack_host
from halfmq.store.format.topics import DEFAULT_TOPIC

from ..config import ClientConfig
from ..errors import (
    AccessDeniedError,
    ClientError,
    ConnectError,
    ConnectionLostError,
    RequestTimeoutError,
    code_name,
)
from .connection import BrokerConnection, ServerRequestHandler
from .connection_pool import ConnectionPool
from .name_servers import NameServers
from .response_errors import answer_of, error_from_response
from .retry import wait_before_retry
from .routes import Route, RouteTable
from .security import Security

logger = logging.getLogger(__name__)

ROUTES_AGAIN_S: Final = 1.0
"""Seconds until routes are fetched again that lack a broker they had: one that is restarted is back
soon, and a producer would leave it out until the next refresh."""

UNREGISTER_SECONDS: Final = 1.0
"""How long closing waits for a broker to unregister the client. The closed socket has the same
effect."""


def wall_clock_ms() -> int:
    """Return the milliseconds since 1970, as in message timestamps."""
    return time.time_ns() // 1_000_000


class Session:
    """One client, registered with all brokers it knows."""

    def __init__(
        self,
        config: ClientConfig,
        make_heartbeat: Callable[[str], HeartbeatData],
        handlers: Mapping[int, ServerRequestHandler],
        unregister_fields: Mapping[str, str],
        on_heartbeat_answer: Callable[[str, RemotingCommand], bool] = lambda _address, _answer: (
            False
        ),
        on_connection: Callable[[str, str | None], None] = lambda _address, _reason: None,
    ) -> None:
        """Create a session; ``start`` connects it.

        Args:
            config: Addresses and limits.
            make_heartbeat: Returns the heartbeat for a client id.
            handlers: Handlers of requests from brokers, by request code.
            unregister_fields: The group to leave on close, as attributes of
                ``UnregisterClientRequestHeader``.
            on_heartbeat_answer: Called with a broker's address and its answer to a heartbeat;
                returns whether it has reported a refusal.
            on_connection: Called with a broker's address, and None when it is connected, or why the
                connection was lost; not while it stays lost.
        """
        self._on_connection = on_connection
        self._on_heartbeat_answer = on_heartbeat_answer
        self.config = config
        self.client_id = ""
        # Cached, because get_running_loop() costs a system call up to Python 3.11.
        self.clock = asyncio.get_running_loop().time
        self._make_heartbeat = make_heartbeat
        self._unregister_fields = unregister_fields
        self._lost = asyncio.Event()
        self._security = Security(config)
        self._servers = NameServers(config, self._security)
        self.brokers = ConnectionPool(
            config,
            handlers,
            handshake=self._send_heartbeat,
            on_lost=self._connection_lost,
            security=self._security,
            name_server=lambda: self._servers.address,
        )
        first_queue = random.SystemRandom().randrange(1 << 16)
        self.routes = RouteTable(config, self._servers, self.brokers, first_queue)
        self._maintenance: asyncio.Task[None] | None = None
        self._lost_brokers: dict[str, str] = {}  # by address, why
        self._warnings: dict[str, str] = {}  # by broker, the latest
        self._has_stale_routes = False
        self._denied: dict[str, AccessDeniedError] = {}  # by broker, how it refused the heartbeat
        self._keys: UniqueKeyFactory | None = None

    async def start(
        self,
        *,
        whole_cluster: bool = False,
        topics: tuple[str, ...] = (),
        seconds: float | None = None,
    ) -> None:
        """Connect to a name server and register this client with every broker that it lists.

        It tries for ``seconds``, by default ``send_timeout``.

        Raises:
            ConnectError: No name server could be reached within ``send_timeout``.
            AccessDeniedError: A name server or a broker does not accept the credentials.
            ClientError: No name server gives a valid answer.
        """
        await self._security.start()
        deadline = self.clock() + (self.config.send_timeout if seconds is None else seconds)
        await self._retry_until(partial(self.routes.fetch, DEFAULT_TOPIC), deadline)
        address = self._servers.local_address or "127.0.0.1"
        # Random, because clients in containers have equal addresses and process ids. Members of a
        # group that share an id are one member to the broker, and each takes all of its queues.
        instance = self.config.instance_name or f"{os.getpid()}#{os.urandom(6).hex()}"
        self.client_id = f"{address}@{instance}"
        self._keys = UniqueKeyFactory(
            pack_host(address, 0)[:-4],
            process_id=os.getpid(),
            token=os.urandom(4),
            now_ms=wall_clock_ms,
        )
        if whole_cluster:
            await self.routes.load_cluster()
        for topic in topics:
            await self._retry_until(partial(self.routes.existing, topic), deadline)
        await self._send_heartbeats(self.routes.addresses)
        for error in self._denied.values():
            raise error
        self._maintenance = asyncio.create_task(
            self._maintain_connections(), name=f"maintain {self.client_id}"
        )

    async def _retry_until(self, call: Callable[[], Awaitable[object]], deadline: float) -> None:
        """Retry until there is an answer: the server may be restarting, or start with us."""
        failures: list[ClientError] = []
        while True:
            try:
                await call()
            except ClientError as error:
                failures.append(error)
            else:
                return
            if not await wait_before_retry(failures, self.config, self.clock, deadline):
                raise failures[-1]
            logger.debug("event=name_server_again reason=%r", str(failures[-1]))

    async def route(self, topic: str, deadline: float, failures: Sequence[ClientError]) -> Route:
        """Return a route for sending; wait for it until ``deadline`` by the session's clock.

        Raises:
            ConnectError: No name server has answered by then, so nothing was sent. If there were
                ``failures`` before, the last of them is raised instead, which says more.
            ClientError: As :meth:`RouteTable.for_sending`.
        """
        try:
            async with asyncio.timeout_at(deadline):
                return await self.routes.for_sending(topic)
        except (ConnectionLostError, RequestTimeoutError) as error:
            raise ConnectError(error.address, f"no route of {topic}: {error}") from error
        except TimeoutError as error:
            if failures:
                raise failures[-1] from None
            address = self._servers.address
            raise ConnectError(address, f"no route of {topic} in time") from error

    async def close(self) -> None:
        """Unregister from the brokers and close all connections; at once if cancelled."""
        self._security.close()
        try:
            if self._maintenance is not None:
                self._maintenance.cancel()
                await asyncio.wait([self._maintenance])
            await asyncio.gather(*(self._unregister(address) for address in self.routes.addresses))
            self.routes.close()
            await self.brokers.close()
            await self._servers.close()
        except BaseException:  # there is no later chance to close them
            self.routes.close()
            self.brokers.abort()
            self._servers.abort()
            raise

    def missing_brokers(self) -> dict[str, str]:
        """Return why brokers are not connected, by address; empty if all are."""
        addresses = sorted(self.routes.addresses)
        closed = (one for one in addresses if self.brokers.get_open(one) is None)
        return {one: self._lost_brokers.get(one, "not connected yet") for one in closed}

    async def wait_for_broker(self, deadline: float) -> None:
        """Wait until at least one broker is connected.

        Raises:
            ConnectError: None is by ``deadline``, on the session's clock.
        """
        while len(missing := self.missing_brokers()) == len(self.routes.addresses):
            if self.clock() >= deadline:
                nowhere = ";".join(self.config.namesrv_addresses), "it knows no broker"
                raise ConnectError(*next(iter(missing.items()), nowhere))
            await asyncio.sleep(self.config.reconnect_delay_max)
            await self.routes.load_cluster()

    def new_key(self) -> str:
        """Return a new unique message id."""
        assert self._keys is not None
        return self._keys.create()

    async def heartbeat(self, address: str) -> None:
        """Send a heartbeat to one broker now.

        Raises:
            ClientError: The broker cannot be reached.
        """
        connection = await self.brokers.get(address, self.config.connect_timeout)
        await self._send_heartbeat(connection)

    async def call(
        self,
        address: str,
        code: int,
        header: Header | None,
        body: bytes = b"",
        *,
        seconds: float | None = None,
    ) -> RemotingCommand:
        """Send a request to a broker and return its answer, whatever its code.

        Raises:
            ConnectError, ConnectionLostError, RequestTimeoutError: There is no answer.
        """
        seconds = self.config.request_timeout if seconds is None else seconds
        connection = self.brokers.get_open(address) or await self.brokers.get(address, seconds)
        return await connection.request(code, header, body, seconds=seconds)

    async def _send_heartbeat(self, connection: BrokerConnection) -> None:
        answer = await connection.request(
            RequestCode.HEART_BEAT,
            HeartbeatRequestHeader(),
            encode_heartbeat(self._make_heartbeat(self.client_id)),
            seconds=self.config.request_timeout,
        )
        is_told = self._on_heartbeat_answer(connection.address, answer)
        if self.brokers.get_open(connection.address) is None:  # this was the handshake
            if self._lost_brokers.pop(connection.address, None) is not None:
                logger.info("event=broker_reached_again address=%s", connection.address)
            self._on_connection(connection.address, None)
        self._denied.pop(connection.address, None)
        text = answer.remark
        if answer.code != ResponseCode.SUCCESS:
            error = error_from_response(answer)
            text = f"refused with {code_name(answer.code)}: {answer.remark}"
            if isinstance(error, AccessDeniedError):
                self._denied[connection.address] = error
        self._log_warning(connection.address, None if is_told else text)

    def _log_warning(self, address: str, remark: str | None) -> None:
        """Log a broker's warning or refusal of a heartbeat, once until it changes."""
        if not remark:
            self._warnings.pop(address, None)
        elif self._warnings.get(address) != remark:
            self._warnings[address] = remark
            logger.warning("event=broker_warning broker=%s remark=%r", address, remark)

    def _connection_lost(self, address: str, reason: str) -> None:
        if reason:
            self._record_loss(address, reason)
        self._lost.set()

    def _record_loss(self, address: str, reason: str) -> None:
        """Report a broker that does not answer: once, until it is connected again."""
        if address not in self._lost_brokers:
            logger.warning("event=broker_lost address=%s reason=%r", address, reason)
            self._on_connection(address, reason)
        self._lost_brokers[address] = reason

    async def _maintain_connections(self) -> None:
        loop = asyncio.get_running_loop()
        pause = min(self.config.heartbeat_interval, self.config.route_refresh_interval)
        due = loop.time() + pause
        while True:
            self._lost.clear()
            if loop.time() >= due:
                before = self.routes.addresses
                error = await self.routes.refresh()
                await self._send_heartbeats(self.routes.addresses)
                self._report_stale_routes(error)
                is_whole = error is None and before <= self.routes.addresses
                pause = refresh_pause(pause, self.config, is_whole=is_whole)
                due = loop.time() + pause
            missing = {a for a in self.routes.addresses if self.brokers.get_open(a) is None}
            if missing:
                await self._send_heartbeats(missing)  # the pool adds the backoff
                await asyncio.sleep(self.config.reconnect_delay_min)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._lost.wait()

    def _report_stale_routes(self, error: ClientError | None) -> None:
        """Log that no name server answers: once, and not if a broker is lost in the same outage."""
        if error is not None and not self._has_stale_routes and not self._lost_brokers:
            logger.warning("event=routes_not_refreshed reason=%r", str(error))
        self._has_stale_routes = error is not None

    async def _send_heartbeats(self, addresses: set[str]) -> None:
        """Send a heartbeat to each address; one that cannot be reached is retried later."""
        await asyncio.gather(*(self._send_heartbeat_to(address) for address in addresses))

    async def _send_heartbeat_to(self, address: str) -> None:
        try:
            if self.brokers.get_open(address) is None:
                # The handshake of a new connection is a heartbeat.
                await self.brokers.get(address, 2 * self.config.connect_timeout)
            else:
                await self.heartbeat(address)
        except ClientError as error:
            self._record_loss(address, str(error))

    async def _unregister(self, address: str) -> None:
        connection = self.brokers.get_open(address)
        if connection is None:
            return
        header = UnregisterClientRequestHeader(client_id=self.client_id, **self._unregister_fields)
        try:
            await connection.request(
                RequestCode.UNREGISTER_CLIENT, header, seconds=UNREGISTER_SECONDS
            )
        except ClientError as error:
            logger.debug("event=not_unregistered address=%s reason=%r", address, str(error))


def refresh_pause(pause: float, config: ClientConfig, *, is_whole: bool) -> float:
    """Return the seconds until the next refresh of routes and the next heartbeats.

    ``is_whole`` says whether each known broker is still in the routes; if not, the pause is short
    and doubles from then on.
    """
    interval = min(config.heartbeat_interval, config.route_refresh_interval)
    return min(2 * pause if is_whole else ROUTES_AGAIN_S, interval)


def typed(answer: RemotingCommand, kind: type[H], address: str) -> H:
    """Decode the ext fields of an answer.

    Raises:
        BadAnswerError: They do not follow the protocol.
    """
    with answer_of(address):
        return response_header(answer, kind)
