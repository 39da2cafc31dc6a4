"""The audit as a command: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from pyarrow import parquet

from halfmq.spark_jobs.__main__ import main
from halfmq.spark_jobs.audit import auditor
from tests.support import golden_store
from tests.support.log_writer import LogWriter, Ours
from tests.support.small_disk import small_disk


def small_log(folder: Path, *, faulty: bool = False) -> Path:
    log = LogWriter(folder / "commitlog")
    transactions = Ours(log)
    half = transactions.half("KEY-1")
    transactions.commit(half)
    if faulty:
        transactions.commit(half)
    transactions.rollback(transactions.half("KEY-2"))
    transactions.half("KEY-3")
    log.close()
    return folder


def test_a_clean_log_ends_with_0_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is for people: what was read, what became of it, what is wrong."""
    code = main(["audit", str(small_log(tmp_path))])

    shown = capsys.readouterr()
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert code == 0
    assert f"commit log {tmp_path}" in lines
    assert "transactions 3" in lines
    assert "committed 1" in lines
    assert "rolled back 1" in lines
    assert "pending 1" in lines
    assert "1 1 1 1 0 pg orders" in lines
    assert "anomalies 0" in lines
    steps = [line.split(" s: ")[1] for line in shown.err.splitlines()]
    assert steps == [
        "starting Spark",
        "reading 979 bytes of log",
        "judging what became of transactions",
        "comparing queues with the log",
        "looking up what was found",
    ]


def test_anomalies_end_with_1_and_stand_in_every_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Table, JSON file, summary and Parquet say the same; an earlier audit's are replaced."""
    store = golden_store.unpack("tx-midway-killed", tmp_path)
    output, summary = tmp_path / "new" / "audit", tmp_path / "summary.json"
    html = tmp_path / "for" / "people" / "report.html"
    (output / "transactions").mkdir(parents=True)
    (output / "transactions" / "halfmq-audit-00007.parquet").write_text("of an earlier audit")
    words = {"COMMITTED": "committed", "COMMITTED_WITHOUT_OP": "committed", "UNDECIDED": "pending"}
    words |= {"ROLLED_BACK": "rolled_back", "DISCARDED": "parked"}
    told = store.truth["transactions"]

    files = ["--output", str(output), "--json", str(summary), "--html", str(html)]
    code = main(["audit", str(store.root), *files])

    report = json.loads(summary.read_text())
    counts = Counter(words[transaction["state_in_the_log"]] for transaction in told)
    assert code == 1
    assert report["log"] == {
        "segments": 3,
        "records": 81,
        "bytes": 40851,
        "first_offset": 0,
        "end_offset": 41567,
        "tail": None,
        "scanned_bytes": 41567,
    }
    assert report["transactions"] == {"total": 28, "expired": 0, "undetermined": 0, **counts}
    (delays,) = [d for d in report["delays"] if d["producer_group"] == "pg_tx"]
    assert (delays["topic"], delays["prepared"]) == ("tx_orders", 22)
    assert delays["checks"]["max"] > 0
    assert json.loads((output / "summary.json").read_text()) == report
    twice = next(t for t in told if t["what"] == "committed twice")
    anomaly = next(a for a in report["anomalies"] if a["kind"] == "committed_twice")
    assert anomaly["transaction_id"] == twice["uniqKey"]
    assert anomaly["offsets"] == [final["commitLogOffset"] for final in twice["finals"]]
    sizes = {message["commitLogOffset"]: message["storeSize"] for message in store.messages}
    for place, offset in zip(anomaly["bytes"], anomaly["offsets"], strict=True):
        assert int(Path(place["file"]).name) + place["position"] == offset
        assert place["size"] == sizes[offset]
    assert twice["uniqKey"] in capsys.readouterr().out
    transactions = parquet.read_table(output / "transactions").to_pylist()
    assert {t["transactionId"]: t["state"] for t in transactions} == {
        t["uniqKey"]: words[t["state_in_the_log"]] for t in told
    }
    first = next(t for t in transactions if t["transactionId"] == told[0]["uniqKey"])
    assert (first["producerGroup"], first["topic"]) == ("pg_tx", "tx_orders")
    assert (first["halfOffset"], first["decisionOffset"]) == (0, 439)
    anomalies = parquet.read_table(output / "anomalies").to_pylist()
    assert sorted(a["kind"] for a in anomalies) == ["commit_after_rollback", "committed_twice"]
    assert report["anomaly_kinds"] == {"commit_after_rollback": 1, "committed_twice": 1}
    prepared = report["over_time"]["prepared"]
    assert {state: sum(row) for state, row in prepared.items()} == {
        state: counts[state] for state in prepared
    }
    page = html.read_text()
    assert "2 anomalies found" in page
    assert f"<bdi>{twice['uniqKey']}</bdi>" in page


