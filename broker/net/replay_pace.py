"""Consumers far behind share the event loop with producers.

One that replays the log asks again as soon as it is answered, so a few of them could keep the loop
to themselves. While messages are being stored, those that are far behind get a share of the loop's
time: they wait for their turn, some milliseconds, and as many are answered as fit into the share.
What an answer takes differs twentyfold, with the machine and with how scattered its messages lie,
so it is measured. Consumers that keep up, and replays while nobody sends, are answered at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

FAR_BEHIND: Final = 64 << 20
"""Bytes of log between a message and the log's end from which on its consumer is far behind: at a
hundred thousand messages a second, half a second's worth."""

SLICE_S: Final = 0.002
"""Seconds between two turns."""

QUIET_S: Final = 0.1
"""Seconds without a stored message, or without a replay, after which there are none for now.
Producers who wait for the disk store nothing for several slices, and replays ask for nothing."""

LOOP_SHARE: Final = 0.1
"""Of the loop's time, for answers to replays: more than 30,000 messages a second where an answer of
32 takes 100 us. Replays gain on producers that wait for the disk, whose latency hardly grows."""

SLICE_S_MAX: Final = 0.02
"""Seconds for which a slice, or what a turn took too much, counts at most: when all of the machine
stood still for a minute, neither is the next turn six seconds long, nor do replays wait for ten
minutes."""

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
        self._began = 0.0  # the slice, by the performance counter
        self._left_s = 0.0  # of the share; below 0 when a turn took more than there was
        self._end = 0  # of the log when it began
        self._asked_at = self._stored_at = -QUIET_S  # when somebody did last, by the same counter
        self._stores = False  # messages are being stored

    def admits(self, physical_offset: int, serve: Callable[..., None], *arguments: object) -> bool:
        """Tell whether the pull of a message may be answered now.

        Otherwise ``serve`` is called later, with those arguments. Nothing is called for pulls that
        wait when the loop ends.
        """
        if self._log.write_offset - physical_offset < FAR_BEHIND:
            return True
        self._asked_at = time.perf_counter()
        if self._slice is None:
            self._left_s = 0.0
            self._begin(self._asked_at)
        if not self._stores or len(self._waiting) >= WAITING_MAX:
            return True
        self._waiting.append(partial(serve, *arguments))
        return False

    def spend(self, work: Callable[[], None]) -> None:
        """Do work that a replay has caused, such as sending what came from the disk, at its cost.

        On the event loop.
        """
        began = time.perf_counter()
        work()
        self._left_s -= time.perf_counter() - began

    def _begin(self, now: float) -> None:
        self._began, self._end = now, self._log.write_offset
        self._slice = asyncio.get_running_loop().call_later(SLICE_S, self._go_on)

    def _go_on(self) -> None:
        now = time.perf_counter()
        if self._log.write_offset != self._end:
            self._stored_at = now
        self._stores = now - self._stored_at < QUIET_S
        if not self._waiting and now - self._asked_at >= QUIET_S:
            self._slice, self._stores = None, False
            return
        share = min(now - self._began, SLICE_S_MAX) * LOOP_SHARE
        # What is not used is not saved.
        self._left_s = max(min(self._left_s, 0.0), -SLICE_S_MAX) + share
        self._begin(now)
        if not self._stores:
            self._left_s = 0.0
        for _ in range(len(self._waiting)):
            if self._stores and self._left_s <= 0:
                break
            self.spend(self._waiting.popleft())
