"""The job ``export``: messages as Parquet files, each exactly once.

An export is a Spark stream of the log into Spark's file sink that ends at the end of the log
(``availableNow``). The stream's checkpoint and the sink's list of files, ``_spark_metadata``, make
each message arrive once, whatever ends a run: Spark reads the listed files only. Files of a batch
that was never finished are removed at the end of the next run, for readers that do not know the
list.

``exported`` maps a DataFrame to a DataFrame, for notebooks and for streams into other sinks.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from ..datasource import FORMAT, register
from ..errors import PlaceError
from ..log.files import location
from ..log.follow import OFFSET, batch_end
from ..log.log_end import survey
from ..log.segments import LogExtent
from ..report.tables import fact, listing
from ..source.columns import CORRUPT, MESSAGE
from ..source.message_roles import role
from ..source.schema import ddl
from .command import CLEAN, FINDINGS, add_job, running
from .output import held, probe_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .command import Jobs

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
_NOT_EXPORTED: Final = ("recordType", "size")  # needed to choose and count rows
PARTITIONED_BY: Final = ("topic", "date")
_DAY_MS: Final = 86_400_000
_BATCH_BYTES: Final = 1 << 30  # of log per batch, as in a segment; a kill repeats less than that
_BATCHES_MAX: Final = 10_000  # counted in one run
FOLDER: Final = "_halfmq"  # readers of Parquet skip names that begin with an underscore
_SINK_LOG: Final = "_spark_metadata"


def exported(records: DataFrame, topics: Sequence[str] | None = None) -> DataFrame:
    """Select the rows and columns of an export.

    ``records`` is a log with ``COLUMNS`` and ``recordType``. Without ``topics``, all messages that
    consumers see are selected, except retries and dead letters. ``date`` is the UTC day on which
    the broker stored the message.
    """
    # Counted in days, so it does not depend on the time zone of the session.
    days = F.floor(F.unix_millis("timestamp") / F.lit(_DAY_MS)).cast("int")
    return records.where(_is_wanted(topics)).select(
        *COLUMNS, F.date_add(F.lit("1970-01-01").cast("date"), days).alias("date")
    )


def _is_wanted(topics: Sequence[str] | None) -> Column:
    if topics is None:
        return role() == MESSAGE
    return (F.col("recordType") == MESSAGE) & F.col("topic").isin(*topics)


class Export:
    """One export into one directory, over any number of runs."""

    def __init__(
        self,
        directory: str,
        output: Path,
        *,
        topics: Sequence[str] | None = None,
        decompress: bool = False,
    ) -> None:
        """Export ``topics``, or all but the broker's own, retries and dead letters.

        ``decompress`` unpacks bodies that producers compressed.
        """
        self._directory = directory
        self._topics = None if topics is None else sorted(set(topics))
        self._decompress = decompress
        self._home = output.absolute()
        self._checkpoint = self._home / FOLDER / "checkpoint"

    def run(
        self, spark: "SparkSession", extent: LogExtent, *, active: bool = False
    ) -> dict[str, Any]:
        """Export what is not exported yet, inside of ``opened``.

        Returns the results as JSON: ``rows`` exported; ``ranges`` of the log, each with its
        ``rows``, ``damaged_bytes`` that are no record and are not exported, ``bad_crcs`` of rows
        whose body does not match its CRC, ``bad_bodies`` of rows without a body, because it cannot
        be decompressed; offsets that are ``missing`` because they left the log before they were
        exported; and ``left_bytes`` of the active segment for a later run.
        """
        start = self._exported_to()
        start = extent.first_offset if start is None else start
        end = extent.end_offset if active else _full_end(extent)
        missing = list(extent.gaps(start, end)) if start < end else []
        ranges = []
        if start < end or start > extent.end_offset:  # Spark tells of a log that was cut
            ranges = list(self._stream(spark, start, end, fail_on_data_loss=not missing))
        if missing:  # what was deleted during the run was skipped too
            missing = list(survey(self._directory).gaps(start, end))
        return {
            "rows": sum(one["rows"] for one in ranges),
            "ranges": ranges,
            "missing": [{"start": start, "end": end} for start, end in missing],
            "left_bytes": max(0, extent.end_offset - max(start, end)),
        }

    @contextmanager
    def opened(self, _extent: LogExtent) -> Iterator[None]:
        """Keep other exports out of the directory.

        Raises:
            PlaceError: The directory cannot be written, holds other files, or an export with other
                settings; or another export is running in it.
        """
        settings = {
            "topics": self._topics,
            "format": "parquet",
            "decompress": self._decompress,
            "columns": [*COLUMNS, "date"],
        }
        own = self._home / FOLDER
        probe_folder(own)
        if not (own / "export.json").exists():
            found = [path.name for path in self._home.iterdir() if path.name != FOLDER]
            if found:
                raise PlaceError(self._home, f"holds {min(found)}, and is no export of this job")
            shutil.rmtree(self._checkpoint, ignore_errors=True)
        with held(own, "export", settings):
            yield

    def _exported_to(self) -> int | None:
        """Return the offset up to which the log is exported; None before the first batch."""
        done = [int(path.name) for path in self._checkpoint.glob("commits/[0-9]*")]
        return batch_end(self._checkpoint, max(done)) if done else None

    def _stream(
        self, spark: "SparkSession", start: int, end: int, *, fail_on_data_loss: bool
    ) -> Iterator[dict[str, Any]]:
        """Export up to an offset; yield what each batch has."""
        register(spark)
        spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", _BATCHES_MAX)
        reader = spark.readStream.format(FORMAT).schema(ddl(*COLUMNS, *_NOT_EXPORTED))
        if self._topics is not None:
            reader = reader.option("subscribe", ",".join(self._topics))
        log = reader.options(
            startingOffsets="earliest",
            endingOffsets=end,
            includeValue=True,
            verifyCrc=True,
            decompress=self._decompress,
            failOnDataLoss=fail_on_data_loss,
            maxBytesPerTrigger=_BATCH_BYTES,
            minPartitions=spark.sparkContext.defaultParallelism,
        ).load(location(self._directory))
        counted = log.observe("batch", *_counts(_is_wanted(self._topics)))
        messages = exported(counted, self._topics)
        writer = messages.writeStream.format("parquet").partitionBy(*PARTITIONED_BY)
        writer = writer.option("checkpointLocation", str(self._checkpoint))
        query = writer.trigger(availableNow=True).start(str(self._home))
        query.awaitTermination()
        self._remove_unfinished(spark, messages)
        for progress in query.recentProgress:
            (source,) = progress.sources
            last = int(json.loads(source.endOffset)[OFFSET])
            if last > start:
                yield {"start": start, "end": last, **progress.observedMetrics["batch"].asDict()}
                start = last

    def _remove_unfinished(self, spark: "SparkSession", messages: DataFrame) -> None:
        if not (self._home / _SINK_LOG).exists():
            return
        listed = spark.read.schema(messages.schema).parquet(str(self._home)).inputFiles()
        names = {Path(path).name for path in listed}
        for path in self._home.glob(f"{PARTITIONED_BY[0]}=*/*/*.parquet"):
            if path.name not in names:
                path.unlink()


def _full_end(extent: LogExtent) -> int:
    """Return the end of the segments that a broker no longer writes to."""
    if not extent.segments or extent.end_offset == extent.segments[-1].end:
        return extent.end_offset
    return extent.segments[-1].base


def _counts(is_wanted: Column) -> list[Column]:
    """Return what is counted of a range while it is written."""
    is_wanted = F.coalesce(is_wanted, F.lit(False))
    damaged = F.when(F.col("recordType") == CORRUPT, F.col("size"))
    return [
        F.count_if(is_wanted).alias("rows"),
        F.count_if(is_wanted & ~F.col("crcOk")).alias("bad_crcs"),
        F.count_if(is_wanted & F.col("error").isNotNull()).alias("bad_bodies"),
        F.coalesce(F.sum(damaged), F.lit(0)).alias("damaged_bytes"),
    ]


# --- the command

_DAMAGE: Final = ("damaged_bytes", "bad_crcs", "bad_bodies")


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = add_job(
        jobs,
        "export",
        "copy messages to Parquet, each exactly once over all runs",
        run,
        ends="0 done, 1 done, but parts of the log are damaged or were deleted before, 2 not done",
        example="~/.halfmq/store --topic orders --output orders",
        writes="directory of the export, partitioned by topic and date; each run adds what is new",
        must_write=True,
    )
    parser.add_argument(
        "--topic",
        metavar="TOPIC",
        action="append",
        help="may be given several times (default: all but the broker's own, retries and dead"
        " letters)",
    )
    parser.add_argument(
        "--active",
        action="store_true",
        help="also export the segment that is being written, up to its last whole record",
    )
    parser.add_argument(
        "--decompress", action="store_true", help="decompress bodies that producers compressed"
    )


def run(options: argparse.Namespace) -> int:
    """Export a log and return the exit code."""
    export = Export(
        options.directory, options.output, topics=options.topic, decompress=options.decompress
    )
    with running(options, before=export.opened) as job:
        job.step(f"exporting {options.directory} to {options.output}")
        summary = job.about_log()
        summary |= export.run(job.spark, job.extent, active=options.active)
        job.publish(summary, _table(options, summary))
    damaged = (one[name] for one in summary["ranges"] for name in _DAMAGE)
    return FINDINGS if summary["missing"] or any(damaged) else CLEAN


def _table(options: argparse.Namespace, summary: dict[str, Any]) -> Iterator[str]:
    yield fact("commit log", summary["directory"])
    yield fact("export", options.output)
    yield fact("exported", f"{summary['rows']:,} messages")
    if summary["left_bytes"]:
        yield fact("left", f"{summary['left_bytes']:,} bytes of the segment that is being written")
    for gap in summary["missing"]:
        yield fact("missing", f"{gap['start']} to {gap['end']} left the log before the export")
    yield from listing(summary["ranges"], "start", "end", "rows", *_DAMAGE)
