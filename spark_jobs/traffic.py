"""What went through a broker, as functions from DataFrame to DataFrame.

``prepared`` comes first; all the others take what it gives. Only what an application's consumers
see is a message: copies, halves and the broker's own records have roles of their own (``roles.py``)
and are counted beside, never as further messages.

In a notebook::

    log = roles.read_log(spark, directory, *traffic.COLUMNS)
    records = traffic.prepared(log).persist()
    traffic.by_topic(records).orderBy("bytes").show()
"""

from datetime import timedelta
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from halfmq.store.format.properties import PROPERTY_RETRY_TOPIC
from halfmq.store.format.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX

from .roles import DEAD_LETTER, RETRY, messages, property_value, role
from .source.columns import CORRUPT, MESSAGE

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
