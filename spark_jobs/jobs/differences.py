"""The log against an outside ledger, as functions from DataFrame to DataFrame.

Only messages that consumers see count: finals of transactions, not their halves. ``messages`` and
``rows`` bring both sides to a common form, ``differences`` compares them.

In a notebook::

    log = roles.read_log(spark, directory, *differences.COLUMNS)
    entries = differences.messages(log, {"orders"}).persist()
    ledger = differences.rows(spark.read.parquet("orders.parquet"), "order_id").persist()
    differences.differences(entries, ledger).groupBy("kind").count().show()

A message may have several keys (the words of its ``KEYS``); it is matched when one of them has a
row. A key that several messages have is a double only if it has a row, or if those messages are
not matched by another key: an order and its customer can both be keys.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it
from pyspark.sql.types import NumericType, TimestampNTZType, TimestampType

from halfmq.store.format.properties import PROPERTY_KEYS, PROPERTY_UNIQ_KEY

from ..errors import OptionError
from ..log.lookup import LogTimes
from ..source.columns import MESSAGE
from ..source.roles import DELAYED, HALF, PARKED, property_value, role, takes_slot

COLUMNS: Final = (
    "topic",
    "timestamp",
    "physicalOffset",
    "sysFlag",
    "realTopic",
    "key",
    "uniqKey",
    "properties",
    "recordType",
)

# Kinds of differences.
ROW_WITHOUT_MESSAGE: Final = "row_without_message"
MESSAGE_WITHOUT_ROW: Final = "message_without_row"
ROW_TWICE: Final = "row_twice"
MESSAGE_TWICE: Final = "message_twice"
ROW_WITHOUT_KEY: Final = "row_without_key"
MESSAGE_WITHOUT_KEY: Final = "message_without_key"
FINDINGS: Final = (
    ROW_WITHOUT_MESSAGE,
    MESSAGE_WITHOUT_ROW,
    ROW_TWICE,
    MESSAGE_TWICE,
    ROW_WITHOUT_KEY,
    MESSAGE_WITHOUT_KEY,
)
# Kinds that prove nothing wrong: a row without a message,
WAITING: Final = "waiting"  # which was sent, and is delivered later;
TOO_YOUNG: Final = "too_young"  # which may come behind the log's end;
TOO_OLD: Final = "too_old"  # which the log may have had before its first record.

DIFFERENCE: Final = (
    "kind",
    "key",
    "rows",
    "messages",
    "offsets",  # physical: the first and last message; of a row without one, a hidden record
    "hidden",  # role of the record at offsets, which is not visible
    "at",  # when the (last) message or row is from, if that is known
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What is judged: rows and messages of a stretch of time, ms; None is without a limit.

    What they are compared with may lie ``grace`` before and behind it.
    """

    since_ms: int | None = None
    until_ms: int | None = None  # exclusive
    grace: timedelta = timedelta(minutes=1)
    log: LogTimes | None = None  # None: rows are judged whatever their age

    @property
    def grace_ms(self) -> int:
        return self.grace // timedelta(milliseconds=1)

    def holds(self, at: Column, *, wider: bool = False) -> Column:
        """Tell which times are in it; an unknown time is."""
        more = self.grace_ms if wider else 0
        told = F.lit(True)
        if self.since_ms is not None:
            told &= at >= self.since_ms - more
        if self.until_ms is not None:
            told &= at < self.until_ms + more
        return F.coalesce(told, F.lit(True))


EVERYTHING: Final = Range()


