"""The socket side: an `asyncio.Protocol` around sans-IO remoting, and the listeners.

One `data_received` decodes every whole frame it completes and serves each with a plain function
call; replies are written together (`reply_release`): no task, future or queue per message.
Back-pressure works by not reading: while a peer does not read its replies, or while the disk is too
slow, its socket is paused.

A request that needs bytes that are not in memory, or that is too long for one pass of the loop,
returns to the head of its connection's backlog. The socket is paused, a thread fetches the bytes,
and the request is served again before those after it. So the requests of one connection are served
in order, while other connections are served too.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final, cast

from halfmq.remoting.codes import FLAG_ONE_WAY, FLAG_RESPONSE, HeaderType
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_request
from halfmq.store.files.page_cache import NotInMemoryError, waiting
from halfmq.store.format.ids import pack_host

from ..access.tls import TlsContext
from ..access.tls_listener import TlsListener
from ..errors import AddressTakenError, UnfinishedError
from ..loop.fetches import Fetch
from ..loop.slices import PAUSE_S, PeriodicWork
from ..loop.ticker import Ticker
from ..ports import ACK_S, Connection, OnAnswer, SendablePart
from .peer_requests import PeerRequestExpiry, PeerRequests
from .reply_release import ReplyRelease
from .router import Router

logger = logging.getLogger(__name__)

_MSGPACK: Final = int(HeaderType.MSGPACK)  # looking up an enum member takes 70 ns

_MORE_FOLLOWS: Final[int] = getattr(socket, "MSG_MORE", 0)
"""Flag of a send: more data of the same packet follow."""

IDLE_TIMEOUT_S: Final = 120.0
"""Seconds without a byte from or to the peer until its connection is closed; clients send a
heartbeat every 30 s.
Source: `NettyServerConfig.serverChannelMaxIdleTimeSeconds`."""

IDLE_SCAN_S: Final = 10.0
"""Seconds between two scans for idle connections. Each records which peers were active since the
previous scan, so a silent peer is closed up to two scans late."""

CONNECTIONS_MAX: Final = 20_000
"""Open connections; each takes about 5 KiB and a file descriptor. Further ones are closed at
once."""

WRITE_BUFFER_HIGH: Final = 8 << 20
"""Unsent bytes of one slow reader before its requests are no longer read: thirty full pulls."""

DIRECT_WRITE_MIN: Final = 16_384
"""Bytes from which a copy for the transport takes longer than a direct write to the socket."""

REQUESTS_PER_DISK_TEST: Final = 32
"""Requests, of one peer or several, between two tests of the disk limit: a read may contain
hundreds of decisions, each about a message of megabytes."""

BYTES_PER_DISK_TEST: Final = 256 << 10
"""Bytes read from all peers between two such tests, one full read: a test takes a twentieth of the
time of a small request."""

_REQUEST_WEIGHT: Final = (
    BYTES_PER_DISK_TEST // REQUESTS_PER_DISK_TEST
)  # bytes counted per request, plus its size

UNFINISHED_BYTES_MAX: Final = 256 << 20
"""Bytes of unfinished frames of all connections. A frame may have 16 MiB, so a few hundred peers
that never complete theirs could fill the memory; beyond this the peer that adds to it is closed."""

TRIES_MAX: Final = 256
"""Fetches for one request; then it is served even if it waits for the disk, because fetched bytes
may be evicted before they are used. A search halves a queue some thirty times, and a key of many
messages leads to at most 256 of them."""

_NOBODY_WAITS: Final = FLAG_RESPONSE | FLAG_ONE_WAY  # flags of a command that gets no answer

BACKLOG: Final = 1_024
"""Connections that the system keeps until they are accepted."""

CLOSE_TIMEOUT_S: Final = 5.0
"""Seconds for peers to read their last replies when the broker stops."""


class Shared:
    """State shared by all connections of one server."""

    def __init__(
        self,
        router: Router,
        release: ReplyRelease,
        fetch: Fetch,
        on_closed: Callable[[Connection], None],
    ) -> None:
        self.router = router
        self.release = release
        self.fetch = fetch
        self.on_closed = on_closed
        self.connections: set[ClientConnection] = set()
        self.per_address_max = 0  # connections; 0: no limit
        self.per_address: Counter[str] = Counter()
        self.opaques = itertools.count(1)
        self.request_expiry = PeerRequestExpiry()
        self.reads = 0  # of requests whose senders wait for an answer, or of parts of one
        self.untested_bytes = 0  # read since the last test of the disk limit
        self.unfinished_bytes = 0  # of incomplete frames
        self.advertised_host = ""  # of this broker in routes; empty: as the client reached it
        self.listen_port = 0  # known when the first listener is bound
        self.stopping = False


class ClientConnection(asyncio.Protocol):
    """One accepted connection; implements `ports.Connection`."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._dispatch = shared.router.dispatch
        self._respond = shared.release.respond
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._reading_paused = 0  # number of reasons for which the socket is not read
        self._backlog: list[RemotingCommand] = []  # read but not served: peer or disk is slow
        self._fetching = False  # whether bytes for the first of them are being fetched
        self._tries = 0  # fetches for the first of them
        self._unfinished = 0  # bytes of this connection in `Shared.unfinished_bytes`
        self._header_type = -1  # of the last request; -1: none yet
        self._request_header_type = HeaderType.JSON
        self._peer_requests: PeerRequests | None = None  # most peers get no request
        self.acknowledges = False
        self.subject: object = None
        self.unfinished: object = None
        self.closed = False
        self.writable = True
        self.name = self._peer_host = ""
        self.remote_host = self.store_host = b""
        self.broker_address = ""
        self.language = self.version = 0
        self.last_seen = self._loop.time()
        self._heard = False  # since the last idle scan
        self._socket: socket.socket | None = None  # the transport's, after a large write
        self._unsent = 0  # bytes in the write buffer at the last idle scan

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a new connection, or close it if there are too many."""
        shared = self._shared
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        local = transport.get_extra_info("sockname")
        self.name = _address_text(peer[0], peer[1])
        host = self._peer_host = peer[0]
        limit = shared.per_address_max
        if (
            shared.stopping
            or len(shared.connections) >= CONNECTIONS_MAX
            or (limit and shared.per_address[host] >= limit)
        ):
            logger.warning(
                "event=connection_refused peer=%s open=%d of_this_address=%d",
                self.name,
                len(shared.connections),
                shared.per_address[host],
            )
            self.closed = True
            self._transport.abort()
            return
        self.remote_host = pack_host(peer[0], peer[1])
        own_host = shared.advertised_host or local[0]
        self.store_host = pack_host(own_host, shared.listen_port)
        self.broker_address = _address_text(own_host, shared.listen_port)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_HIGH)
        connected = transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shared.connections.add(self)
        shared.per_address[host] += 1
        logger.debug("event=connected peer=%s", self.name)

    def data_received(self, data: bytes) -> None:
        """Serve every request that `data` completes."""
        self._heard = True
        broken: ProtocolError | None = None
        try:
            commands = self._decoder.receive_data(data)
        except ProtocolError as error:
            commands, broken = error.commands, error
        if commands:
            last = commands[-1]
            if (
                last.version != self.version
                or last.language != self.language
                or last.header_type != self._header_type
            ):
                self._remember_peer(last)
            waiting.is_allowed = False
            try:
                if len(commands) == 1:  # the usual case if the peer waits for each answer
                    self._dispatch(last, self)
                else:
                    self._serve(commands)
            except (NotInMemoryError, UnfinishedError) as reason:
                self._put_back(commands, reason)
            finally:
                waiting.is_allowed = True
        if broken is not None:
            # RocketMQ closes at once and answers nothing: after a bad frame no boundary is known.
            logger.warning("event=protocol_error peer=%s error=%r", self.name, str(broken))
            self.close()
            return
        if self._decoder.buffered != self._unfinished:
            self._count_unfinished(self._decoder.buffered)
        shared = self._shared
        if not commands or not commands[-1].flag & _NOBODY_WAITS:
            shared.reads += 1
        shared.untested_bytes += len(data) + _REQUEST_WEIGHT * len(commands)
        if shared.untested_bytes >= BYTES_PER_DISK_TEST:
            self._test_disk_limit()

    def _test_disk_limit(self) -> None:
        if self._shared.release.over_limit():
            self._stall()  # and the next peer tests as well
        else:
            self._shared.untested_bytes = 0

    def _stall(self) -> None:
        self._pause_reading()
        self._shared.release.stall(self._go_on)

    def _serve(self, commands: list[RemotingCommand]) -> None:
        """Serve commands in order; if peer or disk become slow, the rest stays in the backlog."""
        dispatch = self._dispatch
        for number, command in enumerate(commands, 1):
            try:
                dispatch(command, self)
            except (NotInMemoryError, UnfinishedError) as reason:
                self._put_back(commands[number - 1 :], reason)
                break
            if self._tries:
                self._tries = 0
                waiting.is_allowed = False
            if not self.writable or (
                not number % REQUESTS_PER_DISK_TEST and self._shared.release.over_limit()
            ):
                self._backlog = commands[number:]
                break

    def _put_back(self, commands: list[RemotingCommand], reason: Exception) -> None:
        """Return commands to the backlog, to be served when the first can be."""
        self._backlog = commands
        self._pause_reading()
        if isinstance(reason, NotInMemoryError):
            self._tries += 1
            self._fetching = True
            self._shared.fetch(reason, self._fetched)
        else:
            self._tries = 0
            self._loop.call_soon(self._go_on)

    def _fetched(self, is_there: bool) -> None:
        self._fetching = False
        if not is_there:  # the next try gets the read error, and answers it
            self._tries = TRIES_MAX
        self._go_on()

    def _count_unfinished(self, size: int) -> None:
        shared = self._shared
        shared.unfinished_bytes += size - self._unfinished
        grown = size > self._unfinished
        self._unfinished = size
        if grown and shared.unfinished_bytes > UNFINISHED_BYTES_MAX:
            logger.warning(
                "event=unfinished_frames peer=%s bytes=%d all_bytes=%d limit=%d",
                self.name,
                size,
                shared.unfinished_bytes,
                UNFINISHED_BYTES_MAX,
            )
            self.abort()

    def eof_received(self) -> bool:
        """Close when the peer closes; replies that are ready are still written."""
        self._shared.release.write_ready()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and everything registered through it."""
        self._count_unfinished(0)
        self._backlog = []
        self.unfinished = None
        if self._socket is not None:
            self._socket.detach()  # the transport closes it
            self._socket = None
        if self in self._shared.connections:
            self._shared.connections.discard(self)
            self._forget_address()
            self.closed = True
            self._shared.on_closed(self)
            logger.debug("event=disconnected peer=%s error=%r", self.name, exc)
        self.closed = True
        if self._peer_requests is not None:
            self._peer_requests.fail()

    def _forget_address(self) -> None:
        counts = self._shared.per_address
        counts[self._peer_host] -= 1
        if not counts[self._peer_host]:
            del counts[self._peer_host]

    def pause_writing(self) -> None:
        """Stop reading a peer that does not read its replies."""
        self.writable = False
        self._pause_reading()

    def resume_writing(self) -> None:
        """Serve the backlog, and read the peer again: it has read its replies."""
        self.writable = True
        self._go_on()

    def _go_on(self) -> None:
        """Serve the backlog, and read the peer again."""
        if self._backlog and self.writable and not self._fetching and not self._shared.stopping:
            release = self._shared.release
            if not release.over_limit():
                backlog, self._backlog = self._backlog, []
                waiting.is_allowed = self._tries >= TRIES_MAX
                try:
                    self._serve(backlog)
                finally:
                    waiting.is_allowed = True
            if release.over_limit():
                self._stall()
        self._resume_reading()

    # --- ports.Connection

    def send_request(
        self, code: int, header: Header | Mapping[str, str] | None, body: bytes = b""
    ) -> bool:
        """Send a one-way request to the client; return False if it was not written."""
        if self.closed or not self.writable:
            return False
        frame = encode_request(
            code,
            opaque=next(self._shared.opaques) & 0x7FFFFFFF,
            header=header,
            body=body,
            one_way=True,
            header_type=self._request_header_type,
        )
        self.write(frame)
        return True

    def ask(
        self,
        code: int,
        header: Header | Mapping[str, str] | None,
        body: bytes,
        on_answer: OnAnswer,
        *,
        seconds: float = ACK_S,
    ) -> bool:
        """Send a request that the client answers; return False if it was not written."""
        if self.closed or not self.writable or self._shared.stopping:
            return False
        requests = self._peer_requests
        if requests is None:
            requests = self._peer_requests = PeerRequests()
        if requests.full:
            return False
        opaque = requests.register(on_answer, self._loop.time() + seconds)
        self.write(
            encode_request(
                code,
                opaque=opaque,
                header=header,
                body=body,
                header_type=self._request_header_type,
            )
        )
        if len(requests) == 1:
            self._shared.request_expiry.watch(requests, self._loop)
        return True

    def answered(self, answer: RemotingCommand) -> None:
        """Pass an answer of the peer to the caller of `ask`; ignore an unexpected one."""
        if self._peer_requests is not None:
            self._peer_requests.answered(answer)

    def respond(self, request: RemotingCommand, reply: bytes, durable_at: int = 0) -> None:
        """Answer a request when the commit log is on disk up to the position `durable_at`."""
        self._respond(self, request, reply, durable_at)

    def write(self, data: bytes | memoryview) -> None:
        """Write whole frames; do nothing if the connection is closed.

        Large writes go directly to the socket while the transport has nothing to send. So only
        what the peer does not accept at once is copied.
        """
        transport = self._transport
        if self.closed or transport is None:
            return
        if len(data) < DIRECT_WRITE_MIN:
            transport.write(bytes(data))
            return
        sent = 0
        if (connected := self._direct_socket(transport)) is not None:
            try:
                sent = connected.send(data)
            except OSError:
                sent = 0  # full, or broken: the transport detects that
        if sent < len(data):
            transport.write(bytes(data[sent:]))

    def write_part(self, head: bytes, part: SendablePart) -> None:
        """Write a frame whose end the system sends from a file; do nothing if closed.

        Only what the peer does not accept at once is copied.
        """
        transport = self._transport
        if self.closed or transport is None:
            return
        sent = 0
        if (connected := self._direct_socket(transport)) is not None:
            try:
                sent = connected.send(head, _MORE_FOLLOWS)
                if sent == len(head):
                    sent += part.send(connected.fileno())
            except OSError:
                pass  # as in `write`
        if sent == len(head) + part.length:
            return
        sent_of_part = max(sent - len(head), 0)
        try:
            rest = part.rest(sent_of_part)
        except OSError as error:
            self._end_in_a_frame(repr(error))
            return
        if len(rest) < part.length - sent_of_part:
            self._end_in_a_frame("the file has become shorter")
            return
        transport.write(head[sent:] + rest)

    def _end_in_a_frame(self, reason: str) -> None:
        """Close at once: part of a frame may have been sent, and the rest is lost."""
        logger.error("event=answer_cut_off peer=%s reason=%s", self.name, reason)
        self.abort()

    def _direct_socket(self, transport: asyncio.Transport) -> socket.socket | None:
        """Return the transport's socket if the transport has nothing to send; else None."""
        if transport.get_write_buffer_size() or transport.is_closing():
            return None
        return self._socket or self._connected_socket(transport)

    def _connected_socket(self, transport: asyncio.Transport) -> socket.socket | None:
        """Return a full socket object of the transport; None if it has none."""
        known = transport.get_extra_info("socket")
        if transport.get_extra_info("sslcontext") is not None:
            return None  # a direct write would send plain text
        if known is None or sys.platform == "win32":  # there the transport's writes overlap
            return None
        self._socket = socket.socket(known.family, known.type, known.proto, known.fileno())
        self._socket.setblocking(False)
        return self._socket

    def stop_reading(self) -> None:
        """Read no more requests; replies are still sent."""
        self._pause_reading()

    def close(self) -> None:
        """Close after replies that are ready were written."""
        self._shared.release.write_ready()
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def is_idle(self, since: float) -> bool:
        """Return whether the peer has neither sent nor read anything since a loop time.

        A peer that reads its answers slowly sends nothing meanwhile, but is not idle.
        """
        transport = self._transport
        unsent = 0 if transport is None else transport.get_write_buffer_size()
        if unsent != self._unsent or self._heard:
            self._unsent, self._heard = unsent, False
            self.last_seen = self._loop.time()
        return self.last_seen < since

    def _remember_peer(self, command: RemotingCommand) -> None:
        self.version, self.language = command.version, command.language
        self._header_type = command.header_type
        if command.header_type == _MSGPACK:
            self._request_header_type = HeaderType.MSGPACK
            self.acknowledges = True

    def _pause_reading(self) -> None:
        self._reading_paused += 1
        if self._reading_paused == 1 and self._transport is not None and not self.closed:
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        self._reading_paused -= 1
        if self._reading_paused == 0 and self._transport is not None and not self.closed:
            self._transport.resume_reading()


