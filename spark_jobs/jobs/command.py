"""What all jobs have in common: options, the run, its results.

A job is a module with ``add``, which adds its parser to those of the others and names the function
that runs it. That function returns an exit code, and raises ``SparkJobsError`` or ``OSError`` for
what ends as one sentence on standard error.
"""

import argparse
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger

from ..errors import SparkFailedError, root_cause
from ..log.log_end import survey
from ..log.segments import LogExtent
from ..source.roles import read_log
from .interrupt import restore
from .output import Output
from .session import spark_session
from .steps import Report, step_reporter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    Jobs = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

CLEAN: Final = 0
FINDINGS: Final = 1
FAILED: Final = 2
Rows = list[dict[str, Any]]

_QUERIES: Final = ("SQL", "DataFrame")
_AGE: Final = re.compile(r"(\d{1,9})([smhd])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def add_job(
    jobs: "Jobs",
    name: str,
    about: str,
    run: Callable[[argparse.Namespace], int],
    *,
    ends: str,
    example: str,
    writes: str,
    must_write: bool = False,
) -> argparse.ArgumentParser:
    """Add the parser of a job.

    ``ends`` says what its exit codes mean, ``writes`` what it puts in the directory ``--output``,
    which it may demand.
    """
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
    parser.add_argument("--output", metavar="DIR", type=Path, required=must_write, help=writes)
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the summary as JSON; - writes it to standard output and the table to standard"
        " error",
    )
    parser.set_defaults(run=run)
    return parser


def age(text: str) -> timedelta:
    """Read a duration as in 90s, 15m, 2h or 3d."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number and s, m, h or d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def number(text: str) -> int:
    """Read a count that is not negative."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number")
    return int(text)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job over a log."""

    options: argparse.Namespace
    extent: LogExtent
    spark: "SparkSession"
    step: Report
    _output: Output
    _opened: ExitStack

    def log(self, *columns: str, **options: object) -> "DataFrame":
        """Read columns of the log as far as it went when the run began."""
        return read_log(
            self.spark,
            self.options.directory,
            *columns,
            extent=self.extent,
            partitions=self.spark.sparkContext.defaultParallelism,
            options=options,
        )

    def cached(self, frame: "DataFrame") -> "DataFrame":
        """Keep in memory, as long as the run, what several queries use."""
        self._opened.callback(frame.persist().unpersist)
        return frame

    def write(self, **results: "DataFrame") -> None:
        """Write results as Parquet if there is an ``--output``."""
        if self.options.output:
            self.step(f"writing {self.options.output}")
            for name, frame in results.items():
                self._output.parquet(name, frame)

    def publish(self, summary: dict[str, Any], table: Iterable[str]) -> None:
        """Show the table, then write the JSON."""
        self._output.publish(summary, table)

    def about_log(self) -> dict[str, Any]:
        """Say in JSON which part of which log was read."""
        return about_log(self.options.directory, self.extent)


@contextmanager
def running(options: argparse.Namespace, *results: str) -> Iterator[Run]:
    """Begin a run that writes these results: look at all places, then start Spark.

    Raises:
        SparkJobsError: There is no log, a place cannot be written, or Spark fails in the context.
    """
    extent = survey(options.directory)
    output = Output(options.job, options.json, options.output, *results)
    step = step_reporter(options.job)
    with spark_for(extent, step) as spark, ExitStack() as opened:
        yield Run(options, extent, spark, step, output, opened)


@contextmanager
def spark_for(extent: LogExtent, step: Report) -> "Iterator[SparkSession]":
    """Give a session to read a log with; ``step`` reports its start, which takes seconds.

    Raises:
        JavaNotFoundError: There is no Java for it.
        SparkFailedError: Spark could not do what it was asked inside the context.
    """
    step("starting Spark")
    handler = signal.getsignal(signal.SIGINT)
    with spark_session(log_bytes=extent.size) as spark:
        restore(handler)
        try:
            with _no_log_of_queries():
                yield spark
        except (PySparkException, Py4JError) as error:
            raise SparkFailedError(root_cause(error)) from error


@contextmanager
def _no_log_of_queries() -> Iterator[None]:
    """Have PySpark not print what it raises as well."""
    loggers = [PySparkLogger.getLogger(f"{kind}QueryContextLogger") for kind in _QUERIES]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled


def about_log(directory: str, extent: LogExtent) -> dict[str, Any]:
    """Say in JSON which part of a log was read."""
    return {
        "directory": directory,
        "log": {
            "segments": len(extent.segments),
            "first_offset": extent.first_offset,
            "end_offset": extent.end_offset,
            "tail": extent.tail,
        },
    }


def rows(frame: "DataFrame") -> Rows:
    """Collect a few rows; times have a zone."""
    collected: Rows = frame.toArrow().to_pylist()
    return collected
