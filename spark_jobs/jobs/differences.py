"""Compare a log with an outside ledger: functions from DataFrame to DataFrame.

Only messages that consumers see count: finals of transactions, not their halves. ``messages`` and
``rows`` bring both sides to a common form, ``differences`` compares them.

A message may have several keys (the words of its ``KEYS``); it is matched when one of them has a
row. A key that several messages have is a double only if it has a row, or if those messages are
not matched by another key: an order and its customer can both be keys.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it
from pyspark.sql.types import NumericType, TimestampNTZType, TimestampType

from halfmq.store.format.properties import PROPERTY_KEYS, PROPERTY_UNIQ_KEY

from ..errors import OptionError
from ..log.lookup import LogTimes
from ..source.columns import MESSAGE
from ..source.message_roles import DELAYED, HALF, PARKED, property_value, role, takes_slot

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

FINDINGS: Final = (  # the kinds of differences that should not exist
    "row_without_message",
    "message_without_row",
    "row_twice",
    "message_twice",
    "row_without_key",
    "message_without_key",
)
# Rows without a message that prove nothing: the message waits for its delivery (waiting), may come
# after the end of the log (too_young), or may have left the log before its first record (too_old).
# Of several hidden records with a key, the one that says most counts: a delayed message will come.
_DIFFERENCES: Final = """
    with seen as (
        select * from {messages} where hidden is null and key is not null
    ), known as (
        select * from {rows} where key is not null
    ), matched as (
        select * from seen left semi join known on seen.key = known.key
    ), by_another_key as (
        select physicalOffset from matched where keys > 1
    ), unmatched as (
        select * from seen left anti join known on seen.key = known.key
            left anti join by_another_key on seen.physicalOffset = by_another_key.physicalOffset
    ), hidden as (
        select key, max_by(
            struct(hidden, physicalOffset),
            struct(decode(hidden, 'delayed', 2, 'parked', 1, 0), physicalOffset)
        ) as best
        from {messages} where hidden is not null group by key
    ), found as (
        select
            case
                when best.hidden = 'delayed' then 'waiting'
                when due > 0 then 'row_without_message'
                when young > 0 then 'too_young'
                else 'too_old'
            end as kind,
            key, rows, 0 as messages, array_compact(array(best.physicalOffset)) as offsets,
            best.hidden as hidden, at
        from (
            select * from known left anti join seen on known.key = seen.key where known.judged > 0
        )
            left join hidden using (key)
        union all
        select 'message_without_row', array_join(sort_array(collect_set(key)), ' '), 0, 1,
            array(physicalOffset), null, max(at)
        from unmatched where judged group by physicalOffset
        union all
        select 'message_twice', key, null, count(*),
            array(min(physicalOffset), max(physicalOffset)), null, max(at)
        from (select * from matched union all select * from unmatched)
        group by key having count(*) > 1 and count_if(judged) > 0
        union all
        select 'row_twice', key, rows, null, null, null, at
        from known where rows > 1 and judged > 0
        union all
        select 'row_without_key', null, rows, null, null, null, at
        from {rows} where key is null and judged > 0
        union all
        select 'message_without_key', null, null, 1, array(physicalOffset), null, at
        from {messages} where hidden is null and key is null and judged
    )
    select kind, key, rows, messages, offsets, hidden, timestamp_millis(at) as at from found
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """The time range whose rows and messages are judged, in milliseconds; None sets no limit.

    What they are compared with may lie ``grace`` before and after it.
    """

    since_ms: int | None = None
    until_ms: int | None = None  # exclusive
    grace: timedelta = timedelta(minutes=1)
    log: LogTimes | None = None  # None: rows are judged whatever their age

    def arguments(self) -> dict[str, int | None]:
        """Return the parameters of the queries; comparisons with null are ignored there."""
        grace = self.grace // timedelta(milliseconds=1)
        first = None if self.log is None else self.log.first
        return {
            "since": self.since_ms,
            "until": self.until_ms,
            "grace": grace,
            "young": None if self.log is None else self.log.last - grace,
            "old": None if first is None else first + grace,
        }


EVERYTHING: Final = TimeRange()
_JUDGED: Final = "coalesce(at >= :since and at < :until, true)"  # an unknown time is in the range
_COMPARED: Final = "coalesce(at >= :since - :grace and at < :until + :grace, true)"
_MESSAGES: Final = f"""
    select explode_outer(keys) as key, physicalOffset, at, {_JUDGED} as judged,
        size(keys) as keys, hidden
    from {{records}} where hidden is not null or {_COMPARED}
"""
_ROWS: Final = f"""
    with ledger as (
        select key, at, {_JUDGED} as judged,
            case when at >= :young then 'too_young' when at < :old then 'too_old' end as age
        from {{ledger}} where {_COMPARED}
    )
    select key, count(*) as rows, count_if(judged) as judged,
        count_if(judged and age is null) as due, count_if(age = 'too_young') as young,
        max(at) as at
    from ledger group by key
"""


