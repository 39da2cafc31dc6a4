"""Files of earlier versions, removed when a store is opened."""

import logging
from typing import Final

from . import disk
from .config import StoreConfig

logger = logging.getLogger(__name__)

RESERVE_NAME: Final = "halfmqReserve"
"""A file of blocks without content, which held space back; where log and root lie on different
disks, in a directory ``halfmq`` beside the log's files."""


def remove_leftovers(config: StoreConfig) -> None:
    """Remove what no version uses any more, and log it."""
    for path in (
        config.root / RESERVE_NAME,
        config.commit_log_directory / "halfmq" / RESERVE_NAME,
    ):
        if disk.is_file(path):
            size = disk.size_of(path)
            disk.remove(path)
            logger.info("event=leftover_removed path=%s bytes=%d", path, size)
