"""Pulls get every selected message once and in order, with any others between them."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from halfmq.store.files.mapped_file_queue import MappedFileQueue
from halfmq.store.format.filler import FILLER_TAGS_CODE
from halfmq.store.format.queue_entry import ENTRY_SIZE, PRE_BLANK, QueueEntry
from halfmq.store.queue.consume_queue import ConsumeQueue, MapPool
from halfmq.store.queue.pull_selection import SCAN_COUNT_MAX, GetResult, GetStatus, select

PER_FILE = 612  # entries, so that some pulls are of two files
TAGS = (0, 7, -5, FILLER_TAGS_CODE & 0x7FFF_FFFF)
LOG_START = 5_000


def entries(choose: random.Random, count: int) -> list[QueueEntry]:
    """Return entries as a broker writes them, in runs of one kind."""
    made: list[QueueEntry] = []
    end = choose.choice([0, LOG_START])
    while len(made) < count:
        gaps, odd = choose.random() < 0.5, choose.random() < 0.2
        tags = choose.sample(TAGS, choose.randint(1, 2))
        for _ in range(choose.randint(1, 300)):
            start = end + (choose.choice([0, 50]) if gaps else 0)
            size = choose.randint(92, 300)
            kind = choose.choice(["blank", "filler", "message"]) if odd else "message"
            if kind == "blank":
                made.append(PRE_BLANK)
                continue
            tag = FILLER_TAGS_CODE if kind == "filler" else choose.choice(tags)
            made.append(QueueEntry(start, size, tag))
            end = start + size
    return made[:count]


def wanted(entry: QueueEntry, tag_codes: frozenset[int] | None) -> bool:
    return (
        entry != PRE_BLANK
        and entry.tags_code != FILLER_TAGS_CODE
        and entry.physical_offset >= LOG_START
        and (tag_codes is None or entry.tags_code in tag_codes)
    )


def merged(found: list[QueueEntry]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for entry in found:
        if ranges and sum(ranges[-1]) == entry.physical_offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + entry.size)
        else:
            ranges.append((entry.physical_offset, entry.size))
    return ranges


def pulled(
    queue: ConsumeQueue, offset: int, choose: random.Random, tag_codes: frozenset[int] | None
) -> Iterator[tuple[int, int, int, GetResult]]:
    """Pull from an offset to the end; yield each pull's offset, limits and result."""
    while offset < queue.next_offset:
        count, size = choose.choice([1, 31, 32, 64, 100]), choose.choice([500, 6_000, 1 << 18])
        found = select(
            queue,
            offset,
            readable_offset=1 << 40,
            log_start=LOG_START,
            max_count=count,
            max_bytes=size,
            tag_codes=tag_codes,
            wait=choose.random() < 0.5,
        )
        yield offset, count, size, found
        assert found.next_offset > offset
        offset = found.next_offset


@given(
    seed=st.integers(0, 2**32),
    tag_codes=st.none() | st.frozensets(st.sampled_from(TAGS)),
    reopened=st.booleans(),
)
def test_each_message_comes_once_and_in_order(
    seed: int, tag_codes: frozenset[int] | None, reopened: bool
) -> None:
    """With any tags, before and after a restart."""
    choose = random.Random(seed)
    made = entries(choose, choose.choice([3, 300, 1_500]))
    with tempfile.TemporaryDirectory() as home:
        queue = opened(Path(home))
        queue.extend(b"".join(entry.pack() for entry in made), 1 << 30)
        if reopened:
            queue.close()
            queue = opened(Path(home))
            queue.files.load()
            queue.load()
        with closing(queue):
            for _ in range(3):
                start = choose.choice([0, choose.randrange(len(made))])
                for offset, count, size, found in pulled(queue, start, choose, tag_codes):
                    check(made, offset, count, size, tag_codes, found)


def opened(home: Path) -> ConsumeQueue:
    size = PER_FILE * ENTRY_SIZE
    return ConsumeQueue("T", 0, MappedFileQueue(home, size), MapPool(4))


def check(
    made: list[QueueEntry],
    offset: int,
    count: int,
    size: int,
    tag_codes: frozenset[int] | None,
    found: GetResult,
) -> None:
    chosen = [entry for entry in made[offset : found.next_offset] if wanted(entry, tag_codes)]
    assert found.ranges == merged(chosen)
    assert (found.count, found.size) == (len(chosen), sum(entry.size for entry in chosen))
    assert (found.status is GetStatus.FOUND) == bool(chosen)
    assert found.count <= count
    assert found.size <= size or found.count == 1
    assert (found.min_offset, found.max_offset) == (0, len(made))
    rest = [entry for entry in made[found.next_offset :] if wanted(entry, tag_codes)]
    if rest and found.next_offset - offset < SCAN_COUNT_MAX:
        following = found.size + rest[0].size
        assert found.count == count or (found.count and following > size), "no more than there was"
