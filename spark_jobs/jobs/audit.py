"""The command ``audit``."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..stages import Stages
from .command import (
    CLEAN,
    FINDINGS,
    add_output,
    age,
    find_log,
    new_parser,
    spark_for,
)
from .output import Output, probe_file

if TYPE_CHECKING:
    from ..audit.auditor import Audit
    from .command import Jobs


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = new_parser(
        jobs,
        "audit",
        "classify every transaction in a commit log, and list what must not be there",
        ends="0 clean, 1 anomalies, 2 the log could not be audited",
        example="~/.halfmq/store --output audit",
    )
    add_output(
        parser,
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
        "--cache",
        metavar="DIR",
        help="keep there what was seen of full segments, so that the next audit reads only new"
        " ones; a directory of its own for each log",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Audit a log and return the exit code."""
    extent = find_log(options.directory)  # no JVM is started for what is no log
    output = Output(options, "transactions", "anomalies")
    if options.html:
        probe_file(options.html)
    stage = Stages("audit")
    with spark_for(extent, stage) as spark:
        from ..audit.auditor import audited  # noqa: PLC0415  see command.py
        from ..audit.overview import Checks  # noqa: PLC0415

        checks = Checks(
            crc=not options.skip_crc,
            queues=not options.skip_queues,
            pending_age=options.pending_age,
            as_of_ms=time.time_ns() // 1_000_000 if options.as_of == "now" else None,
            checks_max=options.check_max,
        )
        with audited(
            spark,
            options.directory,
            extent=extent,
            checks=checks,
            cache=options.cache,
            stage=stage,
        ) as audit:
            _publish(audit, options, output, stage)
            return CLEAN if audit.is_clean else FINDINGS


def _publish(audit: "Audit", options: argparse.Namespace, output: Output, stage: Stages) -> None:
    from ..report import page as report_html  # noqa: PLC0415  see command.py
    from ..report import summary as report  # noqa: PLC0415

    if options.output:
        stage(f"writing {options.output}")
        output.parquet("transactions", audit.transactions)
        output.parquet("anomalies", audit.anomaly_rows.coalesce(1))
    output.publish(report.summary(audit), report.table(audit))
    if options.html:
        stage(f"writing {options.html}")
        report_html.write_page(
            audit, options.html, written_ms=time.time_ns() // 1_000_000, details=options.output
        )
