"""Every fault of transactions that a log can show, found by the audit as users run it.

A log holds many faults, since each audit takes seconds. The same logs are read record by record in
``tests/unit/spark_jobs/audit/test_faults.py``.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfmq.spark_jobs.audit.auditor import Audit, audited
from halfmq.spark_jobs.audit.checks import Checks
from tests.support import altered_log
from tests.support.log_writer import Written
from tests.support.oracle import transactions as oracle
from tests.support.oracle.words import OF_QUEUES, Found, Kind, State
from tests.support.planted_faults import DESTROYED, ORDERS, SEGMENT, plant_faults
from tests.support.planted_log import PENDING_AGE, Planted
from tests.support.seeds import run_seed

SEED = run_seed()
CAMPAIGN_SEEDS = int(os.environ.get("HALFMQ_AUDIT_SEEDS", "3"))
CHECKS = Checks(pending_age=PENDING_AGE)
PENDING_AGE_MS = PENDING_AGE // timedelta(milliseconds=1)


def found(audit: Audit) -> list[Found]:
    return sorted((one.kind, tuple(one.offsets)) for one in audit.anomalies)


def states(audit: Audit) -> dict[int, str]:
    return {row["halfOffset"]: row["state"] for row in audit.transactions.collect()}


def finds_what_was_planted(spark: SparkSession, planted: Planted, root: Path) -> None:
    with audited(spark, str(root), checks=CHECKS) as audit:
        assert found(audit) == planted.expected, [one.detail for one in audit.anomalies]
        assert states(audit) == {half: str(state) for half, state in planted.states.items()}
        assert audit.states == Counter(map(str, planted.states.values()))


@pytest.mark.parametrize("order", ORDERS)
def test_every_fault_is_found_and_nothing_else(
    order: str, spark: SparkSession, tmp_path: Path
) -> None:
    """In what each broker wrote: kinds, offsets and states are those that were planted."""
    planted = plant_faults(tmp_path, SEED, order=ORDERS[order], steps=400, fault_every=5)

    finds_what_was_planted(spark, planted, tmp_path)


@pytest.mark.parametrize("order", ORDERS)
def test_healthy_logs_alarm_nobody(order: str, spark: SparkSession, tmp_path: Path) -> None:
    """Retries, delays, messages sent twice, shrunk topics, checks, parking and late decisions."""
    planted = plant_faults(tmp_path, SEED, order=ORDERS[order], fault_every=None)

    assert not planted.expected
    finds_what_was_planted(spark, planted, tmp_path)


def test_what_left_the_log_is_held_against_nobody(spark: SparkSession, tmp_path: Path) -> None:
    """Halves in segments that were deleted by age; faults in the rest are found as before."""
    planted = plant_faults(tmp_path, SEED, order=ORDERS["in turn"])
    segments = sorted((tmp_path / "commitlog").iterdir())
    for path in segments[: len(segments) // 3]:
        path.unlink()
    start = SEGMENT * (len(segments) // 3)

    with audited(spark, str(tmp_path), checks=CHECKS) as audit:
        told, kept = found(audit), states(audit)

    remaining = {one for one in planted.expected if min(one[1]) >= start}
    # The half that such a decision names may have been in the deleted segments.
    assert {one for one in remaining if one[0] != Kind.DECISION_WITHOUT_HALF} <= set(told)
    for kind, offsets in told:
        assert any(kind == one and {*offsets} <= {*all_} for one, all_ in planted.expected)
    for half, state in kept.items():
        assert planted.states.get(half, state) == state


@pytest.mark.parametrize("order", ["halfmq's", "of RocketMQ 5.3"])
def test_destroyed_finals_leave_it_open_what_was_decided(
    order: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Holes, garbage and failed CRCs are told once; what they held is not taken for rolled back."""
    planted = plant_faults(
        tmp_path, SEED, order=ORDERS[order], faults=DESTROYED, steps=200, fault_every=20
    )

    with audited(spark, str(tmp_path), checks=CHECKS) as audit:
        assert found(audit) == planted.expected
        told = states(audit)

    assert told.keys() == planted.states.keys()
    for half, state in planted.states.items():
        # What RocketMQ rolled back leaves nothing that would tell it from a lost commit.
        is_open = state is State.ROLLED_BACK and told[half] == State.UNDETERMINED
        assert told[half] == state or (is_open and order != "halfmq's")


