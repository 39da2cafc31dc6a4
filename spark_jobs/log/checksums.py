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

from .arrays import WORD, Bools, Ints
from .rows import Rows

_DIGITS: Final = CRC_TAIL_SIZE - len(CRC_TAIL_START) - 1


def sound_records(rows: Rows) -> Bools:
    """Compare each record with its CRCs; true where they match."""
    sound: Bools = body_crcs(rows) == rows.field("body_crc") & CRC_MASK
    places = _with_tail(rows)
    if len(places):
        tails = rows.ends[places] - CRC_TAIL_SIZE
        sound[places] &= _crcs(rows, rows.starts[places], tails) == _stored_in_tails(rows, tails)
    return sound


def body_crcs(rows: Rows) -> Ints:
    """Compute the CRC of every body, as RocketMQ stores it."""
    return _crcs(rows, *rows.body_bounds)


def _crcs(rows: Rows, starts: Ints, ends: Ints) -> Ints:
    content = memoryview(rows.segment.mapped)
    slices = map(slice, starts.tolist(), ends.tolist())
    computed = map(crc32, map(content.__getitem__, slices))
    return np.fromiter(computed, dtype=np.int64, count=len(starts)) & CRC_MASK


def _with_tail(rows: Rows) -> Ints:
    """Find the records that have a CRC of the whole record."""
    at = rows.ends - CRC_TAIL_SIZE
    begins = rows.segment.words[at] == np.uint64(int.from_bytes(CRC_TAIL_START[:WORD], "little"))
    begins &= rows.segment.view[at + WORD] == CRC_TAIL_START[WORD]
    return np.flatnonzero(begins & (rows.properties_starts <= at))


def _stored_in_tails(rows: Rows, tails: Ints) -> Ints:
    """Read the CRCs in the tails; -1, which no CRC is, where a tail holds something else."""
    first = tails + len(CRC_TAIL_START)
    digits = rows.segment.view[first[:, None] + np.arange(_DIGITS)].astype(np.int64) - ord("0")
    is_number = ((digits >= 0) & (digits <= 9)).all(axis=1)
    return np.where(is_number, digits @ 10 ** np.arange(_DIGITS), -1)
