"""The job ``traffic``: messages, bytes, sizes, producers, tags, keys and failures in a log.

``prepared`` turns a log into the rows that the queries in ``QUERIES`` read. Only what consumers of
an application see counts as a message: copies, halves and the broker's own records have other
roles (``message_roles.py``).
"""

import argparse
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from halfmq.store.format.properties import PROPERTY_RETRY_TOPIC

from ..report.tables import Rows, fact, listing
from ..source.columns import CORRUPT, MESSAGE
from ..source.message_roles import DEAD_LETTER, RETRY, messages, property_value, role
from .command import CLEAN, FINDINGS, add_job, age, number, rows, running

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

_VOLUME: Final = """
    sum(messages) as messages, count(*) as records, sum(bytes) as bytes, sum(bodySize) as bodyBytes
"""
_SPAN: Final = "min(timestamp) as first, max(timestamp) as last"
# Ranks are off by a ten-thousandth of the count at most.
_SIZES: Final = "percentile_approx(bodySize, array(0.5, 0.9, 0.99, 1.0), 10000) as bodySizes"
_RATES: Final = f"""
    select *, messages / (:every / 1000) as messagesPerSecond,
        bytes / (:every / 1000) as bytesPerSecond
    from (
        select role, topic, %s
            timestamp_millis(floor(unix_millis(timestamp) / :every) * :every) as start, {_VOLUME}
        from {{records}} where role <> 'corrupt' group by all
    ) order by start, topic
"""

# Queries over ``prepared``. ``every`` is the length of an interval in milliseconds; one in which
# nothing was stored has no row. Bytes are those of whole records.
QUERIES: Final = {
    "topics": f"""
        select role, topic, {_VOLUME}, {_SPAN}, {_SIZES}
        from {{records}} group by role, topic order by role, topic
    """,
    "queues": f"""
        select role, topic, partition, {_VOLUME}, {_SPAN}, {_SIZES}
        from {{records}} group by role, topic, partition order by topic, partition
    """,
    "rates": _RATES % "partition,",
    "topic_rates": _RATES % "",
    "highest": f"""
        select topic, best.* from (
            select topic, max_by(
                struct(start, messages, messagesPerSecond), struct(messages, -unix_millis(start))
            ) as best
            from ({_RATES % ""}) where role = 'message' group by topic
        ) order by topic
    """,  # the interval in which a topic got most messages, the first of several
    "totals": """
        select role, sum(messages) as messages, count(*) as records, sum(bytes) as bytes
        from {records} where role <> 'corrupt' group by role order by role
    """,
    # Only transactional messages name their group. Each port of a host is a connection.
    "producers": f"""
        select topic, producerHost, producerGroup, {_VOLUME},
            approx_count_distinct(bornHost) as connections, {_SPAN}
        from {{records}} where role = 'message'
        group by topic, producerHost, producerGroup order by messages desc, topic, producerHost
    """,
    "tags": f"""
        select topic, tags, {_VOLUME}
        from {{records}} where role = 'message'
        group by topic, tags order by messages desc, topic, tags
    """,
    # Exact counts: Spark spills to disk what does not fit in memory.
    "keys": """
        select topic, key, sum(messages) as messages
        from (
            select topic, explode(array_distinct(split(keys, ' '))) as key, messages
            from {records} where role = 'message'
        ) where key <> ''
        group by topic, key order by messages desc, topic, key limit :keys
    """,
    # The group follows the prefix; for pop consumers RocketMQ appends the topic to it. A retry that
    # waits for its time is not counted yet. topic is null if the copies do not say their origin.
    "failures": """
        with failed as (
            select regexp_replace(topic, '^(%RETRY%|%DLQ%)', '') as consumerGroup, originTopic,
                sum(if(role = 'retry', messages, 0)) as retries,
                sum(if(role = 'dead_letter', messages, 0)) as deadLetters
            from {records} where role in ('retry', 'dead_letter') group by all
        ), sent as (
            select topic, sum(messages) as messages
            from {records} where role = 'message' group by topic
        )
        select consumerGroup, originTopic as topic, retries, deadLetters, messages,
            retries / messages as retryRate, deadLetters / messages as deadLetterRate
        from failed left join sent on originTopic = sent.topic order by consumerGroup, originTopic
    """,
}


def prepared(records: DataFrame) -> DataFrame:
    """Turn a log with the columns ``COLUMNS`` into what ``QUERIES`` read.

    Blanks are left out; a damaged range is a row with the role ``corrupt``.
    """
    is_copy = F.col("role").isin(RETRY, DEAD_LETTER)
    return (
        records.withColumn("role", role())
        .where("role is not null")
        .select(
            "role",
            "topic",
            "partition",
            "timestamp",
            F.col("size").cast("bigint").alias("bytes"),
            "bodySize",
            messages().alias("messages"),
            "bornHost",
            F.regexp_replace("bornHost", ":[0-9]+$", "").alias("producerHost"),
            "producerGroup",
            "tags",
            F.col("key").cast("string").alias("keys"),
            F.when(is_copy, property_value(PROPERTY_RETRY_TOPIC)).alias("originTopic"),
        )
    )


def query(name: str, records: DataFrame, *, every: int = 60_000, keys: int = 20) -> DataFrame:
    """Run one of ``QUERIES`` over what ``prepared`` returns.

    ``every`` is the length of an interval in milliseconds, ``keys`` how many keys are listed.
    """
    arguments = {"every": every, "keys": keys}
    return records.sparkSession.sql(QUERIES[name], arguments, records=records)


# --- the command

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


def run(options: argparse.Namespace) -> int:
    """Count a log and return the exit code."""
    with running(options, *RESULTS) as job:
        records = job.cached(prepared(job.log(*COLUMNS)))  # each list is a query of its own
        topics = _with_sizes(rows(query("topics", records)))
        every = options.every or _interval(topics)

        def result(name: str) -> DataFrame:
            milliseconds = every // timedelta(milliseconds=1)
            return query(name, records, every=milliseconds, keys=options.top_keys)

        def listed(name: str) -> Rows:
            return rows(result(name).where("topic is not null").limit(LISTED_MAX))

        job.step("counting by queue, time, producer, tag and key")
        damaged = [topic for topic in topics if topic["role"] == CORRUPT]
        summary = {
            **job.about_log(),
            "totals": {total.pop("role"): total for total in rows(result("totals"))},
            "damaged": {
                "ranges": sum(topic["records"] for topic in damaged),
                "bytes": sum(topic["bytes"] for topic in damaged),
            },
            "topics": [topic for topic in topics if topic["role"] != CORRUPT],
            "queues": _with_sizes(listed("queues")),
            "rates": {
                "every_seconds": every.total_seconds(),
                "stretches": listed("topic_rates"),
                "highest": rows(result("highest")),
            },
            "producers": listed("producers"),
            "tags": listed("tags"),
            "hot_keys": listed("keys"),
            "failures": rows(result("failures").limit(LISTED_MAX)),
        }
        job.write(**{name: result(name).coalesce(1) for name in RESULTS})
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
