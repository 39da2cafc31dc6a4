"""Transactions counted by state, over time and by age, and how long decisions took."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfmq.spark_jobs.audit import statistics
from halfmq.spark_jobs.audit.auditor import audited
from halfmq.spark_jobs.audit.checks import Checks
from halfmq.spark_jobs.audit.key_groups import TRANSACTION_COLUMNS, VERDICT_DDL
from halfmq.spark_jobs.audit.rules.model import AuditedState
from halfmq.spark_jobs.audit.statistics import BINS_MAX, SHOWN, Scale
from halfmq.spark_jobs.log.lookup import Names
from tests.support import golden_store
from tests.support.log_writer import START, LogWriter, Ours

HOUR = 3_600_000  # ms
ON = Scale(start_ms=5_000, width_ms=1_000, bins=3, now_ms=130_000)
DDL = ", ".join(VERDICT_DDL.split(", ")[: len(TRANSACTION_COLUMNS)])


def transaction(
    state: AuditedState, time: int | None, took: int | None = None, label: int = 1, checks: int = 0
) -> tuple[object, ...]:
    half = None if time is None else 700 + label
    return (str(state), 7, half, None, took, time, checks, 1, label)


def test_each_transaction_counts_once_at_its_time(spark: SparkSession) -> None:
    """One with a wrong clock at the edge; one without a half for its state alone."""
    rows = [
        transaction(AuditedState.COMMITTED, 5_000, 1_500),
        transaction(AuditedState.COMMITTED, 7_999, 5),
        transaction(AuditedState.ROLLED_BACK, 6_000, -5_900),
        transaction(AuditedState.PENDING, 1),
        transaction(AuditedState.PENDING, 10**14),
        transaction(AuditedState.PARKED, 70_001),
        transaction(AuditedState.PARKED, None),
        transaction(AuditedState.EXPIRED, None, 3),
        transaction(AuditedState.UNDETERMINED, 6_000),
    ]

    counts = statistics.counted(statistics.tally(spark.createDataFrame(rows, DDL), ON), ON)

    assert counts.states == {
        "committed": 2, "rolled_back": 1, "pending": 2, "parked": 2, "expired": 1,
        "undetermined": 1,
    }  # fmt: skip
    assert counts.timeline.prepared == {
        "committed": [1, 0, 1], "rolled_back": [0, 1, 0], "pending": [1, 0, 1], "parked": [0, 0, 1],
    }  # fmt: skip
    assert counts.timeline.decided == [1, 1, 1]
    assert counts.open_ages.counts == {
        "pending": [1, 1, 0, 0, 0, 0, 0], "parked": [1, 0, 0, 0, 0, 0, 0],
    }  # fmt: skip


def test_delays_are_told_by_group_and_topic(spark: SparkSession) -> None:
    """Percentiles of what was decided; a decision before its half took no time."""
    rows = [transaction(AuditedState.COMMITTED, 10, took) for took in range(100)]
    rows += [
        transaction(AuditedState.PENDING, 10),
        transaction(AuditedState.COMMITTED, 10, -5, 2, 3),
    ]

    names = {701: Names(None, "b", "g"), 702: Names(None, "a", "g")}

    told = statistics.delays(spark.createDataFrame(rows, DDL), names.__getitem__)

    assert [(one.topic, one.decided, one.prepared) for one in told] == [
        ("a", 1, 1),
        ("b", 100, 101),
    ]
    assert told[0].took_ms == {"p50": 0, "p90": 0, "p99": 0, "max": 0}
    assert told[0].checks["max"] == 3
    assert told[1].took_ms == {"p50": 49, "p90": 89, "p99": 98, "max": 99}


@pytest.mark.parametrize("wrong", [1, START - 10**9])
def test_one_wrong_clock_does_not_stretch_the_chart(
    wrong: int, spark: SparkSession, tmp_path: Path
) -> None:
    """No checksum covers the time of a record."""
    log = LogWriter(tmp_path / "commitlog")
    transactions = Ours(log)
    for place in range(20):
        right = log.now
        log.now = wrong if place == 7 else right
        half = transactions.half(f"KEY-{place}")
        log.now = right + 1
        transactions.commit(half)
    log.close()

    with audited(spark, str(tmp_path)) as audit:
        timeline = audit.timeline

    end = timeline.start_ms + timeline.width_ms * len(timeline.decided)
    assert START <= timeline.start_ms < end <= log.now + 60
    assert sum(timeline.prepared[AuditedState.COMMITTED]) == 20


def test_ages_count_to_where_the_audit_stands(spark: SparkSession, tmp_path: Path) -> None:
    """A half that waits for two hours is among those of one to six."""
    log = LogWriter(tmp_path / "commitlog")
    transactions = Ours(log)
    transactions.half("KEY-1")
    transactions.commit(transactions.half("KEY-2"))
    log.now += 2 * HOUR
    transactions.half("KEY-3")
    transactions.commit(transactions.half("KEY-4"))
    log.close()

    with audited(spark, str(tmp_path)) as audit:
        assert audit.open_ages.counts[AuditedState.PENDING] == [1, 0, 0, 1, 0, 0, 0]
        assert sum(audit.timeline.prepared[AuditedState.COMMITTED]) == 2
        assert audit.timeline.undecided[0] == 1
        assert audit.timeline.undecided[-1] == 2
    with audited(spark, str(tmp_path), checks=Checks(as_of_ms=log.now + 240 * HOUR)) as audit:
        assert audit.open_ages.counts[AuditedState.PENDING] == [0, 0, 0, 0, 0, 0, 2]


def test_every_transaction_of_a_broker_is_counted(spark: SparkSession, tmp_path: Path) -> None:
    """The numbers over time sum up to the states, and what is open to the pending and parked."""
    with audited(spark, str(golden_store.unpack("tx-midway-killed", tmp_path).root)) as audit:
        assert {state: sum(row) for state, row in audit.timeline.prepared.items()} == {
            state: audit.states[state] for state in SHOWN
        }
        still_open = audit.states[AuditedState.PENDING] + audit.states[AuditedState.PARKED]
        assert audit.timeline.undecided[-1] == still_open
        assert len(audit.timeline.decided) <= BINS_MAX
