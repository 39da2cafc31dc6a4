"""The log against a ledger: what differs is told, and nothing else."""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from pyspark.sql import SparkSession

from halfmq.spark_jobs.__main__ import main
from halfmq.spark_jobs.jobs import reconcile
from halfmq.spark_jobs.source import message_roles
from tests.support import golden_store, messages
from tests.support.jars import jar
from tests.support.log_writer import PREPARED, SCHEDULE, START, LogWriter, Ours, Written

COMMON = ("--topic", "orders", "--key-column", "id")
Found = Counter[tuple[str, str | None]]


def run(store: Path, ledger: object, *options: str) -> tuple[int, Any]:
    file = store / "told.json"
    code = main(
        ["reconcile", str(store), *COMMON, "--ledger", str(ledger), "--json", str(file), *options]
    )
    assert code != 2
    return code, json.loads(file.read_text())


def found(told: Any) -> Found:
    return Counter((d["kind"], d["key"]) for d in told["differences"])


def write_ledger(path: Path, keys: Iterable[str | None], **columns: list[Any]) -> Path:
    table = pa.table({"id": pa.array(list(keys), pa.string()), **columns})
    if path.suffix == ".csv":
        csv.write_csv(table, path)
    else:
        parquet.write_table(table, path)
    return path


class Orders:
    """A log in which many things happen to orders, and the ledger that it is compared with."""

    def __init__(self, folder: Path, seed: int) -> None:
        print(f"seed {seed}")
        self.log = LogWriter(folder / "commitlog")
        self.transactions = Ours(self.log)
        self.choose = random.Random(seed)
        self.rows: list[str] = []
        self.expected: Found = Counter()

    def write(self, count: int) -> Orders:
        happenings = (
            *(self.committed, self.sent) * 5,
            *(self.undecided, self.rolled_back, self.unknown, self.twice, self.row_twice),
            *(self.waiting, self.delivered, self.elsewhere, self.lost),
        )
        for number in range(count):
            self.choose.choice(happenings)(f"o-{number}")
        self.log.close()
        self.choose.shuffle(self.rows)
        return self

    def half(self, key: str) -> Written:
        return self.transactions.half(KEYS=key)

    def committed(self, key: str) -> None:
        self.transactions.commit(self.half(key))
        self.rows.append(key)

    def sent(self, key: str) -> None:
        self.log.append("orders", b"x", {"KEYS": f"{key} customer-{self.choose.randrange(9)}"})
        self.rows.append(key)

    def undecided(self, key: str) -> None:
        self.half(key)
        if self.choose.random() < 0.5:
            self.rows.append(key)
            self.expected["row_without_message", key] += 1

    def rolled_back(self, key: str) -> None:
        self.transactions.rollback(self.half(key))

    def unknown(self, key: str) -> None:
        self.transactions.commit(self.half(key))
        self.expected["message_without_row", key] += 1

    def twice(self, key: str) -> None:
        half = self.half(key)
        for _ in range(self.choose.randint(2, 3)):
            self.transactions.commit(half)
        self.rows.append(key)
        self.expected["message_twice", key] += 1

    def row_twice(self, key: str) -> None:
        self.committed(key)
        self.rows.append(key)
        self.expected["row_twice", key] += 1

    def waiting(self, key: str) -> None:
        half = self.half(key)
        properties = {**half.properties, "DELAY": "18"}
        self.log.append(SCHEDULE, b"", properties, sys_flag=8, prepared=half.offset)
        self.rows.append(key)
        self.expected["waiting", key] += 1

    def delivered(self, key: str) -> None:
        self.transactions.commit_delayed(self.half(key), waits=2)
        self.rows.append(key)

    def elsewhere(self, key: str) -> None:
        """Same key, other topic."""
        self.log.append("bills", b"", {"KEYS": key})

    def lost(self, key: str) -> None:
        self.rows.append(key)
        self.expected["row_without_message", key] += 1


