"""Pulls that wait for a message.

Waiters are kept per topic and queue. The append path asks one question, "is anyone waiting?", and
marks the queue with the end of the log; marked queues are looked at after each flush (SYNC_FLUSH),
or after the pass of the loop that appended (ASYNC_FLUSH).

Under SYNC_FLUSH a message is appended some time before it is visible. So a mark stays until the log
is readable up to it, for the next flush may have begun before the append. And a pull that comes in
between, finds nothing and waits, marks its queue itself: the append saw no one waiting.
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


class Log(Protocol):
    """How far the log goes and how far of it may be read."""

    @property
    def write_offset(self) -> int: ...

    @property
    def readable_offset(self) -> int: ...


class HeldPull(msgspec.Struct):
    """A pull that found nothing."""

    key: QueueKey
    command: RemotingCommand
    connection: PullConnection
    deadline: float  # loop time, seconds
    next_offset: int  # where to look next: what was filtered out need not be scanned again
    tag_codes: frozenset[int] | None
    looked_until: int  # the log's readable offset before it was looked for messages


Answer = Callable[[HeldPull, bool], bytes | None]
"""`(held, timed_out)` → the reply to write, or None to go on holding; never None in time-out."""


class LongPolling:
    """Keeps the pulls that wait and answers them when a message comes or their time is up."""

    def __init__(self) -> None:
        self.waiting: dict[QueueKey, list[HeldPull]] = {}  # read by the append path
        self._count = 0
        self._arrived: dict[QueueKey, int] = {}  # marked queues: look until this is readable
        self._wake_asked = False
        self._answer: Answer | None = None
        self._log: Log | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep_handle: asyncio.TimerHandle | None = None

    def answer_by(self, answer: Answer, log: Log) -> None:
        """Set the pull handler's way to look again, and the log it looks at."""
        self._answer = answer
        self._log = log

    async def start(self) -> None:
        """Begin to watch the deadlines."""
        self._loop = asyncio.get_running_loop()
        self._sweep_handle = self._loop.call_later(SWEEP_S, self._sweep)

    async def stop(self) -> None:
        """Forget every waiter: their connections are closed."""
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
        self.waiting.clear()
        self._arrived.clear()
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
        assert self._log is not None
        end = self._log.write_offset
        if end > held.looked_until:
            self._arrived[held.key] = end
        return True

    def note_arrivals(self, queues: Iterable[QueueKey]) -> None:
        """Mark those of the queues, which just got messages, on which someone waits."""
        assert self._log is not None
        waiting, end = self.waiting, self._log.write_offset
        self._arrived.update([(key, end) for key in queues if key in waiting])

    def wake(self) -> None:
        """Look again for every pull of a marked queue."""
        if not self._arrived:
            return
        assert self._log is not None
        # Before the look: what becomes readable meanwhile has a flush, and so a look, of its own.
        readable = self._log.readable_offset
        arrived, self._arrived = self._arrived, {}
        for key, end in arrived.items():
            self._look_again(key, lambda _held: False)
            if end > readable and key in self.waiting:
                self._arrived[key] = max(end, self._arrived.get(key, 0))

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
