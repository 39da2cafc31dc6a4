"""Filters of a query that choose what is read of a log."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, IsNotNull, LessThan, StringContains

from halfmq.spark_jobs.datasource import CommitLogDataSource, LogPartition
from halfmq.spark_jobs.log.segments import RECORD_SIZE_MAX
from halfmq.spark_jobs.source.options import ReadOptions
from halfmq.spark_jobs.source.pushdown import (
    OFFSET,
    TIME,
    PushdownCommitLogReader,
    with_offsets,
    with_times,
)
from tests.spark.test_stream_reader import SCHEMA
from tests.support.log_writer import START, LogWriter
from tests.support.spark import load

SEGMENT = 1 << 12
HOUR = 3_600_000  # ms
PUSH = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[SparkSession]:
    spark.conf.set(PUSH, "true")
    yield spark
    spark.conf.unset(PUSH)


@pytest.fixture
def log(tmp_path: Path) -> LogWriter:
    """Segments that are an hour apart."""
    written = LogWriter(tmp_path, segment_size=SEGMENT)
    for _ in range(5):
        written.now += HOUR
        before = written.end // SEGMENT
        while written.end // SEGMENT == before:
            written.append("orders", b"b" * 100)
    written.close()
    return written


def moment(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def segments_read(folder: Path, *filters: Filter) -> set[int]:
    reader = CommitLogDataSource({"path": str(folder), "filterPushdown": "true"}).reader(SCHEMA)
    assert isinstance(reader, PushdownCommitLogReader)
    assert list(reader.pushFilters(list(filters))) == list(filters), "Spark applies them again"
    parts = [part for part in reader.partitions() if isinstance(part, LogPartition)]
    return {split.segment.base // SEGMENT for part in parts for split in part.splits}


def test_filters_find_the_same_rows_with_and_without_being_pushed(
    pushing: SparkSession, log: LogWriter, tmp_path: Path
) -> None:
    """By offset and by time, with other filters beside them."""
    first, last = log.written[7], log.written[60]
    stored = START + 2 * HOUR
    for condition in (
        f"physicalOffset >= {first.offset} and physicalOffset < {last.offset}",
        f"physicalOffset = {first.offset}",
        f"timestamp > timestamp_millis({stored}) and topic = 'orders'",
        "topic = 'nothing'",
    ):
        found = [
            load(pushing, tmp_path, filterPushdown=pushed).where(condition).select(*OFFSET)
            for pushed in ("true", "false")
        ]
        told, expected = (sorted(row[0] for row in frame.collect()) for frame in found)
        assert told == expected
        assert bool(told) is (condition != "topic = 'nothing'")


def test_segments_that_cannot_match_are_not_read(log: LogWriter, tmp_path: Path) -> None:
    """By the times of their first records."""
    others = IsNotNull(("topic",)), StringContains(("topic",), "x")

    assert segments_read(tmp_path, *others) == {0, 1, 2, 3, 4, 5}
    assert segments_read(tmp_path, GreaterThan(TIME, moment(START + 4 * HOUR))) <= {3, 4, 5}
    assert segments_read(tmp_path, LessThan(TIME, moment(START + 2 * HOUR)), *others) <= {0, 1, 2}
    assert segments_read(tmp_path, LessThan(OFFSET, 10)) == {0}


def test_bounds_are_the_narrowest_that_any_filter_sets() -> None:
    """Beside those of the options; a corrupt range is looked for from the record before it."""
    options = ReadOptions("/", starting_offsets=50, ending_offsets=1 << 40)
    far = 1 << 30

    pushed = with_offsets(options, [GreaterThan(OFFSET, far), LessThan(OFFSET, far * 2)])
    assert (pushed.starting_offsets, pushed.ending_offsets) == (far - RECORD_SIZE_MAX, 2 * far + 1)
    pushed = with_offsets(options, [EqualTo(OFFSET, 77)])
    assert (pushed.starting_offsets, pushed.ending_offsets) == (50, 78)
    assert with_offsets(options, []) == options
    # A time without a zone could be any.
    assert with_times(options, [EqualTo(TIME, datetime(2024, 1, 1))]) == options  # noqa: DTZ001