# --- what a broker wrote


def test_bytes_altered_in_a_brokers_log_are_found(spark: SparkSession, tmp_path: Path) -> None:
    """Its log is clean as it was written, also to a reader that shares nothing with the audit."""
    store = altered_log.write(tmp_path)
    written = oracle.audit(store, PENDING_AGE_MS)
    assert written.found == []
    # Queues and digests tell of altered bytes as well.
    checks = dataclasses.replace(CHECKS, queues=False)
    with audited(spark, str(store), checks=checks) as audit:
        assert found(audit) == []
        assert states(audit) == {half: str(told) for half, told in written.states.items()}

    altered = altered_log.Altered(store, SEED)
    altered.alter(2)

    assert oracle.audit(store, PENDING_AGE_MS).found == sorted(altered.expected)
    with audited(spark, str(store / "commitlog"), checks=checks) as audit:
        told = [one for one in found(audit) if one[0] not in OF_QUEUES]
        assert told == sorted(altered.expected)


# --- the clock


@pytest.mark.parametrize("seconds", [5, 30, 3600])
def test_a_clock_that_steps_back_hides_nothing(
    seconds: int, spark: SparkSession, tmp_path: Path
) -> None:
    """Faults after the step are found, all records count, and the step is a remark."""
    planted = plant_faults(tmp_path, SEED, order=("halfmq",), steps=100, fault_every=None)
    log = sorted(planted.log.written, key=lambda one: one.offset)
    # Not after a pause: times would not decrease, or only that of one record, which is no step.
    start = next(
        at for at in range(len(log) - 200, len(log)) if _lasted_ms(log[at - 3 : at + 3]) < 100
    )
    late = log[start:]
    for record in late:
        _set_back(planted, record.offset, seconds * 1_000)

    with audited(spark, str(tmp_path), checks=CHECKS) as audit:
        # The times for which messages wait are not set back here, nor those in the entries of
        # their queues, so they come early.
        allowed = {Kind.EARLY_DELIVERY, Kind.WRONG_QUEUE_ENTRY}
        assert {kind for kind, _ in found(audit)} <= allowed
        assert audit.log.records == len(log)
        assert states(audit) == {half: str(state) for half, state in planted.states.items()}
        (remark,) = [one for one in audit.remarks if one.kind == "clock_step"]

    assert late[0].offset in remark.offsets


def _lasted_ms(records: list[Written]) -> int:
    return records[-1].stored - records[0].stored


def _set_back(planted: Planted, offset: int, milliseconds: int) -> None:
    path = planted.log.folder / f"{offset - offset % planted.log.segment_size:020}"
    with path.open("r+b") as file:
        file.seek(offset % planted.log.segment_size + 56)
        (stored,) = struct.unpack(">q", file.read(8))
        file.seek(-8, 1)
        file.write(struct.pack(">q", stored - milliseconds))


# --- many


@pytest.mark.campaign
def test_hundreds_of_faults_in_many_logs(spark: SparkSession, tmp_path: Path) -> None:
    """Seeds and orders of brokers at random: all found, no false alarm, no wrong state."""
    planted_in_all = found_in_all = false = wrong = 0
    for number in range(CAMPAIGN_SEEDS):
        for name, order in ORDERS.items():
            root = tmp_path / f"{number} {name}"
            planted = plant_faults(root, SEED + number, order=order, steps=400, fault_every=5)
            with audited(spark, str(root), checks=CHECKS) as audit:
                expected, told = Counter(planted.expected), Counter(found(audit))
                known = states(audit)
            planted_in_all += expected.total()
            found_in_all += (expected & told).total()
            false += (told - expected).total()
            wrong += sum(known.get(half) != state for half, state in planted.states.items())
    print(f"\nseed {SEED}: {planted_in_all} planted, {found_in_all} found, {false} false alarms")

    assert planted_in_all >= 150
    assert (found_in_all, false, wrong) == (planted_in_all, 0, 0)
