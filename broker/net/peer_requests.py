"""Requests of the broker that a peer has to answer.

Each connection keeps those that wait, by opaque; one timer of the server looks for what has waited
too long, and runs only while something waits. Whoever asks is told exactly once: the answer, or
None when the connection is lost or the time is up. An answer to nothing is ignored, as is one that
comes too late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Final

from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.correlation import Correlation

from ..loop.slices import PAUSE_S, Slice
from ..ports import OnAnswer

logger = logging.getLogger(__name__)

ASKS_MAX: Final = 256
"""Requests that wait for one peer's answers, about 300 bytes each beside what they hold. A peer
that takes a millisecond for each batch of them still gets a hundred thousand in a second."""

CHECK_ACK_S: Final = 3.0
"""Seconds until a request counts as not received: a peer answers at once that it has it, so only a
peer that hangs, or is overloaded, needs longer. RocketMQ's clients wait as long for an answer."""

EXPIRE_SCAN_S: Final = 0.25
"""Seconds between two looks for requests that have waited too long."""

_FIRST_OPAQUE: Final = 1 << 30  # far from those of one-way requests, which a peer may answer


class Asks:
    """What waits for the answers of one peer."""

    def __init__(self) -> None:
        self._waiting = Correlation[OnAnswer](in_flight_max=ASKS_MAX, first_opaque=_FIRST_OPAQUE)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether the peer has to answer first."""
        return len(self._waiting) >= ASKS_MAX

    def register(self, on_answer: OnAnswer, now: float) -> int:
        """Return the opaque under which to send a request; not when full."""
        return self._waiting.register(on_answer, now + CHECK_ACK_S)

    def answered(self, answer: RemotingCommand) -> None:
        """Hand an answer to who asked, if somebody did."""
        on_answer = self._waiting.match(answer.opaque)
        if on_answer is not None:
            _tell((on_answer,), answer)

    def expire(self, now: float) -> None:
        """Tell those that have waited too long."""
        _tell(self._waiting.expire(now), None)

    def fail(self) -> None:
        """Tell all: the connection is lost."""
        _tell(self._waiting.fail_all(), None)


class AskExpiry:
    """The timer that all connections of a server share."""

    def __init__(self) -> None:
        self._asks: set[Asks] = set()
        self._round: Iterator[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, asks: Asks, loop: asyncio.AbstractEventLoop) -> None:
        """Have what waits there expire in time."""
        self._asks.add(asks)
        if self._timer is None:
            self._timer = loop.call_later(EXPIRE_SCAN_S, self._scan, loop)

    def _scan(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._round is None:
            self._round = self._expire(loop.time())
        if not Slice().advance(self._round):
            self._timer = loop.call_later(PAUSE_S, self._scan, loop)
            return
        self._round = None
        self._timer = loop.call_later(EXPIRE_SCAN_S, self._scan, loop) if self._asks else None

    def _expire(self, now: float) -> Iterator[None]:
        for asks in list(self._asks):
            asks.expire(now)
            if not len(asks):
                self._asks.discard(asks)
            yield

    def stop(self) -> None:
        """Look no more."""
        self._asks.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _tell(waiting: Iterable[OnAnswer], answer: RemotingCommand | None) -> None:
    for on_answer in waiting:
        try:
            on_answer(answer)
        except Exception:
            # One that fails must not keep the others from their answers.
            logger.exception("event=answer_failed opaque=%s", answer and answer.opaque)
