"""Correlation: match responses to the requests in flight on one connection.

A response repeats the request id (opaque) of its request; responses arrive in any order. The caller
registers a value with each request, such as a future or a callback. Methods only return these
values and complete nothing.

Deadlines are checked in one pass over all requests in flight, and only once the earliest may have
passed. Nearly every request is answered long before its deadline, so keeping them sorted would be
wasted work.
"""

from math import inf
from typing import Final, Generic, TypeVar

from .codes import INT32_MAX
from .errors import TooManyRequestsError

T = TypeVar("T")

IN_FLIGHT_MAX: Final = 65_535
"""Requests in flight on one connection. Source: RocketMQ ``NettySystemConfig``."""


class Correlation(Generic[T]):
    """The requests in flight on one connection; for use by one thread or event loop."""

    def __init__(self, *, in_flight_max: int = IN_FLIGHT_MAX, first_opaque: int = 0) -> None:
        self._in_flight: dict[int, tuple[T, float]] = {}
        self._in_flight_max = in_flight_max
        self._next = first_opaque
        self._earliest = inf  # no request expires before this

    def __len__(self) -> int:
        return len(self._in_flight)

    def register(self, value: T, deadline: float) -> int:
        """Return the opaque with which to send a request, unique among those in flight.

        Raises:
            TooManyRequestsError: The limit is reached; wait until some are answered.
        """
        in_flight = self._in_flight
        if len(in_flight) >= self._in_flight_max:
            raise TooManyRequestsError(self._in_flight_max)
        opaque = self._next
        while opaque in in_flight:  # after 2^31 requests the numbers start again
            opaque = (opaque + 1) & INT32_MAX
        self._next = (opaque + 1) & INT32_MAX
        in_flight[opaque] = (value, deadline)
        self._earliest = min(self._earliest, deadline)
        return opaque

    def match(self, opaque: int) -> T | None:
        """Remove the request with this opaque and return its value; None if there is none.

        A response that arrives after its request expired matches nothing: drop it.
        """
        entry = self._in_flight.pop(opaque, None)
        return None if entry is None else entry[0]

    def values(self) -> list[T]:
        return [value for value, _ in self._in_flight.values()]

    def expire(self, now: float) -> list[T]:
        """Remove the requests whose deadline has passed; return their values as registered."""
        if now < self._earliest:
            return []
        late = [opaque for opaque, (_, deadline) in self._in_flight.items() if deadline <= now]
        values = [self._in_flight.pop(opaque)[0] for opaque in late]
        self._earliest = min((deadline for _, deadline in self._in_flight.values()), default=inf)
        return values

    def fail_all(self) -> list[T]:
        """Remove all requests and return their values, after the connection was lost."""
        values = self.values()
        self._in_flight.clear()
        self._earliest = inf
        return values
