"""The HTTP listener. It is bound before the broker is ready, and answers shortly after.

Its libraries take 80 ms to import. A helper thread imports them when the broker serves clients, so
that it is ready as early as without them; requests that come meanwhile wait in the backlog.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from attrs import define, field

from ..access.tls import TlsContext
from ..access.tls_listener import TlsListener
from ..errors import AddressTakenError
from ..limits.kept import HTTP_CONNECTIONS, Kept
from ..net.server import bind
from .histogram import Histogram

if TYPE_CHECKING:
    from .app import Answers, Application

logger = logging.getLogger(__name__)

DEFAULT_PORT: Final = 9_877
"""The port if none is set: the one after the name server's."""

OFF: Final = -1
"""The setting that serves no HTTP."""

BACKLOG: Final = 64
"""Connections that the system keeps until they are accepted: as many as are served."""

LOOP_CHECK_S: Final = 0.1
"""Seconds between two measurements of the event loop's delay."""


@define(eq=False, repr=False)
class HttpEndpoint:
    """Listens for HTTP on the broker's loop, and measures the loop."""

    _host: str  # the address to bind
    _port: int  # 0 picks a free one
    _answers: Callable[[], Answers]  # returns what the endpoint tells; called on a helper thread
    _is_optional: bool  # whether a port that is taken is a warning instead of an error
    _tls: TlsContext | None  # the certificate, if there is one
    _delay: Histogram = field(alias="loop_delay")  # gets the delays of the event loop
    _socket: socket.socket | None = field(default=None, init=False)
    _app: Application | None = field(default=None, init=False)
    _listener: asyncio.Server | TlsListener | None = field(default=None, init=False)
    _tasks: list[asyncio.Task[None]] = field(factory=list, init=False)

    @property
    def address(self) -> str:
        """``host:port``; empty if it does not listen."""
        if self._socket is None:
            return ""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    async def start(self) -> None:
        """Bind the port.

        Raises:
            AddressTakenError: It cannot be bound, and the setting names it.
        """
        try:
            self._socket = bind(self._host, self._port, "httpListenPort", BACKLOG)
        except AddressTakenError as taken:
            if not self._is_optional:
                raise
            logger.warning(
                "event=no_http error=%r note='No metrics and probes are served; set httpListenPort "
                "to another port, or to -1 for none'",
                str(taken),
            )
        else:
            self._port = self._socket.getsockname()[1]
            self._tasks = [
                asyncio.create_task(self._serve(self._socket)),
                asyncio.create_task(self._measure()),
            ]

    async def _serve(self, bound: socket.socket) -> None:
        app = self._app = await asyncio.to_thread(self._make)
        if self._tls is not None:
            self._listener = TlsListener(
                bound, self._tls, app.protocol, lambda *_: False, Counter()
            )
        else:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(app.protocol, sock=bound, backlog=BACKLOG)

    def _make(self) -> Application:
        from .app import Application  # noqa: PLC0415 -- see the module's docstring

        return Application(self._answers())

    async def _measure(self) -> None:
        while True:
            due = time.perf_counter() + LOOP_CHECK_S
            await asyncio.sleep(LOOP_CHECK_S)
            self._delay.observe(max(time.perf_counter() - due, 0.0))

    async def stop(self) -> None:
        """Close the listener and all connections."""
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._listener is not None:
            self._listener.close()
        elif self._socket is not None:
            self._socket.close()
        if self._app is not None:
            self._app.close()

    def kept(self) -> Kept:
        return {HTTP_CONNECTIONS: 0 if self._app is None else self._app.open_connections}
