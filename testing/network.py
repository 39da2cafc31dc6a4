"""Connections in memory between the clients and the brokers of one event loop, and their faults.

Bytes arrive in the next pass of the loop, or after a delay that a test sets. As with TCP, nothing
is lost or repeated within a connection that lives. So a request or an answer can only be lost with
its connection, and only be repeated on the way to the broker. Other networks are subclasses, which
decide when bytes arrive and how a connection breaks.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.framing import FrameDecoder

ADDRESSES: Final = frozenset(f"192.0.2.{number}" for number in range(1, 255))
"""Addresses of brokers in memory: for documentation, no machine has them (RFC 5737)."""

WRITE_HIGH: Final = 64 << 10
"""Bytes on their way at which a writer is paused; asyncio's own limit."""

Kind = Literal["any", "send", "decision", "receive", "acknowledge"]

CODES: Final[dict[str, frozenset[int]]] = {
    "send": frozenset(
        {
            RequestCode.SEND_MESSAGE,
            RequestCode.SEND_MESSAGE_V2,
            RequestCode.SEND_BATCH_MESSAGE,
            RequestCode.CONSUMER_SEND_MSG_BACK,
        }
    ),
    "decision": frozenset({RequestCode.END_TRANSACTION}),
    "receive": frozenset({RequestCode.PULL_MESSAGE, RequestCode.POP_MESSAGE}),
    "acknowledge": frozenset({RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.ACK_MESSAGE}),
}
"""Requests by what they do for a user."""


class Fault:
    """What happens to the next requests of a kind."""

    def __init__(self, effect: Literal["request", "answer", "twice"], kind: Kind, count: int):
        if kind != "any" and kind not in CODES:
            raise ValueError(f"kind is {kind!r}, expected 'any', {', '.join(map(repr, CODES))}")
        self.effect = effect
        self._codes = CODES.get(kind)
        self.left = count

    def takes(self, code: int) -> bool:
        """Return whether it happens to a request of this code, and count it."""
        if not self.left or (self._codes is not None and code not in self._codes):
            return False
        self.left -= 1
        return True


class Listener:
    """What ``create_server`` returns, as far as the broker uses it."""

    def __init__(self, network: Network, factory: Callable[[], Any], host: str, port: int) -> None:
        self._network = network
        self.factory = factory
        self.host, self.port = host, port
        self.context = contextvars.copy_context()  # the broker's
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        """Return the address that is listened at."""
        return self.host, self.port

    def close(self) -> None:
        """Accept no more connections."""
        if self._network.listeners.get((self.host, self.port)) is self:
            del self._network.listeners[self.host, self.port]


