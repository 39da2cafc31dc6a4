"""Decimal numbers in texts, read many at once."""

from typing import Final, NamedTuple

import numpy as np

from .arrays import Bools, Bytes, Ints

DIGITS_MAX: Final = 18  # more may not fit in 64 bits
_COMMA: Final = ord(",")
_ZERO: Final = ord("0")


class Numbers(NamedTuple):
    """What stood at some places; a value means something only where a number stood."""

    values: Ints
    is_number: Bools


class Listed(NamedTuple):
    """All entries of some comma-separated lists."""

    rows: Ints  # of which list each is
    values: Ints
    is_number: Bools


def numbers_at(data: Bytes, starts: Ints, ends: Ints) -> Numbers:
    """Read the texts [start, end) as numbers of one to 18 digits."""
    sizes = ends - starts
    values = np.zeros(len(starts), dtype=np.int64)
    right = (sizes > 0) & (sizes <= DIGITS_MAX)
    for place in range(int(sizes[right].max(initial=0))):
        here = np.flatnonzero(right & (place < sizes))
        digits = data[starts[here] + place].astype(np.int64) - _ZERO
        right[here] &= (digits >= 0) & (digits <= 9)
        values[here] = values[here] * 10 + digits
    return Numbers(values, right)


def read_lists(data: Bytes, bounds: Ints) -> Listed:
    """Read comma-separated lists that lie side by side; empty entries do not count.

    ``bounds`` are where each list begins, and the end of the last.
    """
    begins = np.zeros(len(data) + 1, dtype=np.bool_)
    np.equal(data, _COMMA, out=begins[1:])
    begins[bounds] = True
    starts = np.flatnonzero(begins)
    starts, ends = starts[:-1], starts[1:] - (data[starts[1:] - 1] == _COMMA)
    entries = starts < ends
    starts, ends = starts[entries], ends[entries]
    rows = np.searchsorted(bounds, starts, side="right") - 1
    return Listed(rows, *numbers_at(data, starts, ends))
