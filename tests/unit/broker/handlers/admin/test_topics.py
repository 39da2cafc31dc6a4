"""Topics are created, changed, deleted and listed as RocketMQ's tools do it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from halfmq.remoting.admin_bodies import decode_entry, decode_topic_table
from halfmq.remoting.admin_headers import (
    CreateTopicRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    GetTopicsByClusterRequestHeader,
    TopicRequestHeader,
)
from halfmq.remoting.bodies import decode_topic_list, decode_topic_stats
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import (
    GetRouteInfoRequestHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    QueueRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from tests.support.broker_doubles import ext
from tests.support.peers import Peer
from tests.support.race_windows import Rig, windowed
from tests.support.usual_headers import pull_header


async def create(peer: Peer, name: str = "orders", **fields: Any) -> RemotingCommand:
    """Send what mqadmin's updateTopic sends."""
    header: dict[str, Any] = {
        "topic": name,
        "default_topic": "TBW102",
        "read_queue_nums": 4,
        "write_queue_nums": 4,
        "perm": 6,
        "topic_filter_type": "SINGLE_TAG",
        **fields,
    }
    code = RequestCode.UPDATE_AND_CREATE_TOPIC
    return await peer.call(code, CreateTopicRequestHeader(**header))


async def delete(peer: Peer, name: str = "orders") -> RemotingCommand:
    """Send what mqadmin's deleteTopic sends to a broker."""
    return await peer.call(RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequestHeader(topic=name))


async def topic(peer: Peer, name: str = "orders") -> dict[str, Any]:
    """Return a topic as it is."""
    answer = await peer.call(RequestCode.GET_TOPIC_CONFIG, TopicRequestHeader(topic=name))
    assert answer.code == 0, answer.remark
    return dict(decode_entry(answer.body))


def on_disk(rig: Rig) -> dict[str, Any]:
    """The content of topics.json."""
    found: dict[str, Any] = json.loads((rig.root / "config" / "topics.json").read_text())
    return found


async def bounds(peer: Peer, name: str = "orders") -> dict[int, tuple[int, int]]:
    """Return begin and end of each queue, as topicStatus shows them."""
    answer = await peer.call(RequestCode.GET_TOPIC_STATS_INFO, TopicRequestHeader(topic=name))
    stats = decode_topic_stats(answer.body)
    return {one.queue_id: (at.min_offset, at.max_offset) for one, at in stats.items()}


@windowed()
async def test_a_topic_is_on_disk_and_has_a_route_when_it_is_answered(rig: Rig) -> None:
    """An operator may send to it at once, and a kill does not take it back."""
    peer = await rig.peer()
    answer = await create(peer, read_queue_nums=8, attributes="+message.type=FIFO", order=True)

    assert answer.code == 0, answer.remark
    expected = {
        "attributes": {"message.type": "FIFO"},
        "order": True,
        "perm": 6,
        "readQueueNums": 8,
        "topicFilterType": "SINGLE_TAG",
        "topicName": "orders",
        "topicSysFlag": 0,
        "writeQueueNums": 4,
    }
    assert on_disk(rig)["topicConfigTable"]["orders"] == expected
    assert await topic(peer) == expected
    route = GetRouteInfoRequestHeader(topic="orders")
    assert (await peer.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, route)).code == 0
    await rig.kill()
    assert await topic(await rig.peer()) == expected


@windowed()
async def test_an_update_replaces_settings_and_keeps_attributes(rig: Rig) -> None:
    """As RocketMQ does it: attributes that the request does not name stay."""
    peer = await rig.peer()
    await create(peer, attributes="+message.type=FIFO,+reserve.time=5")
    counter = on_disk(rig)["dataVersion"]["counter"]
    await create(peer, perm=4, write_queue_nums=2, attributes="+message.type=NORMAL,-reserve.time")

    changed = await topic(peer)
    assert (changed["perm"], changed["readQueueNums"], changed["writeQueueNums"]) == (4, 4, 2)
    assert changed["attributes"] == {"message.type": "NORMAL"}
    assert on_disk(rig)["dataVersion"]["counter"] == counter + 1
    # What changes nothing is no change.
    await create(peer, perm=4, write_queue_nums=2)
    assert on_disk(rig)["dataVersion"]["counter"] == counter + 1


