"""Pulls that wait for a message.

Waiters are kept per topic and queue. The append path asks one question, "is anyone waiting?", and
marks the queue; marked queues are looked at once per group: after the flush that makes the group
visible (SYNC_FLUSH), or after the pass of the loop that appended it (ASYNC_FLUSH).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from halfmq.remoting.command import RemotingCommand

QueueKey = tuple[str, int]

HELD_PULLS_MAX: Final = 100_000
"""Pulls held at one time, about 1 KiB each; one more is answered at once, as if it timed out."""

SWEEP_S: Final = 0.5
"""Seconds between two looks for pulls whose time is up: an answer is at most this late, where the
official broker is up to 5 s late."""


class PullConnection(Protocol):
    """Where the answer of a held pull goes."""

    @property
    def closed(self) -> bool: ...

    def write(self, data: bytes) -> None: ...


class HeldPull(msgspec.Struct):
    """A pull that found nothing."""

    key: QueueKey
    command: RemotingCommand
    connection: PullConnection
    deadline: float  # loop time, seconds
    next_offset: int  # where to look next: what was filtered out need not be scanned again
    tag_codes: frozenset[int] | None


Answer = Callable[[HeldPull, bool], bytes | None]
"""`(held, timed_out)` → the reply to write, or None to go on holding; never None in time-out."""


class LongPolling:
    """Keeps the pulls that wait and answers them when a message comes or their time is up."""

    def __init__(self) -> None:
        self.waiting: dict[QueueKey, list[HeldPull]] = {}  # read by the append path
        self._count = 0
        self._arrived: set[QueueKey] = set()
        self._wake_asked = False
        self._answer: Answer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep_handle: asyncio.TimerHandle | None = None

    def answer_by(self, answer: Answer) -> None:
        """Set the pull handler's way to look again."""
        self._answer = answer

    async def start(self) -> None:
        """Begin to watch the deadlines."""
        self._loop = asyncio.get_running_loop()
        self._sweep_handle = self._loop.call_later(SWEEP_S, self._sweep)

    async def stop(self) -> None:
        """Forget every waiter: their connections are closed."""
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
        self.waiting.clear()
        self._count = 0

    @property
    def count(self) -> int:
        """Pulls held now."""
        return self._count

    def hold(self, held: HeldPull) -> bool:
        """Keep the pull until a message comes or its deadline; False when too many wait."""
        if self._count >= HELD_PULLS_MAX:
            return False
        self.waiting.setdefault(held.key, []).append(held)
        self._count += 1
        return True

    def note_arrivals(self, queues: Iterable[QueueKey]) -> None:
        """Mark those of the queues, which got messages, on which someone waits."""
        waiting = self.waiting
        self._arrived.update([key for key in queues if key in waiting])

    def wake(self) -> None:
        """Look again for every pull of a marked queue."""
        if self._arrived:
            arrived, self._arrived = self._arrived, set()
            for key in arrived:
                self._look_again(key, lambda _held: False)

    def wake_soon(self) -> None:
        """Look again after this pass of the loop, if anything was marked."""
        if self._arrived and not self._wake_asked and self._loop is not None:
            self._wake_asked = True
            self._loop.call_soon(self._wake_asked_for)

    def _wake_asked_for(self) -> None:
        self._wake_asked = False
        self.wake()

    def _sweep(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        for key in list(self.waiting):
            if any(held.deadline <= now or held.connection.closed for held in self.waiting[key]):
                self._look_again(key, lambda held: held.deadline <= now)
        self._sweep_handle = self._loop.call_later(SWEEP_S, self._sweep)

    def _look_again(self, key: QueueKey, timed_out: Callable[[HeldPull], bool]) -> None:
        assert self._answer is not None
        still: list[HeldPull] = []
        waiters = self.waiting.pop(key, [])
        for held in waiters:
            if held.connection.closed:
                continue
            reply = self._answer(held, timed_out(held))
            if reply is None:
                still.append(held)
            else:
                held.connection.write(reply)
        self._count -= len(waiters) - len(still)
        if still:
            # A pull that `write` provoked may already have come back to hold on the same queue.
            self.waiting.setdefault(key, []).extend(still)
