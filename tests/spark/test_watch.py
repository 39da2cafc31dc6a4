"""The audit that follows a log: its verdict is that of an audit of the same bytes, at any time."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from bisect import bisect
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from halfmq.spark_jobs.__main__ import main
from halfmq.spark_jobs.audit import watch
from halfmq.spark_jobs.audit.auditor import audited
from halfmq.spark_jobs.audit.checks import Checks
from tests.support.log_writer import LogWriter, Ours, write_store
from tests.support.oracle.words import OF_QUEUES, Found, Kind
from tests.support.patience import wait_until
from tests.support.planted_faults import ORDERS, plant_faults
from tests.support.planted_log import PENDING_AGE, QUEUES, Planted
from tests.support.seeds import run_seed

SEED = run_seed()
CAMPAIGN_SEEDS = int(os.environ.get("HALFMQ_WATCH_SEEDS", "2"))
CAMPAIGN_CUTS = int(os.environ.get("HALFMQ_WATCH_CUTS", "2"))  # 10 s each
CHECKS = Checks(pending_age=PENDING_AGE)


class Followed:
    """A log that grows to a planted one, and a watch over it."""

    def __init__(self, source: Path, folder: Path, *, is_root: bool = True) -> None:
        self._source = source
        self._is_root = is_root
        self.folder = folder
        self.state = folder.parent / f"{folder.name}-state"
        self.lines: list[dict[str, Any]] = []

    def grow(self, end: int) -> None:
        """Have the log end at an offset, as if no more had been written."""
        segments = self.folder / "commitlog" if self._is_root else self.folder
        segments.mkdir(parents=True, exist_ok=True)
        for path in sorted((self._source / "commitlog").iterdir()):
            base = int(path.name)
            if base < end:
                content = path.read_bytes()
                segments.joinpath(path.name).write_bytes(
                    content[: end - base].ljust(len(content), b"\0")
                )
        if self._is_root and not (self.folder / "config").exists():
            shutil.copytree(self._source / "config", self.folder / "config")

    def watch(self, spark: SparkSession) -> None:
        def tell(line: str) -> None:
            self.lines.append(json.loads(line))

        watch.Watch(str(self.folder), self.state, CHECKS, tell).run(spark, every=None)

    def has_begun(self) -> bool:
        """Whether a batch is being judged: begun, and not noted as done."""
        places = [self.state / "checkpoint" / name for name in ("offsets", "commits")]
        begun, done = (len([*place.glob("[0-9]*")]) for place in places)
        return begun > done

    def told(self, spark: SparkSession) -> list[tuple[str, str]]:
        """What the files say."""
        rows = spark.read.parquet(str(self.state / "findings")).select("id", "event").collect()
        return sorted((row["id"], row["event"]) for row in rows)

    @property
    def standing(self) -> list[Found]:
        """What was told, without what was resolved since; each once."""
        found: dict[str, Found] = {}
        for line in self.lines:
            if line["event"] == "found":
                assert line["id"] not in found
                found[line["id"]] = (line["kind"], tuple(line["offsets"]))
            else:
                del found[line["id"]]
        return sorted(found.values())

    def metrics(self) -> dict[str, float]:
        lines = (self.state / "metrics.prom").read_text().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def agrees_with_an_audit(self, spark: SparkSession) -> None:
        with audited(spark, str(self.folder), checks=CHECKS) as audit:
            expected = [(one.kind, tuple(one.offsets)) for one in audit.anomalies]
            states = audit.states
        assert self.standing == sorted(one for one in expected if one[0] not in OF_QUEUES)
        metrics = self.metrics()
        for state in ("pending", "parked"):
            count = metrics[f'halfmq_audit_open_transactions{{state="{state}"}}']
            assert count == states[state], state

    def tells_nothing_new_when_repeated(self, spark: SparkSession) -> None:
        """As if the driver had died before it noted that the last batch is done."""
        told, lines = self.told(spark), [line["id"] for line in self.lines]
        commits = self.state / "checkpoint" / "commits"
        last = max(int(path.name) for path in commits.glob("[0-9]*"))
        for name in (str(last), f".{last}.crc"):
            (commits / name).unlink()
        self.lines.clear()

        self.watch(spark)

        assert self.told(spark) == told
        assert {line["id"] for line in self.lines} <= set(lines)


def follows(
    spark: SparkSession, planted: Planted, folder: Path, *, is_root: bool, cuts: int, seed: int
) -> Followed:
    """Let a log grow to a planted one, compare after each step, and repeat the last one."""
    chance = random.Random(seed)
    followed = Followed(folder / "planted", folder / "grown", is_root=is_root)
    borders = [one.offset for one in planted.log.written[1:]]
    # A record with a wrong time is no step of the clock, also where it is the last of a batch.
    wrong = [offsets[0] for kind, offsets in planted.expected if kind == Kind.HALF_AFTER_FINAL]
    ends = {*chance.sample(borders, cuts), *borders[bisect(borders, max(wrong, default=0)) :][:1]}
    for end in [*sorted(ends), planted.log.end]:
        followed.grow(end)
        followed.watch(spark)
        followed.agrees_with_an_audit(spark)
    followed.tells_nothing_new_when_repeated(spark)
    return followed


@pytest.mark.parametrize(
    ("order", "is_root"),
    [pytest.param("halfmq's", False, marks=pytest.mark.campaign), ("in turn", True)],
)
def test_after_each_batch_the_verdict_is_that_of_an_audit(
    order: str, is_root: bool, spark: SparkSession, tmp_path: Path
) -> None:
    """Cut anywhere, with every fault that can be planted, over restarts of the watch."""
    planted = plant_faults(
        tmp_path / "planted", SEED, order=ORDERS[order], steps=200, fault_every=4
    )

    followed = follows(spark, planted, tmp_path, is_root=is_root, cuts=1, seed=SEED)

    assert followed.standing


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(CAMPAIGN_SEEDS))
@pytest.mark.parametrize("order", ORDERS)
def test_many_logs_are_followed(order: str, seed: int, spark: SparkSession, tmp_path: Path) -> None:
    """The same with other seeds, in what each broker wrote."""
    planted = plant_faults(
        tmp_path / "planted", SEED + seed, order=ORDERS[order], steps=200, fault_every=4
    )
    follows(spark, planted, tmp_path, is_root=seed % 2 == 0, cuts=CAMPAIGN_CUTS, seed=SEED + seed)


def test_a_second_commit_is_seen_long_after_the_first(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has been merged since: of decided transactions the events are kept."""
    monkeypatch.setattr(watch, "MERGED", 2)
    log = LogWriter(tmp_path / "planted" / "commitlog")
    broker = Ours(log)
    first = [broker.half() for _ in range(3)]
    finals = [broker.commit(half) for half in first]
    ends = []
    for _ in range(4):
        broker.write_ops()
        broker.rollback(broker.half())
        ends.append(log.end)
    again = broker.commit(first[1])
    log.close()
    write_store(log, QUEUES)
    followed = Followed(tmp_path / "planted", tmp_path / "grown")

    for end in ends:
        followed.grow(end)
        followed.watch(spark)
    assert followed.lines == []
    followed.grow(log.end)
    followed.watch(spark)

    assert followed.standing == [("committed_twice", (finals[1].offset, again.offset))]
    assert followed.lines[0]["transaction_id"] == first[1].properties["UNIQ_KEY"]
    assert [one.name for one in sorted((followed.state / "decided").iterdir())] == [
        "000000000-000000003",
        "000000004-000000004",
    ]


