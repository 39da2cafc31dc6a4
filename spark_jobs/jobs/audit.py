"""The command ``audit``."""

import argparse
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..audit.auditor import audited
from ..audit.checks import Checks
from ..errors import OptionError
from ..log.files import location
from ..report.page import write_page
from ..report.summary import summary, table
from ..source.options import DELAY_LEVELS, DELAY_LEVELS_MS, parse_levels
from .command import CLEAN, FINDINGS, add_job, age, running
from .output import held, probe_file

if TYPE_CHECKING:
    from .command import Jobs

_EVERY: Final = timedelta(seconds=10)  # of which a batch with little in it takes a few


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = add_job(
        jobs,
        "audit",
        "classify every transaction in a commit log, and list what must not be there",
        run,
        ends="0 clean, 1 anomalies, 2 the log could not be audited",
        example="~/.halfmq/store --output audit",
        writes="write transactions/ and anomalies/ as Parquet and summary.json to DIR, replacing"
        " those of an earlier audit",
    )
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a report with charts, one file for itself"
    )
    parser.add_argument(
        "--skip-crc", action="store_true", help="do not read the bodies to check their CRCs"
    )
    parser.add_argument(
        "--skip-queues",
        action="store_true",
        help="do not compare the consume queues with the log",
    )
    parser.add_argument(
        "--pending-age",
        metavar="AGE",
        type=age,
        help="report halves that are undecided for longer, as in 90s, 15m, 2h or 3d",
    )
    parser.add_argument(
        "--as-of",
        choices=("log", "now"),
        default="log",
        help="count the age of halves up to the last record of the log (default), or up to now",
    )
    parser.add_argument(
        "--check-max",
        metavar="N",
        type=int,
        default=15,
        help="transactionCheckMax of the RocketMQ broker that wrote the log (15)",
    )
    parser.add_argument(
        "--delay-levels",
        metavar="LEVELS",
        type=_levels,
        default=DELAY_LEVELS_MS,
        help=f"messageDelayLevel of the broker, if not {DELAY_LEVELS!r}",
    )
    watch = parser.add_argument_group("to audit a log while it is being written")
    watch.add_argument(
        "--follow",
        action="store_true",
        help="write each finding to standard output as a line of JSON, once when it is found and"
        " once when it is resolved",
    )
    watch.add_argument(
        "--state", metavar="DIR", type=Path, help="what the next run goes on with, and all findings"
    )
    watch.add_argument(
        "--every", metavar="AGE", type=age, default=_EVERY, help="how often to look (10s)"
    )
    watch.add_argument("--once", action="store_true", help="end at the end of the log")


def _levels(text: str) -> tuple[int, ...]:
    try:
        return parse_levels(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {error}, not {text!r}") from error


def run(options: argparse.Namespace) -> int:
    """Audit a log and return the exit code."""
    checks = Checks(
        crc=not options.skip_crc,
        queues=not options.skip_queues,
        pending_age=options.pending_age,
        as_of_ms=time.time_ns() // 1_000_000 if options.as_of == "now" else None,
        delay_levels=options.delay_levels,
        checks_max=options.check_max,
    )
    if options.follow:
        return _follow(options, checks)
    if options.html:
        probe_file(options.html)
    with (
        running(options, "transactions", "anomalies") as job,
        audited(
            job.spark,
            options.directory,
            extent=job.extent,
            checks=checks,
            stage=job.step,
        ) as audit,
    ):
        if options.output:
            job.write(transactions=audit.transactions, anomalies=audit.anomaly_rows.coalesce(1))
        job.publish(summary(audit), table(audit))
        if options.html:
            job.step(f"writing {options.html}")
            write_page(
                audit, options.html, written_ms=time.time_ns() // 1_000_000, details=options.output
            )
        return CLEAN if audit.is_clean else FINDINGS


def _follow(options: argparse.Namespace, checks: Checks) -> int:
    """Watch a log; return the exit code if that ends."""
    from ..audit.watch import Watch  # noqa: PLC0415  a cluster's driver may lack what it imports

    if not options.state or checks.as_of_ms or options.output or options.html or options.json:
        raise OptionError(
            "--follow needs --state, and takes no --as-of now, --output, --html, --json"
        )

    def tell(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    settings = {
        "directory": location(options.directory),
        "crc": checks.crc,
        "delay_levels": checks.levels,
    }
    home = options.state.absolute()
    with held(home, "watch", settings), running(options) as job:
        watch = Watch(options.directory, home, checks, tell)
        job.step(f"watching {options.directory}")
        watch.run(job.spark, every=None if options.once else options.every)
        return FINDINGS if watch.standing(job.spark).count() else CLEAN