class Server:
    """Listens on all addresses and keeps their connections."""

    def __init__(
        self,
        router: Router,
        release: ReplyRelease,
        fetch: Fetch,
        on_closed: Callable[[Connection], None],
        *,
        host: str,
        advertised_host: str = "",
        listen_port: int,
        namesrv_port: int,
        tls: TlsContext | None = None,
        connections_per_address: int = 0,
    ) -> None:
        self._shared = Shared(router, release, fetch, on_closed)
        self._shared.advertised_host = advertised_host
        self._host = host
        self._listen_port, self._namesrv_port = listen_port, namesrv_port
        self._release = release
        self._shared.per_address_max = connections_per_address
        self._tls = tls
        self._servers: list[asyncio.Server | TlsListener] = []
        idle = PeriodicWork(IDLE_SCAN_S, self._close_idle)
        self._idle_scan = Ticker("idle", idle.tick, pause=PAUSE_S, traffic=lambda: self.reads)
        self.addresses: list[str] = []

    @property
    def reads(self) -> int:
        """Reads since the start after which a peer waits for an answer: the traffic."""
        return self._shared.reads

    @property
    def port(self) -> int:
        """The port of client requests, known once started."""
        return self._shared.listen_port

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of incomplete frames of all connections."""
        return self._shared.unfinished_bytes

    @property
    def open_connections(self) -> int:
        """Number of open connections, of clients and tools."""
        return len(self._shared.connections)

    @property
    def address(self) -> str:
        """Address of client requests, `host:port`."""
        return _address_text(self._host, self._shared.listen_port)

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
        try:
            bound = await self._bind(port)
        except OSError as error:
            reason = "the address is in use" if error.errno == errno.EADDRINUSE else str(error)
            raise AddressTakenError(_address_text(self._host, port), key, reason) from error
        self.addresses.append(_address_text(self._host, bound))
        return bound

    async def _bind(self, port: int) -> int:
        if self._tls is not None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            bound = socket.create_server((self._host, port), family=family, backlog=BACKLOG)
            listener = TlsListener(bound, self._tls, self._protocol)
            self._servers.append(listener)
            return listener.port
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._protocol, self._host, port, backlog=BACKLOG)
        self._servers.append(server)
        port_bound: int = server.sockets[0].getsockname()[1]
        return port_bound

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
                await self._replies_out()
        except TimeoutError:
            logger.warning("event=stop_timeout open=%d", len(self._shared.connections))
        for connection in list(self._shared.connections):
            connection.abort()

    async def _replies_out(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._release.idle:
            drained = loop.create_future()
            self._release.notify_when_idle(drained)
            await drained
        gone = loop.create_future()
        self._when_closed(gone)
        await gone

    def _when_closed(self, gone: asyncio.Future[None]) -> None:
        """Close connections after their replies; complete `gone` when the last one is lost."""
        previous = self._shared.on_closed

        def closed(connection: Connection) -> None:
            previous(connection)
            if not self._shared.connections and not gone.done():
                gone.set_result(None)

        self._shared.on_closed = closed
        for connection in list(self._shared.connections):
            connection.close()
        if not self._shared.connections:
            gone.set_result(None)

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


def _address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
