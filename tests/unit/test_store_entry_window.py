"""Entries that were read once are found again without the system, and never when they are stale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from halfmq.store import disk
from halfmq.store.consume_queue import ConsumeQueue, MapPool
from halfmq.store.entry_window import WINDOW_ENTRIES, WINDOWS_MAX, EntryWindow, WindowPool
from halfmq.store.format.filler import FILLER_TAGS_CODE
from halfmq.store.format.queue_entry import ENTRY_SIZE, QueueEntry
from halfmq.store.selection import GetResult, select

SIZE = 100  # bytes of each record


def entries(start: int, end: int, *, at: int = 0) -> bytes:
    numbers = range(start, end)
    return b"".join(QueueEntry(at + number * SIZE, SIZE, 0).pack() for number in numbers)


@contextmanager
def queue_of(home: Path, count: int) -> Iterator[ConsumeQueue]:
    """Open a queue of a former life, so that nothing of it is read through its map."""
    for attempt in range(2):
        queue = ConsumeQueue("T", 0, directory=home, file_size=1_000 * ENTRY_SIZE, pool=MapPool(4))
        with closing(queue):
            if attempt:
                queue.load()
                yield queue
            else:
                queue.extend(entries(0, count), count * SIZE)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what the system is asked to read."""
    asked: list[int] = []
    preadv = disk.preadv

    def reading(fd: int, targets: Sequence[bytearray], position: int, flags: int = 0) -> int:
        asked.append(sum(map(len, targets)))
        return preadv(fd, targets, position, flags)

    monkeypatch.setattr(disk, "preadv", reading)
    return asked


def pull(queue: ConsumeQueue, offset: int, count: int = 32) -> GetResult:
    return select(
        queue,
        offset,
        readable_offset=1 << 40,
        log_start=0,
        max_count=count,
        max_bytes=1 << 18,
        tag_codes=None,
        wait=False,
    )


def test_the_system_is_asked_once_for_eight_pulls(tmp_path: Path, reads: list[int]) -> None:
    """Of that consumer, and of each one that comes behind."""
    with queue_of(tmp_path, 600) as queue:
        reads.clear()
        for _ in range(3):
            for offset in range(0, 512, 32):
                assert pull(queue, offset).ranges == [(offset * SIZE, 32 * SIZE)]

        assert reads == [WINDOW_ENTRIES * ENTRY_SIZE] * 2


def test_a_queues_end_is_looked_at_each_time(tmp_path: Path) -> None:
    """There are always more soon."""
    with queue_of(tmp_path, 300) as queue:
        assert pull(queue, 290).count == 10
        queue.extend(entries(300, 310), 310 * SIZE)
        assert pull(queue, 290).count == 20
        queue.extend(entries(310, 600), 600 * SIZE)
        assert pull(queue, 290).ranges == [(290 * SIZE, 32 * SIZE)]


def test_entries_that_were_cut_are_not_found_again(tmp_path: Path) -> None:
    with queue_of(tmp_path, 600) as queue:
        assert pull(queue, 200).ranges == [(200 * SIZE, 32 * SIZE)]
        queue.cut(210)
        queue.extend(entries(210, 600, at=5), 600 * SIZE + 5)

        assert pull(queue, 200).ranges == [(200 * SIZE, 10 * SIZE), (210 * SIZE + 5, 22 * SIZE)]


def test_an_entry_that_was_mended_is_found(tmp_path: Path) -> None:
    with queue_of(tmp_path, 600) as queue:
        assert pull(queue, 0).count == 32
        queue.replace(3, QueueEntry(7, SIZE, 0))

        assert pull(queue, 3, 1).ranges == [(7, SIZE)]


def test_a_window_is_of_one_file_and_of_what_the_queue_still_has(tmp_path: Path) -> None:
    """Its own file may be the last one that is left."""
    with queue_of(tmp_path, 1_500) as queue:
        assert queue.window(1_000) is None, "the second file begins with 1,000"
        assert queue.window(1_100) is not None
        queue.begin_at(300)
        assert queue.window(300) is None
        assert queue.window(600) is not None
        assert pull(queue, 300).count == 32


def test_what_is_not_in_memory_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is kept needs no memory of the system."""
    with queue_of(tmp_path, 600) as queue:
        kept = pull(queue, 300)
        monkeypatch.setattr(disk, "preadv", lambda *_: 10)

        assert queue.window(0) is None
        assert pull(queue, 300) == kept


def test_no_more_are_kept_than_there_is_room_for() -> None:
    """The oldest goes first, of whichever queue; a queue may forget its own at any time."""
    pool = WindowPool(3)
    window = EntryWindow.of(entries(0, WINDOW_ENTRIES))
    first: dict[int, EntryWindow] = {}
    second: dict[int, EntryWindow] = {}
    pool.keep(first, 0, window)
    pool.keep(second, 0, window)
    pool.keep(first, 256, window)
    pool.keep(second, 256, window)
    assert (list(first), list(second)) == ([256], [0, 256])

    second.clear()
    for number in range(WINDOWS_MAX):
        pool.keep(first, number, window)
        assert len(first) <= 3
    assert (len(first), len(second), len(pool._kept)) == (3, 0, 3)


@pytest.mark.parametrize(
    "odd", [QueueEntry(5, 0, 0), QueueEntry(5, -1, 0), QueueEntry(5, 92, FILLER_TAGS_CODE)]
)
def test_what_is_no_message_is_seen(odd: QueueEntry) -> None:
    """Then entries are looked at one by one. A blank has a size above any limit of a pull."""
    content = entries(0, 100) + odd.pack() + entries(101, WINDOW_ENTRIES)

    assert EntryWindow.of(entries(0, WINDOW_ENTRIES)).is_plain
    assert not EntryWindow.of(content).is_plain
