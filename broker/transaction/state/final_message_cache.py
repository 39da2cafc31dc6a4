"""A cache of the final messages of the latest halves, built when the half is appended.

Most transactions are decided within milliseconds. Reading, checking and parsing the half record to
build the final message would take half the time of the decision.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from halfmq.store.log.append_request import AppendRequest

from ...limits.kept import FINAL_MESSAGE_BYTES

_OVERHEAD: Final = 500  # bytes of an AppendRequest, its numbers, its key and its slot in the map


_GENERATIONS: Final = 16  # dropping one, with some thousand messages, takes half a millisecond


class FinalMessageCache:
    """Final messages by the offset of their half; evicts the oldest generation when full."""

    def __init__(self, bytes_max: int = FINAL_MESSAGE_BYTES.most) -> None:
        self._generation_max = bytes_max // _GENERATIONS
        self._generations: deque[dict[int, AppendRequest]] = deque(
            [{}], _GENERATIONS
        )  # newest first
        self._left = self._generation_max  # bytes of the newest

    @property
    def bytes(self) -> int:
        """Bytes of the messages added to the generations that are kept."""
        return self._generation_max * len(self._generations) - self._left

    def add(self, offset: int, final: AppendRequest) -> None:
        """Add the final message of the half at ``offset``, unless it exceeds a whole generation."""
        size = len(final.body) + len(final.properties) + _OVERHEAD
        if size > self._left:
            if size > self._generation_max:
                return
            self._generations.appendleft({})
            self._left = self._generation_max
        self._left -= size
        self._generations[0][offset] = final

    def pop(self, offset: int) -> AppendRequest | None:
        """Remove and return the final message of a half; None if it is not cached."""
        for generation in self._generations:
            if offset in generation:
                return generation.pop(offset)
        return None
