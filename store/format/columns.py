"""Writing many records, entries or items at once: field by field, instead of one by one.

What all have in common is laid out once and repeated. A field in which they differ is put in its
place in all of them by one assignment with a step. Fields are int32 here, or two of them, in the
byte order of the machine; ``packed`` makes the bytes of a file of them.
"""

import sys
from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

_IS_LITTLE: Final = sys.byteorder == "little"
_HIGH, _LOW = (1, 0) if _IS_LITTLE else (0, 1)


def column(values: Iterable[int]) -> "array[int]":
    """Return a field of int32."""
    return array("i", values)


def halves(values: Iterable[int]) -> "tuple[array[int], array[int]]":
    """Return a field of int64 as two: the high halves and the low ones."""
    words = array("i", array("q", values).tobytes())
    return words[_HIGH::2], words[_LOW::2]


def repeated(content: bytes, count: int) -> "array[int]":
    """Return the fields of ``content``, a multiple of four bytes of a file, so many times."""
    words = array("i", content)
    if _IS_LITTLE:
        words.byteswap()
    return words * count


def packed(words: "array[int]") -> bytes:
    """Return the bytes of a file, big-endian, of numbers of any size; they are spent."""
    if _IS_LITTLE:
        words.byteswap()
    return words.tobytes()


def progression(first: int, step: int, count: int) -> bytes:
    """Return ``count`` big-endian numbers of eight bytes, each by ``step`` above the last.

    They are the digits of one long number, so that a few calls make them all. None may be negative,
    or 2^64 and above.
    """
    return (first * ones(count) + _steps(step, count)).to_bytes(8 * count, "big")


@lru_cache(maxsize=256)  # of at most 16 KB
def ones(count: int) -> int:
    """Return the long number whose digits of eight bytes are all 1."""
    return int.from_bytes((1).to_bytes(8, "big") * count, "big")


@lru_cache(maxsize=256)
def _steps(step: int, count: int) -> int:
    content = b"".join((step * number).to_bytes(8, "big") for number in range(count))
    return int.from_bytes(content, "big")
