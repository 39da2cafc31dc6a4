"""What a store's directory says about itself before any of its data is read."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from ..files import disk
from ..files.checkpoint import Checkpoint, closed_note_is_damaged, load_checkpoint
from ..files.directory_lock import is_held
from ..files.mapped_file_queue import MappedFileQueue
from ..log.log_reader import LogReader
from ..recovery.recovery import CHECKPOINT_MARGIN_MS
from .findings import Findings

_CHECKPOINT_SIZES: Final = (4096,)  # bytes; RocketMQ maps a page of the system
_ABORT_SIZE_MAX: Final = 32  # bytes of a process id; RocketMQ 4 leaves the file empty


class StoreState(StrEnum):
    """Whether somebody works in the directory, and how the last one stopped."""

    OPEN = "open"  # a broker holds it right now
    CLOSED = "closed"  # the last stop was an ordered one
    NOT_CLOSED = "not_closed"  # it was none: the next start recovers


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The state of a store, and the checkpoint it was in."""

    state: StoreState
    checkpoint: Checkpoint

    @property
    def closed_offset(self) -> int:
        """Where the log must end, noted at our own ordered stop; -1 where nothing says it."""
        return self.checkpoint.closed_offset if self.state is StoreState.CLOSED else -1


def read_condition(root: Path, findings: Findings) -> Condition:
    """Find out who works in a store, without getting in anybody's way."""
    aborted = disk.exists(root / "abort")
    state = StoreState.NOT_CLOSED if aborted else StoreState.CLOSED
    if is_held(root):
        state = StoreState.OPEN
    path = root / "checkpoint"
    if disk.exists(path) and disk.size_of(path) not in _CHECKPOINT_SIZES:
        findings.add("checkpoint_wrong", path, f"has {disk.size_of(path)} bytes instead of 4096")
    if closed_note_is_damaged(path):
        findings.add("checkpoint_wrong", path, "the note of the last ordered stop fails its CRC")
    if aborted:
        _check_abort(root / "abort", findings)
    return Condition(state=state, checkpoint=load_checkpoint(path))


def _check_abort(path: Path, findings: Findings) -> None:
    content = disk.read_bytes(path)[:_ABORT_SIZE_MAX]
    if content and not content.strip().isdigit():
        findings.add("abort_wrong", path, "holds no process id", harmless=True)


def unsettled_from(condition: Condition, files: MappedFileQueue) -> int | None:
    """Return from which physical offset on the next start derives everything anew; None: from none.

    Up to there, queues and index must agree with the log whatever happened. It is the newest file
    that was begun long enough before the checkpoint; see ``recovery``.
    """
    if condition.state is not StoreState.NOT_CLOSED:
        return None
    checkpoint = condition.checkpoint
    trusted = min(checkpoint.log_timestamp, checkpoint.queues_timestamp) - CHECKPOINT_MARGIN_MS
    reader = LogReader(files)
    try:
        for base in reversed(files.bases[1:]):
            first = reader.record_at(base, base + files.file_size)
            if first is not None and 0 < first.store_timestamp <= trusted:
                return base
    finally:
        reader.close()
    return files.bases[0] if files.bases else 0


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
        return  # it moves while we look; without a log nothing can be said
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
