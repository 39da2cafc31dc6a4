"""Run the audit of one directory: read, judge, collect.

The log is read once. Spark caches the result of the scan (``source/scan.py``) on disk: events of a
hundred bytes each, and notes on what else there is. All other steps are queries over that.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from halfmq.store.format.topics import HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC

from ..datasource import register
from ..log.files import location
from ..log.hashes import hash_of
from ..log.log_end import survey
from ..log.lookup import LogLookup, Place
from ..log.segments import LogExtent, Segment
from ..log.store_files import StoreFiles
from ..log.transaction_parts import Part
from ..source.event_source import EVENT_COLUMNS, EVENT_FORMAT, NOTES
from ..source.message_roles import read_log
from ..source.scan import NOTES_TYPE, QUEUE
from ..source.schema import ddl
from . import key_groups, queue_findings, statistics
from .altered_finals import difference
from .checks import DEFAULT_CHECKS, Check, Checks, Remark, checks_of
from .digests import changed_bytes
from .rules.model import FINDING_DDL, AuditedState, Kind, LogBounds
from .scan_summary import ScanSummary
from .statistics import Delays, OpenAges, Timeline
from .verdicts import Keep, Verdicts, verdicts_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANOMALIES_MAX: Final = 100_000  # collected and listed in JSON; the Parquet files have them all
_HIDDEN_MAX: Final = 200  # collected of a kind that a flood of others would hide
_SPREAD_MIN: Final = 16 << 20  # bytes; a smaller log is read fastest by one task

_RANGES: Final = (Kind.GAP, Kind.OVERLAP, Kind.CORRUPT_RECORD)  # their offsets are start and end
_SEEN: Final = (
    "transactionId string, topic string, producerGroup string, difference string,"
    " bytes array<struct<file: string, position: bigint, size: int>>"
)
_OWNER_COLUMNS: Final = ("physicalOffset", "uniqKey", "producerGroup", "realTopic", "timestamp")
_VOID: Final = (str(AuditedState.EXPIRED), str(AuditedState.UNFOUNDED))


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
    tail: str | None  # what follows the end, unless it is unwritten


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

    ``extent`` is what ``survey`` returned for the directory, if the caller has it already.
    ``stage`` is called with a few words when a step begins.

    Raises:
        LogDirectoryError: There is no log to read.
    """
    with ExitStack() as cached:

        def keep(frame: DataFrame) -> DataFrame:
            kept = frame.persist(StorageLevel.DISK_ONLY)
            cached.callback(kept.unpersist)
            return kept

        yield _audit(spark, directory, extent or survey(directory), checks, keep, stage)


def _audit(
    spark: "SparkSession",
    directory: str,
    extent: LogExtent,
    checks: Checks,
    keep: Keep,
    stage: Callable[[str], None],
) -> Audit:
    store = StoreFiles(directory)
    partitions = spark.sparkContext.defaultParallelism if extent.size > _SPREAD_MIN else 1
    stage(f"reading {extent.size:,} bytes of log")
    scan = read_events(spark, directory, extent, checks, partitions=partitions)
    # Of a single partition Spark groups and joins without any shuffle.
    scan = keep(scan if partitions > 1 else scan.coalesce(1))
    noted = scan.where("part is null").select(F.inline("notes"))
    ranges = noted.where(F.col("what") == QUEUE)
    rows = [row.asDict() for row in noted.where(F.col("what") != QUEUE).collect()]
    notes = ScanSummary(rows, extent, store, checks)
    bounds = notes.bounds
    if store.queue_counts is None:
        bounds = bounds._replace(last_in_queues=_last_in_queues(ranges))

    stage("judging what became of transactions")
    verdicts = _verdicts(scan.where("part is not null").drop("notes"), ranges, notes, bounds, keep)
    counts = statistics.counted(statistics.tally(verdicts.transactions, notes.scale), notes.scale)
    prepared = verdicts.transactions.where(~F.col("state").isin(*_VOID))
    delays = statistics.delays(prepared, LogLookup(extent.segments).names)

    stage("comparing queues with the log")
    ranges = keep(ranges)
    log = queue_findings.Log(directory, extent, bounds, store, checks.levels)
    log = log._replace(deleted=queue_findings.deleted_topics(ranges, log))
    found = [
        *verdicts.findings,
        *queue_findings.all_of(ranges, log, compare=checks.queues),
        spark.createDataFrame(list(notes.findings()), FINDING_DDL),
    ]
    compared = checks_of(extent, store, crc=checks.crc, queues=checks.queues)
    if any(check.what == "digests" and check.checked for check in compared):
        found.append(changed_bytes(spark, extent))

    stage("looking up what was found")
    findings = reduce(DataFrame.unionByName, found)
    findings = keep(findings if partitions > 1 else findings.coalesce(1))
    named = named_findings(findings, extent.segments)
    kinds = Counter[str](dict(findings.groupBy("kind").count().collect()))
    return Audit(
        directory=directory,
        log=_summary(notes, extent),
        states=counts.states,
        delays=delays,
        anomalies=_anomalies(named, kinds),
        anomaly_kinds=kinds,
        timeline=counts.timeline,
        open_ages=counts.open_ages,
        describe=lambda: _described(prepared, _owners(spark, directory, extent, partitions)),
        anomaly_rows=named,
        checks=compared,
        remarks=[*notes.clock_steps(), *notes.deleted_topics(log.deleted)],
    )


