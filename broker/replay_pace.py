"""Consumers far behind share the event loop with producers.

One that replays the log asks again as soon as it is answered, so a few of them could keep the loop
to themselves. While messages are being stored, only so many answers go to those that are far
behind; the other pulls wait for their turn, some milliseconds. Consumers that keep up, and replays
while nobody sends, are answered at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

FAR_BEHIND: Final = 64 << 20
"""Bytes of log between a message and the log's end from which on its consumer is far behind: at a
hundred thousand messages a second, half a second's worth."""

SLICE_S: Final = 0.002
"""Seconds for which answers are counted."""

ANSWERS_PER_SLICE: Final = 2
"""Answers to replays in that time, about a twentieth of the loop: 32,000 messages a second, so that
replays still gain on producers that wait for the disk."""

WAITING_MAX: Final = 10_000
"""Pulls that wait for a turn, some 2 KiB each; one more is answered at once."""


class Log(Protocol):
    """What the pace needs of the store."""

    @property
    def write_offset(self) -> int: ...


class ReplayPace:
    """Tells which pulls of replays are answered now, and has the others answered later."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._waiting: deque[Callable[[], None]] = deque()
        self._slice: asyncio.TimerHandle | None = None
        self._left = 0  # answers in this slice
        self._asked = False  # somebody did, in this slice
        self._end = 0  # of the log when it began
        self._stored = False  # messages were, in the slice before

    def admits(self, physical_offset: int, serve: Callable[[], None]) -> bool:
        """Tell whether the pull of a message may be answered now; else ``serve`` is called later.

        Nothing is called for pulls that wait when the loop ends.
        """
        if self._log.write_offset - physical_offset < FAR_BEHIND:
            return True
        if self._slice is None:
            self._begin()
        self._asked = True
        if not self._stored or len(self._waiting) >= WAITING_MAX:
            return True
        if self._left and not self._waiting:
            self._left -= 1
            return True
        self._waiting.append(serve)
        return False

    def _begin(self) -> None:
        self._end, self._left, self._asked = self._log.write_offset, ANSWERS_PER_SLICE, False
        self._slice = asyncio.get_running_loop().call_later(SLICE_S, self._go_on)

    def _go_on(self) -> None:
        self._stored = self._log.write_offset != self._end
        if not self._asked and not self._waiting:
            self._slice, self._stored = None, False
            return
        self._begin()
        turns = ANSWERS_PER_SLICE if self._stored else len(self._waiting)
        while self._waiting and turns:
            turns -= 1
            self._waiting.popleft()()
        self._left = turns if self._stored else ANSWERS_PER_SLICE
