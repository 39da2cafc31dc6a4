"""What a query's filters say about which part of a log it needs.

With ``filterPushdown=true`` Spark hands the filters of a query to the source before it plans tasks.
Those on ``physicalOffset`` and ``timestamp`` choose what is read; Spark applies all of them again,
so that reading a little too much does no harm.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from ..datasource import CommitLogReader, in_times, plan_partitions
from ..log.segments import RECORD_SIZE_MAX, survey
from .options import ReadOptions

OFFSET: Final = ("physicalOffset",)
TIME: Final = ("timestamp",)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class PushdownCommitLogReader(CommitLogReader):
    """Reads what the filters of the query leave.

    Spark refuses such a reader unless ``spark.sql.python.filterPushdown.enabled`` is true.
    """

    _times: ReadOptions | None = None  # what filters say of times; rows are filtered by Spark

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        self._options = with_offsets(self._options, filters)
        self._times = with_times(self._options, filters)
        return filters

    def partitions(self) -> list[InputPartition]:
        extent = survey(self._options.path, memory_map=self._options.memory_map)
        chosen = in_times(extent, self._times or self._options)
        return list(plan_partitions(extent, self._options, chosen=chosen))


def with_offsets(options: ReadOptions, filters: Iterable[Filter]) -> ReadOptions:
    """Limit a read to the physical offsets that filters ask for."""
    low, high = _bounds(filters, OFFSET)
    first, last = options.starting_offsets or 0, options.ending_offsets
    if isinstance(low, int):
        # A corrupt range is found from the record in front of it.
        first = max(first, low - RECORD_SIZE_MAX)
    if isinstance(high, int):
        last = high + 1 if last is None else min(last, high + 1)
    return replace(options, starting_offsets=first or None, ending_offsets=last)


def with_times(options: ReadOptions, filters: Iterable[Filter]) -> ReadOptions:
    """Limit a read to the times that filters ask for."""
    low, high = _bounds(filters, TIME)
    first, last = options.starting_timestamp, options.ending_timestamp
    if isinstance(low, datetime) and low.tzinfo is not None:
        first = max((low - _EPOCH) // _MILLISECOND, first or 0)
    if isinstance(high, datetime) and high.tzinfo is not None:
        end = (high - _EPOCH) // _MILLISECOND + 1
        last = end if last is None else min(last, end)
    return replace(options, starting_timestamp=first, ending_timestamp=last)


def _bounds(filters: Iterable[Filter], column: tuple[str, ...]) -> tuple[object, object]:
    """Return the highest lower and the lowest upper bound of a column, both inclusive or wider."""
    low: list[object] = []
    high: list[object] = []
    for one in filters:
        if getattr(one, "attribute", None) != column:
            continue
        if isinstance(one, EqualTo | GreaterThan | GreaterThanOrEqual):
            low.append(one.value)
        if isinstance(one, EqualTo | LessThan | LessThanOrEqual):
            high.append(one.value)
    return max(low, default=None), min(high, default=None)  # type: ignore[type-var]
