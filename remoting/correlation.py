"""Correlation: which waiting request does this response answer?

Only the opaque number ties a response to its request, and answers come in any order. A connection
keeps one of these; what a request is waiting with (a future, a callback) is the caller's business,
so nothing here completes anything: every method only hands values back.

Deadlines are looked at in one pass over all waiting requests, and only once the earliest of them
can have passed: nearly every request is answered long before, so ordering them would be work for
nothing.
"""

from __future__ import annotations

from math import inf
from typing import Final, Generic, TypeVar

from .codes import INT32_MAX
from .errors import TooManyRequestsError

T = TypeVar("T")

WAITING_MAX: Final = 65_535
"""Requests waiting on one connection. Source: RocketMQ ``NettySystemConfig``, async and one-way."""


class Correlation(Generic[T]):
    """The waiting requests of one connection; one thread or event loop at a time."""

    def __init__(self, *, waiting_max: int = WAITING_MAX, first_opaque: int = 0) -> None:
        self._waiting: dict[int, tuple[T, float]] = {}
        self._waiting_max = waiting_max
        self._next = first_opaque
        self._earliest = inf

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next_deadline(self) -> float:
        """No request expires before this; infinite when none is waiting."""
        return self._earliest

    def register(self, value: T, deadline: float) -> int:
        """Return the opaque under which to send a request, unique among those waiting.

        Raises:
            TooManyRequestsError: Take no more requests until some are answered.
        """
        waiting = self._waiting
        if len(waiting) >= self._waiting_max:
            raise TooManyRequestsError(self._waiting_max)
        opaque = self._next
        while opaque in waiting:  # after 2^31 requests the numbers start again
            opaque = (opaque + 1) & INT32_MAX
        self._next = (opaque + 1) & INT32_MAX
        waiting[opaque] = (value, deadline)
        self._earliest = min(self._earliest, deadline)
        return opaque

    def match(self, opaque: int) -> T | None:
        """Return what waited under this opaque and forget it; None if nothing did.

        An answer that comes after its request expired matches nothing: drop it.
        """
        entry = self._waiting.pop(opaque, None)
        return None if entry is None else entry[0]

    def expire(self, now: float) -> list[T]:
        """Return and forget what has waited until its deadline, in the order registered."""
        if now < self._earliest:
            return []
        late = [opaque for opaque, (_, deadline) in self._waiting.items() if deadline <= now]
        values = [self._waiting.pop(opaque)[0] for opaque in late]
        self._earliest = min((deadline for _, deadline in self._waiting.values()), default=inf)
        return values

    def fail_all(self) -> list[T]:
        """Return and forget everything that waits: the connection is lost."""
        values = [value for value, _ in self._waiting.values()]
        self._waiting.clear()
        self._earliest = inf
        return values
