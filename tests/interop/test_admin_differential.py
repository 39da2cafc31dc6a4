"""One script of administrative requests: RocketMQ 5.3.3 and halfmq give the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmq.client.testing import broker_process
from halfmq.remoting.admin_headers import (
    CloneGroupOffsetRequestHeader,
    ConsumerGroupRequestHeader,
    CreateTopicRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    GetBrokerConsumeStatsRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumeStatsRequestHeader,
    GetSubscriptionGroupConfigRequestHeader,
    GroupAndTopicRequestHeader,
    GroupForbiddenRequestHeader,
    ProducerGroupRequestHeader,
    QueryConsumeQueueRequestHeader,
    QueryCorrectionOffsetHeader,
    ResetOffsetRequestHeader,
    TopicRequestHeader,
    ViewBrokerStatsDataRequestHeader,
)
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.fastjson import parse
from halfmq.remoting.headers import (
    UpdateConsumerOffsetRequestHeader,
)
from halfmq.store.format.properties import encode_properties
from tests.support.rocketmq_broker import Wire, rocketmq_broker
from tests.support.usual_headers import send_header

pytestmark = pytest.mark.campaign


LEFT_OUT = {"msgId"}  # it has the port


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
    for code in (
        RequestCode.GET_ALL_CONSUMER_OFFSET,
        RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
        RequestCode.CLEAN_UNUSED_TOPIC,
    ):
        yield code, None, b""
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
    yield from requests_about_consumption()
    for clean in (False, True):
        gone = DeleteSubscriptionGroupRequestHeader(group_name="readers", clean_offset=clean)
        yield RequestCode.DELETE_SUBSCRIPTIONGROUP, gone, b""
    for one in (topic, unknown, TopicRequestHeader(topic="TBW102"), TopicRequestHeader(topic=" ")):
        yield delete, one, b""
        yield config, one, b""


def requests_about_consumption() -> Iterator[tuple[RequestCode, Header | None, bytes]]:
    """Give requests about the group, which is not connected, and its offsets in the topic."""
    yield (
        RequestCode.SEND_MESSAGE_V2,
        send_header(
            producer_group="writers",
            properties=encode_properties({"TAGS": "paid", "UNIQ_KEY": "U1"}).decode(),
        ),
        b"body",
    )
    group = b'{"groupName":"others"}'
    yield RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, group
    for topic in ("orders", "unknown"):
        clone = CloneGroupOffsetRequestHeader(
            src_group="readers", dest_group="others", topic=topic, offline=True
        )
        yield RequestCode.CLONE_GROUP_OFFSET, clone, b""
        compared = QueryCorrectionOffsetHeader(topic=topic, compare_group="others")
        yield RequestCode.QUERY_CORRECTION_OFFSET, compared, b""
        span = GroupAndTopicRequestHeader(group="others", topic=topic)
        yield RequestCode.QUERY_CONSUME_TIME_SPAN, span, b""
        for readable in (None, False, None, True):
            forbidden = GroupForbiddenRequestHeader(group="others", topic=topic, readable=readable)
            if topic == "orders" or readable is None:
                yield RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, forbidden, b""
    offsets = GetSubscriptionGroupConfigRequestHeader(group="others")
    yield RequestCode.QUERY_TOPICS_BY_CONSUMER, offsets, b""
    for fields in ({}, {"count": 0}, {"consumer_group": "readers"}):
        header: dict[str, Any] = {
            "topic": "orders",
            "queue_id": 0,
            "index": 0,
            "count": 9,
            **fields,
        }
        yield RequestCode.QUERY_CONSUME_QUEUE, QueryConsumeQueueRequestHeader(**header), b""
    info = GetConsumerRunningInfoRequestHeader(consumer_group="readers", client_id="nobody")
    yield RequestCode.GET_CONSUMER_RUNNING_INFO, info, b""


def seen(answer: RemotingCommand) -> tuple[int, Any, Any, Any]:
    """Return what tools read: code, fields, the remark of a refusal, and the body."""
    body = parse(answer.body) if answer.body else None
    if isinstance(body, dict):
        body.pop("brokerAddr", None)
        for span in body.get("consumeTimeSpanSet", []):
            for name in [name for name in span if "Time" in name and span[name] != -1]:
                span[name] = type(span[name]).__name__
        if "groupList" in body:  # RocketMQ 5.3.3 lists the topic's own name among the groups
            body["groupList"] = sorted(set(body["groupList"]) - {"orders", "unknown"})
        if "offsetTable" in body:  # RocketMQ's versions are of its own
            body.pop("dataVersion", None)
            body.pop("groupTopicMap", None)
        if "consumeStatsList" in body:  # RocketMQ has built-in groups of features that we lack
            body["consumeStatsList"] = [one for one in body["consumeStatsList"] if "readers" in one]
    header = {name: value for name, value in fields_of(answer).items() if name not in LEFT_OUT}
    return answer.code, header, answer.remark if answer.code else None, body


def fields_of(answer: RemotingCommand) -> dict[str, str]:
    """Return the ext fields of an answer."""
    assert answer.header is None or isinstance(answer.header, dict)
    return answer.header or {}


def answers(address: str) -> list[tuple[int, Any, Any, Any]]:
    """Run the script at one broker."""
    with Wire(address) as wire:
        return [seen(wire.ask(code, header, body)) for code, header, body in script()]


def test_administration_is_answered_as_by_rocketmq(tmp_path: Path) -> None:
    """Code, fields, remark and body, request by request."""
    with rocketmq_broker(
        tmp_path / "theirs",
        tmp_path / "home",
        timerWheelEnable="true",  # to delete topics
    ) as broker:
        theirs = answers(broker.address)
    with broker_process(tmp_path / "ours") as ours_broker:
        ours = answers(ours_broker.address)

    asked = [(code.name, str(header), body) for code, header, body in script()]
    differences = [
        (request, their, our)
        for request, their, our in zip(asked, theirs, ours, strict=True)
        if their != our
    ]
    assert not differences, "\n".join(map(str, differences))
