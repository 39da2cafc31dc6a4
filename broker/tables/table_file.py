"""What the persisted tables of `config/` share: their version, foreign fields, and the file.

A table file is an object with a `dataVersion`, the table itself, and whatever a newer or other
broker wrote beside it. What we do not know we keep, so that a store that passes through us comes
out complete. A value of the wrong kind counts as missing, as it does for RocketMQ's reader.

A table that is damaged, together with its `.bak`, is never taken for an empty one. What messages
still tell is made anew (topics, groups); else the broker does not start, and says what to do.

Source: RocketMQ `ConfigManager`, `DataVersion`.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from halfmq.store.errors import DamagedTableError
from halfmq.store.files import disk
from halfmq.store.files.json_table import TableOrigin, read_table, save_table, set_aside

logger = logging.getLogger(__name__)

JsonObject = Mapping[str, object]


NAMES_TOLD_MAX: Final = 20
"""Names of what was made anew in one line of the log."""

_VERSION_KEY: Final = "dataVersion"


class TableFile:
    """One file of `config/`: loads it, counts its changes and saves it with what we do not know."""

    def __init__(
        self,
        path: Path,
        now_ms: Callable[[], int],
        derived: Iterable[str] = (),
        *,
        holds: str,
        without: str | None = None,
    ) -> None:
        """`holds` is the key of the table itself.

        `derived` names fields that writers compute and no reader needs: they are not kept.
        `without` says what happens when somebody removes the file. If it is given, a broker does
        not start with damage; otherwise the table is made anew from what else there is.
        """
        self._path = path
        self._holds = holds
        self._without = without
        self._now_ms = now_ms
        self._derived = frozenset(derived)
        self._foreign: dict[str, object] = {}
        self._numbers = itertools.count(1)
        self._saved_number = 0
        self._writing = threading.Lock()
        self.counter = 0
        self.state_version = 0
        self.timestamp = now_ms()
        self.is_complete = True  # False: what was loaded may lack something, or all

    def load(self) -> JsonObject:
        """Return the content of the file; empty when there is none.

        Raises:
            DamagedTableError: It and its backup are damaged, and cannot be made anew.
            UnusableFileError: It may not be read.
        """
        content = self._read()
        version = as_object(content.get(_VERSION_KEY))
        self.counter = as_integer(version.get("counter"), 0)
        self.state_version = as_integer(version.get("stateVersion"), 0)
        self.timestamp = as_integer(version.get("timestamp"), self.timestamp)
        self._foreign = {key: value for key, value in content.items() if key not in self._derived}
        return content

    def _read(self) -> JsonObject:
        try:
            content, origin = read_table(self._path, self._holds)
        except DamagedTableError as error:
            self.is_complete = False
            if self._without is not None:
                remedy = (
                    f"Restore one of them, or remove both: {self._without}. "
                    f"What is left of them may be read by eye"
                )
                raise DamagedTableError(error.path, error.reason, remedy) from error
            logger.error("event=table_made_anew %s", error)  # noqa: TRY400
            set_aside(self._path)
            return {}
        self.is_complete = origin is TableOrigin.FILE
        if origin is not TableOrigin.NOTHING:
            # A kill may have come before the names were on disk. Somebody relies on what is read
            # here, and a power cut must not take it back.
            disk.sync_directory(self._path.parent)
            disk.sync_directory(self._path.parent.parent)
        return content

    @property
    def data_version(self) -> dict[str, int]:
        """The version of the table as RocketMQ writes it."""
        return {
            "counter": self.counter,
            "stateVersion": self.state_version,
            "timestamp": self.timestamp,
        }

    def step(self) -> None:
        """Count a change. Source: `DataVersion.nextVersion`."""
        self.counter += 1
        self.timestamp = self._now_ms()

    def save(self, content: Callable[[], JsonObject]) -> None:
        """Replace the file, as at the end; blocks on the disk.

        Raises:
            OSError: It could not be written; the old file is still there.
        """
        self.prepare(content)()

    def prepare(
        self, content: Callable[[], JsonObject], *, patient: bool = False
    ) -> Callable[[], None]:
        """Return a function that saves the content as of now, also on another thread.

        There `content` is called, and must give what is the case now. When a later content was
        saved first, nothing is done. When `patient`, it lets others work in between, and takes
        twice as long.
        """
        version = self.data_version
        number = next(self._numbers)

        def write() -> None:
            with self._writing:
                if number > self._saved_number:
                    disk.make_directories(self._path.parent)
                    table = {**self._foreign, _VERSION_KEY: version, **content()}
                    save_table(self._path, table, patient=patient)
                    self._saved_number = number

        return write


class PeriodicSave:
    """Says when a table that changes all the time is to be written: rarely, and only if it did."""

    def __init__(self, interval_ms: int, now_ms: Callable[[], int]) -> None:
        self._interval_ms = interval_ms
        self._now_ms = now_ms
        self._last_ms = now_ms()
        self.dirty = False

    def is_due(self) -> bool:
        """Whether something changed and the last write is long enough ago."""
        elapsed = self._now_ms() - self._last_ms
        return self.dirty and not 0 <= elapsed < self._interval_ms  # negative: the clock was set

    def job(self, write: Callable[[], None], name: str) -> Callable[[], None]:
        """Take the table as written; return `write`, which on failure makes it dirty again."""
        self.dirty = False
        self._last_ms = self._now_ms()

        def guarded() -> None:
            try:
                write()
            except OSError as error:
                self.dirty = True  # tried again after the next interval
                logger.error("event=table_not_saved table=%s error=%r", name, str(error))  # noqa: TRY400

        return guarded


def as_integer(value: object, default: int) -> int:
    """Return a JSON number, or a number given as text; `default` for anything else."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return default
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def as_switch(value: object, *, default: bool) -> bool:
    """Return a JSON true or false; `default` for anything else."""
    return value if isinstance(value, bool) else default


def as_text(value: object, default: str) -> str:
    """Return a JSON string; `default` for anything else."""
    return value if isinstance(value, str) else default


def as_object(value: object) -> JsonObject:
    """Return a JSON object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def without_keys(value: JsonObject, known: frozenset[str]) -> dict[str, object]:
    """Return the fields of an entry that we do not know, to be written back as they came."""
    return {key: field for key, field in value.items() if key not in known}
