"""What is wrong with queues, and with the consume queues beside the log."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from halfmq.spark_jobs.audit import queue_findings
from halfmq.spark_jobs.audit.auditor import read_events
from halfmq.spark_jobs.audit.checks import Checks
from halfmq.spark_jobs.audit.digests import changed_bytes
from halfmq.spark_jobs.audit.rules.model import Kind, LogBounds
from halfmq.spark_jobs.log.log_end import survey
from halfmq.spark_jobs.log.rows import Rows
from halfmq.spark_jobs.log.segment_reader import SegmentReader
from halfmq.spark_jobs.log.store_files import StoreFiles
from halfmq.spark_jobs.source.scan import QUEUE
from tests.support import golden_store, planted_log
from tests.support.damage import extend, filled_store, flip, only
from tests.support.log_writer import LogWriter, write_store

Found = list[tuple[str, tuple[int, ...]]]
OF_QUEUES = (
    planted_log.out_of_order,
    planted_log.queue_gap,
    planted_log.wrong_queue_entry,
    planted_log.wrong_due_time,
    planted_log.missing_queue_entry,
    planted_log.entry_for_nothing,
    planted_log.unknown_topic,
    planted_log.unknown_queue,
)


def findings(
    spark: SparkSession, root: Path, damage: Sequence[tuple[int, int]] = (), partitions: int = 1
) -> Found:
    """All that is wrong with the queues of a store, sorted."""
    extent = survey(root)
    log = queue_findings.Log(
        str(root), extent, LogBounds(extent.first_offset, tuple(damage)), StoreFiles(root)
    )
    scan = read_events(spark, str(root), extent, Checks(crc=False), partitions=partitions)
    ranges = scan.select(F.inline("notes")).where(F.col("what") == QUEUE)
    log = log._replace(deleted=queue_findings.deleted_topics(ranges, log))
    found = queue_findings.all_of(ranges, log)
    rows = [row for frame in found for row in frame.collect()]
    return sorted((row["kind"], tuple(row["offsets"])) for row in rows)


def test_every_fault_of_queues_is_found_and_nothing_else(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Among thousands of records of both dialects, wherever the log is split."""
    planted = planted_log.plant(
        tmp_path, seed=4715, steps=2_000, fault_every=25, faults=list(OF_QUEUES)
    )

    assert findings(spark, tmp_path, partitions=3) == planted.expected


@pytest.mark.parametrize("name", ["clean-cq-short", "stale-cq", "tx-midway-killed", "v4-tx"])
def test_the_queues_of_a_golden_store(name: str, spark: SparkSession, tmp_path: Path) -> None:
    """One lost its last entry, one has entries of an older log; the others are sound."""
    wrong: dict[str, Found] = {
        "clean-cq-short": [(Kind.MISSING_QUEUE_ENTRY, (234367,))],
        "stale-cq": [
            (Kind.WRONG_QUEUE_ENTRY, (offset,))
            for offset in (224478, 224867, 225165, 225680, 226104, 226402, 226835)
        ],
    }
    store = golden_store.unpack(name, tmp_path)

    assert findings(spark, store.root) == wrong.get(name, [])


def test_a_tags_code_may_stand_in_an_extension(spark: SparkSession, tmp_path: Path) -> None:
    """With ``enableConsumeQueueExt`` RocketMQ writes an address of it into the entry."""
    root = filled_store(tmp_path / "store", 20)
    extend(root, only(root / "consumequeue" / "orders" / "1"), 3)
    assert findings(spark, root) == []

    shutil.rmtree(root / "consumequeue_ext")
    assert [kind for kind, _ in findings(spark, root)] == [Kind.WRONG_QUEUE_ENTRY]


@pytest.fixture
def store(tmp_path: Path) -> LogWriter:
    """A closed store with 5,000 records in one queue, more than are compared at once."""
    log = LogWriter(tmp_path / "commitlog", segment_size=1 << 18)
    for _ in range(5_000):
        log.append("orders", b"", {"TAGS": "paid"})
    log.close()
    write_store(log, {"orders": 1})
    return log


def zero_entries(root: Path, first: int, end: int) -> None:
    path = root / "consumequeue" / "orders" / "0" / f"{0:020}"
    content = bytearray(path.read_bytes())
    content[first * 20 : end * 20] = bytes((end - first) * 20)
    path.write_bytes(content)


