"""The role of each record for counting messages, and how to read a log for it.

A message can leave several records: a half and the final message, a copy that waits for its time
of delivery, copies for consumers that failed. Of these only the one in the application's topic is
the message; ``role`` tells them apart by their topics.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from halfmq.store.format.flags import INNER_BATCH, TRANSACTION_MASK, TransactionType
from halfmq.store.format.properties import PROPERTY_INNER_NUM
from halfmq.store.format.topics import (
    DEAD_LETTER_PREFIX,
    HALF_TOPIC,
    OP_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SYSTEM_PREFIX,
    SYSTEM_TOPICS,
    TIMER_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
)

from ..datasource import FORMAT, register
from ..log.files import location
from ..log.segments import LogExtent
from .columns import CORRUPT, MESSAGE
from .schema import ddl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Roles. What is no record at all, a damaged range, has the role CORRUPT.
RETRY: Final = "retry"  # a consumer group gets it again
DEAD_LETTER: Final = "dead_letter"  # a consumer group has given it up
HALF: Final = "half"  # not visible; decisions that roll back stand in the same topic
OP: Final = "op"  # marks halves as decided
PARKED: Final = "parked"  # a half that nobody decided
DELAYED: Final = "delayed"  # waits for its time of delivery
SYSTEM: Final = "system"  # other topics of the broker's own
ROLES: Final = (MESSAGE, RETRY, DEAD_LETTER, DELAYED, HALF, OP, PARKED, SYSTEM, CORRUPT)

_BY_TOPIC: Final = {
    HALF_TOPIC: HALF,
    OP_TOPIC: OP,
    TRANS_CHECK_MAX_TIME_TOPIC: PARKED,
    SCHEDULE_TOPIC: DELAYED,
    TIMER_TOPIC: DELAYED,
}


def read_log(
    spark: "SparkSession",
    directory: str,
    *columns: str,
    extent: LogExtent | None = None,
    partitions: int = 1,
    options: Mapping[str, object] | None = None,
) -> DataFrame:
    """Read columns of a log; ``extent`` fixes the end while a broker appends.

    ``partitions`` is how many there should be at least; ``options`` are those of the source.
    """
    register(spark)
    reader = spark.read.format(FORMAT).schema(ddl(*columns)).option("minPartitions", partitions)
    if extent is not None:
        reader = reader.option("endingOffsets", extent.end_offset)
    for name, value in (options or {}).items():
        reader = reader.option(name, str(value))
    return reader.load(location(directory))


def with_roles(log: DataFrame, **properties: str) -> DataFrame:
    """Add to the records of a log what counting messages needs.

    ``role``; ``queued``, whether the record has an entry in a consume queue; ``messages``, how many
    it holds; and a column for each property that is named. ``log`` has the columns topic,
    recordType, sysFlag and properties.
    """
    named = {column: property_value(name) for column, name in properties.items()}
    is_queued = (F.col("recordType") == MESSAGE) & takes_slot()
    return log.withColumns({"role": role(), "queued": is_queued, "messages": messages(), **named})


def role(topic: str = "topic", record_type: str = "recordType") -> Column:
    """Return the column that says the role of each record; null for the blanks of a log."""
    name = F.col(topic)
    told = F.when(F.col(record_type) == CORRUPT, CORRUPT).when(name.isNull(), None)
    for known, its_role in _BY_TOPIC.items():
        told = told.when(name == known, its_role)
    told = told.when(name.startswith(RETRY_PREFIX), RETRY)
    told = told.when(name.startswith(DEAD_LETTER_PREFIX), DEAD_LETTER)
    others = name.isin(*sorted(SYSTEM_TOPICS - _BY_TOPIC.keys())) | name.startswith(SYSTEM_PREFIX)
    return told.when(others, SYSTEM).otherwise(MESSAGE)


def messages() -> Column:
    """Return the column that says how many messages a record holds: an inner batch holds several.

    Needs ``sysFlag`` and ``properties``.
    """
    is_batch = F.col("sysFlag").bitwiseAND(INNER_BATCH) != 0
    count = property_value(PROPERTY_INNER_NUM).try_cast("bigint")
    return F.when(is_batch, F.coalesce(count, F.lit(1))).otherwise(F.lit(1)).cast("bigint")


def takes_slot() -> Column:
    """Tell which records have an entry in a consume queue; needs ``sysFlag``."""
    bits = F.col("sysFlag").bitwiseAND(TRANSACTION_MASK)
    return bits.isin(int(TransactionType.NONE), int(TransactionType.COMMIT))


def property_value(name: str) -> Column:
    """Return the column with a property's value, null where there is none; needs ``properties``.

    Of two properties of one name the last counts, as in RocketMQ.
    """
    # Values do not hold the separator; a name begins after one, or at the start.
    pattern = f"(?s)(?:^|.*\\x02){_quoted(name)}\\x01([^\\x02]+)"
    return F.nullif(F.regexp_extract("properties", pattern, 1), F.lit(""))


def _quoted(name: str) -> str:
    """Quote a name for a Java pattern."""
    return "\\Q" + name.replace("\\E", "\\E\\\\E\\Q") + "\\E"
