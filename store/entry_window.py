"""Entries of consume queues that were read just now, for who reads on and for who comes behind.

A pull takes 32 entries, and to ask the system for them and to take them apart is a fifth of its
time. So what eight pulls in turn need is read and taken apart at once, and kept for a while: the
next pull of that consumer finds it here, and so do other groups that read the same queue.

Only what is complete is kept. Entries are not changed but by who repairs a queue or cuts its end.
"""

from collections import deque
from itertools import accumulate
from struct import Struct
from typing import Final, NamedTuple, Self

from .format.filler import FILLER_TAGS_CODE
from .format.queue_entry import ENTRY_SIZE

WINDOW_ENTRIES: Final = 256
WINDOW_BYTES: Final = WINDOW_ENTRIES * ENTRY_SIZE
WINDOWS_MAX: Final = 512  # kept for all queues together, 15 KiB each

_SIZES: Final = Struct(">" + "8xi8x" * WINDOW_ENTRIES)
# Tells a filler at its place; elsewhere it may come about by chance, which only costs time.
FILLER_MARK: Final = FILLER_TAGS_CODE.to_bytes(8, "big")


class EntryWindow(NamedTuple):
    """A queue's entries from a multiple of ``WINDOW_ENTRIES`` on."""

    entries: bytes
    sizes_until: tuple[int, ...]  # of all messages before one of them, and of all
    is_plain: bool  # each entry is that of a message, as nearly always

    @classmethod
    def of(cls, entries: bytes) -> Self:
        """Take ``WINDOW_BYTES`` of a queue apart."""
        sizes = _SIZES.unpack(entries)
        is_plain = min(sizes) > 0 and FILLER_MARK not in entries
        return cls(entries, tuple(accumulate(sizes, initial=0)), is_plain)


class WindowPool:
    """Bounds the windows that all queues keep; the oldest ones are given up first."""

    __slots__ = ("_kept", "_size_max")

    def __init__(self, size_max: int = WINDOWS_MAX) -> None:
        self._kept: deque[tuple[dict[int, EntryWindow], int]] = deque()
        self._size_max = size_max

    def keep(self, windows: dict[int, EntryWindow], queue_offset: int, window: EntryWindow) -> None:
        """Add one to those of a queue, which may remove any of them by itself."""
        windows[queue_offset] = window
        self._kept.append((windows, queue_offset))
        if len(self._kept) > self._size_max:
            of_queue, oldest = self._kept.popleft()
            of_queue.pop(oldest, None)
