"""Finding records in many places at once finds what single steps find."""

from __future__ import annotations

import mmap
import random
import struct

import pytest

from halfmq.spark_jobs.log.rows import SegmentBytes
from halfmq.spark_jobs.log.walk import SECTION_BYTES, record_bounds
from halfmq.store.format.record import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, RECORD_SIZE_MIN
from tests.support.sections import sections_of

BASE = 5 << 30
PREFIX = struct.Struct(">iI")


def head(size: int, place: int, magic: int = MAGIC_V1) -> bytes:
    """What of a record the walk looks at, up to its physical offset."""
    return PREFIX.pack(size, magic) + bytes(20) + struct.pack(">q", BASE + place)


def some_records(choose: random.Random, length: int, *, decoys: float = 0.0) -> bytearray:
    """Records without a gap; some bodies hold what looks like a record, at its very place."""
    content = bytearray(choose.randbytes(length))
    place = 0
    while length - place >= RECORD_SIZE_MIN:
        size = min(RECORD_SIZE_MIN + choose.choice([9, 99, 999, 9_999]), length - place)
        size = choose.randint(RECORD_SIZE_MIN, size)
        if length - place - size < RECORD_SIZE_MIN:
            size = length - place
        content[place : place + 36] = head(size, place, choose.choice([MAGIC_V1, MAGIC_V2]))
        if size > 200 and choose.random() < decoys:
            inside = place + choose.randrange(100, size - 50)
            reach = choose.choice([choose.randrange(91, 5_000), 1 << 30, 0, -1])
            content[inside : inside + 36] = head(reach, inside)
        place += size
    return content


def segment_of(content: bytearray) -> SegmentBytes:
    mapped = mmap.mmap(-1, len(content))
    mapped.write(content)
    return SegmentBytes(mapped, BASE)


def stepped(content: bytearray, stop: int, limit: int) -> list[int]:
    """Where records begin, and where the last one ends, found one by one."""
    bounds = [0]
    while bounds[-1] < min(stop, limit - RECORD_SIZE_MIN + 1):
        size, magic = PREFIX.unpack_from(content, bounds[-1])
        if magic not in {MAGIC_V1, MAGIC_V2} or size < RECORD_SIZE_MIN:
            break
        if bounds[-1] + size > limit:
            break
        bounds.append(bounds[-1] + size)
    return bounds


def walked(segment: SegmentBytes, stop: int, limit: int) -> tuple[list[int], int]:
    """The same by walks that go on where the one before ended; and how many it took."""
    bounds = [0]
    for number in range(10_000):
        found = record_bounds(segment, bounds[-1], stop, limit).tolist()
        assert found[0] == bounds[-1]
        if len(found) == 1:
            return bounds, number
        bounds += found[1:]
    raise AssertionError("the walk does not end")


@pytest.mark.parametrize("size", [128, 1 << 10, SECTION_BYTES])
@pytest.mark.parametrize("decoys", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(10))
def test_what_sections_find_is_what_single_steps_find(seed: int, decoys: float, size: int) -> None:
    """Wherever it stops, whatever bodies hold, and where the log has a hole or ends."""
    choose = random.Random(seed)
    content = some_records(choose, 1 << 18, decoys=decoys)
    for _ in range(seed % 3):
        start = choose.randrange(len(content))
        hole = choose.choice([bytes(3_000), choose.randbytes(9), PREFIX.pack(99, MAGIC_BLANK)])
        content[start : start + len(hole)] = hole
    del content[1 << 18 :]
    limit = choose.choice([len(content), choose.randrange(1, len(content))])
    stop = choose.choice([limit, choose.randrange(1, len(content))])

    with sections_of(size):
        found, _ = walked(segment_of(content), stop, limit)

    assert found == stepped(content, stop, limit)


def test_sound_records_take_one_walk() -> None:
    """What merely looks like a magic does not end a walk; only a record inside a record does."""
    content = some_records(random.Random(1), 1 << 20)
    content[SECTION_BYTES : SECTION_BYTES + 8] = PREFIX.pack(500, MAGIC_V1)  # in some body

    found, walks = walked(segment_of(content), len(content), len(content))

    assert found == stepped(content, len(content), len(content))
    assert (found[-1], walks) == (len(content), 1)


def test_nothing_is_found_where_nothing_is() -> None:
    """Zeros, garbage, and less than a record."""
    garbage = random.Random(2).randbytes(1 << 18)
    for content in (bytearray(1 << 18), bytearray(garbage), bytearray(20)):
        assert walked(segment_of(content), len(content), len(content)) == ([0], 0)
