"""How far groups are behind, against what brokers and their clients tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from halfmq.broker.tables.consumer_offsets import ConsumerOffsetTable
from halfmq.spark_jobs.__main__ import main
from halfmq.spark_jobs.jobs.offset_table import read_offsets
from tests.support import golden_store, messages
from tests.support.log_writer import COMMIT, START, LogWriter, Ours

STATES = {True: "caught_up", False: "behind"}


def run(store: Path, *options: str) -> tuple[int, Any]:
    file = store / "told.json"
    code = main(["lag", str(store), "--json", str(file), *options])
    return code, json.loads(file.read_text())


def by_queue(told: Any) -> dict[tuple[str, str, int], dict[str, Any]]:
    return {
        (group["consumerGroup"], group["topic"], queue["partition"]): queue
        for group in told["groups"]
        for queue in group["queues"]
    }


def write_offsets(store: Path, offsets: dict[str, dict[int, int]], name: str = "") -> Path:
    """Write the table as RocketMQ does: bare numbers as keys."""
    path = store / "config" / (name or "consumerOffset.json")
    path.parent.mkdir(exist_ok=True)
    entries = [
        f'"{key}":{{{",".join(f"{queue}:{offset}" for queue, offset in queues.items())}\n}}'
        for key, queues in offsets.items()
    ]
    path.write_text('{\n"dataVersion":{"counter":3},\n"offsetTable":{' + ",".join(entries) + "}\n}")
    return path


@pytest.mark.parametrize(
    "name",
    [
        "plain-clean",
        pytest.param("delay-retry-dlq", marks=pytest.mark.campaign),
        pytest.param("pop-clean", marks=pytest.mark.campaign),
    ],
)
def test_a_golden_store_s_groups_are_as_far_as_the_broker_says(name: str, tmp_path: Path) -> None:
    """Ends of queues, messages behind, and since when the oldest of them waits."""
    store = golden_store.unpack(name, tmp_path)
    log_end = max(m["storeTimestamp"] for m in store.messages)

    code, told = run(store.root)

    assert code == 0
    queues = by_queue(told)
    for key, offsets in store.truth["consumerOffsets"].items():
        topic, _, group = key.partition("@")
        if group.startswith("CID_RMQ_SYS_"):
            assert not [place for place in queues if place[0] == group]
            continue
        for queue, known in store.truth["queues"][topic].items():
            row = queues.pop((group, topic, int(queue)))
            following = offsets.get(queue)
            assert (row["nextOffset"], row["end"]) == (following, known["max"])
            waiting = [
                m["storeTimestamp"]
                for m in store.messages
                if (m["topic"], m["queueId"]) == (topic, int(queue))
                and m["queueOffset"] + messages.count(m) > (following or 0)
            ]
            assert row["messagesBehind"] == known["max"] - (following or known["min"])
            assert row["secondsBehind"] == ((log_end - min(waiting)) / 1000 if waiting else 0)
            state = "never_consumed" if following is None else STATES[not waiting]
            assert row["state"] == state
    assert not queues
    groups = {group for group, _, _ in by_queue(told)}
    known_groups = store.truth.get("subscriptionGroups", {})
    ours = {g for g in known_groups if not g.startswith(("CID_", "TOOLS", "FILTER", "SELF_"))}
    assert set(told["never_consumed"]) == ours - groups


def test_offsets_outside_of_the_log_are_findings(tmp_path: Path) -> None:
    """Beyond its end messages will be skipped; below its start some are gone unread."""
    log = LogWriter(tmp_path / "commitlog", segment_size=1 << 12, first=1 << 12)
    log.skip_slots("orders", 0, 100)
    for _ in range(30):
        log.append("orders", bytes(200))
    log.close()
    write_offsets(tmp_path, {"orders@ahead": {0: 131}, "orders@late": {0: 40}, "gone@late": {5: 7}})

    code, told = run(tmp_path)

    assert code == 1
    queues = by_queue(told)
    ahead, late = queues["ahead", "orders", 0], queues["late", "orders", 0]
    assert (ahead["state"], ahead["messagesBehind"]) == ("beyond_end", 0)
    assert (late["state"], late["messagesBehind"], late["messagesLost"]) == ("below_start", 30, 60)
    assert late["secondsBehind"] == 0.029
    gone = queues["late", "gone", 5]
    assert (gone["state"], gone["end"], gone["messagesBehind"]) == ("not_in_log", None, None)
    kinds = {(f["kind"], f["consumerGroup"], f["topic"], f["partition"]) for f in told["findings"]}
    assert kinds == {("beyond_end", "ahead", "orders", 0), ("below_start", "late", "orders", 0)}


@pytest.mark.parametrize("name", ["retention", pytest.param("batchcq", marks=pytest.mark.campaign)])
def test_every_queue_begins_and_ends_where_the_broker_says(name: str, tmp_path: Path) -> None:
    """Where the oldest files are gone, and where a record holds several messages."""
    store = golden_store.unpack(name, tmp_path)
    queues = store.truth["queues"]
    nothing = {f"{topic}@zero": dict.fromkeys(map(int, q), 0) for topic, q in queues.items()}
    write_offsets(store.root, nothing)

    _, told = run(store.root, "--system")

    rows = by_queue(told)
    assert rows
    for (_, topic, queue), row in rows.items():
        known = queues[topic][str(queue)]
        if known["min"] == known["max"]:  # nothing of it is left
            assert (row["state"], row["end"]) == ("not_in_log", None)
            continue
        assert (row["start"], row["end"]) == (known["min"], known["max"])
        assert row["messagesLost"] == known["min"]


@pytest.mark.campaign
def test_only_what_takes_a_place_in_a_queue_counts(tmp_path: Path) -> None:
    """Finals of transactions do; rollbacks and halves do not, whatever their offset."""
    log = LogWriter(tmp_path / "commitlog")
    transactions = Ours(log)
    for _ in range(4):
        transactions.commit(transactions.half())
        transactions.rollback(transactions.half())
    log.close()
    write_offsets(tmp_path, {"orders@g": {3: 1}, "RMQ_SYS_TRANS_HALF_TOPIC@g": {0: 2}})

    code, told = run(tmp_path, "--system")

    assert code == 0
    row = by_queue(told)["g", "orders", 3]
    waiting = [w for w in log.written if w.topic == "orders" and w.sys_flag == COMMIT][1:]
    assert (row["end"], row["messagesBehind"]) == (4, 3) == (4, len(waiting))
    first = log.written.index(waiting[0])
    assert row["secondsBehind"] == (len(log.written) - 1 - first) / 1000
    assert by_queue(told)["g", "RMQ_SYS_TRANS_HALF_TOPIC", 0]["end"] == 8


@pytest.mark.campaign
def test_a_topic_that_was_created_anew_ends_where_it_ends_now(tmp_path: Path) -> None:
    """Records of the earlier one have higher offsets, and wait for nobody."""
    log = LogWriter(tmp_path / "commitlog")
    for offset in range(10):
        log.append("orders", queue_offset=offset)
    for offset in range(4):
        log.append("orders", queue_offset=offset)
    log.close()
    write_offsets(tmp_path, {"orders@g": {0: 3}, "orders@done": {0: 4}})

    code, told = run(tmp_path)

    assert code == 0
    rows = by_queue(told)
    assert (rows["g", "orders", 0]["end"], rows["g", "orders", 0]["messagesBehind"]) == (4, 1)
    assert rows["g", "orders", 0]["secondsBehind"] == 0
    assert rows["done", "orders", 0]["state"] == "caught_up"


@pytest.mark.campaign
def test_a_table_of_halfmq_and_its_backup_are_read_too(tmp_path: Path) -> None:
    """The backup serves when the table is damaged, and that is told."""
    log = LogWriter(tmp_path / "commitlog")
    for _ in range(5):
        log.append("orders", queue_id=2)
    log.close()
    path = tmp_path / "config" / "consumerOffset.json"
    path.parent.mkdir()
    table = ConsumerOffsetTable(path, now_ms=lambda: START)
    table.load()
    for offset in (1, 4):
        table.commit("billing", "orders", 2, offset)
        table.persist()

    _, told = run(tmp_path)
    assert by_queue(told)["billing", "orders", 2]["messagesBehind"] == 1
    assert told["offsets"] == {"file": str(path), "is_backup": False}

    for damage in ("{ not a table", '{"offsetTable": 1}', '{"offsetTable": {"x": {"0": 1}}}'):
        path.write_text(damage)
        backup = read_offsets(str(path))
        assert backup == (f"{path}.bak", True, [("billing", "orders", 2, 1)])


def test_limits_make_a_group_that_is_far_behind_a_finding(tmp_path: Path) -> None:
    """More messages, or an older one, than was said; up to now, if asked."""
    log = LogWriter(tmp_path / "commitlog")
    for second in range(10):
        log.now = START + second * 1000
        log.append("orders")
    log.close()
    write_offsets(tmp_path, {"orders@g": {0: 4}})
    for options, kinds in (
        (["--max-messages", "6", "--max-age", "4s"], {"too_old"}),
        (["--max-messages", "5", "--max-age", "365d", "--as-of", "now"], {"too_many", "too_old"}),
    ):
        code, told = run(tmp_path, *options)

        assert {finding["kind"] for finding in told["findings"]} == kinds
        assert code == 1


@pytest.mark.campaign
def test_rows_are_written_as_parquet_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row per group and queue; the table for people sums up by topic."""
    store = golden_store.unpack("plain-clean", tmp_path)
    out = tmp_path / "out"

    assert main(["lag", str(store.root), "--output", str(out)]) == 0

    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    rows = parquet.read_table(out / "lag").to_pylist()
    of_admin = [row for row in rows if row["consumerGroup"] == "cg_admin"]
    behind = sum(row["messagesBehind"] for row in of_admin)
    assert any(line.startswith(f"{behind} ") and line.endswith("cg_admin orders") for line in shown)
    assert json.loads((out / "summary.json").read_text())["groups"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "it is no table"),
        ('{"offsetTable": {"a@b": {0: 1.5}}}', "1.5 is no offset"),
        ('{"offsetTable": {"a@b": {0: 99999999999999999999}}}', "is too large"),
    ],
)
def test_without_offsets_it_ends_with_2_and_a_sentence(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is named, and what is wrong with it; no JVM is started for it."""
    LogWriter(tmp_path / "commitlog").close()
    path = tmp_path / "config" / "consumerOffset.json"
    path.parent.mkdir()
    path.write_text(content)

    assert main(["lag", str(tmp_path)]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"lag: {path}: ")
    assert said in shown.err
    assert shown.err.count("\n") == 1


def test_a_store_without_consumers_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broker writes no offsets before a consumer has stored one; a file that is named must be."""
    LogWriter(tmp_path / "commitlog").close()

    assert main(["lag", str(tmp_path)]) == 0
    assert "no consumer group has stored an offset" in capsys.readouterr().out
    assert main(["lag", str(tmp_path), "--offsets", str(tmp_path / "o.json")]) == 2
    assert "it is missing; .bak: it is missing" in capsys.readouterr().err
