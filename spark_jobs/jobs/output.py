"""The outputs of a job: checked before the run, written after it.

A job replaces in ``--output`` what a previous run of the same job wrote, and nothing else. It
recognizes its files by their names, ``RESULT/halfmq-JOB-00000.parquet``, and ``summary.json`` by
its keys.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from ..errors import PlaceError, root_cause

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SUMMARY: Final = "summary.json"
_PROBE: Final = b"\0" * 4096  # a disk without space for these bytes is full


class Output:
    """The outputs of one run."""

    def __init__(
        self, job: str, json_file: str | None, folder: Path | None = None, *results: str
    ) -> None:
        """Create the directory; ``results`` names the folders of Parquet files in it, if any.

        Raises:
            PlaceError: An output cannot be written, or other files are in its place.
        """
        self._job = job
        self._folder = folder.absolute() if folder and results else None
        self._is_piped = json_file == "-"
        self._json = None if json_file is None or self._is_piped else Path(json_file)
        self._failed: PlaceError | None = None
        if self._folder:
            probe_folder(self._folder)
            for place in self._foreign(self._folder, results):
                reason = f"not written by a previous {job}: remove it, or name another --output"
                raise PlaceError(place, reason)
        if self._json:
            probe_file(self._json)

    def parquet(self, name: str, frame: "DataFrame") -> None:
        """Write a result; an error is raised by ``publish``."""
        if self._folder is None or self._failed:
            return
        staging, place = self._folder / f".halfmq-{self._job}", self._folder / name
        try:
            shutil.rmtree(staging, ignore_errors=True)
            frame.write.parquet(str(staging))
            place.mkdir(exist_ok=True)
            for earlier in place.glob(f"halfmq-{self._job}-*.parquet"):
                earlier.unlink()
            for number, part in enumerate(sorted(staging.glob("part-*.parquet"))):
                part.rename(place / f"halfmq-{self._job}-{number:05}.parquet")
            shutil.rmtree(staging)
        except (OSError, PySparkException, Py4JError) as error:
            self._failed = PlaceError(self._folder, f"cannot be written: {root_cause(error)}")

    def publish(self, summary: Mapping[str, object], table: Iterable[str]) -> None:
        """Print the table, then write the JSON.

        Raises:
            PlaceError, OSError: The first file that could not be written.
        """
        text = json.dumps(summary, indent=2, default=_as_text) + "\n"
        if self._is_piped:
            sys.stdout.write(text)
        shown = sys.stderr if self._is_piped else sys.stdout
        shown.writelines(f"{line}\n" for line in table)
        if self._failed:
            raise self._failed
        for place in filter(None, (self._json, self._folder and self._folder / SUMMARY)):
            place.write_text(text, "utf-8")

    def _foreign(self, folder: Path, results: Iterable[str]) -> Iterator[Path]:
        """Find files of others where this job writes its own."""
        for place in (folder / name for name in results):
            if place.exists():
                probe_folder(place)
                ours = (f"halfmq-{self._job}-", "_", ".")  # readers skip the last two
                yield from (path for path in place.iterdir() if not path.name.startswith(ours))
        summary = folder / SUMMARY
        if summary.exists():
            try:
                is_ours = {"directory", "log"} <= json.loads(summary.read_text("utf-8")).keys()
            except (ValueError, AttributeError):
                is_ours = False
            if not is_ours:
                yield summary


def probe_folder(folder: Path) -> None:
    """Create a directory if it is missing, and check that files can be written to it.

    Raises:
        PlaceError: They cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = "is a file" if isinstance(error, FileExistsError) else error.strerror
        raise PlaceError(folder, f"cannot be written to: {reason}") from error


@contextmanager
def held(place: Path, what: str, settings: Mapping[str, object]) -> Iterator[None]:
    """Hold the folder with which a job goes on from run to run, until the context ends.

    A file named by ``what`` has the settings with which the first run began.

    Raises:
        PlaceError: It cannot be written, another process holds it, or the settings differ.
    """
    import fcntl  # noqa: PLC0415  Windows lacks it, and runs the other jobs

    probe_folder(place)
    with (place / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PlaceError(place, f"another {what} is running here") from error
        file = place / f"{what}.json"
        if not file.exists():
            file.write_text(json.dumps(settings, indent=1), "utf-8")
        try:
            begun = {**json.loads(file.read_text("utf-8"))}
        except (ValueError, TypeError) as error:
            raise PlaceError(place, f"{file} is not of this job: {error}") from error
        for name, value in settings.items():
            if begun.get(name) != value:
                reason = f"the {what} was begun with {name} = {begun.get(name)}, not {value}"
                raise PlaceError(place, f"{reason}: use the same again, or another directory")
        yield


def probe_file(place: Path) -> None:
    """Check that a file can be written or replaced; its directory is created.

    Raises:
        PlaceError: It cannot.
    """
    if place.is_dir():
        raise PlaceError(place, "is a directory; name a file")
    if place.exists():
        if not os.access(place, os.W_OK):
            raise PlaceError(place, "cannot be written to: Permission denied")
        if not place.is_file():  # as /dev/null
            return
    probe_folder(place.parent)


def utc(time: datetime) -> str:
    """Return a time with a zone as ISO 8601 in UTC, with milliseconds."""
    text = time.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _as_text(value: object) -> str:
    if isinstance(value, datetime):
        return utc(value)
    raise TypeError(f"no JSON for {value!r}")
