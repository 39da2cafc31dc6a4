"""Damaged tables: rebuilt from other data or refused, and never treated as empty."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from halfmq.broker.tables.consumer_offsets import NO_OFFSET, ConsumerOffsetTable
from halfmq.broker.tables.group_table import GroupTable
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.store.errors import DamagedTableError
from halfmq.store.files.json_table import save_table
from tests.support.broker_doubles import Clock, config_path, identity
from tests.support.tables import load_table

SPOILT = b'{"dataVersion'
QUEUES = [("orders", 11), ("orders", 3), ("events", 0), ("%RETRY%billing", 0), ("%DLQ%billing", 0)]


def topics(root: Path) -> TopicTable:
    made = TopicTable(config_path(root, "topics.json"), identity(), now_ms=Clock())
    made.load()
    return made


def groups(root: Path) -> GroupTable:
    path = config_path(root, "subscriptionGroup.json")
    made = GroupTable(path, auto_create=False, now_ms=Clock())
    made.load()
    return made


def spoil(path: Path, *, backup: bool = True) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(SPOILT)
    if backup:
        path.with_name(path.name + ".bak").write_bytes(SPOILT)


def test_topics_are_rebuilt_from_queues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every message can be pulled again; each topic has at least the default number of queues."""
    path = config_path(tmp_path, "topics.json")
    spoil(path)
    table = topics(tmp_path)
    table.complete(QUEUES)

    counts = {one.name: (one.read_queue_nums, one.write_queue_nums, one.perm) for one in table}
    assert counts["orders"] == (12, 12, 6)
    assert counts["events"] == (8, 8, 6)
    assert counts["%RETRY%billing"] == counts["%DLQ%billing"] == (1, 1, 6)
    assert "event=topics_rebuilt count=4" in caplog.text
    assert path.with_name("topics.json.bad").read_bytes() == SPOILT

    table.save()
    again = topics(tmp_path)
    again.complete([("later", 0)])
    assert "orders" in again
    assert "later" not in again


def test_topics_of_a_backup_are_completed(tmp_path: Path) -> None:
    """The backup lacks the last change: a topic or a queue may be missing."""
    table = topics(tmp_path)
    table.ensure("orders", queues=4, perm=4)
    table.save()
    table.save()
    config_path(tmp_path, "topics.json").write_bytes(SPOILT)
    table = topics(tmp_path)
    table.complete(QUEUES)
    orders = table.get("orders")

    assert orders is not None
    assert (orders.read_queue_nums, orders.perm) == (12, 4)
    assert "events" in table


def test_an_unreadable_topic_is_rebuilt(tmp_path: Path) -> None:
    """The others keep the settings from the file."""
    path = config_path(tmp_path, "topics.json")
    path.parent.mkdir(exist_ok=True)
    save_table(path, {"topicConfigTable": {"events": 5, "kept": {"readQueueNums": 3}}})
    table = topics(tmp_path)
    table.complete(QUEUES)

    assert "events" in table
    kept = table.get("kept")
    assert kept is not None
    assert kept.read_queue_nums == 3


def test_no_topic_is_rebuilt_if_the_file_is_valid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A deleted topic does not return because its messages are still in the log."""
    topics(tmp_path).save()
    table = topics(tmp_path)
    with caplog.at_level(logging.DEBUG):
        table.complete(QUEUES)

    assert "orders" not in table
    assert not caplog.records


def test_after_a_kill_groups_are_completed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New ones may not be in the file yet; groups in the file keep their settings."""
    groups(tmp_path).save()
    table = groups(tmp_path)
    with caplog.at_level(logging.INFO):
        table.complete(["billing"], after_kill=True)
    job = table.persist_job()
    assert job is not None
    job()

    assert "billing" in groups(tmp_path)
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_no_topic_is_rebuilt_for_invalid_or_system_names(tmp_path: Path) -> None:
    """Nor for features of RocketMQ that halfmq does not have."""
    spoil(config_path(tmp_path, "topics.json"))
    table = topics(tmp_path)
    table.complete([("a b", 0), ("x" * 500, 0), ("rmq_sys_wheel_timer", 0)])

    assert {"a b", "x" * 500, "rmq_sys_wheel_timer"}.isdisjoint(one.name for one in table)


def test_groups_are_rebuilt_from_retry_topics_and_offsets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may continue to consume, also if groups are not created automatically."""
    spoil(config_path(tmp_path, "subscriptionGroup.json"))
    table = groups(tmp_path)
    table.complete(["billing", "audit", "no group"], after_kill=False)

    assert table.ensure("billing") is not None
    assert table.ensure("audit") is not None
    assert table.ensure("another") is None
    assert "event=groups_rebuilt count=2" in caplog.text


def test_no_group_is_rebuilt_if_the_file_is_valid(tmp_path: Path) -> None:
    """A deleted group does not return."""
    groups(tmp_path).save()
    table = groups(tmp_path)
    table.complete(["billing"], after_kill=False)

    assert table.ensure("billing") is None


def test_offsets_are_never_rebuilt(tmp_path: Path) -> None:
    """With an empty table every group would consume everything again, or skip it all."""
    path = config_path(tmp_path, "consumerOffset.json")
    spoil(path)
    for _ in range(2):
        with pytest.raises(DamagedTableError, match="remove both") as refused:
            ConsumerOffsetTable(path, now_ms=Clock()).load()
    assert str(path) in str(refused.value)
    assert path.read_bytes() == SPOILT


def test_offsets_of_the_backup_are_used(tmp_path: Path) -> None:
    """Consumers repeat the messages between two saves."""
    path = config_path(tmp_path, "consumerOffset.json")
    path.parent.mkdir(exist_ok=True)
    for offset in (5, 9):
        save_table(path, {"offsetTable": {"orders@billing": {"0": offset}}})
    spoil(path, backup=False)
    table = ConsumerOffsetTable(path, now_ms=Clock())
    table.load()

    assert table.query("billing", "orders", 0) == 5
    assert table.groups() == {"billing"}
    table.commit("billing", "orders", 0, 7)
    table.persist()
    assert load_table(path) is not None
    assert table.query("billing", "orders", 1) == NO_OFFSET
