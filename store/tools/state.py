"""The state of a store, from its lock, abort marker and checkpoint."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ..files import disk
from ..files.checkpoint import FILE_SIZE, Checkpoint, closed_note_is_damaged, load_checkpoint
from ..files.directory_lock import is_held
from ..files.mapped_file_queue import MappedFileQueue
from ..log.log_reader import LogReader
from ..recovery.recovery import checkpoint_start
from .findings import Findings


class StoreState(StrEnum):
    """Whether a broker uses the directory, and how the last one stopped."""

    OPEN = "open"  # a broker uses it now
    CLOSED = "closed"  # the last stop was clean
    NOT_CLOSED = "not_closed"  # it was not clean: the next start recovers


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The state of a store and its checkpoint."""

    state: StoreState
    checkpoint: Checkpoint

    @property
    def closed_offset(self) -> int:
        """Where the log ended at a clean stop of halfmq; -1 if unknown."""
        return self.checkpoint.closed_offset if self.state is StoreState.CLOSED else -1


def read_condition(root: Path, findings: Findings) -> Condition:
    """Read the state of a store without taking its lock."""
    aborted = disk.exists(root / "abort")
    state = StoreState.NOT_CLOSED if aborted else StoreState.CLOSED
    if is_held(root):
        state = StoreState.OPEN
    path = root / "checkpoint"
    if disk.exists(path) and disk.size_of(path) != FILE_SIZE:
        findings.add(
            "checkpoint_wrong", path, f"has {disk.size_of(path)} bytes instead of {FILE_SIZE}"
        )
    if closed_note_is_damaged(path):
        findings.add("checkpoint_wrong", path, "the note of the last clean stop fails its CRC")
    return Condition(state=state, checkpoint=load_checkpoint(path))


def unsettled_from(condition: Condition, files: MappedFileQueue) -> int | None:
    """Return the physical offset from which the next start rebuilds; None after a clean stop.

    Before it, queues and index must match the log.
    """
    if condition.state is not StoreState.NOT_CLOSED:
        return None
    reader = LogReader(files)
    try:
        return checkpoint_start(files, reader, condition.checkpoint)
    finally:
        reader.close()


def check_checkpoint(
    condition: Condition, path: Path, log_end: int, last_timestamp: int, findings: Findings
) -> None:
    """Compare a checkpoint with the log that was read."""
    checkpoint = condition.checkpoint
    times = {
        "physicMsgTimestamp": checkpoint.log_timestamp,
        "logicsMsgTimestamp": checkpoint.queues_timestamp,
        "indexMsgTimestamp": checkpoint.index_timestamp,
    }
    if condition.state is StoreState.OPEN or not log_end:
        return  # a broker may move it; without a log there is nothing to compare
    for name, timestamp in times.items():
        if not 0 <= timestamp <= last_timestamp:
            findings.add(
                "checkpoint_wrong",
                path,
                f"{name} is {timestamp}, the last record was stored at {last_timestamp}",
                harmless=condition.state is StoreState.NOT_CLOSED,
            )
    if not 0 <= checkpoint.confirm_offset <= log_end:
        findings.add(
            "checkpoint_wrong",
            path,
            f"confirmPhyOffset is {checkpoint.confirm_offset}, the log ends at {log_end}",
            harmless=condition.state is StoreState.NOT_CLOSED,
        )
