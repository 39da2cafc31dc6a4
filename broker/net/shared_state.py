"""What all connections of one server share: their number, memory, and turns.

A single read may contain thousands of requests. A connection serves them until its turn is over;
the rest waits for the next pass, in which the other sockets are served first. Hundreds of
connections may have sent so much: large reads of one pass are decoded for as long as a turn, and
the others wait as well.
"""

import asyncio
import itertools
import logging
import resource
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from attrs import define

from ..limits.budget import Budget, Holder
from ..limits.kept import CONNECTIONS, UNFINISHED_BYTES, UNSENT_BYTES
from ..limits.long_answers import LongAnswers
from ..loop.fetches import Fetch
from ..ports import Connection
from .peer_requests import PeerRequestExpiry
from .reply_release import ReplyRelease
from .router import Router

if TYPE_CHECKING:
    from .connection import ClientConnection

logger = logging.getLogger(__name__)

DESCRIPTORS_KEPT: Final = 1_024
"""Descriptors that connections leave to the store, or half of them if the process has fewer than
twice as many: without one, no file of the log can be opened and nothing is acknowledged."""

LARGEST_SHARE: Final = 8
"""An address makes room for others if it has more than one of so many parts of all connections.
A peer with thousands of addresses cannot push out a usual one."""

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


@define(eq=False, repr=False, slots=False)
class SharedState:
    """State shared by all connections of one server."""

    router: Router  # serves requests
    release: ReplyRelease  # writes replies
    fetch: Fetch  # reads bytes that are not in memory, on a thread
    on_closed: Callable[[Connection], None]  # called with each connection that is lost
    # Address of this broker in routes; empty: the one each client reached.
    advertised_host: str = ""
    per_address_max: int = 0  # connections of one address; 0: no limit

    def __attrs_post_init__(self) -> None:
        self.connections: set[ClientConnection] = set()
        self.per_address: Counter[str] = Counter()
        self.connections_max = _connections_max()
        self.refused = 0  # connections, since the last one that was accepted
        self.unserved: Counter[str] = Counter()  # by address: TLS handshakes and what precedes them
        self.opaques = itertools.count(1)
        self.request_expiry = PeerRequestExpiry()
        self.turns = Turns()
        self.reads = 0  # of requests whose senders wait for an answer, or of parts of one
        self.untested_bytes = 0  # read since the last test of the disk limit
        self.other_protocols: set[tuple[str, str]] = set()  # logged: address and protocol
        self.unfinished = Budget(UNFINISHED_BYTES)
        self.unsent = Budget(UNSENT_BYTES, _unsent)
        self.long_answers = LongAnswers()

        self.listen_port = 0  # known when the first listener is bound
        self.stopping = False

    def refuses(self, host: str, peer: str, unserved: int = 0) -> bool:
        """Return whether there are too many connections to accept one more, and log it.

        Args:
            host: Address of the peer.
            peer: Address and port.
            unserved: Connections of this address whose TLS handshake is not complete.
        """
        limit, of_this_address = self.per_address_max, self.per_address[host] + unserved
        is_full = len(self.connections) + self.unserved.total() >= self.connections_max
        has_too_many = limit and of_this_address >= limit
        if is_full and not (self.stopping or has_too_many):
            is_full = not self._largest_address_gives_way(host)
        if not (self.stopping or is_full or has_too_many):
            if self.refused and not is_full:
                logger.warning("event=connections_accepted_again refused=%d", self.refused)
                self.refused = 0
            return False
        self.refused += 1
        if self.refused == 1:
            logger.warning(
                "event=connection_refused peer=%s open=%d of_this_address=%d limit=%d",
                peer,
                len(self.connections),
                of_this_address,
                limit if limit and not is_full else self.connections_max,
            )
        return True

    def _largest_address_gives_way(self, host: str) -> bool:
        """Close a connection of the address that has most; return False if that is ``host``."""
        address = max(self.per_address, key=self.per_address.__getitem__, default=host)
        count = self.per_address[address]
        open_ones = (one for one in self.connections if one.address == address and not one.closed)
        least = max(self.per_address[host] + 1, self.connections_max // LARGEST_SHARE)
        if count <= least or (one := next(open_ones, None)) is None:
            return False
        logger.warning("event=connection_gives_way peer=%s of_this_address=%d", one.name, count)
        one.closed = True  # the transport tells of it in the next pass
        one.abort()
        return True


def _unsent(holder: Holder) -> int:
    return cast("ClientConnection", holder).unsent


def _connections_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS.most
    return min(CONNECTIONS.most, soft - min(DESCRIPTORS_KEPT, soft // 2))
