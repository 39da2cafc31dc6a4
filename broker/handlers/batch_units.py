"""The units of a batch send, as the store takes them.

Nearly all units of a batch have the same properties but for the unique key. So what the properties
mean is worked out once, for the first, and every unit that looks like the one before it around its
unique key means the same.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from halfmq.store.format.properties import split_batch, tags_code

_UNIQUE_KEY: Final = b"UNIQ_KEY\x01"
_SEPARATOR: Final = 2  # 0x02, behind a property


class Units(NamedTuple):
    """The messages of a batch, in columns."""

    flags: list[int]
    bodies: list[bytes]
    properties: list[bytes]  # as they are to be stored
    tags_codes: list[int]
    unique_keys: list[bytes] | None  # None when one has none, or other keys beside it


def read_units(batch: bytes, *, missing_wait: bytes, suffix: bytes) -> Units:
    """Take a batch's body apart.

    Args:
        batch: The body of the request.
        missing_wait: A property for units that have no WAIT.
        suffix: Properties for all units.

    Raises:
        ValueError: The body does not end with a whole unit.
    """
    units = Units([], [], [], [], unique_keys := [])
    all_plain = True
    head: bytes | None = None
    tail = added = b""
    key_at = key_end = code = 0
    for flag, body, raw in split_batch(batch):
        if (
            raw[:key_at] != head
            or raw[key_end:] != tail
            or raw.find(_SEPARATOR, key_at, key_end) >= 0
        ):
            key_at, key_end = _unique_key_of(raw)
            head, tail = raw[:key_at], raw[key_end:]
            closing = b"" if not raw or raw[-1] == _SEPARATOR else b"\x02"
            added = closing + (b"" if b"WAIT\x01" in raw else missing_wait) + suffix
            code = tags_code(raw + added)
            all_plain = all_plain and key_at < key_end and b"KEYS\x01" not in raw + added
        units.flags.append(flag)
        units.bodies.append(body)
        units.properties.append(raw + added)
        units.tags_codes.append(code)
        unique_keys.append(raw[key_at:key_end])
    return units if all_plain else units._replace(unique_keys=None)


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
