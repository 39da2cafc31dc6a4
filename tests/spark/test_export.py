"""Exports: every message once, whatever ends a run and whenever the next one begins."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from halfmq.spark_jobs.__main__ import main
from halfmq.spark_jobs.jobs import export
from halfmq.spark_jobs.jobs.export import Export
from halfmq.spark_jobs.log.log_end import survey
from halfmq.spark_jobs.source import message_roles
from tests.support import golden_store, messages
from tests.support.log_writer import LogWriter, Ours, Written

SEGMENT = 1 << 12
BATCHED = """
import sys
from halfmq.spark_jobs import __main__
from halfmq.spark_jobs.jobs import export

export._BATCH_BYTES = int(sys.argv[1])
sys.exit(__main__.main(sys.argv[2:]))
"""
ROWS = int(os.environ.get("HALFMQ_EXPORT_ROWS", "20000"))


def run(store: Path, out: Path, *options: str) -> int:
    return main(["export", str(store), "--output", str(out), *options])


def exported(out: Path) -> list[dict[str, Any]]:
    """Read an export as anybody would: without Spark, by its partitions."""
    table = ds.dataset(out, format="parquet", partitioning="hive").to_table()
    return sorted(table.to_pylist(), key=lambda row: int(row["physicalOffset"]))


def offsets(out: Path) -> list[int]:
    return [row["physicalOffset"] for row in exported(out)]


def log_of_orders(folder: Path, count: int, *, segment_size: int = SEGMENT) -> LogWriter:
    """Orders and bills in small segments; the last one is not full."""
    log = LogWriter(folder / "commitlog", segment_size=segment_size)
    for number in range(count):
        log.append(
            ("orders", "bills")[number % 3 == 0], b"%d" % number * 20, {"KEYS": f"k{number}"}
        )
    log.close()
    return log


def of_full_segments(log: LogWriter) -> list[Written]:
    last = log.end // SEGMENT * SEGMENT
    return [written for written in log.written if written.offset < last]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("plain-clean", marks=pytest.mark.campaign),
        pytest.param("tx-midway-killed", marks=pytest.mark.campaign),
        "ipv6",
    ],
)
def test_a_golden_store_s_messages_are_exported_as_they_are(name: str, tmp_path: Path) -> None:
    """Every field, and bodies as they were before their producer compressed them."""
    store = golden_store.unpack(name, tmp_path)
    seen = messages.visible(store.messages)

    assert run(store.root, tmp_path / "out", "--active", "--decompress") == 0

    rows = exported(tmp_path / "out")
    assert [row["physicalOffset"] for row in rows] == [m["commitLogOffset"] for m in seen]
    for row, m in zip(rows, seen, strict=True):
        told = m["properties"]
        stored = datetime.fromtimestamp(m["storeTimestamp"] // 1000, UTC)
        plain = {**m, "body": m.get("bodyDecompressed") or m["body"]}
        assert row["value"] == messages.body(plain)
        assert row["crcOk"] is True
        assert (row["topic"], row["partition"]) == (m["topic"], m["queueId"])
        assert row["date"] in (stored.date(), stored.date().isoformat())
        assert (row["offset"], row["flag"]) == (m["queueOffset"], m["flag"])
        assert (row["sysFlag"], row["reconsumeTimes"]) == (m["sysFlag"], m["reconsumeTimes"])
        assert (row["tags"], row["uniqKey"]) == (told.get("TAGS"), told.get("UNIQ_KEY"))
        assert (row["key"] or b"").decode() == told.get("KEYS", "")
        assert row["timestamp"].timestamp() * 1000 == pytest.approx(m["storeTimestamp"])
        assert row["preparedTransactionOffset"] == m["preparedTransactionOffset"]


@pytest.mark.campaign
def test_the_stored_bytes_are_kept_unless_asked_otherwise(tmp_path: Path) -> None:
    """Compressed bodies stay compressed, and their CRC fits."""
    store = golden_store.unpack("plain-clean", tmp_path)
    packed = {
        m["commitLogOffset"]: messages.body(m)
        for m in messages.visible(store.messages)
        if m["sysFlag"] & 1
    }
    assert packed

    assert run(store.root, tmp_path / "out", "--active") == 0

    values = {row["physicalOffset"]: row["value"] for row in exported(tmp_path / "out")}
    assert {offset: values[offset] for offset in packed} == packed


def test_topics_can_be_chosen_and_the_broker_s_own_are_left_out(tmp_path: Path) -> None:
    """Directories name topic and day; a topic with a percent sign is one too."""
    log = LogWriter(tmp_path / "commitlog")
    transactions = Ours(log)
    transactions.commit(transactions.half())
    transactions.rollback(transactions.half())
    transactions.commit_delayed(transactions.half())
    transactions.write_ops()
    log.append("%RETRY%g", b"again")
    log.append("bills", b"b")
    log.close()

    assert run(tmp_path, tmp_path / "all", "--active") == 0
    assert run(tmp_path, tmp_path / "some", "--active", "--topic", "%RETRY%g") == 0

    assert Counter(row["topic"] for row in exported(tmp_path / "all")) == {"orders": 2, "bills": 1}
    (row,) = exported(tmp_path / "some")
    assert (row["topic"], row["value"], row["date"]) == ("%RETRY%g", b"again", "2023-11-14")
    assert (tmp_path / "all" / "topic=orders" / "date=2023-11-14").is_dir()


def test_a_run_exports_what_the_ones_before_it_have_not(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full segments by default; the active one later, or as far as it is whole."""
    out = tmp_path / "out"
    log = log_of_orders(tmp_path, 60)
    assert run(tmp_path, out) == 0
    assert offsets(out) == [written.offset for written in of_full_segments(log)]

    capsys.readouterr()
    assert run(tmp_path, out, "--json", "-") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["ranges"]) == (0, [])
    assert told["left_bytes"] == log.end - log.end // SEGMENT * SEGMENT

    assert run(tmp_path, out, "--active") == 0
    assert offsets(out) == [written.offset for written in log.written]

    for count in (61, 75, 130):  # the same log goes on: it is written anew, with the same bytes
        shutil.rmtree(tmp_path / "commitlog")
        log = log_of_orders(tmp_path, count)
        assert run(tmp_path, out, "--active") == 0
        assert offsets(out) == [written.offset for written in log.written]
    assert spark.read.parquet(str(out)).count() == 130


