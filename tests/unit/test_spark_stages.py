"""What a job says of its progress where no terminal shows Spark's bar."""

from __future__ import annotations

import io
import sys

import pytest

from halfmq.spark_jobs.stages import Stages


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_is_one_line_when_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    """With the seconds since the job began."""
    times = iter([100.0, 100.0, 103.44])
    stage = Stages("audit", lambda: next(times))

    stage("starting Spark")
    first = capsys.readouterr().err
    stage("reading 3 segments")

    assert first == "audit: 0.0 s: starting Spark\n"
    assert capsys.readouterr().err == "audit: 3.4 s: reading 3 segments\n"


def test_a_terminal_is_left_to_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of ours would break it."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    Stages("audit")("reading 3 segments")

    assert terminal.getvalue() == ""