def test_what_is_late_or_beside_the_log_is_looked_at_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Undecided for longer than ``--pending-age``; consume queues unless they are skipped."""
    store = small_log(tmp_path)
    (store / "consumequeue" / "orders" / "3").mkdir(parents=True)
    (store / "consumequeue" / "orders" / "3" / f"{0:020}").write_bytes(bytes(100))
    queues, half = "missing_queue_entry", "overdue_half"
    for options, kinds in (
        (["--as-of", "now"], {queues}),
        (["--skip-queues", "--pending-age", "1h"], set()),
        (["--skip-queues", "--pending-age", "1h", "--as-of", "now"], {half}),
    ):
        code = main(["audit", str(store), "--json", "-", *options])

        report = json.loads(capsys.readouterr().out)
        assert {anomaly["kind"] for anomaly in report["anomalies"]} == kinds
        assert code == bool(kinds)


def test_a_flood_of_one_kind_does_not_hide_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many anomalies there are, every kind is counted, and some of each are told."""
    monkeypatch.setattr(auditor, "ANOMALIES_MAX", 1)
    log = LogWriter(tmp_path / "commitlog")
    transactions = Ours(log)
    log.append("orders", b"damaged", body_crc=1)
    for place in range(3):
        half = transactions.half(f"KEY-{place}")
        transactions.commit(half)
        transactions.commit(half)
    log.close()

    assert main(["audit", str(tmp_path), "--json", "-"]) == 1

    report = json.loads(capsys.readouterr().out)
    assert report["anomaly_count"] == 4
    assert report["anomaly_kinds"] == {"committed_twice": 3, "crc": 1}
    assert {anomaly["kind"] for anomaly in report["anomalies"]} == {"committed_twice", "crc"}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path, "no such directory"),
        (lambda path: path.write_text("x"), "is not a directory"),
        (lambda path: path.mkdir(), "no commit-log segment"),
    ],
)
def test_what_is_no_log_ends_with_2_and_a_sentence(
    make: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No stack trace, and nothing on standard output."""
    assert callable(make)
    path = tmp_path / "log"
    make(path)

    code = main(["audit", str(path)])

    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert shown.err.startswith(f"audit: {path}: ")
    assert said in shown.err
    assert shown.err.count("\n") == 1


def test_an_output_that_cannot_be_written_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read."""
    log = small_log(tmp_path / "store")
    (tmp_path / "file").write_text("in the way")

    assert main(["audit", str(log), "--output", str(tmp_path / "file" / "out")]) == 2
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["transactions/part-0.parquet", "summary.json"])
def test_what_no_audit_wrote_is_never_replaced(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor mixed with: the audit does not begin."""
    log = small_log(tmp_path / "store")
    foreign = tmp_path / "out" / place
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")

    assert main(["audit", str(log), "--output", str(tmp_path / "out")]) == 2
    assert "not written by a previous audit" in capsys.readouterr().err
    assert foreign.read_text() == "mine"


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_file_that_cannot_be_written_is_told_before_the_run(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence."""
    log = small_log(tmp_path / "store")
    (tmp_path / "file").write_text("in the way")

    assert main(["audit", str(log), option, str(tmp_path / "file" / "x")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_the_table_is_shown_though_a_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What took long is not lost; the sentence comes last."""
    log = small_log(tmp_path / "store")

    assert main(["audit", str(log), "--json", "/dev/full"]) == 2

    shown = capsys.readouterr()
    assert "anomalies     0" in shown.out
    assert "No space left on device" in shown.err.splitlines()[-1]


def test_a_disk_that_fills_while_results_are_written_is_named_after_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cause stands at the end of a long Java trace; Spark's own sentence does not name it."""
    log = LogWriter(tmp_path / "commitlog")
    transactions = Ours(log)
    for place in range(1_000):
        transactions.half(random.Random(place).randbytes(16).hex())
    log.close()

    with small_disk(tmp_path, "tmpfs", 32 << 10) as disk:
        code = main(["audit", str(tmp_path), "--skip-queues", "--output", str(disk / "out")])

    shown = capsys.readouterr()
    assert code == 2
    assert "anomalies     0" in shown.out
    last = shown.err.splitlines()[-1]
    assert last == f"audit: {disk / 'out'}: cannot be written: No space left on device"


def test_a_log_without_a_message_is_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broker that has just been started for the first time has nothing to hide."""
    LogWriter(tmp_path / "commitlog").close()

    assert main(["audit", str(tmp_path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["log"]["records"] == 0


def test_garbage_named_like_a_segment_is_an_anomaly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told where and how much; nothing breaks."""
    (tmp_path / f"{0:020}").write_bytes(b"\xda\xa3\x20\xa7 not a log " * 5000)

    assert main(["audit", str(tmp_path), "--json", "-"]) == 1

    shown = capsys.readouterr()
    (anomaly,) = json.loads(shown.out)["anomalies"]
    assert (anomaly["kind"], anomaly["transaction_id"]) == ("corrupt_record", None)
    assert anomaly["offsets"] == [0, 75000]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["audti", "x"],
        ["audit"],
        ["audit", "x", "--jsn", "y"],
        ["audit", "x", "--pending-age", "soon"],
    ],
)
def test_a_wrong_command_line_ends_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As for every other program."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.campaign
def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    """With --json - standard output is JSON and nothing else; Spark says nothing at all.

    It runs without pandas, which is not asked for by the extra.
    """
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "pandas.py").write_text("raise ModuleNotFoundError('pandas', name='pandas')\n")
    paths = [str(blocked), os.environ.get("PYTHONPATH", "")]
    log = small_log(tmp_path / "store", faulty=True)

    ended = subprocess.run(
        [sys.executable, "-m", "halfmq.spark_jobs", "audit", str(log), "--json", "-"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert ended.returncode == 1, ended.stderr
    report = json.loads(ended.stdout)
    assert [anomaly["kind"] for anomaly in report["anomalies"]] == ["committed_twice"]
    said = ended.stderr.splitlines()
    steps = [line for line in said if line.startswith("audit: ")]
    table = said[len(steps) :]
    assert [line.split(" s: ")[1].split()[0] for line in steps] == [
        *("starting", "reading", "judging", "comparing", "looking"),
    ]
    assert table[0].split() == ["commit", "log", str(log)]
    assert "committed_twice" in table[-1]
    assert len(table) == 21