def test_an_export_that_is_killed_twice_loses_and_repeats_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """SIGKILL at any moment while it writes; Spark and a reader that knows nothing of it.

    ``HALFMQ_EXPORT_ROWS`` says how many messages there are.
    """
    log, out = log_of_orders(tmp_path, ROWS, segment_size=1 << 17), tmp_path / "out"
    batch_bytes = log.end // 16
    seed = int(os.environ.get("HALFMQ_SEED", random.randrange(1 << 32)))
    print(f"HALFMQ_SEED={seed}")
    choose = random.Random(seed)
    visible = 0
    for _ in range(2):
        with batched_export(tmp_path, out, batch_bytes) as process:
            visible += choose.randint(1, 3)
            while len(batches(out)) < visible and process.poll() is None:
                time.sleep(0.01)
            time.sleep(choose.random() / 2)  # any part of a batch, or of the next ones
            assert process.poll() is None, "it was done before it was killed"
            process.kill()
        visible = len(batches(out))
        print(f"killed with {visible} batches visible")

    with batched_export(tmp_path, out, batch_bytes) as process:
        assert process.wait(300) == 0

    assert len(batches(out)) > visible
    assert spark.read.parquet(str(out)).count() == len(offsets(out))
    full = [written.offset for written in log.written if written.offset < log.end >> 17 << 17]
    assert offsets(out) == full


def batches(out: Path) -> list[Path]:
    return list((out / "_spark_metadata").glob("[0-9]*"))


def batched_export(store: Path, out: Path, batch_bytes: int) -> subprocess.Popen[bytes]:
    """Begin an export in a process of its own; its JVM ends when it does."""
    command = [sys.executable, "-c", BATCHED, str(batch_bytes), "export", str(store)]
    return subprocess.Popen([*command, "--output", str(out)], stderr=subprocess.DEVNULL)


def test_damage_and_bad_bodies_are_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can be read is exported; a body that does not fit its CRC is marked."""
    log = LogWriter(tmp_path / "commitlog")
    log.append("orders", b"sound")
    log.append_raw(b"\x09" * 333)
    log.append("orders", b"spoilt", body_crc=1)
    log.append("orders", b"sound")
    log.close()

    assert run(tmp_path, tmp_path / "out", "--active", "--json", "-") == 1

    (one,) = json.loads(capsys.readouterr().out)["ranges"]
    assert (one["rows"], one["damaged_bytes"], one["bad_crcs"]) == (3, 333, 1)
    assert [row["crcOk"] for row in exported(tmp_path / "out")] == [True, False, True]


def test_a_body_that_cannot_be_decompressed_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row is there, without a body, and says why."""
    log = LogWriter(tmp_path / "commitlog")
    log.append("orders", b"is not packed", sys_flag=1)
    log.close()

    assert run(tmp_path, tmp_path / "out", "--active", "--decompress", "--json", "-") == 1

    (one,) = json.loads(capsys.readouterr().out)["ranges"]
    assert (one["rows"], one["bad_crcs"], one["bad_bodies"]) == (1, 0, 1)
    (row,) = exported(tmp_path / "out")
    assert row["value"] is None
    assert row["error"]


