"""How far the log was on disk, told to the next start after a kill or a power cut.

Below the mark nothing can be torn: what is wrong there has been damaged, and what follows was
acknowledged. Behind it a power cut may have spoilt any sector, and the log ends at the first record
that is not whole. Without the mark the two look the same.

It is written behind each flush of the log, and not flushed itself: one that did not reach the disk
is an older one, which says less and nothing wrong. It lies in the checkpoint's file, in a sector of
its own, and counts only while that file is ours: RocketMQ might have cut the log below it.
"""

import logging
from pathlib import Path
from struct import Struct
from typing import Final

from ..format.crc import crc32
from . import disk

logger = logging.getLogger(__name__)

_AT: Final = 512  # bytes; RocketMQ uses the first 40 of the file, the checkpoint's notes end at 108
_LAYOUT: Final = Struct(">4sqI")  # magic, offset, CRC of both
_MAGIC: Final = b"hmqd"


class DurableMark:
    """The mark in the checkpoint file; one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def load(self) -> int:
        """Return the offset below which the log was on disk; -1 if that is not known."""
        try:
            content = disk.read_bytes(self._path)[_AT:][: _LAYOUT.size]
        except FileNotFoundError:
            return -1
        if len(content) < _LAYOUT.size:
            return -1
        magic, offset, _ = _LAYOUT.unpack(content)
        return int(offset) if magic == _MAGIC and content == _encoded(offset) else -1

    def start(self, offset: int) -> None:
        """Write the first mark of this run; the checkpoint file exists."""
        known = self.load()
        self._fd = disk.open_file(self._path, disk.WRITE)
        disk.pwrite(self._fd, _encoded(offset), _AT)
        if not 0 <= known <= offset:
            disk.fsync(self._fd)  # what stands there says too much, or nothing

    def move(self, offset: int) -> None:
        """Note that everything below an offset is on disk."""
        try:
            disk.pwrite(self._fd, _encoded(offset), _AT)
        except OSError as error:
            # An old mark is as true as a new one.
            logger.warning("event=durable_mark_not_written error=%r", str(error))

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            disk.close(self._fd)
            self._fd = -1


def _encoded(offset: int) -> bytes:
    return _LAYOUT.pack(_MAGIC, offset, crc32(_MAGIC + offset.to_bytes(8, "big", signed=True)))
