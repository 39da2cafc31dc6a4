"""Invariants that must hold during a run; see ``invariants`` for those at its end.

* The first check of an undecided half is sent when its wait is over, in true time, if a producer of
  its group is connected: whatever the clock says, and also after a restart.
* After a kill, the number of checks of a transaction is known, except for the last few seconds.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from halfmq.broker.transaction.state.state_machine import State
from tests.support.broker_parts import pending_of, tables_of

from .clients import GROUP

if TYPE_CHECKING:
    from halfmq.broker.service import Broker

    from .world import World

INTERVAL_S: Final = 0.5
"""Time between two inspections."""
LATE_S_MAX: Final = 8.0
"""How late a first check may be: a producer may have stopped, or have a link that stalls."""
COUNTS_S: Final = 3.0
"""Age from which on a count survives: the time between two snapshots here, and to write one."""


class Watch:
    """Inspects the undecided transactions of the current broker."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._unchecked: dict[int, float] = {}
        """By offset: since when the first check of a half could be sent, in true time."""
        self._counts: deque[tuple[float, dict[int, int]]] = deque()
        """At each inspection: the number of checks of each transaction."""
        world.later(INTERVAL_S, self._inspect)

    def _inspect(self) -> None:
        world = self._world
        world.later(INTERVAL_S, self._inspect)
        broker, process = world.broker, world.broker_process
        if broker is None or process is None:
            return
        if process.faulty or process.stopped_until + INTERVAL_S > world.loop.now:
            self.forget()
            return
        self._find_unchecked(broker)
        now = world.loop.now
        self._counts.append((now, {one.offset: one.checks for one in pending_of(broker)}))
        while len(self._counts) > 1 and self._counts[1][0] <= now - COUNTS_S:
            self._counts.popleft()

    def forget(self) -> None:
        """Start again: the broker has ended, or was suspended."""
        self._unchecked.clear()
        self._counts.clear()

    def _find_unchecked(self, broker: Broker) -> None:
        before, self._unchecked = self._unchecked, {}
        if not tables_of(broker).registry.producers_of(GROUP):
            return
        now = self._world.loop.now
        latest = self._world.scenario.timeout_ms / 1_000 + LATE_S_MAX
        for entry in pending_of(broker):
            if entry.sent or entry.state is State.PARKED:  # it may have become too old first
                continue
            since = before.get(entry.offset, now)
            if now - since > latest:
                self._world.violate(f"no check is sent for the half at {entry.offset}")
                since = now + 1e9  # reported once
            self._unchecked[entry.offset] = since

    def surviving_counts(self) -> dict[int, int]:
        """Return the counts of checks that must survive a kill now."""
        now = self._world.loop.now
        old = self._counts and self._counts[0][0] <= now - COUNTS_S
        return self._counts[0][1] if old else {}

    def check_counts(self, known: dict[int, int]) -> None:
        """Check that a broker that has just started knows these counts."""
        assert self._world.broker is not None
        for entry in pending_of(self._world.broker):
            wanted = known.get(entry.offset, 0)
            if entry.checks < wanted and entry.offset not in self._world.records.resumed:
                self._world.violate(
                    f"of {wanted} checks about {entry.offset}, {entry.checks} are known"
                )
