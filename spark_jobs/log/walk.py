"""Find where records begin, in many places of a segment at once.

A record says how long it is, so that each leads to the next, and nothing else does. To step from
one to the other in Python takes as long as to decode most of a record. Therefore a stretch of the
log is divided into *lanes*, of which each begins at the first place that looks like a record, and
all lanes take a step at the same time, by numpy, until each has come to where the next one begins.

Where a lane begins is a guess: a body may hold anything, also records. It is never relied on. A
lane counts only if the one before it arrives exactly where it begins, so that what is found is
what a walk with single steps finds; at worst it is less, and the next walk goes on from there.
"""

from typing import Final

import numpy as np

from halfmq.store.format.record import (
    MAGIC_AT,
    MAGIC_START,
    MAGIC_V1,
    MAGIC_V2,
    PREFIX,
    RECORD_SIZE_MIN,
)
from halfmq.store.format.record_fields import FIELDS

from .arrays import Bools, Ints
from .rows import SegmentBytes

LANE_BYTES: Final = 64 << 10  # some hundred steps; a batch has some hundred lanes
_SEARCHED: Final = 4 << 10  # bytes in which a lane must begin: where records are large, few do
_PREFIX: Final = np.dtype(">i8")  # the size, and below it the magic
assert _PREFIX.itemsize == PREFIX.size
_PHYSICAL_OFFSET: Final = FIELDS["physical_offset"]

assert _SEARCHED <= LANE_BYTES  # or two lanes could begin at the same place


def record_bounds(segment: SegmentBytes, position: int, stop: int, limit: int) -> Ints:
    """Walk from ``position`` to ``stop``, or less far; return where records begin.

    The last number is where the last record ends; it is the only one if none begins at
    ``position``. No record reaches behind ``limit``. Magics and sizes are all that was looked at.
    """
    stop = min(stop, limit - RECORD_SIZE_MIN + 1)
    if position >= stop:
        return np.array([position])
    begins = _lanes(segment, position, stop)
    arrived = begins.copy()
    lanes = np.arange(len(begins))
    counts = np.zeros(len(begins), dtype=np.int64)  # of the records that a lane has found
    at, ends = begins, np.append(begins[1:], stop)
    found = []
    while len(lanes):
        sizes, is_record = _sizes(segment, at, limit)
        if not is_record.all():
            lanes, at, ends, sizes = (each[is_record] for each in (lanes, at, ends, sizes))
        found.append((lanes, at))
        counts[lanes] = len(found)
        at = at + sizes
        arrived[lanes] = at
        goes_on = at < ends
        if not goes_on.all():
            lanes, at, ends = (each[goes_on] for each in (lanes, at, ends))
    astray = np.flatnonzero(arrived[:-1] != begins[1:])
    last = int(astray[0]) if len(astray) else len(begins) - 1  # those behind it found nothing
    behind = np.cumsum(counts)
    first = behind - counts
    bounds = np.empty(behind[-1] + 1, dtype=np.int64)
    for step, (lanes, at) in enumerate(found):
        bounds[first[lanes] + step] = at
    bounds[behind[last]] = arrived[last]
    return bounds[: behind[last] + 1]


def _lanes(segment: SegmentBytes, position: int, stop: int) -> Ints:
    """Choose where lanes begin: at ``position``, and where there seems to be a record."""
    begins = [position]
    for place in range(position + LANE_BYTES, stop, LANE_BYTES):
        searched = segment.mapped[place + MAGIC_AT : place + _SEARCHED]
        distance = searched.find(MAGIC_START)
        if 0 <= distance < stop - place:
            begins.append(place + distance)
    chosen = np.array(begins, dtype=np.int64)
    offsets = segment.read(np.dtype(_PHYSICAL_OFFSET.dtype), chosen + _PHYSICAL_OFFSET.position)
    right: Bools = offsets == chosen + segment.base
    right[0] = True
    return chosen[right]


def _sizes(segment: SegmentBytes, at: Ints, limit: int) -> tuple[Ints, Bools]:
    """Read how long the records at these places say that they are, and tell whether that can be."""
    prefixes = segment.read(_PREFIX, at).astype(np.int64)
    sizes, magics = prefixes >> 32, prefixes & 0xFFFF_FFFF
    is_record: Bools = (magics == MAGIC_V1) | (magics == MAGIC_V2)
    is_record &= (sizes >= RECORD_SIZE_MIN) & (sizes <= limit - at)
    return sizes, is_record
