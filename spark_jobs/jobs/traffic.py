"""The job ``traffic``: what went through a broker.

``prepared`` comes first; all the other functions from DataFrame to DataFrame take what it gives.
Only what an application's consumers see is a message: copies, halves and the broker's own records
have roles of their own (``roles.py``) and are counted beside, never as further messages.

In a notebook::

    log = roles.read_log(spark, directory, *traffic.COLUMNS)
    records = traffic.prepared(log).persist()
    traffic.by_topic(records).orderBy("bytes").show()
"""

import argparse
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from halfmq.store.format.properties import PROPERTY_RETRY_TOPIC
from halfmq.store.format.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX

from ..source.columns import CORRUPT, MESSAGE
from ..source.roles import DEAD_LETTER, RETRY, messages, property_value, role
from .command import CLEAN, FINDINGS, Rows, add_job, age, number, rows, running
from .steps import reading

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
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_ACCURACY: Final = 10_000  # ranks of percentiles are off by a ten-thousandth of the count at most


def prepared(records: DataFrame) -> DataFrame:
    """Turn a log with the columns ``COLUMNS`` into what the functions here count.

    Blanks are left out; a damaged range is a row with the role ``corrupt``.
    """
    address = F.regexp_replace("bornHost", ":[0-9]+$", "")
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
            address.alias("producerHost"),
            "producerGroup",
            "tags",
            F.col("key").cast("string").alias("keys"),
            F.when(is_copy, property_value(PROPERTY_RETRY_TOPIC)).alias("originTopic"),
        )
    )


def by_topic(records: DataFrame) -> DataFrame:
    """Sum up per role and topic: messages, records, bytes, times, percentiles of body sizes.

    Columns: ``role, topic, messages, records, bytes, bodyBytes, first, last, bodySizes``, the last
    in the order of ``PERCENTILES``. Bytes are those of whole records.
    """
    return records.groupBy("role", "topic").agg(*_volume(), *_span(), _body_sizes())


def by_queue(records: DataFrame) -> DataFrame:
    """Sum up per role, topic and queue: the columns of ``by_topic``, and ``partition``."""
    groups = ("role", "topic", "partition")
    return records.groupBy(*groups).agg(*_volume(), *_span(), _body_sizes())


def rates(records: DataFrame, every: timedelta, *, by_queue: bool = True) -> DataFrame:
    """Sum up over time: what was stored in each stretch of time, by topic and perhaps queue.

    Columns: ``role, topic, [partition,] start, messages, records, bytes, bodyBytes,
    messagesPerSecond, bytesPerSecond``. A stretch in which nothing was stored has no row.
    """
    step = every // timedelta(milliseconds=1)
    if step < 1:
        raise ValueError(f"every={every}: expected at least a millisecond")
    number = F.floor(F.unix_millis("timestamp") / F.lit(step))
    seconds = F.lit(step / 1000)
    queue = ("partition",) if by_queue else ()
    return (
        records.where(F.col("role") != CORRUPT)
        .groupBy("role", "topic", *queue, F.timestamp_millis(number * step).alias("start"))
        .agg(*_volume())
        .withColumn("messagesPerSecond", F.col("messages") / seconds)
        .withColumn("bytesPerSecond", F.col("bytes") / seconds)
    )


def tags(records: DataFrame) -> DataFrame:
    """Count messages per topic and tag; ``tags`` is null for messages without one."""
    return _messages(records).groupBy("topic", "tags").agg(*_volume())


def producers(records: DataFrame) -> DataFrame:
    """Count messages per topic, producing host and producer group.

    Only transactional messages name their group. ``connections`` is about how many connections they
    came through: how many ports of the host.
    """
    connections = F.approx_count_distinct("bornHost").alias("connections")
    return (
        _messages(records)
        .groupBy("topic", "producerHost", "producerGroup")
        .agg(*_volume(), connections, *_span())
    )


def hot_keys(records: DataFrame, count: int = 20) -> DataFrame:
    """Find the keys that most messages have: ``topic, key, messages``, the most frequent first.

    A message has a key per word of its ``KEYS``. Counts are exact; Spark spills to disk what does
    not fit in memory, so that the number of distinct keys is not limited by it.
    """
    words = F.array_distinct(F.split("keys", " "))
    return (
        _messages(records)
        .where("keys is not null")
        .select("topic", F.explode(words).alias("key"), "messages")
        .where("key <> ''")
        .groupBy("topic", "key")
        .agg(F.sum("messages").alias("messages"))
        .orderBy(F.desc("messages"), "topic", "key")
        .limit(count)
    )


