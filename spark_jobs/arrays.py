"""Arrow arrays made from buffers.

``pyarrow.array`` would do, but it imports pandas where that is installed, which costs every Spark
worker half a second and brings nothing here.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bools = npt.NDArray[np.bool_]


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


def repeated(value: pa.Array, count: int) -> pa.Array:
    """Repeat an array of one value."""
    return value.take(from_numpy(np.zeros(count, dtype=np.int8), pa.int8()))


def _bits(values: Bools) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
