"""Requests that may have to read what is not in memory: searches, and looks at old messages.

They are tried on the loop, where nothing may wait for the disk. What a try lacks a thread fetches,
and the request is tried again from its beginning; it changes nothing, so nothing is done twice.
Pulls, which are many and read much, have their own way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from halfmq.remoting.codes import FLAG_ONE_WAY, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.store.page_cache import NotInMemoryError, without_waiting

from .connection import Connection, Handler
from .errors import RequestRefusedError
from .router import answer

logger = logging.getLogger(__name__)

CODES: Final = frozenset(
    {
        RequestCode.VIEW_MESSAGE_BY_ID,
        RequestCode.QUERY_MESSAGE,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        RequestCode.GET_BROKER_RUNTIME_INFO,
    }
)
"""The requests that are served this way."""

TRIES_MAX: Final = 256
"""Tries without waiting; then one on the spot. A search halves a queue some thirty times, and a key
that many messages have leads to at most 256 of them."""

WAITING_MAX: Final = 64
"""Requests that wait for the disk at once; one more is told to come again."""


class ColdRequests:
    """Serves such requests in as many tries as they need."""

    def __init__(self) -> None:
        self._waiting = 0

    def covering(self, handlers: Mapping[int, Handler]) -> dict[int, Handler]:
        """Return the same handlers, those of ``CODES`` so that they never block the loop."""
        return {
            code: partial(self._serve, handler, 0) if code in CODES else handler
            for code, handler in handlers.items()
        }

    def _serve(
        self, handler: Handler, tries: int, request: RemotingCommand, connection: Connection
    ) -> bytes | None:
        if tries == TRIES_MAX:
            return handler(request, connection)
        try:
            with without_waiting():
                return handler(request, connection)
        except NotInMemoryError as missing:
            if self._waiting >= WAITING_MAX:
                raise RequestRefusedError(
                    ResponseCode.SYSTEM_BUSY, "[PCBUSY_CLEAN_QUEUE]too many reads wait for the disk"
                ) from None
            self._waiting += 1
            future = asyncio.get_running_loop().run_in_executor(None, missing.fetch)
            future.add_done_callback(partial(self._go_on, handler, tries + 1, request, connection))
            return None

    def _go_on(
        self,
        handler: Handler,
        tries: int,
        request: RemotingCommand,
        connection: Connection,
        fetched: asyncio.Future[None],
    ) -> None:
        self._waiting -= 1
        if fetched.cancelled() or connection.closed:
            return
        if (error := fetched.exception()) is not None:
            # A file that was deleted by age, or cannot be read: the handler meets it, and says so.
            logger.warning("event=cold_read_failed code=%d error=%r", request.code, error)
            tries = TRIES_MAX
        reply = answer(partial(self._serve, handler, tries), request, connection)
        if reply is not None and not request.flag & FLAG_ONE_WAY:
            connection.write(reply)
