"""What a query's conditions say about which part of a log it needs.

Spark tells a source the conditions that are joined by AND, and evaluates all of them again: it is
enough to leave out what surely does not matter. Spark asks only with the setting ``ENABLED``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from ..log.log_end import RECORD_SIZE_MAX
from .options import LogOptions, ReadOptions

ENABLED: Final = "spark.sql.python.filterPushdown.enabled"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_Options = TypeVar("_Options", bound=LogOptions)


def narrowed(options: _Options, filters: Iterable[Filter]) -> _Options:
    """Limit a read to what some conditions on offset, time and topic leave."""
    for condition in filters:
        (name, *nested) = getattr(condition, "attribute", ("",))
        column = "" if nested else name.lower()
        limits: dict[str, Any] = {}
        if column == "topic" and isinstance(options, ReadOptions):
            limits = _topics(options, condition)
        for low, high in _bounds(condition):
            if column == "physicaloffset":
                limits = _offsets(options, low, high)
            elif column == "timestamp" and isinstance(options, ReadOptions):
                limits = _times(options, low, high)
        options = replace(options, **limits)
    return options


def _bounds(condition: Filter) -> Iterator[tuple[Any, Any]]:
    """Yield the lowest and the highest value that a condition leaves; None is no limit."""
    match condition:
        case EqualTo(value=value):
            yield value, value
        case In(value=values) if values:
            yield min(values), max(values)
        case GreaterThan(value=value) | GreaterThanOrEqual(value=value):
            yield value, None
        case LessThan(value=value) | LessThanOrEqual(value=value):
            yield None, value


def _offsets(options: LogOptions, low: int | None, high: int | None) -> dict[str, Any]:
    start, end = options.starting_offsets or 0, options.ending_offsets
    if low is not None:
        # A damaged range belongs to the record before it, which is therefore read too.
        start = max(start, low - RECORD_SIZE_MAX)
    if high is not None:
        end = high + 1 if end is None else min(end, high + 1)
    return {"starting_offsets": start or None, "ending_offsets": end}


def _times(options: ReadOptions, low: datetime | None, high: datetime | None) -> dict[str, Any]:
    start, end = options.starting_timestamp, options.ending_timestamp
    if low is not None:
        start = max(start or 0, _ms(low))
    if high is not None:
        end = _ms(high) + 1 if end is None else min(end, _ms(high) + 1)
    return {"starting_timestamp": start, "ending_timestamp": end}


def _ms(time: datetime) -> int:
    time = time if time.tzinfo else time.replace(tzinfo=UTC)
    return (time - _EPOCH) // timedelta(milliseconds=1)


def _topics(options: ReadOptions, condition: Filter) -> dict[str, Any]:
    match condition:
        case EqualTo(value=str() as topic):
            wanted = frozenset({topic})
        case In(value=topics):
            wanted = frozenset(topics)
        case _:
            return {}
    given = options.subscribe
    return {"subscribe": wanted if given is None else given & wanted}
