"""The body of a batch send: units one after another, each with its own lengths.

Source: RocketMQ ``MessageDecoder.java`` (``encodeMessage``, ``decodeMessage``).
"""

import struct
from collections.abc import Iterable
from struct import Struct
from typing import Final, NamedTuple

from .properties import PROPERTIES_SIZE_MAX

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
        ValueError: The properties of a unit exceed ``PROPERTIES_SIZE_MAX``.
    """
    parts: list[bytes] = []
    for flag, body, properties in units:
        if len(properties) > PROPERTIES_SIZE_MAX:
            raise ValueError(f"properties of {len(properties)} bytes exceed {PROPERTIES_SIZE_MAX}")
        size = _UNIT_HEAD.size + len(body) + _LENGTH.size + len(properties)
        parts += (
            _UNIT_HEAD.pack(size, 0, 0, flag, len(body)),  # no reader uses magic and CRC
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
