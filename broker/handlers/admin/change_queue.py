"""Administrative changes, one after the other; each is answered when it is on disk."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, ParamSpec

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.replies import encode_reply

from ...access.control import Subject
from ...errors import RequestRefusedError
from ...limits.kept import CHANGES_BYTES, Kept
from ...ports import Connection

P = ParamSpec("P")

logger = logging.getLogger(__name__)

CHANGES_WAITING_MAX: Final = 64
"""Changes running or waiting; each keeps its request in memory."""


class ChangeQueue:
    """The queue of changes of one broker."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0

    def make(
        self,
        request: RemotingCommand,
        connection: Connection,
        what: str,
        change: Callable[P, Awaitable[bytes | None]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> None:
        """Run a change after the previous ones, then answer its request.

        ``change`` returns when the change is on disk, with the body of the answer if it has one, or
        raises RequestRefusedError. ``what`` names it in the log.

        Raises:
            RequestRefusedError: Too many changes wait.
        """
        size = len(request.body)
        if len(self._tasks) >= CHANGES_WAITING_MAX or self._bytes + size > CHANGES_BYTES.most:
            raise RequestRefusedError("too many changes wait: try again", ResponseCode.SYSTEM_BUSY)
        self._bytes += size
        task = asyncio.create_task(
            self._make(partial(change, *arguments, **named), what, request, connection)
        )
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._done(task, size))

    def _done(self, task: asyncio.Task[None], size: int) -> None:
        self._tasks.discard(task)
        self._bytes -= size

    async def _make(
        self,
        change: Callable[[], Awaitable[bytes | None]],
        what: str,
        request: RemotingCommand,
        connection: Connection,
    ) -> None:
        try:
            async with self._lock:
                body = await change()
        except RequestRefusedError as error:
            reply = encode_reply(request, error.code, remark=error.remark)
        except Exception:
            logger.exception("event=change_failed code=%d what=%r", request.code, what)
            reply = encode_reply(
                request, ResponseCode.SYSTEM_ERROR, remark="internal error, see the broker's log"
            )
        else:
            by = request.subject.name if isinstance(request.subject, Subject) else ""
            logger.info("event=changed what=%r peer=%s by=%r", what, connection.name, by)
            reply = encode_reply(request, body=body or b"")
        connection.respond(request, reply)

    def kept(self) -> Kept:
        return {CHANGES_BYTES: self._bytes}
