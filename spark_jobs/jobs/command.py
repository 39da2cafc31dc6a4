"""What the commands of all jobs have in common.

A command is a module with ``add``, which adds its parser to those of the others and names the
function that runs it. That function returns an exit code, and raises ``SparkJobsError`` or
``OSError`` for what ends as one sentence on standard error.

Nothing here or at the top of a command's module imports PySpark, PyArrow or numpy, so that a
missing package is told in a sentence too.
"""

import argparse
import json
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import MissingDependencyError, SparkFailedError
from .interrupt import restore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ..log.segments import LogExtent
    from ..stages import Stages

    Jobs = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

CLEAN: Final = 0
FINDINGS: Final = 1
FAILED: Final = 2

# The line of a traceback that says what happened; the rest of it is of no use to an operator.
_RAISED: Final = re.compile(r"^(?:: )?(?:[\w$]+\.)*[\w$]+(?:Error|Exception): (.+)$", re.MULTILINE)

_QUERIES: Final = ("SQL", "DataFrame")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_AGE: Final = re.compile(r"(\d{1,9})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def new_parser(
    jobs: "Jobs", name: str, about: str, *, ends: str, example: str
) -> argparse.ArgumentParser:
    """Add the parser of a job that reads a log; ``ends`` says what its exit codes mean."""
    parser = jobs.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=f"Example:\n  python -m halfmq.spark_jobs {name} {example}\n\nExit codes: {ends}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory", metavar="DIRECTORY", help="a store root or a folder of segments; may be live"
    )
    return parser


def add_output(parser: argparse.ArgumentParser, *, writes: str) -> None:
    """Add the options that say where results go; ``writes`` is what is put in a directory."""
    parser.add_argument("--output", metavar="DIR", type=Path, help=writes)
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the summary as JSON; - writes it to standard output and the table to standard"
        " error",
    )


def age(text: str) -> timedelta:
    """Read a duration as in 90s, 15m, 2h or 3d."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number and s, m, h or d")
    return timedelta(seconds=int(match[1]) * _SECONDS[match[2]])


def number(text: str) -> int:
    """Read a count that is not negative."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number")
    return int(text)


def find_log(directory: str) -> "LogExtent":
    """Look for the log before a JVM is started for nothing.

    Raises:
        LogDirectoryError: There is none, or it cannot be read.
        MissingDependencyError: A package is not installed.
    """
    try:
        # Imported here, so that a missing package is told in a sentence.
        from ..log.segments import survey  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingDependencyError(error.name or str(error)) from error
    return survey(directory)


@contextmanager
def spark_for(extent: "LogExtent", stage: "Stages") -> "Iterator[SparkSession]":
    """Give a session to read a log with; what goes wrong in Spark becomes a ``SparkFailedError``.

    ``stage`` is told that Spark starts, which takes seconds.

    Raises:
        MissingDependencyError: PySpark is not installed.
        JavaNotFoundError: There is no Java for it.
        SparkFailedError: Spark could not do what it was asked inside the context.
    """
    from ..session import spark_session  # noqa: PLC0415  see find_log

    stage("starting Spark")
    handler = signal.getsignal(signal.SIGINT)
    with spark_session(log_bytes=extent.size) as spark, stage.following(spark):
        restore(handler)
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415
        from pyspark.errors import PySparkException  # noqa: PLC0415

        try:
            with _no_log_of_queries():
                yield spark
        except (PySparkException, Py4JError) as error:
            raise SparkFailedError(_cause(str(error))) from error


@contextmanager
def _no_log_of_queries() -> Iterator[None]:
    """Have PySpark not print what it raises as well."""
    from pyspark.logger import PySparkLogger  # noqa: PLC0415  see find_log

    loggers = [PySparkLogger.getLogger(f"{kind}QueryContextLogger") for kind in _QUERIES]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled


def log_summary(extent: "LogExtent") -> dict[str, object]:
    """Say in JSON which part of a log was read."""
    return {
        "segments": len(extent.segments),
        "first_offset": extent.first_offset,
        "end_offset": extent.end_offset,
        "tail": extent.tail,
    }


def rows(frame: "DataFrame") -> list[dict[str, Any]]:
    """Collect a few rows as they stand in JSON: times as texts in UTC."""
    from pyspark.sql import functions as F  # noqa: PLC0415, N812
    from pyspark.sql.types import TimestampType  # noqa: PLC0415

    # Collected as they are, times would be in the time zone of this machine, and not say so.
    times = [field.name for field in frame.schema if isinstance(field.dataType, TimestampType)]
    counted = frame.withColumns({name: F.unix_millis(name) for name in times}) if times else frame
    collected = [row.asDict(recursive=True) for row in counted.collect()]
    for row in collected:
        row.update({name: utc(row[name]) for name in times if row[name] is not None})
    return collected


def utc(time_ms: int) -> str:
    """Spell a time in ms since 1970."""
    time = _EPOCH + timedelta(milliseconds=time_ms)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def show(json_file: str | None, text: str, table: str) -> None:
    """Print a table, and ``text`` where ``--json -`` asks for it."""
    if json_file == "-":
        sys.stdout.write(text)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")  # what stages.py has written
    shown = sys.stderr if json_file == "-" else sys.stdout
    shown.write(table + "\n")


def as_json(summary: Mapping[str, object]) -> str:
    """Return a summary as text, one line per value."""
    return json.dumps(summary, indent=2) + "\n"


def _cause(message: str) -> str:
    """Find what a worker raised in the long text that Spark makes of it."""
    raised = _RAISED.findall(message)
    return str(raised[-1]) if raised else message.strip().partition("\n")[0]
