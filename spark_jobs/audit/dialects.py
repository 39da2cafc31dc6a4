"""Which parts of a log halfmq wrote, and which Apache RocketMQ: only one records its rollbacks.

One directory can be served by both in turn, so a log may change its dialect at any record. Each
broker leaves marks that the other never writes:

* halfmq: rollback and resume records, parked copies that link to their half, final messages with
  the property ``TRANSACTION_HALF_ID``;
* RocketMQ: copies with ``TRANSACTION_CHECK_TIMES``, parked copies without a link, final messages
  without that property.

A part of the log is halfmq's when no mark of RocketMQ lies in it. What lies between marks of
different brokers may be either's, and counts as RocketMQ's, where an op can be a rollback. Where no
final message at all has the property, its absence marks none, and the log counts as halfmq's from
the first of its marks on.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

END: Final = 1 << 62  # beyond every physical offset


class Mark(NamedTuple):
    """The physical offset of a record that only one of the brokers writes."""

    offset: int
    is_ours: bool
    is_final: bool = False  # a final message with TRANSACTION_HALF_ID, or without it


def recorded_rollbacks(marks: Iterable[Mark]) -> tuple[tuple[int, int], ...]:
    """Return the ranges in which rollbacks are records; of each run its ends are enough.

    Without any mark the log counts as RocketMQ's.
    """
    ranges: list[tuple[int, int]] = []
    start: int | None = None
    last: Mark | None = None
    known = sorted(marks)
    told_by_finals = any(mark.is_final and mark.is_ours for mark in known)
    if not told_by_finals:
        known = [mark for mark in known if not mark.is_final]
    for mark in known:
        if mark.is_ours and start is None:
            start = 0 if last is None and told_by_finals else mark.offset
        elif not mark.is_ours and start is not None:
            assert last is not None
            ranges.append((start, last.offset + 1))
            start = None
        last = mark
    if start is not None:
        ranges.append((start, END))
    return tuple(ranges)