def messages(
    records: DataFrame,
    topics: Collection[str],
    key: str = PROPERTY_KEYS,
    within: TimeRange = EVERYTHING,
) -> DataFrame:
    """List the keys of a log's messages: one row per message and key, null for one without.

    ``records`` has the columns ``COLUMNS``, ``key`` is the property that holds the keys. Columns:
    ``key, physicalOffset, at, judged, keys, hidden``; ``hidden`` is the role of a record that
    consumers do not see (yet): a half, a parked half, or a message that waits for its delivery.
    """
    names = sorted(topics)
    is_visible = F.col("topic").isin(names) & takes_slot()
    is_hidden = role().isin(HALF, PARKED, DELAYED) & F.col("realTopic").isin(names)
    picked = records.where(F.col("recordType") == MESSAGE).where(is_visible | is_hidden)
    picked = picked.select(
        _keys(key).alias("keys"),
        "physicalOffset",
        F.unix_millis("timestamp").alias("at"),
        F.when(~F.col("topic").isin(names), role()).alias("hidden"),
    )
    return records.sparkSession.sql(_MESSAGES, within.arguments(), records=picked)


def rows(
    ledger: DataFrame, key: str, time: str | None = None, within: TimeRange = EVERYTHING
) -> DataFrame:
    """Count the rows of a ledger by key: ``key, rows, judged, due, young, at``.

    ``key`` and ``time`` name columns. Keys are compared as strings; a time that is a number is in
    milliseconds since 1970.

    Raises:
        OptionError: There is no such column.
    """
    for name in filter(None, (key, time)):
        if name not in ledger.columns:
            known = ", ".join(ledger.columns)
            raise OptionError(f"column {name}", f"the ledger has no such column; it has {known}")
    at = F.lit(None).cast("bigint") if time is None else _time(ledger, time)
    text = F.col(f"`{key}`").cast("string")
    picked = ledger.select(F.nullif(text, F.lit("")).alias("key"), at.alias("at"))
    return ledger.sparkSession.sql(_ROWS, within.arguments(), ledger=picked)


def differences(messages: DataFrame, rows: DataFrame) -> DataFrame:
    """Compare what ``messages`` and ``rows`` return: one row per difference.

    Columns: ``kind, key, rows, messages, offsets, hidden, at``. ``offsets`` are the physical
    offsets of the first and last message; for a row without a message, the offset of a record that
    consumers do not see, whose role is ``hidden``. ``at`` is the time of the (last) message or row,
    if it is known. Both arguments are read several times: persist them.
    """
    return messages.sparkSession.sql(_DIFFERENCES, messages=messages, rows=rows)


def first_of_each_kind(found: DataFrame, count: int) -> DataFrame:
    """Keep ``count`` differences of each kind, so that one kind does not hide another."""
    text = """
        select * except (rank) from (
            select *, row_number() over (partition by kind order by key, at) as rank from {found}
        ) where rank <= :count order by kind, key, at
    """
    return found.sparkSession.sql(text, {"count": count}, found=found)


def matched_keys(messages: DataFrame, rows: DataFrame) -> DataFrame:
    """List the keys that have both a row and a message."""
    seen = messages.where("hidden is null").select("key").distinct()
    return seen.join(rows.select("key"), "key", "left_semi")


def _keys(name: str) -> Column:
    """Return the keys of a message as an array; null or empty for one without."""
    if name == PROPERTY_UNIQ_KEY:
        return F.when(F.col("uniqKey").isNotNull(), F.array("uniqKey"))
    if name != PROPERTY_KEYS:
        value = property_value(name)
        return F.when(value.isNotNull(), F.array(value))
    words = F.split(F.col("key").cast("string"), " ")
    return F.array_remove(F.array_distinct(words), "")


def _time(ledger: DataFrame, name: str) -> Column:
    column, kind = F.col(f"`{name}`"), ledger.schema[name].dataType
    if isinstance(kind, NumericType):
        return column.cast("bigint")
    if not isinstance(kind, TimestampType | TimestampNTZType):
        as_time = F.unix_millis(column.cast("string").try_cast("timestamp"))
        return F.coalesce(as_time, column.cast("string").try_cast("bigint"))
    return F.unix_millis(column.cast("timestamp"))
