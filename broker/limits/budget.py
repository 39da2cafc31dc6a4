"""A number of bytes that all connections share, of which the largest holder ends first."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

from .kept import Limit

logger = logging.getLogger(__name__)

_LEFT: Final = 7 / 8
"""Share of the limit that is left when connections have been ended, so that this is rare."""


class Holder(Protocol):
    """A connection."""

    name: str

    @property
    def address(self) -> str:
        """The address of the peer, without its port."""
        ...

    def abort(self) -> None: ...


class Budget:
    """Counts the bytes that connections hold.

    Sizes may be reported late when they shrink: before anyone is ended, all are measured again. The
    address that holds most ends first, with its largest connection, so that a thousand small
    holders do not push out one that is larger.
    """

    def __init__(self, limit: Limit, measure: Callable[[Holder], int] | None = None) -> None:
        """Wire it; ``measure`` returns the bytes of a connection now, None if reports are exact."""
        self.used = 0
        self._limit = limit
        self._held: dict[Holder, int] = {}
        self._measure = measure or self._held_by

    def hold(self, holder: Holder, size: int) -> None:
        """Set the bytes of a connection, 0 when it is closed; end connections if all have too many.

        A connection may be ended by its own call.
        """
        held = self._held
        if size:
            self.used += size - held.get(holder, 0)
            held[holder] = size
        else:
            self.used -= held.pop(holder, 0)
        if self.used > self._limit.most:
            self._make_room()

    def held(self, holder: Holder) -> int:
        """Return the bytes of a connection, as last reported."""
        return self._held.get(holder, 0)

    def recount(self) -> int:
        """Measure all connections; return the sum."""
        sizes = {holder: self._measure(holder) for holder in self._held}
        self._held = {holder: size for holder, size in sizes.items() if size}
        self.used = sum(self._held.values())
        return self.used

    def _held_by(self, holder: Holder) -> int:
        return self._held[holder]

    def _make_room(self) -> None:
        if self.recount() <= self._limit.most:
            return
        of_address: Counter[str] = Counter()
        for holder, size in self._held.items():
            of_address[holder.address] += size
        while self.used > self._limit.most * _LEFT:
            address = max(of_address, key=of_address.__getitem__)
            ours = (one for one in self._held if one.address == address)
            largest = max(ours, key=self._held.__getitem__)
            size = self._held.pop(largest)
            self.used -= size
            of_address[address] -= size
            logger.warning(
                "event=largest_holder_closed limit=%s peer=%s bytes=%d all_bytes=%d most=%d",
                *(self._limit.name, largest.name, size, self.used + size, self._limit.most),
            )
            largest.abort()