def messages(
    records: DataFrame,
    topics: Collection[str],
    key: str = PROPERTY_KEYS,
    within: Range = EVERYTHING,
) -> DataFrame:
    """List the keys of a log's messages: one row per message and key, null for one without.

    ``records`` has the columns ``COLUMNS``, ``key`` is the property that holds the keys. Columns:
    ``key, physicalOffset, at, judged, keys, hidden``; ``hidden`` is the role of what is no message
    (yet): a half, a parked half, or a message that waits for its time of delivery.
    """
    names = sorted(topics)
    is_visible = F.col("topic").isin(names) & takes_slot()
    is_hidden = role().isin(HALF, PARKED, DELAYED) & F.col("realTopic").isin(names)
    at = F.unix_millis("timestamp")
    return (
        records.where(F.col("recordType") == MESSAGE)
        .where(is_visible | is_hidden)
        .select(
            F.explode_outer(_keys(key)).alias("key"),
            "physicalOffset",
            at.alias("at"),
            within.holds(at).alias("judged"),
            F.size(_keys(key)).alias("keys"),
            F.when(~F.col("topic").isin(names), role()).alias("hidden"),
        )
        .where(within.holds(F.col("at"), wider=True) | F.col("hidden").isNotNull())
    )


def rows(
    ledger: DataFrame, key: str, time: str | None = None, within: Range = EVERYTHING
) -> DataFrame:
    """Count the rows of a ledger by key: ``key, rows, judged, told, young, at``.

    ``key`` and ``time`` name columns. Keys are compared as texts; a time that is a number is in ms
    since 1970.

    Raises:
        OptionError: There is no such column, or times of a type that is none.
    """
    for name in filter(None, (key, time)):
        if name not in ledger.columns:
            known = ", ".join(ledger.columns)
            raise OptionError(f"column {name}", f"the ledger has no such column; it has {known}")
    at = F.lit(None).cast("bigint") if time is None else _time(ledger, time)
    quoted = F.col(f"`{key}`").cast("string")
    rows = (
        ledger.select(F.nullif(quoted, F.lit("")).alias("key"), at.alias("at"))
        .where(within.holds(F.col("at"), wider=True))
        .withColumn("judged", within.holds(F.col("at")))
        .withColumn("age", _age(within))
    )
    return rows.groupBy("key").agg(
        F.count("*").alias("rows"),
        F.count_if("judged").alias("judged"),
        F.count_if(F.col("judged") & F.col("age").isNull()).alias("due"),
        F.count_if(F.col("age") == TOO_YOUNG).alias("young"),
        F.max("at").alias("at"),
    )


def differences(messages: DataFrame, rows: DataFrame) -> DataFrame:
    """Compare what ``messages`` and ``rows`` gave: one row per difference, columns ``DIFFERENCE``.

    Kinds are the constants of this module; those in ``FINDINGS`` should not be. Both arguments are
    read several times: persist them.
    """
    seen = messages.where("hidden is null")
    keyed = seen.where("key is not null")
    known = rows.where("key is not null")
    matched = keyed.join(known.select("key"), "key", "left_semi")
    unmatched = keyed.join(known.select("key"), "key", "left_anti").join(
        matched.where("keys > 1").select("physicalOffset").distinct(), "physicalOffset", "left_anti"
    )
    found = (
        _without_message(known, keyed, messages.where("hidden is not null")),
        _without_row(unmatched),
        _twice(matched.unionByName(unmatched)),
        _difference(known.where("rows > 1 and judged > 0"), ROW_TWICE, rows="rows", at="at"),
        _difference(
            rows.where("key is null and judged > 0"), ROW_WITHOUT_KEY, rows="rows", at="at"
        ),
        _difference(
            seen.where("key is null and judged"),
            MESSAGE_WITHOUT_KEY,
            messages="1",
            offsets="array(physicalOffset)",
            at="at",
        ),
    )
    return reduce(DataFrame.unionByName, found)


def first_of_each_kind(found: DataFrame, count: int) -> DataFrame:
    """Keep ``count`` differences of each kind, so that one kind does not hide another."""
    order = Window.partitionBy("kind").orderBy("key", "at")
    return (
        found.withColumn("rank", F.row_number().over(order))
        .where(F.col("rank") <= count)
        .drop("rank")
    )


def matched_keys(messages: DataFrame, rows: DataFrame) -> DataFrame:
    """List the keys that have both a row and a message."""
    seen = messages.where("hidden is null").select("key").distinct()
    return seen.join(rows.select("key"), "key", "left_semi")


