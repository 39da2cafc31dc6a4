"""What an export has done so far, kept so that nothing is exported twice or left out.

An export is a directory of Parquet files, or a Delta or Iceberg table, and beside it
``_halfmq/manifest.json``: a list of the ranges of the log that it holds, each with its files. A
range goes through these steps, and a kill between any two loses and repeats nothing:

1. its rows are written to ``_halfmq/staging``
2. the manifest says which files come from there, and where to (state ``staged``)
3. the files are moved there
4. the manifest says that the range is done

Whoever begins while a range is ``staged`` moves the files that are left; what else is in
``staging`` is thrown away. The manifest is replaced as a whole: written beside, flushed, renamed.

A table of Delta or Iceberg commits a range by itself, all or nothing. There the manifest first says
that a range is ``written``, which after a kill may be true or not: the table is asked.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from .errors import ExportError

FOLDER: Final = "_halfmq"  # Spark does not read what begins with an underscore
_FILE: Final = "manifest.json"
_STAGING: Final = "staging"
_LOCK: Final = "lock"
_VERSION: Final = 1

STAGED: Final = "staged"
WRITTEN: Final = "written"
DONE: Final = "done"


class LastRecord(NamedTuple):
    """The last exported record of a range, by which the log is known again."""

    offset: int  # physical
    stored_ms: int
    body_crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A part of one segment that is exported as a whole; offsets are physical."""

    start: int
    end: int
    segment: int  # file base
    state: str
    rows: int = 0
    damaged_bytes: int = 0  # that are no record, and are not exported
    bad_crcs: int = 0  # rows whose body does not fit its CRC; they are exported
    bad_bodies: int = 0  # rows without a body, because it cannot be decompressed
    last: LastRecord | None = None  # None: nothing of it was to be exported
    files: dict[str, str] = field(default_factory=dict)  # in staging → in the export


@dataclass(slots=True)
class Manifest:
    """The whole list. ``settings`` say what is exported how, and stay the same for all ranges."""

    settings: dict[str, Any]
    ranges: list[Range] = field(default_factory=list)

    @property
    def end(self) -> int | None:
        """Where the last range ends; None before the first."""
        return self.ranges[-1].end if self.ranges else None


class ExportFolder:
    """The directory of an export."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.staging = home / FOLDER / _STAGING
        self._file = home / FOLDER / _FILE

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other exports out, as long as this one lives.

        Raises:
            ExportError: Another export is running here.
        """
        (self.home / FOLDER).mkdir(parents=True, exist_ok=True)
        try:
            import fcntl  # noqa: PLC0415  not on Windows
        except ImportError:
            yield
            return
        with (self.home / FOLDER / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ExportError(str(self.home), "another export is running here") from error
            yield

    def load(self) -> Manifest | None:
        """Read the manifest; None when nothing has been exported here yet.

        Raises:
            ExportError: It cannot be read.
        """
        try:
            content = json.loads(self._file.read_text("utf-8"))
            if content["version"] != _VERSION:
                raise ExportError(str(self._file), f"is of version {content['version']}")
            return Manifest(content["settings"], [_range(one) for one in content["ranges"]])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ExportError(str(self._file), f"is no manifest of an export: {error}") from error

    def save(self, manifest: Manifest) -> None:
        """Replace the manifest; a crash leaves the old or the new one."""
        content = {"version": _VERSION, "settings": manifest.settings}
        content["ranges"] = [asdict(one) for one in manifest.ranges]
        beside = self._file.with_suffix(".tmp")
        with beside.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._file)
        sync_folder(self._file.parent)

    def publish(self, one: Range) -> None:
        """Move the files of a staged range to their places; those already there stay."""
        folders: set[Path] = set()
        for source, target in one.files.items():
            place = self.home / target
            place.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # moved before a kill
                (self.staging / source).replace(place)
            if not place.exists():
                raise ExportError(str(place), "is missing: it was exported, and is gone")
            folders.update((place.parent, *place.parent.parents))
        for folder in folders - set(self.home.parents):
            sync_folder(folder)


def _range(content: dict[str, Any]) -> Range:
    last = content.pop("last")
    return Range(**content, last=None if last is None else LastRecord(*last))


def sync_file(path: Path) -> None:
    """Flush a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush the names in a directory to the disk, where the system can."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
