"""Transactions counted over time and by age: a few hundred numbers, however long the log is.

The driver divides the time that the log covers into at most ``BINS_MAX`` intervals; each bucket of
families counts into them, and the counts add up. So a chart costs no second look at the log, and no
transaction becomes a row for it.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from ..log.arrays import Ints
from .judge import State

BINS_MAX: Final = 60  # intervals: as many as can be told apart on a phone
SHOWN: Final = (State.COMMITTED, State.ROLLED_BACK, State.PARKED, State.PENDING)
OPEN: Final = (State.PENDING, State.PARKED)  # nobody has decided

_SECOND: Final = 1_000  # ms
_MINUTE: Final = 60 * _SECOND
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR
AGES_MS: Final = (_MINUTE, 10 * _MINUTE, _HOUR, 6 * _HOUR, _DAY, 7 * _DAY)  # upper bounds
_PLACES: Final = {state: place for place, state in enumerate(State)}

# Widths that people count in; each divides the day, or is some of them.
_WIDTHS_MS: Final = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
    *(_SECOND * n for n in (1, 2, 5, 10, 15, 30)),
    *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 7, 14, 28)),
)


class Scale(NamedTuple):
    """How time is divided; intervals begin at multiples of their width."""

    start_ms: int = 0
    width_ms: int = 1
    bins: int = 1
    now_ms: int = 0  # ages count up to here


NO_SCALE: Final = Scale()


class Timeline(NamedTuple):
    """What became of transactions, by when they were prepared, and when decisions came.

    What lies outside, because a clock was wrong, counts for the first or the last interval.
    """

    start_ms: int
    width_ms: int
    prepared: dict[str, list[int]]  # by State, one number per interval
    decided: list[int]  # of these transactions, one number per interval

    @property
    def undecided(self) -> list[int]:
        """How many were undecided at the end of each interval."""
        arrived = np.sum(list(self.prepared.values()), axis=0)
        waiting: list[int] = np.cumsum(arrived - np.array(self.decided)).tolist()
        return waiting


class OpenAges(NamedTuple):
    """Undecided transactions by age; the last of the counts has no upper bound."""

    bounds_ms: tuple[int, ...]
    counts: dict[str, list[int]]  # by State


def scale(begin_ms: int, end_ms: int, now_ms: int) -> Scale:
    """Divide the time from the first to the last record."""
    end_ms = max(begin_ms, end_ms)
    widths = [width for width in _WIDTHS_MS if end_ms // width - begin_ms // width < BINS_MAX]
    width = widths[0] if widths else _whole_days(end_ms - begin_ms)
    first = begin_ms // width
    return Scale(first * width, width, end_ms // width - first + 1, now_ms)


def _whole_days(span_ms: int) -> int:
    return -(-span_ms // ((BINS_MAX - 1) * _DAY)) * _DAY


def counted(states: Ints, prepared_ms: Ints, decided_ms: Ints, on: Scale) -> bytes:
    """Count transactions and return the packed counts.

    ``states`` are places in ``State``; ``decided_ms`` below 0 means not decided, and a transaction
    with ``prepared_ms`` below 0, whose half is not in the log, is left out.
    """
    known = prepared_ms >= 0
    states, prepared_ms, decided_ms = states[known], prepared_ms[known], decided_ms[known]
    intervals = _intervals(prepared_ms, on)
    ages = np.searchsorted(AGES_MS, on.now_ms - prepared_ms, side="right")
    rows = [np.bincount(intervals[states == _PLACES[state]], minlength=on.bins) for state in SHOWN]
    rows.append(np.bincount(_intervals(decided_ms[decided_ms >= 0], on), minlength=on.bins))
    rows += [
        np.bincount(ages[states == _PLACES[state]], minlength=len(AGES_MS) + 1) for state in OPEN
    ]
    return np.concatenate(rows).astype(np.int64).tobytes()


def merged(packed: Iterable[bytes], on: Scale) -> tuple[Timeline, OpenAges]:
    """Add up what ``counted`` returned."""
    sizes = [on.bins] * (len(SHOWN) + 1) + [len(AGES_MS) + 1] * len(OPEN)
    total = np.zeros(sum(sizes), dtype=np.int64)
    for one in packed:
        total += np.frombuffer(one, dtype=np.int64)
    rows = [row.tolist() for row in np.split(total, np.cumsum(sizes)[:-1])]
    prepared = dict(zip(map(str, SHOWN), rows, strict=False))
    ages = dict(zip(map(str, OPEN), rows[len(SHOWN) + 1 :], strict=True))
    timeline = Timeline(on.start_ms, on.width_ms, prepared, rows[len(SHOWN)])
    return timeline, OpenAges(AGES_MS, ages)


def _intervals(times_ms: Ints, on: Scale) -> Ints:
    intervals: Ints = np.clip((times_ms - on.start_ms) // on.width_ms, 0, on.bins - 1)
    return intervals
