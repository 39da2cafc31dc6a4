"""The body of a batch send: messages one after the other, each in a frame of its own.

Source: RocketMQ ``MessageDecoder.java`` (``encodeMessage``, ``decodeMessage``).
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from .properties import PROPERTIES_SIZE_MAX

ALIKE_MAX: Final = 1024
"""Units that are taken apart in one call: the layout of so many takes 160 KiB."""

_LAYOUTS_CACHED_MAX: Final = 32  # 5 MiB of the largest
_UNIT_HEAD: Final = Struct(">iiiii")
_LENGTH: Final = Struct(">h")
_UNIT_CONTENT: Final = Struct(">12xii")  # without size, magic and CRC, which are not trusted
assert _UNIT_HEAD.size == _UNIT_CONTENT.size == 20


class BatchUnit(NamedTuple):
    """One message inside the body of a batch send."""

    flag: int
    body: bytes
    properties: bytes  # stored verbatim


def encode_batch(units: Iterable[BatchUnit]) -> bytes:
    """Return the body of a batch send.

    Raises:
        ValueError: The properties of a unit are longer than an int16 can say.
    """
    parts: list[bytes] = []
    for flag, body, properties in units:
        if len(properties) > PROPERTIES_SIZE_MAX:
            raise ValueError(f"properties of {len(properties)} bytes exceed {PROPERTIES_SIZE_MAX}")
        size = _UNIT_HEAD.size + len(body) + _LENGTH.size + len(properties)
        parts += (
            _UNIT_HEAD.pack(size, 0, 0, flag, len(body)),  # magic and CRC are read by nobody
            body,
            _LENGTH.pack(len(properties)),
            properties,
        )
    return b"".join(parts)


def decode_batch(batch: bytes) -> list[BatchUnit]:
    """Return the messages of a batch body; sizes, magic and CRC of the units are not trusted.

    Raises:
        ValueError: The body does not end with a whole unit; the sender's fault.
    """
    return list(map(BatchUnit, *split_batch(batch)))


def split_batch(batch: bytes) -> tuple[list[int], list[bytes], list[bytes]]:
    """Return flags, bodies and properties: ``decode_batch`` in columns.

    Raises:
        ValueError: As ``decode_batch``.
    """
    flags: list[int] = []
    bodies: list[bytes] = []
    properties: list[bytes] = []
    content, length = _UNIT_CONTENT.unpack_from, _LENGTH.unpack_from
    position = 0
    end = len(batch)
    try:
        while position < end:
            flag, body_size = content(batch, position)
            body_start = position + _UNIT_CONTENT.size
            body_end = body_start + body_size
            (properties_size,) = length(batch, body_end)
            properties_start = body_end + _LENGTH.size
            next_unit = properties_start + properties_size
            if body_size < 0 or properties_size < 0 or next_unit > end:
                raise ValueError(f"batch unit at byte {position} has a length that does not fit")
            flags.append(flag)
            bodies.append(batch[body_start:body_end])
            properties.append(batch[properties_start:next_unit])
            position = next_unit
    except struct.error as error:
        raise ValueError(f"batch unit at byte {position} is cut short") from error
    return flags, bodies, properties


class AlikeColumns(NamedTuple):
    """Units of one flag and size whose properties differ in one place only, in columns."""

    flag: int
    bodies: Sequence[bytes]
    head: bytes  # of the properties: what all have before that place
    middles: Sequence[bytes]
    tail: bytes  # and what all have behind it


def split_alike(batch: bytes, place_of: Callable[[bytes], tuple[int, int]]) -> AlikeColumns | None:
    """Take a batch apart in one step, if its units differ in bodies and one place only.

    ``place_of`` says where that place begins and ends in the properties of the first unit. None
    if there is no unit, one that does not fit, or more than ``ALIKE_MAX``.
    """
    room = len(batch) - _UNIT_CONTENT.size - _LENGTH.size
    if room < 0:
        return None
    flag, body_size = _UNIT_CONTENT.unpack_from(batch)
    if not 0 <= body_size <= room:
        return None
    start = _UNIT_CONTENT.size + body_size
    (properties_size,) = _LENGTH.unpack_from(batch, start)
    start += _LENGTH.size
    size = start + properties_size
    if properties_size < 0 or len(batch) % size or not 0 < len(batch) // size <= ALIKE_MAX:
        return None
    properties = batch[start:size]
    begin, end = place_of(properties)
    count = len(batch) // size
    layout = _layout(body_size, begin, end - begin, properties_size - end, count)
    fields = layout.unpack(batch)
    heads, before, behind = fields[0::5], fields[2::5], fields[4::5]
    if not heads.count(heads[0]) == before.count(before[0]) == behind.count(behind[0]) == count:
        return None
    return AlikeColumns(flag, fields[1::5], properties[:begin], fields[3::5], properties[end:])


@lru_cache(maxsize=_LAYOUTS_CACHED_MAX)
def _layout(body_size: int, head_size: int, middle_size: int, tail_size: int, count: int) -> Struct:
    """Return five fields per unit: its head, the body, and the properties in three parts.

    What is trusted of the head is one field, and the properties' length is in one with their head.
    """
    head = f"12x{_UNIT_CONTENT.size - 12}s"
    return Struct(
        f"{head}{body_size}s{_LENGTH.size + head_size}s{middle_size}s{tail_size}s" * count
    )
