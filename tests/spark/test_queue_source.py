"""Consume queues as a DataFrame."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from halfmq.spark_jobs.source.queue_source import QUEUE_COLUMNS, QUEUE_FORMAT
from tests.support import golden_store
from tests.support.spark import load


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> golden_store.GoldenStore:
    return golden_store.unpack("tx-midway-clean", tmp_path_factory.mktemp("golden"))


def queues(spark: SparkSession, folder: Path, **options: Any) -> DataFrame:
    return spark.read.format(QUEUE_FORMAT).options(**options).load(str(folder))


def test_every_entry_names_a_message_of_the_log(
    spark: SparkSession, store: golden_store.GoldenStore
) -> None:
    """Joined by the columns that both sources have."""
    entries = queues(spark, store.root)
    messages = load(spark, store.root, "topic string, partition int, offset long, size int,"
                    " physicalOffset long, recordType string")  # fmt: skip
    keys = ["topic", "partition", "offset", "physicalOffset", "size"]
    matched = entries.join(messages, keys).where("recordType = 'message'").count()

    assert entries.dtypes == [(name, column.spark_type) for name, column in QUEUE_COLUMNS.items()]
    assert matched == entries.count() == len(store.messages)
    assert {row[0] for row in entries.select("entryType").distinct().collect()} == {"entry"}


def test_topics_and_offsets_bound_what_is_read(
    spark: SparkSession, store: golden_store.GoldenStore
) -> None:
    """Offsets are those of each queue."""
    topic = "RMQ_SYS_TRANS_HALF_TOPIC"
    frame = queues(spark, store.root, subscribe=topic, startingOffsets="2", endingOffsets="5",
                   minPartitions="4")  # fmt: skip

    found = frame.orderBy("offset").collect()

    assert [(row["topic"], row["partition"], row["offset"]) for row in found] == [
        (topic, 0, 2),
        (topic, 0, 3),
        (topic, 0, 4),
    ]
    assert all(row["file"].endswith(f"/{topic}/0/{0:020}") for row in found)


def test_damage_is_a_row_or_an_error_as_asked(spark: SparkSession, tmp_path: Path) -> None:
    """PERMISSIVE goes on behind it, FAILFAST says where it is."""
    folder = tmp_path / "consumequeue" / "t" / "0"
    folder.mkdir(parents=True)
    good, bad = struct.pack(">qiq", 100, 200, 7), struct.pack(">qiq", -1, 200, 7)
    filler = struct.pack(">qiq", 0, 0x7FFF_FFFF, 0)
    (folder / f"{0:020}").write_bytes(filler + good + bad + good[:9])

    found = queues(spark, tmp_path).drop("file", "topic").orderBy("offset").collect()

    assert [tuple(row) for row in found] == [
        (0, 0, None, None, None, "preBlank", None),
        (0, 1, 100, 200, 7, "entry", None),
        (0, 2, -1, 200, 7, "corrupt", "no record can be at this offset or have this size"),
        (0, 3, None, None, None, "corrupt", "the file ends within an entry"),
    ]
    with pytest.raises(PySparkException, match="20 bytes at offset 40: no record can be"):
        queues(spark, tmp_path, mode="FAILFAST").collect()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"includeValue": "true"}, "unknown option includevalue"),
        ({"startingOffsets": "latest"}, "expected earliest or a queue offset"),
    ],
)
def test_wrong_options_are_named(
    spark: SparkSession, store: golden_store.GoldenStore, options: dict[str, str], said: str
) -> None:
    """Those of the log are not those of the queues."""
    with pytest.raises(PySparkException, match=said):
        queues(spark, store.root, **options).collect()


def test_a_folder_without_queues_is_said(spark: SparkSession, tmp_path: Path) -> None:
    """In a sentence."""
    with pytest.raises(PySparkException, match="no consume queue"):
        queues(spark, tmp_path).collect()
