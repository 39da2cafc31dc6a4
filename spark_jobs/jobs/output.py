"""Where a job's results go: looked at before the run, written after the table is shown.

A job replaces in ``--output`` what an earlier run of it wrote, and nothing else. It knows that by
the names: ``RESULT/halfmq-JOB-00000.parquet``, and ``summary.json`` by its first key.
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..errors import OutputError
from .command import as_json, show

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SUMMARY: Final = "summary.json"
_PROBE: Final = b"\0" * 4096  # bytes; a disk without room for so much is full


class Output:
    """The places that the options of one run name."""

    def __init__(self, options: argparse.Namespace, *results: str) -> None:
        """Make the directory; ``results`` are the folders of Parquet files in it.

        Raises:
            OutputError: Something else is in a place, or it cannot be written.
        """
        self._job: str = options.job
        self._folder: Path | None = options.output
        self._json: str | None = options.json
        self._failed: Exception | None = None
        if self._folder:
            probe_folder(self._folder)
            for name in results:
                self._check_folder(self._folder / name)
            self._check_summary(self._folder / SUMMARY)
        if self._json and self._json != "-":
            probe_file(Path(self._json))

    def parquet(self, name: str, frame: "DataFrame") -> None:
        """Write a result; ``publish`` says it when that fails."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415
        from pyspark.errors import PySparkException  # noqa: PLC0415  see command.py

        if self._folder is None or self._failed:
            return
        staging = self._folder.absolute() / f".halfmq-{self._job}"
        place = self._folder.absolute() / name
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
            self._failed = error

    def publish(self, summary: Mapping[str, object], table: str) -> None:
        """Show the table, then write the JSON.

        Raises:
            OSError, PySparkException, Py4JError: The first file that could not be written.
        """
        text = as_json(summary)
        show(self._json, text, table)
        if self._failed:
            raise self._failed
        if self._json and self._json != "-":
            Path(self._json).write_text(text, "utf-8")
        if self._folder:
            (self._folder / SUMMARY).write_text(text, "utf-8")

    def _check_folder(self, place: Path) -> None:
        if not place.exists():
            return
        probe_folder(place)
        ours = (f"halfmq-{self._job}-", "_", ".")  # readers pass over the others
        foreign = [path.name for path in place.iterdir() if not path.name.startswith(ours)]
        if foreign:
            raise self._foreign(place / min(foreign))

    def _check_summary(self, place: Path) -> None:
        if not place.exists():
            return
        try:
            is_ours = {"directory", "log"} <= json.loads(place.read_text("utf-8")).keys()
        except (ValueError, AttributeError):
            is_ours = False
        if not is_ours:
            raise self._foreign(place)

    def _foreign(self, place: Path) -> OutputError:
        reason = f"no earlier {self._job} wrote this: remove it, or name another --output"
        return OutputError(str(place), reason)


def probe_folder(folder: Path) -> None:
    """Make a directory if need be, and see that it takes files.

    Raises:
        OutputError: It does not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = "is a file" if isinstance(error, FileExistsError) else str(error.strerror)
        raise OutputError(str(folder), f"cannot be written to: {reason}") from error


def probe_file(place: Path) -> None:
    """See that a file can be written or replaced; its directory is made.

    Raises:
        OutputError: It cannot.
    """
    if place.is_dir():
        raise OutputError(str(place), "is a directory; name a file")
    if place.exists():
        if not os.access(place, os.W_OK):
            raise OutputError(str(place), "cannot be written to: Permission denied")
        if not place.is_file():  # as /dev/null
            return
    probe_folder(place.parent)
