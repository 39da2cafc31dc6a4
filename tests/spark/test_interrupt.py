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
    ["start", "imports", "java", "reading"],  # as the job's lines tell, or its processes
)
def test_ctrl_c_ends_with_130_one_line_and_no_process(moment: str, tmp_path: Path) -> None:
    """While Python imports, from the first module on; while the JVM starts; while it reads."""
    log = LogWriter(tmp_path / "commitlog")
    for _ in range(2_000):
        log.append("plain", b"x" * 1_000)
    log.close()
    said = tmp_path / "said"
    signs = {"start": "collections.abc", "imports": "argparse", "java": "starting Spark"}
    shows_imports = ["-X", "importtime"] if moment in {"start", "imports"} else []
    with (
        said.open("wb") as output,
        subprocess.Popen(
            [sys.executable, *shows_imports, "-m", "halfmq.spark_jobs", "traffic", str(tmp_path)],
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
