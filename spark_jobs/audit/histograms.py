"""Counts of numbers by label, from which percentiles are told; small, and they add up.

Numbers up to 255 are counted each by itself, larger ones in ranges of less than 1 % of their size.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..log.arrays import Ints

_EXACT_BITS: Final = 7  # ranges per doubling, as a power of two
_COUNT: Final = np.dtype([("label", "<u8"), ("range", "<i8"), ("count", "<i8")])


class Histogram:
    """How often which number was seen, by label."""

    def __init__(self, packed: bytes = b"") -> None:
        self._counts: npt.NDArray[np.void] = np.frombuffer(packed, dtype=_COUNT)

    def add(self, labels: npt.NDArray[np.uint64], values: Ints) -> None:
        """Count numbers; one below 0 counts as 0."""
        seen = np.zeros(len(values), dtype=_COUNT)
        seen["label"], seen["range"], seen["count"] = labels, _ranges(values), 1
        self._join(seen)

    def merge(self, packed: bytes) -> None:
        """Add what another one has packed."""
        self._join(np.frombuffer(packed, dtype=_COUNT))

    def pack(self) -> bytes:
        """Return it as bytes."""
        return self._counts.tobytes()

    def labels(self) -> list[int]:
        """Return the labels in ascending order."""
        return [int(label) for label in np.unique(self._counts["label"])]

    def count(self, label: int) -> int:
        """Return how many numbers a label has."""
        own = self._counts[self._counts["label"] == label]
        return int(own["count"].sum())

    def percentiles(self, label: int, wanted: Sequence[float]) -> list[int]:
        """Return for each fraction the lowest number that so many are not above.

        For a label that has numbers. 1.0 gives the highest.
        """
        own = self._counts[self._counts["label"] == label]
        own = own[np.argsort(own["range"])]
        reached = np.cumsum(own["count"])
        ranks = np.ceil(np.array(wanted) * reached[-1])
        places = np.searchsorted(reached, np.maximum(ranks, 1))
        return [_highest(int(own["range"][place])) for place in places]

    def _join(self, more: npt.NDArray[np.void]) -> None:
        together = np.concatenate([self._counts, more])
        if not len(together):
            return
        together = together[np.lexsort((together["range"], together["label"]))]
        label, range_ = together["label"], together["range"]
        is_new = (label[1:] != label[:-1]) | (range_[1:] != range_[:-1])
        starts = np.concatenate([[0], np.flatnonzero(is_new) + 1])
        summed = together[starts]
        summed["count"] = np.add.reduceat(together["count"], starts)
        self._counts = summed


def _ranges(values: Ints) -> Ints:
    """Number the range that each value is in."""
    values = np.maximum(values, 0)
    # Of a number below 2⁵³ the exponent is exact.
    doublings = np.maximum(np.frexp(values.astype(np.float64))[1] - _EXACT_BITS - 1, 0)
    ranges: Ints = (doublings.astype(np.int64) << _EXACT_BITS) + (values >> doublings)
    return ranges


def _highest(range_: int) -> int:
    """Return the highest number of a range."""
    doublings = max((range_ >> _EXACT_BITS) - 1, 0)
    mantissa = range_ - (doublings << _EXACT_BITS)
    return ((mantissa + 1) << doublings) - 1
