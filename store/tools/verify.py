"""``halfmq store verify``: check the files of a store for damage.

The log is read once, record by record, and compared with the queues. Then log and index are
compared with their digests; an index without digests is not verified. Checkpoint, tables and the
snapshot of undecided transactions follow. Nothing is written, the directory lock is not taken, and
a broker may run at the same time: data that it is about to write is not judged.

A finding is damage or a note (``findings``). After an unclean stop the next start rebuilds the
queues from some record on, so wrong entries from there on are only notes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..files import disk
from ..format.crc import crc32
from ..format.index import FIRST_ITEM, HEADER_SIZE, is_index_file_name, unpack_header
from ..log.log_reader import LogReader
from ..log.resync import Damage, invalid_reason
from .data_files import find_log, list_queues
from .digest_check import DigestCheck
from .findings import Findings
from .log_walk import Chunk, LogWalk
from .queue_check import QueueCheck
from .state import Condition, StoreState, check_checkpoint, read_condition, unsettled_from
from .table_check import check_snapshot, check_tables

PROGRESS_BYTES: Final = 16 << 20  # of log between two reports of progress

Progress = Callable[[int, int], None]
"""Called every ``PROGRESS_BYTES`` with the bytes of log read, and the bytes there may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The content of a store and the findings about it."""

    root: Path
    state: StoreState
    findings: Findings
    log_files: int
    log_start: int
    log_end: int
    records: int
    digested: int  # bytes of the log that digests cover
    queues: int
    queue_entries: int
    index_files: int
    index_items: int
    index_digested: int  # bytes of the index that digests cover; no others are verified
    tables: int
    snapshot: bool
    elapsed: float  # seconds

    @property
    def sound(self) -> bool:
        return self.findings.sound

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs; the keys are stable."""
        return {
            "directory": str(self.root),
            "state": str(self.state),
            "sound": self.sound,
            "log": {
                "files": self.log_files,
                "first_offset": self.log_start,
                "end_offset": self.log_end,
                "records": self.records,
                "digested_bytes": self.digested,
            },
            "queues": {"queues": self.queues, "entries": self.queue_entries},
            "index": {
                "files": self.index_files,
                "items": self.index_items,
                "digested_bytes": self.index_digested,
            },
            "tables": self.tables,
            "snapshot": self.snapshot,
            "elapsed_s": round(self.elapsed, 3),
            **self.findings.as_json(),
        }


def verify(
    root: Path, *, commit_log: Path | None = None, progress: Progress = lambda done, total: None
) -> VerifyReport:
    """Check all files of a store.

    ``commit_log`` is the directory of the log if it is not below ``root``.

    Raises:
        UnusableFileError: There is no log.
        OSError: Something cannot be read.
    """
    return _Verification(root, commit_log, progress).run()


