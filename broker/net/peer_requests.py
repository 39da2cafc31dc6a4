"""Requests of the broker that a peer has to answer.

Each connection keeps its waiting requests by opaque. One timer of the server, active only while
requests wait, expires those past their deadline. The callback of a request is called exactly once:
with the answer, or with None if the connection is lost or the deadline has passed. Answers without
a waiting request are ignored.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Final

from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.correlation import Correlation

from ..limits.kept import PEER_REQUESTS
from ..loop.slices import PAUSE_S, Slice
from ..ports import OnAnswer

logger = logging.getLogger(__name__)

EXPIRE_SCAN_S: Final = 0.25
"""Seconds between two scans for requests past their deadline."""

_FIRST_OPAQUE: Final = 1 << 30  # far from the opaques of one-way requests, which a peer may answer


class PeerRequests:
    """The requests that wait for the answers of one peer."""

    def __init__(self) -> None:
        self._waiting = Correlation[OnAnswer](
            in_flight_max=PEER_REQUESTS.of_connection, first_opaque=_FIRST_OPAQUE
        )

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether no more requests are accepted until the peer answers."""
        return len(self._waiting) >= PEER_REQUESTS.of_connection

    def register(self, on_answer: OnAnswer, deadline: float) -> int:
        """Add a request, unless full; return the opaque to send it with.

        ``deadline`` is a time of the event loop, in seconds.
        """
        return self._waiting.register(on_answer, deadline)

    def answered(self, answer: RemotingCommand) -> None:
        """Pass an answer to the callback of its request, if it is waiting."""
        on_answer = self._waiting.match(answer.opaque)
        if on_answer is not None:
            _call((on_answer,), answer)

    def expire(self, now: float) -> None:
        """Call the callbacks of requests past their deadline with None."""
        _call(self._waiting.expire(now), None)

    def fail(self) -> None:
        """Call all callbacks with None: the connection is lost."""
        _call(self._waiting.fail_all(), None)


class PeerRequestExpiry:
    """The timer that all connections of a server share."""

    def __init__(self) -> None:
        self._watched: set[PeerRequests] = set()
        self._round: Iterator[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        """Number of requests that wait for answers of all peers."""
        return sum(map(len, self._watched))

    def watch(self, requests: PeerRequests, loop: asyncio.AbstractEventLoop) -> None:
        """Expire the requests of a connection at their deadlines."""
        self._watched.add(requests)
        if self._timer is None:
            self._timer = loop.call_later(EXPIRE_SCAN_S, self._scan, loop)

    def _scan(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._round is None:
            self._round = self._expire(loop.time())
        if not Slice().advance(self._round):
            self._timer = loop.call_later(PAUSE_S, self._scan, loop)
            return
        self._round = None
        self._timer = loop.call_later(EXPIRE_SCAN_S, self._scan, loop) if self._watched else None

    def _expire(self, now: float) -> Iterator[None]:
        for requests in list(self._watched):
            requests.expire(now)
            if not len(requests):
                self._watched.discard(requests)
            yield

    def stop(self) -> None:
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _call(waiting: Iterable[OnAnswer], answer: RemotingCommand | None) -> None:
    for on_answer in waiting:
        try:
            on_answer(answer)
        except Exception:
            # A callback that fails must not keep the others from being called.
            logger.exception("event=answer_failed opaque=%s", answer and answer.opaque)