def failures(records: DataFrame) -> DataFrame:
    """Count per consumer group and topic what was retried and what was given up.

    Columns: ``consumerGroup, topic, retries, deadLetters, messages, retryRate, deadLetterRate``;
    ``messages`` is how many the topic has in the log, and the rates are per such message, null
    when there is none. A retry that waits for its time is not counted yet. ``topic`` is null when
    the copies do not tell where they come from. The group is what follows ``%RETRY%`` or ``%DLQ%``
    in the name of the topic: for pop consumers RocketMQ appends the topic to it.
    """
    group = F.regexp_replace("topic", f"^(?:{RETRY_PREFIX}|{DEAD_LETTER_PREFIX})", "")
    copies = records.where(F.col("role").isin(RETRY, DEAD_LETTER))
    failed = copies.groupBy(group.alias("consumerGroup"), F.col("originTopic").alias("origin")).agg(
        _of_role(RETRY).alias("retries"), _of_role(DEAD_LETTER).alias("deadLetters")
    )
    sent = _messages(records).groupBy("topic").agg(F.sum("messages").alias("messages"))
    joined = failed.join(sent, F.col("origin") == F.col("topic"), "left")
    return joined.select(
        "consumerGroup",
        F.col("origin").alias("topic"),
        "retries",
        "deadLetters",
        "messages",
        (F.col("retries") / F.col("messages")).alias("retryRate"),
        (F.col("deadLetters") / F.col("messages")).alias("deadLetterRate"),
    )


def _messages(records: DataFrame) -> DataFrame:
    return records.where(F.col("role") == MESSAGE)


def _of_role(wanted: str) -> Column:
    return F.sum(F.when(F.col("role") == wanted, F.col("messages")).otherwise(0))


def _volume() -> list[Column]:
    return [
        F.sum("messages").alias("messages"),
        F.count("*").alias("records"),
        F.sum("bytes").alias("bytes"),
        F.sum("bodySize").alias("bodyBytes"),
    ]


def _span() -> list[Column]:
    return [F.min("timestamp").alias("first"), F.max("timestamp").alias("last")]


def _body_sizes() -> Column:
    wanted = list(PERCENTILES.values())
    return F.percentile_approx("bodySize", wanted, _ACCURACY).alias("bodySizes")


# --- the command

