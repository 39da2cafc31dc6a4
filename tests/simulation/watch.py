"""What must hold at every moment of a run, and not only in the end; see ``invariants``.

* An undecided half is asked about for the first time when its wait is over, in true time, if a
  producer of its group is there to be asked: whatever the clock says, and after a restart as well.
* How often a transaction was asked about is known after a kill, but for the last few seconds.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from halfmq.broker.transaction.state.state_machine import State
from tests.support.broker_parts import tables_of

from .clients import GROUP

if TYPE_CHECKING:
    from halfmq.broker.service import Broker

    from .world import World

LOOK_S: Final = 0.5
"""Time between two looks."""
LATE_S_MAX: Final = 8.0
"""How late a first check may be: a producer may have stopped, or have a link that stalls."""
COUNTS_S: Final = 3.0
"""Age from which on a count survives: the time between two snapshots here, and to write one."""


class Watch:
    """Looks at the undecided transactions of whatever broker there is."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._unasked: dict[int, float] = {}
        """By offset: since when a half could have been asked about, in true time."""
        self._counts: deque[tuple[float, dict[int, int]]] = deque()
        """At each look: how often each transaction had been asked about."""
        world.later(LOOK_S, self._look)

    def _look(self) -> None:
        world = self._world
        world.later(LOOK_S, self._look)
        broker, process = world.broker, world.broker_process
        if broker is None or process is None:
            return
        if process.faulty or process.stopped_until + LOOK_S > world.loop.now:
            self.forget()
            return
        self._look_for_unasked(broker)
        now = world.loop.now
        # The whole table shows in no answer.
        self._counts.append((now, {one.offset: one.checks for one in broker.transactions._table}))
        while len(self._counts) > 1 and self._counts[1][0] <= now - COUNTS_S:
            self._counts.popleft()

    def forget(self) -> None:
        """Begin anew: the broker has ended, or was stopped for a while."""
        self._unasked.clear()
        self._counts.clear()

    def _look_for_unasked(self, broker: Broker) -> None:
        before, self._unasked = self._unasked, {}
        if not tables_of(broker).registry.producers_of(GROUP):
            return
        now = self._world.loop.now
        latest = self._world.scenario.timeout_ms / 1_000 + LATE_S_MAX
        # The whole table shows in no answer.
        for entry in broker.transactions._table:
            if entry.sent or entry.state is State.PARKED:  # it may have become too old first
                continue
            since = before.get(entry.offset, now)
            if now - since > latest:
                self._world.violate(f"the half at {entry.offset} is not asked about")
                since = now + 1e9  # told once
            self._unasked[entry.offset] = since

    def surviving_counts(self) -> dict[int, int]:
        """Return how often transactions had been asked about when the broker is killed now."""
        now = self._world.loop.now
        old = self._counts and self._counts[0][0] <= now - COUNTS_S
        return self._counts[0][1] if old else {}

    def check_counts(self, known: dict[int, int]) -> None:
        """Check that a broker that has just started knows these counts."""
        assert self._world.broker is not None
        # The whole table shows in no answer.
        for entry in self._world.broker.transactions._table:
            wanted = known.get(entry.offset, 0)
            if entry.checks < wanted and entry.offset not in self._world.records.resumed:
                self._world.violate(
                    f"of {wanted} checks about {entry.offset}, {entry.checks} are known"
                )
