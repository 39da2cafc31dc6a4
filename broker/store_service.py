"""The store as a service of the broker: opened first and closed last."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from attrs import define, field

from halfmq.store.errors import DiskFullError, StoreError, UnusableFileError
from halfmq.store.files import disk
from halfmq.store.files.mapped_file import ROOM_LEFT, lacks_space, make_directory
from halfmq.store.message_store import MessageStore
from halfmq.store.recovery.recovery import RecoveryReport

logger = logging.getLogger(__name__)

TABLES_TICK_S: Final = 1.0
"""Seconds between two scans for tables that are due to be written."""


INDEX_TICK_S: Final = 0.02
"""Seconds between two slices of index building while the index is complete."""

INDEX_REST_S: Final = 0.004
"""Seconds between two slices while the index lags behind the log, perhaps by gigabytes. Slices then
take at most a third of the loop's time, and the index still grows faster than the log."""


@define(eq=False, repr=False)
class StoreService:
    """Opens the store, reads the tables, and closes both in the opposite order."""

    _store: MessageStore
    _root: Path
    _load: Sequence[Callable[[], None]]
    _before_close: Sequence[Callable[[], None]]
    _after_close: Sequence[Callable[[], None]]
    _report: RecoveryReport | None = field(init=False, default=None)

    @property
    def report(self) -> RecoveryReport:
        """What recovery found, after the start."""
        assert self._report is not None
        return self._report

    async def start(self) -> None:
        """Recover the store and read the tables; this blocks the loop, which serves nothing yet.

        Raises:
            DiskFullError: The disk is full; the message says how much space to free.
            StoreError: The store cannot be opened, or a table cannot be read.
        """
        try:
            self._open()
        except DiskFullError as error:
            raise _no_room(error.path, error.reason) from error
        except OSError as error:
            path = Path(error.filename) if isinstance(error.filename, str) else self._root
            reason = error.strerror or str(error)
            if lacks_space(error):
                raise _no_room(path, reason) from error
            raise UnusableFileError(path, reason) from error

    def _open(self) -> None:
        self._report = report = self._store.open()
        try:
            for load in self._load:
                load()
        except BaseException:
            # After a kill, the next start has to recover as well.
            self._store.close(clean=report.clean)
            raise

    def index_tick(self) -> float:
        """Build a slice of the index; return the seconds until the next call."""
        if not self._store.tick():
            return INDEX_TICK_S
        return INDEX_REST_S if self._store.index.lags else 0

    def recovery_metrics(self) -> dict[str, object]:
        """Return what recovery found, as numbers; empty before the start."""
        report = self._report
        if report is None:
            return {}
        return {
            "clean": int(report.clean),
            "duration_ms": report.duration_ms,
            "records": report.records,
            "truncated_bytes": report.truncated_bytes,
            "damages": len(report.damages),
            "damaged_bytes": sum(damage.length for damage in report.damages),
        }

    async def stop(self) -> None:
        """Write the tables, flush the store, and mark it clean if everything was written.

        If the directory is lost, nothing is written: it may be another broker's.
        """
        if self._store.directory_lost:
            _tried(self._store.close)
            return
        saved = [_tried(work) for work in self._before_close]
        _tried(partial(self._store.close, clean=all(saved)))
        for work in self._after_close:
            _tried(work)


def make_tables_directory(path: Path) -> None:
    """Create the directory durably, or a crash could lose it with the tables in it.

    Raises:
        UnusableFileError: Tables cannot be saved there, which otherwise only the stop would notice.
    """
    make_directory(path)
    if not disk.may_write(path):
        raise UnusableFileError(path, "Permission denied: no table could be saved here")


def _no_room(path: Path, reason: str) -> DiskFullError:
    """Return an error that says how much space to free."""
    needed = ROOM_LEFT >> 20
    return DiskFullError(path, f"{reason}; free {needed} MiB on that disk, then start again")


def _tried(work: Callable[[], None]) -> bool:
    """Run one step of a stop; return False if it failed, for example because the disk is full."""
    try:
        work()
    except (OSError, StoreError) as error:
        logger.error("event=stop_step_failed step=%r error=%r", work, str(error))  # noqa: TRY400
        return False
    return True
