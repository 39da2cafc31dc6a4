"""The job ``export``: messages as Parquet files, each exactly once.

An export is a Spark stream of the log that ends at the end of the log (``availableNow``). Spark
saves the offsets of a batch in ``_halfmq/checkpoint`` before the batch is written, so an
interrupted batch is repeated with the same records. A batch is written to ``_halfmq/staging`` and
becomes visible by one rename, to ``batch=N``. If ``batch=N`` exists, the batch is a repetition and
the staged files are dropped. So every reader of the files sees each message once.

``_halfmq/export.json`` holds the settings, the offset up to which the log is exported, and the last
exported record, by which the next run recognizes the log.

``exported`` maps a DataFrame to a DataFrame, for notebooks and for streams into other sinks.
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from ..datasource import FORMAT, register
from ..errors import PlaceError
from ..log.log_end import survey
from ..log.segment_reader import SegmentReader
from ..log.segments import LogExtent
from ..report.tables import fact, listing
from ..source.columns import CORRUPT, MESSAGE
from ..source.message_roles import location, role
from ..source.schema import ddl
from .command import CLEAN, FINDINGS, add_job, running
from .output import probe_folder

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
FOLDER: Final = "_halfmq"  # readers of Parquet skip names that begin with an underscore
_VERSION: Final = 2
_CUT: Final = (
    "it was cut, or is another log. What is exported stays as it is; export the log as it is now"
    " into another directory"
)


class ExportedRange(NamedTuple):
    """A part of the log that one batch has exported; offsets are physical."""

    start: int
    end: int
    segment: int  # base of the file that contains the start
    rows: int
    damaged_bytes: int  # bytes that are no record, and are not exported
    bad_crcs: int  # rows whose body does not match its CRC; they are exported
    bad_bodies: int  # rows without a body, because it cannot be decompressed


@dataclass(slots=True)
class _State:
    """The content of ``export.json``."""

    settings: dict[str, Any]  # the same in every run into one directory
    end: int | None = None  # up to this offset the log is exported
    last: list[int] | None = None  # exported record: physical offset, store time in ms
    version: int = _VERSION


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
        self._staging = self._home / FOLDER / "staging"
        self._checkpoint = self._home / FOLDER / "checkpoint"
        self._state_file = self._home / FOLDER / "export.json"

    def run(
        self, spark: "SparkSession", extent: LogExtent, *, active: bool = False
    ) -> dict[str, Any]:
        """Export what is not exported yet, inside of ``opened``.

        Returns the results as JSON: ``rows`` exported, the ``ranges`` (``ExportedRange``), offsets
        that are ``missing`` because they left the log before they were exported, and
        ``left_bytes`` of the active segment for a later run.
        """
        start = extent.first_offset if self._state.end is None else self._state.end
        end = extent.end_offset if active else _full_end(extent)
        self._extent, self._ranges = extent, list[ExportedRange]()
        missing = list(extent.gaps(start, end)) if start < end else []
        if start < end:
            self._stream(spark, end, fail_on_data_loss=not missing)
        if missing:  # what was deleted during the run was skipped too
            missing = list(survey(self._directory).gaps(start, end))
        return {
            "rows": sum(one.rows for one in self._ranges),
            "ranges": [one._asdict() for one in self._ranges],
            "missing": [{"start": start, "end": end} for start, end in missing],
            "left_bytes": max(0, extent.end_offset - max(start, end)),
        }

    @contextmanager
    def opened(self, extent: LogExtent) -> Iterator[None]:
        """Keep other exports out of the directory, and check that the log belongs to it.

        Raises:
            PlaceError: The directory cannot be written, holds other files, or an export of another
                log or with other settings; or another export is running in it.
        """
        import fcntl  # noqa: PLC0415  Windows lacks it, and runs the other jobs

        probe_folder(self._home / FOLDER)
        with (self._home / FOLDER / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise self._error("another export is running here") from error
            self._state = self._begun()
            self._check_log(extent)
            shutil.rmtree(self._staging, ignore_errors=True)
            yield

    def _begun(self) -> _State:
        settings = {
            "topics": self._topics,
            "format": "parquet",
            "decompress": self._decompress,
            "columns": [*COLUMNS, "date"],
        }
        try:
            state = _State(**json.loads(self._state_file.read_text("utf-8")))
        except FileNotFoundError:
            found = [path.name for path in self._home.iterdir() if path.name != FOLDER]
            if found:
                raise self._error(f"holds {min(found)}, and is no export of this job") from None
            shutil.rmtree(self._checkpoint, ignore_errors=True)
            return _State(settings)
        except (ValueError, TypeError) as error:
            raise self._error(f"{self._state_file} is not of this job: {error}") from error
        for name, value in settings.items():
            begun = state.settings.get(name)
            if begun != value:
                raise self._error(
                    f"the export was begun with {name} = {begun}, not {value}: use the same again,"
                    " or another directory"
                )
        return state

    def _check_log(self, extent: LogExtent) -> None:
        """Raise an error if this is not the log that was exported so far."""
        end, last = self._state.end, self._state.last
        if end is not None and end > extent.end_offset:
            raise self._error(
                f"offsets up to {end} are exported, and the log ends at {extent.end_offset}: {_CUT}"
            )
        if last is None or last[0] < extent.first_offset:
            return
        segment = extent.segment_at(last[0])
        reader = SegmentReader(segment, extent.limit(segment))
        record = reader.record_at(last[0] - segment.base) if last[0] < segment.end else None
        if record is None or int(record.field("store_timestamp")[0]) != last[1]:
            raise self._error(
                f"at offset {last[0]} the log does not have the record that was exported: {_CUT}"
            )

    def _stream(self, spark: "SparkSession", end: int, *, fail_on_data_loss: bool) -> None:
        register(spark)
        self._save()
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
        writer = log.writeStream.option("checkpointLocation", str(self._checkpoint))
        writer.foreachBatch(self._write).trigger(availableNow=True).start().awaitTermination()

    def _write(self, batch: DataFrame, number: int) -> None:
        """Write a batch, perhaps one that an interrupted run has already written."""
        from ..source.stream import OFFSET  # noqa: PLC0415  from Spark 4.2 on

        # The last line of Spark's offset file is the offset of the source.
        note = self._checkpoint / "offsets" / str(number)
        end = int(json.loads(note.read_text("utf-8").splitlines()[-1])[OFFSET])
        first = self._extent.first_offset
        start = first if self._state.end is None else max(first, self._state.end)
        if end <= start:
            return
        seen = Observation()
        counted = batch.observe(seen, *_counts(_is_wanted(self._topics)))
        rows = exported(counted, self._topics)
        self._publish(rows, self._home / f"batch={number:08}", note)
        self._keep(start, end, seen.get)

    def _publish(self, rows: DataFrame, place: Path, note: Path) -> None:
        rows.write.mode("overwrite").partitionBy(*PARTITIONED_BY).parquet(str(self._staging))
        if not place.exists() and any(self._staging.glob(f"{PARTITIONED_BY[0]}=*")):
            # A visible batch survives a power cut, and so do its offsets in the checkpoint.
            _sync(note, *note.parents[:3])
            _sync(*self._staging.rglob("*"), self._staging)
            self._staging.rename(place)
            _sync(self._home)

    def _keep(self, start: int, end: int, counts: dict[str, Any]) -> None:
        last = counts.pop("last")
        segment = self._extent.segment_at(start).base
        self._ranges.append(ExportedRange(start=start, end=end, segment=segment, **counts))
        self._state.end = end
        if last is not None:
            self._state.last = list(last)
        self._save()

    def _save(self) -> None:
        beside = self._state_file.with_suffix(".tmp")
        beside.write_text(json.dumps(asdict(self._state), indent=1), "utf-8")
        _sync(beside)
        beside.replace(self._state_file)
        _sync(beside.parent)

    def _error(self, reason: str) -> PlaceError:
        return PlaceError(self._home, reason)


def _full_end(extent: LogExtent) -> int:
    """Return the end of the segments that a broker no longer writes to."""
    if not extent.segments or extent.end_offset == extent.segments[-1].end:
        return extent.end_offset
    return extent.segments[-1].base


def _counts(is_wanted: Column) -> list[Column]:
    """Return what is counted of an ``ExportedRange`` while a batch is written, and ``last``."""
    is_wanted = F.coalesce(is_wanted, F.lit(False))
    damaged = F.when(F.col("recordType") == CORRUPT, F.col("size"))
    last = F.struct("physicalOffset", F.unix_millis("timestamp"))
    return [
        F.count_if(is_wanted).alias("rows"),
        F.count_if(is_wanted & ~F.col("crcOk")).alias("bad_crcs"),
        F.count_if(is_wanted & F.col("error").isNotNull()).alias("bad_bodies"),
        F.coalesce(F.sum(damaged), F.lit(0)).alias("damaged_bytes"),
        F.max_by(last, F.when(is_wanted, F.col("physicalOffset"))).alias("last"),
    ]


def _sync(*paths: Path) -> None:
    """Flush files and directories to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
    names = [name for name in ExportedRange._fields if name != "segment"]
    yield from listing(summary["ranges"], *names)
