"""The logs on which the audit's speed is measured are logs in which nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import spark_log
from benchmarks.spark_log import write_log
from halfmq.spark_jobs.audit.rules.model import AuditedState
from tests.support.auditing import audit_here


def test_a_generated_log_is_sound_and_has_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several segments: each offset, link, CRC and queue offset is right."""
    monkeypatch.setattr(spark_log, "SEGMENT_SIZE", 1 << 16)

    log = write_log(tmp_path / "store", 1_003)
    outcome = audit_here(tmp_path / "store")

    assert outcome.found == []
    assert log.records == 1_005
    assert log.segments == len(list((tmp_path / "store" / "commitlog").iterdir())) > 3
    half = log.transactions // 2
    assert outcome.states == {AuditedState.COMMITTED: half, AuditedState.ROLLED_BACK: half}
