"""TCP between simulated processes, with everything that TCP does not promise.

Within a connection no byte is lost, duplicated or reordered. But bytes arrive late and in pieces of
any size. A connection may be cut at any moment: then each side learns it at its own time, and data
in flight is lost. A link may stall for seconds. A machine without power sends nothing, until it is
back and answers with a reset.

A middle box may also keep whole requests of a client and send them to the broker again later, on
its own connection: only so can requests be duplicated below a TCP client.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from .loop import Process, SimulationLoop

DELAY_S_MIN: Final = 0.000_05
WRITE_HIGH: Final = 64 << 10
"""Bytes in flight at which a writer must pause: asyncio's own limit."""
KEPT_FRAMES_MAX: Final = 200


class Listener:
    """What ``create_server`` returns, as far as it is used."""

    def __init__(self, network: Network, process: Process, factory: Any, host: str, port: int):
        self._network = network
        self.process = process
        self.factory = factory
        self.host, self.port = host, port
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        return self.host, self.port

    def close(self) -> None:
        if self._network.listeners.get((self.host, self.port)) is self:
            del self._network.listeners[self.host, self.port]


class End(asyncio.Transport):
    """One end of a connection: the transport of one process."""

    def __init__(
        self, network: Network, process: Process, protocol: Any, own: Any, peer: Any
    ) -> None:
        super().__init__()
        self._network = network
        self._loop = network.loop
        self.process = process
        self.protocol = protocol
        self.own, self.peer_name = own, peer
        self.peer: End = self
        self.lost = False  # `connection_lost` was called
        self.closing = False
        self.reading = True
        self.silent = False  # the peer's machine lost its power: no packets in either direction
        self.arriving: deque[tuple[float, bytes | None]] = deque()  # None: the peer has closed
        self.arriving_size = 0
        self._last_arrival = 0.0
        self._planned = False
        self._high = WRITE_HIGH
        self._paused = False
        self.slow_until = 0.0

    # --- asyncio.Transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": self.peer_name, "sockname": self.own}.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = WRITE_HIGH if high is None else high

    def get_write_buffer_size(self) -> int:
        return self.peer.arriving_size

    def is_closing(self) -> bool:
        return self.closing

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        self._plan()

    def write(self, data: Any) -> None:
        if self.closing or self.lost or self.process.dead or not data:
            return
        sent = self._network.without_secret(bytes(data))
        self._network.passed(self, sent)
        if self.silent:
            self._network.unheard(self)
            return
        self.peer.accept(sent)
        if self.peer.arriving_size > self._high and not self._paused:
            self._paused = True
            self.protocol.pause_writing()

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            if not self.silent:
                self.peer.accept(None)
            self._loop.call_soon(self.lose, None)

    def abort(self) -> None:
        if not self.lost:
            self.closing = True
            if not self.silent:
                self.peer.reset(self._loop.chance.random() * 0.005)
            self._loop.call_soon(self.lose, None)

    # --- the network's side

    def accept(self, data: bytes | None) -> None:
        """Take data from the peer; it arrives later, in one or more pieces."""
        network = self._network
        chance = self._loop.chance
        arrival = max(self._last_arrival, self._loop.now + network.delay(), self.slow_until)
        if data is not None:
            self.arriving_size += len(data)
            if len(data) > 1 and chance.random() < network.split:
                cut = chance.randrange(1, len(data))
                self.arriving.append((arrival, data[:cut]))
                data = data[cut:]
                arrival += chance.random() * network.delay_s
        self.arriving.append((arrival, data))
        self._last_arrival = arrival
        self._plan()

    def _plan(self) -> None:
        if self.arriving and not self._planned and self.reading and not self.lost:
            self._planned = True
            when = max(self.arriving[0][0], self._loop.now, self.slow_until)
            self.process.call_at(when, self._arrive)

    def _arrive(self) -> None:
        self._planned = False
        if self.lost or not self.reading:
            return
        if self.slow_until > self._loop.now:
            self._plan()
            return
        pieces: list[bytes] = []
        closed = False
        while self.arriving and self.arriving[0][0] <= self._loop.now and not closed:
            _, data = self.arriving.popleft()
            closed = data is None
            if data is not None:
                pieces.append(data)
                self.arriving_size -= len(data)
        joined = b"".join(pieces)
        if joined and not self.closing:
            self._loop.record_event("data", self.peer_name, self.own, len(joined), crc32(joined))
            self.protocol.data_received(joined)
        peer = self.peer
        # Both ends are of this class.
        if peer._paused and self.arriving_size <= peer._high // 4:
            peer.process.call_at(self._loop.now, peer.room)
        if closed and not self.lost:
            keep = not self.closing and self.protocol.eof_received()
            if not keep:
                self.close()
            return
        self._plan()

    def room(self) -> None:
        """Resume the writer: the peer has read what it wrote."""
        if self._paused and not self.lost:
            self._paused = False
            self.protocol.resume_writing()

    def reset(self, delay: float, keep: float = 1.0) -> None:
        """Have the connection break for this end after a delay.

        ``keep`` is the share of what is under way that still arrives.
        """
        if keep < 1.0:
            kept = int(len(self.arriving) * keep)
            while len(self.arriving) > kept:
                _, data = self.arriving.pop()
                self.arriving_size -= len(data or b"")
        self.process.call_at(self._loop.now + delay, self._break)

    def _break(self) -> None:
        self.lose(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def lose(self, error: Exception | None) -> None:
        """End the connection for the protocol."""
        if self.lost:
            return
        self.lost = self.closing = True
        self.arriving.clear()
        self.arriving_size = 0
        self._network.ends.pop(self, None)
        self._loop.record_event("lost", self.own, self.peer_name, error is None)
        self.protocol.connection_lost(error)


class Network:
    """All connections and listeners."""

    def __init__(self, loop: SimulationLoop, secret: Path | None = None) -> None:
        """Wire it; `secret` is the run's directory, which must not influence what is sent."""
        self.loop = loop
        loop.network = self
        self._secret = b"" if secret is None else os.fsencode(secret)
        self.delay_s = 0.001  # typical time under way
        self.split = 0.05  # share of writes that arrive in pieces
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.ends: dict[End, None] = {}
        self.down: dict[str, None] = {}  # addresses of machines without power
        self.keep_frames = False
        self.frames: list[bytes] = []  # whole requests to the broker that passed by
        self._port = 40_000

    def clear(self) -> None:
        """Drop all connections, at the end of a run."""
        self.ends.clear()
        self.listeners.clear()

    def delay(self) -> float:
        """Draw how long bytes are under way."""
        draw = self.loop.chance.random()
        return DELAY_S_MIN + self.delay_s * draw * (20.0 if draw > 0.98 else 1.0)

    def listen(self, process: Process | None, factory: Any, host: str, port: int) -> Listener:
        assert process is not None
        if (host, port) in self.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        listener = Listener(self, process, factory, host, port)
        self.listeners[host, port] = listener
        return listener

    async def connect(
        self, process: Process | None, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[End, Any]:
        """Connect, or fail as a kernel would: refused, or no answer at all."""
        assert process is not None
        await asyncio.sleep(DELAY_S_MIN + self.loop.chance.random() * 2 * self.delay_s)
        if host in self.down:
            await asyncio.get_running_loop().create_future()  # nobody answers: the caller gives up
        listener = self.listeners.get((host, port))
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        self._port += 1
        own, theirs = (process.address, self._port), (host, port)
        protocol = factory()
        client = End(self, process, protocol, own, theirs)
        server = End(self, listener.process, None, theirs, own)
        client.peer, server.peer = server, client
        self.ends[client] = self.ends[server] = None
        self.loop.record_event("connect", own, theirs)
        listener.process.call_at(self.loop.now, self._accepted, server, listener.factory)
        protocol.connection_made(client)
        return client, protocol

    def _accepted(self, end: End, factory: Callable[[], Any]) -> None:
        if not end.lost:
            end.protocol = factory()
            end.protocol.connection_made(end)

    # --- faults

    def connections(self) -> list[End]:
        """Return one end of each connection: the client's."""
        return [end for end in self.ends if end.own[1] >= 40_000]

    def cut(self, end: End) -> None:
        """Cut a connection: some data in flight is lost; each side learns it at its own time."""
        chance = self.loop.chance
        for one in (end, end.peer):
            one.reset(chance.random() ** 3 * 2.0, keep=chance.random())
            one.slow_until = self.loop.now + 3.0  # what is left arrives before the reset, or never
            if chance.random() < 0.5:
                one.slow_until = 0.0

    def stall(self, end: End, seconds: float) -> None:
        """Let nothing arrive for a while, in one direction."""
        end.slow_until = self.loop.now + seconds

    def process_died(self, process: Process) -> None:
        """Close the sockets of a dead process, as the kernel does."""
        chance = self.loop.chance
        self._forget_listeners(process)
        for end in [end for end in self.ends if end.process is process]:
            self.ends.pop(end, None)
            end.lost = end.closing = True
            peer = end.peer
            if chance.random() < 0.5:
                peer.accept(None)
            else:
                peer.reset(DELAY_S_MIN + chance.random() * 0.01, keep=chance.random())

    def power_lost(self, process: Process) -> None:
        """Remove a machine: its peers get no more packets."""
        self.down[process.address] = None
        self._forget_listeners(process)
        for end in [end for end in self.ends if end.process is process]:
            self.ends.pop(end, None)
            end.lost = end.closing = True
            end.peer.silent = True

    def power_back(self, address: str) -> None:
        """Let a machine answer again; old connections get a reset."""
        self.down.pop(address, None)

    def unheard(self, end: End) -> None:
        """Handle data written to a machine that has lost the connection."""
        if end.peer_name[0] not in self.down and end.own[0] not in self.down:
            end.reset(DELAY_S_MIN + self.loop.chance.random() * 0.05)

    def _forget_listeners(self, process: Process) -> None:
        for listener in [one for one in self.listeners.values() if one.process is process]:
            listener.close()

    # --- the middle box

    def without_secret(self, data: bytes) -> bytes:
        """Replace the directory's name, which errors contain, by one of equal length."""
        return data.replace(self._secret, b"?" * len(self._secret)) if self._secret else data

    def passed(self, end: End, data: bytes) -> None:
        """Keep requests to the broker, to send them again."""
        if self.keep_frames and end.own[1] >= 40_000 and len(self.frames) < KEPT_FRAMES_MAX:
            position = 0
            while position + 4 <= len(data):
                size = 4 + int.from_bytes(data[position : position + 4], "big")
                if position + size <= len(data):
                    self.frames.append(data[position : position + size])
                position += size

    def replay(self, process: Process, host: str, port: int) -> None:
        """Send some of the kept requests again, on a new connection."""
        chance = self.loop.chance
        frames = [chance.choice(self.frames) for _ in range(chance.randrange(1, 6))]
        process.run(self._replay(b"".join(frames), host, port))

    async def _replay(self, data: bytes, host: str, port: int) -> None:
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(
                asyncio.Protocol, host, port
            )
        except OSError:
            return
        transport.write(data)
        await asyncio.sleep(2.0)
        transport.close()
