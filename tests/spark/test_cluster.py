"""The jobs on a cluster: the archive for executors, and a run on a master with two workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
from pyarrow import parquet

from halfmq.spark_jobs.__main__ import main
from halfmq.spark_jobs.archive import ARCHIVE, PROGRAM
from halfmq.spark_jobs.archive import main as write_archive
from tests.support import golden_store
from tests.support.planted_log import plant
from tests.support.spark_cluster import cluster, submit

ALL = """
import json, sys
from halfmq.spark_jobs.__main__ import main
from halfmq.spark_jobs.jobs.session import spark_session

with spark_session():
    print(json.dumps([main(arguments) for arguments in json.loads(sys.argv[1])]))
"""


def done_here(arguments: list[str], folder: Path) -> tuple[int, object]:
    """Run a job in this process."""
    summary = folder / "here.json"
    code = main([*arguments, "--json", str(summary)])
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cluster's machines see: the archive, and the workers' directories."""
    made = tmp_path_factory.mktemp("cluster")
    write_archive([str(made)])
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Of the master."""
    with cluster(folder) as master:
        yield master


@pytest.mark.campaign
def test_an_audit_on_a_cluster_finds_what_one_here_finds(
    url: str, folder: Path, tmp_path: Path
) -> None:
    """Submitted as documented; both workers see the log, and JSON alone is printed."""
    root = tmp_path / "planted"
    plant(root, 11, 20_000, fault_every=700, segment_size=1 << 21)
    ran = submit(
        url, folder / ARCHIVE, folder / PROGRAM,
        "audit", str(root), "--output", str(tmp_path / "out"), "--json", "-",
    )  # fmt: skip

    told = json.loads(ran.stdout)
    assert (ran.returncode, told) == done_here(["audit", str(root)], tmp_path)
    assert told["anomaly_count"]
    used = [path for path in folder.glob("work*/app-*/*") if path.is_dir()]
    assert len({path.parts[-3] for path in used}) == 2, "both workers had an executor"


@pytest.mark.campaign
def test_the_jobs_on_a_cluster_tell_what_they_tell_here(
    url: str, folder: Path, tmp_path: Path
) -> None:
    """In one application, which takes most of the time to start, over stores of RocketMQ."""
    plain = golden_store.unpack("plain-clean", tmp_path).root
    killed = golden_store.unpack("tx-midway-killed", tmp_path).root
    ledger = tmp_path / "ledger.csv"
    ledger.write_text("key\norder-1\nno-such-order\n")
    jobs = [
        ["audit", str(killed)],
        ["traffic", str(plain)],
        ["lag", str(plain)],
        ["reconcile", str(plain), "--topic", "orders", "--ledger", str(ledger), "--key-column=key"],
        ["export", str(plain), "--active", "--output", "OUT"],
    ]

    def arguments(job: list[str], where: str) -> list[str]:
        return [str(tmp_path / where) if word == "OUT" else word for word in job]

    there = [
        [*arguments(job, "there"), "--json", str(tmp_path / f"there-{job[0]}.json")] for job in jobs
    ]
    program = tmp_path / "all.py"
    program.write_text(ALL)
    ran = submit(url, folder / ARCHIVE, program, json.dumps(there))

    assert ran.returncode == 0, ran.stdout + ran.stderr
    codes = json.loads(ran.stdout.splitlines()[-1])
    for job, code in zip(jobs, codes, strict=True):
        told = json.loads((tmp_path / f"there-{job[0]}.json").read_text())
        assert (code, told) == done_here(arguments(job, "here"), tmp_path), job[0]
    files = {name: parquet.read_table(tmp_path / name).num_rows for name in ("here", "there")}
    assert files["here"] == files["there"] > 0
