"""The command ``traffic``."""

import argparse
from collections.abc import Iterator
from datetime import datetime, timedelta
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
    from pyspark.sql import DataFrame

    from .command import Jobs

LISTED_MAX: Final = 1_000  # rows per list in the JSON; the Parquet files have all
SHOWN_MAX: Final = 20  # topics, and rows of other lists, in the table
STRETCHES_MAX: Final = 120  # of time, unless --every says how long they are
_STRETCHES: Final = tuple(
    timedelta(seconds=seconds) for seconds in (1, 10, 60, 600, 3_600, 21_600, 86_400)
)
_MESSAGE: Final = "message"  # columns.MESSAGE, which needs packages that may be missing here
_CORRUPT: Final = "corrupt"
_RESULTS: Final = ("topics", "queues", "rates", "producers", "tags", "keys", "failures")
Rows = list[dict[str, Any]]


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = new_parser(
        jobs,
        "traffic",
        "count messages, bytes, sizes, producers, tags, keys, retries and dead letters",
        ends="0 done, 1 done, but parts of the log are damaged and not counted, 2 not done",
        example="~/.halfmq/store --every 1h --output traffic",
    )
    add_output(
        parser,
        writes="write queues/, topics/, rates/, producers/, tags/, keys/ and failures/ as Parquet"
        " and summary.json to DIR, replacing those of an earlier run",
    )
    parser.add_argument(
        "--every",
        metavar="AGE",
        type=age,
        help="the stretch of time over which rates are told, as in 10s, 15m, 1h or 1d (default: so"
        f" that there are at most {STRETCHES_MAX})",
    )
    parser.add_argument(
        "--top-keys", metavar="N", type=number, default=20, help="how many of the hottest keys (20)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Count a log and return the exit code."""
    extent = find_log(options.directory)
    output = Output(options, *_RESULTS)
    stage = Stages("traffic")
    with spark_for(extent, stage) as spark:
        from .. import roles, traffic  # noqa: PLC0415

        log = roles.read_log(
            spark,
            options.directory,
            *traffic.COLUMNS,
            extent=extent,
            partitions=spark.sparkContext.defaultParallelism,
        )
        records = traffic.prepared(log).persist()  # each list below is a query of its own
        try:
            stage(reading(extent))
            told = _Counted(records, options)
            stage("counting by queue, time, producer, tag and key")
            summary = {
                "directory": options.directory,
                "log": log_summary(extent),
                **told.summary(),
            }
            if options.output:
                stage(f"writing {options.output}")
                told.write(output)
            output.publish(summary, "\n".join(_table(summary)))
        finally:
            records.unpersist()
    return FINDINGS if told.damaged else CLEAN


class _Counted:
    """The lists of one run."""

    def __init__(self, records: "DataFrame", options: argparse.Namespace) -> None:
        from .. import traffic  # noqa: PLC0415  see command.py

        self._percentiles = list(traffic.PERCENTILES)
        self._topics = traffic.by_topic(records)
        self.topics = self._with_sizes(rows(self._topics.orderBy("role", "topic")))
        self.every = options.every or _stretch(self.topics)
        self._rates = traffic.rates(records, self.every)
        self._frames = {
            "topics": self._topics,
            "queues": traffic.by_queue(records),
            "rates": self._rates,
            "producers": traffic.producers(records),
            "tags": traffic.tags(records),
            "keys": traffic.hot_keys(records, options.top_keys),
            "failures": traffic.failures(records),
        }
        self._by_topic = traffic.rates(records, self.every, by_queue=False)

    @property
    def damaged(self) -> Rows:
        """What is no record, and is in no other figure."""
        return [topic for topic in self.topics if topic["role"] == _CORRUPT]

    def write(self, output: Output) -> None:
        for name in _RESULTS:
            output.parquet(name, self._frames[name].coalesce(1))

    def summary(self) -> dict[str, object]:
        """Return the promised JSON; keys are only ever added to it."""
        sound = [topic for topic in self.topics if topic["role"] != _CORRUPT]
        return {
            "totals": _totals(sound),
            "damaged": {
                "ranges": sum(topic["records"] for topic in self.damaged),
                "bytes": sum(topic["bytes"] for topic in self.damaged),
            },
            "topics": sound,
            "queues": self._with_sizes(
                self._listed("queues", "topic", "partition", where=f"role <> '{_CORRUPT}'")
            ),
            "rates": {
                "every_seconds": self.every.total_seconds(),
                "stretches": rows(self._by_topic.orderBy("start", "topic").limit(LISTED_MAX)),
                "highest": self._highest(),
            },
            "producers": self._listed("producers", "messages desc", "topic", "producerHost"),
            "tags": self._listed("tags", "messages desc", "topic", "tags"),
            "hot_keys": self._listed("keys", "messages desc", "topic", "key"),
            "failures": self._listed("failures", "consumerGroup", "topic"),
        }

    def _highest(self) -> Rows:
        """Return the stretch in which each topic got most messages."""
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        most = F.struct("messages", F.negate(F.unix_millis("start")), "start", "messagesPerSecond")
        highest = (
            self._by_topic.where(f"role = '{_MESSAGE}'")
            .groupBy("topic")
            .agg(F.max(most).alias("most"))
            .select("topic", "most.start", "most.messages", "most.messagesPerSecond")
        )
        return rows(highest.orderBy("topic"))

    def _listed(self, name: str, *order: str, where: str = "true") -> Rows:
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        by = [F.desc(o.removesuffix(" desc")) if o.endswith(" desc") else F.col(o) for o in order]
        return rows(self._frames[name].where(where).orderBy(*by).limit(LISTED_MAX))

    def _with_sizes(self, told: Rows) -> Rows:
        for row in told:
            sizes = row.pop("bodySizes") or []
            row["bodySizes"] = dict(zip(self._percentiles, sizes, strict=False))
        return told


def _stretch(topics: Rows) -> timedelta:
    """Choose how long a stretch of time is: the shortest that gives few enough."""
    ends = [topic[end] for topic in topics for end in ("first", "last") if topic[end]]
    times = [datetime.fromisoformat(end) for end in ends]
    span = max(times) - min(times) if times else timedelta(0)
    fitting = (every for every in _STRETCHES if span / every < STRETCHES_MAX)
    return next(fitting, timedelta(days=1 + span / STRETCHES_MAX // timedelta(days=1)))


def _totals(topics: Rows) -> dict[str, dict[str, int]]:
    """Sum up by role; only those of the role ``message`` are messages."""
    totals: dict[str, dict[str, int]] = {}
    for topic in topics:
        total = totals.setdefault(topic["role"], {"messages": 0, "records": 0, "bytes": 0})
        for name in total:
            total[name] += topic[name]
    return totals


def _table(summary: dict[str, Any]) -> Iterator[str]:
    log, totals = summary["log"], summary["totals"]
    yield f"commit log    {summary['directory']}"
    yield f"offsets       {log['first_offset']} to {log['end_offset']}"
    for role, total in totals.items():
        yield f"{role:14}{total['messages']:,} in {total['bytes']:,} bytes"
    if summary["damaged"]["ranges"]:
        damaged = summary["damaged"]
        yield f"damaged       {damaged['bytes']:,} bytes in {damaged['ranges']:,} places"
    yield from _topic_lines(summary)
    yield from _lines(
        "hottest keys",
        [f"{key['messages']:>12,}  {key['topic']} / {key['key']}" for key in summary["hot_keys"]],
    )
    yield from _lines("failures by consumer group", list(map(_failure, summary["failures"])))


def _topic_lines(summary: dict[str, Any]) -> Iterator[str]:
    highest = {row["topic"]: row for row in summary["rates"]["highest"]}
    seen = [topic for topic in summary["topics"] if topic["role"] == _MESSAGE]
    seen.sort(key=lambda topic: -topic["messages"])
    lines = []
    for topic in seen:
        most, sizes = highest[topic["topic"]], topic["bodySizes"]
        lines.append(
            f"{topic['messages']:>12,}{topic['bytes']:>16,}{sizes['p50']:>10,}{sizes['p99']:>10,}"
            f"{most['messagesPerSecond']:>12,.1f}  {topic['topic']}"
        )
    head = f"{'messages':>12}{'bytes':>16}{'body p50':>10}{'p99':>10}{'per s, most':>12}  topic"
    yield from _lines(head, lines)


def _failure(row: dict[str, Any]) -> str:
    share = "" if row["retryRate"] is None else f", {row['retryRate']:.2%} of the messages"
    counts = f"{row['retries']:,} retries{share}, {row['deadLetters']:,} dead letters"
    return f"  {row['consumerGroup']} / {row['topic'] or 'unknown topic'}: {counts}"


def _lines(head: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield head
        yield from lines[:SHOWN_MAX]
    if len(lines) > SHOWN_MAX:
        yield f"  and {len(lines) - SHOWN_MAX:,} more: see --json or --output"
