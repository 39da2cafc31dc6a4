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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from halfmq.testing import network

from .loop import PROCESS, Process, SimulationLoop

DELAY_S_MIN: Final = 0.000_05
KEPT_FRAMES_MAX: Final = 200


class End(network.End):
    """One end of a connection: the transport of one process."""

    _network: Network
    _loop: SimulationLoop

    def __init__(self, wires: Network, process: Process, own: Any, peer: Any) -> None:
        super().__init__(wires, own, peer, process.context)
        self.process = process
        self.silent = False  # the peer's machine lost its power: no packets in either direction
        self._last_arrival = 0.0
        self.slow_until = 0.0

    # --- asyncio.Transport

    def write(self, data: Any) -> None:
        if not self.process.dead:
            super().write(data)

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            if not self.silent:
                self.peer.accept(None)
            self.call(self.lose, None)

    def abort(self) -> None:
        if not self.lost:
            self.closing = True
            if not self.silent:
                self.peer.break_later(self._loop.chance.random() * 0.005)
            self.call(self.lose, None)

    # --- the network's side

    def accept(self, data: bytes | None) -> None:
        """Take data from the peer; it arrives later, in one or more pieces."""
        wires, chance = self._network, self._loop.chance
        arrival = max(self._last_arrival, self._loop.now + wires.delay(), self.slow_until)
        self.arriving_bytes += len(data or b"")
        if data is not None and len(data) > 1 and chance.random() < wires.split:
            cut = chance.randrange(1, len(data))
            self.arriving.append((arrival, data[:cut]))
            data = data[cut:]
            arrival += chance.random() * wires.delay_s
        self.arriving.append((arrival, data))
        self._last_arrival = arrival
        self.plan()

    def due(self) -> float:
        return max(super().due(), self.slow_until)

    def deliver(self, data: bytes) -> None:
        self._loop.record_event("data", self.peer_name, self.own, len(data), crc32(data))
        super().deliver(data)

    def call(self, work: Callable[..., object], *args: Any) -> asyncio.Handle:
        return self._loop.call_soon(work, *args)

    def call_at(self, when: float, work: Callable[[], object]) -> asyncio.Handle:
        return self.process.call_at(max(when, self._loop.now), work)

    def break_later(self, delay: float, keep: float = 1.0) -> None:
        """Have the connection break for this end after a delay.

        ``keep`` is the share of what is under way that still arrives.
        """
        if keep < 1.0:
            kept = int(len(self.arriving) * keep)
            while len(self.arriving) > kept:
                _, data = self.arriving.pop()
                self.arriving_bytes -= len(data or b"")
        self.call_at(self._loop.now + delay, self._break)

    def _break(self) -> None:
        self.lose(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def lose(self, error: Exception | None) -> None:
        if not self.lost:
            self._loop.record_event("lost", self.own, self.peer_name, error is None)
        super().lose(error)


def _owner(listener: network.Listener) -> Process:
    process = listener.context[PROCESS]
    assert process is not None
    return process


class Network(network.Network):
    """All connections and listeners."""

    loop: SimulationLoop

    def __init__(self, loop: SimulationLoop, secret: Path | None = None) -> None:
        """Wire it; `secret` is the run's directory, which must not influence what is sent."""
        super().__init__(loop)
        loop.network = self
        self._secret = b"" if secret is None else os.fsencode(secret)
        self.delay_s = 0.001  # typical time under way
        self.split = 0.05  # share of writes that arrive in pieces
        self.down: dict[str, None] = {}  # addresses of machines without power
        self.keep_frames = False
        self.frames: list[bytes] = []  # whole requests to the broker that passed by

    def clear(self) -> None:
        """Drop all connections, at the end of a run."""
        self.ends.clear()
        self.listeners.clear()

    def delay(self) -> float:
        """Draw how long bytes are under way."""
        draw = self.loop.chance.random()
        return DELAY_S_MIN + self.delay_s * draw * (20.0 if draw > 0.98 else 1.0)

    async def connect(
        self, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[network.End, Any]:
        """Connect, or fail as a kernel would: refused, or no answer at all."""
        process = self.loop.process
        assert process is not None
        await asyncio.sleep(DELAY_S_MIN + self.loop.chance.random() * 2 * self.delay_s)
        if host in self.down:
            await asyncio.get_running_loop().create_future()  # nobody answers: the caller gives up
        listener = self.listeners.get((host, port))
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        own, theirs = (process.address, next(self._ports)), (host, port)
        client = End(self, process, own, theirs)
        server = End(self, _owner(listener), theirs, own)
        client.peer, server.peer = server, client
        client.protocol = factory()
        self.ends |= dict.fromkeys((client, server))
        self.loop.record_event("connect", own, theirs)
        server.process.call_at(self.loop.now, self._accepted, server, listener.factory)
        client.protocol.connection_made(client)
        return client, client.protocol

    def _accepted(self, end: End, factory: Callable[[], Any]) -> None:
        if not end.lost:
            end.begin(factory)

    def send(self, end: network.End, data: bytes) -> None:
        """Let bytes that are written arrive, unless the machine there is without power."""
        assert isinstance(end, End)
        sent = self._without_secret(data)
        self._keep(end, sent)
        if end.silent:
            self._unheard(end)
        else:
            end.peer.accept(sent)

    # --- faults

    def connections(self) -> list[End]:
        """Return one end of each connection: the client's."""
        return [end for end in self.ends if end.own[1] >= 40_000]

    def cut(self, end: End) -> None:
        """Cut a connection: some data in flight is lost; each side learns it at its own time."""
        chance = self.loop.chance
        for one in (end, end.peer):
            one.break_later(chance.random() ** 3 * 2.0, keep=chance.random())
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
                peer.break_later(DELAY_S_MIN + chance.random() * 0.01, keep=chance.random())

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

    def _unheard(self, end: End) -> None:
        """Handle data written to a machine that has lost the connection."""
        if end.peer_name[0] not in self.down and end.own[0] not in self.down:
            end.break_later(DELAY_S_MIN + self.loop.chance.random() * 0.05)

    def _forget_listeners(self, process: Process) -> None:
        for listener in [one for one in self.listeners.values() if _owner(one) is process]:
            listener.close()

    # --- the middle box

    def _without_secret(self, data: bytes) -> bytes:
        """Replace the directory's name, which errors contain, by one of equal length."""
        return data.replace(self._secret, b"?" * len(self._secret)) if self._secret else data

    def _keep(self, end: End, data: bytes) -> None:
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
