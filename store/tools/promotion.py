"""Make the copy that an Apache RocketMQ slave has kept the store of the next master.

The slave fetches the tables of its master every minute, and with the offsets of consumers comes an
entry of ours: up to where a slave had the log then, and the master's epoch. A copy that ends before
that offset lacks acknowledged messages, for example since the slave had lost its disk and was
copying again; while such a slave copies, the offset does not move.

The next master registers with the epoch after that, in ``stateVersion``. Name servers keep the
higher one, and a master that finds a higher one ends.

Source: RocketMQ ``SlaveSynchronize``, ``RouteInfoManager#registerBroker``.
"""

import time
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import NotPromotableError
from ..files import disk
from ..files.directory_lock import DirectoryLock
from ..files.json_table import read_table, save_table
from ..files.mapped_file_queue import MappedFileQueue
from ..format.record import MAGIC_BLANK, PREFIX
from ..format.topics import CONFIRMED_KEY
from ..log.log_scan import LogScan
from .data_files import find_log

_VERSION: Final = "dataVersion"


class Promoted(NamedTuple):
    """The store of the next master."""

    epoch: int
    log_end: int  # physical offset after the last record
    confirmed: int  # what the slave had when it last fetched the tables


def promote(root: Path, commit_log: Path | None = None) -> Promoted:
    """Check that the copy of a slave that was stopped is complete, and make it a master's store.

    Raises:
        DirectoryInUseError: The slave, or another broker, runs.
        NotPromotableError: It is no complete copy; nothing was changed.
        StoreError: The log or a table cannot be read.
        OSError: A table cannot be read or written.
    """
    files = find_log(root, commit_log).files
    lock = DirectoryLock(root)
    lock.acquire(time.time_ns() // 1_000_000)
    try:
        return _promote(root, files)
    finally:
        lock.release()


def _promote(root: Path, files: MappedFileQueue) -> Promoted:
    offsets_path, topics_path = root / "config/consumerOffset.json", root / "config/topics.json"
    offsets, topics = read_table(offsets_path).content, read_table(topics_path).content
    entry = offsets.get("offsetTable", {}).get(CONFIRMED_KEY)
    if entry is None:
        epoch = topics.get(_VERSION, {}).get("stateVersion", 0)
        if epoch:
            raise NotPromotableError(root, f"it is a master's already, of epoch {epoch}")
        raise NotPromotableError(
            root,
            "it has no tables of a master with minInSyncReplicas=2. A slave fetches them a minute "
            "after its start: nobody knows whether it was complete before. If there is no other "
            "copy, a broker starts on it as it is",
        )
    confirmed, epoch = int(entry["0"]), int(entry["1"]) + 1
    end = _log_end(files, confirmed)
    if end < confirmed:
        raise NotPromotableError(
            root,
            f"its log ends at {end}, and a slave had {confirmed} when the master last told: "
            f"{confirmed - end} bytes of acknowledged messages are missing. Take the master's own "
            "disk, or the copy of the slave before this one",
        )
    topics[_VERSION] = {**topics.get(_VERSION, {}), "stateVersion": epoch}
    save_table(topics_path, topics)
    del offsets["offsetTable"][CONFIRMED_KEY]
    save_table(offsets_path, offsets)
    return Promoted(epoch, end, confirmed)


def _log_end(files: MappedFileQueue, confirmed: int) -> int:
    """Return where the log ends; it is scanned from the file in which ``confirmed`` lies."""
    if not files.bases:
        return 0
    scan = LogScan(files, max(files.base_of(max(confirmed - 1, 0)), files.bases[0]))
    for _ in scan:
        pass
    base = files.base_of(scan.end_offset)
    if base not in files.bases:
        return scan.end_offset
    with disk.opened(files.path(base)) as fd:
        head = disk.read_fully(fd, PREFIX.size, scan.end_offset - base)
    is_full = len(head) == PREFIX.size and PREFIX.unpack(head)[1] == MAGIC_BLANK
    return base + files.file_size if is_full else scan.end_offset
