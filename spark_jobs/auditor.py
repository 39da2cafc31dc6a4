"""Run the audit of one directory: read, classify, collect; the functions are in ``audit.py``.

The log is scanned once. What the audit keeps of it is cached by Spark, in memory and then on
disk, and so is the one row per transaction that comes of it.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from halfmq.store.format.topics import OP_TOPIC

from . import audit, columns
from .datasource import FORMAT, register
from .judge import Kind, LogBounds, State
from .schema import AUDIT_COLUMNS, ddl
from .segments import LogExtent, survey

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANOMALIES_MAX: Final = 100_000  # collected and listed in JSON; the Parquet files have them all
_SPREAD_MIN: Final = 16 << 20  # bytes; a smaller log is read fastest by one task


class Anomaly(NamedTuple):
    """One thing that is wrong with the log."""

    kind: str
    transaction_id: str | None
    offsets: list[int]  # physical
    detail: str


@dataclass(frozen=True, slots=True)
class LogSummary:
    """How much was read."""

    segments: int
    records: int
    bytes: int  # of the records
    first_offset: int
    end_offset: int
    tail: str | None  # what lies behind the end, unless it is unwritten


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found; the DataFrames last as long as the context that gave it."""

    directory: str
    log: LogSummary
    states: Counter[State]
    anomalies: list[Anomaly]  # at most ANOMALIES_MAX
    anomaly_count: int
    transactions: DataFrame
    anomaly_rows: DataFrame

    @property
    def is_clean(self) -> bool:
        return not self.anomaly_count


@contextmanager
def audited(spark: "SparkSession", directory: str, *, verify_crc: bool = True) -> Iterator[Audit]:
    """Audit the log in a store root or a folder of segments; caches end with the context.

    Raises:
        LogDirectoryError: There is no log to read.
    """
    extent = survey(directory)
    with ExitStack() as cached:

        def keep(frame: DataFrame) -> DataFrame:
            kept = frame.persist()
            cached.callback(kept.unpersist)
            return kept

        numbers = Observation("log")
        log = _read(spark, directory, extent, verify_crc=verify_crc)
        events = keep(audit.transaction_events(log.observe(numbers, *_log_numbers())))
        events.count()  # the one scan
        seen = numbers.get
        gaps = _gaps_between_segments(extent)
        bounds = LogBounds(extent.first_offset, _damage(events, gaps, seen["corrupt"]))

        linked = audit.link_ops(events)
        folded = keep(audit.fold(events, linked))
        states = _count_states(folded)
        verdicts = keep(audit.judged(events, linked, folded, bounds))
        states += _count_states(verdicts)
        rows = (
            audit.faulty_transactions(events, verdicts)
            .unionByName(audit.orphan_ops(linked, audit.lost_slots(events, bounds)))
            .unionByName(audit.damaged_records(events))
        )
        if gaps:
            rows = rows.unionByName(spark.createDataFrame(gaps, rows.schema))
        rows = keep(rows)
        yield Audit(
            directory=directory,
            log=_summary(extent, seen),
            states=states,
            anomalies=_collect(rows),
            anomaly_count=rows.count(),
            transactions=audit.transactions(events, folded, verdicts),
            anomaly_rows=rows,
        )


def _read(
    spark: "SparkSession", directory: str, extent: LogExtent, *, verify_crc: bool
) -> DataFrame:
    register(spark)
    size = extent.end_offset - extent.first_offset
    return (
        spark.read.format(FORMAT)
        .schema(ddl(*AUDIT_COLUMNS))
        .option("valueTopics", OP_TOPIC)
        .option("verifyCrc", str(verify_crc).lower())
        .option("endingOffsets", str(extent.end_offset))  # a broker may be appending
        .option("minPartitions", str((os.cpu_count() or 1) if size > _SPREAD_MIN else 1))
        .load(str(Path(directory).absolute()))
    )


def _log_numbers() -> list[Column]:
    is_message = F.col("recordType") == columns.MESSAGE
    return [
        F.count(F.when(is_message, 1)).alias("records"),
        F.coalesce(F.sum(F.when(is_message, F.col("size"))), F.lit(0)).alias("bytes"),
        F.count(F.when(F.col("recordType") == columns.CORRUPT, 1)).alias("corrupt"),
    ]


def _summary(extent: LogExtent, seen: dict[str, int]) -> LogSummary:
    return LogSummary(
        segments=len(extent.segments),
        records=seen["records"],
        bytes=seen["bytes"],
        first_offset=extent.first_offset,
        end_offset=extent.end_offset,
        tail=extent.tail,
    )


def _gaps_between_segments(extent: LogExtent) -> list[Anomaly]:
    """Compare where each segment ends with where the next begins."""
    found = []
    for segment, following in zip(extent.segments, extent.segments[1:], strict=False):
        if segment.end < following.base:
            missing = following.base - segment.end
            detail = f"{missing} bytes between two segments are in neither"
            found.append(Anomaly(Kind.GAP, None, [segment.end, following.base], detail))
        elif segment.end > following.base:
            shared = segment.end - following.base
            detail = f"two segments both hold {shared} bytes"
            found.append(Anomaly(Kind.OVERLAP, None, [following.base, segment.end], detail))
    return found


def _damage(events: DataFrame, gaps: list[Anomaly], corrupt: int) -> tuple[tuple[int, int], ...]:
    """List the ranges that could not be read."""
    ranges = [(gap.offsets[0], gap.offsets[1]) for gap in gaps if gap.kind == Kind.GAP]
    if corrupt:
        rows = audit.damaged_records(events).where(F.size("offsets") == 2).select("offsets")
        ranges += [(start, end) for ((start, end),) in rows.collect()]
    return tuple(sorted(ranges))


def _count_states(frame: DataFrame) -> Counter[State]:
    rows = frame.where(F.col("state").isNotNull()).groupBy("state").count().collect()
    return Counter({State(state): count for state, count in rows})


def _collect(rows: DataFrame) -> list[Anomaly]:
    anomalies = [Anomaly(*row) for row in rows.limit(ANOMALIES_MAX).collect()]
    return sorted(anomalies, key=lambda anomaly: (anomaly.offsets, anomaly.kind))