def test_every_difference_is_found_and_no_other(tmp_path: Path) -> None:
    """Only committed messages count; halves, rollbacks, copies and other topics do not."""
    orders = Orders(tmp_path, random.randrange(1 << 32)).write(600)
    ledger = write_ledger(tmp_path / "orders.parquet", orders.rows)
    out = tmp_path / "out"

    code, told = run(tmp_path, ledger, "--output", str(out))

    assert code == 1
    assert found(told) == orders.expected
    kinds = Counter(kind for kind, _ in orders.expected.elements())
    assert told["counts"] == kinds
    assert told["finding_count"] == kinds.total() - kinds["waiting"]
    unmatched = {key for kind, key in orders.expected if kind in UNMATCHED}
    assert told["matched_keys"] == len(set(orders.rows) - unmatched)
    assert parquet.read_table(out / "differences").num_rows == kinds.total()
    at = {w.offset: w for w in orders.log.written}
    for one in told["differences"]:
        if one["kind"] == "message_twice":
            first, last = (at[offset] for offset in one["offsets"])
            assert first.topic == last.topic == "orders"
            assert first.properties["KEYS"] == last.properties["KEYS"] == one["key"]
        if one["kind"] == "waiting":
            assert at[one["offsets"][0]].topic == SCHEDULE


UNMATCHED = ("row_without_message", "waiting")


def test_a_ledger_that_agrees_ends_with_0(tmp_path: Path) -> None:
    """The messages of a golden store by their unique keys, in a CSV file."""
    store = golden_store.unpack("plain-clean", tmp_path)
    seen = [m for m in messages.visible(store.messages) if m["topic"] == "orders"]
    keys = sorted({m["properties"]["UNIQ_KEY"] for m in seen})
    ledger = write_ledger(tmp_path / "orders.csv", keys)

    code, told = run(store.root, ledger, "--message-key", "UNIQ_KEY")

    assert code == 0
    assert (told["matched_keys"], told["differences"]) == (len(keys), [])


@pytest.mark.campaign
def test_transactions_of_rocketmq_against_what_its_client_decided(tmp_path: Path) -> None:
    """Rows of what is committed in the log agree, but for what was committed twice."""
    store = golden_store.unpack("tx-midway-killed", tmp_path)
    finals = {t["uniqKey"]: len(t["finals"]) for t in store.truth["transactions"]}
    topics = {m["topic"] for m in messages.visible(store.messages)}
    uniq = {m["properties"]["UNIQ_KEY"] for m in messages.visible(store.messages)}
    ledger = write_ledger(tmp_path / "l.parquet", [k for k in uniq if finals.get(k, 1)])
    options = [argument for topic in sorted(topics) for argument in ("--topic", topic)]

    code, told = run(store.root, ledger, *options, "--message-key", "UNIQ_KEY")

    twice = {key for key, count in finals.items() if count > 1}
    assert twice
    assert code == 1
    assert found(told) == Counter(("message_twice", key) for key in twice)


@pytest.mark.campaign
def test_a_message_is_matched_by_one_of_its_keys(tmp_path: Path) -> None:
    """A customer's key in many messages is no double, and needs no row of its own."""
    log = LogWriter(tmp_path / "commitlog")
    log.append("orders", b"", {"KEYS": "o-1 c-7"})
    log.append("orders", b"", {"KEYS": "c-7 o-2"})
    log.append("orders", b"", {"KEYS": "o-2 c-8 o-2"})
    alone = log.append("orders", b"", {"KEYS": "o-9 c-7"})
    bare = log.append("orders", b"", {"TAGS": "no key"})
    log.close()
    ledger = write_ledger(tmp_path / "l.parquet", ["o-1", "o-2", None])

    _, told = run(tmp_path, ledger)

    assert found(told) == Counter(
        [
            ("message_twice", "o-2"),
            ("message_without_row", "c-7 o-9"),
            ("message_without_key", None),
            ("row_without_key", None),
        ]
    )
    offsets = {d["kind"]: d["offsets"] for d in told["differences"]}
    assert offsets["message_without_row"] == [alone.offset]
    assert offsets["message_without_key"] == [bare.offset]


