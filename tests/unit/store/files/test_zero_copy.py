"""Which parts of a file are in the page cache."""

from pathlib import Path

import pytest

from halfmq.store.files import disk, zero_copy
from halfmq.store.files.zero_copy import ANSWER_AGE_MAX, BLOCK_SIZE, BLOCKS_MAX, PageResidency


def test_the_residency_of_a_block_is_cached_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is asked once per block, and again soon, in case pages were evicted."""
    now = 100.0
    monkeypatch.setattr(zero_copy, "monotonic", lambda: now)
    asked: list[tuple[int, int]] = []
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * BLOCK_SIZE))
    with disk.opened(path) as fd:
        pages = PageResidency()
        if pages.cached(fd, 0, 1) is None:
            pytest.skip("the kernel does not report what is cached: cachestat needs Linux 6.5")
        lacks = PageResidency.lacks

        def asking(pages: PageResidency, fd: int, position: int, length: int) -> bool:
            asked.append((position, length))
            return lacks(pages, fd, position, length)

        monkeypatch.setattr(PageResidency, "lacks", asking)
        for position in range(BLOCK_SIZE, 2 * BLOCK_SIZE, 1_000):
            assert pages.has(fd, 0, position, 900)
        assert asked == [(BLOCK_SIZE, BLOCK_SIZE), (2 * BLOCK_SIZE, BLOCK_SIZE)]
        assert pages.has(fd, 5 * BLOCK_SIZE, BLOCK_SIZE, 900), "a block of another file"
        assert len(asked) == 3
        monkeypatch.setattr(PageResidency, "lacks", lambda *_: True)
        assert pages.has(fd, 0, BLOCK_SIZE, 900)
        now += ANSWER_AGE_MAX
        assert not pages.has(fd, 0, BLOCK_SIZE, 900)


def test_a_range_within_a_partly_cached_block_is_checked_on_its_own(tmp_path: Path) -> None:
    """Such blocks are at the end of the log and of each file."""
    path = tmp_path / "file"
    path.write_bytes(bytes(BLOCK_SIZE + 5_000))
    with disk.opened(path) as fd:
        pages = PageResidency()
        if pages.cached(fd, 0, 1) is None:
            pytest.skip("the kernel does not report what is cached: cachestat needs Linux 6.5")
        assert pages.has(fd, 0, BLOCK_SIZE - 100, 5_100)
        assert not pages.has(fd, 0, BLOCK_SIZE, 10_000)


def test_the_number_of_cached_residency_answers_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of blocks that are read."""
    path = tmp_path / "file"
    path.write_bytes(bytes(BLOCK_SIZE))
    monkeypatch.setattr(PageResidency, "lacks", lambda *_: False)
    with disk.opened(path) as fd:
        pages = PageResidency()
        pages.is_known = True  # also before Linux 6.5
        for number in range(BLOCKS_MAX + 10):
            assert pages.has(fd, number * BLOCK_SIZE, 0, 100)

    # No public result shows how much memory is used.
    assert len(pages._cached_until) == 10
