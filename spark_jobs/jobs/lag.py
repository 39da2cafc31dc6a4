"""The job ``lag``: how far consumer groups are behind the log.

``prepared`` keeps the records that have a place in a queue; ``lags`` compares them with the offsets
of the groups.

Read the offsets before the log: while a broker runs, later ones can lie after the end of the log.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from ..log.log_end import survey
from ..log.lookup import log_times
from ..log.segments import LogExtent
from ..report.tables import Rows, fact, listing
from ..source.columns import MESSAGE
from ..source.message_roles import HALF, OP, SYSTEM, messages, role, takes_slot
from .command import CLEAN, FINDINGS, add_job, age, number, rows, running
from .offset_table import DDL, is_brokers_own, known_groups, offset_file, read_offsets

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

# States of a group in a queue:
#   caught_up, behind
#   never_consumed  the group consumes the topic, and has no offset for this queue
#   beyond_end      the group will skip what is stored next
#   below_start     what the group would consume next is no longer in the log
#   not_in_log      the log has no message of the queue, so start, end and lag are null
# greatest() ignores nulls: without an offset, all messages wait. A topic that was created again can
# have an offset twice; the later record is the current one.
_LAGS: Final = """
    with queues as (
        select topic, partition, min(first) as start, max_by(next, physicalOffset) as `end`
        from {records} group by topic, partition
    ), theirs as (
        select consumerGroup, topic, partition, start, `end`
        from queues join (select distinct consumerGroup, topic from {offsets}) using (topic)
    ), positions as (
        select * from theirs full join {offsets} using (consumerGroup, topic, partition)
    ), waiting as (
        select /*+ broadcast(positions) */ consumerGroup, topic, partition,
            min_by(timestamp, struct(first, -physicalOffset)) as oldestWaiting
        from {records} join positions using (topic, partition)
        where next > coalesce(nextOffset, 0) and first < `end`
            and `end` > coalesce(nextOffset, start)
        group by consumerGroup, topic, partition
    ), until as (
        select coalesce(:asOf, unix_millis(max(timestamp))) as asOf from {records}
    )
    select consumerGroup, topic, partition,
        case
            when `end` is null then 'not_in_log'
            when nextOffset is null then 'never_consumed'
            when nextOffset > `end` then 'beyond_end'
            when nextOffset < start then 'below_start'
            when nextOffset < `end` then 'behind'
            else 'caught_up'
        end as state,
        nextOffset, start, `end`,
        if(`end` is null, null, greatest(`end` - greatest(nextOffset, start), 0)) as messagesBehind,
        if(`end` is null, null, greatest(start - nextOffset, 0)) as messagesLost,
        oldestWaiting,
        if(`end` is null, null, greatest((asOf - unix_millis(oldestWaiting)) / 1000, 0D))
            as secondsBehind
    from positions left join waiting using (consumerGroup, topic, partition) cross join until
    order by consumerGroup, topic, partition
"""
_GROUPS: Final = """
    select consumerGroup, topic, coalesce(sum(messagesBehind), 0) as messagesBehind,
        coalesce(sum(messagesLost), 0) as messagesLost,
        coalesce(max(secondsBehind), 0D) as secondsBehind,
        array_sort(collect_list(struct(
            partition, state, nextOffset, start, `end`, messagesBehind, messagesLost,
            oldestWaiting, secondsBehind
        ))) as queues
    from {lags} group by consumerGroup, topic order by consumerGroup, topic
"""


def prepared(records: DataFrame, *, system: bool = False) -> DataFrame:
    """Keep the records of a log with the columns ``COLUMNS`` that have a place in a queue.

    ``system`` keeps the broker's own topics too.
    """
    queued = records.where(F.col("recordType") == MESSAGE).where(takes_slot())
    if not system:
        queued = queued.where(~role().isin(HALF, OP, SYSTEM))
    return queued.select(
        "topic",
        "partition",
        F.col("offset").alias("first"),
        (F.col("offset") + messages()).alias("next"),
        "timestamp",
        "physicalOffset",
    )


def lags(records: DataFrame, offsets: DataFrame, as_of_ms: int | None = None) -> DataFrame:
    """Compare the offsets of groups with the log: one row per group and queue.

    ``records`` is what ``prepared`` returns, ``offsets`` has the columns ``offset_table.DDL``.
    Columns: ``consumerGroup, topic, partition, state, nextOffset, start, end, messagesBehind,
    messagesLost, oldestWaiting, secondsBehind``. ``start`` and ``end`` of the queue are those in
    the log. ``messagesBehind`` counts messages in the log that are not consumed, ``messagesLost``
    those that left it before. Seconds are counted from the time at which the first waiting message
    was stored, up to ``as_of_ms`` or the last of ``records``.
    """
    arguments = {"asOf": as_of_ms}
    return records.sparkSession.sql(_LAGS, arguments, records=records, offsets=offsets)


# --- the command

_WRONG: Final = {
    "beyond_end": "the group continues at {nextOffset}, and the log ends at {end}",
    "below_start": "{messagesLost:,} messages left the log before the group consumed them",
}


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
        type=Path,
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
    known = known_groups(path.parent)
    offsets = [one for one in table.offsets if options.system or not is_brokers_own(one.group)]
    with running(options, "lag") as job:
        records = job.cached(prepared(job.log(*COLUMNS), system=options.system))
        as_of = _as_of_ms(options, job.extent)
        compared = job.cached(lags(records, job.spark.createDataFrame(offsets, DDL), as_of))
        found = rows(compared)
        job.write(lag=compared.coalesce(1))
        findings = list(_findings(found, options))
        summary = {
            **job.about_log(),
            "offsets": {"file": str(table.path), "is_backup": table.is_backup},
            "groups": rows(job.spark.sql(_GROUPS, lags=compared)),
            "never_consumed": sorted(known - {row["consumerGroup"] for row in found}),
            "findings": findings,
        }
        job.publish(summary, _table(summary))
    return FINDINGS if findings else CLEAN


def _as_of_ms(options: argparse.Namespace, extent: LogExtent) -> int | None:
    if options.as_of == "now":
        return time.time_ns() // 1_000_000
    times = log_times(extent)
    return None if times is None else times.last


def _findings(lags: Rows, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for row in lags:
        place = {name: row[name] for name in ("consumerGroup", "topic", "partition")}
        count, seconds = row["messagesBehind"] or 0, row["secondsBehind"] or 0
        if row["state"] in _WRONG:
            yield {"kind": row["state"], **place, "detail": _WRONG[row["state"]].format(**row)}
        if options.max_messages is not None and count > options.max_messages:
            yield {"kind": "too_many", **place, "detail": f"{count:,} messages behind"}
        if options.max_age is not None and seconds > options.max_age.total_seconds():
            yield {"kind": "too_old", **place, "detail": f"{seconds:,.0f} seconds behind"}


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
