"""One client connection: an `asyncio.Protocol` around the sans-IO decoder of frames.

One `data_received` decodes every whole frame it completes and serves each with a plain function
call; replies are written together (`reply_release`): no task, future or queue per message.
Back-pressure: while a peer does not read its replies, or while the disk is too slow, its socket is
not read.

A request that needs bytes that are not in memory, or that is too long for one pass of the loop,
returns to the head of its connection's backlog. The socket is paused, a thread fetches the bytes,
and the request is served again before those after it. Requests for which the connection's turn was
too short (`Turns`) wait in the same way. So the requests of one connection are served in order,
while other connections are served too.
"""

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Final, cast

from halfmq.remoting.codes import FLAG_ONE_WAY, FLAG_RESPONSE, HeaderType
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import OtherProtocolError, ProtocolError
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_request
from halfmq.store.files.page_cache import NotInMemoryError, waiting
from halfmq.store.files.zero_copy import FilePart
from halfmq.store.format.ids import pack_host

from ..errors import UnfinishedError
from ..ports import ACK_S, OnAnswer
from .peer_requests import PeerRequests
from .shared_state import SharedState

logger = logging.getLogger(__name__)

_MSGPACK: Final = int(HeaderType.MSGPACK)  # looking up an enum member takes 70 ns

_MORE_FOLLOWS: Final[int] = getattr(socket, "MSG_MORE", 0)
"""Flag of a send: more data of the same packet will follow."""

WRITE_BUFFER_HIGH: Final = 256 << 10
"""Unsent bytes of one slow reader before its requests are no longer read: one full pull, besides
the megabytes that the kernel takes."""

LARGE_READ_MIN: Final = 4 << 10
"""Bytes from which a read may wait for a turn to be decoded: some twenty of the smallest requests,
which take a fifth of a millisecond."""

DIRECT_WRITE_MIN: Final = 16_384
"""Bytes from which a copy for the transport takes longer than a direct write to the socket."""

REQUESTS_PER_DISK_TEST: Final = 32
"""Requests, of one peer or several, between two tests of the disk limit: a read may contain
hundreds of decisions, each about a message of megabytes."""

BYTES_PER_DISK_TEST: Final = 256 << 10
"""Bytes read from all peers between two such tests, one full read: a test takes a twentieth of the
time of a small request."""

_REQUEST_WEIGHT: Final = BYTES_PER_DISK_TEST // REQUESTS_PER_DISK_TEST
"""Bytes that each request counts, besides its size."""

BACKLOG_COUNTED_MIN: Final = 512 << 10
"""Bytes of requests that were read and not served from which they count as unfinished ones. While
the disk is slow every producer has a read of a quarter of that, which no peer can enlarge but by a
large request."""

FRAME_S: Final = 60.0
"""Seconds within which a request must be complete; official clients give up after three."""

FETCHES_MAX: Final = 256
"""Fetches for one request; then it is served even if it waits for the disk, because fetched bytes
may be evicted before they are used. A binary search in a queue has some thirty steps, and a key of
many messages leads to at most 256 of them."""

OTHER_PROTOCOLS_MAX: Final = 1_024
"""Addresses of which is logged that they speak another protocol, 200 bytes each: the prober of a
load balancer connects every few seconds."""

_OTHER_PROTOCOL_NOTES: Final = {
    "HTTP/2": "gRPC? Clients of RocketMQ's gRPC protocol are not served yet, remoting clients are: "
    "docs/compatibility.md names them",
    "HTTP": "This port serves RocketMQ's remoting protocol only",
    "TLS": "TLS is not configured here (tlsServerCertPath); or a gRPC client, which are not served "
    "yet: docs/compatibility.md",
}

_GETS_NO_ANSWER: Final = FLAG_RESPONSE | FLAG_ONE_WAY  # flags of such a command


