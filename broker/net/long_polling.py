"""Pulls that wait for a message.

Waiters are kept per topic and queue. The append path asks one question, "is anyone waiting?", and
marks the queue with the end of the log; marked queues are looked at after each flush (SYNC_FLUSH),
or after the pass of the loop that appended (ASYNC_FLUSH).

Under SYNC_FLUSH a message is appended some time before it is visible. So a mark stays until the log
is readable up to it, for the next flush may have begun before the append. And a pull that comes in
between, finds nothing and waits, marks its queue itself: the append saw no one waiting.

One message may be awaited by thousands of consumers, and the time of as many may be up at once. So
pulls are answered in slices. Those that were not looked at yet stay where the append path sees
them, in front of those that go on waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import msgspec

from halfmq.remoting.command import RemotingCommand

from ..loop.slices import Slice

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
        self.waiting: dict[QueueKey, deque[HeldPull]] = {}  # read by the append path
        self._count = 0
        self._arrived: dict[QueueKey, int] = {}  # marked queues: look until this is readable
        self._woken: dict[QueueKey, int] = {}  # of these, the ones to be looked at now
        self._to_sweep: list[QueueKey] = []  # queues whose deadlines are to be looked at
        self._looking: Iterator[None] | None = None  # the look under way, the only one
        self._look_asked = False  # for the next slice of it
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
        self._looking = None
        for state in (self.waiting, self._arrived, self._woken, self._to_sweep):
            state.clear()
        self._count = 0

    @property
    def count(self) -> int:
        """Pulls held now."""
        return self._count

    def hold(self, held: HeldPull) -> bool:
        """Keep the pull until a message comes or its deadline; False when too many wait."""
        if self._count >= HELD_PULLS_MAX:
            return False
        self.waiting.setdefault(held.key, deque()).append(held)
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
        """Look again for the pulls of marked queues, as far as a slice goes; the rest follows."""
        if self._arrived:
            self._woken.update(self._arrived)
            self._arrived.clear()
        if self._woken:
            self._look()

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
        if not self._to_sweep:
            self._to_sweep = list(self.waiting)
            self._look()
        self._sweep_handle = self._loop.call_later(SWEEP_S, self._sweep)

    # --- in slices

    def _look(self) -> None:
        if self._looking is None:
            self._looking = self._looks()
        if Slice().advance(self._looking):
            self._looking = None
        elif not self._look_asked and self._loop is not None:
            self._look_asked = True
            self._loop.call_soon(self._look_on)

    def _look_on(self) -> None:
        self._look_asked = False
        if self._looking is not None:
            self._look()

    def _looks(self) -> Iterator[None]:
        """Look at queue after queue; those with messages go first."""
        while self._woken or self._to_sweep:
            woken, self._woken = self._woken, {}
            for key, end in woken.items():
                yield from self._look_for_messages(key, end)
            if self._to_sweep and not self._woken:
                yield from self._look_at(self._to_sweep.pop(), is_sweep=True)

    def _look_for_messages(self, key: QueueKey, end: int) -> Iterator[None]:
        assert self._log is not None
        readable = self._log.readable_offset  # before the look
        yield from self._look_at(key, is_sweep=False)
        if end > readable and key in self.waiting:
            # What became readable during the look had its wake then; else one will come.
            is_late = self._log.readable_offset > readable
            marks = self._woken if is_late else self._arrived
            marks[key] = max(end, marks.get(key, 0))

    def _look_at(self, key: QueueKey, *, is_sweep: bool) -> Iterator[None]:
        """Answer the pulls of a queue for which there is something; in a sweep, the overdue."""
        assert self._answer is not None
        waiters = self.waiting.get(key)
        if waiters is None:
            return
        for _ in range(len(waiters)):
            held = waiters.popleft()
            self._count -= 1
            timed_out = is_sweep and self._is_overdue(held)
            if not held.connection.closed:
                reply = self._answer(held, timed_out) if timed_out or not is_sweep else None
                if reply is None:
                    waiters.append(held)
                    self._count += 1
                else:
                    held.connection.write(reply)
            yield
        if not waiters:
            del self.waiting[key]

    def _is_overdue(self, held: HeldPull) -> bool:
        return self._loop is not None and held.deadline <= self._loop.time()