def _without_message(known: DataFrame, keyed: DataFrame, hidden: DataFrame) -> DataFrame:
    """List the keys of rows without a message, and why that may be so."""
    # Of several hidden records the one counts that says most: a delayed message will come.
    rank = F.when(F.col("hidden") == DELAYED, 2).when(F.col("hidden") == PARKED, 1).otherwise(0)
    best = (
        hidden.groupBy("key")
        .agg(F.max_by(F.struct("hidden", "physicalOffset"), F.struct(rank, "physicalOffset")))
        .toDF("key", "best")
    )
    lacking = known.where("judged > 0").join(keyed.select("key").distinct(), "key", "left_anti")
    kind = (
        F.when(F.col("best.hidden") == DELAYED, WAITING)
        .when(F.col("due") > 0, ROW_WITHOUT_MESSAGE)
        .when(F.col("young") > 0, TOO_YOUNG)
        .otherwise(TOO_OLD)
    )
    return _difference(
        lacking.join(best, "key", "left").withColumn("kind", kind),
        rows="rows",
        messages="0",
        offsets="array_compact(array(best.physicalOffset))",
        hidden="best.hidden",
        at="at",
    )


def _without_row(unmatched: DataFrame) -> DataFrame:
    """List the messages none of whose keys has a row."""
    alone = (
        unmatched.where("judged")
        .groupBy("physicalOffset")
        .agg(F.array_join(F.sort_array(F.collect_set("key")), " ").alias("key"), F.max("at"))
        .toDF("physicalOffset", "key", "at")
    )
    return _difference(
        alone, MESSAGE_WITHOUT_ROW, rows="0", messages="1", offsets="array(physicalOffset)", at="at"
    )


def _twice(entries: DataFrame) -> DataFrame:
    counted = entries.groupBy("key").agg(
        F.count("*").alias("messages"),
        F.count_if("judged").alias("judged"),
        F.array(F.min("physicalOffset"), F.max("physicalOffset")).alias("offsets"),
        F.max("at").alias("at"),
    )
    double = counted.where("messages > 1 and judged > 0")
    return _difference(double, MESSAGE_TWICE, messages="messages", offsets="offsets", at="at")


def _difference(frame: DataFrame, kind: str | None = None, **columns: str) -> DataFrame:
    """Bring one kind of differences to the columns ``DIFFERENCE``; those not given are null."""
    types = {"rows": "bigint", "messages": "bigint", "offsets": "array<bigint>", "hidden": "string"}
    told = [F.col("kind") if kind is None else F.lit(kind).alias("kind"), F.col("key")]
    told += [
        F.expr(columns.get(name, "null")).cast(type_).alias(name) for name, type_ in types.items()
    ]
    return frame.select(*told, F.timestamp_millis(F.expr(columns.get("at", "null"))).alias("at"))


def _keys(name: str) -> Column:
    """Return the keys of a message as an array; null or empty for one without."""
    if name == PROPERTY_UNIQ_KEY:
        return F.when(F.col("uniqKey").isNotNull(), F.array("uniqKey"))
    if name != PROPERTY_KEYS:
        value = property_value(name)
        return F.when(value.isNotNull(), F.array(value))
    words = F.split(F.col("key").cast("string"), " ")
    return F.array_remove(F.array_distinct(words), "")


def _age(within: Range) -> Column:
    """Say of rows why their message may lie outside of the log; null where it may not."""
    if within.log is None:
        return F.lit(None).cast("string")
    young = F.col("at") >= within.log.last - within.grace_ms
    told = F.when(young, TOO_YOUNG)
    if within.log.first is not None:
        told = told.when(F.col("at") < within.log.first + within.grace_ms, TOO_OLD)
    return told


def _time(ledger: DataFrame, name: str) -> Column:
    column, kind = F.col(f"`{name}`"), ledger.schema[name].dataType
    if isinstance(kind, NumericType):
        return column.cast("bigint")
    if not isinstance(kind, TimestampType | TimestampNTZType):
        as_time = F.unix_millis(column.cast("string").try_cast("timestamp"))
        return F.coalesce(as_time, column.cast("string").try_cast("bigint"))
    return F.unix_millis(column.cast("timestamp"))
