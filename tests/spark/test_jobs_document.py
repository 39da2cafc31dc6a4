"""The examples in docs/audit.md run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from halfmq.spark_jobs.__main__ import main
from tests.support.log_writer import LogWriter, Ours

DOCUMENT = Path(__file__).parents[2] / "docs" / "audit.md"
JOBS = DOCUMENT.read_text("utf-8").partition("\n## Jobs\n")[2].partition("\n## ")[0]
COMMAND = "python -m halfmq.spark_jobs "


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", JOBS.replace("\\\n", ""), re.DOTALL)


def small_store(folder: Path) -> None:
    """What the examples speak of: a store, and a ledger that agrees with it."""
    log = LogWriter(folder / "store" / "commitlog", segment_size=1 << 12)
    transactions = Ours(log)
    for number in range(30):
        transactions.commit(transactions.half(KEYS=f"o-{number} c-7"))
    log.close()
    offsets = '{"offsetTable": {"orders@billing": {3: 29}}}'
    (folder / "store" / "config").mkdir()
    (folder / "store" / "config" / "consumerOffset.json").write_text(offsets)
    ledger = "".join(f"o-{number},paid\n" for number in range(30))
    (folder / "orders.csv").write_text(f"order_id,status\n{ledger}o-30,open\n")


@pytest.mark.campaign
def test_the_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the one that needs a database on another machine."""
    small_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    commands = [example for example in examples("bash") if "jdbc:postgresql" not in example]
    ran = []
    for command in commands:
        assert command.startswith(COMMAND)
        arguments = shlex.split(command.removeprefix(COMMAND))
        assert main(arguments) == 0, capsys.readouterr().err
        ran.append(arguments[0])
    assert ran == ["traffic", "lag", "reconcile", "export"]


def test_the_command_for_a_database_is_well_formed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its options exist; where it stops is the missing log."""
    monkeypatch.chdir(tmp_path)
    (command,) = (example for example in examples("bash") if "jdbc:postgresql" in example)

    assert main(shlex.split(command.removeprefix(COMMAND))) == 2
    assert capsys.readouterr().err == "reconcile: store: no such directory\n"


@pytest.mark.campaign
def test_the_notebook_runs(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pasted into a cell; what it shows is what the store has."""
    small_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    (cell,) = examples("python")

    # The session that tests share was started in another directory.
    cell = cell.replace('"orders.csv"', repr(str(tmp_path / "orders.csv")))
    exec(compile(cell, str(DOCUMENT), "exec"), {"spark": spark})

    shown = capsys.readouterr().out
    assert re.search(r"\|\s*billing\|\s*orders\|\s*3\|\s*behind\|", shown)
    assert "row_without_message" in shown  # the row that is open
