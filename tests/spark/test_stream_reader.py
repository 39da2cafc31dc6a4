"""The reader behind a stream of the log, asked as Spark asks it; no query runs here."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from halfmq.spark_jobs.errors import DataLossError
from halfmq.spark_jobs.log.follow import OFFSET
from halfmq.spark_jobs.source.log_source import CommitLogDataSource, CommitLogReader
from halfmq.spark_jobs.source.options import ReadOptions
from halfmq.spark_jobs.source.splits import parts_of
from halfmq.spark_jobs.source.stream import CommitLogStreamReader
from tests.support.log_writer import START, LogWriter

SEGMENT = 1 << 12
SCHEMA = StructType(
    [
        StructField("physicalOffset", LongType()),
        StructField("size", IntegerType()),
        StructField("recordType", StringType()),
    ]
)


def written(folder: Path, count: int = 60) -> LogWriter:
    log = LogWriter(folder, segment_size=SEGMENT)
    for number in range(count):
        log.append("orders", b"b" * (number % 90), {"KEYS": f"k{number}"})
    log.close()
    return log


def reader_of(folder: Path, **options: str) -> CommitLogStreamReader:
    given = {"startingOffsets": "earliest"} | options | {"path": str(folder)}
    made = CommitLogDataSource(given).streamReader(SCHEMA)
    assert isinstance(made, CommitLogStreamReader)
    return made


def read(reader: Any, partitions: Any) -> list[tuple[Any, ...]]:
    """Read as executors do, with what a pickle carries."""
    sent = pickle.loads(pickle.dumps(reader))
    batches = [batch for partition in partitions for batch in sent.read(partition)]
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def batches(
    reader: CommitLogStreamReader, start: int | None = None
) -> Iterator[tuple[int, int, list[tuple[Any, ...]]]]:
    """Ask for batches until there is nothing more: start, end and rows."""
    offset = reader.initialOffset() if start is None else {OFFSET: start}
    while True:
        end = reader.latestOffset(offset, reader.getDefaultReadLimit())
        rows = read(reader, reader.partitions(offset, end))
        if end == offset:
            assert not rows
            return
        yield offset[OFFSET], end[OFFSET], rows
        offset = end


def messages(rows: list[tuple[Any, ...]]) -> list[int]:
    return [offset for offset, _, kind in rows if kind == "message"]


def all_rows(reader: CommitLogStreamReader, start: int | None = None) -> list[tuple[Any, ...]]:
    return [row for _, _, rows in batches(reader, start) for row in rows]


@pytest.mark.parametrize("limit", ["1", "700", "3000", "5k"])
def test_limited_batches_have_what_a_read_has(limit: str, tmp_path: Path) -> None:
    """Blanks and all, each once, in steps that end with the record that reaches the limit."""
    log = written(tmp_path)
    whole = CommitLogReader(SCHEMA, ReadOptions.parse_batch({"path": str(tmp_path)}))
    borders = {0} | {record.offset + record.size for record in log.written}
    borders |= {SEGMENT * number for number in range(1, 9)}
    reader = reader_of(tmp_path, maxBytesPerTrigger=limit, maxPartitionBytes="2k")

    told = list(batches(reader))

    assert {start for start, _, _ in told} <= borders
    assert [row for *_, rows in told for row in rows] == read(whole, whole.partitions())
    if limit == "5k":
        largest = max(record.size for record in log.written)
        assert all(end - start < (5 << 10) + largest for start, end, _ in told)


def test_a_trigger_that_wants_all_gets_all(tmp_path: Path) -> None:
    """Whatever maxBytesPerTrigger says: Spark asks so for a query that runs once."""
    log = written(tmp_path)
    reader = reader_of(tmp_path, maxBytesPerTrigger="1")

    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())

    assert end == reader.reportLatestOffset() == {OFFSET: log.end}


def test_available_now_ends_where_the_log_ended_when_it_began(tmp_path: Path) -> None:
    """What is written meanwhile is for the next run."""
    log = written(tmp_path, 10)
    reader = reader_of(tmp_path, maxBytesPerTrigger="300")
    reader.prepareForTriggerAvailableNow()
    for _ in range(50):
        log.append("orders", b"later")
    log.close()

    assert messages(all_rows(reader)) == [record.offset for record in log.written[:10]]


def test_a_stream_begins_where_it_is_told(tmp_path: Path) -> None:
    """At the end unless told otherwise, as Spark's Kafka source; a number means the next record."""
    log = written(tmp_path, 10)
    inside = log.written[6].offset + 1
    latest, number = (reader_of(tmp_path, startingOffsets=o) for o in ("latest", str(inside)))

    assert latest.initialOffset() == {OFFSET: log.end}
    assert messages(all_rows(number)) == [record.offset for record in log.written[7:]]


