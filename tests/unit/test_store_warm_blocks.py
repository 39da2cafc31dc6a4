"""Which parts of the log need not be asked for, and when they are asked for again."""

import pytest

from halfmq.store.warm_blocks import (
    BELIEVED_S,
    BLOCK_SIZE,
    BLOCKS_MAX,
    CHECK_S,
    CHECKS_MAX,
    WarmBlocks,
)

FD, FILE_SIZE = 7, 3 * BLOCK_SIZE + 1000


class Kernel:
    """Answers what is there; each look takes as long as it is told."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, int, int]] = []
        self.there = True
        self.now = 100.0
        self.takes = 0.0

    def is_there(self, fd: int, position: int, length: int) -> bool:
        self.looks.append((fd, position, length))
        self.now += self.takes
        return self.there

    def clock(self) -> float:
        return self.now


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def warm(kernel: Kernel) -> WarmBlocks:
    return WarmBlocks(kernel.is_there, FILE_SIZE, clock=kernel.clock)


def test_a_block_that_is_used_is_looked_at_once(kernel: Kernel, warm: WarmBlocks) -> None:
    """And then believed for a while, all of it, and nothing beside it."""
    base, position = 5 * FILE_SIZE, BLOCK_SIZE + 10
    assert not warm.has(base, position, 100)
    warm.note(FD, base, position)
    assert not kernel.looks
    warm.note(FD, base, position + 500)

    assert kernel.looks == [(FD, BLOCK_SIZE, BLOCK_SIZE)]
    assert warm.has(base, BLOCK_SIZE, BLOCK_SIZE)
    assert not warm.has(base, BLOCK_SIZE - 1, 2)
    assert not warm.has(base, 2 * BLOCK_SIZE - 1, 2)
    assert not warm.has(base, 2 * BLOCK_SIZE, 1)
    assert not warm.has(0, position, 100)
    kernel.now += BELIEVED_S
    assert not warm.has(base, position, 100)


def test_the_last_block_ends_with_its_file(kernel: Kernel, warm: WarmBlocks) -> None:
    for _ in range(2):
        warm.note(FD, 0, FILE_SIZE - 1)

    assert kernel.looks == [(FD, 3 * BLOCK_SIZE, 1000)]


def test_a_block_that_lacks_a_page_is_not_believed(kernel: Kernel, warm: WarmBlocks) -> None:
    kernel.there = False
    for _ in range(2):
        warm.note(FD, 0, 0)

    assert len(kernel.looks) == 1
    assert not warm.has(0, 0, 1)


@pytest.mark.parametrize(("takes", "checks"), [(0.0, 1), (5 * CHECK_S, 5), (1.0, CHECKS_MAX)])
def test_a_look_comes_when_as_much_was_spent_on_checks(
    kernel: Kernel, warm: WarmBlocks, takes: float, checks: int
) -> None:
    """Where all pages are small it takes longer; a clock that stopped does not end it for good."""
    kernel.takes = takes * 1.01
    for _ in range(2):
        warm.note(FD, 0, 0)
    kernel.looks.clear()
    kernel.now += BELIEVED_S
    for _ in range(checks):
        warm.note(FD, 0, 0)
    assert not kernel.looks
    warm.note(FD, 0, 0)

    assert len(kernel.looks) == 1


def test_memory_is_bounded(kernel: Kernel, warm: WarmBlocks) -> None:
    """However many places are read from."""
    for number in range(3 * BLOCKS_MAX):
        warm.note(FD, number * FILE_SIZE, 0)
    for number in range(3 * BLOCKS_MAX):
        for _ in range(2):
            warm.note(FD, number * FILE_SIZE, 0)

    assert max(len(warm._checks), len(warm._believed_until)) <= BLOCKS_MAX
    assert len(kernel.looks) >= 3 * BLOCKS_MAX
