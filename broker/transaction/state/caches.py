"""The latest decisions, to answer repeated requests, and the final messages of the latest halves.

Both evict the oldest entries a generation at a time: growing or freeing a dictionary of a hundred
thousand entries takes up to five milliseconds, so there are several small ones. Older decisions are
looked up in the log.
"""

from collections import deque
from typing import Final, NamedTuple

from halfmq.store.log.append_request import AppendRequest

from ...limits.kept import FINAL_MESSAGE_BYTES
from .state_machine import State

GENERATION_MAX: Final = 20_000
"""Entries of a generation: a dictionary of 32,768 slots takes a millisecond to grow or to free."""


class Generations:
    """A map of integers: at least the latest ``limit`` entries, at most one generation more."""

    __slots__ = ("limit", "maps")

    def __init__(self, limit: int) -> None:
        self.limit = min(limit, GENERATION_MAX)  # of one generation
        self.maps: deque[dict[int, int]] = deque([{}], limit // self.limit + 1)  # newest first

    def __len__(self) -> int:
        return sum(map(len, self.maps))

    def put(self, key: int, value: int) -> bool:
        """Set a value; return whether it completes a generation, so that a new one begins."""
        young = self.maps[0]
        young[key] = value
        if len(young) < self.limit:
            return False
        self.maps.appendleft({})
        return True

    def get(self, key: int) -> int | None:
        """Return the latest value; None if it was evicted or never set."""
        for known in self.maps:
            if key in known:
                return known[key]
        return None

    def clear(self) -> None:
        self.maps.clear()
        self.maps.append({})


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
        packed = self._latest.get(offset)
        return None if packed is None else RecordedDecision(State(packed & 3), packed >> 2)


_OVERHEAD: Final = 500  # bytes of an AppendRequest, its numbers, its key and its slot in the map


_GENERATIONS: Final = 16  # dropping one, with some thousand messages, takes half a millisecond


class FinalMessageCache:
    """Final messages by the offset of their half, built when the half is appended.

    Most transactions are decided within milliseconds. Reading, checking and parsing the half record
    to build the final message would take half the time of the decision.
    """

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
        for generation in self._generations:
            if offset in generation:
                return generation.pop(offset)
        return None
