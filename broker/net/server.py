"""The listeners: accept connections, close idle ones, and stop after the last replies."""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Final

from attrs import define

from ..access.tls import TlsContext
from ..access.tls_listener import TlsListener
from ..errors import AddressTakenError
from ..limits.kept import (
    CONNECTIONS,
    LONG_ANSWERS,
    PEER_REQUESTS,
    UNFINISHED_BYTES,
    UNSENT_BYTES,
    Kept,
)
from ..loop.fetches import Fetch
from ..loop.slices import PAUSE_S, PeriodicWork
from ..loop.ticker import Ticker
from ..ports import Connection
from .connection import ClientConnection, address_text
from .reply_release import ReplyRelease
from .router import Router
from .shared_state import SharedState

logger = logging.getLogger(__name__)

IDLE_TIMEOUT_S: Final = 120.0
"""Seconds without a byte from or to the peer until its connection is closed; clients send a
heartbeat every 30 s.
Source: `NettyServerConfig.serverChannelMaxIdleTimeSeconds`."""

IDLE_SCAN_S: Final = 10.0
"""Seconds between two scans for idle connections. Each records which peers were active since the
previous scan, so a silent peer is closed up to two scans late."""

BACKLOG: Final = 1_024
"""Connections that the system keeps until they are accepted."""

CLOSE_TIMEOUT_S: Final = 5.0
"""Seconds for peers to read their last replies when the broker stops."""


def bind(host: str, port: int, key: str, backlog: int = BACKLOG) -> socket.socket:
    """Return a socket that listens on an address, which the setting ``key`` names.

    Raises:
        AddressTakenError: It cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        raise _taken(host, port, key, error) from error


def _taken(host: str, port: int, key: str, error: OSError) -> AddressTakenError:
    reason = "the address is in use" if error.errno == errno.EADDRINUSE else str(error)
    return AddressTakenError(address_text(host, port), key, reason)


@define(eq=False, repr=False, slots=False)
class Server:
    """Listens on all addresses and keeps their connections."""

    _router: Router
    _release: ReplyRelease
    _fetch: Fetch
    _on_closed: Callable[[Connection], None]
    _host: str
    _listen_port: int
    _namesrv_port: int
    _advertised_host: str = ""
    _tls: TlsContext | None = None
    _connections_per_address: int = 0

    def __attrs_post_init__(self) -> None:
        self._shared = SharedState(
            self._router,
            self._release,
            self._fetch,
            self._on_closed,
            advertised_host=self._advertised_host,
            per_address_max=self._connections_per_address,
        )
        self._servers: list[asyncio.Server | TlsListener] = []
        idle = PeriodicWork(IDLE_SCAN_S, self._close_idle)
        self._idle_scan = Ticker("idle", idle.tick, pause=PAUSE_S, traffic=lambda: self.reads)
        self.addresses: list[str] = []

    @property
    def reads(self) -> int:
        """Number of socket reads since the start after which a peer waits for an answer."""
        return self._shared.reads

    @property
    def port(self) -> int:
        """The port of client requests, known after the start."""
        return self._shared.listen_port

    @property
    def open_connections(self) -> int:
        """Number of open connections, of clients and tools."""
        return len(self._shared.connections)

    @property
    def address(self) -> str:
        """Address of client requests, `host:port`."""
        return address_text(self._host, self._shared.listen_port)

    @property
    def namesrv_address(self) -> str:
        """Address of name-server requests, `host:port`."""
        return self.addresses[-1]

    async def start(self) -> None:
        """Bind every address.

        Raises:
            AddressTakenError: An address cannot be bound; none stays bound.
        """
        self._release.attach(asyncio.get_running_loop())
        try:
            port = await self._listen(self._listen_port, "listenPort")
            self._shared.listen_port = port
            if self._listen_port > 2:  # the VIP channel of clients up to 4.5.0
                await self._listen(self._listen_port - 2, "listenPort")
            if self._namesrv_port:
                await self._listen(self._namesrv_port, "namesrvListenPort")
        except BaseException:
            self._close_listeners()
            raise
        if not self._namesrv_port:
            self.addresses.append(self.address)
        await self._idle_scan.start()

    async def _listen(self, port: int, key: str) -> int:
        if self._tls is not None:
            return await self.accept(bind(self._host, port, key))
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(self._protocol, self._host, port, backlog=BACKLOG)
        except OSError as error:
            raise _taken(self._host, port, key, error) from error
        return self._listens(server, server.sockets[0].getsockname()[1])

    async def accept(self, listening: socket.socket) -> int:
        """Serve the connections of a socket, which other processes may share; return its port."""
        server: asyncio.Server | TlsListener
        if self._tls is not None:
            shared = self._shared
            server = TlsListener(
                listening, self._tls, self._protocol, shared.refuses, shared.unserved
            )
        else:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(self._protocol, sock=listening, backlog=BACKLOG)
        return self._listens(server, listening.getsockname()[1])

    def _listens(self, server: asyncio.Server | TlsListener, port: int) -> int:
        self._servers.append(server)
        self.addresses.append(address_text(self._host, port))
        return port

    def _protocol(self) -> ClientConnection:
        return ClientConnection(self._shared)

    async def stop(self) -> None:
        """Read no more requests, send waiting replies, then close every connection."""
        self._shared.stopping = True
        await self._idle_scan.stop()
        self._close_listeners()
        for connection in list(self._shared.connections):
            connection.stop_reading()
        await asyncio.sleep(0)  # records staged in this pass are appended at its end
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._send_last_replies()
        except TimeoutError:
            logger.warning("event=stop_timeout open=%d", len(self._shared.connections))
        for connection in list(self._shared.connections):
            connection.abort()

    async def _send_last_replies(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._release.idle:
            drained = loop.create_future()
            self._release.notify_when_idle(drained)
            await drained
        await self._close_connections()

    async def _close_connections(self) -> None:
        """Close every connection; return when the peers have read their replies."""
        on_closed = self._shared.on_closed
        all_closed = asyncio.get_running_loop().create_future()

        def closed(connection: Connection) -> None:
            on_closed(connection)
            if not self._shared.connections and not all_closed.done():
                all_closed.set_result(None)

        self._shared.on_closed = closed
        for connection in list(self._shared.connections):
            connection.close()
        if self._shared.connections:
            await all_closed

    def _close_listeners(self) -> None:
        self._shared.request_expiry.stop()
        for server in self._servers:
            server.close()

    def _close_idle(self) -> Iterator[None]:
        limit = asyncio.get_running_loop().time() - IDLE_TIMEOUT_S
        for connection in list(self._shared.connections):
            if connection.is_idle(limit):
                logger.info("event=idle_closed peer=%s", connection.name)
                connection.abort()  # a vanished peer does not complete a graceful close
            yield

    def kept(self) -> Kept:
        return {
            CONNECTIONS: len(self._shared.connections),
            UNFINISHED_BYTES: self._shared.unfinished.used,
            UNSENT_BYTES: self._shared.unsent.recount(),
            LONG_ANSWERS: len(self._shared.long_answers),
            PEER_REQUESTS: self._shared.request_expiry.count,
        }
