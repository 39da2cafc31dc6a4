"""The final messages of the latest halves, made ready while their parts are at hand.

Most transactions are decided within milliseconds. Their final message then need not be made from
the half record, which would be read back, checked and taken apart at half the cost of the decision.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from halfmq.store.log.append_request import AppendRequest

BYTES_MAX: Final = 16 << 20
"""Memory for messages that wait for a decision here: what the fastest producers prepare within a
fifth of a second. Older ones are read from the log."""

_OVERHEAD: Final = 500  # bytes of an AppendRequest, its numbers, its key and its place in the map


_GENERATIONS: Final = 16  # one is dropped at once, of some thousand drafts: half a millisecond


class FinalMessageCache:
    """Drafts by the offset of their half, in generations, of which the oldest is dropped."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._generation_max = bytes_max // _GENERATIONS
        self._generations: deque[dict[int, AppendRequest]] = deque(
            [{}], _GENERATIONS
        )  # newest first
        self._left = self._generation_max  # bytes of the newest

    def add(self, offset: int, final: AppendRequest) -> None:
        """Keep the final message of the half at ``offset`` for a while, unless it is very large."""
        size = len(final.body) + len(final.properties) + _OVERHEAD
        if size > self._left:
            if size > self._generation_max:
                return
            self._generations.appendleft({})
            self._left = self._generation_max
        self._left -= size
        self._generations[0][offset] = final

    def take(self, offset: int) -> AppendRequest | None:
        """Return and drop the final message of a half; None when it is kept no more."""
        for generation in self._generations:
            if offset in generation:
                return generation.pop(offset)
        return None
