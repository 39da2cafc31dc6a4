"""The jobs on a cluster: the archive for executors, and a run on a master with two workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from halfmq.spark_jobs.__main__ import main
from halfmq.spark_jobs.archive import ARCHIVE, PROGRAM
from halfmq.spark_jobs.archive import main as write_archive
from tests.support import golden_store
from tests.support.planted_log import plant
from tests.support.spark_cluster import cluster, submit


def audited_here(root: Path, summary: Path) -> tuple[int, object]:
    code = main(["audit", str(root), "--json", str(summary)])
    return code, json.loads(summary.read_text())


def test_the_archive_has_all_that_a_job_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interpreter that knows no other halfmq runs the program, and says how to submit it."""
    assert write_archive([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    archive = tmp_path / ARCHIVE
    program = (
        "import sys, runpy; sys.path.insert(0, sys.argv.pop(1)); sys.argv.pop(0)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", program, str(archive), str(tmp_path / PROGRAM), "audit", "--help"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert ran.returncode == 0, ran.stderr
    assert "audit" in ran.stdout
    assert f"--py-files {archive} {tmp_path / PROGRAM} audit" in told
    with ZipFile(archive) as content:
        names = set(content.namelist())
    assert {"halfmq/", "halfmq/store/", "halfmq/store/format/record.py"} <= names
    assert "halfmq/spark_jobs/jobs/audit.py" in names
    assert not [name for name in names if "__pycache__" in name]


def test_the_same_sources_make_the_same_archive(tmp_path: Path) -> None:
    """So that a cluster can be told by a checksum what it runs."""
    write_archive([str(tmp_path / "a")])
    write_archive([str(tmp_path / "b")])

    assert (tmp_path / "a" / ARCHIVE).read_bytes() == (tmp_path / "b" / ARCHIVE).read_bytes()


@pytest.mark.campaign
def test_an_audit_on_a_cluster_finds_what_one_here_finds(tmp_path: Path) -> None:
    """Of a store that RocketMQ wrote, and of a larger one with every planted anomaly."""
    write_archive([str(tmp_path)])
    golden = golden_store.unpack("tx-midway-killed", tmp_path).root
    planted = tmp_path / "planted"
    plant(planted, 11, 20_000, fault_every=700, segment_size=1 << 21)
    with cluster(tmp_path) as url:
        for root in (golden, planted):
            summary = tmp_path / f"{root.name}.json"
            arguments = ["audit", str(root), "--json", str(summary)]
            if root == planted:
                arguments += ["--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "out")]
            ran = submit(url, tmp_path / ARCHIVE, tmp_path / PROGRAM, *arguments)

            assert summary.exists(), ran.stderr
            told = json.loads(summary.read_text())
            assert (ran.returncode, told) == audited_here(root, tmp_path / "here.json")
            assert told["anomaly_count"]
    used = [path for path in tmp_path.glob("work*/app-*/*") if path.is_dir()]
    assert len({path.parts[-3] for path in used}) == 2, "both workers had an executor"
