"""The units of a batch send, as the store takes them.

Nearly all units of a batch have the same properties but for the unique key. So what the properties
mean is worked out once, for all that look alike around their unique keys.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from halfmq.store.draft import AlikeUnits, Units
from halfmq.store.format.batch import ALIKE_MAX, split_alike, split_batch
from halfmq.store.format.index import UNIQUE_KEY_SIZE, joined_if_usual
from halfmq.store.format.properties import tags_code
from halfmq.store.format.record import CRC_TAIL_START, without_crcs

from ..transaction.admission import fault_in_batch, refusal, without_brokers_own

_UNIQUE_KEY: Final = b"UNIQ_KEY\x01"
_SEPARATOR: Final = b"\x02"  # behind a property
_LOOKED_AT: Final = (b"TRAN_MSG\x01", b"DELAY\x01", b"TIMER_", b"TRANSACTION_", CRC_TAIL_START)
_SHAPES_CACHED_MAX: Final = 32  # of up to 128 KiB each


class _Shape(NamedTuple):
    """What the properties of a unit mean, whatever its unique key is."""

    head: bytes  # up to the unique key
    tail: bytes  # behind it
    has_key: bool
    added: bytes  # what the broker adds
    tags_code: int
    is_plain: bool  # there is a unique key, and no other keys
    is_looked_at: bool  # something in it may be refused or dropped

    def fits(self, raw: bytes) -> bool:
        """Whether properties mean the same but for their unique key."""
        if not self.has_key:
            return raw == self.head + self.tail
        start, end = len(self.head), len(raw) - len(self.tail)
        return (
            raw.startswith(self.head)
            and raw.endswith(self.tail)
            and raw.find(_SEPARATOR, start, end) < 0
        )

    def key_of(self, raw: bytes) -> bytes:
        """Return the unique key in properties that fit."""
        return raw[len(self.head) : len(raw) - len(self.tail)]


def read_units(batch: bytes, *, missing_wait: bytes, suffix: bytes) -> Units | AlikeUnits:
    """Take a batch's body apart.

    Units lose the properties that only the broker sets.

    Args:
        batch: The body of the request.
        missing_wait: A property for units that have no WAIT.
        suffix: Properties for all units.

    Raises:
        ValueError: The body does not end with a whole unit.
        RequestRefusedError: A unit asks for a transaction, a delay or a time of delivery.
    """
    alike = split_alike(batch, _place_of_key)
    if alike is None:
        return _read_different(batch, missing_wait, suffix)
    flag, bodies, head, keys, tail = alike
    joined = b"".join(keys)
    if _SEPARATOR in joined:
        return _read_different(batch, missing_wait, suffix)
    shape = _shape(head, tail, bool(keys[0]), missing_wait, suffix)
    if shape.is_looked_at:
        return _read_different(batch, missing_wait, suffix)
    are_usual = shape.is_plain and len(keys[0]) == UNIQUE_KEY_SIZE and joined.isascii()
    return AlikeUnits(
        flag,
        bodies,
        head,
        keys,
        tail + shape.added,
        shape.tags_code,
        joined if are_usual else None,
    )


def _read_different(batch: bytes, missing_wait: bytes, suffix: bytes) -> Units | AlikeUnits:
    flags, bodies, sent = split_batch(batch)
    if not flags:
        return Units((), (), (), ())
    shape = _shape_of(sent[0], missing_wait, suffix)
    shapes: list[_Shape] = []
    for number, raw in enumerate(sent):
        if not shape.fits(raw):
            shape = _shape_of(raw, missing_wait, suffix)
        if shape.is_looked_at:
            sent[number] = _admitted(raw, number)
            shape = _shape_of(sent[number], missing_wait, suffix)
        shapes.append(shape)
    units = list(zip(sent, shapes, strict=True))
    found = Units(
        flags,
        bodies,
        [raw + shape.added for raw, shape in units],
        [shape.tags_code for shape in shapes],
        joined_if_usual([shape.key_of(raw) for raw, shape in units])
        if all(shape.is_plain for shape in shapes)
        else None,
    )
    return _as_alike(found) or found


def _admitted(raw: bytes, number: int) -> bytes:
    """Return the properties of a unit without what is the broker's to set.

    Raises:
        RequestRefusedError: They ask for what the messages of a batch cannot have.
    """
    fault = fault_in_batch(raw, f"unit {number} of the batch (counted from 0)")
    if fault is not None:
        raise refusal(fault)
    return without_brokers_own(without_crcs(raw))


def _as_alike(units: Units) -> AlikeUnits | None:
    """Return units that differ in body and properties only, though in more than the unique key."""
    flags, bodies, properties, codes, unique_keys = (
        units.flags,
        units.bodies,
        units.properties,
        units.tags_codes,
        units.unique_keys,
    )
    count = len(flags)
    sizes, properties_sizes = [*map(len, bodies)], [*map(len, properties)]
    if count > ALIKE_MAX or any(
        column.count(column[0]) < count for column in (flags, sizes, properties_sizes, codes)
    ):
        return None
    return AlikeUnits(flags[0], bodies, b"", properties, b"", codes[0], unique_keys)


def _shape_of(raw: bytes, missing_wait: bytes, suffix: bytes) -> _Shape:
    start, end = _place_of_key(raw)
    return _shape(raw[:start], raw[end:], start < end, missing_wait, suffix)


@lru_cache(maxsize=_SHAPES_CACHED_MAX)
def _shape(head: bytes, tail: bytes, has_key: bool, missing_wait: bytes, suffix: bytes) -> _Shape:
    raw = head + b"k" * has_key + tail
    closing = b"" if not raw or raw.endswith(_SEPARATOR) else _SEPARATOR
    added = closing + (b"" if b"WAIT\x01" in raw else missing_wait) + suffix
    stored = raw + added
    is_plain = has_key and b"KEYS\x01" not in stored
    is_looked_at = any(name in raw for name in _LOOKED_AT)
    return _Shape(head, tail, has_key, added, tags_code(stored), is_plain, is_looked_at)


def _place_of_key(raw: bytes) -> tuple[int, int]:
    """Return where the unique key begins and ends; both are the end when there is none."""
    name_at = raw.find(_UNIQUE_KEY)
    if name_at < 0 or (name_at > 0 and not raw.startswith(_SEPARATOR, name_at - 1)):
        return len(raw), len(raw)
    start = name_at + len(_UNIQUE_KEY)
    end = raw.find(_SEPARATOR, start)
    # A second one would count in its place; then nothing is the same for all units.
    if raw.find(_UNIQUE_KEY, start) >= 0:
        return len(raw), len(raw)
    return start, len(raw) if end < 0 else end
