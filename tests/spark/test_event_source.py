"""The source of transactions, as a query sees it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from halfmq.spark_jobs.errors import OptionError
from halfmq.spark_jobs.log.transaction_parts import Part
from halfmq.spark_jobs.source.event_source import EVENT_COLUMNS, EVENT_FORMAT, TransactionDataSource
from halfmq.spark_jobs.source.schema import ddl
from tests.support.documents import examples
from tests.support.log_writer import HALF, LogWriter, Ours


def written(folder: Path) -> LogWriter:
    """A log of 30 transactions: a third each committed, rolled back, undecided."""
    log = LogWriter(folder, segment_size=1 << 12)
    transactions = Ours(log)
    for number in range(30):
        half = transactions.half(transactions.key(), KEYS=f"k{number}")
        if number % 3 == 0:
            transactions.commit(half)
        elif number % 3 == 1:
            transactions.rollback(half)
    transactions.write_ops()
    log.close()
    return log


def test_the_example_finds_halves_that_nobody_decided(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands in docs/audit.md."""
    log = written(tmp_path)
    (example,) = [one.code for one in examples("docs/audit.md") if EVENT_FORMAT in one.code]

    exec(example.replace("/var/lib/halfmq/store", str(tmp_path)), {"spark": spark})

    halves = [record for record in log.written if record.topic == HALF and not record.sys_flag]
    shown = re.findall(r"^\| *(\d+)\|", capsys.readouterr().out, re.MULTILINE)
    assert [int(offset) for offset in shown] == [half.offset for half in halves[2::3]]


def test_every_record_of_a_transaction_is_a_row(spark: SparkSession, tmp_path: Path) -> None:
    """Also where the half lies in another part of the log; finals have the content of halves."""
    log = written(tmp_path)
    reader = spark.read.format(EVENT_FORMAT)

    events = reader.option("maxPartitionBytes", "4k").load(str(tmp_path)).collect()

    records = [(one["part"], one["physicalOffset"]) for one in events if one["part"] != Part.OP]
    kinds = {0: Part.HALF, 8: Part.COMMIT, 12: Part.ROLLBACK}
    assert sorted(records, key=lambda record: record[1]) == [
        (kinds[record.sys_flag], record.offset)
        for record in log.written
        if record.properties.get("UNIQ_KEY")
    ]
    halves = {one["halfQueueOffset"]: one for one in events if one["part"] == Part.HALF}
    ops = [one for one in events if one["part"] == Part.OP]
    assert len(ops) == 20
    assert {one["key"] for one in ops} & {None}
    for op in ops:
        assert op["key"] in {None, halves[op["halfQueueOffset"]]["key"]}
    content = ("key", "topicHash", "partition", "contentHash", "bodySize")
    by_offset = {one["physicalOffset"]: one for one in halves.values()}
    for final in (one for one in events if one["part"] == Part.COMMIT):
        half = by_offset[final["halfOffset"]]
        assert [final[name] for name in content] == [half[name] for name in content]


def test_a_stream_brings_the_rows_of_a_batch_once_each(spark: SparkSession, tmp_path: Path) -> None:
    """In micro-batches; whose half lies in an earlier one is for a join to tell."""
    written(tmp_path / "commitlog")
    options = {"startingOffsets": "earliest", "maxBytesPerTrigger": "4k"}
    names = [name for name in EVENT_COLUMNS if name not in {"key", "halfOffset"}]

    log = spark.readStream.format(EVENT_FORMAT).options(**options).load(str(tmp_path))
    writer = log.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "c"))
    query = writer.trigger(availableNow=True).start(str(tmp_path / "out"))
    query.awaitTermination()

    streamed = spark.read.parquet(str(tmp_path / "out"))
    batch = spark.read.format(EVENT_FORMAT).load(str(tmp_path))

    def rows(events: DataFrame) -> list[str]:
        return sorted(map(str, events.select(names).collect()))

    assert len(query.recentProgress) > 2
    assert rows(streamed) == rows(batch)


def test_only_the_columns_that_are_named_are_read(spark: SparkSession, tmp_path: Path) -> None:
    """A CRC is told where it was computed."""
    log = written(tmp_path)
    reader = spark.read.format(EVENT_FORMAT).schema(ddl("crcOk", "part", columns=EVENT_COLUMNS))

    unchecked = reader.load(str(tmp_path)).distinct().collect()
    checked = reader.option("verifyCrc", "true").load(str(tmp_path)).distinct().collect()

    parts = [Part.HALF, Part.OP, Part.COMMIT, Part.ROLLBACK]
    assert log.written
    assert sorted(map(tuple, unchecked), key=lambda row: int(row[1])) == [(None, p) for p in parts]
    assert sorted(map(tuple, checked)) == [(True, part) for part in parts]


def test_an_option_of_another_source_is_refused() -> None:
    """One that does nothing would pass for one that was heeded."""
    with pytest.raises(OptionError, match="unknown option subscribe"):
        TransactionDataSource({"path": "/log", "subscribe": "orders"}).reader(None)  # type: ignore[arg-type]
