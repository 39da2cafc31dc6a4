"""Run the audit of one directory: read, classify, collect; the functions are in ``audit.py``.

The log is scanned once. What the audit keeps of it is cached by Spark, in memory and then on
disk, and so is the one row per transaction that comes of it.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from halfmq.store.format.topics import OP_TOPIC

from . import audit, columns
from .datasource import FORMAT, register
from .judge import Kind, LogBounds, State
from .schema import AUDIT_COLUMNS, NAME_COLUMNS, ddl
from .segments import LogExtent, survey

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANOMALIES_MAX: Final = 100_000  # collected and listed in JSON; the Parquet files have them all
_CERTAIN: Final = (State.COMMITTED, State.ROLLED_BACK, State.PENDING)  # what ``fold`` can tell
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
    states: Counter[str]  # by State
    anomalies: list[Anomaly]  # at most ANOMALIES_MAX
    anomaly_count: int
    transactions: DataFrame
    anomaly_rows: DataFrame

    @property
    def is_clean(self) -> bool:
        return not self.anomaly_count


@contextmanager
def audited(
    spark: "SparkSession",
    directory: str,
    *,
    extent: LogExtent | None = None,
    verify_crc: bool = True,
) -> Iterator[Audit]:
    """Audit the log in a store root or a folder of segments; caches end with the context.

    ``extent`` is what ``survey`` said of the directory, for a caller who knows it already.

    Raises:
        LogDirectoryError: There is no log to read.
    """
    extent = extent or survey(directory)
    with ExitStack() as cached:

        def keep(frame: DataFrame) -> DataFrame:
            kept = frame.persist()
            cached.callback(kept.unpersist)
            return kept

        numbers = Observation("log")
        log = _read(spark, directory, extent, AUDIT_COLUMNS, verify_crc=verify_crc)
        events = keep(audit.transaction_events(log.observe(numbers, *_log_numbers())))
        events.count()  # the one scan
        seen = numbers.get
        gaps = _gaps_between_segments(extent)
        damage = [(gap.offsets[0], gap.offsets[1]) for gap in gaps if gap.kind == Kind.GAP]
        if seen["corrupt"]:
            damage += audit.damaged_ranges(events)
        bounds = LogBounds(extent.first_offset, tuple(sorted(damage)))

        counts = Observation("transactions")
        folded = audit.fold(events)
        unusual = keep(
            folded.observe(counts, *_state_numbers()).where(
                F.col("state").isNull() | (F.col("state") == audit.ORPHAN)
            )
        )
        unusual.count()
        counted = counts.get
        states = Counter({str(state): counted[state] for state in _CERTAIN})
        verdicts = keep(audit.judged(events, unusual, bounds))
        if counted["open"]:
            states += _count_states(verdicts)
        # A part that is known to be empty is left out: each costs Spark a second to plan.
        found = []
        if counted[audit.ORPHAN]:
            found.append(audit.orphan_ops(unusual, audit.lost_slots(events, bounds)))
        if seen["corrupt"] + seen["failed"]:
            found.append(audit.damaged_records(events))
        if gaps:
            found.append(_as_findings(spark, gaps))
        if counted["open"]:
            found.append(audit.faulty_transactions(verdicts))
        findings = reduce(DataFrame.unionByName, found, _as_findings(spark, []))
        names = _read(spark, directory, extent, NAME_COLUMNS)
        rows = audit.named(findings, names)
        anomalies = _collect(rows) if found else []
        yield Audit(
            directory=directory,
            log=_summary(extent, seen),
            states=states,
            anomalies=anomalies,
            anomaly_count=len(anomalies) if len(anomalies) < ANOMALIES_MAX else rows.count(),
            transactions=audit.transactions(folded, verdicts, names),
            anomaly_rows=rows,
        )


def _read(
    spark: "SparkSession",
    directory: str,
    extent: LogExtent,
    names: Sequence[str],
    *,
    verify_crc: bool = False,
) -> DataFrame:
    register(spark)
    size = extent.end_offset - extent.first_offset
    return (
        spark.read.format(FORMAT)
        .schema(ddl(*names))
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
        F.count(F.when(~F.col("crcOk"), 1)).alias("failed"),
    ]


def _state_numbers() -> list[Column]:
    state = F.col("state")
    numbers = [F.count(F.when(state == name, 1)).alias(name) for name in (*_CERTAIN, audit.ORPHAN)]
    return [*numbers, F.count(F.when(state.isNull(), 1)).alias("open")]


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


def _count_states(frame: DataFrame) -> Counter[str]:
    return Counter({row[0]: row[1] for row in frame.groupBy("state").count().collect()})


def _as_findings(spark: "SparkSession", anomalies: Sequence[Anomaly]) -> DataFrame:
    rows = [(anomaly.kind, anomaly.offsets, anomaly.detail, None) for anomaly in anomalies]
    return spark.createDataFrame(rows, audit.FINDING)


def _collect(rows: DataFrame) -> list[Anomaly]:
    anomalies = [Anomaly(*row) for row in rows.limit(ANOMALIES_MAX).collect()]
    return sorted(anomalies, key=lambda anomaly: (anomaly.offsets, anomaly.kind))
