"""The delays of plain messages of a log, as functions from DataFrame to DataFrame.

All records of one message that waits have one ``key``. Nearly all are usual: one record waits, and
one like it was delivered in time, or it is not due yet. The others go to ``rules/deliveries.py``.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from ..log.transaction_parts import Part
from .key_groups import COLUMNS, event_of, is_moved
from .rules.deliveries import EARLY_MIN, OVERDUE_MIN, judge_delays
from .rules.model import FINDING_DDL, LogBounds, LogEvent, TimeLimits

_CONTENT: Final = ("topicHash", "partition", "contentHash")


_VERDICT_DDL: Final = f"{FINDING_DDL}, isOpen boolean"


def judged(events: DataFrame, bounds: LogBounds, limits: TimeLimits) -> DataFrame:
    """Find what is wrong with deliveries; ``events`` have the parts of plain delays alone.

    The columns are ``key``, those of ``FINDING_DDL``, and ``isOpen``, whether a longer log may say
    otherwise; a message of which nothing is wrong has at most a row without a ``kind``.
    """
    waits = F.col("part") == int(Part.DELAYED)
    arrives = F.col("part") == int(Part.ARRIVED)
    groups = events.groupBy("key").agg(
        F.count("*").alias("records"),
        F.count_if(waits).alias("waits"),
        F.count_if(arrives).alias("arrivals"),
        F.max(F.when(waits, F.col("dueTime"))).alias("due"),
        F.max(F.when(arrives, F.col("time"))).alias("arrived"),
        F.bit_xor(F.xxhash64(*_CONTENT)).alias("difference"),
        F.count_if(~F.coalesce("crcOk", F.expr("true"))).alias("damaged"),
        F.collect_list(F.struct(*COLUMNS[1:])).alias("history"),
    )
    due, arrived = F.col("due"), F.col("arrived")
    is_timely = (arrived >= due - EARLY_MIN) & (arrived <= due + OVERDUE_MIN)
    is_delivered = (F.col("records") == 2) & (F.col("waits") == 1) & (F.col("arrivals") == 1)
    is_delivered &= (F.col("difference") == 0) & (F.col("damaged") == 0) & is_timely
    is_waiting = (F.col("records") == F.col("waits")) & (due >= limits.newest_ms - OVERDUE_MIN)

    def judge(history: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return list(_verdict([event_of(*row[:-1]) for row in history], bounds, limits))

    udf = F.udf(judge, f"array<struct<{_VERDICT_DDL}>>", useArrow=False)
    others = groups.where(~(is_delivered | is_waiting)).select("key", F.inline(udf("history")))
    waiting = groups.where(is_waiting).select("key", F.lit(True).alias("isOpen"))
    return others.unionByName(waiting, allowMissingColumns=True)


def _verdict(
    events: Sequence[LogEvent], bounds: LogBounds, limits: TimeLimits
) -> Iterator[tuple[Any, ...]]:
    found = judge_delays(events, bounds, limits)
    for one in found:
        yield str(one.kind), one.offsets, one.detail, one.offsets[0], True
    parts = [event.part for event in events]
    originals = sum(event.part is Part.DELAYED and not event.number for event in events)
    is_due = Part.DELAYED in parts and parts.count(Part.ARRIVED) < max(1, originals)
    if not found and ((is_due and Part.RECALLED not in parts) or is_moved(events)):
        yield None, None, None, None, True
