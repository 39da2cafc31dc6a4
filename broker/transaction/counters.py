"""What has happened to transactions since the start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Events since the start."""

    prepared: int = 0
    groups: int = 0  # transactions of several messages
    committed: int = 0
    rolled_back: int = 0
    unknown: int = 0  # decisions that said "not known yet"
    repeated: int = 0  # decisions that had been taken before
    refused: int = 0  # decisions opposite to the first one
    decided_by_operators: int = 0
    checks_answered: int = 0
    parked: int = 0
    resumed: int = 0
    expired: int = 0  # undecided when the log deleted them by age
    retention_blocked: int = 0  # times that an undecided half kept the log from being deleted
    prepares_refused: int = 0  # because too many are undecided
    twins: int = 0  # halves that came again and were answered with the ids of the first
