"""The audit of every golden store, without Spark: what released brokers wrote, in every state."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmq.spark_jobs.audit.rules.model import Kind
from tests.support import golden_store
from tests.support.auditing import audit_here

# What was damaged on purpose, and what RocketMQ itself did wrong; see README-store.md.
TWICE_AND_AFTER_ROLLBACK: list[tuple[Kind, tuple[int, ...]]] = [
    (Kind.COMMIT_AFTER_ROLLBACK, (11098, 11625)),
    (Kind.COMMITTED_TWICE, (9574, 10065)),
]
WRONG: dict[str, list[tuple[Kind, tuple[int, ...]]]] = {
    "plain-badcrc": [(Kind.CRC, (225680,))],
    "tx-midway-clean": TWICE_AND_AFTER_ROLLBACK,
    "tx-midway-killed": TWICE_AND_AFTER_ROLLBACK,
    "v4-tx": [
        (Kind.COMMIT_AFTER_ROLLBACK, (10360, 10496)),
        (Kind.COMMITTED_TWICE, (8837, 9373)),
    ],
}


@pytest.mark.parametrize("step", [1 << 12, 1 << 30])
@pytest.mark.parametrize("name", golden_store.NAMES)
def test_what_is_wrong_with_a_golden_store_is_found_and_nothing_else(
    name: str, step: int, tmp_path: Path
) -> None:
    """CRCs and transactions, wherever the log is split; queues: ``tests/spark/test_audit.py``."""
    store = golden_store.unpack(name, tmp_path)

    outcome = audit_here(store.root, step=step)

    assert outcome.found == sorted(WRONG.get(name, [])), outcome.details
