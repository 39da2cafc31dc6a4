"""Limit the share of the event loop that consumers with a large lag get.

A consumer that replays the log sends the next pull as soon as it is answered, so a few of them
could occupy the whole loop. While messages are being stored, lagging consumers get a share of the
loop's time: their pulls wait some milliseconds, and as many are answered as fit into the share. The
time of an answer is measured, because it varies twentyfold, with the machine and with how scattered
the messages are. Pulls without a large lag, and all pulls while nothing is stored, are answered at
once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from halfmq.store.message_store import MessageStore

from ..limits.kept import REPLAYED_PULL_BYTES

LAG_LARGE: Final = 64 << 20
"""Bytes of log between a message and the log's end from which the lag of its consumer is large:
half a second's worth at a hundred thousand messages per second."""

SLICE_S: Final = 0.002
"""Seconds between two turns of waiting pulls."""

QUIET_S: Final = 0.1
"""Seconds without a stored message, or without a replay, after which sends or replays have paused.
Producers that wait for the disk store nothing for several slices, and replays send no pull."""

LOOP_SHARE: Final = 0.1
"""Share of the loop's time for answers to replays: more than 30,000 messages per second if an
answer of 32 takes 100 us. Replays are faster than producers that wait for the disk, whose latency
hardly grows."""

SLICE_S_MAX: Final = 0.02
"""Seconds that a slice counts at most, and by which a turn may exceed its share. If the machine was
suspended for a minute, the next turn must not last six seconds, and replays must not wait for ten
minutes."""


class ReplayPace:
    """Decides which pulls of replays are answered now, and schedules the others."""

    def __init__(self, log: MessageStore) -> None:
        self._log = log
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()  # with their bytes
        self.bytes = 0
        """Bytes of the pulls that wait for a turn."""
        self._slice: asyncio.TimerHandle | None = None
        self._slice_start = 0.0  # seconds of the performance counter, as all times here
        self._left_s = 0.0  # of the share; negative if a turn took more than was left
        self._log_end = 0  # when the slice began
        self._pulled_at = self._stored_at = -QUIET_S  # the latest replay, the latest stored message
        self._stores = False  # whether messages are being stored

    def is_replay(self, physical_offset: int) -> bool:
        """Return whether the pull of a message lags so much that it has to be admitted."""
        return self._log.write_offset - physical_offset >= LAG_LARGE

    def admits(self, serve: Callable[..., None], *arguments: object, size: int) -> bool:
        """Return whether a pull that lags may be answered now.

        Otherwise call ``serve`` later with these arguments, which take ``size`` bytes, unless the
        loop ends before.
        """
        self._pulled_at = time.perf_counter()
        if self._slice is None:
            self._left_s = 0.0
            self._begin(self._pulled_at)
        if not self._stores or self.bytes + size > REPLAYED_PULL_BYTES.most:
            return True
        self.bytes += size
        self._waiting.append((partial(serve, *arguments), size))
        return False

    def spend(self, work: Callable[[], None]) -> None:
        """Run work of a replay, such as sending what was read from disk, and count its time.

        Call it on the event loop.
        """
        began = time.perf_counter()
        work()
        self._left_s -= time.perf_counter() - began

    def _begin(self, now: float) -> None:
        self._slice_start, self._log_end = now, self._log.write_offset
        self._slice = asyncio.get_running_loop().call_later(SLICE_S, self._next_slice)

    def _next_slice(self) -> None:
        now = time.perf_counter()
        if self._log.write_offset != self._log_end:
            self._stored_at = now
        self._stores = now - self._stored_at < QUIET_S
        if not self._waiting and now - self._pulled_at >= QUIET_S:
            self._slice, self._stores = None, False
            return
        share = min(now - self._slice_start, SLICE_S_MAX) * LOOP_SHARE
        # An unused share is not carried over.
        self._left_s = max(min(self._left_s, 0.0), -SLICE_S_MAX) + share
        self._begin(now)
        if not self._stores:
            self._left_s = 0.0
        for _ in range(len(self._waiting)):
            if self._stores and self._left_s <= 0:
                break
            work, size = self._waiting.popleft()
            self.bytes -= size
            self.spend(work)
