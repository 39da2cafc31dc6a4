"""The job ``export``: messages as Parquet files, each exactly once.

An export is a Spark stream of the log that ends when all of it is read (``availableNow``). Spark's
checkpoint, ``_halfmq/checkpoint``, notes which offsets a batch has before it is written, so that a
batch which was interrupted is repeated with the same records. A batch is written to
``_halfmq/staging`` and becomes visible by one rename, to ``batch=N``. If it is visible already, it
is a repeated one, and what was staged is thrown away. So whoever lists the files, with Spark or
without it, sees each message once.

``_halfmq/export.json`` says what is exported how, up to which offset, and by which record the log
is known again.

``exported`` alone, from DataFrame to DataFrame, is for notebooks and for streams into other sinks.
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
from ..source.columns import CORRUPT, MESSAGE
from ..source.roles import location, role
from ..source.schema import ddl
from .command import CLEAN, FINDINGS, about_log, add_job, spark_for
from .output import Output, probe_folder
from .steps import step_reporter

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
_BESIDE: Final = ("recordType", "size")  # needed on the way, and not exported
PARTITIONED_BY: Final = ("topic", "date")
_DAY_MS: Final = 86_400_000
_BATCH_BYTES: Final = 1 << 30  # of log per batch, as in a segment; a kill repeats less than that
FOLDER: Final = "_halfmq"  # readers of Parquet pass over names that begin with an underscore
_VERSION: Final = 2
_CUT: Final = (
    "it was cut, or is another one. What is exported stays as it is; export the log as it is now"
    " into another directory"
)


class Range(NamedTuple):
    """A part of the log that one batch has exported; offsets are physical."""

    start: int
    end: int
    segment: int  # file base of the one that it begins in
    rows: int
    damaged_bytes: int  # that are no record, and are not exported
    bad_crcs: int  # rows whose body does not fit its CRC; they are exported
    bad_bodies: int  # rows without a body, because it cannot be decompressed


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


@dataclass(slots=True)
class _State:
    """The content of ``export.json``."""

    settings: dict[str, Any]  # the same in every run into one directory
    end: int | None = None  # up to where the log is exported
    last: list[int] | None = None  # exported record: its physical offset, when it was stored in ms
    version: int = _VERSION


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
        *,
        topics: Sequence[str] | None = None,
        decompress: bool = False,
    ) -> None:
        """Export ``topics``, or all but the broker's own, retries and dead letters.

        ``decompress`` unpacks the bodies that their producers have compressed.
        """
        self._directory = directory
        self._topics = None if topics is None else sorted(set(topics))
        self._decompress = decompress
        self._home = output.absolute()
        self._staging = self._home / FOLDER / "staging"
        self._checkpoint = self._home / FOLDER / "checkpoint"
        self._state_file = self._home / FOLDER / "export.json"

    def run(self, extent: LogExtent, *, active: bool = False) -> Outcome:
        """Export what is not exported yet; Spark starts only when there is something.

        Raises:
            PlaceError: The directory holds something else, or an export of another log or with
                other settings; another export is running.
        """
        with self._locked():
            self._state = self._begun()
            self._check_log(extent)
            shutil.rmtree(self._staging, ignore_errors=True)
            start = extent.first_offset if self._state.end is None else self._state.end
            end = extent.end_offset if active else _full_end(extent)
            self._extent, self._ranges = extent, list[Range]()
            missing: list[tuple[int, int]] = []
            if start < end:
                missing = list(extent.gaps(start, end))
                step = step_reporter("export")
                with spark_for(extent, step) as spark:
                    step(f"exporting offsets {start} to {end}")
                    self._stream(spark, end, fail_on_data_loss=not missing)
                if missing:  # what was deleted meanwhile was passed over too
                    missing = list(survey(self._directory).gaps(start, end))
            return Outcome(self._ranges, missing, max(0, extent.end_offset - max(start, end)))

    # --- the steps of a run

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other exports out, as long as this one lives."""
        import fcntl  # noqa: PLC0415  Windows has none, and the other jobs

        (self._home / FOLDER).mkdir(parents=True, exist_ok=True)
        with (self._home / FOLDER / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise self._error("another export is running here") from error
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
                    f"the export was begun with {name} = {begun}, not {value}: go on with the same,"
                    " or into another directory"
                )
        return state

    def _check_log(self, extent: LogExtent) -> None:
        """Make sure that the log is the one that the export is of."""
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
                f"at offset {last[0]} the log has not the record that was exported: {_CUT}"
            )

    def _stream(self, spark: "SparkSession", end: int, *, fail_on_data_loss: bool) -> None:
        register(spark)
        self._save()
        reader = spark.readStream.format(FORMAT).schema(ddl(*COLUMNS, *_BESIDE))
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
        """Write a batch, which may be one that an interrupted run has written already."""
        from ..source.stream import OFFSET  # noqa: PLC0415  from Spark 4.2 on

        # The last line of Spark's note is what the source said.
        note = self._checkpoint / "offsets" / str(number)
        end = int(json.loads(note.read_text("utf-8").splitlines()[-1])[OFFSET])
        first = self._extent.first_offset
        start = first if self._state.end is None else max(first, self._state.end)
        if end <= start:
            return
        seen = Observation()
        is_wanted = _is_wanted(self._topics)
        rows = exported(batch.observe(seen, *_measures(is_wanted)), self._topics)
        self._publish(rows, self._home / f"batch={number:08}", note)
        self._keep(start, end, seen.get)

    def _publish(self, rows: DataFrame, place: Path, note: Path) -> None:
        rows.write.mode("overwrite").partitionBy(*PARTITIONED_BY).parquet(str(self._staging))
        if not place.exists() and any(self._staging.glob(f"{PARTITIONED_BY[0]}=*")):
            # What is visible outlives a power cut, and so does Spark's note of its offsets.
            _sync(note, *note.parents[:3])
            _sync(*self._staging.rglob("*"), self._staging)
            self._staging.rename(place)
            _sync(self._home)

    def _keep(self, start: int, end: int, told: dict[str, Any]) -> None:
        last = told.pop("last")
        segment = self._extent.segment_at(start).base
        self._ranges.append(Range(start=start, end=end, segment=segment, **told))
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
    """Return where the part of a log ends that a broker does not write to any more."""
    if not extent.segments or extent.end_offset == extent.segments[-1].end:
        return extent.end_offset
    return extent.segments[-1].base


