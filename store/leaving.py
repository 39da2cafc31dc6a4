"""Giving the memory of deleted files back slowly.

What was written not long ago is in the page cache, and free as soon as its file is gone. Under a
virtual machine the host may take what is free (*free page reporting* of virtio-balloon), every two
seconds all of it. Where that were gigabytes, every processor of the machine stood still for up to
half a second, ours with them; 70 MiB at a time nobody noticed.

So a large file whose name is removed stays open here. What of it is in memory goes in pieces; then
it is closed, which frees its space on the disk.
"""

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import disk
from .residence import Residence

logger = logging.getLogger(__name__)

KEPT_BYTES_MIN: Final = 64 << 20  # of a file; the memory of a smaller one may go at once
# Of all files that wait. A log that is deleted as it is written, faster than ``PIECE_SIZE`` in
# ``PIECE_PAUSE``, must not fill the disk: the oldest go at once then.
KEPT_BYTES_MAX: Final = 8 << 30
# Bytes of memory that go at once; where the page cache has them in one, less has no effect.
PIECE_SIZE: Final = 2 << 20
PIECE_PAUSE: Final = 0.05  # seconds between two of them: 40 MiB a second
_LOOKED_AT_MAX: Final = 64  # pieces in a row that are not in memory; 3 us each
_LOOK_PAUSE: Final = 0.001  # seconds until the next so many


@dataclass(slots=True)
class _File:
    fd: int
    size: int
    position: int = 0  # before it nothing is in memory


class Leaving:
    """Files that have no name any more; one thread, but for the attributes."""

    def __init__(self) -> None:
        self.bytes = 0  # sizes of all that are kept
        self.is_hurried = False  # whether their space is needed at once, whatever that costs
        self._files: deque[_File] = deque()
        self._residence = Residence()

    def keep(self, path: Path) -> None:
        """Keep a file open whose name is about to be removed, if it is large and can be opened."""
        try:
            fd = disk.open_file(path, disk.READ)
        except OSError:
            return
        size = disk.fstat(fd).st_size
        if size < KEPT_BYTES_MIN or self.is_hurried:
            disk.close(fd)
            return
        self._files.append(_File(fd, size))
        self.bytes += size
        while self.bytes > KEPT_BYTES_MAX:
            self._close_first()

    def work(self) -> float | None:
        """Give a piece back; return seconds until there should be another, None if none is left."""
        if self.is_hurried:
            self.close()
        if not self._files:
            return None
        file = self._files[0]
        for _ in range(_LOOKED_AT_MAX):
            if file.position >= file.size:
                self._close_first()
                return _LOOK_PAUSE
            position, size = file.position, min(PIECE_SIZE, file.size - file.position)
            file.position += size
            if self._residence.cached(file.fd, position, size):
                disk.need_no_more(file.fd, position, size)
                return PIECE_PAUSE
        return _LOOK_PAUSE

    def _close_first(self) -> None:
        file = self._files.popleft()
        self.bytes -= file.size
        disk.close(file.fd)

    def close(self) -> None:
        """Free all of it now."""
        while self._files:
            self._close_first()
