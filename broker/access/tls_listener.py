"""A listener for TLS and plain connections on one port, distinguished by their first byte.

A TLS handshake begins with 0x16. A frame begins with its length, whose first byte is 0 or 1: no
frame is as long as 0x16000000 bytes. The byte is read without removing it from the socket, so that
the server of the connection reads it again.
Source: RocketMQ ``NettyRemotingServer.TlsModeHandler``.
"""

import asyncio
import contextlib
import logging
import socket
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from attrs import define

from .config import TlsMode
from .tls import HANDSHAKE_S, TlsContext

logger = logging.getLogger(__name__)

TLS_ONLY: Final = bytes.fromhex("15 0301 0002 02 46")
"""Sent to a plain client in mode ENFORCING: the fatal alert ``protocol_version``. No frame begins
with these bytes; halfmq's client reports them, and for others the connection is closed, as by
RocketMQ. Source: RFC 8446, section 6.2."""

TLS_HANDSHAKE: Final = 0x16
"""First byte of a TLS connection: the content type. Source: RFC 8446, section 5.1."""

FIRST_BYTE_S: Final = 120.0
"""Seconds until a connection that has sent nothing is closed, as any idle one is."""

READ_MAX: Final = 65_536
"""Bytes of a refused connection that are read, so that its client can read the alert."""

UNDECIDED_MAX: Final = 1_024
"""Connections that have sent nothing; then the oldest is closed. A client begins at once."""

HANDSHAKES_MAX: Final = 256
"""Handshakes that are not complete, 50 KiB each; then the oldest is ended. One that goes on takes
some round trips."""

HANDSHAKES_PER_PASS: Final = 8
"""Handshakes begun in one pass of the loop: each takes a millisecond or more when its first message
arrives."""

PAUSE_S: Final = 0.1
"""Seconds until the next attempt to accept if the process has no descriptor left."""

ACCEPTED_AT_ONCE: Final = 64
"""Connections accepted in one pass of the loop, so that other work gets its turn."""


@define(eq=False, repr=False, slots=False)
class TlsListener:
    """Accepts connections of one bound socket, and serves each as a plain or a TLS connection."""

    _listening: socket.socket  # bound, and accepts connections from now on
    _tls: TlsContext
    _protocol: Callable[[], asyncio.Protocol]
    # Takes the address of a peer, the same with its port, and the number of its connections
    # that are not served yet; returns whether to close this one.
    _refuses: Callable[[str, str, int], bool]
    _unserved: Counter[str]  # these numbers, by address and for all listeners

    def __attrs_post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._undecided: dict[socket.socket, tuple[str, asyncio.TimerHandle]] = {}
        self._ready: deque[tuple[socket.socket, str, bool]] = deque()  # with address, and is it TLS
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._is_paused = False
        self._resume: asyncio.TimerHandle | None = None
        self._listening.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def close(self) -> None:
        """Accept no more connections, and close those that are not served yet."""
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for connected in list(self._undecided):
            self._drop(connected)
        while self._ready:
            self._ready.popleft()[0].close()
        for task in self._handshakes:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connected, (host, port, *_) = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # too many open files: the backlog waits
                if not self._is_paused:
                    logger.warning("event=accept_paused error=%r", str(error))
                self._is_paused = True
                self._loop.remove_reader(self._listening)
                self._resume = self._loop.call_later(PAUSE_S, self._listen)
                return
            if self._is_paused:
                logger.warning("event=accept_resumed")
                self._is_paused = False
            connected.setblocking(False)
            # Counted before the handshake: otherwise a peer that never completes one has no limit.
            if self._refuses(host, f"{host}:{port}", self._unserved[host]):
                connected.close()
                continue
            self._unserved[host] += 1
            if len(self._undecided) >= UNDECIDED_MAX:
                self._drop(next(iter(self._undecided)))
            timer = self._loop.call_later(FIRST_BYTE_S, self._drop, connected)
            self._undecided[connected] = host, timer
            self._loop.add_reader(connected, self._first_byte, connected)

    def _forget(self, connected: socket.socket) -> str:
        host, timer = self._undecided.pop(connected)
        timer.cancel()
        self._loop.remove_reader(connected)
        return host

    def _drop(self, connected: socket.socket) -> None:
        self._leave(self._forget(connected))
        connected.close()

    def _leave(self, host: str) -> None:
        """Count one connection less that is not served: it is now, or it is closed."""
        self._unserved[host] -= 1
        if not self._unserved[host]:
            del self._unserved[host]

    def _first_byte(self, connected: socket.socket) -> None:
        try:
            first = connected.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        mode = self._tls.mode
        is_tls = first[:1] == bytes([TLS_HANDSHAKE])
        if not first or (mode is TlsMode.ENFORCING and not is_tls):
            if first:
                logger.warning(
                    "event=plain_refused peer=%s tlsServerMode=enforcing", _peer(connected)
                )
                with contextlib.suppress(OSError):
                    connected.recv(READ_MAX)  # closing with unread bytes would reset the connection
                    connected.send(TLS_ONLY)
            self._drop(connected)
            return
        self._ready.append((connected, self._forget(connected), is_tls))
        if len(self._ready) == 1:
            self._loop.call_soon(self._begin_some)

    def _begin_some(self) -> None:
        for _ in range(min(HANDSHAKES_PER_PASS, len(self._ready))):
            self._begin(*self._ready.popleft())
        if self._ready:
            self._loop.call_soon(self._begin_some)

    def _begin(self, connected: socket.socket, host: str, is_tls: bool) -> None:
        if len(self._handshakes) >= HANDSHAKES_MAX:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._serve(connected, is_tls=is_tls))
        self._handshakes[task] = None

        def done(task: asyncio.Task[None]) -> None:
            self._handshakes.pop(task, None)
            self._leave(host)

        task.add_done_callback(done)

    async def _serve(self, connected: socket.socket, *, is_tls: bool) -> None:
        peer = _peer(connected)
        try:
            if is_tls:
                await self._loop.connect_accepted_socket(
                    self._protocol,
                    connected,
                    ssl=self._tls.current,
                    ssl_handshake_timeout=HANDSHAKE_S,
                )
            else:
                await self._loop.connect_accepted_socket(self._protocol, connected)
        except (OSError, TimeoutError) as error:  # ssl.SSLError among them
            logger.info("event=handshake_failed peer=%s error=%r", peer, str(error))
            connected.close()
        except asyncio.CancelledError:
            connected.close()
            raise


def _peer(connected: socket.socket) -> str:
    try:
        host, port = connected.getpeername()[:2]
    except OSError:
        return "gone"
    return f"{host}:{port}"