def ends_of_batches(out: Path) -> list[int]:
    notes = (out / "_halfmq" / "checkpoint" / "offsets").glob("[0-9]*")
    return [json.loads(note.read_text().splitlines()[-1])["physicalOffset"] for note in notes]


def test_what_was_deleted_before_it_was_exported_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once: the run that goes on behind it says so."""
    out = tmp_path / "out"
    log_of_orders(tmp_path, 40)
    assert run(tmp_path, out) == 0
    log = log_of_orders(tmp_path, 120)
    ends = sorted(int(path.name) for path in (tmp_path / "commitlog").iterdir())
    end = max(ends_of_batches(out))
    for base in ends[:-2]:
        (tmp_path / "commitlog" / f"{base:020}").unlink()
    capsys.readouterr()

    assert run(tmp_path, out, "--json", "-") == 1
    assert json.loads(capsys.readouterr().out)["missing"] == [{"start": end, "end": ends[-2]}]
    assert run(tmp_path, out) == 0

    expected = [w.offset for w in of_full_segments(log) if not end <= w.offset < ends[-2]]
    assert offsets(out) == expected


def spoil_state(folder: Path) -> None:
    (folder / "out" / "_halfmq" / "export.json").write_text("[]")


def shorten_log(folder: Path) -> None:
    shutil.rmtree(folder / "commitlog")
    log_of_orders(folder, 20)


def change_log(folder: Path) -> None:
    shutil.rmtree(folder / "commitlog")
    log = LogWriter(folder / "commitlog", segment_size=SEGMENT)
    for _ in range(200):
        log.append("orders", b"of another log")
    log.close()


@pytest.mark.parametrize(
    ("happens", "options", "said"),
    [
        (None, ["--topic", "orders"], "the export was begun with topics = None, not ['orders']"),
        (None, ["--decompress"], "the export was begun with decompress = False, not True"),
        (spoil_state, [], "export.json is not of this job"),
        (
            shorten_log,
            [],
            "it was cut, or it is another log",
        ),
        (change_log, [], "the log was cut there and written anew"),
    ],
)
@pytest.mark.campaign
def test_what_does_not_go_with_an_export_ends_with_2(
    happens: Callable[[Path], None] | None,
    options: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is mixed that does not belong together; a sentence says why."""
    log_of_orders(tmp_path, 60)
    assert run(tmp_path, tmp_path / "out") == 0
    before = offsets(tmp_path / "out")
    if happens:
        happens(tmp_path)
    capsys.readouterr()

    assert run(tmp_path, tmp_path / "out", *options) == 2

    shown = capsys.readouterr()
    assert shown.err.startswith("export: ")
    *steps, sentence = shown.err.splitlines()
    assert said in sentence
    assert all(" s: " in step for step in steps)
    assert offsets(tmp_path / "out") == before


def test_a_directory_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export does not mix with files that are there."""
    log_of_orders(tmp_path, 20)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")

    assert run(tmp_path, tmp_path / "out") == 2
    assert "holds letter.txt, and is no export" in capsys.readouterr().err


def test_two_exports_do_not_write_into_one_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one is told, and does nothing."""
    log_of_orders(tmp_path, 60)
    (tmp_path / "out").mkdir()

    export_ = Export(str(tmp_path), tmp_path / "out")
    # As another export that is at work holds it.
    with export_.opened(survey(tmp_path)):
        assert run(tmp_path, tmp_path / "out") == 2

    assert "another export is running here" in capsys.readouterr().err


def test_the_function_works_on_any_log_in_a_notebook(spark: SparkSession, tmp_path: Path) -> None:
    """Without the command: what would be exported, as a DataFrame; days are those of UTC."""
    log_of_orders(tmp_path, 20)
    log = message_roles.read_log(spark, str(tmp_path), *export.COLUMNS, "recordType")
    zone = spark.conf.get("spark.sql.session.timeZone")
    assert zone is not None
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        rows = export.exported(log, ["bills"]).select("topic", "date").collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)

    assert Counter(rows) == {("bills", date(2023, 11, 14)): 7}
