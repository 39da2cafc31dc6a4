"""One TCP connection to a broker or name server, and the pool that keeps them.

Requests of many tasks share a connection. A request gets a number (opaque) and a future; frames
of one pass of the event loop are joined into one write; the answer completes the future. There is
no task, queue or timer per request: one sweep per connection ends what took too long.

A connection is given up when the peer breaks the protocol, or when a request times out and the
peer has sent nothing at all since it left: then it is dead, not slow. Requests that were under way
end with :class:`ConnectionLostError`, and the next request opens a new connection. A failed connect
is repeated no sooner than a growing delay allows, however many callers wait for it.

All requests leave through here, so here they are signed.
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
from .loop_binding import forget_socket, note_socket
from .refusals import REFUSAL_CODES, refusal
from .retry import Chance, pause
from .security import (
    ONLY_TLS,
    TLS_ALERT,
    UNHEARD_PLAIN,
    UNHEARD_TLS,
    Security,
    alert_reason,
    tls_error,
)

logger = logging.getLogger(__name__)

SWEEP_INTERVAL: Final = 0.05
"""Seconds between looks for overdue requests: how late a timeout may be noticed."""
FOREIGN_SHOWN: Final = 24
"""Bytes of what another server sent, in the error: an HTTP server is known by its first line."""
CLOSE_SECONDS: Final = 1.0
"""How long closing waits for a peer to take what was written."""


HeaderFields: TypeAlias = Header | Mapping[str, str] | None


# A request that has left: its answer, its code, when it was sent, and for how many seconds it may
# wait. A plain tuple, for there is one per message sent.
_Waiting: TypeAlias = tuple[asyncio.Future[RemotingCommand], int, float, float]


class Connection(asyncio.Protocol):
    """Sends requests, matches answers, and hands the peer's own requests to ``handlers``."""

    def __init__(
        self,
        address: str,
        config: ClientConfig,
        handlers: Mapping[int, ServerRequestHandler],
        on_gone: Callable[[Connection], None],
        security: Security,
    ) -> None:
        self.address = address
        self.header_type = HeaderType.JSON
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._handlers = handlers
        self._on_gone = on_gone
        self._security = security
        self._decoder = FrameDecoder(responses_first=True)
        self._waiting: Correlation[_Waiting] = Correlation(in_flight_max=config.in_flight_max)
        self._room_wanted: deque[asyncio.Future[None]] = deque()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []  # frames of this pass of the loop
        self._outgoing_size = 0
        self._paused = False
        self._sweep: asyncio.TimerHandle | None = None
        self._heard_at = self._loop.time()
        self._heard = False
        self._end_reason: str | None = None
        self._ended_by_tls = False
        self._retired = False
        self._closed = self._loop.create_future()
        self._fd = -1
        self._answered = False  # something whole has come from the peer
        self._foreign = False  # what came first was no frame

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
        """This machine's address as the connection uses it."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("sockname")[0])

    async def request(
        self, code: int, header: HeaderFields = None, body: bytes = b"", *, seconds: float
    ) -> RemotingCommand:
        """Send a request and return its answer, whatever code that carries.

        It is sent once more if it was refused because of its signature, and there are other
        credentials by now.

        Raises:
            ConnectionLostError: The connection ended first.
            RequestTimeoutError: ``seconds`` passed first.
            TlsError: The peer takes only TLS, or refuses this client's certificate.
        """
        renewed = False
        while True:
            if self._choked or len(self._waiting) >= self._config.in_flight_max:
                await self._room(code, seconds)
            if self._end_reason is not None:
                raise self.loss(self._end_reason)
            now = self._loop.time()
            future: asyncio.Future[RemotingCommand] = self._loop.create_future()
            opaque = self._waiting.register((future, code, now, seconds), now + seconds)
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
                self._sweep = self._loop.call_later(SWEEP_INTERVAL, self._end_overdue)
            answer = await future
            if answer.code not in REFUSAL_CODES or renewed or identity is None:
                return answer
            renewed = await self._renewed(answer, identity, now + seconds)
            if not renewed:
                return answer
            seconds -= self._loop.time() - now

    def send_one_way(self, code: int, header: HeaderFields = None, body: bytes = b"") -> None:
        """Send a request that is not answered.

        Raises:
            ConnectionLostError: The connection has ended.
        """
        if self._end_reason is not None:
            raise self.loss(self._end_reason)
        self._write(
            encode_request(
                code,
                opaque=0,  # nobody answers, so nothing is matched by it
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
    ) -> None:
        """Answer a request of the peer; nothing happens when the connection has ended."""
        if self._end_reason is None:
            self._write(encode_reply(request, code, remark=remark))

    async def drained(self, code: int, seconds: float) -> None:
        """Wait until the peer takes more bytes; for senders of one-way requests.

        Raises:
            RequestTimeoutError: ``seconds`` passed first.
        """
        if self._choked:
            await self._room(code, seconds)

    def retire(self) -> None:
        """Take no new requests, and close once those under way are answered."""
        if not self._retired:
            self._retired = True
            self._on_gone(self)
            if not self._waiting:
                self.end("retired")

    def end(self, reason: str) -> None:
        """Close: what was written still leaves, what waits for an answer fails."""
        if self._end_reason is None:
            self._flush()
            self._end_reason = reason
            if self._transport is not None:
                self._transport.close()

    def abort(self) -> None:
        """Close at once; what was written may not leave."""
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Return when the socket is closed."""
        await asyncio.shield(self._closed)

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's do not derive from it
        self._transport.set_write_buffer_limits(high=self._config.write_buffer_max)
        connected = transport.get_extra_info("socket")
        if connected is not None:  # None in simulations
            self._fd = connected.fileno()
            note_socket(self._fd)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            commands = self._decoder.receive_data(data)
        except ProtocolError as error:
            self._take(error.commands)
            if not self._heard and data.startswith(TLS_ALERT):
                self._ended_by_tls = True
                self._give_up(ONLY_TLS)
                return
            logger.warning("event=protocol_error peer=%s reason=%s", self.address, error)
            self._foreign = not self._answered
            if self._foreign:
                self._give_up(f"{error}, and its first bytes are {data[:FOREIGN_SHOWN]!r}")
            else:
                self._give_up(f"it broke the protocol: {error}")
        else:
            self._heard = True
            self._take(commands)

    def connection_lost(self, exc: Exception | None) -> None:
        forget_socket(self._fd)
        if self._end_reason is None:
            self._end_reason = self._reason_of(exc)
        if self._sweep is not None:
            self._sweep.cancel()
        for future, *_ in self._waiting.fail_all():
            if not future.done():
                future.set_exception(self.loss(self._end_reason))
        while self._room_wanted:
            self._grant_room()
        if not self._closed.done():
            self._closed.set_result(None)
        self._on_gone(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._grant_room()

    # -- inside

    def loss(self, reason: str) -> ClientError:
        """The error for those whose answer will not come any more, for want of a better reason."""
        if self._ended_by_tls:
            return TlsError(self.address, self._end_reason or reason)
        if self._foreign:
            return BadAnswerError(self.address, self._end_reason or reason)
        explained = self._answered or reason in (UNHEARD_PLAIN, UNHEARD_TLS)
        hint = "" if explained else f", before any answer; {PEER_EXPECTED}"
        return ConnectionLostError(self.address, f"{reason}{hint}")

    def _reason_of(self, exc: Exception | None) -> str:
        """Say in words why the connection has ended, other than by us."""
        alert = alert_reason(exc)
        if alert is not None:
            self._ended_by_tls = True
            return alert
        if not self._heard and self._waiting:
            return UNHEARD_PLAIN if self._security.tls is None else UNHEARD_TLS
        return str(exc) if exc else "closed by the peer"

    async def _renewed(self, answer: RemotingCommand, identity: Identity, deadline: float) -> bool:
        """Whether the answer refuses its request's signature, and there are other credentials."""
        if not isinstance(refusal(answer), AuthenticationError):
            return False
        try:
            async with asyncio.timeout_at(deadline):
                return await self._security.renew(identity)
        except TimeoutError:
            return False

    def _take(self, commands: list[RemotingCommand]) -> None:
        self._answered = self._answered or bool(commands)
        match = self._waiting.match
        for command in commands:
            if not command.flag & FLAG_RESPONSE:
                self._serve(command)
                continue
            waiting = match(command.opaque)
            if waiting is None:
                continue  # its request timed out
            if not waiting[0].done():
                waiting[0].set_result(command)
            if command.code == ResponseCode.GO_AWAY:
                self.retire()
        if self._room_wanted:
            self._grant_room()
        if self._retired and not self._waiting:
            self.end("retired")

    def _serve(self, command: RemotingCommand) -> None:
        handler = self._handlers.get(command.code)
        if handler is not None:
            handler(command, self)
        elif not command.is_one_way:
            unknown = f" request type {command.code} not supported"
            self.reply(command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, unknown)

    @property
    def _choked(self) -> bool:
        """Whether writers should wait: the peer is slow, or this pass has written enough."""
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
        if self._room_wanted and not self._paused:
            self._grant_room()

    def _end_overdue(self) -> None:
        self._sweep = None
        now = self._loop.time()
        dead = False
        for future, code, sent_at, seconds in self._waiting.expire(now):
            dead = dead or self._heard_at < sent_at
            if not future.done():
                silent = not self._answered
                future.set_exception(
                    RequestTimeoutError(self.address, code, seconds, silent=silent)
                )
        if dead:
            self._give_up("it has fallen silent")
            return
        if self._room_wanted:
            self._grant_room()
        if self._waiting:
            self._sweep = self._loop.call_later(SWEEP_INTERVAL, self._end_overdue)
        elif self._retired:
            self.end("retired")

    def _give_up(self, reason: str) -> None:
        if self._end_reason is None:
            self._end_reason = reason
        self.abort()

    async def _room(self, code: int, seconds: float) -> None:
        """Wait until one more request fits."""
        try:
            async with asyncio.timeout(seconds):
                while self._end_reason is None and (
                    self._choked or len(self._waiting) >= self._config.in_flight_max
                ):
                    await self._wait_for_room()
        except TimeoutError as error:
            raise RequestTimeoutError(self.address, code, seconds) from error

    async def _wait_for_room(self) -> None:
        turn = self._loop.create_future()
        self._room_wanted.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._grant_room()  # the turn was ours; pass it on
            raise

    def _grant_room(self) -> None:
        """Let waiting requests look again, as many as fit."""
        room = max(1, self._config.in_flight_max - len(self._waiting))
        while room and self._room_wanted:
            turn = self._room_wanted.popleft()
            if not turn.done():
                turn.set_result(None)
                room -= 1


ServerRequestHandler: TypeAlias = Callable[[RemotingCommand, Connection], None]
"""Takes a request that the broker made to this client; answers it or not, and never waits."""


class _Failure(NamedTuple):
    """The last failed connect to an address."""

    times: int
    again_at: float
    """When the next one may be made."""
    reason: str


class ConnectionPool:
    """At most one usable connection per address, opened when it is first needed.

    ``greet`` runs on each new connection before anybody else may use it: a broker must know who
    is there before the first pull.
    """

    def __init__(
        self,
        config: ClientConfig,
        handlers: Mapping[int, ServerRequestHandler],
        *,
        greet: Callable[[Connection], Awaitable[None]] | None = None,
        on_lost: Callable[[str], None] | None = None,
        security: Security | None = None,
        chance: Chance = random.random,
    ) -> None:
        self._config = config
        self._security = security or Security(config)
        self._handlers = handlers
        self._greet = greet
        self._on_lost = on_lost
        self._chance = chance
        self._connections: dict[str, Connection] = {}
        self._open_sockets: set[Connection] = set()
        self._attempts: dict[str, asyncio.Task[Connection]] = {}
        self._failures: dict[str, _Failure] = {}
        self._header_types: dict[str, HeaderType] = {}
        self._closed = False

    def speak(self, address: str, header_type: HeaderType) -> None:
        """Use this header type for requests to the address, now and on later connections."""
        self._header_types[address] = header_type
        connection = self._connections.get(address)
        if connection is not None:
            connection.header_type = header_type

    def live(self, address: str) -> Connection | None:
        """The connection if one is open."""
        connection = self._connections.get(address)
        return connection if connection is not None and connection.usable else None

    async def get(self, address: str, seconds: float) -> Connection:
        """The connection, opened if need be.

        Raises:
            ConnectError: It cannot be opened, or not within ``seconds``.
            ClientClosedError: The pool is closed.
        """
        connection = self.live(address)
        if connection is not None:
            return connection
        if self._closed:
            raise ClientClosedError("the client")
        attempt = self._attempts.get(address)
        if attempt is None:
            attempt = asyncio.create_task(self._open(address), name=f"connect {address}")
            self._attempts[address] = attempt
            attempt.add_done_callback(lambda done: self._attempt_done(address, done))
        # Others may wait for it too. When close() cancels it, its waiters are not cancelled.
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
        """Close every connection after what was written has left."""
        self._take_no_more()
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
        """Close every connection at once; what was written may not leave."""
        self._take_no_more()
        for connection in list(self._open_sockets):
            connection.abort()

    def _take_no_more(self) -> None:
        self._closed = True
        for attempt in list(self._attempts.values()):
            attempt.cancel()

    async def _open(self, address: str) -> Connection:
        failure = self._failures.get(address)
        if failure is not None:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(failure.again_at - loop.time())
        try:
            connection = await self._dial(address)
            await self._introduce(connection)
            if not connection.usable:  # or a dead connection would stay in the table for good
                raise connection.loss("closed by the peer at once")
        except ConnectError as error:
            self._note_failure(address, error.reason)
            raise
        except (ConnectionLostError, RequestTimeoutError) as error:
            self._note_failure(address, str(error))
            raise ConnectError(address, str(error)) from error
        except BadAnswerError as error:
            self._note_failure(address, str(error))
            raise
        self._failures.pop(address, None)
        self._connections[address] = connection
        return connection

    async def _introduce(self, connection: Connection) -> None:
        if self._greet is None:
            return
        try:
            await self._greet(connection)
        except BaseException:
            connection.end("not used")
            raise

    async def _dial(self, address: str) -> Connection:
        """A TCP connection to the first of the host's addresses that takes one."""
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
                            lambda: Connection(
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
            raise ConnectError(address, f"this is no address ({wrong})") from wrong

    def _note_failure(self, address: str, reason: str) -> None:
        before = self._failures.get(address)
        times = before.times + 1 if before else 1
        again_at = asyncio.get_running_loop().time() + pause(times, self._config, self._chance)
        self._failures[address] = _Failure(times, again_at, reason)

    def _attempt_done(self, address: str, attempt: asyncio.Task[Connection]) -> None:
        del self._attempts[address]
        if not attempt.cancelled():
            attempt.exception()  # callers that went away would leave it unread

    def _forget(self, connection: Connection) -> None:
        """A connection ended, or takes no more requests."""
        if connection.closed:
            self._open_sockets.discard(connection)
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]
            if self._on_lost is not None and not self._closed:
                self._on_lost(connection.address)


async def _resolve(host: str, port: int) -> list[str]:
    """The numeric addresses of a host, in the order the system prefers them."""
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
