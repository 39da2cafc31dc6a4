"""Requests that cannot be served at once, in the order in which their connection sent them.

Some decisions are about halves that are not in memory, and some are too many for one turn of the
event loop. Such a request is worked on in steps, between which others are served. What the same
connection asks in the same matter waits behind it: first come, first decided.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from ..connection import Connection
from ..transaction.cold_halves import OnRead

logger = logging.getLogger(__name__)

WAITING_MAX: Final = 1_000
"""Requests of one connection that wait; with one more, all are served without any pause. None is
ever refused for that: decisions are what empties the broker."""

Step = Callable[[bool], Sequence[int] | None]
"""Does some of the work of a request, and returns what it needs before the next step: the physical
offsets of halves that are to be brought into memory, perhaps none; or None: it is served. With True
it does all that is left, waiting for the disk where it must."""


class Later:
    """What waits, by connection."""

    def __init__(
        self,
        read_cold: Callable[[int, OnRead], None],
        *,
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        """Wire it.

        Args:
            read_cold: Reads a half on a thread and calls back on this one.
            call_soon: Has a function called in the next pass of the event loop.
        """
        self._read_cold = read_cold
        self._call_soon = call_soon
        self.waiting: dict[Connection, deque[Step]] = {}

    def __contains__(self, connection: Connection) -> bool:
        return connection in self.waiting

    def begin(self, connection: Connection, step: Step, needed: Sequence[int]) -> None:
        """Go on with a request whose first step has said what it needs."""
        assert connection not in self.waiting, "it has to wait behind others"
        self.waiting[connection] = deque((step,))
        self._prepare(connection, step, needed)

    def add(self, connection: Connection, step: Step) -> None:
        """Serve a request behind what waits."""
        waiting = self.waiting[connection]
        waiting.append(step)
        if len(waiting) > WAITING_MAX:
            logger.warning(
                "event=decisions_pile_up peer=%s waiting=%d", connection.name, len(waiting)
            )
            del self.waiting[connection]
            for one in waiting:
                _take_step(one, connection, at_once=True)

    def _prepare(self, connection: Connection, step: Step, needed: Sequence[int]) -> None:
        """Take the next step when what it needs is there."""
        go_on = partial(self._go_on, connection, step)
        if not needed:
            self._call_soon(go_on)
            return
        left = len(needed)

        def on_read(_half: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                go_on()

        for offset in needed:
            self._read_cold(offset, on_read)

    def _go_on(self, connection: Connection, step: Step) -> None:
        waiting = self.waiting.get(connection)
        while waiting and waiting[0] is step:  # else it has been served without a pause
            needed = _take_step(step, connection, at_once=False)
            if needed is not None:
                self._prepare(connection, step, needed)
                return
            waiting.popleft()
            if waiting:
                step = waiting[0]
        if waiting is not None and not waiting:
            self.waiting.pop(connection, None)


def _take_step(step: Step, connection: Connection, *, at_once: bool) -> Sequence[int] | None:
    try:
        return step(at_once)
    except Exception:  # of one request; those behind it want to be served
        logger.exception("event=step_failed peer=%s", connection.name)
        return None


def call_soon(work: Callable[[], None]) -> None:
    """Have a function called in the next pass of the running event loop."""
    asyncio.get_running_loop().call_soon(work)