def test_entries_that_are_still_to_come_are_no_finding(
    store: LogWriter, spark: SparkSession, tmp_path: Path
) -> None:
    """While a broker runs, the end of a queue lags behind the log; its middle does not."""
    zero_entries(tmp_path, 4_900, 5_000)
    (tmp_path / "abort").touch()
    assert findings(spark, tmp_path) == []

    zero_entries(tmp_path, 4_090, 4_096)  # up to the end of a block that has no other fault
    lost = store.written[4_090].offset
    assert findings(spark, tmp_path) == [(Kind.MISSING_QUEUE_ENTRY, (lost,))]

    (tmp_path / "abort").unlink()
    lost_too = store.written[4_900].offset
    assert findings(spark, tmp_path) == [
        (Kind.MISSING_QUEUE_ENTRY, (lost,)),
        (Kind.MISSING_QUEUE_ENTRY, (lost_too,)),
    ]


def test_what_expired_or_cannot_be_read_is_held_against_no_queue(
    store: LogWriter, spark: SparkSession, tmp_path: Path
) -> None:
    """Entries of deleted segments, and of records in a damaged range."""
    min((tmp_path / "commitlog").iterdir()).unlink()
    victim = store.written[4_000]
    path = tmp_path / "commitlog" / f"{victim.offset - victim.offset % (1 << 18):020}"
    content = bytearray(path.read_bytes())
    at = victim.offset % (1 << 18)
    content[at + 4 : at + 8] = bytes(4)
    path.write_bytes(content)

    damage = [(victim.offset, victim.offset + victim.size)]
    assert findings(spark, tmp_path, damage) == []


def test_a_bit_that_flipped_in_properties_is_a_finding(spark: SparkSession, tmp_path: Path) -> None:
    """Where the store has digests."""
    root = filled_store(tmp_path / "store", 60)
    extent = survey(root)
    assert changed_bytes(spark, extent).collect() == []
    segment = extent.segments[0]
    (rows,) = SegmentReader(segment, extent.limit(segment)).scan(0, 1)
    assert isinstance(rows, Rows)
    flip(Path(segment.path), int(rows.ends[0]) - 2)

    (found,) = changed_bytes(spark, extent).collect()

    assert (found["kind"], found["offsets"]) == (Kind.CRC, [segment.base])


def test_a_log_that_ends_before_its_queues_is_one_finding(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its last segments are missing: not one finding for each entry."""
    log = LogWriter(tmp_path / "commitlog", segment_size=1 << 12)
    for number in range(80):
        log.append("orders", b"b" * 90, {"UNIQ_KEY": f"k{number}"}, queue_id=number % 4)
    log.close()
    write_store(log, {"orders": 4})
    assert findings(spark, tmp_path) == []
    *_, before, last = sorted(log.folder.iterdir())
    before.unlink()
    last.unlink()

    assert findings(spark, tmp_path) == [(Kind.WRONG_QUEUE_ENTRY, (int(before.name),))]


def test_a_topic_that_rocketmq_deleted_is_no_finding(spark: SparkSession, tmp_path: Path) -> None:
    """It leaves the messages in the log; of a lost table, the queues are still there."""
    store = golden_store.unpack("plain-clean", tmp_path)
    table = store.root / "config" / "topics.json"
    content = json.loads(table.read_text())
    del content["topicConfigTable"]["orders"]
    table.write_text(json.dumps(content))
    assert {kind for kind, _ in findings(spark, store.root)} == {Kind.UNKNOWN_QUEUE}

    shutil.rmtree(store.root / "consumequeue" / "orders")
    assert findings(spark, store.root) == []


def test_messages_of_a_deleted_topic_are_no_finding(spark: SparkSession, tmp_path: Path) -> None:
    """Below the offset of its deletion, though no queue has them; later ones have no reader."""
    root = filled_store(tmp_path / "store", 20)
    end = survey(root).end_offset
    shutil.rmtree(root / "consumequeue" / "orders")
    counts = {"readQueueNums": 1, "writeQueueNums": 1}
    (root / "config").mkdir(exist_ok=True)

    def found(deleted: dict[str, int]) -> set[str]:
        table = {"topicConfigTable": {"events": counts}, "halfmqDeletedTopics": deleted}
        (root / "config" / "topics.json").write_text(json.dumps(table))
        return {kind for kind, _ in findings(spark, root)}

    assert found({"orders": end}) == set()
    assert Kind.UNKNOWN_QUEUE in found({"orders": 1})
