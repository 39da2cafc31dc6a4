"""Bodies as producers had them before they compressed them.

RocketMQ's clients compress bodies above 4 KiB, and say in ``sysFlag`` with what; brokers store what
they get. Source: RocketMQ ``CompressorFactory``; bits in ``halfmq.store.format.flags``.
"""

import zlib
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from halfmq.store.format.flags import COMPRESSED, CompressionType, compression_type

from ..log.rows import Rows

BODY_MAX: Final = 64 << 20  # bytes of one body; brokers refuse messages of more than 4 MiB
BATCH_MAX: Final = 256 << 20  # bytes of all that are unpacked at once: bounds a worker's memory
_CODECS: Final = {CompressionType.LZ4: "lz4", CompressionType.ZSTD: "zstd"}


class Bodies(NamedTuple):
    """The bodies of some records."""

    values: pa.BinaryArray  # null where not wanted, and where it cannot be unpacked
    errors: dict[int, str]  # what is wrong, by the place of the record


class TooMuchError(Exception):
    """Unpacked at once, these bodies would take more than ``BATCH_MAX`` bytes."""


@lru_cache(maxsize=1)  # two columns of one batch are made from it
def unpacked(rows: Rows, topics: frozenset[str] | None) -> Bodies:
    """Return the bodies of records of these topics (None: of all), unpacked where compressed.

    Raises:
        TooMuchError: Ask for fewer records.
    """
    is_wanted = rows.are_in(topics)
    stored = rows.bodies(is_wanted)
    flags = rows.field("sys_flag")
    is_compressed = flags & COMPRESSED != 0
    places = np.flatnonzero(is_compressed if is_wanted is None else is_compressed & is_wanted)
    if not len(places):
        return Bodies(stored, {})
    found: list[bytes] = []
    errors: dict[int, str] = {}
    size = 0
    indices = np.arange(len(rows), dtype=np.int32)
    for place in places.tolist():
        try:
            body = unpack(rows.body(place), int(flags[place]))
        except ValueError as error:
            errors[place] = str(error)
            continue
        indices[place] = len(rows) + len(found)
        found.append(body)
        size += len(body)
        if size > BATCH_MAX and len(rows) > 1:
            raise TooMuchError
    failed = np.zeros(len(rows), dtype=np.bool_)
    failed[list(errors)] = True
    together = pa.concat_arrays([stored, pa.array(found, pa.binary())])
    return Bodies(together.take(pa.array(indices, mask=failed)), errors)


def unpack(body: bytes | memoryview, sys_flag: int) -> bytes:
    """Unpack one body as its flags say.

    Raises:
        ValueError: It is not what the flags say, or too large.
    """
    kind = compression_type(sys_flag)
    if kind is None:
        return bytes(body)
    if not body:
        raise ValueError(f"the body is not {kind.name}: it is empty")
    try:
        content = _inflated(body) if kind not in _CODECS else _decoded(body, _CODECS[kind])
    except (zlib.error, OSError) as error:
        raise ValueError(f"the body is not {kind.name}: {error}") from error
    if len(content) > BODY_MAX:
        raise ValueError(f"the body takes more than {BODY_MAX} bytes when it is unpacked")
    return content


def _inflated(body: bytes | memoryview) -> bytes:
    stream = zlib.decompressobj()
    content = stream.decompress(body, BODY_MAX + 1)
    if not stream.eof and len(content) <= BODY_MAX:
        raise zlib.error("it ends too early")
    return content


def _decoded(body: bytes | memoryview, codec: str) -> bytes:
    with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(body)), codec) as stream:
        return bytes(stream.read(BODY_MAX + 1))
