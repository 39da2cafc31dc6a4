"""The HTTP application: probes and metrics.

Importing it takes 80 ms, so the endpoint does it when the broker is ready.
"""

import asyncio
import binascii
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ..limits.kept import HTTP_CONNECTIONS
from ..loop.slices import in_slices
from .collector import Collector
from .families import render

HEAD_SIZE_MAX: Final = 16 << 10
"""Bytes of a request's line and headers; a scrape has some hundreds."""

RECEIVED_MAX: Final = 256 << 10
"""Bytes that one connection may send in all: 800 scrapes. No request here has a body, and reading
those of sixty peers to their ends took a third of a second of others' time."""

CONNECTION_S_MAX: Final = 60.0
"""Seconds until a connection without an answer under way is closed, and one with an answer after as
many again: peers cannot hold one of the few connections for ever."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the endpoint tells."""

    collector: Collector
    labels: Mapping[str, str]
    """Labels of all series."""
    unready: Callable[[], str]
    """Returns why messages are refused now; empty if they are accepted."""
    may_read: Callable[[str, str, str], bool] | None
    """``(user, password, address)``: whether it may read metrics; None: everybody may."""


class Application:
    """Serves ``/livez``, ``/readyz`` and ``/metrics``."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._state = ServerState()
        routes = [
            Route("/livez", self._alive),
            Route("/readyz", self._ready),
            Route("/metrics", self._metrics),
        ]
        self._config = uvicorn.Config(
            Starlette(routes=routes),
            http=H11Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEAD_SIZE_MAX,
        )
        self._config.load()

    @property
    def open_connections(self) -> int:
        return len(self._state.connections)

    def protocol(self) -> asyncio.Protocol:
        return _BoundedProtocol(self._config, self._state, {})

    def close(self) -> None:
        for connection in list(self._state.connections):
            connection.shutdown()

    async def _alive(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, _request: Request) -> Response:
        reason = self._answers.unready()
        return PlainTextResponse(f"{reason or 'ok'}\n", 503 if reason else 200)

    async def _metrics(self, request: Request) -> Response:
        may_read = self._answers.may_read
        if may_read is not None:
            name, password = _credentials(request.headers.get("authorization", ""))
            address = "" if request.client is None else request.client.host
            if not may_read(name, password, address):
                return PlainTextResponse(
                    "a user who may read the cluster is needed: see docs/metrics.md\n",
                    401,
                    {"WWW-Authenticate": 'Basic realm="halfmq"'},
                )
        found = await self._answers.collector.collect()
        accepted = request.headers.get("accept", "")
        pieces, content_type = render(found, self._answers.labels, accepted)
        text = bytearray()
        await in_slices(map(text.extend, pieces))
        return Response(bytes(text), media_type=content_type)


def _credentials(header: str) -> tuple[str, str]:
    """Return user and password of an ``Authorization`` header; empty if it has none."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return "", ""
    try:
        name, _, password = b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return "", ""
    return name, password


class _BoundedProtocol(H11Protocol):
    """A connection that is closed after a time, or when there are too many.

    The oldest one without an answer under way ends first: if new ones were closed, whoever opens
    connections and sends nothing would keep probes out, and a supervisor would restart the broker.
    """

    _expiry: asyncio.TimerHandle | None = None
    _made_at = 0.0
    _received = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._made_at = self.loop.time()
        connections: set[Any] = self.connections
        kept = [one for one in connections if not one.transport.is_closing()]
        if len(kept) > HTTP_CONNECTIONS.most:
            first = min(kept, key=lambda one: (one._is_answering(), one._made_at))  # noqa: SLF001
            first.transport.abort()
        self._expiry = self.loop.call_later(CONNECTION_S_MAX, self._expire, True)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._received > RECEIVED_MAX:
            self.transport.abort()
        else:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request, contrary to its type
        return cycle is not None and not cycle.response_complete

    def _expire(self, may_wait: bool) -> None:
        if may_wait and self._is_answering():
            self._expiry = self.loop.call_later(CONNECTION_S_MAX, self._expire, False)
        else:
            self.transport.abort()