@pytest.mark.campaign
def test_killed_watches_repeat_and_miss_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """Killed at any step of a batch, and started again; told is what an undisturbed one tells."""
    planted = plant_faults(tmp_path / "planted", SEED, order=ORDERS["in turn"], steps=120)
    chance = random.Random(SEED)
    killed = Followed(tmp_path / "planted", tmp_path / "grown")
    command = [sys.executable, "-m", "halfmq.spark_jobs", "audit", str(killed.folder), "--follow"]
    command += ["--state", str(killed.state), "--once", "--pending-age", "10d"]
    ends = [one.offset for one in chance.sample(planted.log.written[1:], 3)]

    for end in [*sorted(ends), planted.log.end]:
        killed.grow(end)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            wait_until(lambda: process.poll() is not None or killed.has_begun(), "a batch")
            time.sleep(chance.random() * 4)
            process.kill()
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 1

    other = Followed(tmp_path / "planted", tmp_path / "grown")
    other.state = tmp_path / "undisturbed"
    other.watch(spark)
    told = killed.told(spark)
    assert len({*told}) == len(told)
    found = {one for one, event in told if event == "found"}
    resolved = {one for one, event in told if event == "resolved"}
    assert found - resolved == {one for one, _ in other.told(spark)}


def test_the_command_tells_each_finding_once(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over runs; what stands decides on the exit code, and one watch is at a folder."""
    log = LogWriter(tmp_path / "store" / "commitlog")
    broker = Ours(log)
    half = broker.half()
    offsets = [broker.commit(half).offset for _ in range(2)]
    log.close()
    write_store(log, QUEUES)
    command = ["audit", str(tmp_path / "store"), "--follow"]
    state = ["--state", str(tmp_path / "state")]

    codes = [main([*command, *state, "--once"]), main([*command, *state, "--once"])]

    (line,) = capsys.readouterr().out.splitlines()
    finding = json.loads(line)
    assert codes == [1, 1]
    assert (finding["kind"], finding["offsets"]) == ("committed_twice", offsets)
    assert (finding["event"], finding["group"], finding["topic"]) == ("found", "pg", "orders")
    for wrong in ([], [*state, "--as-of", "now"], [*state, "--json", "-"]):
        assert main([*command, *wrong]) == 2
        assert "--follow needs --state" in capsys.readouterr().err
    assert main([*command, *state, "--once", "--skip-crc"]) == 2
    assert "the watch was begun with crc = True, not False" in capsys.readouterr().err
