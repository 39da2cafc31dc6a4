"""An audit that reads no full segment twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from halfmq.spark_jobs.__main__ import main
from halfmq.spark_jobs.audit.auditor import audited
from halfmq.spark_jobs.audit.overview import Checks
from tests.support.log_writer import Apache, LogWriter, Ours
from tests.support.planted_log import PENDING_AGE, plant

CHECKS = Checks(pending_age=PENDING_AGE)


def outcome(spark: SparkSession, root: Path, cache: Path | None) -> tuple[int, Any]:
    """How much was read, and all that was found."""
    with audited(spark, str(root), checks=CHECKS, cache=str(cache) if cache else None) as audit:
        listed = Counter(map(tuple, audit.transactions.collect()))
        return audit.log.scanned_bytes, (
            audit.log.records,
            audit.log.bytes,
            audit.states,
            audit.delays,
            audit.anomalies,
            listed,
        )


@pytest.mark.parametrize("seed", [3])
@pytest.mark.campaign
def test_a_cached_audit_finds_what_another_finds(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    """Every planted anomaly; and the second one reads nothing but the segment that is not full."""
    root = tmp_path / "store"
    plant(root, seed, 150, fault_every=7, segment_size=1 << 15)
    sizes = [path.stat().st_size for path in sorted((root / "commitlog").iterdir())]

    read, expected = outcome(spark, root, None)
    first_read, first = outcome(spark, root, tmp_path / "cache")
    second_read, second = outcome(spark, root, tmp_path / "cache")

    assert first == second == expected
    assert first_read == read > sum(sizes[:-1])
    assert second_read == read - sum(sizes[:-1])
    assert len(sizes) > 2


def test_only_new_segments_are_read(spark: SparkSession, tmp_path: Path) -> None:
    """A log that has grown costs what has grown; what was pending may have been decided."""
    log = LogWriter(tmp_path / "log", segment_size=1 << 14)
    ours, apache = Ours(log), Apache(log, group="other")
    undecided = [ours.half() for _ in range(100)]
    first_end = log.end
    log.close()
    before, (*_, states, _, _, _) = outcome(spark, tmp_path / "log", tmp_path / "cache")
    for half in undecided[:50]:
        ours.commit(half)
    for half in undecided[50:80]:
        ours.rollback(half)
    ours.write_ops()
    apache.rollback(apache.half())
    apache.write_ops()
    log.close()

    read, (*_, after, _, anomalies, listed) = outcome(spark, tmp_path / "log", tmp_path / "cache")

    full = first_end - first_end % (1 << 14)
    assert before == first_end
    assert read == log.end - full
    assert (states["pending"], after["pending"]) == (100, 20)
    assert (after["committed"], after["rolled_back"], anomalies) == (50, 31, [])
    assert listed.total() == 101


def test_the_summary_says_how_much_was_read(tmp_path: Path) -> None:
    """Of full segments, all by the first audit and nothing by the second; the rest is the same."""
    log = LogWriter(tmp_path / "log", segment_size=1 << 14)
    transactions = Ours(log)
    for _ in range(100):
        transactions.commit(transactions.half())
    log.close()
    *full, last = sorted((tmp_path / "log").iterdir())
    last.unlink()  # it could still grow

    reports = []
    for name in ("first.json", "second.json"):
        places = [str(tmp_path / "log"), "--cache", str(tmp_path / "cache")]
        main(["audit", *places, "--json", str(tmp_path / name)])
        reports.append(json.loads((tmp_path / name).read_text()))

    read = [report["log"].pop("scanned_bytes") for report in reports]
    assert read == [len(full) << 14, 0]
    assert reports[0] == reports[1]
    assert reports[0]["log"]["segments"] == len(full) > 1
