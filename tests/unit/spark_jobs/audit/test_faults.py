"""Every fault of transactions that a log can show, planted one by one and many at once.

The audit without Spark and an oracle that shares nothing with it must both say what was planted.
With Spark: ``tests/spark/test_audit_faults.py``.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest

from halfmq.spark_jobs.audit.checks import Checks
from tests.support.auditing import audit_here
from tests.support.oracle.transactions import audit
from tests.support.oracle.words import Found, Kind, State
from tests.support.planted_faults import (
    DESTROYED,
    OF_BOTH,
    OF_OURS,
    ORDERS,
    SEGMENT,
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


class Told(NamedTuple):
    """What an audit says of a log."""

    found: list[Found]
    states: dict[int, str]  # by the half's offset


def by_the_oracle(root: Path) -> Told:
    told = audit(root, PENDING_AGE_MS)
    return Told(told.found, {half: str(state) for half, state in told.states.items()})


def by_the_audit(root: Path) -> Told:
    outcome = audit_here(root, step=SEGMENT, checks=Checks(pending_age=PENDING_AGE))
    found = [(str(kind), offsets) for kind, offsets in outcome.found]
    return Told(found, {half: str(state) for half, state in outcome.transactions.items()})


AUDITORS = [by_the_oracle, by_the_audit]


def finds_what_was_planted(planted: Planted, root: Path) -> None:
    for told in (one(root) for one in AUDITORS):
        assert Counter(told.found) == Counter(planted.expected)
        assert told.states == planted.states


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
    finds_what_was_planted(planted, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ORDERS)
def test_faults_are_found_in_what_each_broker_wrote(order: str, seed: int, tmp_path: Path) -> None:
    """Also where one broker goes on with the log of the other, back and forth."""
    planted = plant_faults(tmp_path, seed, order=ORDERS[order])

    finds_what_was_planted(planted, tmp_path)


@pytest.mark.parametrize("order", ORDERS)
def test_faults_are_found_in_a_folder_of_segments(order: str, tmp_path: Path) -> None:
    """Without the tables of a store; that no queue was lost is told by later records in it."""
    planted = plant_faults(tmp_path, FIRST_SEED, order=ORDERS[order], fault_every=4)

    finds_what_was_planted(planted, tmp_path / "commitlog")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ORDERS)
def test_logs_without_faults_are_clean(order: str, seed: int, tmp_path: Path) -> None:
    """Retries, delays, messages sent twice, shrunk topics, copies and parking alarm nobody."""
    planted = plant_faults(tmp_path, seed, order=ORDERS[order], fault_every=None)

    assert not planted.expected
    finds_what_was_planted(planted, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ORDERS)
def test_what_left_the_log_is_held_against_nobody(order: str, seed: int, tmp_path: Path) -> None:
    """The oldest segments were deleted by age: no new finding, no other state."""
    planted = plant_faults(tmp_path, seed, order=ORDERS[order])
    segments = sorted((tmp_path / "commitlog").iterdir())
    for path in segments[: random.Random(seed).randrange(1, len(segments) - 1)]:
        path.unlink()

    told = by_the_audit(tmp_path)

    for kind, offsets in told.found:
        assert any(kind == one and {*offsets} <= {*all_} for one, all_ in planted.expected)
    for half, state in told.states.items():
        assert planted.states.get(half, state) == state  # of some only a check's copy is left


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ORDERS)
def test_destroyed_finals_leave_it_open_what_was_decided(
    order: str, seed: int, tmp_path: Path
) -> None:
    """Never rolled back, nor blamed twice; RocketMQ's rollbacks beside them may be open as well."""
    planted = plant_faults(
        tmp_path, seed, order=ORDERS[order], faults=DESTROYED, steps=200, fault_every=25
    )

    for told in (one(tmp_path) for one in AUDITORS):
        assert told.found == planted.expected
        assert told.states.keys() == planted.states.keys()
        for half, state in planted.states.items():
            is_open = state is State.ROLLED_BACK and told.states[half] == State.UNDETERMINED
            assert told.states[half] == state or (is_open and order != "halfmq's")


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
