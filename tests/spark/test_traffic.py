"""Traffic as counted by the job, against what is known of the stores without it."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession

from halfmq.spark_jobs.__main__ import main
from halfmq.spark_jobs.jobs import traffic
from halfmq.spark_jobs.source import message_roles
from tests.support import golden_store, messages
from tests.support.log_writer import START, LogWriter, Ours

GOLDEN = ("plain-clean", "tx-midway-killed")
MORE_GOLDEN = (
    "delay-retry-dlq",
    "batchcq",
    "ipv6",
    "pop-clean",
    "timer",
    "v4-tx",
    "retention",
    "propcrc",
)


def run(store: Path, *options: str) -> tuple[int, Any]:
    file = store / "told.json"
    code = main(["traffic", str(store), "--json", str(file), *options])
    return code, json.loads(file.read_text())


@pytest.mark.parametrize(
    "name",
    [*GOLDEN, *(pytest.param(name, marks=pytest.mark.campaign) for name in MORE_GOLDEN)],
)
def test_a_golden_store_s_messages_are_counted_once_each(name: str, tmp_path: Path) -> None:
    """Per topic, queue, tag, host, key and second, as its broker and clients tell them."""
    store = golden_store.unpack(name, tmp_path)
    options = ("--every", "1s", "--top-keys", "1000")

    code, told = run(store.root, *options)

    assert code == 0
    seen = messages.visible(store.messages)
    check_volumes(told, store.messages)
    tags = Counter[Any]()
    hosts = Counter[Any]()
    keys = Counter[Any]()
    for m in seen:
        count, topic = messages.count(m), m["topic"]
        tags[topic, m["properties"].get("TAGS")] += count
        hosts[topic, messages.host(m), m["properties"].get("PGROUP")] += count
        for key in set(m["properties"].get("KEYS", "").split()):
            keys[topic, key] += count
    assert {(t["topic"], t["tags"]): t["messages"] for t in told["tags"]} == tags
    assert {
        (p["topic"], p["producerHost"], p["producerGroup"]): p["messages"]
        for p in told["producers"]
    } == hosts
    assert {(k["topic"], k["key"]): k["messages"] for k in told["hot_keys"]} == keys
    assert [k["messages"] for k in told["hot_keys"]] == sorted(keys.values(), reverse=True)


def check_volumes(told: Any, truth: list[dict[str, Any]]) -> None:
    """Compare totals, topics, queues and rates."""
    totals: dict[str, Counter[str]] = {}
    topics: dict[str, list[dict[str, Any]]] = {}
    queues = Counter[Any]()
    seconds = Counter[Any]()
    for m in truth:
        count = messages.count(m)
        volume = {"messages": count, "records": 1, "bytes": m["storeSize"]}
        totals.setdefault(messages.role(m["topic"]), Counter()).update(volume)
        topics.setdefault(m["topic"], []).append(m)
        queues[m["topic"], m["queueId"]] += count
        seconds[m["topic"], m["storeTimestamp"] // 1000] += count
    assert told["totals"] == totals
    assert {topic["topic"] for topic in told["topics"]} == topics.keys()
    for topic in told["topics"]:
        its = topics[topic["topic"]]
        sizes = sorted(len(messages.body(m)) for m in its)
        assert topic["role"] == messages.role(topic["topic"])
        assert topic["messages"] == sum(map(messages.count, its))
        assert topic["bytes"] == sum(m["storeSize"] for m in its)
        assert topic["bodyBytes"] == sum(sizes)
        assert topic["first"] == utc(min(m["storeTimestamp"] for m in its))
        assert topic["last"] == utc(max(m["storeTimestamp"] for m in its))
        assert topic["bodySizes"] == {
            "p50": ranked(sizes, 0.5),
            "p90": ranked(sizes, 0.9),
            "p99": ranked(sizes, 0.99),
            "max": sizes[-1],
        }
    assert {(q["topic"], q["partition"]): q["messages"] for q in told["queues"]} == queues
    stretches = told["rates"]["stretches"]
    assert told["rates"]["every_seconds"] == 1
    assert {(s["topic"], s["start"]): s["messages"] for s in stretches} == {
        (topic, utc(second * 1000)): count for (topic, second), count in seconds.items()
    }
    for highest in told["rates"]["highest"]:
        of_topic = [n for (topic, _), n in seconds.items() if topic == highest["topic"]]
        assert highest["messages"] == highest["messagesPerSecond"] == max(of_topic)


def utc(time_ms: int) -> str:
    time = datetime.fromtimestamp(time_ms // 1000, UTC)
    return f"{time:%Y-%m-%dT%H:%M:%S}.{time_ms % 1000:03}Z"


def ranked(values: list[int], share: float) -> int:
    """The lowest value that so many are not above."""
    return values[math.ceil(share * len(values)) - 1]


def test_retries_and_dead_letters_are_told_by_group_and_topic(tmp_path: Path) -> None:
    """Rates are per message of the topic where the copies come from."""
    store = golden_store.unpack("delay-retry-dlq", tmp_path)
    retried = Counter(
        (m["topic"].split("%", 2)[2], m["properties"]["RETRY_TOPIC"], m["topic"][:5] == "%DLQ%")
        for m in store.messages
        if m["topic"].startswith("%")
    )
    sent = Counter(m["topic"] for m in store.messages)

    _, told = run(store.root)

    (failure,) = told["failures"]
    group, topic = failure["consumerGroup"], failure["topic"]
    assert (group, topic) == ("cg_retry", "retry_t")
    assert failure["retries"] == retried[group, topic, False] == 5
    assert failure["deadLetters"] == retried[group, topic, True] == 2
    assert failure["retryRate"] == 5 / sent["retry_t"]
    assert failure["deadLetterRate"] == 2 / sent["retry_t"]


@pytest.mark.campaign
def test_a_transaction_and_a_delay_count_as_one_message(tmp_path: Path) -> None:
    """Halves, ops, parked and waiting copies stand beside the messages, in roles of their own."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    log = LogWriter(tmp_path / "commitlog")
    transactions = Ours(log)
    expected = Counter[str]()
    for _ in range(400):
        half = transactions.half(KEYS="k")
        expected["half"] += 1
        match choose.randrange(5):
            case 0:
                transactions.commit(half)
                expected["message"] += 1
            case 1:
                transactions.rollback(half)
                expected["half"] += 1
            case 2:
                waits = choose.randint(1, 3)
                transactions.commit_delayed(half, waits=waits)
                expected.update({"delayed": waits, "message": 1})
            case 3:
                transactions.discard(half)
                expected["parked"] += 1
            case _:
                log.append("plain", b"x" * choose.randrange(500), {"KEYS": "k"})
                expected["message"] += 1
    transactions.write_ops()
    expected["op"] += 1
    log.close()

    code, told = run(tmp_path)

    assert code == 0
    assert {role: total["records"] for role, total in told["totals"].items()} == expected
    assert sum(key["messages"] for key in told["hot_keys"]) == expected["message"]


