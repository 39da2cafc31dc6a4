"""Bytes as numpy and Arrow arrays, without copying them one by one."""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

WORD: Final = 8  # bytes
_DIGITS_MAX: Final = 18  # more may not fit in 64 bits


def cut(buffer: pa.Buffer, starts: Ints, ends: Ints, valid: Bools | None = None) -> pa.BinaryArray:
    """Copy the slices [start, end), which must be ascending; null where not valid."""
    if not len(starts):
        return pa.nulls(0, pa.binary())
    low, high = int(starts[0]), int(ends[-1])
    # Slices start0, end0, start1, end1, …, of which every second one is wanted.
    offsets = np.empty(2 * len(starts), dtype=np.int32)
    offsets[0::2] = starts - low
    offsets[1::2] = ends - low
    buffers = [None, pa.py_buffer(offsets), buffer.slice(low, high - low)]
    slices = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
    wanted = np.arange(0, len(offsets), 2, dtype=np.int32)
    return slices.take(pa.array(wanted, mask=None if valid is None else ~valid))


def joined(values: pa.BinaryArray) -> tuple[Bytes, Ints]:
    """Return the bytes of an array without nulls; where each value begins, and the last ends."""
    _, offsets, buffer = values.buffers()
    if not len(values) or buffer is None:
        return np.zeros(0, dtype=np.uint8), np.zeros(len(values) + 1, dtype=np.int64)
    bounds = np.frombuffer(offsets, dtype=np.int32, count=len(values) + 1).astype(np.int64)
    return np.frombuffer(buffer, dtype=np.uint8, count=int(bounds[-1])), bounds


def words(data: Bytes) -> Words:
    """View the eight bytes from every position on as one number, the first byte the lowest."""
    return np.ndarray(shape=(len(data) - WORD + 1,), dtype="<u8", buffer=data, strides=(1,))


def whole_numbers(texts: pa.BinaryArray) -> pa.Int64Array:
    """Parse decimal numbers of up to 18 digits; null where a text is anything else."""
    import pyarrow.compute as pc  # noqa: PLC0415  takes long, and few columns need it

    texts = texts.view(pa.string())
    fits = pc.less_equal(pc.binary_length(texts), _DIGITS_MAX)
    is_number = pc.and_(pc.ascii_is_decimal(texts), fits)
    return pc.if_else(is_number, texts, None).cast(pa.int64())
