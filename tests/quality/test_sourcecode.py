"""Formatting, lint and types, run as tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("broker", "client", "command", "remoting", "store", "spark_jobs", "benchmarks")


def _run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_is_formatted() -> None:
    _run("ruff", "format", "--check", ".")


def test_lint_is_clean() -> None:
    _run("ruff", "check", ".")


def test_types_are_sound() -> None:
    """`mypy --strict` accepts all of the code, tests and benchmarks included."""
    _run("mypy")


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX"])
def test_nothing_is_left_for_later_in_the_code(word: str) -> None:
    """An open end belongs into the issue tracker, not into a comment that nobody reads again."""
    marks = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if word in line.replace("SCHEDULE_TOPIC_XXXX", "")
    ]

    assert not marks
