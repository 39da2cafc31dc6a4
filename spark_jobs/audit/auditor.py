"""Run the audit of one directory: read, judge, collect.

The log is read once. What the audit keeps of it (``source/event_source.py``) is cached by Spark on
disk: events, a hundred bytes each, and notes on what else there is. The rest are queries over that.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from halfmq.store.format.topics import HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC

from ..datasource import FORMAT, register
from ..log.files import is_remote
from ..log.log_end import survey
from ..log.lookup import LogLookup, Place
from ..log.segments import LogExtent, Segment
from ..log.store_files import StoreFiles
from ..source import event_source as source
from ..source.schema import NAME_COLUMNS, ddl
from . import families, queue_findings, statistics
from .changed import changed_bytes
from .checks import DEFAULT_CHECKS, Check, Checks, Remark, checks_of
from .judge import Kind, LogBounds, Part, State
from .notes import Notes
from .queue_findings import FINDING_COLUMNS, Log
from .statistics import Delays, OpenAges, Timeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANOMALIES_MAX: Final = 100_000  # collected and listed in JSON; the Parquet files have them all
_HIDDEN_MAX: Final = 200  # collected of a kind that a flood of others would hide
_SPREAD_MIN: Final = 16 << 20  # bytes; a smaller log is read fastest by one task

_FINDING: Final = "kind string, offsets array<bigint>, detail string, at bigint"
_RANGES: Final = (Kind.GAP, Kind.OVERLAP, Kind.CORRUPT_RECORD)  # their offsets are start and end
_SEEN: Final = (
    "transactionId string, topic string, producerGroup string,"
    " bytes array<struct<file: string, position: bigint, size: int>>"
)
_VOID: Final = (str(State.EXPIRED), str(State.UNFOUNDED))


class Anomaly(NamedTuple):
    """One thing that is wrong with the log."""

    kind: str
    transaction_id: str | None
    offsets: list[int]  # physical
    detail: str
    places: list[Place]  # the bytes to look at, where they can be read
    topic: str | None = None
    group: str | None = None


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
    delays: list[Delays]
    anomalies: list[Anomaly]  # ANOMALIES_MAX, and some of kinds that these would hide
    anomaly_kinds: Counter[str]  # all of them, by Kind
    timeline: Timeline
    open_ages: OpenAges
    describe: Callable[[], DataFrame]
    anomaly_rows: DataFrame
    checks: list[Check] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)

    @property
    def transactions(self) -> DataFrame:
        """Every transaction that was prepared in the log, one row each; reads the log once more."""
        return self.describe()

    @property
    def anomaly_count(self) -> int:
        return self.anomaly_kinds.total()

    @property
    def is_clean(self) -> bool:
        return not self.anomaly_count


@contextmanager
def audited(
    spark: "SparkSession",
    directory: str,
    *,
    extent: LogExtent | None = None,
    checks: Checks = DEFAULT_CHECKS,
    stage: Callable[[str], None] = lambda _: None,
) -> Iterator[Audit]:
    """Audit the log in a store root or a folder of segments; Spark keeps rows while it lasts.

    ``extent`` is what ``survey`` said of the directory, for a caller who knows it already.
    ``stage`` is told what begins, in a few words.

    Raises:
        LogDirectoryError: There is no log to read.
    """
    extent = extent or survey(directory)
    with ExitStack() as cached:

        def keep(frame: DataFrame) -> DataFrame:
            kept = frame.persist(StorageLevel.DISK_ONLY)
            cached.callback(kept.unpersist)
            return kept

        yield _Auditor(spark, directory, extent, checks, keep, stage).run()


class _Auditor:
    """One run; its steps are its methods, in their order."""

    def __init__(
        self,
        spark: "SparkSession",
        directory: str,
        extent: LogExtent,
        checks: Checks,
        keep: Callable[[DataFrame], DataFrame],
        stage: Callable[[str], None],
    ) -> None:
        self._spark = spark
        self._directory = directory if is_remote(directory) else str(Path(directory).absolute())
        self._told_directory = directory
        self._extent = extent
        self._checks = checks
        self._keep = keep
        self._stage = stage
        self._store = StoreFiles(directory)
        self._compared = checks_of(extent, self._store, crc=checks.crc, queues=checks.queues)
        cores = spark.sparkContext.defaultParallelism
        self._partitions = cores if extent.size > _SPREAD_MIN else 1

    def run(self) -> Audit:
        self._stage(f"reading {self._extent.size:,} bytes of log")
        scan = self._keep(
            source.read_scan(
                self._spark,
                self._extent,
                families.COLUMNS,
                verify_crc=self._checks.crc,
                partitions=self._partitions,
            )
        )
        notes = scan.where("part is null").select(F.inline("notes"))
        rows = [row.asDict() for row in notes.where(F.col("what") != source.QUEUE).collect()]
        log = Notes(rows, self._extent, self._store, self._checks)
        bounds, terms = log.bounds, log.terms
        self._stage("judging what became of transactions")
        events, found = self._linked(scan.where("part is not null").drop("notes"), log, bounds)
        settled = self._keep(families.settled(families.families(events), bounds, terms))
        transactions = settled.where("state is not null").select(*families.TRANSACTION_COLUMNS)
        tally = statistics.tally(settled, log.scale)
        count = sum(row["count"] for row in tally if row["state"] is None)
        if count:
            unsettled = settled.where("state is null").select("key")
            verdicts = self._keep(families.judged(events, unsettled, bounds, terms, count=count))
            judged = verdicts.where("state is not null").select(*families.TRANSACTION_COLUMNS)
            tally += statistics.tally(judged, log.scale)
            transactions = transactions.unionByName(judged)
            rules = verdicts.where("kind is not null")
            found.append(rules.select("kind", "offsets", "detail", "at"))
        counts = statistics.counted(tally, log.scale)
        prepared = transactions.where(~F.col("state").isin(*_VOID))
        delays = statistics.delays(prepared, log.labels)
        self._stage("comparing queues with the log")
        ranges = self._keep(notes.where(F.col("what") == source.QUEUE))
        found += self._queue_findings(ranges, bounds)
        found += self._findings(log)
        self._stage("looking up what was found")
        findings = self._keep(reduce(DataFrame.unionByName, found).select(*FINDING_COLUMNS))
        named = _named(findings, self._extent.segments)
        kinds = Counter[str](dict(findings.groupBy("kind").count().collect()))
        return Audit(
            directory=self._told_directory,
            log=self._log_summary(log),
            states=counts.states,
            delays=delays,
            anomalies=_anomalies(named, kinds),
            anomaly_kinds=kinds,
            timeline=counts.timeline,
            open_ages=counts.open_ages,
            describe=lambda: _described(prepared, self._names()),
            anomaly_rows=named,
            checks=self._compared,
            remarks=list(log.clock_steps()),
        )

    def _linked(
        self, events: DataFrame, log: Notes, bounds: LogBounds
    ) -> tuple[DataFrame, list[DataFrame]]:
        """Add the events whose half is in another part of the log; tell of ops without one."""
        if not log.keyless:
            return events, []
        linked = self._keep(families.linked(events))
        halves = events.where(F.col("part") == int(Part.HALF))
        orphans = families.orphans(linked.where("key is null"), halves, bounds)
        known = "key is not null"
        return events.where(known).unionByName(linked.where(known)), [orphans]

    def _queue_findings(self, ranges: DataFrame, bounds: LogBounds) -> list[DataFrame]:
        runs = queue_findings.runs(ranges)
        found = [queue_findings.out_of_order(runs), queue_findings.gaps(runs, bounds)]
        if self._store.queue_counts is not None:
            found.append(queue_findings.unknown_queues(ranges, self._store.queue_counts))
        if self._checks.queues and self._store.consume_queues is not None:
            register(self._spark)
            log = Log(self._extent, bounds, self._store.was_closed)
            found += queue_findings.compared(self._spark, runs, self._directory, self._store, log)
        return found

    def _findings(self, log: Notes) -> list[DataFrame]:
        """List what is wrong with the bytes of the log."""
        faults = list(log.findings())
        found = [self._spark.createDataFrame(faults, _FINDING)] if faults else []
        if any(check.what == "digests" and check.checked for check in self._compared):
            found.append(changed_bytes(self._spark, self._extent))
        return found

    def _names(self) -> DataFrame:
        """Read who transactions are of."""
        register(self._spark)
        return (
            self._spark.read.format(FORMAT)
            .schema(ddl(*NAME_COLUMNS))
            .option("subscribe", f"{HALF_TOPIC},{TRANS_CHECK_MAX_TIME_TOPIC}")
            .option("startingOffsets", str(self._extent.first_offset))
            .option("endingOffsets", str(self._extent.end_offset))  # a broker may be appending
            .option("minPartitions", str(self._partitions))
            .load(self._directory)
        )

    def _log_summary(self, log: Notes) -> LogSummary:
        return LogSummary(
            segments=len(self._extent.segments),
            records=log.records,
            bytes=log.size,
            first_offset=self._extent.first_offset,
            end_offset=self._extent.end_offset,
            tail=self._extent.tail,
        )


def _described(transactions: DataFrame, names: DataFrame) -> DataFrame:
    """Describe every transaction that was prepared in the log, one row each.

    ``names`` is the log with the columns ``schema.NAME_COLUMNS``, of the topics where halves and
    parked messages are.
    """
    return transactions.join(names, F.col("at") == F.col("physicalOffset")).select(
        F.col("uniqKey").alias("transactionId"),
        "producerGroup",
        F.col("realTopic").alias("topic"),
        "state",
        F.col("half").alias("halfOffset"),
        F.col("decided").alias("decisionOffset"),
        F.col("timestamp").alias("preparedAt"),
        F.col("took").alias("decidedAfterMs"),
        "checks",
        F.col("halves").alias("halfMessages"),
    )


def _named(findings: DataFrame, segments: Sequence[Segment]) -> DataFrame:
    """Say of each finding whose it is, and where the bytes are that show it."""
    lookup: list[LogLookup] = []  # made where it is used: it maps files

    def see(kind: str, offsets: list[int], at: int | None) -> tuple[object, ...]:
        if not lookup:
            lookup.append(LogLookup(segments))
        if kind in _RANGES:
            places = [lookup[0].place(offsets[0], end=offsets[1])]
        else:
            places = [lookup[0].place(offset) for offset in offsets]
        return *lookup[0].names(at), [place for place in places if place is not None]

    seen = F.udf(see, f"struct<{_SEEN}>", useArrow=False)
    return findings.withColumn("seen", seen("kind", "offsets", "at")).select(
        "kind", "offsets", "detail", "seen.*"
    )


def _anomalies(named: DataFrame, kinds: Counter[str]) -> list[Anomaly]:
    """Collect anomalies; if they are too many, some of each kind."""
    if not kinds:
        return []
    anomalies = _collected(named.limit(ANOMALIES_MAX))
    for kind in kinds.keys() - {anomaly.kind for anomaly in anomalies}:
        anomalies += _collected(named.where(F.col("kind") == kind).limit(_HIDDEN_MAX))
    return sorted(anomalies, key=lambda anomaly: (anomaly.offsets, anomaly.kind))


def _collected(named: DataFrame) -> list[Anomaly]:
    return [
        Anomaly(kind, whose, offsets, detail, [Place(*place) for place in places], topic, group)
        for kind, offsets, detail, whose, topic, group, places in named.collect()
    ]
