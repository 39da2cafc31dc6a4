"""One script of administrative requests: RocketMQ 5.3.3 and halfmq give the same answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rocketmq_peer import PeerMissingError
from halfmq.client.testing import broker_process
from halfmq.remoting.admin_headers import (
    ConsumerGroupRequestHeader,
    CreateTopicRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    GetBrokerConsumeStatsRequestHeader,
    GetConsumeStatsRequestHeader,
    GetSubscriptionGroupConfigRequestHeader,
    GroupAndTopicRequestHeader,
    ProducerGroupRequestHeader,
    ResetOffsetRequestHeader,
    TopicRequestHeader,
    ViewBrokerStatsDataRequestHeader,
)
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.fastjson import parse
from halfmq.remoting.headers import UpdateConsumerOffsetRequestHeader
from tests.support.rocketmq_broker import Wire, rocketmq_broker

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(
        shutil.which("java") is None or shutil.which("mvn") is None,
        reason="needs java and mvn; answers are NOT compared",
    ),
]


def _create(name: str = "orders", **fields: Any) -> CreateTopicRequestHeader:
    header: dict[str, Any] = {
        "topic": name,
        "default_topic": "TBW102",
        "read_queue_nums": 2,
        "write_queue_nums": 2,
        "perm": 6,
        "topic_filter_type": "SINGLE_TAG",
        "topic_sys_flag": 0,
        **fields,
    }
    return CreateTopicRequestHeader(**header)


def script() -> Iterator[tuple[RequestCode, Header | None, bytes]]:
    """Give the requests, in order."""
    topic, group = TopicRequestHeader(topic="orders"), b'{"groupName":"readers","retryMaxTimes":3}'
    unknown = TopicRequestHeader(topic="unknown")
    create, delete = RequestCode.UPDATE_AND_CREATE_TOPIC, RequestCode.DELETE_TOPIC_IN_BROKER
    config, stats = RequestCode.GET_TOPIC_CONFIG, RequestCode.GET_TOPIC_STATS_INFO
    yield create, _create(attributes="+message.type=FIFO"), b""
    yield config, topic, b""
    changes: list[dict[str, Any]] = [
        {"attributes": "+message.type=NORMAL", "perm": 4, "order": True},
        {"attributes": "-message.type"},
        {"attributes": "-message.type"},
        {"attributes": "+nope=1"},
        {"attributes": "message.type=FIFO"},
        {"attributes": "+message.type=MIXED"},
        {"attributes": "+queue.type=SimpleCQ"},
    ]
    for fields in changes:
        yield create, _create(**fields), b""
        yield config, topic, b""
    for name in ("TBW102", "DefaultCluster", "broker-a", "rmq_sys_x", "a b"):
        yield create, _create(name), b""
    yield create, _create("new", attributes="-message.type"), b""
    for one in (topic, unknown):
        for code in (config, stats, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO):
            yield code, one, b""
    yield RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, group
    readers = GetSubscriptionGroupConfigRequestHeader(group="readers")
    yield RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, readers, b""
    commit = UpdateConsumerOffsetRequestHeader(
        consumer_group="readers", topic="orders", queue_id=0, commit_offset=0
    )
    yield RequestCode.UPDATE_CONSUMER_OFFSET, commit, b""
    yield RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequestHeader(consumer_group="readers"), b""
    for is_order in (False, True):
        of_all = GetBrokerConsumeStatsRequestHeader(is_order=is_order)
        yield RequestCode.GET_BROKER_CONSUME_STATS, of_all, b""
    nothing = ViewBrokerStatsDataRequestHeader(stats_name="TOPIC_PUT_NUMS", stats_key="unknown")
    yield RequestCode.VIEW_BROKER_STATS_DATA, nothing, b""
    yield RequestCode.QUERY_TOPICS_BY_CONSUMER, readers, b""
    both = GroupAndTopicRequestHeader(group="readers", topic="orders")
    yield RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, both, b""
    consumers = ConsumerGroupRequestHeader(consumer_group="readers")
    yield RequestCode.GET_CONSUMER_CONNECTION_LIST, consumers, b""
    producers = ProducerGroupRequestHeader(producer_group="nobody")
    yield RequestCode.GET_PRODUCER_CONNECTION_LIST, producers, b""
    resets: list[dict[str, Any]] = [
        {},
        {"timestamp": 0},
        {"queue_id": 0, "offset": 9},
        {"topic": "unknown"},
        {"group": "unknown"},
    ]
    for fields in resets:
        header: dict[str, Any] = {
            "topic": "orders",
            "group": "readers",
            "timestamp": -1,
            "is_force": True,
            **fields,
        }
        yield RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ResetOffsetRequestHeader(**header), b""
    for clean in (False, True):
        gone = DeleteSubscriptionGroupRequestHeader(group_name="readers", clean_offset=clean)
        yield RequestCode.DELETE_SUBSCRIPTIONGROUP, gone, b""
    for one in (topic, unknown, TopicRequestHeader(topic="TBW102"), TopicRequestHeader(topic=" ")):
        yield delete, one, b""
        yield config, one, b""


def seen(answer: RemotingCommand) -> tuple[int, Any, Any, Any]:
    """Return what tools read: code, fields, the remark of a refusal, and the body."""
    body = parse(answer.body) if answer.body else None
    if isinstance(body, dict):
        body.pop("brokerAddr", None)
        if "groupList" in body:  # RocketMQ 5.3.3 lists the topic's own name among the groups
            body["groupList"] = sorted(set(body["groupList"]) - {"orders", "unknown"})
        if "consumeStatsList" in body:  # RocketMQ has built-in groups of features that we lack
            body["consumeStatsList"] = [one for one in body["consumeStatsList"] if "readers" in one]
    return answer.code, answer.header or {}, answer.remark if answer.code else None, body


def answers(address: str) -> list[tuple[int, Any, Any, Any]]:
    """Run the script at one broker."""
    with Wire(address) as wire:
        return [seen(wire.ask(code, header, body)) for code, header, body in script()]


def test_administration_is_answered_as_by_rocketmq(tmp_path: Path) -> None:
    """Code, fields, remark and body, request by request."""
    try:
        with rocketmq_broker(
            tmp_path / "theirs",
            tmp_path / "home",
            timerWheelEnable="true",  # to delete topics
        ) as broker:
            theirs = answers(broker.address)
    except PeerMissingError as missing:
        pytest.skip(f"{missing}; answers are NOT compared")
    with broker_process(tmp_path / "ours") as ours_broker:
        ours = answers(ours_broker.address)

    asked = [(code.name, str(header), body) for code, header, body in script()]
    differences = [
        (request, their, our)
        for request, their, our in zip(asked, theirs, ours, strict=True)
        if their != our
    ]
    assert not differences, "\n".join(map(str, differences))
