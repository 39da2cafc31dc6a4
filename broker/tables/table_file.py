"""Load and save the JSON tables of `config/`.

A table file is an object with a `dataVersion`, the table itself, and fields of newer or other
brokers. Unknown fields are kept, so that these brokers still find them in a store that halfmq has
used. A value of the wrong type counts as missing, as for RocketMQ's reader.

If both a table and its `.bak` are damaged, the table never counts as empty. Topics and groups are
rebuilt from the messages and the other tables. For other tables the broker refuses to start, and
its error says what to do.

Source: RocketMQ `ConfigManager`, `DataVersion`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from halfmq.remoting.codes import ResponseCode
from halfmq.store.errors import DamagedTableError
from halfmq.store.files import disk
from halfmq.store.files.json_table import TableOrigin, read_table, save_table, set_aside

from ..errors import RequestRefusedError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

JsonObject = Mapping[str, object]


NAMES_LOGGED_MAX: Final = 20
"""Rebuilt topics or groups named in one line of the log."""

_VERSION_KEY: Final = "dataVersion"


@define(eq=False, repr=False, slots=False)
class TableFile:
    """One file of `config/`: loads it, counts its changes and saves it with its unknown fields."""

    _path: Path
    _now_ms: Callable[[], int]  # the wall clock
    _derived: Collection[str] = ()  # fields that every save computes; those of the file are ignored
    _table_key: str = field(kw_only=True)  # of the table itself
    # What happens if the file is removed, for the error that ends a start with a damaged file; None
    # for a table that is rebuilt instead.
    _if_removed: str | None = field(kw_only=True, default=None)

    def __attrs_post_init__(self) -> None:
        self.name = self._path.name
        self._foreign: dict[str, object] = {}
        self._numbers = itertools.count(1)
        self._saved_number = 0
        self._writing = threading.Lock()
        self.counter = 0
        self.state_version = 0
        self.timestamp = self._now_ms()
        self.is_complete = True  # False: entries may be missing from what was loaded

    def load(self) -> JsonObject:
        """Return the content of the file; empty if there is none.

        Raises:
            DamagedTableError: It and its backup are damaged, and it cannot be rebuilt.
            UnusableFileError: It cannot be read.
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
            content, origin = read_table(self._path, self._table_key)
        except DamagedTableError as error:
            self.is_complete = False
            if self._if_removed is not None:
                remedy = (
                    f"Restore one of them, or remove both: {self._if_removed}. "
                    f"An editor shows what is left of them"
                )
                raise DamagedTableError(error.path, error.reason, remedy) from error
            logger.error("event=table_rebuilt error=%s", error)  # noqa: TRY400
            set_aside(self._path)
            return {}
        self.is_complete = origin is TableOrigin.FILE
        if origin is not TableOrigin.NOTHING:
            # A killed broker may not have flushed the directories. A power cut must not undo
            # content that is in use from now on.
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

    def next_version(self) -> None:
        """Count a change. Source: `DataVersion.nextVersion`."""
        self.counter += 1
        self.timestamp = self._now_ms()

    def save(self, content: Callable[[], JsonObject]) -> None:
        """Replace the file; block on the disk.

        Raises:
            OSError: It could not be written; the old file is still there.
        """
        self.prepare(content)()

    async def save_on_thread(
        self, content: Callable[[], JsonObject], *, patient: bool = False
    ) -> None:
        """Replace the file on a thread, see ``prepare``; return when it is on disk.

        Raises:
            RequestRefusedError: It could not be written; the old file is still there.
        """
        try:
            await asyncio.to_thread(self.prepare(content, patient=patient))
        except OSError as error:
            self.log_failure(error)
            raise self.refusal(error) from error

    def log_failure(self, error: OSError) -> None:
        logger.error("event=table_not_saved table=%s error=%r", self.name, str(error))

    def refusal(self, error: OSError) -> RequestRefusedError:
        """Return the refusal of a request whose change could not be written."""
        return RequestRefusedError(
            f"{self.name} cannot be written: {error.strerror or error}",
            ResponseCode.SERVICE_NOT_AVAILABLE,
        )

    def prepare(
        self, content: Callable[[], JsonObject], *, patient: bool = False
    ) -> Callable[[], None]:
        """Return a function that replaces the file, for any thread.

        The function calls `content`, which must return the table as of this call of `prepare`. It
        does nothing if newer content has been saved. If `patient`, it lets other threads run in
        between and takes twice as long.
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


class CreatedNames(dict[str, int]):
    """When names were created automatically, in ms, until they are used or configured."""

    KEY: Final = "halfmqUnused"
    """Key of the file. RocketMQ ignores it and drops it; then these names never end."""

    def load(self, content: JsonObject) -> None:
        """Read them from the content of a table's file."""
        self.update(
            {name: as_integer(ms, 0) for name, ms in as_object(content.get(self.KEY)).items()}
        )

    def content(self) -> JsonObject:
        return {self.KEY: dict(self)} if self else {}

    def created_before(self, end_ms: int) -> list[str]:
        return [name for name, created_ms in self.items() if created_ms < end_ms]

    def used(self, name: str) -> None:
        """Keep a name for good."""
        self.pop(name, None)


class PeriodicSave:
    """Limits how often a table that changes all the time is written."""

    def __init__(self, interval_ms: int, now_ms: Callable[[], int]) -> None:
        self._interval_ms = interval_ms
        self._now_ms = now_ms
        self._last_ms = now_ms()
        self.dirty = False

    def is_due(self) -> bool:
        """Return whether the table has changed and its last save is old enough."""
        elapsed = self._now_ms() - self._last_ms
        return self.dirty and not 0 <= elapsed < self._interval_ms  # negative: the clock was set

    def job(self, write: Callable[[], None], file: TableFile) -> Callable[[], None]:
        """Count the table as saved; return `write`, which makes it dirty again if it fails."""
        self.dirty = False
        self._last_ms = self._now_ms()

        def guarded() -> None:
            try:
                write()
            except OSError as error:
                self.dirty = True  # tried again after the next interval
                file.log_failure(error)

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


class JsonFields:
    """The fields of a dataclass in the JSON entries of a table, by their keys in camel case.

    Its field ``name`` is the entry's own key; ``unknown`` keeps the fields that are not
    interpreted. ``keys`` has the keys that are named otherwise.
    """

    def __init__(self, made: type[DataclassInstance], **keys: str) -> None:
        names = (one.name for one in fields(made) if one.name != "unknown")
        by_key = {keys.get(name, _camel_case(name)): name for name in names}
        self._names = dict(sorted(by_key.items()))

    def entry(self, made: object, unknown: JsonObject) -> dict[str, object]:
        return {**unknown, **{key: getattr(made, name) for key, name in self._names.items()}}

    def read(self, entry: JsonObject, default: object) -> dict[str, Any]:
        """Return the fields of an entry; one without a value of its type is as in ``default``."""
        found = {
            name: _as_type(entry.get(key), getattr(default, name))
            for key, name in self._names.items()
            if name != "name"
        }
        unknown = {key: value for key, value in entry.items() if key not in self._names}
        return {**found, "unknown": unknown}


def _camel_case(name: str) -> str:
    first, *words = name.split("_")
    return first + "".join(map(str.title, words))


def _as_type(value: object, default: object) -> object:
    if isinstance(default, bool):
        return as_switch(value, default=default)
    if isinstance(default, int):
        return as_integer(value, default)
    return as_text(value, default) if isinstance(default, str) else as_object(value)