class End(asyncio.Transport):
    """One end of a connection."""

    def __init__(
        self,
        network: Network,
        own: tuple[str, int],
        peer: tuple[str, int],
        context: contextvars.Context,
    ) -> None:
        super().__init__({"sockname": own, "peername": peer})
        self.own, self.peer_name = own, peer
        self._network = network
        self._loop = network.loop
        self._context = context
        self.protocol: Any = None
        self.peer: Any = self  # another end of its class
        # When the pieces arrive; None: the peer has closed.
        self.arriving: deque[tuple[float, bytes | None]] = deque()
        self.arriving_bytes = 0
        self._handle: asyncio.Handle | None = None
        self.high = WRITE_HIGH
        self._reading, self.writer_paused = True, False
        self.closing = self.lost = False  # lost: `connection_lost` was called
        self.requests: FrameDecoder | None = None  # of a client's end
        self.loses_answer = False  # breaks the connection instead of its next write

    # --- asyncio.Transport

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = WRITE_HIGH if high is None else high

    def get_write_buffer_size(self) -> int:
        waiting: int = self.peer.arriving_bytes
        return waiting

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self.protocol
        return protocol

    def is_closing(self) -> bool:
        return self.closing

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self.plan()

    def write(self, data: Any) -> None:
        if self.closing or not data:
            return
        self._network.send(self, bytes(data))
        if self.peer.arriving_bytes > self.high and not self.writer_paused and not self.closing:
            self.writer_paused = True
            self.protocol.pause_writing()

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self.peer.accept(None)
            self.call(self.lose, None)

    def abort(self) -> None:
        self.reset()

    # --- the network's side

    def begin(self, factory: Callable[[], Any]) -> None:
        """Create the protocol and tell it that it is connected."""
        self.protocol = factory()
        self.protocol.connection_made(self)

    def accept(self, data: bytes | None) -> None:
        """Take bytes from the peer; they arrive later."""
        self.arriving.append((self._loop.time() + self._network.delay_s, data))
        self.arriving_bytes += len(data or b"")
        self.plan()

    def due(self) -> float:
        """Return when the next piece arrives, by the loop's clock."""
        return self.arriving[0][0]

    def deliver(self, data: bytes) -> None:
        """Give bytes that have arrived to the protocol."""
        self.protocol.data_received(data)

    def reset(self) -> None:
        """Break the connection: both ends learn it, and what is on its way is lost."""
        for end in (self, self.peer):
            end.closing = True
            end.call(end.lose, ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def call(self, work: Callable[..., object], *args: Any) -> asyncio.Handle:
        """Call something of this end's program in the next pass of the loop."""
        return self._loop.call_soon(work, *args, context=self._context)

    def call_at(self, when: float, work: Callable[[], object]) -> asyncio.Handle:
        """Call something of this end's program at a time."""
        if when <= self._loop.time():
            return self.call(work)
        return self._loop.call_at(when, work, context=self._context)

    def plan(self) -> None:
        """See to it that what arrives is delivered when it is due."""
        if self.arriving and self._handle is None and self._reading and not self.lost:
            self._handle = self.call_at(self.due(), self._arrive)

    def _arrive(self) -> None:
        self._handle = None
        if self.lost or not self._reading:
            return
        now, pieces, closed = self._loop.time(), [], False
        while self.arriving and self.due() <= now and not closed:
            _, data = self.arriving.popleft()
            closed = data is None
            pieces.append(data or b"")
        joined = b"".join(pieces)
        self.arriving_bytes -= len(joined)
        if joined and not self.closing:
            self.deliver(joined)
        if self.peer.writer_paused and self.arriving_bytes <= self.peer.high // 4:
            self.peer.call_at(now, self.peer.room)
        if closed:
            self._answer_close()
        self.plan()

    def _answer_close(self) -> None:
        if not self.lost and (self.closing or not self.protocol.eof_received()):
            self.close()

    def room(self) -> None:
        """Resume the writer: the peer has read what it wrote."""
        if self.writer_paused and not self.lost:
            self.writer_paused = False
            self.protocol.resume_writing()

    def lose(self, error: Exception | None) -> None:
        """End the connection for the protocol."""
        if self.lost:
            return
        self.lost = self.closing = True
        self.arriving.clear()
        self.arriving_bytes = 0
        self._network.ends.pop(self, None)
        if self.protocol is not None:
            self.protocol.connection_lost(error)


class _UntilAnswer(asyncio.Protocol):
    """Closes its connection when it gets an answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, _data: bytes) -> None:
        self._transport.close()


class Network:
    """The connections of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.delay_s = 0.0
        self.faults: list[Fault] = []
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.starts: dict[str, Callable[[], Awaitable[None]]] = {}
        """By address: starts the broker there, if it has not started yet."""
        self.ends: dict[Any, None] = {}
        self._ports = itertools.count(40_000)
        self._repeats: set[asyncio.Future[None]] = set()

    def free_address(self) -> str:
        """Return an address at which no broker is."""
        return next(f"192.0.2.{n}" for n in range(1, 255) if f"192.0.2.{n}" not in self.starts)

    def listen(self, factory: Callable[[], Any], host: str, port: int) -> Listener:
        """Accept connections.

        Raises:
            OSError: The address is in use.
        """
        if (host, port) in self.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        listener = self.listeners[host, port] = Listener(self, factory, host, port)
        return listener

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple[End, Any]:
        """Connect, and start the broker if nobody has used it yet.

        Raises:
            ConnectionRefusedError: Nobody listens.
        """
        if host in self.starts:
            await self.starts[host]()
        await asyncio.sleep(self.delay_s)
        listener = self.listeners.get((host, port))
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        own = ("192.0.2.255", next(self._ports))
        client = End(self, own, (host, port), contextvars.copy_context())
        server = End(self, (host, port), own, listener.context)
        client.peer, server.peer = server, client
        client.requests = FrameDecoder()
        self.ends |= dict.fromkeys((client, server))
        client.begin(factory)
        listener.context.run(server.begin, listener.factory)
        return client, client.protocol

    def disconnect(self, host: str) -> None:
        """Break all connections with a broker."""
        for end in [one for one in self.ends if one.own[0] == host]:
            end.reset()

    def send(self, end: End, data: bytes) -> None:
        """Let bytes that are written arrive, with the faults of the requests in them."""
        if end.loses_answer:
            end.reset()
            return
        if end.requests is None:
            end.peer.accept(data)
            return
        codes = [request.code for request in end.requests.receive_data(data)]
        for fault in self.faults:
            if not any(fault.takes(code) for code in codes):
                continue
            if fault.effect == "twice":
                self._repeat(end.peer_name, data)
            elif fault.effect == "request":
                end.reset()
                return
            else:
                end.peer.loses_answer = True
        end.peer.accept(data)

    def _repeat(self, address: tuple[str, int], data: bytes) -> None:
        """Send requests once more on a connection of their own, as a middle box could."""

        async def repeat() -> None:
            copy, _ = await self.connect(_UntilAnswer, *address)
            copy.peer.accept(data)

        self._repeats.add(task := asyncio.ensure_future(repeat()))
        task.add_done_callback(self._repeats.discard)
