"""What `pytest` runs by itself, and what it says it left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import QUICK, SLOW
from tests.support.python import python

ROOT = Path(__file__).parents[2]
FEW = ("tests/browser", "tests/quality/test_readme.py", "tests/unit/store/log/test_flush.py")


def _collected(*options: str) -> str:
    done = python("-m", "pytest", "-n", "0", "--collect-only", "-q", *options, *FEW, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_default_run_says_what_it_left_out_and_how_to_run_it() -> None:
    """By folder, file or test; what was asked for by a mark leaves nothing unsaid."""
    quick, slow = _collected(), _collected("-m", "not campaign")

    assert "tests/unit/store/log/test_flush.py::" in quick
    assert "tests/quality/test_readme.py::test_the_examples" in quick
    assert "test_the_audit_line" not in quick
    assert "tests/browser/" not in quick
    assert "slow tests (Spark" in quick
    assert "pytest -m 'not campaign'" in quick
    assert "test_the_audit_line" in slow
    assert "tests/browser/test_report.py::" in slow
    assert "left out" not in slow


@pytest.mark.parametrize("begin", [*SLOW, *QUICK])
def test_what_is_marked_slow_exists(begin: str) -> None:
    """Whatever moves has to be marked where it has gone."""
    path, _, name = begin.partition("::")

    assert name in (ROOT / path).read_text() if name else (ROOT / path).exists()
