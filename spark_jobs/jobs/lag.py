"""The job ``lag``: how far consumer groups are behind the log; its queries are ``sql/lag.sql``.

Read the offsets before the log: while a broker runs, later ones can lie after the end of the log.
"""

import argparse
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import DataFrame

from ..log.files import location, parent
from ..log.log_end import survey
from ..log.lookup import log_times
from ..log.segments import LogExtent
from ..report.tables import fact, listing
from ..source.message_roles import with_roles
from .command import CLEAN, FINDINGS, add_job, age, number, rows, running
from .offset_table import DDL, is_brokers_own, known_groups, offset_file, read_offsets
from .queries import queries

if TYPE_CHECKING:
    from .command import Jobs

COLUMNS: Final = (
    "topic",
    "partition",
    "offset",
    "timestamp",
    "physicalOffset",
    "sysFlag",
    "properties",
    "recordType",
)


def lag(
    log: DataFrame,
    offsets: DataFrame,
    *,
    system: bool = False,
    as_of_ms: int | None = None,
    max_messages: int | None = None,
    max_seconds: float | None = None,
) -> dict[str, DataFrame]:
    """Compare the offsets of groups with a log: the queries of ``sql/lag.sql`` by name.

    ``log`` has ``COLUMNS``, ``offsets`` the columns ``offset_table.DDL``. ``system`` keeps the
    broker's own topics. ``lags`` has one row per group and queue, whose seconds are counted from
    the time at which the first waiting message was stored, up to ``as_of_ms`` or the last record.
    """
    parameters = {
        "system": system,
        "asOf": as_of_ms,
        "maxMessages": max_messages,
        "maxSeconds": max_seconds,
    }
    return queries("lag", parameters, log=with_roles(log), offsets=offsets)


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = add_job(
        jobs,
        "lag",
        "report how many messages and seconds each consumer group is behind the log",
        run,
        ends="0 clean, 1 offsets outside the log or groups too far behind, 2 not done",
        example="~/.halfmq/store --max-messages 10000 --max-age 5m",
        writes="write lag/ as Parquet and summary.json to DIR, replacing earlier ones",
    )
    parser.add_argument(
        "--offsets",
        metavar="FILE",
        type=location,
        help="the broker's consumerOffset.json (default: that of the store; its .bak where the"
        " file cannot be read)",
    )
    parser.add_argument(
        "--max-messages",
        metavar="N",
        type=number,
        help="report groups that are further behind in a queue",
    )
    parser.add_argument(
        "--max-age",
        metavar="AGE",
        type=age,
        help="report groups whose oldest waiting message is older, as in 90s, 15m, 2h or 3d",
    )
    parser.add_argument(
        "--as-of",
        choices=("log", "now"),
        default="log",
        help="count seconds up to the last message of the log (default), or up to now",
    )
    parser.add_argument(
        "--system", action="store_true", help="include the broker's own topics and groups"
    )


def run(options: argparse.Namespace) -> int:
    """Compare the offsets with a log and return the exit code."""
    survey(options.directory)  # a missing log is reported before missing offsets
    # Read before the log's end is looked for: later offsets can lie after it.
    path = options.offsets or offset_file(options.directory)
    table = read_offsets(path, may_be_missing=options.offsets is None)
    known = known_groups(parent(path))
    offsets = [one for one in table.offsets if options.system or not is_brokers_own(one.group)]
    with running(options, "lag") as job:
        found = lag(
            job.log(*COLUMNS),
            job.spark.createDataFrame(offsets, DDL),
            system=options.system,
            as_of_ms=_as_of_ms(options, job.extent),
            max_messages=options.max_messages,
            max_seconds=options.max_age and options.max_age.total_seconds(),
        )
        job.cached(found["records"])
        job.cached(found["lags"])
        groups = rows(found["groups"])
        job.write(lag=found["lags"].coalesce(1))
        summary = {
            **job.about_log(),
            "offsets": {"file": table.path, "is_backup": table.is_backup},
            "groups": groups,
            "never_consumed": sorted(known - {group["consumerGroup"] for group in groups}),
            "findings": rows(found["findings"]),
        }
        job.publish(summary, _table(summary))
    return FINDINGS if summary["findings"] else CLEAN


def _as_of_ms(options: argparse.Namespace, extent: LogExtent) -> int | None:
    if options.as_of == "now":
        return time.time_ns() // 1_000_000
    times = log_times(extent)
    return None if times is None else times.last


def _table(summary: dict[str, Any]) -> Iterator[str]:
    offsets = summary["offsets"]
    yield fact("commit log", summary["directory"])
    yield fact("offsets", f"{offsets['file']}{' (a backup)' if offsets['is_backup'] else ''}")
    if not summary["groups"]:
        yield "no consumer group has stored an offset"
    groups = sorted(summary["groups"], key=lambda group: -group["secondsBehind"])
    yield from listing(groups, "messagesBehind", "secondsBehind", "consumerGroup", "topic")
    never = [{"never consumed": group} for group in summary["never_consumed"]]
    yield from listing(never, "never consumed")
    yield ""
    yield fact("findings", len(summary["findings"]))
    names = ("kind", "consumerGroup", "topic", "partition", "detail")
    yield from listing(summary["findings"], *names)
