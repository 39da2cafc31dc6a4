"""What all jobs share: options, a run over a log, and its results.

A job is a module with a function ``add``, which adds its parser and names the function that runs
it. That function returns an exit code. ``SparkJobsError`` and ``OSError`` end the command with one
sentence on standard error.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from ..report.tables import Rows
from ..source.message_roles import read_log
from .output import Output
from .session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    Jobs = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no other name

CLEAN: Final = 0
FINDINGS: Final = 1
FAILED: Final = 2
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

    ``ends`` explains its exit codes, ``writes`` what it puts into the directory ``--output``, which
    is required with ``must_write``.
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
    step: Callable[[str], None]  # prints a step when it begins: a log shows where a job hangs
    _output: Output
    _opened: ExitStack

    def log(self, *columns: str, **options: object) -> "DataFrame":
        """Read columns of the log up to its end when the run began."""
        self.step(f"reading {self.extent.size:,} bytes of log")
        return read_log(
            self.spark,
            self.options.directory,
            *columns,
            extent=self.extent,
            partitions=self.spark.sparkContext.defaultParallelism,
            options=options,
        )

    def cached(self, frame: "DataFrame") -> "DataFrame":
        """Keep in memory, until the end of the run, what several queries use."""
        self._opened.callback(frame.persist().unpersist)
        return frame

    def write(self, **results: "DataFrame") -> None:
        """Write results as Parquet if ``--output`` is given."""
        if self.options.output:
            self.step(f"writing {self.options.output}")
            for name, frame in results.items():
                self._output.parquet(name, frame)

    def publish(self, summary: dict[str, Any], table: Iterable[str]) -> None:
        """Print the table, then write the JSON."""
        self._output.publish(summary, table)

    def about_log(self) -> dict[str, Any]:
        """Return the JSON that says which part of which log was read."""
        return {
            "directory": self.options.directory,
            "log": {
                "segments": len(self.extent.segments),
                "first_offset": self.extent.first_offset,
                "end_offset": self.extent.end_offset,
                "tail": self.extent.tail,
            },
        }


@contextmanager
def running(
    options: argparse.Namespace,
    *results: str,
    before: Callable[[LogExtent], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Run]:
    """Begin a run that writes these results: check the log and all outputs, then start Spark.

    ``before`` is a context of the job that is entered before Spark starts.

    Raises:
        SparkJobsError: There is no log, an output cannot be written, or Spark fails.
    """
    extent = survey(options.directory)
    output = Output(options.job, options.json, options.output, *results)
    began = time.monotonic()

    def step(text: str) -> None:
        sys.stderr.write(f"{options.job}: {time.monotonic() - began:.1f} s: {text}\n")
        sys.stderr.flush()

    for kind in ("SQL", "DataFrame"):  # PySpark would log what it raises as well
        PySparkLogger.getLogger(f"{kind}QueryContextLogger").disabled = True
    with before(extent), ExitStack() as opened:
        step("starting Spark")
        spark = opened.enter_context(spark_session(log_bytes=extent.size))
        try:
            yield Run(options, extent, spark, step, output, opened)
        except (PySparkException, Py4JError) as error:
            raise SparkFailedError(root_cause(error)) from error


def rows(frame: "DataFrame") -> Rows:
    """Collect a few rows; times have a zone."""
    collected: Rows = frame.toArrow().to_pylist()
    return collected