@pytest.mark.parametrize(
    ("name", "fields", "code", "remark"),
    [
        ("a b", {}, 29, "The specified topic contains illegal characters"),
        ("x" * 128, {}, 29, "The specified topic is longer than topic max length 127."),
        ("TBW102", {}, 29, "The topic[TBW102] is conflict with system topic."),
        ("DefaultCluster", {}, 29, "The topic[DefaultCluster] is conflict with system topic."),
        ("rmq_sys_x", {}, 29, "The topic[rmq_sys_x] is conflict with system topic."),
        ("orders", {"read_queue_nums": 1025}, 29, "has 1025 queues, the limit is 1024"),
        ("orders", {"write_queue_nums": -1}, 29, "has -1 queues"),
        ("orders", {"perm": 8}, 29, "has perm 8, expected 0 to 7"),
        ("orders", {"topic_filter_type": "X"}, 1, "topicFilterType = [X] value invalid"),
        ("orders", {"attributes": "+nope=1"}, 1, "unsupported key: nope"),
        ("orders", {"attributes": "+message.type=X"}, 1, "value is not in set: ["),
        ("orders", {"attributes": "+message.type=MIXED"}, 29, "MIXED message type is not"),
        ("orders", {"attributes": "+queue.type=BatchCQ"}, 29, "BatchCQ queue.type is not"),
        ("orders", {"attributes": "+reserve.time=x"}, 1, "value is not in range(-1, "),
        ("orders", {"attributes": "-message.type"}, 1, "only add attribute is supported"),
        ("orders", {"attributes": "message.type=FIFO"}, 1, "add/alter attribute format is wrong"),
        ("orders", {"attributes": "+a=1,+a=2"}, 1, "alter duplication key. key: a"),
    ],
)
@windowed()
async def test_what_is_no_topic_is_refused(
    rig: Rig, name: str, fields: dict[str, Any], code: int, remark: str
) -> None:
    """With the codes of RocketMQ 5.3.3, and nothing is changed."""
    peer = await rig.peer()
    answer = await create(peer, name, **fields)

    assert answer.code == code
    assert remark in (answer.remark or "")
    assert "orders" not in rig.tables.topics


@windowed()
async def test_an_attribute_that_cannot_change_is_refused(rig: Rig) -> None:
    """The files of a topic depend on its queue type."""
    peer = await rig.peer()
    await create(peer, attributes="+queue.type=SimpleCQ")
    again = await create(peer, attributes="+queue.type=SimpleCQ")
    absent = await create(peer, attributes="-message.type")

    assert again.remark == "attempt to update an unchangeable attribute. key: queue.type"
    assert absent.remark == "attempt to delete a nonexistent key: message.type"


@windowed()
async def test_several_topics_are_created_together(rig: Rig) -> None:
    """As updateTopicList does it; one that cannot be is named."""
    peer = await rig.peer()
    entries = [
        {"topicName": name, "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}
        for name in ("a", "b")
    ]
    body = json.dumps({"topicConfigList": entries}).encode()
    code = RequestCode.UPDATE_AND_CREATE_TOPIC_LIST
    assert (await peer.call(code, None, body)).code == 0
    assert (await topic(peer, "b"))["readQueueNums"] == 2

    bad = json.dumps({"topicConfigList": [{"topicName": "TBW102"}]}).encode()
    assert (await peer.call(code, None, bad)).code == ResponseCode.INVALID_PARAMETER
    many = json.dumps({"topicConfigList": [{"topicName": "x"}] * 1001}).encode()
    assert "the limit is 1000" in ((await peer.call(code, None, many)).remark or "")


@windowed()
async def test_a_deleted_topic_is_gone_with_its_offsets(rig: Rig) -> None:
    """Nobody sends to it, and a group does not go on where it was in another topic."""
    peer = await rig.peer()
    await create(peer)
    for number in range(3):
        await peer.plain(f"K{number}")
    rig.tables.groups.ensure("readers")
    commit = UpdateConsumerOffsetRequestHeader(
        consumer_group="readers", topic="orders", queue_id=0, commit_offset=2
    )
    await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)

    assert (await delete(peer)).code == 0
    namesrv = DeleteTopicFromNamesrvRequestHeader(topic="orders", cluster_name="DefaultCluster")
    assert (await peer.call(RequestCode.DELETE_TOPIC_IN_NAMESRV, namesrv)).code == 0
    route = GetRouteInfoRequestHeader(topic="orders")
    gone = await peer.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, route)
    assert gone.code == ResponseCode.TOPIC_NOT_EXIST
    assert "orders" not in on_disk(rig)["topicConfigTable"]
    offsets = json.loads((rig.root / "config" / "consumerOffset.json").read_text())
    assert offsets["offsetTable"] == {}
    question = QueryConsumerOffsetRequestHeader(
        consumer_group="readers", topic="orders", queue_id=0
    )
    answer = await peer.call(RequestCode.QUERY_CONSUMER_OFFSET, question)
    assert answer.code == ResponseCode.QUERY_NOT_FOUND
    for code in (RequestCode.GET_TOPIC_CONFIG, RequestCode.GET_TOPIC_STATS_INFO):
        unknown = await peer.call(code, TopicRequestHeader(topic="orders"))
        assert unknown.code == ResponseCode.TOPIC_NOT_EXIST


