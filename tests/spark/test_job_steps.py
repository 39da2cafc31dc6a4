"""Where no terminal shows Spark's bar, each job says in a line what it begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfmq.spark_jobs.__main__ import main
from tests.support.log_writer import LogWriter

_JAVA = ("HOME", "JAVA_HOME", "TMPDIR")
READING = "reading 970 bytes of log"


@pytest.mark.parametrize(
    ("job", "options", "steps"),
    [
        pytest.param(
            "traffic",
            [],
            [READING, "counting by queue, time, producer, tag and key", "writing OUT"],
            marks=pytest.mark.campaign,
        ),
        ("lag", ["--offsets", "OFFSETS"], [READING, "writing OUT"]),
        pytest.param(
            "reconcile",
            ["--topic", "plain", "--ledger", "LEDGER", "--key-column", "key"],
            [READING, "comparing it with the ledger", "writing OUT"],
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            "export",
            ["--active"],
            ["exporting STORE to OUT"],
            marks=pytest.mark.slow,  # one job is enough to see that Spark works
        ),
    ],
)
def test_each_step_is_a_line(
    job: str,
    options: list[str],
    steps: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Named before it begins, so that a log shows where a job hangs."""
    log = LogWriter(tmp_path / "commitlog")
    for _ in range(10):
        log.append("plain", b"x")
    log.close()
    places = {"OUT": tmp_path / "out", "OFFSETS": tmp_path / "offsets.json"}
    places["LEDGER"] = tmp_path / "ledger.csv"
    places["OFFSETS"].write_text('{"offsetTable": {}}')
    places["LEDGER"].write_text("key\nk\n")
    given = [str(places.get(option, option)) for option in options]

    assert main([job, str(tmp_path), "--output", str(places["OUT"]), *given]) != 2

    lines = capsys.readouterr().err.splitlines()
    seconds = [float(line.split(" ")[1]) for line in lines]
    told = [line.split(" s: ")[1].replace(str(places["OUT"]), "OUT") for line in lines]
    told = [line.replace(str(tmp_path), "STORE") for line in told]
    assert all(line.startswith(f"{job}: ") for line in lines)
    assert told == ["starting Spark", *steps]
    assert seconds == sorted(seconds)


@pytest.mark.slow  # another session of Spark, and one is enough to see that it works
def test_json_stands_alone_in_a_pipe_that_standard_error_shares(tmp_path: Path) -> None:
    """As under spark-submit: a program reads it. A Python called by its path is enough."""
    (tmp_path / "store" / "config").mkdir(parents=True)
    LogWriter(tmp_path / "store" / "commitlog").close()
    bare = {"PATH": "/usr/bin:/bin"} | {k: os.environ[k] for k in _JAVA if k in os.environ}
    ended = subprocess.run(
        [sys.executable, "-m", "halfmq.spark_jobs", "lag", str(tmp_path / "store"), "--json", "-"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=bare, timeout=300, check=False,
    )  # fmt: skip

    assert json.loads(ended.stdout)["groups"] == []
    assert ended.returncode == 0