@pytest.mark.campaign
def test_any_property_can_be_the_key_and_rows_be_chosen(tmp_path: Path) -> None:
    """A numeric column is compared as text; ``--where`` says which rows need a message."""
    log = LogWriter(tmp_path / "commitlog")
    for number in (1, 2):
        log.append("orders", b"", {"X_order.id": str(number), "order.id": "77"})
    log.close()
    table = pa.table({"id": pa.array([1, 2, 3]), "status": ["paid", "paid", "open"]})
    parquet.write_table(table, tmp_path / "l.parquet")
    options = ["--message-key", "X_order.id"]

    assert run(tmp_path, tmp_path / "l.parquet", *options)[0] == 1
    assert run(tmp_path, tmp_path / "l.parquet", *options, "--where", "status = 'paid'")[0] == 0


HOUR = timedelta(hours=1) // timedelta(milliseconds=1)


def timed(folder: Path) -> tuple[Path, Path]:
    """A message an hour, five of them; rows half a minute before each, and some without."""
    log = LogWriter(folder / "commitlog", segment_size=1 << 12, first=1 << 12)
    for hour in range(5):
        log.now = START + hour * HOUR
        log.append("orders", b"", {"KEYS": f"o-{hour}"})
    log.close()
    times = {f"o-{hour}": START + hour * HOUR - 30_000 for hour in range(5)}
    times |= {
        "old": START - HOUR,
        "gone": START + 2 * HOUR + 100_000,
        "young": START + 4 * HOUR - 9_000,
    }
    ledger = write_ledger(folder / "l.parquet", times, at=list(times.values()))
    return folder, ledger


MISSING = ("row_without_message", "gone")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {MISSING, ("too_young", "young"), ("too_old", "old")}),
        pytest.param(
            "--grace 0s",
            {MISSING, ("row_without_message", "young"), ("too_old", "old")},
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            "--from 2023-11-14T23:10Z --until 2023-11-15T00:10Z",
            set(),
            marks=pytest.mark.campaign,
        ),
        ("--from 2023-11-15T00:13:00Z --until 2023-11-15T01:13", {MISSING}),
    ],
)
def test_rows_too_young_or_too_old_for_the_log_are_told_apart(
    options: str,
    expected: set[tuple[str, str]],
    tmp_path: Path,
) -> None:
    """A range judges what lies in it; its counterpart may lie a grace outside."""
    store, ledger = timed(tmp_path)

    code, told = run(store, ledger, "--time-column", "at", *options.split())

    assert set(found(told)) == expected
    assert code == any(kind == "row_without_message" for kind, _ in expected)


def test_times_of_any_type_serve(spark: SparkSession) -> None:
    """A timestamp, a text with one, ms as a number or a text."""
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    ms = int(at.timestamp() * 1000)
    frame = spark.sql(
        f"select 'k' as id, timestamp_millis({ms}) as a, '2026-01-31T12:00:00Z' as b,"
        f" {ms}L as c, '{ms}' as d, cast(null as timestamp) as e"
    )
    for name, expected in {"a": ms, "b": ms, "c": ms, "d": ms, "e": None}.items():
        (row,) = reconcile.ledger_rows(frame, "id", name).collect()
        assert row["at"] == expected, name


@pytest.mark.campaign
def test_damage_in_the_log_is_a_finding(tmp_path: Path) -> None:
    """A message may have stood there."""
    log = LogWriter(tmp_path / "commitlog")
    log.append("orders", b"", {"KEYS": "a"})
    log.append_raw(b"\x07" * 50)
    log.append("orders", b"", {"KEYS": "b"})
    log.close()

    code, told = run(tmp_path, write_ledger(tmp_path / "l.csv", "ab"))

    assert (code, told["differences"]) == (1, [])
    assert told["damaged"] == {"ranges": 1, "bytes": 50}


# --- databases


@pytest.fixture(autouse=True)
def derby_log(spark: SparkSession, tmp_path: Path) -> None:
    """Derby writes a file into the directory where the JVM was started, unless it is told."""
    jvm: Any = spark._jvm  # Spark has no other door to it
    jvm.java.lang.System.setProperty("derby.stream.error.file", str(tmp_path / "derby.log"))


def small_orders(folder: Path) -> Path:
    log = LogWriter(folder / "commitlog")
    for key in ("o-1", "o-2", "o-4"):
        log.append("orders", b"", {"KEYS": key})
    log.append("orders", b"", {"KEYS": "o-0"}, sys_flag=PREPARED)
    log.close()
    return folder