def without_queues(root: Path) -> None:
    """Let the next start rebuild all queues from the log."""
    shutil.rmtree(root / "consumequeue")


async def end(rig: Rig, how: str) -> Peer:
    """Stop or kill the broker, and return a peer of the next one."""
    if how == "stop":
        await rig.restart()
    else:
        await rig.kill(tamper=without_queues if how == "lost queues" else lambda _root: None)
    return await rig.peer()


async def committed(peer: Peer, group: str) -> RemotingCommand:
    """Ask for the offset of a group in queue 0."""
    question = QueryConsumerOffsetRequestHeader(consumer_group=group, topic="orders", queue_id=0)
    return await peer.call(RequestCode.QUERY_CONSUMER_OFFSET, question)


@pytest.mark.parametrize("after", ["kill", "stop", "lost queues"])
@pytest.mark.parametrize("before", ["", "kill", "stop", "lost queues"])
@windowed()
async def test_a_topic_of_the_same_name_begins_at_0(rig: Rig, before: str, after: str) -> None:
    """As in RocketMQ: empty, and its first message is the first of old and new groups.

    That holds after starts that rebuild the queues from the log, which still has the old messages.
    """
    peer = await rig.peer()
    await create(peer, read_queue_nums=1, write_queue_nums=1)
    for number in range(3):
        await peer.plain(f"K{number}")
    rig.tables.groups.ensure("old")
    rig.tables.offsets.commit("old", "orders", 0, 3)
    assert (await delete(peer)).code == 0
    assert rig.bodies() == []
    if before:
        peer = await end(rig, before)
    await create(peer, read_queue_nums=1, write_queue_nums=1)
    assert await bounds(peer) == {0: (0, 0)}

    await peer.plain("K3", b"new")
    for group in ("old", "new"):
        answer = await committed(peer, group)
        assert (answer.code, ext(answer)) == (0, {"offset": "0"})

    if not before:  # and a consumer of the old topic runs on
        running = pull_header(consumer_group="old", queue_offset=1)
        told = await peer.call(RequestCode.PULL_MESSAGE, running)
        assert (told.code, ext(told)["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "0")

    peer = await end(rig, after)
    assert await bounds(peer) == {0: (0, 1)}
    await peer.plain("K4", b"newer")
    assert rig.bodies() == [b"new", b"newer"]
    assert await bounds(peer) == {0: (0, 2)}
    first = QueueRequestHeader(topic="orders", queue_id=0)
    answer = await peer.call(RequestCode.GET_MIN_OFFSET, first)
    assert response_header(answer, OffsetResponseHeader).offset == 0


@windowed()
async def test_a_kill_during_a_deletion_leaves_no_offset_of_a_group(rig: Rig) -> None:
    """Otherwise the group would skip the first messages of a new topic of that name."""
    peer = await rig.peer()
    await create(peer, read_queue_nums=1, write_queue_nums=1)
    await peer.plain("K0")
    rig.tables.groups.ensure("old")
    rig.tables.offsets.commit("old", "orders", 0, 1)
    await rig.tables.offsets.save_now()
    await rig.tables.topics.delete("orders", rig.store.write_offset)

    peer = await end(rig, "kill")
    await create(peer, read_queue_nums=1, write_queue_nums=1)
    await peer.plain("K1", b"new")
    assert ext(await committed(peer, "old")) == {"offset": "0"}
    assert rig.bodies() == [b"new"]


@windowed()
async def test_a_topic_is_created_again_after_its_deletion(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while files of its queues are left: its messages would go among the old ones."""
    peer = await rig.peer()
    await create(peer, read_queue_nums=1, write_queue_nums=1)
    await peer.plain("K0", b"old")

    def fail(_directories: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("halfmq.store.queue.deleted_topics._remove_files", fail)
        answer = await delete(peer)
        assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert "is deleted, but not its queue files" in (answer.remark or "")
    refused = await create(peer, read_queue_nums=1, write_queue_nums=1)
    assert (refused.code, "is being deleted" in (refused.remark or "")) == (2, True)

    assert (await delete(peer)).code == 0
    assert (await create(peer, read_queue_nums=1, write_queue_nums=1)).code == 0
    await peer.plain("K1", b"new")
    assert await bounds(peer) == {0: (0, 1)}


@windowed()
async def test_a_power_cut_after_a_deletion_takes_no_message_of_the_new_topic(rig: Rig) -> None:
    """The log may end before the place that the deletion names; what follows is not deleted."""
    peer = await rig.peer()
    await create(peer, read_queue_nums=1, write_queue_nums=1)
    await peer.plain("K0", b"x" * 2_000)
    await rig.tables.topics.delete("orders", rig.store.write_offset)

    await rig.kill(tamper=lambda _root: rig.cut_log(0))
    peer = await rig.peer()
    await create(peer, read_queue_nums=1, write_queue_nums=1)
    await peer.plain("K1", b"new")
    await end(rig, "lost queues")
    assert rig.bodies() == [b"new"]


@windowed()
async def test_a_deletion_is_not_made_if_it_cannot_be_saved(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator gets the reason, and the topic is as it was."""
    peer = await rig.peer()
    await create(peer)
    await peer.plain("K1", b"kept")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("halfmq.broker.tables.table_file.save_table", fail)
        refused = [await delete(peer), await create(peer, "bills"), await create(peer, perm=4)]

    for answer in refused:
        assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert answer.remark == "topics.json cannot be written: No space left on device"
    assert (await topic(peer))["perm"] == 6
    assert "bills" not in rig.tables.topics
    assert rig.bodies() == [b"kept"]


@windowed()
async def test_system_topics_are_not_deleted(rig: Rig) -> None:
    """A broker without its half topic would lose transactions."""
    peer = await rig.peer()

    refused = await delete(peer, "RMQ_SYS_TRANS_HALF_TOPIC")
    assert refused.code == ResponseCode.INVALID_PARAMETER
    remark = "The topic[RMQ_SYS_TRANS_HALF_TOPIC] is conflict with system topic."
    assert refused.remark == remark
    assert (await delete(peer, " ")).remark == "The specified topic is blank."
    assert (await delete(peer, "unknown")).code == 0


@windowed()
async def test_topics_are_listed(rig: Rig) -> None:
    """The lists of the name server and of the broker, and the whole table."""
    peer = await rig.peer()
    await create(peer, "plain")
    await create(peer, "unit", topic_sys_flag=1)
    await create(peer, "sub", topic_sys_flag=2)
    await create(peer, "both", topic_sys_flag=3)

    async def names(code: int, header: Any = None) -> set[str]:
        answer = await peer.call(code, header)
        assert answer.code == 0
        return set(decode_topic_list(answer.body))

    ours = GetTopicsByClusterRequestHeader(cluster="DefaultCluster")
    other = GetTopicsByClusterRequestHeader(cluster="elsewhere")
    everything = await names(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    assert await names(RequestCode.GET_TOPICS_BY_CLUSTER, ours) == everything
    assert await names(RequestCode.GET_TOPICS_BY_CLUSTER, other) == set()
    assert await names(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS) == {"DefaultCluster", "broker-a"}
    system = await names(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    assert {"TBW102", "SCHEDULE_TOPIC_XXXX", "broker-a"} <= system
    assert not system & {"plain", "unit", "sub", "both"}
    assert await names(RequestCode.GET_UNIT_TOPIC_LIST) == {"unit", "both"}
    assert await names(RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST) == {"sub", "both"}
    assert await names(RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST) == {"sub"}

    answer = await peer.call(RequestCode.GET_ALL_TOPIC_CONFIG, None)
    table = decode_topic_table(answer.body)
    assert set(table) == everything
    assert table == on_disk(rig)["topicConfigTable"]
    assert json.loads(answer.body)["dataVersion"] == on_disk(rig)["dataVersion"]


@windowed()
async def test_a_large_table_is_answered_in_slices(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request about thousands of topics does not keep the others waiting."""
    peer = await rig.peer()
    for number in range(5):
        await create(peer, f"t{number}")
    turns: list[object] = []

    class Over:
        is_over = True

        def __init__(self) -> None:
            turns.append(self)

    monkeypatch.setattr("halfmq.broker.limits.long_answers.Slice", Over)
    answer = await peer.call(RequestCode.GET_ALL_TOPIC_CONFIG, None)
    topics = {one.name for one in rig.tables.topics}
    assert set(decode_topic_table(answer.body)) == topics
    assert len(turns) == len(topics)
