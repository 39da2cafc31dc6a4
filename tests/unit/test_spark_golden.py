"""The audit of every golden store, without Spark: what released brokers wrote, in every state."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from halfmq.spark_jobs.audit.judge import Kind
from tests.support import golden_store
from tests.support.auditing import audit_here
from tests.support.damage import extend, filled_store, only

# What was damaged on purpose, and what RocketMQ itself did wrong; see README-store.md.
TWICE_AND_AFTER_ROLLBACK: list[tuple[Kind, tuple[int, ...]]] = [
    (Kind.COMMIT_AFTER_ROLLBACK, (11098, 11625)),
    (Kind.COMMITTED_TWICE, (9574, 10065)),
]
WRONG: dict[str, list[tuple[Kind, tuple[int, ...]]]] = {
    "plain-badcrc": [(Kind.CRC, (225680,))],
    "clean-cq-short": [(Kind.MISSING_QUEUE_ENTRY, (234367,))],
    "stale-cq": [
        (Kind.WRONG_QUEUE_ENTRY, (offset,))
        for offset in (224478, 224867, 225165, 225680, 226104, 226402, 226835)
    ],
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
    """Order, queues, consume queues, topics, CRCs and transactions, wherever the log is split."""
    store = golden_store.unpack(name, tmp_path)

    outcome = audit_here(store.root, step=step)

    assert outcome.found == sorted(WRONG.get(name, [])), outcome.details


def test_a_tags_code_may_stand_in_an_extension(tmp_path: Path) -> None:
    """With ``enableConsumeQueueExt`` RocketMQ writes an address of it into the entry."""
    root = filled_store(tmp_path / "store", 20)
    queue = only(root / "consumequeue" / "orders" / "1")
    extend(root, queue, 3)
    assert audit_here(root, step=1 << 30).found == []

    shutil.rmtree(root / "consumequeue_ext")
    assert [kind for kind, _ in audit_here(root, step=1 << 30).found] == [Kind.WRONG_QUEUE_ENTRY]
