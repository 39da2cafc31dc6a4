"""Run the audit of one directory: read, judge, collect; the functions are in ``audit.py``.

The log is scanned once. What the audit keeps of it is cached by Spark, in memory and then on
disk, and so is what became of the transactions.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from ..datasource import FORMAT, register
from ..log.files import is_remote
from ..log.lookup import Place
from ..log.segments import LogExtent, survey
from ..log.store_files import StoreFiles
from ..source.schema import NAME_COLUMNS, ddl
from . import audit
from .audit_cache import AuditCache
from .checks import Check, Remark
from .digest import Plan, Summary, What
from .digest_source import NAMED_TOPICS, digested, full_segments
from .families import STATES
from .overview import DEFAULT_CHECKS, Checks, Delays, Fault, Overview
from .timeline import OpenAges, Timeline, merged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANOMALIES_MAX: Final = 100_000  # collected and listed in JSON; the Parquet files have them all
_HIDDEN_MAX: Final = 200  # collected of a kind that a flood of others would hide
_SPREAD_MIN: Final = 16 << 20  # bytes; a smaller log is read fastest by one task
# Of log per bucket, in bytes: some 6 MB of events that one task judges. On their way to Python the
# JVM copies them again and again: with 100 MB a heap of 4 GiB was too small for ten million
# records, now 2 GiB are enough.
_BUCKET_BYTES: Final = 32 << 20


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
    scanned_bytes: int = 0  # of the log that were read for this audit; the cache knew the others


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
    transactions: DataFrame
    anomaly_rows: DataFrame
    checks: list[Check] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)

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
    cache: str | None = None,
    stage: Callable[[str], None] = lambda _: None,
) -> Iterator[Audit]:
    """Audit the log in a store root or a folder of segments; Spark keeps rows while it lasts.

    ``extent`` is what ``survey`` said of the directory, for a caller who knows it already.
    ``cache`` is a folder of its own for this log, where all workers can write: segments that are
    full and known from an earlier audit are not read again.
    ``stage`` is told what begins, in a few words.

    Raises:
        LogDirectoryError: There is no log to read.
        CacheError: The cache cannot be read or written.
    """
    extent = extent or survey(directory)
    with ExitStack() as cached:

        def keep(frame: DataFrame) -> DataFrame:
            kept = frame.persist()
            cached.callback(kept.unpersist)
            return kept

        yield _Auditor(spark, directory, extent, checks, cache, keep, stage).run()


class _Auditor:
    """One run; its steps are its methods, in their order."""

    def __init__(
        self,
        spark: "SparkSession",
        directory: str,
        extent: LogExtent,
        checks: Checks,
        cache: str | None,
        keep: Callable[[DataFrame], DataFrame],
        stage: Callable[[str], None],
    ) -> None:
        self._spark = spark
        self._directory = directory
        self._extent = extent
        self._checks = checks
        self._cache = str(Path(cache).absolute()) if cache else None
        self._keep = keep
        self._stage = stage
        self._store = StoreFiles(directory)
        cores = spark.sparkContext.defaultParallelism
        self._partitions = cores if extent.size > _SPREAD_MIN else 1
        self._buckets = max(self._partitions, extent.size // _BUCKET_BYTES)

    def run(self) -> Audit:
        self._stage(f"reading {self._extent.size:,} bytes of log")
        digest = self._keep(self._digest())
        log = Overview(self._extent, self._store, _summaries(digest), self._checks)
        rows = self._with_links(digest, log)
        self._stage("judging what became of transactions")
        scale = log.scale
        verdicts = self._keep(audit.judged(rows, log.bounds, log.terms, scale))
        told = verdicts.select(
            "states", F.size("findings").alias("findings"), "latencies", "checks", "times"
        ).collect()
        timeline, open_ages = merged((bytes(row["times"]) for row in told), scale)
        # A part that is known to be empty is left out: each costs Spark a second to plan.
        found = [self._as_findings(list(log.faults()))]
        if any(summary.faults + summary.ops_elsewhere for summary in log.summaries):
            found.append(audit.faults(rows, log.restarts()))
        if any(row["findings"] for row in told):
            found.append(audit.found(verdicts))
        self._stage("looking up what was found")
        named = audit.named(reduce(DataFrame.unionByName, found), self._extent.segments)
        anomalies, kinds = _anomalies(named)
        return Audit(
            directory=self._directory,
            log=self._log_summary(log.summaries),
            states=_states(told),
            delays=log.delays(
                [bytes(row["latencies"]) for row in told], [bytes(row["checks"]) for row in told]
            ),
            anomalies=anomalies,
            anomaly_kinds=kinds,
            timeline=timeline,
            open_ages=open_ages,
            transactions=audit.transactions(verdicts, self._names(log.summaries)),
            anomaly_rows=named,
        )

    def _digest(self) -> DataFrame:
        queues = self._store.consume_queues if self._checks.queues else None
        if self._cache is not None:
            AuditCache(self._cache).forget_before(self._extent.first_offset)
        plan = Plan(self._buckets, self._checks.crc, str(queues) if queues else None, self._cache)
        return digested(self._spark, self._extent, plan, partitions=self._partitions)

    def _with_links(self, digest: DataFrame, log: Overview) -> DataFrame:
        """Add the events whose half is in another split than they are."""
        rows = digest
        if any(summary.ops_elsewhere for summary in log.summaries):
            linked = audit.linked(digest, log.lost_places, self._buckets)
            rows = rows.unionByName(self._keep(linked))
        if any(summary.linked_elsewhere for summary in log.summaries):
            packed = digest.where(F.col("what") == int(What.LINKED)).select("packed").collect()
            more = audit.linked_by_hand([row["packed"] for row in packed], log, self._buckets)
            rows = rows.unionByName(self._spark.createDataFrame(more, digest.schema))
        return rows

    def _as_findings(self, faults: Sequence[Fault]) -> DataFrame:
        rows = [(str(kind), *rest) for kind, *rest in faults]
        return self._spark.createDataFrame(rows, audit.FINDING)

    def _names(self, summaries: Sequence[Summary]) -> DataFrame:
        """Read who transactions are of, from the log as far as it is not in the cache."""
        files = [summary.names for summary in summaries if summary.names is not None]
        if not files:
            return self._names_from(self._extent.first_offset)
        paths = [Path(file).as_uri() for file in files]
        cached = self._spark.read.schema(ddl(*NAME_COLUMNS)).parquet(*paths)
        _, rest = full_segments(self._extent)
        if not rest.segments:
            return cached
        return cached.unionByName(self._names_from(rest.first_offset))

    def _names_from(self, offset: int) -> DataFrame:
        register(self._spark)
        directory = self._directory
        return (
            self._spark.read.format(FORMAT)
            .schema(ddl(*NAME_COLUMNS))
            .option("subscribe", ",".join(NAMED_TOPICS))
            .option("startingOffsets", str(offset))
            .option("endingOffsets", str(self._extent.end_offset))  # a broker may be appending
            .option("minPartitions", str(self._partitions))
            .load(directory if is_remote(directory) else str(Path(directory).absolute()))
        )

    def _log_summary(self, summaries: Sequence[Summary]) -> LogSummary:
        return LogSummary(
            segments=len(self._extent.segments),
            records=sum(summary.records for summary in summaries),
            bytes=sum(summary.size for summary in summaries),
            first_offset=self._extent.first_offset,
            end_offset=self._extent.end_offset,
            tail=self._extent.tail,
            scanned_bytes=sum(summary.scanned for summary in summaries),
        )


def _summaries(digest: DataFrame) -> list[Summary]:
    """Collect what each split says of itself; this is the one scan of the log."""
    rows = digest.where(F.col("what") == int(What.SUMMARY)).select("packed").collect()
    return [Summary.unpack(row["packed"]) for row in rows]


def _states(told: Sequence[Row]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for row in told:
        counted.update({str(s): n for s, n in zip(STATES, row["states"], strict=True) if n})
    return counted


def _anomalies(named: DataFrame) -> tuple[list[Anomaly], Counter[str]]:
    """Collect anomalies, and count all by kind, also those that are too many to collect."""
    anomalies = _collected(named.limit(ANOMALIES_MAX))
    kinds = Counter(anomaly.kind for anomaly in anomalies)
    if len(anomalies) == ANOMALIES_MAX:
        counts = named.groupBy("kind").agg(F.count("*").alias("count")).collect()
        for row in counts:
            if row["kind"] not in kinds:
                of_it = named.where(F.col("kind") == row["kind"])
                anomalies += _collected(of_it.limit(_HIDDEN_MAX))
        kinds = Counter({row["kind"]: row["count"] for row in counts})
    return sorted(anomalies, key=lambda anomaly: (anomaly.offsets, anomaly.kind)), kinds


def _collected(named: DataFrame) -> list[Anomaly]:
    return [
        Anomaly(kind, whose, offsets, detail, [Place(*place) for place in places])
        for kind, whose, offsets, detail, places in named.collect()
    ]
