"""A commit log as a stream."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from halfmq.spark_jobs.datasource import FORMAT
from halfmq.store.message_store import MessageStore
from tests.support.log_writer import LogWriter
from tests.support.stores import Clock, draft, everything, flush, small_config

SEGMENT = 1 << 12
COLUMNS = "topic string, partition int, offset long, physicalOffset long, recordType string"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    opened = MessageStore(small_config(tmp_path / "store"), now_ms=Clock())
    opened.open()
    yield opened
    opened.close()


class Sink:
    """Where a stream's rows end up, with its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._output = folder / "output"
        self._checkpoint = folder / "checkpoint"

    def start(self, frame: DataFrame, **trigger: Any) -> StreamingQuery:
        writer = frame.writeStream.format("parquet").option("path", str(self._output))
        writer = writer.option("checkpointLocation", str(self._checkpoint))
        return writer.trigger(**trigger).start() if trigger else writer.start()

    def run(self, frame: DataFrame) -> StreamingQuery:
        """Read what there is, and end."""
        query = self.start(frame, availableNow=True)
        query.awaitTermination()
        return query

    def messages(self, spark: SparkSession) -> list[int]:
        """The physical offsets of what has arrived, as often as it has."""
        rows = spark.read.parquet(str(self._output)).where("recordType = 'message'").collect()
        return sorted(row["physicalOffset"] for row in rows)

    def planned(self) -> list[int]:
        """Up to where each batch was to go."""
        files = [path for path in (self._checkpoint / "offsets").iterdir() if path.name.isdigit()]
        last_lines = [
            path.read_text().splitlines()[-1] for path in sorted(files, key=lambda p: int(p.name))
        ]
        return [json.loads(line)["physicalOffset"] for line in last_lines]


def stream(spark: SparkSession, folder: Path, **options: Any) -> DataFrame:
    chosen = {"startingOffsets": "earliest"} | options
    return spark.readStream.format(FORMAT).schema(COLUMNS).options(**chosen).load(str(folder))


def written(folder: Path, count: int = 60) -> LogWriter:
    log = LogWriter(folder, segment_size=SEGMENT)
    for number in range(count):
        log.append("orders", b"b" * (number % 90), {"KEYS": f"k{number}"})
    log.close()
    return log


def test_a_stream_follows_a_broker_over_a_restart(
    spark: SparkSession, store: MessageStore, tmp_path: Path
) -> None:
    """Written to while the stream runs, over many segments; each record arrives once."""
    sink, folder = Sink(tmp_path), tmp_path / "store"

    def write() -> None:
        for number in range(50):
            store.append([draft(body=b"x" * (number * 37 % 700)) for _ in range(3)])
        flush(store)

    for _ in range(2):
        query = sink.start(stream(spark, folder, maxBytesPerTrigger="60k"))
        writer = threading.Thread(target=write)
        writer.start()
        query.processAllAvailable()  # some of it, while more is written
        writer.join()
        query.processAllAvailable()
        query.stop()

    expected = [record.physical_offset for record in everything(store)]
    assert len(expected) == 300
    assert len({offset // 16_384 for offset in expected}) > 5
    assert sink.messages(spark) == expected


@pytest.mark.campaign
def test_a_batch_that_was_not_committed_is_read_again_as_it_was(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Though the log is longer by then: the checkpoint says what the batch was."""
    log = written(tmp_path / "log", 30)
    sink = Sink(tmp_path)
    frame = stream(spark, tmp_path / "log")
    sink.run(frame)
    ended = log.end
    for path in (tmp_path / "checkpoint" / "commits").iterdir():
        path.unlink()  # as if the driver had died before it wrote that
    for sunk in (tmp_path / "output" / "_spark_metadata").iterdir():
        sunk.unlink()
    for number in range(40):
        log.append("orders", b"more", {"KEYS": f"m{number}"})
    log.close()

    sink.run(frame)

    assert sink.planned()[0] == ended
    assert sink.messages(spark) == [record.offset for record in log.written]


@pytest.mark.campaign
def test_what_retention_took_is_an_error_or_a_gap_as_asked(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The stream stops and says what is missing, unless failOnDataLoss is false."""
    log = written(tmp_path / "log", 30)
    sink, folder = Sink(tmp_path), tmp_path / "log"
    sink.run(stream(spark, folder))
    seen = log.end
    for number in range(60):
        log.append("orders", b"b" * 90, {"KEYS": f"m{number}"})
    log.close()
    first, second, *_ = sorted(folder.iterdir())
    first.unlink()
    second.unlink()
    begins = SEGMENT * 2

    with pytest.raises(StreamingQueryException) as failed:
        sink.run(stream(spark, folder))
    sink.run(stream(spark, folder, failOnDataLoss="false"))

    assert f"needs offsets {seen} to {begins}, but the log begins at {begins}" in str(failed.value)
    assert sink.messages(spark) == [
        record.offset for record in log.written if record.offset < seen or record.offset >= begins
    ]
