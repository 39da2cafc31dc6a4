"""What is wrong with queues, as functions from DataFrame to DataFrame.

Within a queue of a topic the offsets of records rise by one in log order, and the consume queue has
an entry at each of these places. A log is read as ranges (``source/scan.py``), of which a sound one
has a few hundred; every fault of order shows between two of them. The consume queues are read by
the source ``rocketmq-consumequeue`` and compared block by block: by the number of entries and a sum
over them. Only of blocks that differ are entries and records joined one by one.

A queue that begins again at 0 is no fault: its topic was deleted and created anew, and the consume
queue has what came after that. While a broker runs, and after a crash, consume queues may lag
behind the log or be ahead of it; its next start makes that good.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from halfmq.store.format.topics import (
    LIGHT_QUEUE_PREFIX,
    SYSTEM_PREFIX,
    SYSTEM_TOPICS,
    TIMER_TOPIC,
)

from ..datasource import register
from ..log.segments import LogExtent
from ..log.store_files import StoreFiles
from ..source.columns import MESSAGE
from ..source.message_roles import read_log, takes_slot
from ..source.options import DELAY_LEVELS
from ..source.queue_source import QUEUE_COLUMNS, QUEUE_FORMAT
from ..source.scan import BLOCK, MODULUS, PLACE_FACTOR, SIZE_FACTOR, TAGS_FACTOR
from ..source.schema import ddl
from .rules.model import Kind, LogBounds

RECORD_COLUMNS: Final = (
    "topic",
    "partition",
    "offset",
    "physicalOffset",
    "size",
    "tagsCode",
    "sysFlag",
    "recordType",
)
ENTRY_COLUMNS: Final = (*RECORD_COLUMNS[:6], "entryType")
_EXTENDED: Final = -(1 << 31)  # tags codes below are places in a consumequeue_ext
_SAFE_NAME: Final = r"^[%|a-zA-Z0-9_-]+$"
_TOPICS_MAX: Final = 100  # named to the source that reads records again; of more, it reads all
_QUEUE: Final = ("topic", "partition")
_BLOCK: Final = (*_QUEUE, "block")


class Log(NamedTuple):
    """What is known of the log as a whole."""

    directory: str
    extent: LogExtent
    bounds: LogBounds
    store: StoreFiles
    delay_levels: str = DELAY_LEVELS
    deleted: Sequence[str] = ()  # see ``deleted_topics``


def all_of(ranges: DataFrame, log: Log, *, compare: bool = True) -> list[DataFrame]:
    """Find everything that is wrong with queues; ``compare``: also consume queues, if there are."""
    ranges = not_deleted(ranges, log.store.deleted_topics)
    ranges = ranges.where(~F.col("topic").isin(*log.deleted))
    numbered = runs(ranges)
    found = [out_of_order(numbered), gaps(numbered, log.bounds)]
    if log.store.queue_counts is not None:
        found.append(unknown_queues(ranges, log.store.queue_counts))
    if compare and (folder := log.store.consume_queues) is not None:
        found += compared(numbered, folder, log)
    return found


# --- order


def runs(ranges: DataFrame) -> DataFrame:
    """Number the beginnings of each queue, and put beside each range where the one before ends."""
    in_log_order = Window.partitionBy(*_QUEUE).orderBy("physicalOffset")
    before = F.lag(F.struct("endOffset", "lastPhysicalOffset")).over(in_log_order)
    restarts = (F.col("offset") == 0) & F.col("before").isNotNull()
    return (
        ranges.withColumn("before", before)
        .withColumn("restarts", restarts)
        .withColumn("run", F.sum(F.col("restarts").cast("int")).over(in_log_order))
    )


def out_of_order(runs: DataFrame) -> DataFrame:
    """Find records whose queue offset is below that of the record before."""
    detail = F.format_string(
        "in queue %d of %s, the record with offset %d is followed by the one with offset %d",
        *("partition", "topic", F.col("before.endOffset") - 1, "offset"),
    )
    found = runs.where("not restarts and offset < before.endOffset")
    return _finding(
        found, Kind.OUT_OF_ORDER, ["before.lastPhysicalOffset", "physicalOffset"], detail
    )


def gaps(runs: DataFrame, bounds: LogBounds) -> DataFrame:
    """Find queue offsets that no record has, though all of the log can be read there."""
    by_offset = Window.partitionBy(*_QUEUE, "run").orderBy("offset", "physicalOffset")
    so_far = by_offset.rowsBetween(Window.unboundedPreceding, -1)
    highest = F.max(F.struct("endOffset", "lastPhysicalOffset")).over(so_far)
    around = F.array_sort(F.array("highest.lastPhysicalOffset", "physicalOffset"))
    found = (
        runs.withColumn("highest", highest)
        .where("offset > highest.endOffset")
        .withColumn("around", around)
    )
    detail = F.format_string(
        "queue %d of %s has no record with the offsets from %d to %d",
        *("partition", "topic", "highest.endOffset", F.col("offset") - 1),
    )
    found = _readable(found, F.col("around")[0], F.col("around")[1], bounds)
    return _finding(found, Kind.QUEUE_GAP, F.col("around"), detail)


def not_deleted(ranges: DataFrame, deleted: Mapping[str, int]) -> DataFrame:
    """Leave out records of deleted topics, below these physical offsets: no queue has them."""
    if not deleted:
        return ranges
    ends = ranges.sparkSession.createDataFrame(
        list(deleted.items()), "topic string, deletedEnd bigint"
    )
    is_left = "deletedEnd is null or physicalOffset >= deletedEnd"
    return ranges.join(F.broadcast(ends), "topic", "left").where(is_left).drop("deletedEnd")


def deleted_topics(ranges: DataFrame, log: Log) -> list[str]:
    """Return topics of RocketMQ's log that are neither in its table nor have a folder of queues.

    That is what it leaves of a topic when an operator deletes it; halfmq notes the deletion.
    """
    store = log.store
    is_ours = bool(log.bounds.records_rollbacks or store.deleted_topics)
    if is_ours or store.queue_counts is None or store.consume_queues is None:
        return []
    topics = {row["topic"] for row in ranges.select("topic").distinct().collect()}
    left = topics - store.queue_counts.keys() - store.queue_topics - SYSTEM_TOPICS
    return sorted(topic for topic in left if not topic.startswith(SYSTEM_PREFIX))


def unknown_queues(ranges: DataFrame, counts: Mapping[str, int]) -> DataFrame:
    """Find records in topics or queues that the broker does not know: nobody reads them."""
    spark = ranges.sparkSession
    known = spark.createDataFrame(list(counts.items()), "topic string, queues int")
    is_system = F.col("topic").isin(*SYSTEM_TOPICS) | F.col("topic").startswith(SYSTEM_PREFIX)
    found = (
        ranges.groupBy(*_QUEUE)
        .agg(F.sum("records").alias("records"), F.min("physicalOffset").alias("first"),
             F.max("lastPhysicalOffset").alias("last"))
        .where(~is_system)
        .join(F.broadcast(known), "topic", "left")
        .where("queues is null or partition >= queues")
    )  # fmt: skip
    has = F.when(F.col("queues").isNull(), "is not known").otherwise(
        F.format_string("has %d queues", "queues")
    )
    detail = F.format_string(
        "%d records in queue %d of %s, but the topic %s", "records", "partition", "topic", has
    )
    offsets = F.array_distinct(F.array("first", "last"))
    return _finding(found, Kind.UNKNOWN_QUEUE, offsets, detail)


# --- consume queues


def differing_blocks(runs: DataFrame, entries: DataFrame, log: Log) -> DataFrame:
    """Compare the last run of each queue with its entries; one row for each block that differs.

    With each: where its first record is (``at``), and of its queue where the run begins in the log
    (``since``), the queue offsets [low, high) that it has, and the last one with an entry.
    """
    of_queue = Window.partitionBy(*_QUEUE)
    last = (
        runs.withColumn("last", F.max("run").over(of_queue))
        .where("run = last")
        .withColumn("since", F.min("physicalOffset").over(of_queue))
        .withColumn("low", F.min("offset").over(of_queue))
        .withColumn("high", F.max("endOffset").over(of_queue))
    )
    expected = last.groupBy(*_QUEUE, _block_of("offset")).agg(
        F.sum("records").alias("records"),
        F.sum("sum").alias("sum"),
        F.min("physicalOffset").alias("at"),
        *(F.first(name).alias(name) for name in ("since", "low", "high")),
    )
    code = F.when(F.col("topic") == TIMER_TOPIC, 0).otherwise(F.col("tagsCode"))
    tags = TAGS_FACTOR * F.pmod(code.cast("bigint"), F.lit(MODULUS).cast("bigint"))
    content = F.col("physicalOffset") + SIZE_FACTOR * F.col("size").cast("bigint") + tags
    content = F.pmod(content, F.lit(MODULUS).cast("bigint"))
    term = (F.pmod("offset", F.lit(PLACE_FACTOR).cast("bigint")) + 1) * content
    # The fields of what is no entry may be anything, and overflow.
    term = F.when(F.col("entryType") == "entry", term).otherwise(0)
    listed = (
        entries.where(_names_the_log(log))
        .groupBy(*_QUEUE, _block_of("offset"))
        .agg(
            F.count("*").alias("listed"),
            F.sum(term).alias("listedSum"),
            F.max("offset").alias("listedLast"),
        )
    )
    agrees = F.col("records").eqNullSafe(F.col("listed"))
    agrees &= F.col("sum").eqNullSafe(F.col("listedSum"))
    of_all = {name: F.max(name).over(of_queue) for name in ("since", "low", "high", "listedLast")}
    both = expected.join(listed, [*_BLOCK], "full_outer")
    return both.withColumns(of_all).where(~agrees).select(*_BLOCK, "at", *of_all)


def beside(blocks: DataFrame, records: DataFrame, entries: DataFrame) -> DataFrame:
    """Put the records and the entries of some blocks side by side; one of them may be null."""
    chosen = F.broadcast(blocks.select(*_BLOCK, "since"))
    fields = F.struct("physicalOffset", "size", "tagsCode")
    own = records.withColumn("block", _block_of("offset")).join(chosen, [*_BLOCK])
    own = own.where(F.col("physicalOffset") >= F.col("since"))
    listed = entries.withColumn("block", _block_of("offset")).join(chosen, [*_BLOCK], "left_semi")
    return own.select(*_QUEUE, "offset", fields.alias("record")).join(
        listed.select(*_QUEUE, "offset", fields.alias("entry")), [*_QUEUE, "offset"], "full_outer"
    )


def wrong_entries(pairs: DataFrame, *, extended: bool) -> DataFrame:
    """Find entries that say something else than their record.

    ``extended`` says that tags codes may be places in a ``consumequeue_ext``.
    """
    both = pairs.where("record is not null and entry is not null")
    known = F.col("record.tagsCode").isNotNull()
    if extended:
        known &= F.col("entry.tagsCode") >= _EXTENDED
    differs = F.col("record.physicalOffset") != F.col("entry.physicalOffset")
    differs |= F.col("record.size") != F.col("entry.size")
    differs |= known & (F.col("record.tagsCode") != F.col("entry.tagsCode"))
    due = F.format_string("offset %d, size %d", "record.physicalOffset", "record.size")
    due = F.concat_ws(", tags code ", due, F.when(known, F.col("record.tagsCode").cast("string")))
    detail = F.format_string(
        "entry %d of queue %d of %s says offset %d, size %d, tags code %d; its record has %s",
        *("offset", "partition", "topic"),
        *(f"entry.{name}" for name in ("physicalOffset", "size", "tagsCode")),
        due,
    )
    found = both.where(differs)
    return _finding(found, Kind.WRONG_QUEUE_ENTRY, ["record.physicalOffset"], detail)


def missing_entries(pairs: DataFrame, blocks: DataFrame, *, was_closed: bool) -> DataFrame:
    """Find records without an entry, in front of others that have one or for good."""
    by_offset = Window.partitionBy(*_QUEUE).orderBy("offset", "record")
    found = (
        pairs.where("record is not null and entry is null")
        .withColumn("island", F.col("offset") - F.row_number().over(by_offset))
        .groupBy(*_QUEUE, "island")
        .agg(
            F.min("offset").alias("first"),
            F.max("offset").alias("last"),
            F.min("record.physicalOffset").alias("at"),
        )
    )
    if not was_closed:
        found = found.join(_queues(blocks), [*_QUEUE]).where("last < listedLast")
    detail = F.format_string(
        "queue %d of %s has no entries from %d to %d: consumers do not get these messages",
        *("partition", "topic", "first", "last"),
    )
    return _finding(found, Kind.MISSING_QUEUE_ENTRY, ["at"], detail)


def entries_of_nothing(pairs: DataFrame, blocks: DataFrame, log: Log) -> DataFrame:
    """Find entries before the first record of a queue and after its last."""
    named = (
        pairs.where("record is null")
        .join(_queues(blocks), [*_QUEUE])
        .where("low is null or offset < low or offset >= high")
        .select(*_QUEUE, "offset", "entry.physicalOffset", "entry.size")
        .where(_names_the_log(log))
    )
    at, end = F.col("physicalOffset"), log.extent.end_offset
    is_after = at >= end
    within = named.where((at >= 0) & ~is_after)
    within = _readable(within, at, at + F.col("size"), log.bounds)
    detail = F.format_string(
        "entry %d of queue %d of %s says offset %d, size %d; the log has no such record",
        *("offset", "partition", "topic", "physicalOffset", "size"),
    )
    single = named.where(at < 0).unionByName(within)
    missing = named.where(is_after).agg(
        F.count("*").alias("entries"),
        F.count_distinct(*_QUEUE).alias("queues"),
        F.min(at).alias("first"),
    )
    cut = F.format_string(
        f"the log ends at {end}, before its queues: %d entries of %d queues say more",
        *("entries", "queues"),
    )
    return _finding(single, Kind.WRONG_QUEUE_ENTRY, ["physicalOffset"], detail).unionByName(
        _finding(missing.where("entries > 0"), Kind.WRONG_QUEUE_ENTRY, ["first"], cut)
    )


def _queues(blocks: DataFrame) -> DataFrame:
    return F.broadcast(blocks.select(*_QUEUE, "low", "high", "listedLast").distinct())


def compared(runs: DataFrame, folder: str, log: Log) -> list[DataFrame]:
    """Compare the consume queues of a store with its log: findings; none when all blocks agree."""
    spark, store = runs.sparkSession, log.store
    is_comparable = F.col("topic").rlike(_SAFE_NAME) & ~F.col("topic").isin(*store.batch_topics)
    is_comparable &= ~F.col("topic").startswith(LIGHT_QUEUE_PREFIX)  # of records of other topics
    entries = _read_entries(spark, folder)
    entries = entries.where(is_comparable & F.col("entryType").isin("entry", "corrupt"))
    entries = entries.where("physicalOffset is not null")
    differing = differing_blocks(runs.where(is_comparable), entries, log)
    rows = differing.collect()
    if not rows:
        return []
    blocks = spark.createDataFrame(rows, differing.schema)
    topics = {row["topic"] for row in rows}
    first = min((row["at"] for row in rows if row["at"] is not None), default=log.extent.end_offset)
    options: dict[str, object] = {"startingOffsets": first, "delayLevels": log.delay_levels}
    if len(topics) <= _TOPICS_MAX:
        options["subscribe"] = ",".join(topics)
    records = read_log(spark, log.directory, *RECORD_COLUMNS, extent=log.extent, options=options)
    queued = records.where((F.col("recordType") == MESSAGE) & takes_slot())
    pairs = beside(blocks, queued, entries)
    return [
        wrong_entries(pairs, extended=store.has_extension),
        missing_entries(pairs, blocks, was_closed=store.was_closed),
        entries_of_nothing(pairs, blocks, log),
    ]


def _read_entries(spark: SparkSession, folder: str) -> DataFrame:
    register(spark)
    columns = ddl(*ENTRY_COLUMNS, columns=QUEUE_COLUMNS)
    return spark.read.format(QUEUE_FORMAT).schema(columns).load(folder)


def _names_the_log(log: Log) -> Column:
    """Choose entries that name what this log should have, and not what it had or will have."""
    at = F.col("physicalOffset")
    named = (at < 0) | (at >= log.extent.first_offset)
    return named if log.store.was_closed else named & (at < log.extent.end_offset)


def _block_of(name: str) -> Column:
    return F.shiftright(name, BLOCK.bit_length() - 1).alias("block")


def _readable(frame: DataFrame, start: Column, end: Column, bounds: LogBounds) -> DataFrame:
    """Leave out what ``LogBounds.hides`` from start to end."""
    frame = frame.where(start >= bounds.first_offset)
    if not bounds.damage:
        return frame
    damage = frame.sparkSession.createDataFrame(
        list(bounds.damage), "damagedFrom bigint, damagedTo bigint"
    )
    hides = (F.col("damagedFrom") < end) & (F.col("damagedTo") > start)
    return frame.join(F.broadcast(damage), hides, "left_anti")


def _finding(
    frame: DataFrame, kind: Kind, offsets: Column | Sequence[str], detail: Column
) -> DataFrame:
    named = offsets if isinstance(offsets, Column) else F.array(*offsets)
    return frame.select(
        F.lit(str(kind)).alias("kind"), named.alias("offsets"), detail.alias("detail")
    ).withColumn("at", F.col("offsets")[0])
