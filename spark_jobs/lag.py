"""How far consumers are behind the log, as functions from DataFrame to DataFrame.

Three steps: ``prepared`` keeps of a log what takes a place in a queue, ``queues`` says where each
queue begins and ends in the log, ``lags`` compares that with the offsets of the groups.

In a notebook::

    table = offset_table.read_offsets(offset_table.offset_file(directory))
    offsets = spark.createDataFrame(table.offsets, offset_table.DDL)
    records = lag.prepared(roles.read_log(spark, directory, *lag.COLUMNS)).persist()
    lag.lags(records, offsets).orderBy("secondsBehind", ascending=False).show()

Read the offsets before the log: while a broker runs, those read later can be beyond its end.
"""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from .roles import HALF, OP, SYSTEM, messages, role, takes_slot
from .source.columns import MESSAGE

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
