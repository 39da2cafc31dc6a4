"""Group commit, seen from the network: replies wait here until the log is on disk.

A handler appends at once and leaves its reply with the log position that must be durable. The flush
is asked for once per pass of the event loop, after all readable sockets were served, so that one
fdatasync covers what they brought; while it runs, the next group gathers. When it returns, every
reply up to the durable position is written, joined per connection.

A disk that falls behind is met in three steps. First peers are not read any more: a burst passes
by in a fraction of a second, and nobody needs to know. But behind what is not read, decisions wait,
and those are what empties the broker. So if it lasts, peers are read again, and what they send is
refused, except for decisions, which are taken as before. Only when those alone have filled the
second limit, nothing is read until the disk has caught up. No decision is dropped in any of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from halfmq.remoting.codes import ResponseCode

from ..disk.send_refusal import SendRefusal

logger = logging.getLogger(__name__)

UNFLUSHED_BYTES_MAX: Final = 64 << 20
"""Bytes of log that may wait for the disk before peers are no longer read: bounds the replies held
here and the data at stake, and is a fraction of a second of any disk worth the name."""


UNFLUSHED_BYTES_LIMIT: Final = 128 << 20
"""The same while only decisions are taken: room for as much again, since a commit is as long as its
half."""

STALLED_S_MAX: Final = 1.0
"""Seconds for which peers are not read before messages are refused instead. Clients give a request
three seconds, in which the refusal must reach them and be tried again."""

CAUSE: Final = "disk_behind"

PEERS_PER_TURN: Final = 64
"""Connections written to in one turn of the loop: one or two milliseconds, however many wait. The
others follow in the next turns; meanwhile the first ones may have sent again."""


class Writer(Protocol):
    """Where a released reply goes."""

    def write(self, data: bytes) -> None: ...

    def resume_after_flush(self) -> None: ...


class FlushableLog(Protocol):
    """What this needs of the store."""

    @property
    def durable_offset(self) -> int: ...

    @property
    def write_offset(self) -> int: ...

    def request_flush(self) -> None: ...


class ReplyRelease:
    """Holds replies until the commit log is durable up to their position."""

    def __init__(
        self,
        log: FlushableLog,
        refusal: SendRefusal | None = None,
        *,
        on_released: Callable[[], None] = lambda: None,
    ) -> None:
        """``refusal`` is told when messages are to be refused, and when no more."""
        self._log = log
        self._refusal = refusal or SendRefusal()
        self._waiting: deque[tuple[int, Writer, bytes]] = deque()
        self._stalled: list[Writer] = []
        self._flush_asked = False
        self._has_more = False  # replies whose position is durable, for the next turn
        self._on_released = on_released
        self._idle_futures: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self.refusing = False
        """Whether messages and halves are to be refused: the disk has been behind for long."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell on which loop connections live; before this nothing can wait."""
        self._loop = loop

    def hold(self, position: int, writer: Writer, reply: bytes) -> None:
        """Write `reply` to `writer` once the log is durable up to `position`."""
        self._waiting.append((position, writer, reply))
        self.ask_flush()

    def ask_flush(self) -> None:
        """Have the log flushed after this pass of the loop."""
        if not self._flush_asked and self._loop is not None:
            self._flush_asked = True
            self._loop.call_soon(self._flush)

    def over_limit(self) -> bool:
        """Whether so much waits for the disk that no more should be read from the network."""
        limit = UNFLUSHED_BYTES_LIMIT if self.refusing else UNFLUSHED_BYTES_MAX
        return self._log.write_offset - self._log.durable_offset > limit

    def stall(self, writer: Writer) -> None:
        """Have `writer` resumed when the disk has caught up, or when messages are refused."""
        self._stalled.append(writer)
        if self._stall_timer is None and not self.refusing and self._loop is not None:
            self._stall_timer = self._loop.call_later(STALLED_S_MAX, self._refuse)

    def _refuse(self) -> None:
        self._stall_timer = None
        if self.over_limit():
            waiting = self._log.write_offset - self._log.durable_offset
            reason = (
                f"[OVERLOAD]{waiting} bytes wait for the disk, which has been behind for more than "
                f"{STALLED_S_MAX:g} s: try again later, send less, or use a faster disk"
            )
            self.refusing = True
            self._refusal.begin(CAUSE, ResponseCode.SYSTEM_BUSY, reason)
            logger.warning("event=overload refusal=%r", reason)
            self._resume_stalled()

    def _resume_stalled(self) -> None:
        stalled, self._stalled = self._stalled, []
        for writer in stalled:
            writer.resume_after_flush()

    def _caught_up(self) -> None:
        """Go back to the first step as soon as half of the limit is free."""
        if self.refusing:
            waiting = self._log.write_offset - self._log.durable_offset
            if waiting <= UNFLUSHED_BYTES_MAX // 2:
                self.refusing = False
                self._refusal.end(CAUSE)
                logger.warning("event=overload_over bytes_waiting=%d", waiting)
        if self._stalled and not self.over_limit():
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None
            self._resume_stalled()

    @property
    def idle(self) -> bool:
        """Whether no reply waits."""
        return not self._waiting

    def notify_when_idle(self, future: asyncio.Future[None]) -> None:
        """Settle `future` as soon as no reply waits."""
        if self.idle:
            future.set_result(None)
        else:
            self._idle_futures.append(future)

    def _flush(self) -> None:
        self._flush_asked = False
        self._log.request_flush()
        # The answer to a repeated request may wait for what has been on disk for long. Then there
        # is nothing to flush, and nobody would come back with it.
        if self._waiting and self._waiting[0][0] <= self._log.durable_offset:
            self.release()

    def _release_more(self) -> None:
        self._has_more = False
        self.release()

    def durable_from_thread(self, _offset: int) -> None:
        """Take the flush thread's word that the log is on disk; called on that thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.release)

    def release(self) -> None:
        """Write every reply whose position is durable; called on the event loop.

        Those of many peers leave in several turns.
        """
        if self._has_more:
            return  # the next turn goes on
        durable = self._log.durable_offset
        waiting = self._waiting
        ready: dict[Writer, list[bytes]] = {}
        while waiting and waiting[0][0] <= durable and len(ready) < PEERS_PER_TURN:
            _, writer, reply = waiting.popleft()
            replies = ready.get(writer)
            if replies is None:
                ready[writer] = [reply]
            else:
                replies.append(reply)
        for writer, replies in ready.items():
            writer.write(replies[0] if len(replies) == 1 else b"".join(replies))
        if self._stalled or self.refusing:
            self._caught_up()
        if waiting and waiting[0][0] <= durable and self._loop is not None:
            self._has_more = True
            self._loop.call_soon(self._release_more)
        elif waiting:
            self.ask_flush()
        elif self._idle_futures:
            idle, self._idle_futures = self._idle_futures, []
            for future in idle:
                if not future.done():
                    future.set_result(None)
        self._on_released()
