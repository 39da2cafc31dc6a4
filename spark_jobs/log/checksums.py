"""Which records of a batch fail their CRC.

A record has a CRC of its body, and one of itself as a whole where the broker was told to add it
(``enabledAppendPropCRC``): its last 20 bytes are then a property, with the decimal digits of the
CRC of all that precedes, the lowest digit first.

Source: RocketMQ ``MessageExtEncoder``, ``CommitLog.createCrc32``.
"""

from typing import Final

import numpy as np

from halfmq.store.format.crc import crc32
from halfmq.store.format.record import CRC_MASK, CRC_TAIL_SIZE, CRC_TAIL_START

from .arrays import Bools, Ints
from .numbers import DIGITS_MAX
from .rows import WORD, Rows

_DIGITS: Final = CRC_TAIL_SIZE - len(CRC_TAIL_START) - 1
assert _DIGITS <= DIGITS_MAX


def sound_records(rows: Rows) -> Bools:
    """Tell of each record whether it has the bytes that its CRC was computed from."""
    sound: Bools = body_crcs(rows) == rows.field("body_crc") & CRC_MASK
    places = _places_of_tails(rows)
    if len(places):
        sound[places] &= _whole_crcs(rows, places) == _crcs_told(rows, places)
    return sound


def body_crcs(rows: Rows) -> Ints:
    """Compute the CRC of every body, as RocketMQ stores it."""
    starts, ends = rows.body_bounds
    return _crcs(rows, starts, ends)


def _whole_crcs(rows: Rows, places: Ints) -> Ints:
    return _crcs(rows, rows.starts[places], rows.ends[places] - CRC_TAIL_SIZE)


def _crcs(rows: Rows, starts: Ints, ends: Ints) -> Ints:
    content = memoryview(rows.segment.mapped)
    slices = map(slice, starts.tolist(), ends.tolist())
    computed = map(crc32, map(content.__getitem__, slices))
    return np.fromiter(computed, dtype=np.int64, count=len(starts)) & CRC_MASK


def _places_of_tails(rows: Rows) -> Ints:
    at = rows.ends - CRC_TAIL_SIZE
    begins = rows.segment.words[at] == np.uint64(int.from_bytes(CRC_TAIL_START[:WORD], "little"))
    begins &= rows.segment.view[at + WORD] == CRC_TAIL_START[WORD]
    return np.flatnonzero(begins & (rows.properties_starts <= at))


def _crcs_told(rows: Rows, places: Ints) -> Ints:
    """Read the CRCs in the tails; -1, which no CRC is, where there are no digits."""
    first = rows.ends[places] - 1 - _DIGITS
    values = np.zeros(len(places), dtype=np.int64)
    right = np.ones(len(places), dtype=np.bool_)
    for place in range(_DIGITS):
        digits = rows.segment.view[first + place].astype(np.int64) - ord("0")
        right &= (digits >= 0) & (digits <= 9)
        values += digits * 10**place
    return np.where(right, values, -1)
