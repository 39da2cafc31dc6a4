"""Giving back slowly what deleted files take.

What was written not long ago is in the page cache, and free as soon as its file is gone. Under a
virtual machine the host may take what is free (*free page reporting* of virtio-balloon), every two
seconds all of it. Where that were gigabytes, every processor of the machine stood still for up to
half a second, ours with them; 70 MiB at a time nobody noticed. And where the disk is told of free
space (the mount option *discard*), that of a gigabyte stops flushes for a tenth of a second.

So a large file whose name is removed stays open here, and is truncated piece by piece. That is for
files that nobody else has open: who does reads one to its end, and frees it by closing it.

A peer may not yet have taken what was sent to it from such a file (``zero_copy``), and the kernel
writes zeros over the rest of the huge page in which a file is cut. So files are cut at multiples of
two mebibytes.
"""

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import disk
from .zero_copy import PageResidency

logger = logging.getLogger(__name__)

KEPT_BYTES_MIN: Final = 64 << 20  # of a file; what a smaller one takes may go at once
# Of all files that wait. A log that is deleted as it is written, faster than ``WARM_SIZE`` in
# ``WARM_PAUSE``, must not fill the disk: the oldest go at once then.
KEPT_BYTES_MAX: Final = 8 << 30
WARM_SIZE: Final = 2 << 20  # bytes that go at once of what is in memory: a huge page
WARM_PAUSE: Final = 0.05  # seconds until the next ones: 40 MiB a second
COLD_SIZE: Final = 16 << 20  # bytes that go at once of what is on disk alone
COLD_PAUSE: Final = 0.02  # seconds
OTHERS_PAUSE: Final = 1.0  # seconds until it is asked again whether somebody else reads a file
OTHERS_TRIES: Final = 60  # so often: a cold pull takes milliseconds, a tool may take longer


@dataclass(slots=True)
class _File:
    fd: int
    size: int
    tries: int = 0
    is_ours: bool = False  # nobody else has it open, and nobody can open it any more


class DeferredDeletes:
    """Files that have no name any more; one thread, but for the attributes."""

    def __init__(self) -> None:
        self.bytes = 0  # that are not free yet
        self.is_urgent = False  # whether they are needed at once, whatever that costs
        self._files: deque[_File] = deque()
        self._residency = PageResidency()

    def keep(self, path: Path) -> None:
        """Keep a file open whose name is about to be removed, if it is large and can be opened."""
        if self.is_urgent or not disk.KNOWS_OTHER_USERS:
            return
        try:
            fd = disk.open_file(path, disk.WRITE)
        except OSError:
            return
        size = disk.fstat(fd).st_size
        if size < KEPT_BYTES_MIN:
            disk.close(fd)
            return
        self._files.append(_File(fd, size))
        self.bytes += size
        while self.bytes > KEPT_BYTES_MAX:
            self._close_first()

    def work(self) -> float | None:
        """Give a piece back; return seconds until there should be another, None if none is left."""
        if self.is_urgent:
            self.close()
        if not self._files:
            return None
        file = self._files[0]
        file.is_ours = file.is_ours or not disk.has_other_users(file.fd)
        if not file.is_ours:
            file.tries += 1
            if file.tries == OTHERS_TRIES:
                self._close_first()
            return OTHERS_PAUSE
        rest = _cut_at(file.size, COLD_SIZE)
        pause = COLD_PAUSE
        if self._residency.cached(file.fd, rest, file.size - rest) != 0:
            rest, pause = _cut_at(file.size, WARM_SIZE), WARM_PAUSE
        try:
            disk.ftruncate(file.fd, rest)
        except OSError as error:
            logger.warning("event=deleted_file_not_truncated error=%r", str(error))
            self._close_first()  # which frees all of it, if anything does
            return pause
        self.bytes -= file.size - rest
        file.size = rest
        if not rest:
            self._close_first()
        return pause

    def _close_first(self) -> None:
        file = self._files.popleft()
        self.bytes -= file.size
        disk.close(file.fd)

    def close(self) -> None:
        """Free all of it now."""
        while self._files:
            self._close_first()


def _cut_at(size: int, step: int) -> int:
    """Return the size to which a file is cut next: the largest smaller multiple of a step."""
    return (size - 1) // step * step
