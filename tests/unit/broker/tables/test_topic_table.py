"""The topic table: built-in topics, the file of a real broker, creation and its limits."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from halfmq.broker.config import TopicDefaults
from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.limits.kept import TOPICS
from halfmq.broker.tables.topic_config import TopicConfig, built_in_topics
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.remoting.codes import ResponseCode
from tests.support.broker_doubles import Clock, config_path, identity
from tests.support.golden_store import unpack
from tests.support.tables import load_table


def table(
    root: Path,
    *,
    auto_create: bool = True,
    topics_max: int = 20_000,
    groups: Collection[str] = (),
) -> TopicTable:
    made = TopicTable(
        config_path(root, "topics.json"),
        identity(auto_create=auto_create),
        now_ms=Clock(),
        topics_max=topics_max,
        is_group=groups.__contains__,
    )
    made.load()
    return made


def on_disk(root: Path) -> dict[str, Any]:
    content = load_table(config_path(root, "topics.json"))
    assert content is not None
    return content


def test_an_empty_broker_has_the_built_in_topics(tmp_path: Path) -> None:
    """Clients find RocketMQ's own topics with RocketMQ's queues and permissions."""
    topics = table(tmp_path)
    found = {one.name: (one.read_queue_nums, one.write_queue_nums, one.perm) for one in topics}

    assert found == {
        "TBW102": (8, 8, 7),
        "SELF_TEST_TOPIC": (1, 1, 6),
        "OFFSET_MOVED_EVENT": (1, 1, 6),
        "BenchmarkTest": (1024, 1024, 6),
        "DefaultCluster": (16, 16, 7),
        "broker-a": (1, 1, 7),
        "SCHEDULE_TOPIC_XXXX": (18, 18, 6),
        "DefaultCluster_REPLY_TOPIC": (1, 1, 6),
        "rmq_sys_SYNC_BROKER_MEMBER_broker-a": (1, 1, 1),
        "RMQ_SYS_TRANS_HALF_TOPIC": (1, 1, 6),
        "RMQ_SYS_TRANS_OP_HALF_TOPIC": (1, 1, 6),
    }


def test_the_trace_topic_exists_from_the_start_if_it_is_enabled() -> None:
    """With one queue, as at RocketMQ; a topic that its first message creates has more."""
    topic = built_in_topics(TopicDefaults(trace_topic=True), 18)["RMQ_SYS_TRACE_TOPIC"]

    assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm) == (1, 1, 6)
    assert "RMQ_SYS_TRACE_TOPIC" not in built_in_topics(TopicDefaults(), 18)


def test_the_template_is_missing_if_topics_are_not_created_automatically(tmp_path: Path) -> None:
    """A client that finds no TBW102 reports at once that the topic does not exist."""
    topics = table(tmp_path, auto_create=False)

    assert topics.get("TBW102") is None
    assert topics.create_on_send("orders", "TBW102", 4, "peer") is None


def test_a_template_left_by_another_configuration_is_not_offered(tmp_path: Path) -> None:
    """It may be in the file from the time when topics were created automatically."""
    table(tmp_path).save()
    topics = table(tmp_path, auto_create=False)

    assert topics.get("TBW102") is not None
    assert topics.offered("TBW102") is None
    assert topics.create_on_send("orders", "TBW102", 4, "peer") is None


@pytest.mark.parametrize(("wanted", "given"), [(4, 4), (3, 3), (32, 8), (0, 1), (-5, 1)])
def test_a_new_topic_has_at_most_the_queues_of_the_template(
    tmp_path: Path, wanted: int, given: int
) -> None:
    """And the permissions to read and write."""
    made = table(tmp_path).create_on_send("orders", "TBW102", wanted, "peer")

    assert made == TopicConfig(name="orders", read_queue_nums=given, write_queue_nums=given, perm=6)


def test_a_created_topic_is_on_disk_when_it_is_returned(tmp_path: Path) -> None:
    """If a crash lost the topic, its messages could not be found."""
    topics = table(tmp_path)
    topics.create_on_send("orders", "TBW102", 4, "peer")
    assert topics.persist_job() is None

    assert on_disk(tmp_path)["topicConfigTable"]["orders"] == {
        "attributes": {},
        "order": False,
        "perm": 6,
        "readQueueNums": 4,
        "topicFilterType": "SINGLE_TAG",
        "topicName": "orders",
        "topicSysFlag": 0,
        "writeQueueNums": 4,
    }
    assert table(tmp_path).get("orders") is not None


def test_every_change_steps_the_version(tmp_path: Path) -> None:
    """Clients of the table see by dataVersion that it has changed."""
    topics = table(tmp_path)
    topics.ensure("a")
    topics.ensure_retry("b")
    topics.ensure("a")
    assert topics.version == 2

    assert on_disk(tmp_path)["dataVersion"] == {
        "counter": 2,
        "stateVersion": 0,
        "timestamp": Clock().now,
    }
    assert table(tmp_path).version == 2


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("bad topic", ResponseCode.INVALID_PARAMETER),
        ("", ResponseCode.INVALID_PARAMETER),
        ("t" * 128, ResponseCode.INVALID_PARAMETER),
        ("TRANS_CHECK_MAX_TIME_TOPIC", ResponseCode.NO_PERMISSION),
    ],
)
def test_no_topic_is_created_with_an_invalid_or_reserved_name(
    tmp_path: Path, name: str, code: ResponseCode
) -> None:
    topics = table(tmp_path)
    with pytest.raises(RequestRefusedError) as refusal:
        topics.create_on_send(name, "TBW102", 4, "peer")

    assert refusal.value.code is code
    assert refusal.value.remark
    assert name not in topics


def test_only_a_topic_with_inherit_permission_is_a_template(tmp_path: Path) -> None:
    """BenchmarkTest does not have it."""
    topics = table(tmp_path)

    assert topics.create_on_send("orders", "BenchmarkTest", 4, "peer") is None
    assert topics.create_on_send("orders", "no_such_topic", 4, "peer") is None


def test_a_retry_topic_needs_no_template(tmp_path: Path) -> None:
    """Clients send failed messages there also if topics are not created automatically."""
    topics = table(tmp_path, auto_create=False)
    made = topics.create_on_send("%RETRY%billing", "TBW102", 4, "peer")

    assert made == TopicConfig(name="%RETRY%billing", read_queue_nums=1, write_queue_nums=1, perm=6)
    assert topics.create_on_send("%RETRY%", "TBW102", 4, "peer") is None


def test_a_full_table_refuses_with_its_limit(tmp_path: Path) -> None:
    topics = table(tmp_path, topics_max=12)
    topics.ensure("one")
    with pytest.raises(RequestRefusedError, match="the limit is 12") as refusal:
        topics.ensure("two")

    assert refusal.value.code is ResponseCode.NO_PERMISSION
    assert topics.get("two") is None


def test_messages_do_not_use_up_all_topics(tmp_path: Path) -> None:
    """A client that names new topics until it is refused locks out neither groups nor operators.

    Retry topics and dead letters of groups have a limit by that of the groups alone.
    """
    topics = table(tmp_path, topics_max=40, groups=("billing", "shipping"))
    for number in range(36 - len(topics)):
        topics.create_on_send(f"t-{number}", "TBW102", 4, "peer")
    with pytest.raises(RequestRefusedError, match="36 for topics that messages create, of 40"):
        topics.create_on_send("further", "TBW102", 4, "peer")

    with pytest.raises(RequestRefusedError, match="36 for topics that messages create"):
        topics.create_on_send("%RETRY%nobody", "TBW102", 4, "peer")

    for number in range(4):
        assert topics.ensure(f"parked-{number}")
    with pytest.raises(RequestRefusedError, match="the limit is 40"):
        topics.ensure("parked")
    assert topics.ensure_retry("billing")
    assert topics.ensure_dead_letter("billing")
    assert topics.create_on_send("%RETRY%shipping", "TBW102", 4, "peer")
    assert topics.kept()[TOPICS] == 40
    assert topics.create_on_send("t-0", "TBW102", 4, "peer")


def test_a_request_is_refused_if_its_new_topic_cannot_be_saved(tmp_path: Path) -> None:
    """A restart would forget the topic."""
    path = tmp_path / "config" / "topics.json"
    path.parent.write_text("in the way")
    topics = TopicTable(path, identity(), now_ms=Clock())
    with pytest.raises(RequestRefusedError, match=r"topics\.json cannot be written") as refusal:
        topics.create_on_send("orders", "TBW102", 4, "peer")

    assert refusal.value.code is ResponseCode.SERVICE_NOT_AVAILABLE
    assert "orders" not in topics


def test_a_topic_that_the_broker_needs_is_saved_later_if_necessary(tmp_path: Path) -> None:
    """A decision needs it, and must not fail because of a full disk."""
    path = tmp_path / "config" / "topics.json"
    path.parent.write_text("in the way")
    topics = TopicTable(path, identity(), now_ms=Clock())
    topics.ensure("orders")
    path.parent.unlink()
    job = topics.persist_job()
    assert job is not None
    job()

    assert "orders" in on_disk(tmp_path)["topicConfigTable"]


def test_the_file_of_a_real_broker_loads_with_every_topic(tmp_path: Path) -> None:
    """As Apache RocketMQ 5.3.3 wrote it."""
    golden = unpack("delay-retry-dlq", tmp_path)
    topics = table(golden.root)
    truth = load_table(golden.root / "config" / "topics.json")
    assert truth is not None

    for name, entry in truth["topicConfigTable"].items():
        known = topics.get(name)
        assert known is not None
        assert known.to_json() == entry
    assert topics.version == truth["dataVersion"]["counter"]


def test_saving_a_foreign_file_loses_nothing(tmp_path: Path) -> None:
    """Attributes and fields of newer releases are written back."""
    path = config_path(tmp_path, "topics.json")
    path.parent.mkdir()
    path.write_text(
        json.dumps(
            {
                "dataVersion": {"counter": 7, "stateVersion": 3, "timestamp": 5},
                "fromTheFuture": {"a": [1]},
                "topicConfigTable": {
                    "T": {"attributes": {"message.type": "FIFO"}, "perm": 4, "newField": "x"},
                    "bad": 3,
                },
            }
        )
    )
    topics = table(tmp_path)
    topics.ensure("another")
    saved = on_disk(tmp_path)

    assert saved["fromTheFuture"] == {"a": [1]}
    assert saved["dataVersion"]["counter"] == 8
    assert saved["dataVersion"]["stateVersion"] == 3
    assert saved["topicConfigTable"]["T"] == {
        "attributes": {"message.type": "FIFO"},
        "newField": "x",
        "order": False,
        "perm": 4,
        "readQueueNums": 16,
        "topicFilterType": "SINGLE_TAG",
        "topicName": "T",
        "topicSysFlag": 0,
        "writeQueueNums": 16,
    }


def test_a_topic_prints_as_rocketmq_prints_it() -> None:
    """Users search for the text of this remark."""
    topic = TopicConfig(name="raw_t", read_queue_nums=4, write_queue_nums=4)

    assert str(topic) == (
        "TopicConfig [topicName=raw_t, readQueueNums=4, writeQueueNums=4, perm=RW-, "
        "topicFilterType=SINGLE_TAG, topicSysFlag=0, order=false, attributes={}]"
    )
