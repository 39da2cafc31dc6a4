"""How long decisions took, and how many transactions there were when: aggregates for a report.

The driver divides the time that the log covers into at most ``BINS_MAX`` intervals, so that a chart
is a few hundred numbers, however long the log is. ``transactions`` have the columns
``key_groups.TRANSACTION_COLUMNS``.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from ..log.lookup import Names
from ..times import DAY, HOUR, MINUTE, SECOND
from .rules.model import AuditedState

BINS_MAX: Final = 60  # intervals: as many as can be told apart on a phone
SHOWN: Final = (
    AuditedState.COMMITTED,
    AuditedState.ROLLED_BACK,
    AuditedState.PARKED,
    AuditedState.PENDING,
)
OPEN: Final = (AuditedState.PENDING, AuditedState.PARKED)  # nobody has decided
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_ACCURACY: Final = 10_000  # ranks are off by at most one in so many
AGES_MS: Final = (MINUTE, 10 * MINUTE, HOUR, 6 * HOUR, DAY, 7 * DAY)  # upper bounds

# Widths that people count in; each divides the day, or is some of them.
_WIDTHS_MS: Final = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
    *(SECOND * n for n in (1, 2, 5, 10, 15, 30)),
    *(MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(HOUR * n for n in (1, 2, 3, 6, 12)),
    *(DAY * n for n in (1, 2, 7, 14, 28)),
)


class Delays(NamedTuple):
    """How long decisions took in one topic for one producer group, and how often it was asked."""

    producer_group: str
    topic: str
    decided: int
    took_ms: dict[str, int]  # by the names of PERCENTILES
    prepared: int
    checks: dict[str, int]


class Scale(NamedTuple):
    """How time is divided; intervals begin at multiples of their width."""

    start_ms: int = 0
    width_ms: int = 1
    bins: int = 1
    now_ms: int = 0  # ages count up to here


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


class Counts(NamedTuple):
    """Transactions by state, over time, and by age."""

    states: Counter[str]
    timeline: Timeline
    open_ages: OpenAges


def scale(begin_ms: int, end_ms: int, now_ms: int) -> Scale:
    """Divide the time from the first to the last record."""
    end_ms = max(begin_ms, end_ms)
    widths = [width for width in _WIDTHS_MS if end_ms // width - begin_ms // width < BINS_MAX]
    width = widths[0] if widths else _whole_days(end_ms - begin_ms)
    first = begin_ms // width
    return Scale(first * width, width, end_ms // width - first + 1, now_ms)


def _whole_days(span_ms: int) -> int:
    return -(-span_ms // ((BINS_MAX - 1) * DAY)) * DAY


def tally(transactions: DataFrame, on: Scale) -> list[Row]:
    """Count transactions by state, by interval of preparation and of decision, and by age."""
    age = F.lit(on.now_ms) - F.col("time")
    younger = [(age < bound, place) for place, bound in enumerate(AGES_MS)]
    age_class = F.lit(len(AGES_MS))
    for is_younger, place in reversed(younger):
        age_class = F.when(is_younger, place).otherwise(age_class)
    is_open = F.col("state").isin(*(str(state) for state in OPEN))
    return (
        transactions.groupBy(
            "state",
            _interval(F.col("time"), on).alias("prepared"),
            _interval(F.col("time") + F.col("took"), on).alias("decided"),
            F.when(is_open, age_class).alias("age"),
        )
        .count()
        .collect()
    )


def counted(rows: Iterable[Row], on: Scale) -> Counts:
    """Add up what ``tally`` says; a transaction without a half counts for its state alone."""
    states: Counter[str] = Counter()
    prepared = {str(state): [0] * on.bins for state in SHOWN}
    decided = [0] * on.bins
    ages = {str(state): [0] * (len(AGES_MS) + 1) for state in OPEN}
    for state, when, until, place, count in rows:
        if state is None:
            continue
        states[state] += count
        if when is None:
            continue
        if state in prepared:
            prepared[state][when] += count
        if until is not None:
            decided[until] += count
        if place is not None:
            ages[state][place] += count
    timeline = Timeline(on.start_ms, on.width_ms, prepared, decided)
    return Counts(states, timeline, OpenAges(AGES_MS, ages))


def _interval(time: Column, on: Scale) -> Column:
    place = F.floor((time - on.start_ms) / on.width_ms)
    # What ``greatest`` and ``least`` return of a null is the other one.
    return F.when(time.isNotNull(), F.greatest(F.lit(0), F.least(place, F.lit(on.bins - 1))))


def delays(transactions: DataFrame, names: Callable[[int], Names]) -> list[Delays]:
    """Tell of each producer group and topic how decisions went; ``names`` look at a half."""
    fractions = list(PERCENTILES.values())
    rows = (
        transactions.where("half is not null and label is not null")
        .groupBy("label")
        .agg(
            F.min("half"),
            F.count("took"),
            F.percentile_approx(F.greatest("took", F.lit(0)), fractions, _ACCURACY),
            F.count("*"),
            F.percentile_approx("checks", fractions, _ACCURACY),
        )
        .collect()
    )
    found = [
        Delays(of.group or "", of.topic or "", decided, _named(took), prepared, _named(checks))
        for of, decided, took, prepared, checks in (
            (names(half), *numbers) for _, half, *numbers in rows
        )
    ]
    return sorted(found, key=lambda delays: delays[:2])


def _named(percentiles: list[int] | None) -> dict[str, int]:
    return dict(zip(PERCENTILES, percentiles or (), strict=False))