def test_what_is_damaged_is_told_and_not_counted(tmp_path: Path) -> None:
    """The figures are less than the truth by what cannot be read; the exit code says so."""
    log = LogWriter(tmp_path / "commitlog")
    log.append("plain", b"before")
    log.append_raw(b"\x01" * 777)
    log.append("plain", b"behind")
    log.close()

    code, told = run(tmp_path, "--output", str(tmp_path / "out"))

    assert code == 1
    assert told["damaged"] == {"ranges": 1, "bytes": 777}
    assert told["totals"] == {"message": {"messages": 2, "records": 2, "bytes": 2 * 102}}
    assert [topic["topic"] for topic in told["topics"]] == ["plain"]


@pytest.mark.campaign
def test_every_list_is_written_as_parquet(tmp_path: Path) -> None:
    """Rates there are per queue too; the summary is the one of --json."""
    log = LogWriter(tmp_path / "commitlog")
    for queue in (0, 1, 1):
        log.append("plain", b"x", {"TAGS": "t", "KEYS": "a b"}, queue_id=queue)
    log.close()
    out = tmp_path / "out"

    code, told = run(tmp_path, "--output", str(out))

    assert code == 0
    assert json.loads((out / "summary.json").read_text()) == told
    rates = parquet.read_table(out / "rates").to_pylist()
    assert {(rate["partition"], rate["messages"]) for rate in rates} == {(0, 1), (1, 2)}
    sizes = {"topics": 1, "queues": 2, "producers": 1, "tags": 1, "keys": 2, "failures": 0}
    for name, rows in sizes.items():
        assert parquet.read_table(out / name).num_rows == rows, name


def test_the_functions_work_on_any_log_in_a_notebook(spark: SparkSession, tmp_path: Path) -> None:
    """Without the command: DataFrame in, DataFrame out."""
    log = LogWriter(tmp_path)
    for minute in range(3):
        log.now = START + minute * 60_000
        log.append("plain", b"xyz")
    log.close()

    log_ = message_roles.read_log(spark, str(tmp_path), *traffic.COLUMNS)

    per_minute = traffic.traffic(log_, every=60_000)["topic_rates"].collect()
    assert [row["messagesPerSecond"] for row in per_minute] == [1 / 60] * 3


def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Roles, topics with their rates, keys and failures."""
    store = golden_store.unpack("delay-retry-dlq", tmp_path)

    assert main(["traffic", str(store.root), "--every", "1m"]) == 0

    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"commit log {store.root}" in lines
    assert any(line.startswith("message 22 in ") for line in lines)
    assert any(line.endswith(" sql_t") and line.startswith("10 ") for line in lines)
    assert "5 0.71 2 cg_retry retry_t" in lines


@pytest.mark.parametrize("wrong", [["--every", "x"], ["--top-keys", "-1"], []])
def test_a_wrong_command_line_ends_with_2(
    wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options are checked before anything is read; what is no log is told in a sentence."""
    try:
        code = main(["traffic", str(tmp_path / "none"), *wrong])
    except SystemExit as ended:
        code = int(ended.code or 0)

    shown = capsys.readouterr()
    assert code == 2
    assert "Traceback" not in shown.err
    assert "expected" in shown.err if wrong else "traffic: " in shown.err
