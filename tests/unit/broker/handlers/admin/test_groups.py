"""Groups are created, changed, deleted and looked at as RocketMQ's tools do it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halfmq.remoting.admin_bodies import decode_entry, decode_group_list
from halfmq.remoting.admin_headers import (
    DeleteSubscriptionGroupRequestHeader,
    GetConsumeStatsRequestHeader,
    GetSubscriptionGroupConfigRequestHeader,
    GroupAndTopicRequestHeader,
    GroupForbiddenRequestHeader,
    ProducerGroupRequestHeader,
    TopicRequestHeader,
)
from halfmq.remoting.bodies import (
    ConsumerData,
    HeartbeatData,
    decode_consume_stats,
    decode_topic_list,
    encode_heartbeat,
    subscription_data,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.fastjson import parse
from halfmq.remoting.headers import ConsumerGroupRequestHeader, UpdateConsumerOffsetRequestHeader
from tests.support.broker_doubles import START_MS
from tests.support.peers import Peer
from tests.support.race_windows import Rig, windowed

ENTRY: dict[str, Any] = {
    "attributes": {},
    "brokerId": 0,
    "consumeBroadcastEnable": False,
    "consumeEnable": True,
    "consumeFromMinEnable": False,
    "consumeMessageOrderly": False,
    "consumeTimeoutMinute": 15,
    "groupName": "readers",
    "groupRetryPolicy": {"type": "CUSTOMIZED"},
    "groupSysFlag": 0,
    "notifyConsumerIdsChangedEnable": True,
    "retryMaxTimes": 3,
    "retryQueueNums": 2,
    "whichBrokerWhenConsumeSlowly": 1,
}
"""What mqadmin's updateSubGroup sends."""


async def create(peer: Peer, **fields: Any) -> RemotingCommand:
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    return await peer.call(code, None, json.dumps({**ENTRY, **fields}).encode())


async def delete(peer: Peer, name: str = "readers", **fields: Any) -> RemotingCommand:
    header = DeleteSubscriptionGroupRequestHeader(group_name=name, **fields)
    return await peer.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)


async def consume(peer: Peer, topic: str = "orders") -> None:
    """Become a consumer of the group."""
    consumer = ConsumerData(
        group_name="readers", subscription_data_set=(subscription_data(topic, "TagA", None, 7),)
    )
    data = HeartbeatData(client_id=peer.client_id, consumer_data_set=(consumer,))
    assert (await peer.call(RequestCode.HEART_BEAT, None, encode_heartbeat(data))).code == 0


async def commit(peer: Peer, offset: int, queue_id: int = 0) -> None:
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group="readers", topic="orders", queue_id=queue_id, commit_offset=offset
    )
    assert (await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)).code == 0


async def asked(peer: Peer, code: int, header: Header | None = None) -> dict[str, Any]:
    """Return the body of an answer, which is strict JSON."""
    answer = await peer.call(code, header)
    assert answer.code == 0, answer.remark
    found: dict[str, Any] = json.loads(answer.body)
    return found


def on_disk(rig: Rig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((rig.root / "config" / "subscriptionGroup.json").read_text())
    return found


@windowed()
async def test_a_group_is_on_disk_when_it_is_answered(rig: Rig) -> None:
    """With everything that RocketMQ keeps of it, interpreted or not."""
    peer = await rig.peer()
    policy = {"exponentialRetryPolicy": {"initial": 5}, "type": "EXPONENTIAL"}
    assert (await create(peer, groupRetryPolicy=policy, junk="not kept")).code == 0

    expected = {**ENTRY, "groupRetryPolicy": policy}
    assert on_disk(rig)["subscriptionGroupTable"]["readers"] == expected
    header = GetSubscriptionGroupConfigRequestHeader(group="readers")
    assert await asked(peer, RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, header) == expected
    await rig.kill()
    again = await rig.peer()
    assert await asked(again, RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, header) == expected
    answer = await again.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, None)
    assert parse(answer.body)["subscriptionGroupTable"] == on_disk(rig)["subscriptionGroupTable"]


@windowed()
async def test_a_change_is_in_force_at_once(rig: Rig) -> None:
    """A group that must not consume gets no message from the next pull on."""
    peer = await rig.peer()
    await create(peer)
    assert rig.tables.groups.admit("readers") is True
    await create(peer, consumeEnable=False, retryMaxTimes=9)
    assert rig.tables.groups.admit("readers") is False
    changed = rig.tables.groups.get("readers")
    assert changed is not None
    assert changed.retry_max_times == 9


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"groupName": "a b"}, 29, "The specified group contains illegal characters"),
        ({"groupName": None}, 29, "a group has no groupName"),
        ({"attributes": {"+x": "1"}}, 1, "unsupported key: x"),
        ({"retryQueueNums": 1025}, 29, "has 1025 retry queues, the limit is 1024"),
        ({"groupRetryPolicy": {"next": [1] * 9_000}}, 29, "the limit is 16384"),
    ],
)
@windowed()
async def test_an_invalid_group_is_refused(
    rig: Rig, fields: dict[str, Any], code: int, remark: str
) -> None:
    """The remark says what is wrong, and nothing is changed."""
    answer = await create(await rig.peer(), **fields)

    assert answer.code == code
    assert remark in (answer.remark or "")
    assert "readers" not in rig.tables.groups


