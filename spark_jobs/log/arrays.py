"""Arrow arrays made from buffers.

``pyarrow.array`` would do, but it imports pandas where that is installed, which costs every Spark
worker half a second and brings nothing here.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def from_numpy(
    values: npt.NDArray[np.generic], kind: pa.DataType, valid: Bools | None = None
) -> pa.Array:
    """Wrap numbers whose numpy type has the width of ``kind``; null where not valid."""
    nulls = None if valid is None else _bits(valid)
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [nulls, buffer])


def booleans(values: Bools) -> pa.Array:
    """Pack truth values, which Arrow keeps as bits."""
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])


def texts(values: Sequence[str | None]) -> pa.Array:
    """Make a string array of a few values."""
    encoded = [b"" if value is None else value.encode() for value in values]
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    offsets[1:] = np.cumsum([len(value) for value in encoded])
    valid = np.array([value is not None for value in values], dtype=np.bool_)
    buffers = [_bits(valid), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def one(value: object, kind: pa.DataType) -> pa.Array:
    """Make an array of one value: nothing, a number, a text, bytes or a list of numbers."""
    if value is None:
        return pa.nulls(1, kind)
    if isinstance(value, str):
        return texts([value])
    if isinstance(value, bytes):
        bounds = pa.py_buffer(np.array([0, len(value)], dtype=np.int32))
        return pa.Array.from_buffers(pa.binary(), 1, [None, bounds, pa.py_buffer(value)])
    if isinstance(value, list):
        bounds = from_numpy(np.array([0, len(value)], dtype=np.int32), pa.int32())
        numbers = from_numpy(np.array(value, dtype=np.int64), pa.int64())
        return pa.ListArray.from_arrays(bounds, numbers, type=kind)
    return from_numpy(np.array([value], dtype=np.int64), pa.int64()).cast(kind)


def repeated(value: pa.Array, count: int) -> pa.Array:
    """Repeat an array of one value."""
    return value.take(from_numpy(np.zeros(count, dtype=np.int8), pa.int8()))


def joined(values: pa.BinaryArray) -> tuple[Bytes, Ints]:
    """See an array without a null as one text; where each value begins, and the end of the last."""
    _, offsets, buffer = values.buffers()
    if not len(values) or buffer is None:
        return np.zeros(0, dtype=np.uint8), np.zeros(len(values) + 1, dtype=np.int64)
    bounds = np.frombuffer(offsets, dtype=np.int32, count=len(values) + 1).astype(np.int64)
    return np.frombuffer(buffer, dtype=np.uint8, count=int(bounds[-1])), bounds


def _bits(values: Bools) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
