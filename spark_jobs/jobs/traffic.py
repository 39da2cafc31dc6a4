"""The job ``traffic``: messages, bytes, sizes, producers, tags, keys and failures in a log.

The queries are in ``sql/traffic.sql``. Only what consumers of an application see counts as a
message: copies, halves and the broker's own records have other roles (``message_roles.py``).
"""

import argparse
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import DataFrame

from halfmq.store.format.properties import PROPERTY_RETRY_TOPIC

from ..report.tables import Rows, fact, listing
from ..source.columns import CORRUPT, MESSAGE
from ..source.message_roles import with_roles
from .command import CLEAN, FINDINGS, add_job, age, number, rows, running
from .queries import queries

if TYPE_CHECKING:
    from .command import Jobs

COLUMNS: Final = (
    "topic",
    "partition",
    "timestamp",
    "size",
    "bodySize",
    "sysFlag",
    "bornHost",
    "producerGroup",
    "tags",
    "key",
    "properties",
    "recordType",
)
PERCENTILES: Final = ("p50", "p90", "p99", "max")  # of body sizes, in the order of the column
RESULTS: Final = ("topics", "queues", "rates", "producers", "tags", "keys", "failures")
LISTED_MAX: Final = 1_000  # rows per list in the JSON; the Parquet files have all
INTERVALS_MAX: Final = 120  # unless --every gives their length
_LENGTHS: Final = (1, 10, 60, 600, 3_600, 21_600, 86_400)  # seconds


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = add_job(
        jobs,
        "traffic",
        "count messages, bytes, sizes, producers, tags, keys, retries and dead letters",
        run,
        ends="0 done, 1 done, but parts of the log are damaged and not counted, 2 not done",
        example="~/.halfmq/store --every 1h --output traffic",
        writes=f"write {', '.join(RESULTS)} as Parquet and summary.json to DIR, replacing those"
        " of an earlier run",
    )
    parser.add_argument(
        "--every",
        metavar="AGE",
        type=age,
        help="the interval of rates, as in 10s, 15m, 1h or 1d (default: the shortest that gives"
        f" at most {INTERVALS_MAX})",
    )
    parser.add_argument(
        "--top-keys", metavar="N", type=number, default=20, help="how many of the hottest keys (20)"
    )


def traffic(log: DataFrame, *, every: int = 60_000, keys: int = 20) -> dict[str, DataFrame]:
    """Count what is in a log with ``COLUMNS``: the queries of ``sql/traffic.sql`` by name.

    ``every`` is the length of an interval in milliseconds, ``keys`` how many keys are listed.
    """
    parameters = {"every": every, "keys": keys}
    return queries("traffic", parameters, log=with_roles(log, originTopic=PROPERTY_RETRY_TOPIC))


def run(options: argparse.Namespace) -> int:
    """Count a log and return the exit code."""
    with running(options, *RESULTS) as job:
        log = job.log(*COLUMNS)
        counted = traffic(log)
        job.cached(counted["records"])  # each list is a query of its own
        topics = _with_sizes(rows(counted["topics"]))
        every = options.every or _interval(topics)
        counted = traffic(log, every=every // timedelta(milliseconds=1), keys=options.top_keys)

        def listed(name: str) -> Rows:
            return rows(counted[name].where("topic is not null").limit(LISTED_MAX))

        job.step("counting by queue, time, producer, tag and key")
        damaged = [topic for topic in topics if topic["role"] == CORRUPT]
        summary = {
            **job.about_log(),
            "totals": {total.pop("role"): total for total in rows(counted["totals"])},
            "damaged": {
                "ranges": sum(topic["records"] for topic in damaged),
                "bytes": sum(topic["bytes"] for topic in damaged),
            },
            "topics": [topic for topic in topics if topic["role"] != CORRUPT],
            "queues": _with_sizes(listed("queues")),
            "rates": {
                "every_seconds": every.total_seconds(),
                "stretches": listed("topic_rates"),
                "highest": rows(counted["highest"]),
            },
            "producers": listed("producers"),
            "tags": listed("tags"),
            "hot_keys": listed("keys"),
            "failures": rows(counted["failures"].limit(LISTED_MAX)),
        }
        job.write(**{name: counted[name].coalesce(1) for name in RESULTS})
        job.publish(summary, _table(summary))
    return FINDINGS if damaged else CLEAN


def _with_sizes(counted: Rows) -> Rows:
    for row in counted:
        row["bodySizes"] = dict(zip(PERCENTILES, row["bodySizes"] or [], strict=False))
    return counted


def _interval(topics: Rows) -> timedelta:
    """Return the shortest interval that gives few enough of them."""
    times = [topic[end] for topic in topics for end in ("first", "last") if topic[end]]
    span = max(times) - min(times) if times else timedelta(0)
    lengths = (timedelta(seconds=seconds) for seconds in _LENGTHS)
    fitting = (every for every in lengths if span / every < INTERVALS_MAX)
    return next(fitting, timedelta(days=1 + span / INTERVALS_MAX // timedelta(days=1)))


def _table(summary: dict[str, Any]) -> Iterator[str]:
    log, damaged = summary["log"], summary["damaged"]
    yield fact("commit log", summary["directory"])
    yield fact("offsets", f"{log['first_offset']} to {log['end_offset']}")
    for name, total in summary["totals"].items():
        yield fact(name, f"{total['messages']:,} in {total['bytes']:,} bytes")
    if damaged["ranges"]:
        yield fact("damaged", f"{damaged['bytes']:,} bytes in {damaged['ranges']:,} places")
    highest = {row["topic"]: row["messagesPerSecond"] for row in summary["rates"]["highest"]}
    topics = [
        {**topic, **topic["bodySizes"], "highest per s": highest[topic["topic"]]}
        for topic in sorted(summary["topics"], key=lambda topic: -topic["messages"])
        if topic["role"] == MESSAGE
    ]
    yield from listing(topics, "messages", "bytes", "p50", "p99", "highest per s", "topic")
    yield from listing(summary["hot_keys"], "messages", "key", "topic")
    names = ("retries", "retryRate", "deadLetters", "consumerGroup", "topic")
    yield from listing(summary["failures"], *names)
