"""Every fault of transactions that a log can show, planted one by one and many at once.

The log is read by ``naive_audit`` here, record by record; with Spark in
``tests/spark/test_audit_faults.py``.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from halfmq.spark_jobs.audit.model import AuditedState, Kind
from tests.support.naive_audit import Naive, audit
from tests.support.planted_faults import (
    DESTROYED,
    OF_BOTH,
    OF_OURS,
    ORDERS,
    Fault,
    plant_faults,
)
from tests.support.planted_log import PENDING_AGE, Planted
from tests.support.seeds import run_seed

FIRST_SEED = run_seed()
# HALFMQ_AUDIT_SEEDS=1000 makes a campaign of it; a seed that failed is in the name of its test.
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("HALFMQ_AUDIT_SEEDS", "1")))
PENDING_AGE_MS = PENDING_AGE // timedelta(milliseconds=1)
FAULTS: list[tuple[str, Fault]] = [
    *((dialect, fault) for dialect in ("4.9", "5.3", "halfmq") for fault in dict.fromkeys(OF_BOTH)),
    *(("halfmq", fault) for fault in OF_OURS),
]


def finds_what_was_planted(planted: Planted, naive: Naive) -> None:
    assert Counter(naive.found) == Counter(planted.expected), naive.details
    assert naive.transactions == planted.states
    assert not naive.states[AuditedState.UNFOUNDED]


@pytest.mark.parametrize(
    ("dialect", "fault"), FAULTS, ids=[f"{fault.__name__}, {dialect}" for dialect, fault in FAULTS]
)
def test_each_fault_is_found_where_its_dialect_allows(
    dialect: str, fault: Fault, tmp_path: Path
) -> None:
    """By its kind and offsets, with the state that it leaves, and nothing else is blamed."""
    planted = plant_faults(
        tmp_path, FIRST_SEED, order=(dialect,), faults=[fault], steps=60, fault_every=9
    )

    assert planted.expected
    finds_what_was_planted(planted, audit(tmp_path, PENDING_AGE_MS))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ORDERS)
def test_faults_are_found_in_what_each_broker_wrote(order: str, seed: int, tmp_path: Path) -> None:
    """Also where one broker goes on with the log of the other, back and forth."""
    planted = plant_faults(tmp_path, seed, order=ORDERS[order])

    finds_what_was_planted(planted, audit(tmp_path, PENDING_AGE_MS))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ORDERS)
def test_logs_without_faults_are_clean(order: str, seed: int, tmp_path: Path) -> None:
    """Retries, delays, messages sent twice, shrunk topics, copies and parking alarm nobody."""
    planted = plant_faults(tmp_path, seed, order=ORDERS[order], fault_every=None)

    assert not planted.expected
    finds_what_was_planted(planted, audit(tmp_path, PENDING_AGE_MS))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ORDERS)
def test_what_left_the_log_is_held_against_nobody(order: str, seed: int, tmp_path: Path) -> None:
    """The oldest segments were deleted by age: no new finding, no other state."""
    planted = plant_faults(tmp_path, seed, order=ORDERS[order])
    segments = sorted((tmp_path / "commitlog").iterdir())
    for path in segments[: random.Random(seed).randrange(1, len(segments) - 1)]:
        path.unlink()

    naive = audit(tmp_path, PENDING_AGE_MS)

    for kind, offsets in naive.found:
        assert any(kind is one and {*offsets} <= {*all_} for one, all_ in planted.expected)
    for half, state in naive.transactions.items():
        assert planted.states.get(half, state) is state  # of some only a check's copy is left


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ORDERS)
def test_destroyed_finals_leave_it_open_what_was_decided(
    order: str, seed: int, tmp_path: Path
) -> None:
    """Never rolled back, nor blamed twice; RocketMQ's rollbacks beside them may be open as well."""
    planted = plant_faults(
        tmp_path, seed, order=ORDERS[order], faults=DESTROYED, steps=200, fault_every=25
    )

    naive = audit(tmp_path, PENDING_AGE_MS)

    assert naive.found == planted.expected
    assert naive.transactions.keys() == planted.states.keys()
    for half, state in planted.states.items():
        told = naive.transactions[half]
        is_open = state is AuditedState.ROLLED_BACK and told is AuditedState.UNDETERMINED
        assert told is state or (is_open and order != "halfmq's")


def test_many_kinds_of_faults_are_planted(tmp_path: Path) -> None:
    """The writer leaves out none of the kinds that are about transactions."""
    kinds = {kind for kind, _ in plant_faults(tmp_path, FIRST_SEED, order=("halfmq",)).expected}

    assert kinds >= {
        Kind.MISSING_DECISION,
        Kind.MISSING_FINAL,
        Kind.ALTERED_FINAL,
        Kind.UNMARKED_FINAL,
        Kind.UNLINKED_DELIVERY,
        Kind.OVERDUE_DELIVERY,
        Kind.DELIVERED_TWICE,
        Kind.DECISION_WITHOUT_HALF,
        Kind.COMMITTED_TWICE,
        Kind.CRC,
    }
