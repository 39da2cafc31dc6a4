"""Turns of connections that have more requests than one pass of the event loop has time for.

A single read may contain thousands of requests. A connection serves them until its turn is over;
the rest waits for the next pass, in which the other sockets are served first. Hundreds of
connections may have sent so much: large reads of one pass are decoded for as long as a turn, and
the others wait as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

TURN_S: Final = 0.005
"""Seconds of one pass in which the requests that wait here are served. Usual reads of pipelining
producers take about a millisecond and never wait."""


class Turns:
    """Serves waiting connections in order of arrival, for about ``TURN_S`` in each pass."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False
        self._reads_end = 0.0  # until when large reads are decoded in this pass; 0: none was yet

    def is_over(self) -> bool:
        """Return whether a large read must wait for a turn: others have used up this pass."""
        now = time.perf_counter()
        if not self._reads_end:
            self._reads_end = now + TURN_S
            asyncio.get_running_loop().call_soon(self._begin_pass)
        return now >= self._reads_end

    def _begin_pass(self) -> None:
        self._reads_end = 0.0

    def end(self) -> float:
        """Return the ``perf_counter`` time until which a connection may serve requests now.

        Those that wait have their part of the time, so that many do not take longer than one.
        """
        return time.perf_counter() + TURN_S / (1 + len(self._waiting))

    def wait(self, serve: Callable[[], None]) -> None:
        """Call ``serve``, which goes on with the requests of a connection, in a later pass."""
        self._waiting.append(serve)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        waiting, end = self._waiting, time.perf_counter() + TURN_S
        for _ in range(len(waiting)):  # those that wait again come after them
            waiting.popleft()()
            if time.perf_counter() >= end:
                break
        self._is_scheduled = False
        self._schedule()