def test_a_stream_ends_where_it_is_told(tmp_path: Path) -> None:
    """With any trigger, and before the log's end."""
    log = written(tmp_path, 10)
    for prepare in (True, False):
        reader = reader_of(tmp_path, endingOffsets=str(log.written[7].offset))
        if prepare:
            reader.prepareForTriggerAvailableNow()

        assert messages(all_rows(reader)) == [record.offset for record in log.written[:7]]


def test_times_bound_what_is_read_and_which_segments(tmp_path: Path) -> None:
    """From the start on, before the end; a segment that is an hour away is not opened."""
    log = LogWriter(tmp_path, segment_size=SEGMENT)
    for number in range(60):
        log.now += 600_000 * (number % 20 == 0)
        log.append("orders", b"b" * 100)
    log.close()
    stored = [int(START + 600_000 * (n // 20 + 1) + n + 1) for n in range(60)]
    start, end = stored[25], stored[30]
    options = {"path": str(tmp_path), "startingTimestamp": str(start), "endingTimestamp": str(end)}
    reader = CommitLogReader(SCHEMA, ReadOptions.parse_batch(options))
    far = options | {"startingTimestamp": str(start + 7_200_000), "endingTimestamp": "9" * 13}
    near = options | {"startingTimestamp": "0", "endingTimestamp": str(stored[0])}

    found = read(reader, reader.partitions())

    assert [offset for offset, *_ in found] == [record.offset for record in log.written[25:30]]
    for given, opened in ((far, {2}), (near, {0, 1})):
        reader = CommitLogReader(SCHEMA, ReadOptions.parse_batch(given))
        planned = reader.partitions()
        splits = [split for partition in planned for split in parts_of(partition)]
        assert {split.segment.base // SEGMENT for split in splits} <= opened
        assert not read(reader, planned)


def test_damage_is_a_row_once(tmp_path: Path) -> None:
    """Wherever the batches end, also right in front of it."""
    log = written(tmp_path, 40)
    victim = log.written[12]
    with (tmp_path / f"{0:020}").open("r+b") as file:
        file.seek(victim.offset + 4)
        file.write(b"????")

    for limit in ("1", "300", "100k"):
        rows = all_rows(reader_of(tmp_path, maxBytesPerTrigger=limit))
        assert [row for row in rows if row[2] == "corrupt"] == [
            (victim.offset, victim.size, "corrupt")
        ]
        assert messages(rows) == [r.offset for r in log.written if r is not victim]


def test_what_a_checkpoint_needs_must_be_there(tmp_path: Path) -> None:
    """Else the stream ends with what is missing, or goes on with the rest, as asked."""
    log = written(tmp_path, 150)
    (tmp_path / f"{0:020}").unlink()
    needed = log.written[3].offset
    careful, careless = reader_of(tmp_path), reader_of(tmp_path, failOnDataLoss="false")

    with pytest.raises(DataLossError, match=f"{needed} to {SEGMENT}, but the log begins at"):
        careful.latestOffset({OFFSET: needed}, ReadAllAvailable())
    with pytest.raises(DataLossError, match=f"{needed} to {SEGMENT}, but the log begins at"):
        careful.partitions({OFFSET: needed}, {OFFSET: log.end})
    assert messages(all_rows(careless, needed)) == [
        record.offset for record in log.written if record.offset >= SEGMENT
    ]


def test_a_checkpoint_of_another_log_is_noticed(tmp_path: Path) -> None:
    """One that is shorter, and one in which another record lies across the place."""
    log = written(tmp_path, 20)

    with pytest.raises(DataLossError, match=f"the log ends at {log.end}"):
        next(batches(reader_of(tmp_path), log.end + 100))
    with pytest.raises(DataLossError, match="written anew"):
        next(batches(reader_of(tmp_path), log.written[5].offset + 3))
    # Who does not care waits until the log has come as far.
    assert not list(batches(reader_of(tmp_path, failOnDataLoss="false"), log.end + 100))


def test_a_segment_that_is_deleted_before_its_turn_is_a_loss(tmp_path: Path) -> None:
    """Between the plan and the read of a batch; with failOnDataLoss=false it is passed over."""
    log = written(tmp_path, 150)
    plans = {}
    for wanted in ("true", "false"):
        reader = reader_of(tmp_path, failOnDataLoss=wanted)
        plans[wanted] = reader, reader.partitions({OFFSET: 0}, {OFFSET: log.end})
    (tmp_path / f"{0:020}").unlink()

    with pytest.raises(Exception, match=f"{0:020}: .*No such file"):
        read(*plans["true"])
    assert messages(read(*plans["false"])) == [
        record.offset for record in log.written if record.offset >= SEGMENT
    ]
