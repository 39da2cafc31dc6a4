"""Ctrl-C, as a terminal sends it: to a process of its own, at any moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.log_writer import LogWriter
from tests.support.stores import wait_until

# SparkContext sets a handler of its own when it has started, and the session takes long after it.
_SLOW_SESSION = """
import sys, time
from halfmq.spark_jobs.jobs.interrupt import end_on_interrupt
end_on_interrupt()
from pyspark import SparkContext
from halfmq.spark_jobs.__main__ import main
start = SparkContext.__init__
def start_slowly(*arguments, **named):
    start(*arguments, **named)
    print("context s: is up", flush=True)
    time.sleep(600)
SparkContext.__init__ = start_slowly
sys.exit(main())
"""


def _family(process: int) -> set[int]:
    found = set()
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found |= {child} | _family(child)
    return found


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for children in /proc")
@pytest.mark.parametrize(
    "moment",
    ["start", "imports", "java", "session", "reading"],  # by the job's lines, or its processes
)
def test_ctrl_c_ends_with_130_one_line_and_no_process(moment: str, tmp_path: Path) -> None:
    """While Python imports, while the JVM and Spark's session start, and while a job reads."""
    log = LogWriter(tmp_path / "commitlog")
    for _ in range(2_000):
        log.append("plain", b"x" * 1_000)
    log.close()
    said = tmp_path / "said"
    signs = {"start": "collections.abc", "imports": "argparse"}
    signs |= {"java": "starting Spark", "session": "context s: is up"}
    shows_imports = ["-X", "importtime"] if moment in {"start", "imports"} else []
    program = ["-c", _SLOW_SESSION] if moment == "session" else ["-m", "halfmq.spark_jobs"]
    with (
        said.open("wb") as output,
        subprocess.Popen(
            [sys.executable, *shows_imports, *program, "traffic", str(tmp_path)],
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process,
    ):
        wait_until(lambda: signs.get(moment, moment) in said.read_text())
        if moment == "java":
            wait_until(lambda: bool(_family(process.pid)))
        family = _family(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130

    lines = [line for line in said.read_text().splitlines() if not line.startswith("import time")]
    assert [line for line in lines if " s: " not in line] == ["interrupted"]
    assert not [one for one in family if _is_running(one)]
