"""A TCP connection to a broker or name server.

Requests of many tasks share a connection. Each request gets a request id (opaque) and a future;
frames of one event-loop iteration are joined into one write; the response completes the future.
There is no task, queue or timer per request: one periodic sweep per connection expires requests.

A connection is closed if the peer breaks the protocol, or if a request times out and the peer has
sent nothing at all since: then it is dead, not slow. Requests in flight fail with
:class:`ConnectionLostError`, and the next request opens a new connection (``connection_pool``).

Requests are signed here, because all of them pass through this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, cast

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
    ClientError,
    ConnectionLostError,
    RequestTimeoutError,
    TlsError,
)
from .fork_safety import track_socket, untrack_socket
from .response_errors import ACCESS_ERROR_CODES, error_from_response
from .security import (
    NO_ANSWER_PLAIN,
    NO_ANSWER_TLS,
    ONLY_TLS,
    TLS_ALERT,
    Security,
    alert_reason,
)

logger = logging.getLogger(__name__)

SWEEP_INTERVAL: Final = 0.05
"""Seconds between checks for expired requests; a timeout is noticed up to this much later."""
UNKNOWN_BYTES_SHOWN: Final = 24
"""Bytes of an unknown protocol shown in the error: the first line identifies an HTTP server."""


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
    def end_reason(self) -> str:
        """Why the connection has ended; empty while it has not."""
        return self._end_reason or ""

    @property
    def unanswered(self) -> list[asyncio.Future[RemotingCommand]]:
        """The answers that somebody waits for."""
        return [future for future, *_ in self._in_flight.values() if not future.done()]

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
            logger.warning("event=protocol_error peer=%s reason=%r", self.address, str(error))
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
