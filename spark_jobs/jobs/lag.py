"""The job ``lag``: how far consumers are behind the log.

Three steps: ``prepared`` keeps of a log what takes a place in a queue, ``queues`` says where each
queue begins and ends in the log, ``lags`` compares that with the offsets of the groups.

In a notebook::

    table = offset_table.read_offsets(offset_table.offset_file(directory))
    offsets = spark.createDataFrame(table.offsets, offset_table.DDL)
    records = lag.prepared(roles.read_log(spark, directory, *lag.COLUMNS)).persist()
    lag.lags(records, offsets).orderBy("secondsBehind", ascending=False).show()

Read the offsets before the log: while a broker runs, those read later can be beyond its end.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from ..log.log_end import survey
from ..log.lookup import log_times
from ..log.segments import LogExtent
from ..source.columns import MESSAGE
from ..source.roles import HALF, OP, SYSTEM, messages, role, takes_slot
from .command import CLEAN, FINDINGS, Rows, add_job, age, number, rows, running
from .offset_table import DDL, is_brokers_own, known_groups, offset_file, read_offsets
from .steps import reading

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

# States of a group in a queue.
CAUGHT_UP: Final = "caught_up"
BEHIND: Final = "behind"
NEVER_CONSUMED: Final = "never_consumed"  # consumes the topic, and has no offset for this queue
BEYOND_END: Final = "beyond_end"  # of the log: it will skip what is stored next
BELOW_START: Final = "below_start"  # what it would consume next is not in the log any more
NOT_IN_LOG: Final = "not_in_log"  # the log has no message of the queue, so nothing can be told


def prepared(records: DataFrame, *, system: bool = False) -> DataFrame:
    """Keep of a log with the columns ``COLUMNS`` what takes a place in a queue.

    ``system`` keeps the broker's own topics too.
    """
    told = records.where(F.col("recordType") == MESSAGE).where(takes_slot())
    if not system:
        told = told.where(~role().isin(HALF, OP, SYSTEM))
    return told.select(
        "topic",
        "partition",
        F.col("offset").alias("first"),
        (F.col("offset") + messages()).alias("next"),
        "timestamp",
        "physicalOffset",
    )


def queues(records: DataFrame) -> DataFrame:
    """Say of each queue where it begins and ends in the log: ``start`` and ``end``.

    Columns: ``topic, partition, start, end, newest``; the end is the offset behind the last
    message in the order of the log, and ``newest`` is when that was stored.
    """
    last = F.max_by(F.struct("next", "timestamp"), "physicalOffset").alias("last")
    return (
        records.groupBy("topic", "partition")
        .agg(F.min("first").alias("start"), last)
        .select(
            "topic",
            "partition",
            "start",
            F.col("last.next").alias("end"),
            F.col("last.timestamp").alias("newest"),
        )
    )


def lags(records: DataFrame, offsets: DataFrame, as_of_ms: int | None = None) -> DataFrame:
    """Compare the offsets of groups with the log: one row per group and queue.

    ``records`` is what ``prepared`` gives, ``offsets`` has the columns ``offset_table.DDL``.
    Columns: ``consumerGroup, topic, partition, state, nextOffset, start, end, messagesBehind,
    messagesLost, oldestWaiting, secondsBehind``. ``messagesBehind`` counts what is in the log and
    not consumed, ``messagesLost`` what left it before. Seconds count from the storing of the
    first message that waits up to ``as_of_ms``, or up to the last of ``records``.
    """
    positions = _positions(queues(records), offsets)
    waiting = _waiting(records, positions)
    newest = F.unix_millis(F.max("timestamp")) if as_of_ms is None else F.max(F.lit(as_of_ms))
    until = records.agg(newest.alias("asOf"))
    # greatest() passes over nulls: without an offset everything waits.
    behind = F.greatest(F.col("end") - F.greatest("nextOffset", "start"), F.lit(0))
    lost = F.greatest(F.col("start") - F.col("nextOffset"), F.lit(0))
    seconds = (F.col("asOf") - F.unix_millis("oldestWaiting")) / 1000
    return (
        positions.join(waiting, ["consumerGroup", "topic", "partition"], "left")
        .crossJoin(F.broadcast(until))
        .select(
            "consumerGroup",
            "topic",
            "partition",
            _state().alias("state"),
            "nextOffset",
            "start",
            "end",
            _if_known(behind).alias("messagesBehind"),
            _if_known(lost).alias("messagesLost"),
            "oldestWaiting",
            _if_known(F.greatest(seconds, F.lit(0.0))).alias("secondsBehind"),
        )
    )


def _positions(queues: DataFrame, offsets: DataFrame) -> DataFrame:
    """Bring together each group's offsets and all queues of the topics that it consumes."""
    subscribed = offsets.select("consumerGroup", "topic").distinct()
    theirs = queues.join(F.broadcast(subscribed), "topic")
    return theirs.join(offsets, ["consumerGroup", "topic", "partition"], "full")


