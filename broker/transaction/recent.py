"""The final messages of the latest halves, made ready while their parts are at hand.

Most transactions are decided within milliseconds. Their final message then need not be made from
the half record, which would be read back, checked and taken apart at half the cost of the decision.
"""

from __future__ import annotations

from typing import Final

from halfmq.store.draft import Draft

BYTES_MAX: Final = 16 << 20
"""Memory for messages that wait for a decision here: what the fastest producers prepare within a
fifth of a second. Older ones are read from the log."""

_OVERHEAD: Final = 500  # bytes of a Draft, its numbers, its key and its place in the map


class RecentFinals:
    """Drafts by the offset of their half, in two generations, so that dropping costs nothing."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._generation_max = bytes_max // 2
        self._young: dict[int, Draft] = {}
        self._old: dict[int, Draft] = {}
        self._young_bytes = 0

    def add(self, offset: int, final: Draft) -> None:
        """Keep the final message of the half at ``offset`` for a while."""
        self._young[offset] = final
        self._young_bytes += len(final.body) + len(final.properties) + _OVERHEAD
        if self._young_bytes > self._generation_max:
            self._old, self._young, self._young_bytes = self._young, {}, 0

    def take(self, offset: int) -> Draft | None:
        """Return and drop the final message of a half; None when it is kept no more."""
        final = self._young.pop(offset, None)
        return self._old.pop(offset, None) if final is None else final