class _Verification:
    """One verification of one store."""

    def __init__(self, root: Path, commit_log: Path | None, progress: Progress) -> None:
        self._root = root
        self._progress = progress
        self._began = time.monotonic()
        self._findings = Findings(root)
        found = find_log(root, commit_log)
        self._files = found.files
        for path, reason in found.unusable:
            self._findings.add("file_unusable", path, reason)
        self._condition: Condition = read_condition(root, self._findings)
        state = self._condition.state
        unsettled = unsettled_from(self._condition, self._files)
        self._damaged_ranges: list[Damage] = []
        self._ends: dict[int, int] = {}  # of the records of each file, by its first offset
        bare = next(list_queues(root / "consumequeue"), None) is None
        if bare:
            unsettled = 0  # without queues every start rebuilds all of them
        self._queues = QueueCheck(
            root,
            self._findings,
            state,
            self._damaged_ranges,
            log_start=self._files.bases[0] if self._files.bases else 0,
            unsettled_from=unsettled,
        )
        self._index = _index_files(root / "index")
        if self._files.bases and not self._index:
            self._findings.add("index_missing", root / "index", "there is no index", harmless=True)

    def run(self) -> VerifyReport:
        state, files = self._condition.state, self._files
        walk = LogWalk(files, reaches=self._condition.closed_offset, live=state is StoreState.OPEN)
        log_files = len(files.bases)
        self._read_log(walk)
        log_start = files.bases[0] if files.bases else walk.start  # deleted by age since
        self._check_end(walk)
        digests = DigestCheck(self._root, files, self._damaged_ranges, self._findings)
        digests.run(self._ends)
        if self._condition.checkpoint.is_ours:  # RocketMQ does not update digests
            digests.check_index(self._index)
        self._queues.finish(log_start, walk.end_offset)
        # Only if the last record is intact.
        if not self._damaged_ranges or self._damaged_ranges[-1].end < walk.end_offset:
            check_checkpoint(
                self._condition,
                self._root / "checkpoint",
                walk.end_offset,
                walk.last_timestamp,
                self._findings,
            )
        tables = check_tables(self._root, self._findings, state, self._queues.end_of)
        snapshot = check_snapshot(
            self._root, self._findings, state, walk.end_offset, self._record_crc
        )
        return VerifyReport(
            root=self._root,
            state=state,
            findings=self._findings,
            log_files=log_files,
            log_start=log_start,
            log_end=walk.end_offset,
            records=walk.records,
            digested=digests.bytes,
            queues=self._queues.queues,
            queue_entries=self._queues.entries,
            index_files=len(self._index),
            index_items=sum(map(_items_of, self._index)),
            index_digested=digests.index_bytes,
            tables=tables,
            snapshot=snapshot,
            elapsed=time.monotonic() - self._began,
        )

    def _read_log(self, walk: LogWalk) -> None:
        total = len(self._files.bases) * self._files.file_size
        reported = 0
        for part in walk:
            if isinstance(part, Damage):
                self._damaged_ranges.append(part)
                self._report_range(part)
            else:
                self._take(part)
            done = walk.end_offset - walk.start
            if done - reported >= PROGRESS_BYTES:
                reported = done
                self._progress(done, total)

    def _take(self, chunk: Chunk) -> None:
        self._ends[self._files.base_of(chunk.offset)] = chunk.end
        self._queues.take(chunk)

    def _report_range(self, damaged: Damage) -> None:
        base = self._files.base_of(damaged.offset)
        self._findings.add(
            "record_damaged" if base in self._files.bases else "file_missing",
            self._files.path(base),
            f"{damaged.length} bytes at offset {damaged.offset}: {damaged.reason}",
            position=damaged.offset - base,
            offset=damaged.offset,
        )

    def _check_end(self, walk: LogWalk) -> None:
        """Report bytes after the end of the log; a broker that closed it leaves zeros."""
        state = self._condition.state
        if state is StoreState.OPEN:
            return
        end = walk.end_offset
        tail = walk.tail_size(end)
        if tail and not walk.ends_with_blank(end):
            base = self._files.base_of(end)
            self._findings.add(
                "bytes_behind_log",
                self._files.path(base),
                f"{tail} bytes after the end at {end}: {invalid_reason(self._files, end)}",
                position=end - base,
                offset=end,
                harmless=True,
            )

    def _record_crc(self, offset: int) -> int | None:
        reader = LogReader(self._files)
        try:
            base = self._files.base_of(offset)
            if base not in self._files.bases:
                return None
            encoded = reader.record_bytes(offset, base + self._files.file_size)
            return 0 if encoded is None else crc32(encoded)
        finally:
            reader.close()


def _index_files(directory: Path) -> list[Path]:
    if not disk.is_directory(directory):
        return []
    return [path for path in disk.files(directory) if is_index_file_name(path.name)]


def _items_of(path: Path) -> int:
    """Return how many items an index file says it has."""
    try:
        with disk.opened(path) as fd:
            content = disk.pread(fd, HEADER_SIZE, 0)
    except FileNotFoundError:
        return 0  # deleted by age
    return unpack_header(content.ljust(HEADER_SIZE, b"\0")).next_item - FIRST_ITEM
