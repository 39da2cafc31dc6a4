"""What stands before the handlers of messages while the disk is scarce.

The gate is in the way only then: it takes the places of the handlers in the router's table, and
gives them back. So it costs nothing while there is room.

Slowing down means that a request waits until its bytes are allowed, in the order of arrival, a
second at most; one that would wait longer is refused. All other requests of the same connection
are served as ever, decisions and pulls among them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from halfmq.remoting.codes import FLAG_ONE_WAY, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand

from .connection import Connection, Handler
from .errors import RequestRefusedError
from .router import answer
from .transaction.admission import REFUSAL_FIELDS

GATED: Final = (
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.PREPARE_TRANSACTION,
    RequestCode.CONSUMER_SEND_MSG_BACK,
)
"""Requests that store new messages. A consumer whose message is not taken back consumes it again by
itself, a little later."""

WAIT_S_MAX: Final = 1.0
"""Seconds a request waits at most. Clients give it three, in which it has to be stored as well."""

WAITING_MAX: Final = 10_000
"""Requests that wait at most, with as many answers due: about what a second brings."""

RECORD_BYTES: Final = 400
"""Bytes that a message takes beside its body: head, topic, properties, queue entry, index."""


class Handlers(Protocol):
    """The router, as far as this is concerned."""

    def divert(self, code: int, by: Callable[[Handler], Handler]) -> None: ...

    def restore(self, code: int) -> None: ...


class SendGate:
    """Open, slow or closed."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._closed_by = ""  # why messages are refused; empty while they are not
        self._rate = 0  # bytes in a second while slow; 0 for any number
        self._next = 0.0  # loop time at which another request may pass
        self._waiting: deque[tuple[float, Handler, RemotingCommand, Connection]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._diverted = False
        self.refused = 0
        self.slowed = 0

    def open(self) -> None:
        """Let everything pass."""
        self._closed_by, self._rate = "", 0
        self._serve_waiting()
        if self._diverted:
            self._diverted = False
            for code in GATED:
                self._handlers.restore(code)

    def slow(self, rate: int) -> None:
        """Let so many bytes pass in a second."""
        self._closed_by, self._rate = "", rate
        self._divert()

    def close(self, reason: str) -> None:
        """Refuse everything, for a reason that tells what helps."""
        self._closed_by = reason
        self._divert()
        self._serve_waiting()

    async def start(self) -> None:
        """Nothing to do: the gate is open."""

    async def stop(self) -> None:
        """Serve what waits, while its senders can still be answered."""
        self.open()

    def _divert(self) -> None:
        if not self._diverted:
            self._diverted = True
            for code in GATED:
                self._handlers.divert(code, self._gated)

    def _gated(self, handler: Handler) -> Handler:
        def gated(request: RemotingCommand, connection: Connection) -> bytes | None:
            return self._admit(handler, request, connection)

        return gated

    def _admit(
        self, handler: Handler, request: RemotingCommand, connection: Connection
    ) -> bytes | None:
        if self._closed_by:
            self._refuse(self._closed_by)
        if not self._rate:
            return handler(request, connection)
        now = asyncio.get_running_loop().time()
        at = max(self._next, now)
        if at - now > WAIT_S_MAX or len(self._waiting) >= WAITING_MAX:
            self._refuse(
                f"[DISK]the disk is nearly full, and messages are taken at {self._rate} bytes in a "
                "second: try again later, or another broker"
            )
        self._next = at + (len(request.body) + RECORD_BYTES) / self._rate
        if at == now and not self._waiting:
            return handler(request, connection)
        self.slowed += 1
        self._waiting.append((at, handler, request, connection))
        self._plan()
        return None

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        raise RequestRefusedError(ResponseCode.SERVICE_NOT_AVAILABLE, reason, REFUSAL_FIELDS)

    def _plan(self) -> None:
        if self._waiting and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._waiting[0][0], self._serve_due)

    def _serve_due(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._waiting and self._waiting[0][0] <= now:
            self._serve_first()
        self._plan()

    def _serve_waiting(self) -> None:
        while self._waiting:
            self._serve_first()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._next = 0.0

    def _serve_first(self) -> None:
        _, handler, request, connection = self._waiting.popleft()
        reply = answer(handler if not self._closed_by else self._refusal, request, connection)
        if reply is not None and not request.flag & FLAG_ONE_WAY:
            connection.write(reply)

    def _refusal(self, _request: RemotingCommand, _connection: Connection) -> bytes | None:
        self._refuse(self._closed_by)
        return None
