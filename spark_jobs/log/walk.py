"""Find where records begin, in many places of a segment at once.

Each record holds its length, so records can only be found one after the other. One such step in
Python takes as long as decoding most of a record. So a range of the log is divided into *sections*,
each of which begins at the first place that looks like a record. numpy advances all sections by one
record at a time, until each reaches the beginning of the next.

The beginning of a section is a guess, because a body may contain records. A section counts only if
the one before it ends exactly where it begins. So the result is that of a walk with single steps;
at worst it is shorter, and the next walk continues from there.
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

SECTION_BYTES: Final = 64 << 10  # some hundred steps; a batch has some hundred sections
_SEARCHED: Final = 4 << 10  # bytes in which a section must begin: where records are large, few do
_PREFIX: Final = np.dtype(">i8")  # the size, and below it the magic
assert _PREFIX.itemsize == PREFIX.size
_PHYSICAL_OFFSET: Final = FIELDS["physical_offset"]

assert _SEARCHED <= SECTION_BYTES  # or two sections could begin at the same place


def record_bounds(segment: SegmentBytes, position: int, stop: int, limit: int) -> Ints:
    """Find the records from ``position`` up to ``stop`` or earlier; return where they begin.

    The last number is where the last record ends; it is the only one if none begins at
    ``position``. No record reaches beyond ``limit``. Magics and sizes are all that was looked at.
    """
    stop = min(stop, limit - RECORD_SIZE_MIN + 1)
    if position >= stop:
        return np.array([position])
    begins = _sections(segment, position, stop)
    arrived = begins.copy()
    sections = np.arange(len(begins))
    counts = np.zeros(len(begins), dtype=np.int64)  # of the records that a section has found
    at, ends = begins, np.append(begins[1:], stop)
    found = []
    while len(sections):
        sizes, is_record = _sizes(segment, at, limit)
        if not is_record.all():
            sections, at, ends, sizes = (each[is_record] for each in (sections, at, ends, sizes))
        found.append((sections, at))
        counts[sections] = len(found)
        at = at + sizes
        arrived[sections] = at
        goes_on = at < ends
        if not goes_on.all():
            sections, at, ends = (each[goes_on] for each in (sections, at, ends))
    astray = np.flatnonzero(arrived[:-1] != begins[1:])
    last = int(astray[0]) if len(astray) else len(begins) - 1  # those after it found nothing
    ends_at = np.cumsum(counts)
    first = ends_at - counts
    bounds = np.empty(ends_at[-1] + 1, dtype=np.int64)
    for step, (sections, at) in enumerate(found):
        bounds[first[sections] + step] = at
    bounds[ends_at[last]] = arrived[last]
    return bounds[: ends_at[last] + 1]


def _sections(segment: SegmentBytes, position: int, stop: int) -> Ints:
    """Choose the beginnings of sections: ``position``, and places that look like a record."""
    begins = [position]
    for place in range(position + SECTION_BYTES, stop, SECTION_BYTES):
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
    """Read the lengths of the records at these places; tell which are valid."""
    prefixes = segment.read(_PREFIX, at).astype(np.int64)
    sizes, magics = prefixes >> 32, prefixes & 0xFFFF_FFFF
    is_record: Bools = (magics == MAGIC_V1) | (magics == MAGIC_V2)
    is_record &= (sizes >= RECORD_SIZE_MIN) & (sizes <= limit - at)
    return sizes, is_record
