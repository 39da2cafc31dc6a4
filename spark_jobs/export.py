"""Exports messages to Parquet, or to a table of Delta or Iceberg, each exactly once.

The log is exported range by range, mostly a segment at a time; ``manifest.py`` tells how a range
is made known so that no kill repeats or loses it. Segments that are full never change. The one
that the broker is still writing is left for later, unless ``active`` asks for its whole records
too; what is added to it afterwards is a further range.

``exported`` alone, from DataFrame to DataFrame, is for notebooks.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyarrow import parquet
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from .errors import ExportError
from .log.lookup import LogLookup
from .log.segments import LogExtent
from .manifest import (
    DONE,
    FOLDER,
    STAGED,
    WRITTEN,
    ExportFolder,
    LastRecord,
    Manifest,
    Range,
    sync_file,
)
from .roles import read_log, role
from .source.columns import CORRUPT, MESSAGE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS: Final = (
    "topic",
    "partition",
    "offset",
    "timestamp",
    "physicalOffset",
    "key",
    "tags",
    "uniqKey",
    "value",
    "crcOk",
    "flag",
    "sysFlag",
    "bornTimestamp",
    "bornHost",
    "storeHost",
    "reconsumeTimes",
    "preparedTransactionOffset",
    "transactionType",
    "properties",
    "error",
)
# Needed on the way, and not exported.
_BESIDE: Final = ("recordType", "size", "bodyCrc")
PARTITIONED_BY: Final = ("topic", "date")
PARQUET: Final = "parquet"
ICEBERG: Final = "iceberg"
FORMATS: Final = (PARQUET, "delta", ICEBERG)
_NO_SUCH_FORMAT: Final = "DATA_SOURCE_NOT_FOUND"  # Spark's name for this error
_DAY_MS: Final = 86_400_000
_PACKAGES: Final = {
    "delta": "io.delta:delta-spark_2.13:VERSION",
    "iceberg": "org.apache.iceberg:iceberg-spark-runtime-SPARK_2.13:VERSION",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is exported how; the same in every run into one directory."""

    topics: tuple[str, ...] | None = None  # None: all but the broker's own, retries, dead letters
    format: str = PARQUET
    decompress: bool = False  # bodies that their producer has compressed


class Outcome(NamedTuple):
    """What one run has done."""

    ranges: list[Range]  # that it has exported
    missing: list[tuple[int, int]]  # offsets that had left the log before they were exported
    left: int  # bytes of the active segment that are for a later run

    @property
    def is_clean(self) -> bool:
        """Whether everything that should be there is, and is sound."""
        damaged = (one.damaged_bytes + one.bad_crcs + one.bad_bodies for one in self.ranges)
        return not self.missing and not any(damaged)


def exported(records: DataFrame, topics: Sequence[str] | None = None) -> DataFrame:
    """Choose the rows and columns that an export has.

    ``records`` is a log with ``COLUMNS`` and ``recordType``. Without ``topics`` it is all that
    consumers see, without retries and dead letters. ``date`` is the day of storing in UTC.
    """
    # Counted in days, so that it does not depend on the time zone of the session.
    days = F.floor(F.unix_millis("timestamp") / F.lit(_DAY_MS)).cast("int")
    return records.where(_is_wanted(topics)).select(
        *COLUMNS, F.date_add(F.lit("1970-01-01").cast("date"), days).alias("date")
    )


def _is_wanted(topics: Sequence[str] | None) -> Column:
    if topics is None:
        return role() == MESSAGE
    return (F.col("recordType") == MESSAGE) & F.col("topic").isin(*topics)


