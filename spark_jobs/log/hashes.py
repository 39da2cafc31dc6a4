"""Texts as hashes of 64 bits, many at once.

Of a hundred million texts, two have equal hashes with a probability of 1 in 4000.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .arrays import WORD, Ints, Words, joined, words

_HASHED_MAX: Final = 512  # bytes hashed of a text; keys have 32, groups and topics up to 255
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)

Hashes = npt.NDArray[np.uint64]


def hash_of(text: str) -> int:
    """Hash a text as it stands in a column."""
    return int(hashes_of(pa.array([text.encode()])).astype(np.int64)[0])


def hashes_of(texts: pa.BinaryArray) -> Hashes:
    """Hash some texts."""
    data, bounds = joined(texts)
    padded = np.append(data, np.zeros(WORD, dtype=np.uint8))
    return hashed(words(padded), bounds[:-1], bounds[1:])


def hashed(content: Words, starts: Ints, ends: Ints) -> Hashes:
    """Hash the texts [start, end) of up to 512 bytes; ``content`` reaches a word beyond them."""
    sizes = np.minimum(ends - starts, _HASHED_MAX)
    hashes = mixed(sizes.astype(np.uint64) + GOLDEN)
    for place in range(0, int(sizes.max(initial=0)), WORD):
        left = sizes - place
        if left.min() >= WORD:
            hashes = mixed(hashes ^ content[starts + place])
            continue
        here = np.flatnonzero(left > 0)
        bits = 8 * np.minimum(left[here], WORD).astype(np.uint64)
        mask = np.uint64(2**64 - 1) >> (np.uint64(64) - bits)
        hashes[here] = mixed(hashes[here] ^ (content[starts[here] + place] & mask))
    return hashes


def mixed(values: Hashes) -> Hashes:
    """Spread every bit over all: the last steps of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
