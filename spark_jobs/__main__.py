"""``python -m halfmq.spark_jobs NAME``: run one of the jobs.

Exit codes: 0 the log is clean, 1 there are anomalies, 2 the job could not be done.
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from halfmq.spark_jobs.errors import MissingDependencyError, SparkJobsError

if TYPE_CHECKING:
    from halfmq.spark_jobs.auditor import Audit

CLEAN: Final = 0
ANOMALIES: Final = 1
FAILED: Final = 2
INTERRUPTED: Final = 130  # what a shell reports for Ctrl-C

# The line of a traceback that says what happened; the rest of it is of no use to an operator.
_RAISED: Final = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception): (.+)$", re.MULTILINE)

_AGE: Final = re.compile(r"(\d{1,9})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return _audit(options)
    except (SparkJobsError, OSError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m halfmq.spark_jobs",
        description="PySpark jobs over the commit log of halfmq or of Apache RocketMQ.",
    )
    jobs = parser.add_subparsers(dest="job", metavar="NAME", required=True)
    audit = jobs.add_parser(
        "audit",
        help="classify every transaction and look for what must not be",
        description="Classify every transaction in a commit log, and list what must not be there.",
        epilog="Exit codes: 0 clean, 1 anomalies, 2 the log could not be audited.",
    )
    audit.add_argument(
        "directory", metavar="DIRECTORY", help="a store root or a folder of segments; may be live"
    )
    audit.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="write transactions/ and anomalies/ as Parquet and summary.json to DIR, replacing"
        " those of an earlier audit",
    )
    audit.add_argument(
        "--json",
        metavar="FILE",
        help="write the summary as JSON; - writes it to standard output and the table to standard"
        " error",
    )
    audit.add_argument(
        "--skip-crc", action="store_true", help="do not read the bodies to check their CRCs"
    )
    audit.add_argument(
        "--skip-queues",
        action="store_true",
        help="do not compare the consume queues with the log",
    )
    audit.add_argument(
        "--pending-age",
        metavar="AGE",
        type=_age,
        help="report halves that are undecided for longer, as in 90s, 15m, 2h or 3d",
    )
    audit.add_argument(
        "--as-of",
        choices=("log", "now"),
        default="log",
        help="count the age of halves up to the last record of the log (default), or up to now",
    )
    audit.add_argument(
        "--check-max",
        metavar="N",
        type=int,
        default=15,
        help="transactionCheckMax of the RocketMQ broker that wrote the log (15)",
    )
    return parser


def _age(text: str) -> timedelta:
    match = _AGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number and s, m, h or d")
    return timedelta(seconds=int(match[1]) * _SECONDS[match[2]])


def _audit(options: argparse.Namespace) -> int:
    try:
        # Imported here, so that a missing package is told in a sentence.
        from halfmq.spark_jobs.segments import survey  # noqa: PLC0415
        from halfmq.spark_jobs.session import spark_session  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingDependencyError(error.name or str(error)) from error
    extent = survey(options.directory)  # no JVM is started for what is no log
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    size = extent.end_offset - extent.first_offset
    with spark_session(log_bytes=size, progress=sys.stderr.isatty()) as spark:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415
        from pyspark.errors import PySparkException  # noqa: PLC0415

        from halfmq.spark_jobs.auditor import audited  # noqa: PLC0415
        from halfmq.spark_jobs.overview import Checks  # noqa: PLC0415

        checks = Checks(
            crc=not options.skip_crc,
            queues=not options.skip_queues,
            pending_age=options.pending_age,
            as_of_ms=time.time_ns() // 1_000_000 if options.as_of == "now" else None,
            checks_max=options.check_max,
        )
        try:
            with audited(spark, options.directory, extent=extent, checks=checks) as audit:
                _publish(audit, options)
                return CLEAN if audit.is_clean else ANOMALIES
        except (PySparkException, Py4JError) as error:
            return _failed(_cause(str(error)))


def _publish(audit: "Audit", options: argparse.Namespace) -> None:
    from halfmq.spark_jobs import report  # noqa: PLC0415  see _audit

    if options.output:
        report.write_files(audit, options.output)
    text = report.summary_text(audit)
    if options.json == "-":
        sys.stdout.write(text)
    elif options.json:
        Path(options.json).write_text(text, "utf-8")
    shown = sys.stderr if options.json == "-" else sys.stdout
    shown.write(report.table(audit) + "\n")


def _cause(message: str) -> str:
    """Find what a worker raised in the long text that Spark makes of it."""
    raised = _RAISED.findall(message)
    return str(raised[-1]) if raised else message.strip().partition("\n")[0]


def _failed(reason: str) -> int:
    sys.stderr.write(f"audit: {reason}\n")
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
