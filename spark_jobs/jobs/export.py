"""The command ``export``."""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..stages import Stages
from .command import (
    CLEAN,
    FINDINGS,
    as_json,
    find_log,
    log_summary,
    new_parser,
    show,
    spark_for,
)
from .output import probe_file, probe_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ..export import Outcome
    from .command import Jobs

_FORMATS: Final = ("parquet", "delta", "iceberg")  # export.FORMATS, which needs packages
SHOWN_MAX: Final = 50  # ranges in the table


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = new_parser(
        jobs,
        "export",
        "copy messages to Parquet, each exactly once over all runs",
        ends="0 done, 1 done, but parts of the log are damaged or were deleted before, 2 not done",
        example="~/.halfmq/store --topic orders --output orders",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        required=True,
        help="where the export is; a further run adds what is new. Partitioned by topic and date",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the summary as JSON; - writes it to standard output and the table to standard"
        " error",
    )
    parser.add_argument(
        "--topic",
        metavar="TOPIC",
        action="append",
        help="may be given several times (default: all but the broker's own, retries and dead"
        " letters)",
    )
    parser.add_argument(
        "--active",
        action="store_true",
        help="export the segment that is being written too, as far as its records are whole",
    )
    parser.add_argument(
        "--decompress", action="store_true", help="decompress bodies that producers compressed"
    )
    parser.add_argument(
        "--format",
        choices=_FORMATS,
        default="parquet",
        help="delta and iceberg need a Spark that has them (default: parquet)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Export a log and return the exit code."""
    extent = find_log(options.directory)
    probe_folder(options.output)
    if options.json and options.json != "-":
        probe_file(Path(options.json))
    stage = Stages("export")
    with ExitStack() as opened:
        sessions: list[SparkSession] = []

        def session() -> "SparkSession":
            if not sessions:  # most runs of a frequent export find nothing new
                sessions.append(opened.enter_context(spark_for(extent, stage)))
            return sessions[0]

        from ..export import Export, Settings  # noqa: PLC0415  see command.py

        settings = Settings(
            topics=tuple(sorted(set(options.topic))) if options.topic else None,
            format=options.format,
            decompress=options.decompress,
        )
        export = Export(options.directory, options.output, settings, stage)
        outcome = export.run(extent, session, active=options.active)
    summary = {"directory": options.directory, "log": log_summary(extent), **_told(outcome)}
    show(options.json, as_json(summary), "\n".join(_table(options, summary)))
    if options.json and options.json != "-":
        Path(options.json).write_text(as_json(summary), "utf-8")
    return CLEAN if outcome.is_clean else FINDINGS


def _told(outcome: "Outcome") -> dict[str, Any]:
    return {
        "rows": sum(one.rows for one in outcome.ranges),
        "ranges": [one._asdict() for one in outcome.ranges],
        "missing": [{"start": start, "end": end} for start, end in outcome.missing],
        "left_bytes": outcome.left,
    }


def _table(options: argparse.Namespace, summary: dict[str, Any]) -> Iterator[str]:
    yield f"commit log    {summary['directory']}"
    yield f"export        {options.output}"
    yield f"exported      {summary['rows']:,} messages of {len(summary['ranges']):,} ranges"
    for one in summary["ranges"][:SHOWN_MAX]:
        wrong = f", {one['damaged_bytes']:,} bytes damaged" if one["damaged_bytes"] else ""
        wrong += f", {one['bad_crcs']:,} bodies with a wrong CRC" if one["bad_crcs"] else ""
        wrong += f", {one['bad_bodies']:,} not decompressed" if one["bad_bodies"] else ""
        yield f"  {one['start']} to {one['end']}: {one['rows']:,} messages{wrong}"
    if len(summary["ranges"]) > SHOWN_MAX:
        yield f"  and {len(summary['ranges']) - SHOWN_MAX:,} more: see --json"
    for gap in summary["missing"]:
        yield f"missing       {gap['start']} to {gap['end']} left the log before it was exported"
    if summary["left_bytes"]:
        yield f"left          {summary['left_bytes']:,} bytes of the segment that is being written"