@windowed()
async def test_several_groups_are_created_together(rig: Rig) -> None:
    """As updateSubGroupList does it."""
    peer = await rig.peer()
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST
    entries = [{**ENTRY, "groupName": name} for name in ("a", "b")]
    answer = await peer.call(code, None, json.dumps({"groupConfigList": entries}).encode())

    assert answer.code == 0
    assert {"a", "b"} <= on_disk(rig)["subscriptionGroupTable"].keys()
    many = json.dumps({"groupConfigList": [{"groupName": "x"}] * 1001}).encode()
    assert "the limit is 1000" in ((await peer.call(code, None, many)).remark or "")


@pytest.mark.parametrize("clean_offset", [False, True])
@windowed()
async def test_a_deleted_group_keeps_its_offsets_unless_they_are_removed(
    rig: Rig, clean_offset: bool
) -> None:
    """RocketMQ's tools ask for one or the other."""
    peer = await rig.peer()
    await create(peer)
    await peer.plain("K1")
    await commit(peer, 1)
    assert (await delete(peer, clean_offset=clean_offset)).code == 0

    assert "readers" not in on_disk(rig)["subscriptionGroupTable"]
    left = rig.tables.offsets.query("readers", "orders", 0)
    assert left == (-1 if clean_offset else 1)
    if clean_offset:
        await rig.kill()
        assert rig.tables.offsets.query("readers", "orders", 0) == -1
    assert (await delete(await rig.peer(), "unknown")).code == 0
    refused = await delete(await rig.peer(), "CID_RMQ_SYS_TRANS")
    assert refused.code == ResponseCode.INVALID_PARAMETER


