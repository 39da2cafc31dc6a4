"""What became of the transactions and delays of a log, or of some of its key groups.

What is said of a key group depends on its own events, and on what is known of the log as a whole.
So an audit judges all groups at once, and a watch those of which there is something new, with the
same result.
"""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from ..log.transaction_parts import Part
from . import delays, key_groups
from .rules.model import FINDING_COLUMNS, AuditedState, LogBounds, TimeLimits

Keep = Callable[[DataFrame], DataFrame]
"""Has Spark keep the rows of a frame that several queries use."""


class Verdicts(NamedTuple):
    """What is said of some events."""

    transactions: DataFrame  # ``TRANSACTION_COLUMNS``
    findings: list[DataFrame]  # ``FINDING_COLUMNS``
    open_keys: DataFrame  # of groups of which the rules may say otherwise once the log is longer


def verdicts_of(
    events: DataFrame,
    half_ranges: DataFrame,
    bounds: LogBounds,
    limits: TimeLimits,
    keep: Keep,
    *,
    has_delays: bool = True,
    has_keyless: bool = True,
) -> Verdicts:
    """Judge whole key groups; events without a key name a half that is not in the log.

    ``half_ranges`` are the notes ``QUEUE`` about the half topic.
    """
    findings: list[DataFrame] = []
    open_keys: list[DataFrame] = []
    if has_delays:
        is_delay = F.col("part") >= int(Part.DELAYED)
        delayed = delays.judged(events.where(is_delay), bounds, limits)
        findings.append(delayed.where("kind is not null").select(*FINDING_COLUMNS))
        open_keys.append(delayed.where("isOpen").select("key"))
        events = events.where(~is_delay)
    if has_keyless:
        is_op = F.col("part") == int(Part.OP)
        unlinked_ops = events.where(is_op & F.isnull("key"))
        findings.append(key_groups.orphans(unlinked_ops, half_ranges, bounds))
        # Records that name the same place, where no half is, belong together.
        place = F.when(~is_op, F.xxhash64("halfOffset"))
        events = events.withColumn("key", F.coalesce("key", place)).where("key is not null")
    settled = keep(key_groups.settled(key_groups.grouped(events), bounds, limits))
    transactions = settled.where("state is not null")
    open_keys.append(settled.where(F.col("state") == str(AuditedState.PENDING)).select("key"))
    unsettled = settled.where("state is null").select("key")
    if count := unsettled.count():
        verdicts = keep(key_groups.judged(events, unsettled, bounds, limits, count=count))
        judged = verdicts.where("state is not null")
        columns = key_groups.TRANSACTION_COLUMNS
        transactions = transactions.select(*columns).unionByName(judged.select(*columns))
        findings.append(verdicts.where("kind is not null").select(*FINDING_COLUMNS))
        open_keys.append(verdicts.where("isOpen").select("key"))
    transactions = transactions.select(*key_groups.TRANSACTION_COLUMNS)
    return Verdicts(transactions, findings, reduce(DataFrame.unionByName, open_keys))
