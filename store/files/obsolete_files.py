"""Remove or rename files of earlier versions when a store is opened."""

import logging
from typing import Final

from ..config import StoreConfig
from . import disk
from .checkpoint import rebuild_marker

logger = logging.getLogger(__name__)

RESERVE_NAME: Final = "halfmqReserve"
"""A file that reserved disk space. If log and root lie on different disks, it is in the directory
``halfmq`` beside the log's files."""

_REBUILD_NAMES: Final = ("consumequeue.doubtful", "digests/consumequeue.suspect")
"""Earlier names of the marker that makes a start rebuild the queues."""


def remove_obsolete_files(config: StoreConfig) -> None:
    """Remove files that are no longer used, and log each."""
    for name in _REBUILD_NAMES:
        if disk.exists(config.root / name):
            rebuild_marker(config.root, "consumequeue").create()
            disk.remove(config.root / name)
    for path in (config.root / RESERVE_NAME, config.commit_log_directory / "halfmq" / RESERVE_NAME):
        if disk.is_file(path):
            size = disk.size_of(path)
            disk.remove(path)
            logger.info("event=leftover_removed path=%s bytes=%d", path, size)
