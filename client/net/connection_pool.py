"""The connection pool: one connection per broker or name server, opened on first use.

Failed attempts to connect back off exponentially, however many callers wait.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from halfmq.remoting.codes import HeaderType

from ..config import ClientConfig
from ..errors import (
    BadAnswerError,
    ClientClosedError,
    ConnectError,
    ConnectionLostError,
    RequestTimeoutError,
)
from .connection import BrokerConnection, ServerRequestHandler
from .retry import RandomFraction, backoff_seconds
from .security import Security, tls_error

CLOSE_SECONDS: Final = 1.0
"""How long closing waits for answers, and then for the peer to receive buffered data."""


class _Failure(NamedTuple):
    """The failed connection attempts to an address."""

    times: int
    again_at: float
    """When the next attempt may be made, on the loop's clock."""
    reason: str


class ConnectionPool:
    """At most one usable connection per address, opened on first use.

    ``handshake`` runs on each new connection before any other request: a broker must know the
    client before its first pull.
    """

    def __init__(
        self,
        config: ClientConfig,
        handlers: Mapping[int, ServerRequestHandler],
        *,
        handshake: Callable[[BrokerConnection], Awaitable[None]] | None = None,
        on_lost: Callable[[str, str], None] | None = None,
        security: Security | None = None,
        name_server: Callable[[], str] | None = None,
        random_fraction: RandomFraction = random.random,
    ) -> None:
        """Create an empty pool.

        Args:
            config: Limits and header type.
            handlers: Handlers of requests from the peers, by request code.
            handshake: Runs on each new connection.
            on_lost: Called with the address of a connection that cannot be used any more, and why;
                the reason is empty if the peer has asked for a new one.
            security: Credentials and TLS.
            name_server: For brokers: returns the name server that gave their addresses.
            random_fraction: Shortens the waits between attempts.
        """
        self._config = config
        self._security = security or Security(config)
        self._name_server = name_server
        self._handlers = handlers
        self._handshake = handshake
        self._on_lost = on_lost
        self._random_fraction = random_fraction
        self._connections: dict[str, BrokerConnection] = {}
        self._open_sockets: set[BrokerConnection] = set()
        self._attempts: dict[str, asyncio.Task[BrokerConnection]] = {}
        self._failures: dict[str, _Failure] = {}
        self._header_types: dict[str, HeaderType] = {}
        self._has_connected = False
        self._closed = False

    def set_header_type(self, address: str, header_type: HeaderType) -> None:
        """Use this header type for requests to the address, on current and later connections."""
        self._header_types[address] = header_type
        connection = self._connections.get(address)
        if connection is not None:
            connection.header_type = header_type

    def get_open(self, address: str) -> BrokerConnection | None:
        """Return the connection to the address if one is open."""
        connection = self._connections.get(address)
        return connection if connection is not None and connection.usable else None

    async def get(self, address: str, seconds: float) -> BrokerConnection:
        """Return the connection to the address; open it if necessary.

        Raises:
            ConnectError: It cannot be opened, or not within ``seconds``.
            ClientClosedError: The pool is closed.
        """
        connection = self.get_open(address)
        if connection is not None:
            return connection
        if self._closed:
            raise ClientClosedError("the client")
        attempt = self._attempts.get(address)
        if attempt is None:
            attempt = asyncio.create_task(self._open(address), name=f"connect {address}")
            self._attempts[address] = attempt
            attempt.add_done_callback(lambda done: self._attempt_done(address, done))
        # Other tasks may wait for it too. If close() cancels it, they are not cancelled.
        await asyncio.wait([attempt], timeout=seconds)
        if attempt.cancelled():
            raise ClientClosedError("the client")
        if attempt.done():
            return attempt.result()
        failure = self._failures.get(address)
        reason = f"no connection within {seconds:g} s"
        raise ConnectError(address, failure.reason if failure else self._explained(reason))

    async def close(self) -> None:
        """Close every connection after requests in flight were answered, within a second."""
        self._refuse_new()
        connections = list(self._open_sockets)
        unanswered = [answer for one in connections for answer in one.unanswered]
        if unanswered:
            await asyncio.wait(unanswered, timeout=CLOSE_SECONDS)
        for connection in connections:
            connection.end("the client was closed")
        if connections:
            closing = [asyncio.ensure_future(one.wait_closed()) for one in connections]
            await asyncio.wait(closing, timeout=CLOSE_SECONDS)
            for connection in connections:
                connection.abort()
            await asyncio.wait(closing)

    def abort(self) -> None:
        """Close every connection at once; buffered data may be lost."""
        self._refuse_new()
        for connection in list(self._open_sockets):
            connection.abort()

    def _refuse_new(self) -> None:
        self._closed = True
        for attempt in list(self._attempts.values()):
            attempt.cancel()

    async def _open(self, address: str) -> BrokerConnection:
        failure = self._failures.get(address)
        if failure is not None:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(failure.again_at - loop.time())
        try:
            connection = await self._connect(address)
            await self._run_handshake(connection)
            if not connection.usable:  # otherwise a dead connection would stay in the table
                raise connection.loss_error("closed by the peer at once")
        except ConnectError as error:
            self._record_failure(address, error.reason)
            raise
        except (ConnectionLostError, RequestTimeoutError) as error:
            self._record_failure(address, str(error))
            raise ConnectError(address, str(error)) from error
        except BadAnswerError as error:
            self._record_failure(address, str(error))
            raise
        self._failures.pop(address, None)
        self._has_connected = True
        self._connections[address] = connection
        return connection

    async def _run_handshake(self, connection: BrokerConnection) -> None:
        if self._handshake is None:
            return
        try:
            await self._handshake(connection)
        except BaseException:
            connection.end("not used")
            raise

    async def _connect(self, address: str) -> BrokerConnection:
        """Connect to the first of the host's addresses that accepts a connection."""
        loop = asyncio.get_running_loop()
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        tls = self._security.tls
        try:
            async with asyncio.timeout(self._config.connect_timeout):
                error: OSError | None = None
                for target in await _resolve(host, int(port)):
                    try:
                        _, connection = await loop.create_connection(
                            lambda: BrokerConnection(
                                address, self._config, self._handlers, self._forget, self._security
                            ),
                            target,
                            int(port),
                            ssl=tls,
                            server_hostname=self._security.server_name(host, target),
                        )
                    except OSError as failed:
                        error = failed
                    else:
                        connection.header_type = self._header_types.get(address, HeaderType.JSON)
                        self._open_sockets.add(connection)
                        return connection
                raise error or OSError("the host has no address")
        except TimeoutError:
            seconds = f"{self._config.connect_timeout:g} s"
            reason = self._explained(f"no answer within {seconds}")
            raise ConnectError(address, reason) from None
        except OSError as refused:
            error_of_tls = None if tls is None else tls_error(address, refused)
            reason = self._explained(_connect_reason(refused))
            if error_of_tls is not None:
                raise error_of_tls from refused
            raise ConnectError(address, reason) from None  # it says what the cause says
        except (ValueError, OverflowError) as wrong:  # a label of a host name, or a port
            raise ConnectError(address, f"not a valid address ({wrong})") from wrong

    def _explained(self, reason: str) -> str:
        """Add where the address comes from and the remedy, if no broker was ever reached."""
        if self._name_server is None or self._has_connected:
            return reason
        return (
            f"{reason} (name server {self._name_server()} gave this address: the broker has to "
            "listen there, by its bindAddress, or to give another one, by its brokerIP1)"
        )

    def _record_failure(self, address: str, reason: str) -> None:
        before = self._failures.get(address)
        times = before.times + 1 if before else 1
        again_at = asyncio.get_running_loop().time() + backoff_seconds(
            times, self._config, self._random_fraction
        )
        self._failures[address] = _Failure(times, again_at, reason)

    def _attempt_done(self, address: str, attempt: asyncio.Task[BrokerConnection]) -> None:
        del self._attempts[address]
        if not attempt.cancelled():
            attempt.exception()  # if all waiters were cancelled, nobody has retrieved it

    def _forget(self, connection: BrokerConnection) -> None:
        """Remove a connection that has ended or accepts no more requests."""
        if connection.closed:
            self._open_sockets.discard(connection)
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]
            if self._on_lost is not None and not self._closed:
                self._on_lost(connection.address, connection.end_reason)


async def _resolve(host: str, port: int) -> list[str]:
    """Return the numeric addresses of a host, in the order the system prefers."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return [host]


def _connect_reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused; is the broker running?"
    if isinstance(error, socket.gaierror):
        return "the host name is not known"
    return error.strerror or str(error)