@windowed()
async def test_a_change_is_not_made_if_it_cannot_be_saved(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator gets the reason, and the groups are as they were."""
    peer = await rig.peer()
    await create(peer)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("halfmq.broker.tables.table_file.save_table", fail)
        refused = [
            await create(peer, retryMaxTimes=9),
            await create(peer, groupName="others"),
            await delete(peer),
        ]

    for answer in refused:
        assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert answer.remark == "subscriptionGroup.json cannot be written: No space left on device"
    known = rig.tables.groups.get("readers")
    assert known is not None
    assert known.retry_max_times == 3
    assert "others" not in rig.tables.groups


@windowed()
async def test_a_query_creates_an_unknown_group(rig: Rig) -> None:
    """As in RocketMQ, if groups are created automatically and the name is valid."""
    peer = await rig.peer()
    code = RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG
    answer = await peer.call(code, GetSubscriptionGroupConfigRequestHeader(group="new"))
    assert decode_entry(answer.body)["groupName"] == "new"
    bad = await peer.call(code, GetSubscriptionGroupConfigRequestHeader(group="a b"))
    assert bad.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert bad.remark == "No group in this broker"


@windowed()
async def test_connected_members_are_shown(rig: Rig) -> None:
    """Who they are, in which language and version, and what they subscribe to."""
    producer, consumer = await rig.peer("writers"), await rig.peer(member=False)
    await consume(consumer)

    header = ConsumerGroupRequestHeader(consumer_group="readers")
    found = await asked(producer, RequestCode.GET_CONSUMER_CONNECTION_LIST, header)
    assert found["connectionSet"] == [
        {
            "clientAddr": consumer.name,
            "clientId": consumer.client_id,
            "language": "PYTHON",
            "version": 479,
        }
    ]
    kinds = ("consumeFromWhere", "consumeType", "messageModel")
    assert [found[kind] for kind in kinds] == [
        "CONSUME_FROM_LAST_OFFSET",
        "CONSUME_PASSIVELY",
        "CLUSTERING",
    ]
    assert found["subscriptionTable"]["orders"]["subString"] == "TagA"
    producers = ProducerGroupRequestHeader(producer_group="writers")
    found = await asked(consumer, RequestCode.GET_PRODUCER_CONNECTION_LIST, producers)
    assert [one["clientId"] for one in found["connectionSet"]] == [producer.client_id]
    await rig.wait(5_000, 5_000)
    found = await asked(consumer, RequestCode.GET_ALL_PRODUCER_INFO)
    (one,) = found["data"]["writers"]
    assert START_MS <= one["lastUpdateTimestamp"] <= START_MS + 5_000
    assert one["remoteIP"] == f"/{producer.name}"

    nobody = ConsumerGroupRequestHeader(consumer_group="nobody")
    answer = await consumer.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, nobody)
    assert answer.code == ResponseCode.CONSUMER_NOT_ONLINE
    assert answer.remark == "the consumer group[nobody] not online"
    no_producers = ProducerGroupRequestHeader(producer_group="nobody")
    answer = await consumer.call(RequestCode.GET_PRODUCER_CONNECTION_LIST, no_producers)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == "the producer group[nobody] not exist"


@windowed()
async def test_the_groups_of_a_topic_subscribe_to_it_or_have_offsets(rig: Rig) -> None:
    """Connected or not; likewise the topics of a group."""
    peer, consumer = await rig.peer(), await rig.peer(member=False)
    await create(peer)
    await peer.plain("K1")
    await consume(consumer, "bills")
    await commit(peer, 1)

    async def groups(topic: str) -> list[str]:
        header = TopicRequestHeader(topic=topic)
        answer = await peer.call(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, header)
        return decode_group_list(answer.body)

    assert [await groups(topic) for topic in ("orders", "bills", "order")] == [
        ["readers"],
        ["readers"],
        [],
    ]
    header = GetSubscriptionGroupConfigRequestHeader(group="readers")
    answer = await peer.call(RequestCode.QUERY_TOPICS_BY_CONSUMER, header)
    assert decode_topic_list(answer.body) == ["orders"]
    code = RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER
    bills = GroupAndTopicRequestHeader(group="readers", topic="bills")
    assert (await asked(peer, code, bills))["subscriptionData"]["subString"] == "TagA"
    orders = GroupAndTopicRequestHeader(group="readers", topic="orders")
    assert await asked(peer, code, orders) == {"group": "readers", "topic": "orders"}


@windowed()
async def test_the_progress_of_a_group_is_shown_by_queue(rig: Rig) -> None:
    """The offsets of the log and of the group, in all its topics or in the requested ones."""
    peer = await rig.peer()
    await create(peer)
    for number in range(3):
        await peer.plain(f"K{number}")
    await peer.plain("B0", topic="bills")
    await commit(peer, 2)

    async def progress(**fields: Any) -> dict[tuple[str, int], tuple[int, int, int]]:
        header = GetConsumeStatsRequestHeader(consumer_group="readers", **fields)
        answer = await peer.call(RequestCode.GET_CONSUME_STATS, header)
        return {
            (queue.topic, queue.queue_id): (at.broker_offset, at.consumer_offset, at.last_timestamp)
            for queue, at in decode_consume_stats(answer.body).items()
        }

    orders = {
        ("orders", 0): (3, 2, START_MS),
        **{("orders", queue_id): (0, 0, 0) for queue_id in range(1, 4)},
    }
    assert await progress() == orders
    assert await progress(topic="orders") == orders
    bills = await progress(topic_list="bills;unknown;")
    assert bills[("bills", 0)] == (1, 0, 0)
    assert len(bills) == 4
    await consume(await rig.peer(member=False), "bills")
    assert await progress() == {}


async def forbid(
    peer: Peer, readable: bool | None, topic: str = "orders", group: str = "readers"
) -> RemotingCommand:
    header = GroupForbiddenRequestHeader(group=group, topic=topic, readable=readable)
    return await peer.call(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, header)


@windowed()
async def test_a_group_can_be_forbidden_to_consume_a_topic(rig: Rig) -> None:
    """The file has RocketMQ's format and keeps what else is forbidden there."""
    peer = await rig.peer()
    await create(peer)
    for topic in ("orders", "bills"):
        await peer.plain("K", topic=topic)
        answer = await forbid(peer, False, topic)
        assert json.loads(answer.body) == {"group": "readers", "readable": False, "topic": topic}
    assert on_disk(rig)["forbiddenTable"] == {"readers": {"orders": 4, "bills": 4}}
    await rig.kill()
    peer = await rig.peer()
    assert not rig.tables.groups.may_read("readers", "orders")
    assert json.loads((await forbid(peer, None)).body)["readable"] is False

    assert json.loads((await forbid(peer, True)).body)["readable"] is True
    assert on_disk(rig)["forbiddenTable"] == {"readers": {"bills": 4}}  # RocketMQ clears both
    assert rig.tables.groups.may_read("readers", "orders")
    await forbid(peer, True, "bills")
    assert on_disk(rig)["forbiddenTable"] == {}


@windowed()
async def test_only_existing_groups_and_topics_can_be_forbidden(rig: Rig) -> None:
    """Unknown names would stay in the file for ever; queries about them are harmless."""
    peer = await rig.peer()
    await create(peer)
    await peer.plain("K")
    assert (await forbid(peer, False, group="none")).code == 26
    assert (await forbid(peer, False, "none")).code == 17
    assert json.loads((await forbid(peer, None, "none", "none")).body)["readable"] is True


@windowed()
async def test_what_cannot_be_saved_is_not_forbidden(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator gets the reason, and consumers continue."""
    peer = await rig.peer()
    await create(peer)
    await peer.plain("K")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("halfmq.broker.tables.table_file.save_table", fail)
        assert (await forbid(peer, False)).code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert rig.tables.groups.may_read("readers", "orders")
