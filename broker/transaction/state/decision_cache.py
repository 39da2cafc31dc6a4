"""The latest decisions, to answer repeated requests; older ones are looked up in the log."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from .bounded_map import Generations
from .state_machine import State

DECIDED_REMEMBERED: Final = 100_000
"""Decisions kept: several seconds on the fastest machine, within which a client repeats a request
whose answer was lost. About 150 bytes each."""

_COMMITTED: Final = State.COMMITTED  # looking a member up in its class is a tenth of a microsecond


class RecordedDecision(NamedTuple):
    """How a transaction ended."""

    state: State  # COMMITTED or ROLLED_BACK
    position: int  # physical offset of the record that decided it


class DecisionCache:
    """A bounded cache of the latest decisions."""

    def __init__(self, limit: int = DECIDED_REMEMBERED) -> None:
        self._latest = Generations(limit)
        # ``newest_final`` at the end of each generation except the newest; oldest first.
        self._finals: deque[int] = deque(maxlen=limit // self._latest.limit)
        self.newest_final = 0
        self.forgotten_final = 0  # all finals at higher log positions are cached

    def __contains__(self, offset: int) -> bool:
        return self._latest.get(offset) is not None

    def clear(self) -> None:
        """Remove all decisions."""
        self._latest.clear()
        self._finals.clear()
        self.newest_final = self.forgotten_final = 0

    def assume_forgotten(self, newest_final: int) -> None:
        """Start with an empty cache: finals up to this log position are not in it."""
        self.newest_final = self.forgotten_final = newest_final

    def add(self, offset: int, state: State, position: int) -> None:
        """Add a decision; ``position`` is the log position of the record that decided."""
        if state is _COMMITTED:
            self.newest_final = position
        if self._latest.put(offset, position << 2 | state):
            finals = self._finals
            if len(finals) == finals.maxlen:
                self.forgotten_final = finals[0]
            finals.append(self.newest_final)

    def find(self, offset: int) -> RecordedDecision | None:
        """Return the decision; None if it is not cached."""
        packed = self._latest.get(offset)
        return None if packed is None else RecordedDecision(State(packed & 3), packed >> 2)