def _verdicts(
    events: DataFrame, ranges: DataFrame, notes: ScanSummary, bounds: LogBounds, keep: Keep
) -> Verdicts:
    if notes.keyless:
        halves = events.where(F.col("part") == int(Part.HALF))
        linked = keep(key_groups.linked(events.where("key is null"), halves))
        events = events.where("key is not null").unionByName(linked)
    return verdicts_of(
        events,
        ranges.where(F.col("topic") == HALF_TOPIC),
        bounds,
        notes.limits,
        keep,
        has_delays=notes.delays > 0,
        has_keyless=notes.keyless > 0,
    )


def _summary(notes: ScanSummary, extent: LogExtent) -> LogSummary:
    return LogSummary(
        segments=len(extent.segments),
        records=notes.records,
        bytes=notes.size,
        first_offset=extent.first_offset,
        end_offset=extent.end_offset,
        tail=extent.tail,
    )


def _owners(spark: "SparkSession", directory: str, extent: LogExtent, partitions: int) -> DataFrame:
    """Read the halves and parked messages again, for whose they are."""
    options = {"subscribe": f"{HALF_TOPIC},{TRANS_CHECK_MAX_TIME_TOPIC}"}
    return read_log(
        spark, directory, *_OWNER_COLUMNS, extent=extent, partitions=partitions, options=options
    )


def read_events(
    spark: "SparkSession", directory: str, extent: LogExtent, checks: Checks, *, partitions: int
) -> DataFrame:
    """Read the events and notes of a log up to its end when it was surveyed."""
    register(spark)
    columns = ddl(*key_groups.COLUMNS, columns=EVENT_COLUMNS)
    reader = spark.read.format(EVENT_FORMAT).schema(f"{columns}, {NOTES} {NOTES_TYPE}")
    return reader.options(
        endingOffsets=extent.end_offset,
        verifyCrc=checks.crc,
        minPartitions=partitions,
        delayLevels=checks.levels,
    ).load(location(directory))


def _last_in_queues(ranges: DataFrame) -> dict[int, list[tuple[int, int]]]:
    """Find the last record of each queue, by the hash of its topic."""
    rows = (
        ranges.groupBy("topic", "partition")
        .agg(F.max("lastPhysicalOffset").alias("last"))
        .groupBy("topic")
        .agg(F.collect_list(F.struct("partition", "last")))
        .collect()
    )
    return {hash_of(topic): [tuple(one) for one in queues] for topic, queues in rows}


def _described(transactions: DataFrame, owners: DataFrame) -> DataFrame:
    """Describe every transaction that was prepared in the log, one row each.

    ``owners`` is the log with ``_OWNER_COLUMNS``, of the topics of halves and parked messages.
    """
    return transactions.join(owners, F.col("at") == F.col("physicalOffset")).select(
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


def named_findings(findings: DataFrame, segments: Sequence[Segment], *more: str) -> DataFrame:
    """Say of each finding whose it is, and where the bytes are that show it.

    ``more`` names columns that are kept besides.
    """
    lookup: list[LogLookup] = []  # made where it is used: it maps files

    def see(kind: str, offsets: list[int], at: int | None) -> tuple[object, ...]:
        if not lookup:
            lookup.append(LogLookup(segments))
        if kind in _RANGES:
            places = [lookup[0].place(offsets[0], end=offsets[1])]
        else:
            places = [lookup[0].place(offset) for offset in offsets]
        differs = difference(lookup[0], *offsets) if kind == Kind.ALTERED_FINAL else ""
        known = [place for place in places if place is not None]
        return *lookup[0].names(at), f": {differs}" if differs else "", known

    seen = F.udf(see, f"struct<{_SEEN}>", useArrow=False)
    described = findings.withColumn("seen", seen("kind", "offsets", "at"))
    detail = F.concat("detail", "seen.difference").alias("detail")
    return described.select(*more, "kind", "offsets", detail, "seen.*").drop("difference")


def _anomalies(named: DataFrame, kinds: Counter[str]) -> list[Anomaly]:
    """Collect anomalies; if they are too many, some of each kind."""
    if not kinds:
        return []  # without starting a worker
    anomalies = _collected(named.limit(ANOMALIES_MAX))
    for kind in kinds.keys() - {anomaly.kind for anomaly in anomalies}:
        anomalies += _collected(named.where(F.col("kind") == kind).limit(_HIDDEN_MAX))
    return sorted(anomalies, key=lambda anomaly: (anomaly.offsets, anomaly.kind))


def _collected(named: DataFrame) -> list[Anomaly]:
    return [
        Anomaly(kind, whose, offsets, detail, [Place(*place) for place in places], topic, group)
        for kind, offsets, detail, whose, topic, group, places in named.collect()
    ]
