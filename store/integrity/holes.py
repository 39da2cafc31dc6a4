"""Zeros among the entries of a queue, where no digest tells.

A part of a queue file may be zeroed that a kill left without a digest. The search for the end of
the entries meets such a hole by chance only, and consumers would skip the messages.
"""

from pathlib import Path
from typing import Final

from ..files import disk
from ..format.queue_entry import ENTRY_SIZE
from ..queue.consume_queue import ConsumeQueue
from .digests import QueueEndDigests
from .file_digest import digest_of

_READ_SIZE: Final = 1 << 20  # bytes at once
# Entries never have so many zeros in a row: a size is not 0, and an offset 0 begins a log.
_ZEROS: Final = bytes(ENTRY_SIZE)


class HoleSearch:
    """Finds holes in the queues of a store; for a start."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ends = QueueEndDigests(root)

    def has_hole(self, queue: ConsumeQueue, end: int) -> bool:
        """Return whether zeros lie among the entries below queue offset ``end``."""
        files = queue.files
        for base in files.bases:
            stop = min(end * ENTRY_SIZE - base, files.file_size)
            if stop <= 0:
                return False
            path = files.path(base)
            digest = self._ends.of(queue, base) or digest_of(self._root, path)
            start = 0 if digest is None else digest.end
            if start < stop and _has_zeros(path, start, stop):
                return True
        return False


def _has_zeros(path: Path, start: int, stop: int) -> bool:
    with disk.opened(path) as fd:
        return any(
            _ZEROS in disk.pread(fd, min(_READ_SIZE + ENTRY_SIZE, stop - position), position)
            for position in range(start, stop, _READ_SIZE)
        )
