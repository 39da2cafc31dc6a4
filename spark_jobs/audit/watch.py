"""Audit a log while it is being written: a stream that tells what is found, and what is resolved.

Each micro-batch of the source ``rocketmq-transactions`` is judged by the rules of the audit. They
are applied to the key groups that may have changed: those with new events, and the *open* ones, of
which the rules may say otherwise once the log is longer. So the verdict after a batch is that of an
audit of the same bytes.

The folder of a watch holds::

    checkpoint/        Spark's: up to where the log was read
    batches/NUMBER/    what the next batch goes on with: the events of open groups, records that
                       name a half not yet found, the findings that stand, and ``log.json``
    decided/           the events of decided groups; ``FIRST-LAST`` says of which batches
    findings/, json/   what each batch told, as Parquet and as JSON lines
    metrics.prom       for Prometheus, by the textfile collector of its node exporter

A batch reads what earlier ones wrote, and writes under its own number. If it is repeated after a
crash, it has the same records, and replaces what it had written.

Decided groups are looked up whenever the log has one of their keys again. For that, only the column
of keys is read of all of them.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from ..datasource import register
from ..log.files import location
from ..log.follow import batch_end
from ..log.lookup import LogLookup
from ..log.segments import find_segments
from ..log.store_files import StoreFiles
from ..log.transaction_parts import Part
from ..source.event_source import EVENT_COLUMNS, EVENT_FORMAT, NOTES
from ..source.options import path_of
from ..source.scan import NOTES_TYPE
from ..source.schema import ddl
from .auditor import named_findings
from .checks import Checks
from .key_groups import COLUMNS, linked
from .rules.model import FINDING_DDL
from .statistics import OPEN
from .verdicts import Keep, Verdicts, verdicts_of
from .watched_log import WatchedLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_BATCH_BYTES: Final = 256 << 20  # of log per batch; bounds what Spark keeps and what a kill repeats
MERGED: Final = 32  # folders of decided groups that become one
_FILE_ROWS: Final = 4_000_000  # of one file of them, which is read whole for one of its groups
_EVENTS: Final = ddl(*COLUMNS, columns=EVENT_COLUMNS)
_OPEN: Final = f"{_EVENTS}, isStored boolean"  # whether ``decided/`` has the event, too
_STANDING: Final = (
    "id string, kind string, offsets array<bigint>, detail string, transactionId string,"
    " topic string, producerGroup string"
)
_IN_JSON: Final = {"transactionId": "transaction_id", "producerGroup": "group"}
_RANGES: Final = (
    "partition int, offset bigint, endOffset bigint, physicalOffset bigint,"
    " lastPhysicalOffset bigint"
)
_IS_HALF: Final = f"part = {int(Part.HALF)}"


class Watch:
    """One watch over one log, over any number of runs."""

    def __init__(
        self, directory: str, home: Path, checks: Checks, tell: Callable[[str], None]
    ) -> None:
        """``tell`` gets each finding as a line of JSON when its batch is judged."""
        self._directory = directory
        self._home = home
        self._checks = checks
        self._tell = tell
        self._decided = _Decided(home / "decided")

    def run(self, spark: "SparkSession", *, every: timedelta | None) -> None:
        """Judge what is new at such intervals; None: once, up to the end of the log."""
        register(spark)
        reader = spark.readStream.format(EVENT_FORMAT).schema(f"{_EVENTS}, {NOTES} {NOTES_TYPE}")
        scan = reader.options(
            startingOffsets="earliest",
            verifyCrc=self._checks.crc,
            delayLevels=self._checks.levels,
            failOnDataLoss=False,  # what is missing is a finding
            maxBytesPerTrigger=_BATCH_BYTES,
        ).load(location(self._directory))
        writer = scan.writeStream.foreachBatch(self._batch)
        writer = writer.option("checkpointLocation", str(self._home / "checkpoint"))
        if every is None:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{every.total_seconds():.0f} seconds")
        writer.start().awaitTermination()

    def standing(self, spark: "SparkSession") -> DataFrame:
        """Return the findings that were told and not resolved."""
        numbers = [int(place.name) for place in (self._home / "batches").glob("[0-9]*")]
        return self._read(spark, max(numbers, default=0), "standing", _STANDING)

    def _batch(self, scan: DataFrame, number: int) -> None:
        spark = scan.sparkSession
        with ExitStack() as cached:

            def keep(frame: DataFrame) -> DataFrame:
                kept = frame.persist(StorageLevel.MEMORY_AND_DISK)
                cached.callback(kept.unpersist)
                return kept

            scan = keep(scan)
            log = self._log(scan, number)
            summary = log.summary(StoreFiles(self._directory), self._checks)
            bounds, limits = log.bounds(summary), summary.limits
            self._decided.merge(spark, number)
            events, unlinked = self._events(scan, number, keep, all_again=log.rules_change(bounds))
            to_judge = events.drop("isStored").unionByName(unlinked)
            half_ranges = spark.createDataFrame(log.half_ranges, _RANGES)
            verdicts = verdicts_of(to_judge, half_ranges, bounds, limits, keep)
            open_keys = F.broadcast(keep(verdicts.open_keys.distinct()))
            is_new = ~F.col("isStored")
            decided = events.where(is_new).join(open_keys, "key", "left_anti").select(*COLUMNS)
            self._write(events.join(open_keys, "key", "left_semi"), number, "open")
            self._write(unlinked, number, "unlinked")
            self._decided.write(decided, number)
            findings = [
                *verdicts.findings,
                spark.createDataFrame([*summary.findings()], FINDING_DDL),
            ]
            self._compare(reduce(DataFrame.unionByName, findings), log, number, keep)
            log.save(self._place(number) / "log.json")
            self._measure(verdicts, log, limits.newest_ms, number)
        for old in (self._home / "batches").glob("[0-9]*"):
            if int(old.name) < number - 1:
                shutil.rmtree(old)

    def _log(self, scan: DataFrame, number: int) -> WatchedLog:
        """Return what is known of the log at the end of a batch."""
        before = self._place(number - 1) / "log.json"
        log = WatchedLog.load(before) if number else WatchedLog()
        notes = scan.where("part is null").select(F.inline("notes")).collect()
        end = batch_end(self._home / "checkpoint", number)
        log.add((note.asDict() for note in notes), find_segments(self._directory), end)
        return log

    def _events(
        self, scan: DataFrame, number: int, keep: Keep, *, all_again: bool
    ) -> tuple[DataFrame, DataFrame]:
        """Return all events of the groups to judge, and records that name a half not yet found."""
        spark = scan.sparkSession
        fresh = scan.where("part is not null").select(*COLUMNS)
        opened = self._read(spark, number - 1, "open", _OPEN)
        decided = self._decided.read(spark, number)
        keyless = keep(fresh.where("key is null"))
        named = [F.struct(F.min(name), F.max(name)) for name in ("halfQueueOffset", "halfOffset")]
        ((slots, offsets),) = keyless.agg(*named).collect()
        halves = fresh.unionByName(opened.where("not isStored").select(*COLUMNS)).where(_IS_HALF)
        # Ops come seconds after their halves: Parquet skips all that lies farther back.
        near = F.col("halfQueueOffset").between(*slots) | F.col("physicalOffset").between(*offsets)
        halves = halves.unionByName(decided.where(_IS_HALF).where(near))
        before = self._read(spark, number - 1, "unlinked", _EVENTS)
        found = keep(linked(keyless.unionByName(before), halves))
        has_key = F.col("key").isNotNull()
        new = keep(fresh.where(has_key).unionByName(found.where(has_key)))
        open_keys = F.broadcast(opened.select("key").distinct())
        if all_again:
            again = decided.join(open_keys, "key", "left_anti")
        else:
            keys = keep(new.select("key").distinct().join(open_keys, "key", "left_anti"))
            again = self._decided.of_keys(spark, number, F.broadcast(keys))
        stored = F.lit(True).alias("isStored"), F.lit(False).alias("isStored")
        events = opened.unionByName(again.select(*COLUMNS, stored[0]))
        return keep(events.unionByName(new.select(*COLUMNS, stored[1]))), found.where(~has_key)

    def _compare(self, found: DataFrame, log: WatchedLog, number: int, keep: Keep) -> None:
        """Compare findings with those that stand; write and tell the differences."""
        alike = Window.partitionBy("kind", "offsets").orderBy("detail")
        found = found.coalesce(1).withColumn("nth", F.row_number().over(alike))
        identity = F.concat_ws(" ", "kind", F.col("offsets").cast("array<string>"), "nth")
        found = keep(found.withColumn("id", F.substring(F.sha2(identity, 256), 1, 16)))
        before = keep(self._read(found.sparkSession, number - 1, "standing", _STANDING))
        new = found.join(before.select("id"), "id", "left_anti")
        new = keep(named_findings(new, log.extent.segments, "id").drop("bytes"))
        still = before.join(found.select("id"), "id", "left_semi")
        gone = before.join(found.select("id"), "id", "left_anti")
        self._write(still.unionByName(new), number, "standing")
        told = keep(
            new.withColumn("event", F.lit("found"))
            .unionByName(gone.withColumn("event", F.lit("resolved")))
            .orderBy("event", "offsets", "kind")
            .coalesce(1)
        )
        places = [self._home / name / f"batch={number:09}" for name in ("findings", "json")]
        for place in places:
            shutil.rmtree(place, ignore_errors=True)  # what a repeated batch had written
        if told.isEmpty():
            return
        told.write.parquet(str(places[0]))
        lines = told.withColumnsRenamed(_IN_JSON).write.option("ignoreNullFields", "false")
        lines.json(str(places[1]))
        for file in sorted(places[1].glob("*.json")):
            for line in file.read_text("utf-8").splitlines():
                self._tell(line)

    def _measure(self, verdicts: Verdicts, log: WatchedLog, newest_ms: int, number: int) -> None:
        """Write the metrics after a batch."""
        registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"halfmq_audit_{name}", text, labels, registry=registry)

        segments = find_segments(self._directory)
        following = LogLookup(segments).record(log.end_offset)
        waits = 0.0 if following is None else time.time() - following.store_timestamp / 1_000
        gauge("unjudged_age_seconds", "age of the oldest record not yet judged; 0: none").set(waits)
        gauge("judged_offset", "physical offset up to which the log is judged").set(log.end_offset)
        newest = gauge("judged_timestamp_seconds", "when the last judged record was stored")
        newest.set(newest_ms / 1_000)
        transactions = gauge("open_transactions", "transactions nobody has decided", "state")
        states = verdicts.transactions.where(F.col("state").isin(*OPEN)).groupBy("state").count()
        for state, count in {**dict.fromkeys(map(str, OPEN), 0), **dict(states.collect())}.items():
            transactions.labels(state).set(count)
        findings = gauge("findings", "findings that stand", "kind")
        standing = self._read(states.sparkSession, number, "standing", _STANDING)
        for kind, count in standing.groupBy("kind").count().collect():
            findings.labels(kind).set(count)
        write_to_textfile(str(self._home / "metrics.prom"), registry)

    def _place(self, number: int) -> Path:
        return self._home / "batches" / f"{number:09}"

    def _write(self, frame: DataFrame, number: int, name: str) -> None:
        frame.coalesce(1).write.mode("overwrite").parquet(str(self._place(number) / name))

    def _read(self, spark: "SparkSession", number: int, name: str, columns: str) -> DataFrame:
        return _read(spark, [self._place(number) / name], columns)


class _Span(NamedTuple):
    """A folder with what batches from ``first`` to ``last`` decided."""

    first: int
    last: int
    path: Path


class _Decided:
    """The events of decided groups, in folders that are merged as they become many."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def write(self, events: DataFrame, number: int) -> None:
        """Store what a batch has decided."""
        events.coalesce(1).write.mode("overwrite").parquet(self._path(number, number))

    def read(self, spark: "SparkSession", number: int) -> DataFrame:
        """Return what batches before ``number`` have decided."""
        return _read(spark, [span.path for span in self._before(number)], _EVENTS)

    def of_keys(self, spark: "SparkSession", number: int, keys: DataFrame) -> DataFrame:
        """Return the events of some groups: a look at all keys, then at the files that have one."""
        if not any(self._before(number)):
            return _read(spark, [], _EVENTS)
        found = self.read(spark, number).select("key", "_metadata.file_path")
        files = found.join(keys, "key", "left_semi").select("file_path").distinct().collect()
        events = _read(spark, [path_of(file) for (file,) in files], _EVENTS)
        return events.join(keys, "key", "left_semi")

    def merge(self, spark: "SparkSession", number: int) -> None:
        """Merge folders if enough of one width have come together; all are of earlier batches."""
        width = MERGED
        while number and number % width == 0:
            parts = [span.path for span in self._before(number) if span.first >= number - width]
            if len(parts) > 1:  # else it was done before a crash
                merged = _read(spark, parts, _EVENTS).write.option("maxRecordsPerFile", _FILE_ROWS)
                merged.mode("overwrite").parquet(self._path(number - width, number - 1))
            width *= MERGED
        for span in {*self._spans()} - {*self._before(number)}:
            if span.last < number:
                shutil.rmtree(span.path)

    def _path(self, first: int, last: int) -> str:
        return str(self._place / f"{first:09}-{last:09}")

    def _before(self, number: int) -> Iterator[_Span]:
        """Yield the folders of earlier batches; a merged one stands for its parts."""
        end = -1
        for span in sorted(self._spans(), key=lambda span: (span.first, -span.last)):
            if end < span.first and span.last < number:
                yield span
                end = span.last

    def _spans(self) -> Iterator[_Span]:
        """Yield all folders that were written to their end."""
        for done in self._place.glob("*-*/_SUCCESS"):
            first, last = map(int, done.parent.name.split("-"))
            yield _Span(first, last, done.parent)


def _read(spark: "SparkSession", places: Sequence[Path | str], columns: str) -> DataFrame:
    """Read Parquet; what is not there has no rows."""
    there = [str(place) for place in places if Path(place).exists()]
    if not there:
        return spark.createDataFrame([], columns)
    return spark.read.schema(columns).parquet(*there)
