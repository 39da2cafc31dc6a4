"""Free the space of deleted files slowly.

Recently written data is in the page cache, and its memory becomes free when its file is deleted.
In a virtual machine the host may reclaim free memory every two seconds (*free page reporting* of
virtio-balloon). With gigabytes to reclaim, all processors of the machine stopped for up to half a
second; 70 MiB at a time had no visible effect. With the mount option *discard*, freeing a gigabyte
of disk delays flushes by a tenth of a second.

Therefore a large file stays open here after its name is removed, and is truncated in steps. This
applies only to files that no other process has open: a reader reads a file to its end, and the
space becomes free when the reader closes it.

A peer may not have received all that was sent to it from such a file (``zero_copy``), and the
kernel writes zeros over the rest of the huge page in which a file is cut. So files are cut at
multiples of two mebibytes.
"""

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import disk
from .zero_copy import PageResidency

logger = logging.getLogger(__name__)

KEPT_BYTES_MIN: Final = 64 << 20  # of a file; a smaller one is freed at once
# Bytes of all waiting files. If a log is written and deleted faster than ``WARM_SIZE`` per
# ``WARM_PAUSE``, they must not fill the disk: above this limit the oldest are freed at once.
KEPT_BYTES_MAX: Final = 8 << 30
WARM_SIZE: Final = 2 << 20  # bytes freed in one step of data in the page cache: a huge page
WARM_PAUSE: Final = 0.05  # seconds until the next step: 40 MiB a second
COLD_SIZE: Final = 16 << 20  # bytes freed in one step of data that is only on disk
COLD_PAUSE: Final = 0.02  # seconds
OTHERS_PAUSE: Final = 1.0  # seconds between two tests whether others have a file open
OTHERS_TRIES: Final = 60  # tests; a cold pull takes milliseconds, a tool may take longer


@dataclass(slots=True)
class _File:
    fd: int
    size: int
    tries: int = 0
    is_ours: bool = False  # no other process has it open, and none can open it any more


class DeferredDeletes:
    """Deleted files whose space is not free yet; for one thread, except the attributes."""

    def __init__(self) -> None:
        self.bytes = 0  # not free yet
        self.is_urgent = False  # free all at once, even if that stops the machine briefly
        self._files: deque[_File] = deque()
        self._residency = PageResidency()

    def keep(self, path: Path) -> None:
        """Keep a file open that is about to be deleted, if it is large and can be opened."""
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
        """Free the next piece; return seconds until the next call is due; None if all is free."""
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
            self._close_first()  # frees all of it
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
        while self._files:
            self._close_first()


def _cut_at(size: int, step: int) -> int:
    """Return the size to which a file is cut next: the largest smaller multiple of a step."""
    return (size - 1) // step * step
