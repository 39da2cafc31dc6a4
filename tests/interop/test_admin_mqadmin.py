"""The official operators' tool, mqadmin 5.3.3, administers topics, groups and offsets.

Compared is what it prints: the columns that its documentation and its sources show.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from halfmq.client import Message
from halfmq.client.blocking import Consumer, Producer
from tests.support.mqadmin import NEEDS_MQADMIN, Mqadmin, mqadmin
from tests.support.patience import PATIENCE_S

pytestmark = NEEDS_MQADMIN


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mqadmin]:
    """A broker, and the tool beside it."""
    with ExitStack() as stack:
        yield mqadmin(stack, "5.3.3", tmp_path_factory.mktemp("admin"))


def _send(tool: Mqadmin, topic: str, count: int) -> None:
    with Producer("admin-test", namesrv=tool.broker.address) as producer:
        for number in range(count):
            producer.send(Message(topic, b"body %d" % number))


def test_topics_are_created_changed_listed_and_deleted(tool: Mqadmin) -> None:
    """updateTopic, updateTopicPerm, topicList, topicRoute, topicStatus, deleteTopic."""
    address = tool.broker.address
    made = tool.run("updateTopic", *tool.at, "-t", "orders", "-r", "4", "-w", "4")
    assert made[0] == f"create topic to {address} success."
    assert made[-1].startswith("TopicConfig [topicName=orders, readQueueNums=4, writeQueueNums=4")
    in_cluster = tool.run("updateTopic", *tool.cluster, "-t", "bills", "-a", "+message.type=FIFO")
    assert in_cluster[0] == f"create topic to {address} success."
    assert {"orders", "bills"} <= set(tool.run("topicList"))
    cluster_list = tool.run("topicList", *tool.cluster)
    assert any(line.split() == ["DefaultCluster", "orders"] for line in cluster_list), cluster_list
    route = " ".join(tool.run("topicRoute", "-t", "orders"))
    assert '"readQueueNums":4' in route.replace(" ", "")

    _send(tool, "orders", 5)
    status = tool.run("topicStatus", "-t", "orders")
    assert status[0].startswith("#Broker Name #QID #Min Offset #Max Offset #Last Updated")
    rows = [line.split() for line in status if line.startswith("broker-a")]
    assert [row[1] for row in rows] == ["0", "1", "2", "3"]
    assert sum(int(row[3]) for row in rows) == 5

    changed = tool.run("updateTopicPerm", *tool.at, "-t", "orders", "-p", "4")
    assert any("success" in line for line in changed), changed
    assert '"perm":4' in " ".join(tool.run("topicRoute", "-t", "orders")).replace(" ", "")

    refused = tool.failure("updateTopic", *tool.at, "-t", "TBW102")
    assert "CODE: 29 DESC: The topic[TBW102] is conflict with system topic." in refused

    gone = tool.run("deleteTopic", *tool.cluster, "-t", "orders")
    assert "delete topic [orders] from cluster [DefaultCluster] success." in gone
    assert any("from NameServer success." in line for line in gone)
    assert "orders" not in tool.run("topicList")


def test_groups_are_created_shown_and_deleted(tool: Mqadmin) -> None:
    """updateSubGroup, getConsumerConfig, consumerConnection, consumerProgress, deleteSubGroup."""
    address = tool.broker.address
    made = tool.run("updateSubGroup", *tool.at, "-g", "readers", "-r", "5", "-q", "2")
    assert made[0] == f"create subscription group to {address} success."
    config = " ".join(tool.run("getConsumerConfig", "-g", "readers"))
    assert "retryMaxTimes = 5" in config
    assert "retryQueueNums = 2" in config

    tool.run("updateTopic", *tool.at, "-t", "payments", "-r", "1", "-w", "1")
    offline = tool.failure("consumerConnection", "-g", "readers")
    assert "No topic route info in name server for the topic: %RETRY%readers" in offline
    with Consumer("readers", {"payments": "*"}, namesrv=tool.broker.address) as consumer:
        _send(tool, "payments", 3)
        for _ in range(2):
            message = consumer.receive(timeout=30)
            assert message is not None
            message.ack()
        shown = tool.run("consumerConnection", "-g", "readers")
        assert any(line.startswith(consumer.client_id) and "PYTHON" in line for line in shown)
        assert "payments *" in shown
        assert "MessageModel: CLUSTERING" in shown
        assert any(line.startswith("readers") for line in tool.run("consumerProgress"))
    progress = tool.run("consumerProgress", "-g", "readers")
    row = next(line.split() for line in progress if line.startswith("payments"))
    assert (row[2], row[3], row[4]) == ("0", "3", "2"), row
    assert "Consume Diff Total: 1" in progress, progress

    gone = tool.run("deleteSubGroup", *tool.cluster, "-g", "readers", "-r", "true")
    assert any("delete subscription group [readers] from broker" in line for line in gone), gone
    assert "%RETRY%readers" not in tool.run("topicList")


def test_producers_are_shown(tool: Mqadmin) -> None:
    """The tools producerConnection and producer."""
    tool.run("updateTopic", *tool.at, "-t", "notes", "-r", "1", "-w", "1")
    with Producer("writers", namesrv=tool.broker.address) as producer:
        producer.send(Message("notes", b"body"))
        shown = tool.run("producerConnection", "-g", "writers", "-t", "notes")
        assert any(producer.client_id in line and "PYTHON" in line for line in shown), shown
        everybody = tool.run("producer", *tool.at)
        assert any("writers" in line and producer.client_id in line for line in everybody), (
            everybody
        )


def test_the_name_server_is_administered(tool: Mqadmin) -> None:
    """The tools updateTopic -o, updateKvConfig, deleteKvConfig, wipeWritePerm and addWritePerm."""
    ordered = tool.run("updateTopic", *tool.cluster, "-t", "ordered", "-o", "true")
    assert any("set cluster orderConf" in line for line in ordered), ordered
    config = ("-s", "NAMES", "-k", "key")
    assert tool.run("updateKvConfig", *config, "-v", "value") == [
        "create or update kv config to namespace success."
    ]
    assert tool.run("deleteKvConfig", *config) == ["delete kv config from namespace success."]
    for command in ("wipeWritePerm", "addWritePerm"):
        (line,) = tool.run(command, "-b", "broker-a")
        assert tool.broker.address in line
        assert "[broker-a]" in line


def test_offsets_are_reset(tool: Mqadmin) -> None:
    """The tools resetOffsetByTime and skipAccumulatedMessage."""
    tool.run("updateTopic", *tool.at, "-t", "clicks", "-r", "1", "-w", "1")
    tool.run("updateSubGroup", *tool.at, "-g", "first")
    _send(tool, "clicks", 3)

    skipped = tool.run("skipAccumulatedMessage", "-g", "first", "-t", "clicks")
    assert skipped[-1].split() == ["broker-a", "0", "3"], skipped
    reset = tool.run("resetOffsetByTime", "-g", "first", "-t", "clicks", "-s", "0")
    assert reset[-1].split() == ["broker-a", "0", "0"], reset
    with Consumer("first", {"clicks": "*"}, namesrv=tool.broker.address) as consumer:
        message = consumer.receive(timeout=30)
        assert message is not None
        assert message.body == b"body 0"


def test_settings_are_shown_and_changed(tool: Mqadmin) -> None:
    """The tools getBrokerConfig, updateBrokerConfig, getNamesrvConfig and updateNamesrvConfig."""
    assert "fileReservedTime = 72" in tool.run("getBrokerConfig", *tool.at)
    change = ("-k", "fileReservedTime", "-v", "24")
    assert tool.run("updateBrokerConfig", *tool.at, *change) == [
        f"update broker config success, {tool.broker.address}"
    ]
    assert "fileReservedTime = 24" in tool.run("getBrokerConfig", *tool.at)
    assert "fileReservedTime=24" in (tool.home / "broker.conf").read_text()
    refused = tool.failure("updateBrokerConfig", *tool.at, "-k", "listenPort", "-v", "1")
    assert "listenPort takes effect at a start only" in refused
    assert "fileReservedTime = 24" in tool.run("getNamesrvConfig")
    changed = tool.run("updateNamesrvConfig", "-k", "fileReservedTime", "-v", "48")
    assert any("success" in line for line in changed), changed
    tool.broker.restart()
    assert "fileReservedTime = 48" in tool.run("getBrokerConfig", *tool.at)


def test_the_store_is_cleaned(tool: Mqadmin) -> None:
    """The tools cleanExpiredCQ, cleanUnusedTopic and deleteExpiredCommitLog."""
    for command in ("cleanExpiredCQ", "cleanUnusedTopic", "deleteExpiredCommitLog"):
        for where in (tool.at, tool.cluster):
            assert tool.run(command, *where) == ["success"], command


def test_rates_and_progress_are_shown(tool: Mqadmin) -> None:
    """The tools statsAll, brokerStatus, clusterList and brokerConsumeStats."""
    tool.run("updateTopic", *tool.at, "-t", "rates", "-r", "1", "-w", "1")
    tool.run("updateSubGroup", *tool.at, "-g", "watchers")
    with Consumer("watchers", {"rates": "*"}, namesrv=tool.broker.address) as consumer:
        _send(tool, "rates", 5)
        message = consumer.receive(timeout=30)
        assert message is not None
        message.ack()
    deadline = time.monotonic() + PATIENCE_S
    while not (row := _row(tool.run("statsAll", "-t", "rates"), "watchers")) or row[-1] == "0":
        assert time.monotonic() < deadline, row
    topic, group, accumulation, stored_tps, delivered_tps, stored, delivered = row
    assert (topic, group, accumulation, stored, delivered) == ("rates", "watchers", "4", "5", "5")
    assert float(stored_tps) > 0
    assert float(delivered_tps) > 0
    status = {line.split()[0]: line for line in tool.run("brokerStatus", *tool.at)}
    assert float(status["putTps"].split()[3]) > 0
    assert int(status["msgGetTotalTodayNow"].split()[-1]) >= 5
    assert float(_row(tool.run("clusterList"), "broker-a")[5].partition("(")[0]) >= 0
    more = _row(tool.run("clusterList", "-m"), "broker-a")
    assert (more[2], more[3]) == ("0", "0")
    assert int(more[4]) >= 5
    progress = _row(tool.run("brokerConsumeStats", *tool.at), "watchers")
    assert (progress[0], progress[4], progress[5]) == ("rates", "5", "1"), progress


def _row(lines: list[str], word: str) -> list[str]:
    """Return the words of the first line that has this one; empty if there is none."""
    return next((line.split() for line in lines if word in line.split()), [])