class Export:
    """One export into one directory, over as many runs as it takes."""

    def __init__(
        self,
        directory: str,
        output: Path,
        settings: Settings,
        stage: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``stage`` is told what begins, in a few words."""
        self._directory = directory
        self._settings = settings
        self._stage = stage
        self._folder = ExportFolder(output.absolute())

    def run(
        self,
        extent: LogExtent,
        session: "Callable[[], SparkSession]",
        *,
        active: bool = False,
    ) -> Outcome:
        """Export what is not exported yet; ``session`` is called only when there is something.

        Raises:
            ExportError: The directory holds something else, or an export of another log or with
                other settings; another export is running; there is no such format.
        """
        with self._folder.locked():
            manifest = self._begun()
            settled = len([one for one in manifest.ranges if one.state == DONE])
            end = manifest.ranges[settled - 1].end if settled else None
            if settled < len(manifest.ranges):
                self._settle(manifest, session)
            self._check_log(manifest, extent)
            for part in list(unexported(extent, manifest.end, active=active)):
                spark = session()
                self._stage(f"exporting offsets {part.start} to {part.end}")
                self._export(spark, manifest, part)
            shutil.rmtree(self._folder.staging, ignore_errors=True)
            done = manifest.ranges[settled:]
            return Outcome(done, _gaps(end, done), _left(extent, manifest))

    # --- the steps of a run

    def _begun(self) -> Manifest:
        settings = {
            "topics": None if self._settings.topics is None else list(self._settings.topics),
            "format": self._settings.format,
            "decompress": self._settings.decompress,
            "columns": [*COLUMNS, "date"],
        }
        manifest = self._folder.load()
        if manifest is None:
            found = [path.name for path in self._folder.home.iterdir() if path.name != FOLDER]
            if found:
                raise self._error(f"holds {min(found)}, and is no export of this job")
            return Manifest(settings)
        for name, value in settings.items():
            if manifest.settings.get(name) != value:
                begun = manifest.settings.get(name)
                raise self._error(
                    f"the export was begun with {name} = {begun}, not {value}: go on with the same,"
                    " or into another directory"
                )
        return manifest

    def _settle(self, manifest: Manifest, session: "Callable[[], SparkSession]") -> None:
        """Bring the last range to an end, which a kill has left in between."""
        last = manifest.ranges.pop()
        if last.state == STAGED:
            self._publish(manifest, last)
        elif rows := self._rows_in_table(session(), last):
            self._keep(manifest, replace(last, state=DONE, rows=rows))

    def _check_log(self, manifest: Manifest, extent: LogExtent) -> None:
        """Make sure that the log is the one that the export is of."""
        end = manifest.end
        if end is None:
            return
        if end > extent.end_offset:
            raise self._error(
                f"offsets up to {end} are exported, and the log ends at {extent.end_offset}: it was"
                " cut, or is another one"
            )
        last = next((one.last for one in reversed(manifest.ranges) if one.last), None)
        if last is None or last.offset < extent.first_offset:
            return
        record = LogLookup(extent.segments).record(last.offset)
        stored = None if record is None else int(record.field("store_timestamp")[0])
        if stored != last.stored_ms:
            raise self._error(
                f"at offset {last.offset} the log has not the record that was exported: it was"
                " cut, or is another one"
            )

    def _export(self, spark: "SparkSession", manifest: Manifest, part: Range) -> None:
        seen = Observation()
        rows = self._rows(spark, part, seen)
        if self._settings.format == PARQUET:
            self._write_staged(rows)
            self._publish(manifest, self._staged(part, seen))
        else:
            if not self._has_table(spark) and self._settings.format == ICEBERG:
                self._make_iceberg_table(spark, rows)
            self._keep(manifest, part)
            rows.write.format(self._settings.format).partitionBy(*PARTITIONED_BY).mode(
                "append"
            ).save(str(self._folder.home))
            manifest.ranges.pop()
            self._keep(manifest, replace(_counted(part, seen), state=DONE))

    def _rows(self, spark: "SparkSession", part: Range, seen: Observation) -> DataFrame:
        options: dict[str, object] = {
            "startingOffsets": part.start,
            "endingOffsets": part.end,
            "includeValue": "true",
            "verifyCrc": "true",
        }
        if self._settings.decompress:
            options["decompress"] = "true"
        if self._settings.topics is not None:
            options["subscribe"] = ",".join(self._settings.topics)
        records = read_log(
            spark,
            self._directory,
            *COLUMNS,
            *_BESIDE,
            partitions=spark.sparkContext.defaultParallelism,
            options=options,
        )
        topics = self._settings.topics
        return exported(records.observe(seen, *_measures(_is_wanted(topics))), topics)

    def _write_staged(self, rows: DataFrame) -> None:
        shutil.rmtree(self._folder.staging, ignore_errors=True)
        rows.write.partitionBy(*PARTITIONED_BY).parquet(str(self._folder.staging))

    def _staged(self, part: Range, seen: Observation) -> Range:
        """Say which files of the staging folder go where, and make sure that they are all."""
        staging = self._folder.staging
        paths = sorted(staging.rglob("*.parquet"))
        files = {}
        for number, path in enumerate(paths):
            source = path.relative_to(staging)
            name = f"{part.start:020}-{number:05}.parquet"
            files[str(source)] = str(source.with_name(name))
            sync_file(path)
        counted = replace(_counted(part, seen), state=STAGED, files=files)
        written = sum(parquet.read_metadata(path).num_rows for path in paths)
        if written != counted.rows:
            raise self._error(f"Spark wrote {written} rows of {counted.rows}")
        return counted

    def _publish(self, manifest: Manifest, staged: Range) -> None:
        self._keep(manifest, staged)
        self._folder.publish(staged)
        manifest.ranges.pop()
        self._keep(manifest, replace(staged, state=DONE))

    def _keep(self, manifest: Manifest, one: Range) -> None:
        manifest.ranges.append(one)
        self._folder.save(manifest)

    # --- tables

    def _has_table(self, spark: "SparkSession") -> bool:
        """Tell whether there is a table already, in a format that the session has."""
        name = self._settings.format
        try:
            spark.read.format(name).load(str(self._folder.home))
        except (PySparkException, Py4JError) as error:
            if _NO_SUCH_FORMAT in str(error):
                raise self._error(
                    f"this Spark has no format {name}: start it with the package"
                    f" {_PACKAGES.get(name, 'of it')}, as spark-submit --packages does"
                ) from error
            return False
        return True

    def _make_iceberg_table(self, spark: "SparkSession", rows: DataFrame) -> None:
        """Make a table without a catalog; unlike others, Iceberg makes none when it is written to.

        Source: Iceberg's Java API, ``HadoopTables.create``.
        """
        jvm = spark._jvm  # noqa: SLF001  there is no other way to Iceberg's classes
        iceberg = jvm.org.apache.iceberg  # type: ignore[union-attr]
        schema = iceberg.spark.SparkSchemaUtil.convert(rows._jdf.schema())  # noqa: SLF001
        partitions = iceberg.PartitionSpec.builderFor(schema)
        for column in PARTITIONED_BY:
            partitions = partitions.identity(column)
        hadoop = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001
        tables = iceberg.hadoop.HadoopTables(hadoop)
        tables.create(schema, partitions.build(), str(self._folder.home))

    def _rows_in_table(self, spark: "SparkSession", part: Range) -> int:
        """Count the rows of a range that may or may not have been committed; all or none are."""
        if not self._has_table(spark):
            return 0
        try:
            table = spark.read.format(self._settings.format).load(str(self._folder.home))
            at = F.col("physicalOffset")
            return table.where((at >= part.start) & (at < part.end)).count()
        except AnalysisException:  # there is no table yet
            return 0

    def _error(self, reason: str) -> ExportError:
        return ExportError(str(self._folder.home), reason)


def unexported(extent: LogExtent, end: int | None, *, active: bool = False) -> Iterator[Range]:
    """List the parts of a log behind ``end``; of the last segment only if it is full or ``active``.

    A part of it ends behind a whole record.
    """
    for segment in extent.segments:
        limit = extent.limit(segment)
        is_full = segment != extent.segments[-1] or limit == segment.size
        start = segment.base if end is None else max(segment.base, end)
        if start < segment.base + limit and (is_full or active):
            yield Range(start=start, end=segment.base + limit, segment=segment.base, state=WRITTEN)


def _measures(is_wanted: Column) -> list[Column]:
    """Return what is counted while a range is read."""
    is_wanted = F.coalesce(is_wanted, F.lit(False))
    is_damaged = F.col("recordType") == CORRUPT
    last = F.struct("physicalOffset", F.unix_millis("timestamp"), "bodyCrc")
    at = F.when(is_wanted, F.col("physicalOffset"))
    return [
        F.count_if(is_wanted).alias("rows"),
        F.count_if(is_wanted & ~F.col("crcOk")).alias("bad_crcs"),
        F.count_if(is_wanted & F.col("error").isNotNull()).alias("bad_bodies"),
        F.coalesce(F.sum(F.when(is_damaged, F.col("size"))), F.lit(0)).alias("damaged_bytes"),
        F.max_by(last, at).alias("last"),
    ]


def _counted(part: Range, seen: Observation) -> Range:
    told: dict[str, Any] = seen.get
    last = told["last"]
    return replace(
        part,
        rows=told["rows"],
        bad_crcs=told["bad_crcs"],
        bad_bodies=told["bad_bodies"],
        damaged_bytes=told["damaged_bytes"],
        last=None if last is None else LastRecord(*last),
    )


def _gaps(end: int | None, done: Sequence[Range]) -> list[tuple[int, int]]:
    """List what lies between ranges: it had left the log before it could be exported."""
    gaps = []
    for one in done:
        if end is not None and end < one.start:
            gaps.append((end, one.start))
        end = one.end
    return gaps


def _left(extent: LogExtent, manifest: Manifest) -> int:
    end = extent.first_offset if manifest.end is None else manifest.end
    return max(0, extent.end_offset - end)
