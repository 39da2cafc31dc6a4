"""Blocks of the log that were in the page cache a moment ago.

To ask the kernel of each part that is sent costs 7 % of a pull. So where many parts of one block
are sent, the whole block is looked at, and believed to stay where it is for a tenth of a second.
Should the kernel give away a page within that time, the loop waits once for the disk to bring it
back: of pages in use that is nearly never asked.
"""

from collections.abc import Callable
from time import monotonic
from typing import Final

BLOCK_SIZE: Final = 2 << 20  # bytes: as much as kernels make one page of
BELIEVED_S: Final = 0.1  # seconds
BLOCKS_MAX: Final = 4096  # remembered, half a MiB; then all are forgotten
CHECK_S: Final = 2e-6  # seconds that it takes to ask of one part
# Of many small pages each is counted, 20 us a block. Checks that cost as much come first, so that
# of a block which is used no more a look costs no more than they did.
CHECKS_MAX: Final = 32

IsThere = Callable[[int, int, int], bool]  # a descriptor, position and length


class WarmBlocks:
    """Remembers them; blocks are told apart by the physical offset at which they begin."""

    def __init__(
        self, is_there: IsThere, file_size: int, *, clock: Callable[[], float] = monotonic
    ) -> None:
        """``is_there`` asks the kernel of a file's range; the clock's unit is a second."""
        self._is_there = is_there
        self._file_size = file_size
        self._clock = clock
        self._believed_until: dict[int, float] = {}
        self._checks: dict[int, int] = {}  # of parts of a block that nobody has looked at
        self._checks_before_look = 1

    def has(self, base: int, position: int, length: int) -> bool:
        """Tell whether a part of the file that begins at ``base`` lies in a block believed warm."""
        start = position - position % BLOCK_SIZE
        return (
            position + length <= start + BLOCK_SIZE
            and self._believed_until.get(base + start, 0.0) > self._clock()
        )

    def note(self, fd: int, base: int, position: int) -> None:
        """Note that a part was asked for and is there; look at its block if that is worth it."""
        start = position - position % BLOCK_SIZE
        block = base + start
        checks = self._checks.get(block, 0) + 1
        if checks <= self._checks_before_look:
            self._make_room(self._checks)
            self._checks[block] = checks
            return
        self._checks.pop(block, None)
        began = self._clock()
        warm = self._is_there(fd, start, min(BLOCK_SIZE, self._file_size - start))
        now = self._clock()
        self._checks_before_look = min(max(int((now - began) / CHECK_S), 1), CHECKS_MAX)
        if warm:
            self._make_room(self._believed_until)
            self._believed_until[block] = now + BELIEVED_S

    @staticmethod
    def _make_room(blocks: dict[int, int] | dict[int, float]) -> None:
        if len(blocks) >= BLOCKS_MAX:
            blocks.clear()
