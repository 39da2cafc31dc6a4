"""The units of a batch send, as the store takes them.

Nearly all units of a batch have the same properties but for the unique key. So what the properties
mean is worked out once, for the first, and every unit that looks like the one before it around its
unique key means the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from halfmq.store.format.index import UNIQUE_KEY_SIZE, joined_if_usual
from halfmq.store.format.properties import split_batch, tags_code

_UNIQUE_KEY: Final = b"UNIQ_KEY\x01"
_SEPARATOR: Final = 2  # 0x02, behind a property


class Units(NamedTuple):
    """The messages of a batch, in columns."""

    flags: Sequence[int]
    bodies: Sequence[bytes]
    properties: Sequence[bytes]  # as they are to be stored
    tags_codes: Sequence[int]
    unique_keys: bytes | None
    """One after the other, if each has a usual one, and no other keys beside it."""


class _Shape(NamedTuple):
    """What the properties of a unit mean, whatever its unique key is."""

    head: bytes  # up to the unique key
    tail: bytes  # behind it
    key_at: int
    key_end: int
    added: bytes  # what the broker adds
    tags_code: int

    @property
    def is_plain(self) -> bool:
        """Whether there is a unique key, and no other keys."""
        return self.key_at < self.key_end and not (
            b"KEYS\x01" in self.head or b"KEYS\x01" in self.tail or b"KEYS\x01" in self.added
        )

    def fits(self, raw: bytes) -> bool:
        """Whether properties mean the same but for their unique key."""
        key_at, key_end = self.key_at, self.key_end
        return (
            raw[:key_at] == self.head
            and raw[key_end:] == self.tail
            and raw.find(_SEPARATOR, key_at, key_end) < 0
        )


def read_units(batch: bytes, *, missing_wait: bytes, suffix: bytes) -> Units:
    """Take a batch's body apart.

    Args:
        batch: The body of the request.
        missing_wait: A property for units that have no WAIT.
        suffix: Properties for all units.

    Raises:
        ValueError: The body does not end with a whole unit.
    """
    flags, bodies, sent = split_batch(batch)
    if not flags:
        return Units((), (), (), (), None)
    shape = _shape_of(sent[0], missing_wait, suffix)
    keys = _keys_alike(sent, shape)
    if keys is not None:
        added = shape.added
        stored = [raw + added for raw in sent]
        codes = [shape.tags_code] * len(stored)
        is_usual = len(keys) == UNIQUE_KEY_SIZE * len(sent) and keys.isascii()
        return Units(flags, bodies, stored, codes, keys if is_usual and shape.is_plain else None)
    shapes: list[_Shape] = []
    for raw in sent:
        if not shape.fits(raw):
            shape = _shape_of(raw, missing_wait, suffix)
        shapes.append(shape)
    units = list(zip(sent, shapes, strict=True))
    return Units(
        flags,
        bodies,
        [raw + shape.added for raw, shape in units],
        [shape.tags_code for shape in shapes],
        joined_if_usual([raw[shape.key_at : shape.key_end] for raw, shape in units])
        if all(shape.is_plain for shape in shapes)
        else None,
    )


def _keys_alike(sent: Sequence[bytes], shape: _Shape) -> bytes | None:
    """Return the unique keys, joined, if all properties have this shape and keys of one length."""
    head, tail = shape.head, shape.tail
    key_size = shape.key_end - shape.key_at
    size = len(head) + key_size + len(tail)
    joined = b"".join(sent)
    if not key_size or not tail or [*map(len, sent)].count(size) != len(sent):
        return None
    if not (joined.startswith(head) and joined.endswith(tail)):
        return None
    # Where the pieces have the length of keys, what separates them stands where it should.
    keys = joined[len(head) : -len(tail)].split(tail + head)
    if [*map(len, keys)].count(key_size) != len(sent) or len(keys) != len(sent):
        return None
    joined = b"".join(keys)
    return None if b"\x02" in joined else joined


def _shape_of(raw: bytes, missing_wait: bytes, suffix: bytes) -> _Shape:
    key_at, key_end = _unique_key_of(raw)
    closing = b"" if not raw or raw[-1] == _SEPARATOR else b"\x02"
    added = closing + (b"" if b"WAIT\x01" in raw else missing_wait) + suffix
    code = tags_code(raw + added)
    return _Shape(raw[:key_at], raw[key_end:], key_at, key_end, added, code)


def _unique_key_of(raw: bytes) -> tuple[int, int]:
    """Return where the unique key begins and ends; both are the end when there is none."""
    name_at = raw.find(_UNIQUE_KEY)
    if name_at < 0 or (name_at > 0 and raw[name_at - 1] != _SEPARATOR):
        return len(raw), len(raw)
    start = name_at + len(_UNIQUE_KEY)
    end = raw.find(_SEPARATOR, start)
    # A second one would count in its place; then nothing is the same for all units.
    if raw.find(_UNIQUE_KEY, start) >= 0:
        return len(raw), len(raw)
    return start, len(raw) if end < 0 else end