def _measures(is_wanted: Column) -> list[Column]:
    """Return what is counted while a batch is read."""
    is_wanted = F.coalesce(is_wanted, F.lit(False))
    is_damaged = F.col("recordType") == CORRUPT
    last = F.struct("physicalOffset", F.unix_millis("timestamp"))
    at = F.when(is_wanted, F.col("physicalOffset"))
    return [
        F.count_if(is_wanted).alias("rows"),
        F.count_if(is_wanted & ~F.col("crcOk")).alias("bad_crcs"),
        F.count_if(is_wanted & F.col("error").isNotNull()).alias("bad_bodies"),
        F.coalesce(F.sum(F.when(is_damaged, F.col("size"))), F.lit(0)).alias("damaged_bytes"),
        F.max_by(last, at).alias("last"),
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

SHOWN_MAX: Final = 50  # ranges in the table


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = add_job(
        jobs,
        "export",
        "copy messages to Parquet, each exactly once over all runs",
        run,
        ends="0 done, 1 done, but parts of the log are damaged or were deleted before, 2 not done",
        example="~/.halfmq/store --topic orders --output orders",
        writes="where the export is; a further run adds what is new. Partitioned by topic and date",
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
        help="export the segment that is being written too, as far as its records are whole",
    )
    parser.add_argument(
        "--decompress", action="store_true", help="decompress bodies that producers compressed"
    )


def run(options: argparse.Namespace) -> int:
    """Export a log and return the exit code."""
    extent = survey(options.directory)
    probe_folder(options.output)
    output = Output(options.job, options.json)
    export = Export(
        options.directory, options.output, topics=options.topic, decompress=options.decompress
    )
    outcome = export.run(extent, active=options.active)
    summary = {
        **about_log(options.directory, extent),
        "rows": sum(one.rows for one in outcome.ranges),
        "ranges": [one._asdict() for one in outcome.ranges],
        "missing": [{"start": start, "end": end} for start, end in outcome.missing],
        "left_bytes": outcome.left,
    }
    output.publish(summary, _table(options, summary))
    return CLEAN if outcome.is_clean else FINDINGS


def _table(options: argparse.Namespace, summary: dict[str, Any]) -> Iterator[str]:
    yield f"commit log    {summary['directory']}"
    yield f"export        {options.output}"
    yield f"exported      {summary['rows']:,} messages of {len(summary['ranges']):,} ranges"
    for one in summary["ranges"][:SHOWN_MAX]:
        wrong = f", {one['damaged_bytes']:,} bytes damaged" if one["damaged_bytes"] else ""
        wrong += f", {one['bad_crcs']:,} bodies with a wrong CRC" if one["bad_crcs"] else ""
        wrong += f", {one['bad_bodies']:,} not decompressed" if one["bad_bodies"] else ""
        yield f"  {one['start']} to {one['end']}: {one['rows']:,} messages{wrong}"
    if len(summary["ranges"]) > SHOWN_MAX:
        yield f"  and {len(summary['ranges']) - SHOWN_MAX:,} more: see --json"
    for gap in summary["missing"]:
        yield f"missing       {gap['start']} to {gap['end']} left the log before it was exported"
    if summary["left_bytes"]:
        yield f"left          {summary['left_bytes']:,} bytes of the segment that is being written"