class ClientConnection(asyncio.Protocol):
    """One accepted connection; implements `ports.Connection`."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self._dispatch = shared.router.dispatch
        self._respond = shared.release.respond
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._reading_paused = 0  # number of reasons for which the socket is not read
        self._backlog: list[RemotingCommand] = []  # read but not served: peer or disk is slow
        self._has_turn = False  # whether a read that has waited is being served
        self._fetching = False  # whether bytes for the first of them are being fetched
        self._fetches = 0  # fetches for the first of them
        self._unfinished = 0  # bytes of this connection in `SharedState.unfinished`
        self._unfinished_since = 0.0  # loop time at which its incomplete request began
        self._header_type = -1  # of the last request; -1: none yet
        self._request_header_type = HeaderType.JSON
        self._peer_requests: PeerRequests | None = None  # most peers get no request
        self.acknowledges = False
        self.subject: object = None
        self.unfinished: object = None
        self.long_answers = shared.long_answers
        self.closed = False
        self.writable = True
        self.name = self._peer_host = ""
        self.remote_host = self.store_host = b""
        self.broker_address = ""
        self.language = self.version = 0
        self.last_seen = self._loop.time()
        self._received = False  # since the last idle scan
        self._socket: socket.socket | None = None  # the transport's, after a large write
        self._unsent = 0  # bytes in the write buffer at the last idle scan

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a new connection, or close it if there are too many."""
        shared = self._shared
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        local = transport.get_extra_info("sockname")
        self.name = address_text(peer[0], peer[1])
        host = self._peer_host = peer[0]
        if shared.refuses(host, self.name):
            self.closed = True
            self._transport.abort()
            return
        self.remote_host = pack_host(peer[0], peer[1])
        own_host = shared.advertised_host or local[0]
        self.store_host = pack_host(own_host, shared.listen_port)
        self.broker_address = address_text(own_host, shared.listen_port)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_HIGH)
        connected = transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shared.connections.add(self)
        shared.per_address[host] += 1
        logger.debug("event=connected peer=%s", self.name)

    def data_received(self, data: bytes) -> None:
        """Serve every request that `data` completes."""
        self._received = True
        if len(data) >= LARGE_READ_MIN and not self._has_turn and self._shared.turns.is_over():
            self._wait_for_turn(data)
            return
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
            self._log_broken(broken)
            self.close()
            return
        if self._backlog:
            self._count_unfinished(self._unfinished + len(data))
        elif self._decoder.buffered != self._unfinished:
            if commands or not self._unfinished:
                self._unfinished_since = self._loop.time()
            self._count_unfinished(self._decoder.buffered)
        shared = self._shared
        if not commands or not commands[-1].flag & _GETS_NO_ANSWER:
            shared.reads += 1
        shared.untested_bytes += len(data) + _REQUEST_WEIGHT * len(commands)
        if shared.untested_bytes >= BYTES_PER_DISK_TEST:
            self._test_disk_limit()

    def _wait_for_turn(self, data: bytes) -> None:
        self._pause_reading()
        self._count_unfinished(self._decoder.buffered + len(data))

        def take_turn() -> None:
            self._has_turn = True
            try:
                if not self.closed and not self._shared.stopping:
                    self.data_received(data)
            finally:
                self._has_turn = False
            self._resume_reading()

        self._shared.turns.wait(take_turn)

    def _log_broken(self, broken: ProtocolError) -> None:
        """Log why the connection is closed; another protocol once for each address."""
        if not isinstance(broken, OtherProtocolError):
            logger.warning("event=protocol_error peer=%s error=%r", self.name, str(broken))
            return
        known, key = self._shared.other_protocols, (self._peer_host, broken.protocol)
        if key not in known and len(known) < OTHER_PROTOCOLS_MAX:
            known.add(key)
            note = _OTHER_PROTOCOL_NOTES[broken.protocol]
            logger.warning(
                "event=other_protocol peer=%s protocol=%s note=%s", self.name, key[1], note
            )

    def _test_disk_limit(self) -> None:
        if self._shared.release.over_limit():
            self._stall()  # the count stays, so that the next peer tests the limit as well
        else:
            self._shared.untested_bytes = 0

    def _stall(self) -> None:
        self._pause_reading()
        self._shared.release.stall(self._resume)

    def _serve(self, commands: list[RemotingCommand]) -> None:
        """Serve commands in order, until the turn is over or while the peer or the disk is slow.

        The rest is kept as backlog.
        """
        dispatch, clock, end = self._dispatch, time.perf_counter, self._shared.turns.end()
        for number, command in enumerate(commands, 1):
            try:
                dispatch(command, self)
            except (NotInMemoryError, UnfinishedError) as reason:
                self._put_back(commands[number - 1 :], reason)
                break
            if self._fetches:
                self._fetches = 0
                waiting.is_allowed = False
            if not self.writable or (
                not number % REQUESTS_PER_DISK_TEST and self._shared.release.over_limit()
            ):
                self._backlog = commands[number:]
                break
            if clock() >= end and number < len(commands):
                self._put_back(commands[number:], UnfinishedError())
                break

    def _put_back(self, commands: list[RemotingCommand], reason: Exception) -> None:
        """Return commands to the backlog; serve them when `reason` no longer holds."""
        self._backlog = commands
        self._pause_reading()
        if isinstance(reason, NotInMemoryError):
            self._fetches += 1
            self._fetching = True
            self._shared.fetch(reason, self._fetched)
        else:
            self._fetches = 0
            wait = self._shared.turns.wait
            until = reason.until if isinstance(reason, UnfinishedError) else None
            if until is None:
                wait(self._resume)
            else:
                until(partial(wait, self._resume))

    def _fetched(self, is_there: bool) -> None:
        self._fetching = False
        if not is_there:  # the next attempt gets the read error, and answers with it
            self._fetches = FETCHES_MAX
        self._resume()

    def _count_unfinished(self, size: int) -> None:
        if self._backlog and size < BACKLOG_COUNTED_MIN:
            size = 0
        self._unfinished = size
        self._shared.unfinished.hold(self, size)

    def eof_received(self) -> bool:
        """Close when the peer closes; replies that are ready are still written."""
        self._shared.release.write_ready()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection and everything registered through it."""
        self._backlog = []
        self._count_unfinished(0)
        self._shared.unsent.hold(self, 0)
        self.unfinished = None
        self.long_answers.end(self)
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
        """Stop reading a peer that does not read its replies; others collect theirs."""
        self.writable = False
        self.long_answers.end(self)
        self._pause_reading()

    def resume_writing(self) -> None:
        """Serve the backlog, and read the peer again: it has read its replies."""
        self.writable = True
        self._resume()

    def _resume(self) -> None:
        """Serve the backlog, and read the peer again."""
        if self._backlog and self.writable and not self._fetching and not self._shared.stopping:
            release = self._shared.release
            if not release.over_limit():
                backlog, self._backlog = self._backlog, []
                waiting.is_allowed = self._fetches >= FETCHES_MAX
                try:
                    self._serve(backlog)
                finally:
                    waiting.is_allowed = True
            if release.over_limit():
                self._stall()
            if not self._backlog and self._decoder.buffered != self._unfinished:
                self._count_unfinished(self._decoder.buffered)
        self._resume_reading()

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
                code, opaque=opaque, header=header, body=body, header_type=self._request_header_type
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
            is_slow = transport.get_write_buffer_size()
            transport.write(bytes(data))
            if is_slow:
                self._count_unsent()
            return
        sent = 0
        if (connected := self._direct_socket(transport)) is not None:
            try:
                sent = connected.send(data)
            except OSError:
                sent = 0  # full, or broken: the transport detects that
        if sent < len(data):
            transport.write(bytes(data[sent:]))
            self._count_unsent()

    def write_part(self, head: bytes, part: FilePart) -> None:
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
            self._abort_in_frame(repr(error))
            return
        if len(rest) < part.length - sent_of_part:
            self._abort_in_frame("the file has become shorter")
            return
        transport.write(head[sent:] + rest)
        self._count_unsent()

    @property
    def unsent(self) -> int:
        """Bytes that wait in this process for the peer to read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def address(self) -> str:
        """The peer's address, without its port."""
        return self._peer_host

    def _count_unsent(self) -> None:
        self._shared.unsent.hold(self, self.unsent)

    def _abort_in_frame(self, reason: str) -> None:
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
        """Write the replies that are ready, then close."""
        self._shared.release.write_ready()
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def is_idle(self, since: float) -> bool:
        """Return whether the peer has neither sent nor read anything since a loop time, seconds.

        A peer that reads its answers slowly sends nothing meanwhile, but it is not idle. One whose
        request has been incomplete for ``FRAME_S`` is, unless this broker does not read it.
        """
        if self._unfinished and not self._reading_paused:
            now = self._loop.time()
            if now - self._unfinished_since > FRAME_S:
                return True
        unsent = self.unsent
        if unsent != self._unsent or self._received:
            self._unsent, self._received = unsent, False
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


def address_text(host: str, port: int) -> str:
    """Return `host:port`, or `[host]:port` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