LISTED_MAX: Final = 1_000  # rows per list in the JSON; the Parquet files have all
SHOWN_MAX: Final = 20  # topics, and rows of other lists, in the table
STRETCHES_MAX: Final = 120  # of time, unless --every says how long they are
_STRETCHES: Final = tuple(
    timedelta(seconds=seconds) for seconds in (1, 10, 60, 600, 3_600, 21_600, 86_400)
)


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = add_job(
        jobs,
        "traffic",
        "count messages, bytes, sizes, producers, tags, keys, retries and dead letters",
        run,
        ends="0 done, 1 done, but parts of the log are damaged and not counted, 2 not done",
        example="~/.halfmq/store --every 1h --output traffic",
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


def run(options: argparse.Namespace) -> int:
    """Count a log and return the exit code."""
    results = ("topics", "queues", "rates", "producers", "tags", "keys", "failures")
    with running(options, *results) as job:
        records = job.cached(prepared(job.log(*COLUMNS)))  # each list is a query of its own
        job.step(reading(job.extent))
        topics = by_topic(records)
        told = _with_sizes(rows(topics.orderBy("role", "topic")))
        every = options.every or _stretch(told)
        frames = {
            "topics": topics,
            "queues": by_queue(records),
            "rates": rates(records, every),
            "producers": producers(records),
            "tags": tags(records),
            "keys": hot_keys(records, options.top_keys),
            "failures": failures(records),
        }
        job.step("counting by queue, time, producer, tag and key")
        damaged = [topic for topic in told if topic["role"] == CORRUPT]
        sound = [topic for topic in told if topic["role"] != CORRUPT]
        queues = frames["queues"].where(F.col("role") != CORRUPT)
        over_time = rates(records, every, by_queue=False)
        most_first = F.desc("messages")
        summary = {
            **job.about_log(),
            "totals": _totals(sound),
            "damaged": {
                "ranges": sum(topic["records"] for topic in damaged),
                "bytes": sum(topic["bytes"] for topic in damaged),
            },
            "topics": sound,
            "queues": _with_sizes(_listed(queues, "topic", "partition")),
            "rates": {
                "every_seconds": every.total_seconds(),
                "stretches": _listed(over_time, "start", "topic"),
                "highest": rows(_highest(over_time).orderBy("topic")),
            },
            "producers": _listed(frames["producers"], most_first, "topic", "producerHost"),
            "tags": _listed(frames["tags"], most_first, "topic", "tags"),
            "hot_keys": _listed(frames["keys"], most_first, "topic", "key"),
            "failures": _listed(frames["failures"], "consumerGroup", "topic"),
        }
        job.write(**{name: frame.coalesce(1) for name, frame in frames.items()})
        job.publish(summary, _table(summary))
    return FINDINGS if damaged else CLEAN


def _listed(frame: DataFrame, *order: str | Column) -> Rows:
    return rows(frame.orderBy(*order).limit(LISTED_MAX))


def _highest(over_time: DataFrame) -> DataFrame:
    """Find the stretch in which each topic got most messages, the first of several."""
    most = F.struct("messages", F.negate(F.unix_millis("start")), "start", "messagesPerSecond")
    return (
        _messages(over_time)
        .groupBy("topic")
        .agg(F.max(most).alias("most"))
        .select("topic", "most.start", "most.messages", "most.messagesPerSecond")
    )


def _with_sizes(told: Rows) -> Rows:
    for row in told:
        row["bodySizes"] = dict(zip(PERCENTILES, row["bodySizes"] or [], strict=False))
    return told


def _stretch(topics: Rows) -> timedelta:
    """Choose how long a stretch of time is: the shortest that gives few enough."""
    times = [topic[end] for topic in topics for end in ("first", "last") if topic[end]]
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
    log, damaged = summary["log"], summary["damaged"]
    yield f"commit log    {summary['directory']}"
    yield f"offsets       {log['first_offset']} to {log['end_offset']}"
    for name, total in summary["totals"].items():
        yield f"{name:14}{total['messages']:,} in {total['bytes']:,} bytes"
    if damaged["ranges"]:
        yield f"damaged       {damaged['bytes']:,} bytes in {damaged['ranges']:,} places"
    head = f"{'messages':>12}{'bytes':>16}{'body p50':>10}{'p99':>10}{'per s, most':>12}  topic"
    yield from _lines(head, _topic_lines(summary))
    yield from _lines(
        "hottest keys",
        (f"{key['messages']:>12,}  {key['topic']} / {key['key']}" for key in summary["hot_keys"]),
    )
    yield from _lines("failures by consumer group", map(_failure, summary["failures"]))


def _topic_lines(summary: dict[str, Any]) -> Iterator[str]:
    highest = {row["topic"]: row["messagesPerSecond"] for row in summary["rates"]["highest"]}
    seen = [topic for topic in summary["topics"] if topic["role"] == MESSAGE]
    for topic in sorted(seen, key=lambda topic: -topic["messages"]):
        sizes, name = topic["bodySizes"], topic["topic"]
        yield (
            f"{topic['messages']:>12,}{topic['bytes']:>16,}{sizes['p50']:>10,}{sizes['p99']:>10,}"
            f"{highest[name]:>12,.1f}  {name}"
        )


def _failure(row: dict[str, Any]) -> str:
    share = "" if row["retryRate"] is None else f", {row['retryRate']:.2%} of the messages"
    counts = f"{row['retries']:,} retries{share}, {row['deadLetters']:,} dead letters"
    return f"  {row['consumerGroup']} / {row['topic'] or 'unknown topic'}: {counts}"


def _lines(head: str, found: Iterable[str]) -> Iterator[str]:
    lines = list(found)
    if lines:
        yield ""
        yield head
        yield from lines[:SHOWN_MAX]
    if len(lines) > SHOWN_MAX:
        yield f"  and {len(lines) - SHOWN_MAX:,} more: see --json or --output"
