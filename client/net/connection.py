"""TCP connections to brokers and name servers, and the connection pool.

Requests of many tasks share a connection. Each request gets a request id (opaque) and a future;
frames of one event-loop iteration are joined into one write; the response completes the future.
There is no task, queue or timer per request: one periodic sweep per connection expires requests.

A connection is closed if the peer breaks the protocol, or if a request times out and the peer has
sent nothing at all since: then it is dead, not slow. Requests in flight fail with
:class:`ConnectionLostError`, and the next request opens a new connection. Failed connection
attempts back off exponentially, however many callers wait.

Requests are signed here, because all of them pass through this module.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, TypeAlias, cast

from halfmq.remoting.codes import FLAG_RESPONSE, HeaderType, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.correlation import Correlation
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_reply, encode_request
from halfmq.remoting.signature import Identity

from ..config import ClientConfig
from ..errors import (
    PEER_EXPECTED,
    AuthenticationError,
    BadAnswerError,
    ClientClosedError,
    ClientError,
    ConnectError,
    ConnectionLostError,
    RequestTimeoutError,
    TlsError,
)
from .fork_safety import track_socket, untrack_socket
from .response_errors import ACCESS_ERROR_CODES, error_from_response
from .retry import RandomFraction, backoff_seconds
from .security import (
    NO_ANSWER_PLAIN,
    NO_ANSWER_TLS,
    ONLY_TLS,
    TLS_ALERT,
    Security,
    alert_reason,
    tls_error,
)

logger = logging.getLogger(__name__)

SWEEP_INTERVAL: Final = 0.05
"""Seconds between checks for expired requests; a timeout is noticed up to this much later."""
UNKNOWN_BYTES_SHOWN: Final = 24
"""Bytes of an unknown protocol shown in the error: the first line identifies an HTTP server."""
CLOSE_SECONDS: Final = 1.0
"""How long closing waits for the peer to receive buffered data."""


HeaderFields: TypeAlias = Header | Mapping[str, str] | None


# A request in flight: the future of its response, its code, when it was sent, and its timeout in
# seconds. A plain tuple, because there is one per sent message.
_InFlight: TypeAlias = tuple[asyncio.Future[RemotingCommand], int, float, float]


class BrokerConnection(asyncio.Protocol):
    """Sends requests, matches responses, and dispatches the peer's own requests to ``handlers``."""

    def __init__(
        self,
        address: str,
        config: ClientConfig,
        handlers: Mapping[int, ServerRequestHandler],
        on_unusable: Callable[[BrokerConnection], None],
        security: Security,
    ) -> None:
        self.address = address
        self.header_type = HeaderType.JSON
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._handlers = handlers
        self._on_unusable = on_unusable
        self._security = security
        self._decoder = FrameDecoder(responses_first=True)
        self._in_flight: Correlation[_InFlight] = Correlation(in_flight_max=config.in_flight_max)
        self._capacity_waiters: deque[asyncio.Future[None]] = deque()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []  # frames of this event-loop iteration
        self._outgoing_size = 0
        self._paused = False
        self._sweep: asyncio.TimerHandle | None = None
        self._received_at = self._loop.time()
        self._received_valid = False
        self._end_reason: str | None = None
        self._ended_by_tls = False
        self._retired = False
        self._closed = self._loop.create_future()
        self._fd = -1
        self._answered = False  # the peer has sent at least one whole frame
        self._not_rocketmq = False  # the first bytes from the peer were not a frame

    @property
    def usable(self) -> bool:
        """Whether a new request may be sent here."""
        return self._end_reason is None and not self._retired

    @property
    def closed(self) -> bool:
        """Whether the socket is closed."""
        return self._closed.done()

    @property
    def local_address(self) -> str:
        """The local IP address of the connection."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("sockname")[0])

    async def request(
        self, code: int, header: HeaderFields = None, body: bytes = b"", *, seconds: float
    ) -> RemotingCommand:
        """Send a request and return its response, whatever its code.

        If the peer rejects the signature and new credentials are available, retry once.

        Raises:
            ConnectionLostError: The connection ended first.
            RequestTimeoutError: ``seconds`` passed first.
            TlsError: The peer takes only TLS, or refuses this client's certificate.
        """
        renewed = False
        while True:
            if self._write_blocked or len(self._in_flight) >= self._config.in_flight_max:
                await self._wait_for_capacity(code, seconds)
            if self._end_reason is not None:
                raise self.loss_error(self._end_reason)
            now = self._loop.time()
            future: asyncio.Future[RemotingCommand] = self._loop.create_future()
            opaque = self._in_flight.register((future, code, now, seconds), now + seconds)
            identity = self._security.identity
            self._write(
                encode_request(
                    code,
                    opaque=opaque,
                    header=header,
                    body=body,
                    header_type=self.header_type,
                    signed_by=identity,
                )
            )
            if self._sweep is None:
                self._sweep = self._loop.call_later(SWEEP_INTERVAL, self._expire_requests)
            answer = await future
            if answer.code not in ACCESS_ERROR_CODES or renewed or identity is None:
                return answer
            renewed = await self._renew_credentials(answer, identity, now + seconds)
            if not renewed:
                return answer
            seconds -= self._loop.time() - now

    def send_one_way(self, code: int, header: HeaderFields = None, body: bytes = b"") -> None:
        """Send a request that is not answered.

        Raises:
            ConnectionLostError: The connection has ended.
        """
        if self._end_reason is not None:
            raise self.loss_error(self._end_reason)
        self._write(
            encode_request(
                code,
                opaque=0,  # no response comes, so nothing is matched by it
                header=header,
                body=body,
                one_way=True,
                header_type=self.header_type,
                signed_by=self._security.identity,
            )
        )

    def reply(
        self,
        request: RemotingCommand,
        code: int = ResponseCode.SUCCESS,
        remark: str | None = None,
        body: bytes = b"",
    ) -> None:
        """Answer a request of the peer; do nothing if the connection has ended."""
        if self._end_reason is None:
            self._write(encode_reply(request, code, remark=remark, body=body))

    async def wait_writable(self, code: int, seconds: float) -> None:
        """Wait until the write buffer has room, for senders of one-way requests.

        Raises:
            RequestTimeoutError: ``seconds`` passed first.
        """
        if self._write_blocked:
            await self._wait_for_capacity(code, seconds)

    def retire(self) -> None:
        """Accept no new requests, and close once those in flight are answered."""
        if not self._retired:
            self._retired = True
            self._on_unusable(self)
            if not self._in_flight:
                self.end("retired")

    def end(self, reason: str) -> None:
        """Close after buffered data was sent; requests in flight fail."""
        if self._end_reason is None:
            self._flush()
            self._end_reason = reason
            if self._transport is not None:
                self._transport.close()

    def abort(self) -> None:
        """Close at once; buffered data may be lost."""
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._closed)

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's do not derive from it
        self._transport.set_write_buffer_limits(high=self._config.write_buffer_max)
        connected = transport.get_extra_info("socket")
        if connected is not None:  # None in simulations
            self._fd = connected.fileno()
            track_socket(self._fd)

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        try:
            commands = self._decoder.receive_data(data)
        except ProtocolError as error:
            self._dispatch(error.commands)
            if not self._received_valid and data.startswith(TLS_ALERT):
                self._ended_by_tls = True
                self._fail(ONLY_TLS)
                return
            logger.warning("event=protocol_error peer=%s reason=%s", self.address, error)
            self._not_rocketmq = not self._answered
            if self._not_rocketmq:
                self._fail(f"{error}, and its first bytes are {data[:UNKNOWN_BYTES_SHOWN]!r}")
            else:
                self._fail(f"it broke the protocol: {error}")
        else:
            self._received_valid = True
            self._dispatch(commands)

    def connection_lost(self, exc: Exception | None) -> None:
        untrack_socket(self._fd)
        if self._end_reason is None:
            self._end_reason = self._end_reason_of(exc)
        if self._sweep is not None:
            self._sweep.cancel()
        for future, *_ in self._in_flight.fail_all():
            if not future.done():
                future.set_exception(self.loss_error(self._end_reason))
        while self._capacity_waiters:
            self._wake_capacity_waiters()
        if not self._closed.done():
            self._closed.set_result(None)
        self._on_unusable(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake_capacity_waiters()

    # -- inside

    def loss_error(self, reason: str) -> ClientError:
        """Return the error for requests that will not be answered; the actual reason wins."""
        if self._ended_by_tls:
            return TlsError(self.address, self._end_reason or reason)
        if self._not_rocketmq:
            return BadAnswerError(self.address, self._end_reason or reason)
        explained = self._answered or reason in (NO_ANSWER_PLAIN, NO_ANSWER_TLS)
        hint = "" if explained else f", before any answer; {PEER_EXPECTED}"
        return ConnectionLostError(self.address, f"{reason}{hint}")

    def _end_reason_of(self, exc: Exception | None) -> str:
        """Return why the connection has ended, if this client did not close it."""
        alert = alert_reason(exc)
        if alert is not None:
            self._ended_by_tls = True
            return alert
        if not self._received_valid and self._in_flight:
            return NO_ANSWER_PLAIN if self._security.tls is None else NO_ANSWER_TLS
        return str(exc) if exc else "closed by the peer"

    async def _renew_credentials(
        self, answer: RemotingCommand, identity: Identity, deadline: float
    ) -> bool:
        """Fetch credentials again if the signature was rejected; return whether they differ."""
        if not isinstance(error_from_response(answer), AuthenticationError):
            return False
        try:
            async with asyncio.timeout_at(deadline):
                return await self._security.renew(identity)
        except TimeoutError:
            return False

    def _dispatch(self, commands: list[RemotingCommand]) -> None:
        self._answered = self._answered or bool(commands)
        match = self._in_flight.match
        for command in commands:
            if not command.flag & FLAG_RESPONSE:
                self._handle_request(command)
                continue
            waiting = match(command.opaque)
            if waiting is None:
                continue  # its request timed out
            if not waiting[0].done():
                waiting[0].set_result(command)
            if command.code == ResponseCode.GO_AWAY:
                self.retire()
        if self._capacity_waiters:
            self._wake_capacity_waiters()
        if self._retired and not self._in_flight:
            self.end("retired")

    def _handle_request(self, command: RemotingCommand) -> None:
        handler = self._handlers.get(command.code)
        if handler is not None:
            handler(command, self)
        elif not command.is_one_way:
            unknown = f" request type {command.code} not supported"
            self.reply(command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, unknown)

    @property
    def _write_blocked(self) -> bool:
        """Whether backpressure applies: the peer is slow, or this iteration has written enough."""
        return self._paused or self._outgoing_size >= self._config.write_buffer_max

    def _write(self, frame: bytes) -> None:
        self._outgoing.append(frame)
        self._outgoing_size += len(frame)
        if len(self._outgoing) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._outgoing and self._transport is not None and self._end_reason is None:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()
        self._outgoing_size = 0
        if self._capacity_waiters and not self._paused:
            self._wake_capacity_waiters()

    def _expire_requests(self) -> None:
        self._sweep = None
        now = self._loop.time()
        dead = False
        for future, code, sent_at, seconds in self._in_flight.expire(now):
            dead = dead or self._received_at < sent_at
            if not future.done():
                silent = not self._answered
                future.set_exception(
                    RequestTimeoutError(self.address, code, seconds, silent=silent)
                )
        if dead:
            self._fail("it has sent nothing since a request that timed out")
            return
        if self._capacity_waiters:
            self._wake_capacity_waiters()
        if self._in_flight:
            self._sweep = self._loop.call_later(SWEEP_INTERVAL, self._expire_requests)
        elif self._retired:
            self.end("retired")

    def _fail(self, reason: str) -> None:
        if self._end_reason is None:
            self._end_reason = reason
        self.abort()

    async def _wait_for_capacity(self, code: int, seconds: float) -> None:
        """Wait until one more request may be sent."""
        try:
            async with asyncio.timeout(seconds):
                while self._end_reason is None and (
                    self._write_blocked or len(self._in_flight) >= self._config.in_flight_max
                ):
                    await self._wait_turn()
        except TimeoutError as error:
            raise RequestTimeoutError(self.address, code, seconds) from error

    async def _wait_turn(self) -> None:
        turn = self._loop.create_future()
        self._capacity_waiters.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._wake_capacity_waiters()  # this task had been woken; wake the next one instead
            raise

    def _wake_capacity_waiters(self) -> None:
        """Wake as many waiting requests as may be sent now."""
        room = max(1, self._config.in_flight_max - len(self._in_flight))
        while room and self._capacity_waiters:
            turn = self._capacity_waiters.popleft()
            if not turn.done():
                turn.set_result(None)
                room -= 1


ServerRequestHandler: TypeAlias = Callable[[RemotingCommand, BrokerConnection], None]
"""Handles a request from the broker to this client; may answer it, and must not block."""


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
        on_lost: Callable[[str], None] | None = None,
        security: Security | None = None,
        random_fraction: RandomFraction = random.random,
    ) -> None:
        self._config = config
        self._security = security or Security(config)
        self._handlers = handlers
        self._handshake = handshake
        self._on_lost = on_lost
        self._random_fraction = random_fraction
        self._connections: dict[str, BrokerConnection] = {}
        self._open_sockets: set[BrokerConnection] = set()
        self._attempts: dict[str, asyncio.Task[BrokerConnection]] = {}
        self._failures: dict[str, _Failure] = {}
        self._header_types: dict[str, HeaderType] = {}
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
        raise ConnectError(
            address, failure.reason if failure else f"no connection within {seconds:g} s"
        )

    async def close(self) -> None:
        """Close every connection after its buffered data was sent."""
        self._refuse_new()
        connections = list(self._open_sockets)
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
        except TimeoutError as timeout:
            seconds = f"{self._config.connect_timeout:g} s"
            raise ConnectError(address, f"no answer within {seconds}") from timeout
        except OSError as refused:
            error_of_tls = None if tls is None else tls_error(address, refused)
            raise error_of_tls or ConnectError(address, _connect_reason(refused)) from refused
        except (ValueError, OverflowError) as wrong:  # a label of a host name, or a port
            raise ConnectError(address, f"not a valid address ({wrong})") from wrong

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
                self._on_lost(connection.address)


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
