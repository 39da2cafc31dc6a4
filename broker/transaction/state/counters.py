"""Counters of transaction events since the start."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Transaction events since the start; the field names are names of metrics."""

    prepared: int = 0
    groups: int = 0  # transactions of several messages
    committed: int = 0
    rolled_back: int = 0
    unknown: int = 0  # requests with the decision UNKNOWN
    repeated: int = 0  # decisions that repeat the first one
    refused: int = 0  # decisions that contradict the first one
    decided_by_operators: int = 0
    checks_answered: int = 0
    parked: int = 0
    resumed: int = 0
    expired: int = 0  # undecided when the log deleted them by age
    retention_blocked: int = 0  # times that an undecided half blocked deletion of the log
    prepares_refused: int = 0  # because too many are undecided
    prepares_repeated: int = 0  # answered with the ids of the first
