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


def audited_there(url: str, folder: Path, arguments: list[str], tmp_path: Path) -> None:
    """Audit on the cluster, and compare with an audit here."""
    summary = tmp_path / "there.json"
    there = [*arguments, "--json", str(summary)]
    ran = submit(url, folder / ARCHIVE, folder / PROGRAM, *there)

    assert summary.exists(), ran.stderr
    told = json.loads(summary.read_text())
    assert (ran.returncode, told) == done_here(arguments[:2], tmp_path)
    assert told["anomaly_count"]


@pytest.mark.campaign
def test_an_audit_on_a_cluster_finds_what_one_here_finds(
    url: str, folder: Path, tmp_path: Path
) -> None:
    """Of a store that RocketMQ wrote."""
    root = golden_store.unpack("tx-midway-killed", tmp_path).root
    audited_there(url, folder, ["audit", str(root)], tmp_path)


@pytest.mark.campaign
def test_planted_anomalies_are_found_by_both_workers(
    url: str, folder: Path, tmp_path: Path
) -> None:
    """Of a larger log, with all of them; the cache and the output are where both can write."""
    root = tmp_path / "planted"
    plant(root, 11, 20_000, fault_every=700, segment_size=1 << 21)
    places = ["--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "out")]
    audited_there(url, folder, ["audit", str(root), *places], tmp_path)

    used = [path for path in folder.glob("work*/app-*/*") if path.is_dir()]
    assert len({path.parts[-3] for path in used}) == 2, "both workers had an executor"


@pytest.mark.campaign
@pytest.mark.parametrize(
    "job",
    [
        ["traffic"],
        ["lag"],
        ["reconcile", "--topic", "orders", "--ledger", "LEDGER", "--key-column", "key"],
        ["export", "--active", "--output", "OUT"],
    ],
    ids=lambda job: job[0],
)
def test_a_job_on_a_cluster_tells_what_one_here_tells(
    url: str, folder: Path, tmp_path: Path, job: list[str]
) -> None:
    """All that is not the audit, over a store that RocketMQ wrote."""
    root = golden_store.unpack("plain-clean", tmp_path).root
    ledger, summary = tmp_path / "ledger.csv", tmp_path / "there.json"
    ledger.write_text("key\norder-1\nno-such-order\n")

    def arguments(out: str) -> list[str]:
        places = {"LEDGER": str(ledger), "OUT": str(tmp_path / out)}
        return [job[0], str(root), *(places.get(word, word) for word in job[1:])]

    there = [*arguments("there"), "--json", str(summary)]
    ran = submit(url, folder / ARCHIVE, folder / PROGRAM, *there)

    assert summary.exists(), ran.stderr
    assert (ran.returncode, json.loads(summary.read_text())) == done_here(
        arguments("here"), tmp_path
    )
    if job[0] == "export":
        files = {name: parquet.read_table(tmp_path / name).num_rows for name in ("here", "there")}
        assert files["here"] == files["there"] > 0