DIFFERENT = Counter([("row_without_message", "o-3"), ("message_without_row", "o-4")])


def test_a_database_is_read_through_jdbc(spark: SparkSession, tmp_path: Path) -> None:
    """Derby is in Spark's own jars: a real driver and a real table."""
    store = small_orders(tmp_path)
    url = f"jdbc:derby:{tmp_path / 'derby'}"
    rows = [("o-1", 1), ("o-2", 1), ("o-3", 1), ("o-9", 0)]
    spark.createDataFrame(rows, "id string, paid int").write.jdbc(f"{url};create=true", "orders")

    code, told = run(store, url, "--table", "orders", "--where", "paid = 1")

    assert code == 1
    assert found(told) == DIFFERENT


@pytest.mark.campaign
def test_a_driver_from_a_jar_serves_a_running_session(tmp_path: Path) -> None:
    """SQLite's, which Spark does not bring: ``--driver-jar``."""
    driver = jar("org.xerial", "sqlite-jdbc", "3.50.3.0")
    store = small_orders(tmp_path)
    database = sqlite3.connect(tmp_path / "orders.db")
    with database:
        database.execute("create table orders (id text primary key)")
        database.executemany("insert into orders values (?)", [("o-1",), ("o-2",), ("o-3",)])
    database.close()
    url = f"jdbc:sqlite:{tmp_path / 'orders.db'}"

    code, told = run(store, url, "--table", "orders", "--driver-jar", str(driver))

    assert code == 1
    assert found(told) == DIFFERENT


# --- what cannot be done


@pytest.mark.parametrize(
    ("ledger", "options", "said"),
    [
        ("none.parquet", [], "none.parquet: no such file or directory"),
        ("none.csv", [], "none.csv: no such file or directory"),
        ("l.csv", ["--key-column", "no"], "column no: the ledger has no such column; it has id"),
        ("l.csv", ["--time-column", "no"], "column no: the ledger has no such column"),
        ("l.csv", ["--where", "nothing = 1"], "nothing"),
        ("l.csv", ["--where", "id ="], "yntax"),
        ("broken.parquet", [], "broken.parquet"),
        ("l.csv", ["--from", "2026-01-31T00:00Z"], "name the ledger's --time-column too"),
        ("jdbc:derby:none", [], "jdbc:derby:none: name the table with --table"),
        ("jdbc:unknown:x?password=secret", ["--table", "t"], "there is no driver for it"),
        ("jdbc:derby:none", ["--table", "t", "--driver-jar", "no.jar"], "no.jar: no such file"),
        ("jdbc:derby:none", ["--table", "t", "--driver-package", "x"], "x: expected group:"),
        ("jdbc:derby:none", ["--table", "t"], "jdbc:derby:none: "),
    ],
)
def test_what_cannot_be_compared_ends_with_2_and_a_sentence(
    ledger: str,
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No stack trace, no password, nothing on standard output."""
    store = small_orders(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_ledger(tmp_path / "l.csv", ["o-1"])
    (tmp_path / "broken.parquet").write_text("no Parquet")

    code = main(["reconcile", str(store), *COMMON, "--ledger", ledger, *options])

    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert shown.err.startswith("reconcile: ")
    assert said in shown.err.splitlines()[-1]
    assert "secret" not in shown.err
    # Nothing follows the sentence, nothing precedes it but the steps that were begun.
    assert all(" s: " in line for line in shown.err.splitlines()[:-1])


@pytest.mark.campaign
def test_the_functions_work_on_any_log_in_a_notebook(spark: SparkSession, tmp_path: Path) -> None:
    """Without the command: two DataFrames in, one of differences out."""
    store = small_orders(tmp_path)
    log = message_roles.read_log(spark, str(store), *reconcile.COLUMNS)
    ledger = spark.createDataFrame([("o-1",), ("o-2",), ("o-3",)], "id string")

    rows = reconcile.ledger_rows(ledger, "id")
    told = reconcile.differences(log, rows, ["orders"])["differences"]

    assert told.columns == ["kind", "key", "rows", "messages", "offsets", "hidden", "at"]
    assert Counter((row["kind"], row["key"]) for row in told.collect()) == DIFFERENT
