"""The durable mark: up to which offset the log is on disk, for a start after a kill or power cut.

Below the mark no record can be torn by a power cut: an invalid record there is damage, and records
after it were acknowledged. Above the mark any sector may be missing, and the log ends at the first
record that is not whole. Without the mark the two cases look the same.

The mark is written after each flush of the log and is not flushed itself: if it did not reach the
disk, the previous one is there, which is lower but true. It lies in a sector of its own in the
checkpoint file, and is valid only if halfmq wrote that file last: RocketMQ may have cut the log
below it.
"""

import logging
from pathlib import Path
from struct import Struct
from typing import Final

from ..format.crc import crc32
from . import disk

logger = logging.getLogger(__name__)

_AT: Final = 512  # bytes; RocketMQ uses the first 40 of the file, the checkpoint's notes end at 140
_LAYOUT: Final = Struct(">4sqI")  # magic, offset, CRC of both
_MAGIC: Final = b"hmqd"


class DurableMark:
    """The mark in the checkpoint file; one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def load(self) -> int:
        """Return the offset below which the log was on disk; -1 if unknown."""
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
            disk.fsync(self._fd)  # the mark on disk is too high, or there is none

    def move(self, offset: int) -> None:
        """Record that everything below an offset is on disk."""
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
