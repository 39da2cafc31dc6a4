"""How much room a disk has, and a part of it held back for what must be possible when it is full.

The part is a file with blocks and without content. A full disk is a matter of everybody who writes
to it, so free space is no reserve: whatever is to be had later has to be taken now. It is given
back in steps, because what is free again others may take as well.
"""

import logging
from pathlib import Path
from typing import Final, NamedTuple

from . import disk
from .config import StoreConfig
from .errors import DiskFullError
from .mapped_file import reserve

logger = logging.getLogger(__name__)

RESERVE_NAME: Final = "halfmqReserve"


class Space(NamedTuple):
    """The room of a file system, as `df` counts it: without what is kept for its administrator."""

    free: int  # bytes
    size: int  # bytes: free ones and those in use


def space_of(path: Path) -> Space:
    """Look up the room of the file system that a path lies in.

    Raises:
        OSError: It cannot be asked.
    """
    found = disk.statvfs(path)
    in_use = found.f_blocks - found.f_bfree
    return Space(found.f_bavail * found.f_frsize, (in_use + found.f_bavail) * found.f_frsize)


def reserve_path(config: StoreConfig) -> Path:
    """Return where the reserve of a store lies: on the disk of its log; directories must exist."""
    log = config.commit_log_directory
    if disk.device_of(log) == disk.device_of(config.root):
        return config.root / RESERVE_NAME
    # RocketMQ takes every file in there for one of the log, but does not look into directories.
    return log / "halfmq" / RESERVE_NAME


class SpaceReserve:
    """A file of reserved space; one thread at a time."""

    def __init__(self) -> None:
        self._path = Path()
        self.held = 0  # bytes

    def open(self, path: Path) -> None:
        """Be the file at a path, and give back what a former life has held: a start needs it."""
        self._path = path
        disk.remove(path)
        self.held = 0

    def hold(self, size: int) -> bool:
        """Hold back so many bytes; return whether there was room, or else nothing changes."""
        if size <= self.held:
            return True
        disk.make_directories(self._path.parent)
        try:
            fd = disk.open_file(self._path, disk.CREATE, disk.MODE)
        except OSError as error:
            logger.warning("event=reserve_refused error=%r", str(error))
            return False
        try:
            reserve(fd, self.held, size, self._path)
            disk.ftruncate(fd, size)  # where there is no call for it, it has not grown by itself
        except (OSError, DiskFullError) as error:
            disk.ftruncate(fd, self.held)  # a part of it may have got blocks
            logger.warning("event=reserve_refused bytes=%d error=%r", size, str(error))
            return False
        finally:
            disk.close(fd)
        self.held = size
        return True

    def release(self, size: int) -> int:
        """Give back up to so many bytes; return how many that were."""
        left = max(self.held - size, 0)
        if left == self.held:
            return 0
        disk.truncate(self._path, left)
        given, self.held = self.held - left, left
        return given
