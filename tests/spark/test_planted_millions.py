"""Every anomaly among millions of records in which nothing is wrong.

`HALFMQ_CAMPAIGN_SECONDS` (100) says how many: 20,000 for each, so two millions. Each log has both
dialects; the seed is in the name of its test.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from halfmq.spark_jobs.audit.auditor import audited
from halfmq.spark_jobs.audit.checks import Checks
from halfmq.spark_jobs.audit.rules.model import AuditedState, Kind
from tests.support.planted_log import DAMAGE, PENDING_AGE, plant
from tests.support.seeds import run_seed

SEEDS = [run_seed() + number for number in range(2)]
RECORDS = 20_000 * int(os.environ.get("HALFMQ_CAMPAIGN_SECONDS", "100"))
RECORDS_PER_STEP = 4  # about
FAULTS = 400
SEGMENT = 64 << 20


@pytest.mark.campaign
@pytest.mark.parametrize("seed", SEEDS)
def test_no_fault_hides_among_millions_and_none_is_invented(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    """Recall 100 %, no false alarm, and the state of every transaction."""
    steps = RECORDS // RECORDS_PER_STEP
    planted = plant(
        tmp_path / "store", seed, steps, fault_every=steps // FAULTS, segment_size=SEGMENT
    )
    print(f"seed={seed}: {len(planted.log.written):,} records, {len(planted.anomalies)} anomalies")

    with audited(spark, str(tmp_path / "store"), checks=Checks(pending_age=PENDING_AGE)) as audit:
        found = sorted((Kind(a.kind), tuple(a.offsets)) for a in audit.anomalies)
        halves = audit.transactions.where("halfOffset is not null")
        halves.select("halfOffset", "state").write.parquet(str(tmp_path / "halves"))
        counts, records = audit.states, audit.log.records

    assert found == planted.expected
    assert records == len(planted.log.written)
    unfounded = {str(AuditedState.UNFOUNDED): planted.decisions_on_nothing}
    assert counts == Counter(map(str, planted.states.values())) + Counter(unfounded)
    table = pq.read_table(tmp_path / "halves")
    states = dict(zip(table["halfOffset"].to_pylist(), table["state"].to_pylist(), strict=True))
    wrong = {at: state for at, state in states.items() if planted.states[at] != state}
    assert wrong == {}
    parked_alone = set(planted.states) - set(states)
    assert {planted.states[at] for at in parked_alone} <= {AuditedState.PARKED}


@pytest.mark.campaign
def test_damage_among_millions_is_found_and_blamed_on_nobody(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Bodies that do not fit their CRC, records that are none, zeros: each with its place."""
    steps = RECORDS // RECORDS_PER_STEP
    store = tmp_path / "store"
    planted = plant(
        store, SEEDS[0], steps, fault_every=steps // FAULTS, faults=DAMAGE, segment_size=SEGMENT
    )

    with audited(spark, str(store), checks=Checks(pending_age=PENDING_AGE)) as audit:
        found = sorted((Kind(a.kind), tuple(a.offsets)) for a in audit.anomalies)

    assert found == planted.expected
