"""The command ``lag``."""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..stages import Stages, reading
from .command import (
    CLEAN,
    FINDINGS,
    add_output,
    age,
    find_log,
    log_summary,
    new_parser,
    number,
    rows,
    spark_for,
)
from .output import Output

if TYPE_CHECKING:
    from ..log.segments import LogExtent
    from ..offset_table import OffsetTable
    from .command import Jobs

SHOWN_MAX: Final = 50  # groups and topics in the table, and findings
_WRONG: Final = {
    "beyond_end": "the group goes on at {nextOffset}, and the log ends at {end}",
    "below_start": "{messagesLost:,} messages left the log before the group consumed them",
}
Rows = list[dict[str, Any]]


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = new_parser(
        jobs,
        "lag",
        "say how many messages and seconds each consumer group is behind the log",
        ends="0 clean, 1 offsets outside the log or groups too far behind, 2 it cannot be told",
        example="~/.halfmq/store --max-messages 10000 --max-age 5m",
    )
    add_output(
        parser, writes="write lag/ as Parquet and summary.json to DIR, replacing earlier ones"
    )
    parser.add_argument(
        "--offsets",
        metavar="FILE",
        type=Path,
        help="the broker's consumerOffset.json (default: that of the store; its .bak where the"
        " file cannot be read)",
    )
    parser.add_argument(
        "--max-messages",
        metavar="N",
        type=number,
        help="report groups that have more messages of a queue to consume",
    )
    parser.add_argument(
        "--max-age",
        metavar="AGE",
        type=age,
        help="report groups whose oldest message to consume is older, as in 90s, 15m, 2h or 3d",
    )
    parser.add_argument(
        "--as-of",
        choices=("log", "now"),
        default="log",
        help="count seconds up to the last message of the log (default), or up to now",
    )
    parser.add_argument(
        "--system", action="store_true", help="tell of the broker's own topics and groups too"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compare the offsets with a log and return the exit code."""
    from .. import offset_table  # noqa: PLC0415

    find_log(options.directory)  # says it first if there is none
    # Read before the log is measured: offsets read later can be beyond its end.
    path = options.offsets or offset_table.offset_file(options.directory)
    table = offset_table.read_offsets(path, may_be_missing=options.offsets is None)
    known = offset_table.known_groups(path.parent)
    extent = find_log(options.directory)
    output = Output(options, "lag")
    lags = _lags(options, table, extent, output)
    silent = sorted(known - {row["consumerGroup"] for row in lags})
    findings = list(_findings(lags, options))
    summary = {
        "directory": options.directory,
        "log": log_summary(extent),
        "offsets": {"file": str(table.path), "is_backup": table.is_backup},
        "groups": _by_group(lags),
        "never_consumed": silent,
        "findings": findings,
    }
    output.publish(summary, "\n".join(_table(summary)))
    return FINDINGS if findings else CLEAN


def _lags(
    options: argparse.Namespace, table: "OffsetTable", extent: "LogExtent", output: Output
) -> Rows:
    from ..offset_table import DDL, is_brokers_own  # noqa: PLC0415  see command.py

    offsets = [one for one in table.offsets if options.system or not is_brokers_own(one.group)]
    stage = Stages("lag")
    with spark_for(extent, stage) as spark:
        from .. import lag, roles  # noqa: PLC0415

        log = roles.read_log(
            spark,
            options.directory,
            *lag.COLUMNS,
            extent=extent,
            partitions=spark.sparkContext.defaultParallelism,
        )
        records = lag.prepared(log, system=options.system).persist()
        try:
            table_rows = spark.createDataFrame(offsets, DDL)
            told = lag.lags(records, table_rows, _as_of_ms(options, extent)).persist()
            try:
                stage(reading(extent))
                lags = rows(told.orderBy("consumerGroup", "topic", "partition"))
                if options.output:
                    stage(f"writing {options.output}")
                    output.parquet("lag", told.coalesce(1))
                return lags
            finally:
                told.unpersist()
        finally:
            records.unpersist()


def _as_of_ms(options: argparse.Namespace, extent: "LogExtent") -> int | None:
    from ..log.log_times import log_times  # noqa: PLC0415  see command.py

    if options.as_of == "now":
        return time.time_ns() // 1_000_000
    times = log_times(extent)
    return None if times is None else times.last


def _findings(lags: Rows, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for row in lags:
        place = {name: row[name] for name in ("consumerGroup", "topic", "partition")}
        if row["state"] in _WRONG:
            detail = _WRONG[row["state"]].format(**row)
            yield {"kind": row["state"], **place, "detail": detail}
        count, seconds = row["messagesBehind"] or 0, row["secondsBehind"] or 0
        if options.max_messages is not None and count > options.max_messages:
            yield {"kind": "too_many", **place, "detail": f"{count:,} messages behind"}
        if options.max_age is not None and seconds > options.max_age.total_seconds():
            yield {"kind": "too_old", **place, "detail": f"{seconds:,.0f} seconds behind"}


def _by_group(lags: Rows) -> Rows:
    """Put the queues of each group and topic together."""
    queues: dict[tuple[str, str], Rows] = defaultdict(list)
    for row in lags:
        kept = {name: row[name] for name in row if name not in {"consumerGroup", "topic"}}
        queues[row["consumerGroup"], row["topic"]].append(kept)
    return [
        {
            "consumerGroup": group,
            "topic": topic,
            "messagesBehind": sum(queue["messagesBehind"] or 0 for queue in its),
            "messagesLost": sum(queue["messagesLost"] or 0 for queue in its),
            "secondsBehind": max(queue["secondsBehind"] or 0 for queue in its),
            "queues": its,
        }
        for (group, topic), its in queues.items()
    ]


def _table(summary: dict[str, Any]) -> Iterator[str]:
    offsets = summary["offsets"]
    yield f"commit log    {summary['directory']}"
    yield f"offsets       {offsets['file']}{' (a backup)' if offsets['is_backup'] else ''}"
    yield ""
    if not summary["groups"]:
        yield "no consumer group has stored an offset"
    yield f"{'messages':>12}{'seconds':>12}  consumer group / topic"
    groups = sorted(summary["groups"], key=lambda group: -group["secondsBehind"])
    for group in groups[:SHOWN_MAX]:
        behind = f"{group['messagesBehind']:>12,}{group['secondsBehind']:>12,.1f}"
        yield f"{behind}  {group['consumerGroup']} / {group['topic']}"
    if len(groups) > SHOWN_MAX:
        yield f"  and {len(groups) - SHOWN_MAX:,} more: see --json or --output"
    for group in summary["never_consumed"][:SHOWN_MAX]:
        yield f"{'-':>12}{'-':>12}  {group} has never consumed anything"
    yield ""
    yield f"findings      {len(summary['findings']):,}"
    for finding in summary["findings"][:SHOWN_MAX]:
        place = f"{finding['consumerGroup']} / {finding['topic']} / {finding['partition']}"
        yield f"  {finding['kind']:12} {place}: {finding['detail']}"