def _waiting(records: DataFrame, positions: DataFrame) -> DataFrame:
    """Find for each group and queue when the first message was stored that waits."""
    behind = positions.where("end > coalesce(nextOffset, start)").select(
        "consumerGroup", "topic", "partition", "end", F.col("nextOffset").alias("from")
    )
    is_waiting = (F.col("next") > F.coalesce("from", F.lit(0))) & (F.col("first") < F.col("end"))
    # A topic that was created anew can have an offset twice; the later record is the one.
    place = F.struct("first", F.negate(F.col("physicalOffset")))
    return (
        records.join(F.broadcast(behind), ["topic", "partition"])
        .where(is_waiting)
        .groupBy("consumerGroup", "topic", "partition")
        .agg(F.min_by("timestamp", place).alias("oldestWaiting"))
    )


def _if_known(told: Column) -> Column:
    """Tell nothing of a queue that the log has no message of."""
    return F.when(F.col("end").isNotNull(), told)


def _state() -> Column:
    following, start, end = F.col("nextOffset"), F.col("start"), F.col("end")
    return (
        F.when(end.isNull(), NOT_IN_LOG)
        .when(following.isNull(), NEVER_CONSUMED)
        .when(following > end, BEYOND_END)
        .when(following < start, BELOW_START)
        .when(following < end, BEHIND)
        .otherwise(CAUGHT_UP)
    )


# --- the command

SHOWN_MAX: Final = 50  # groups and topics in the table, and findings
_WRONG: Final = {
    BEYOND_END: "the group goes on at {nextOffset}, and the log ends at {end}",
    BELOW_START: "{messagesLost:,} messages left the log before the group consumed them",
}


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = add_job(
        jobs,
        "lag",
        "say how many messages and seconds each consumer group is behind the log",
        run,
        ends="0 clean, 1 offsets outside the log or groups too far behind, 2 it cannot be told",
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


def run(options: argparse.Namespace) -> int:
    """Compare the offsets with a log and return the exit code."""
    survey(options.directory)  # says it first if there is none
    # Read before the log is measured: offsets read later can be beyond its end.
    path = options.offsets or offset_file(options.directory)
    table = read_offsets(path, may_be_missing=options.offsets is None)
    known = known_groups(path.parent)
    offsets = [one for one in table.offsets if options.system or not is_brokers_own(one.group)]
    with running(options, "lag") as job:
        records = job.cached(prepared(job.log(*COLUMNS), system=options.system))
        as_of = _as_of_ms(options, job.extent)
        told = job.cached(lags(records, job.spark.createDataFrame(offsets, DDL), as_of))
        job.step(reading(job.extent))
        found = rows(told.orderBy("consumerGroup", "topic", "partition"))
        job.write(lag=told.coalesce(1))
        findings = list(_findings(found, options))
        summary = {
            **job.about_log(),
            "offsets": {"file": str(table.path), "is_backup": table.is_backup},
            "groups": _by_group(found),
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
    groups = []
    for (group, topic), found in groupby(lags, lambda row: (row["consumerGroup"], row["topic"])):
        queues = [{name: row[name] for name in row if name not in _OF_GROUP} for row in found]
        groups.append(
            {
                "consumerGroup": group,
                "topic": topic,
                "messagesBehind": sum(queue["messagesBehind"] or 0 for queue in queues),
                "messagesLost": sum(queue["messagesLost"] or 0 for queue in queues),
                "secondsBehind": max(queue["secondsBehind"] or 0 for queue in queues),
                "queues": queues,
            }
        )
    return groups


_OF_GROUP: Final = {"consumerGroup", "topic"}


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
