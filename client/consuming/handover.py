"""Hands messages to threads other than the event loop's: many at a time, and acknowledged so.

The loop's thread moves ready messages into a queue, from which threads take them without a crossing
between threads. What they acknowledge goes into a second queue, which the loop's thread works off
every few milliseconds, and before each commit. Whoever first takes the claim of a message decides
what becomes of it: a thread that acknowledges it, or the loop's thread that redelivers it. A
message's ack timeout begins when a thread takes it.

A signal handler may raise in a thread at each call. So no step between two calls holds a message
that is not also in a queue or in the caller's list.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from .delivery import Delivery, DeliveryBuffer

HANDED_MAX: Final = 64
"""Messages that one crossing hands over: with so many its cost per message is below a tenth."""
COLLECT_SECONDS: Final = 0.005
"""How long an acknowledgement may wait for others: far below ``offset_commit_interval``."""
DEADLINE_CHECKS: Final = 4
"""How often, within one ack timeout, the loop's thread looks for messages that were taken."""


class Handover:
    """The messages that a consumer's buffer has handed to other threads."""

    def __init__(self, buffer: DeliveryBuffer) -> None:
        self._buffer = buffer
        self._loop = asyncio.get_running_loop()
        self._ready: deque[Delivery] = deque()
        self._acked: deque[Delivery] = deque()
        self._handed: deque[Delivery] = deque()  # without a deadline yet; of the loop's thread
        self._collecting = False
        self._timer: asyncio.TimerHandle | None = None
        self.stopped = False
        """Whether no more messages may be taken."""

    # -- in any thread

    def take(self, slot: list[Delivery]) -> bool:
        """Move the next message into ``slot``; return False if none is here."""
        buffer = self._buffer
        while self._ready and not (self.stopped or buffer.stopped or buffer.binding.forked):
            try:
                slot.extend(map(deque.popleft, (self._ready,)))  # one call, so that none is lost
            except IndexError:  # another thread was faster
                return False
            if slot[0].pending:
                return True
            slot.clear()
        return False

    @property
    def has_more(self) -> bool:
        """Whether the buffer has messages to hand over."""
        return self._buffer.has_ready

    def put_back(self, slot: list[Delivery]) -> None:
        """Make a message the next one again whose taker was interrupted."""
        for delivery in slot:
            delivery.taken_at = None
        self._ready.extendleft(slot)

    def acknowledge(self, delivery: Delivery) -> bool:
        """Acknowledge a message; return False if the loop's thread has to decide."""
        buffer = self._buffer
        if buffer.closed or buffer.binding.forked or not delivery.window.active:
            return False
        try:
            if not delivery.take_claim():
                return False
            self._acked.append(delivery)
            if not self._collecting:
                self._collecting = True
                self._loop.call_soon_threadsafe(self._collect_soon)
        except BaseException:  # of a signal handler: the message was processed
            self._acked.append(delivery)
            self._collecting = False
            raise
        return True

    # -- in the loop's thread

    async def fill(self, seconds: float | None) -> bool:
        """Wait until there are messages to take; return False after so many seconds, or a stop."""
        self.collect()
        if self.stopped or self._buffer.stopped:
            return False
        if self._ready:
            return True  # another thread has asked for them
        try:
            async with asyncio.timeout(seconds):
                return await self._buffer.take_by(self._hand_over) is not None
        except TimeoutError:
            return False

    def collect(self) -> None:
        """Work off what threads have acknowledged, and begin the ack timeouts of what they took."""
        self._collecting = False
        while self._acked:
            self._buffer.remove(self._acked.popleft())
        handed = self._handed
        while handed and (handed[0].taken_at is not None or not handed[0].pending):
            delivery = handed.popleft()
            if delivery.taken_at is not None and delivery.held and delivery.pending:
                self._buffer.begin_deadline(delivery, delivery.taken_at)

    def return_all(self) -> None:
        """Put all messages back that no thread has taken."""
        while self._ready:
            self._ready.pop().put_back()
        self._handed.clear()

    def _collect_soon(self) -> None:
        self._loop.call_later(COLLECT_SECONDS, self.collect)

    def _hand_over(self) -> bool | None:
        for _ in range(HANDED_MAX):
            delivery = self._buffer.pop_ready()
            if delivery is None:
                break
            delivery.taken_at = None
            if delivery.has_deadline:
                delivery.claim = [None]
                self._handed.append(delivery)
            self._ready.append(delivery)
        self._watch()
        return True if self._ready else None

    def _watch(self) -> None:
        timeout = self._buffer.ack_timeout
        if self._timer is None and self._handed and timeout and not self._buffer.closed:
            self._timer = self._loop.call_later(timeout / DEADLINE_CHECKS, self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._timer = None
        self.collect()
        self._watch()
