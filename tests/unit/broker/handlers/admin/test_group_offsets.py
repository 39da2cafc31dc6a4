"""Operators see where groups are, and send them to other messages, connected or not."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace

from halfmq.broker.config_file import with_value
from halfmq.broker.net.connection import ClientConnection
from halfmq.remoting.admin_headers import (
    CloneGroupOffsetRequestHeader,
    GroupAndTopicRequestHeader,
    QueryCorrectionOffsetHeader,
    ResetOffsetRequestHeader,
)
from halfmq.remoting.bodies import QueueKey, decode_offset_table
from halfmq.remoting.codes import INT64_MAX, LanguageCode, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import texts_of
from halfmq.remoting.fastjson import parse
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import (
    PullMessageRequestHeader,
    PullMessageResponseHeader,
    UpdateConsumerOffsetRequestHeader,
)
from tests.support.broker_doubles import START_MS
from tests.support.peers import Peer
from tests.support.race_windows import Rig, windowed
from tests.support.usual_headers import pull_header

CODE = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET


async def reset(peer: Peer, **fields: Any) -> RemotingCommand:
    header: dict[str, Any] = {
        "topic": "orders",
        "group": "readers",
        "timestamp": -1,
        "is_force": True,
        **fields,
    }
    return await peer.call(CODE, ResetOffsetRequestHeader(**header))


async def filled(rig: Rig) -> Peer:
    """A group, and a topic with three messages, of which it has two."""
    peer = await rig.peer()
    for number in range(3):
        await peer.plain(f"K{number}")
    rig.tables.groups.ensure("readers")
    await commit(peer, 2)
    return peer


async def commit(peer: Peer, offset: int) -> RemotingCommand:
    return await commit_of(peer, "readers", offset)


async def commit_of(peer: Peer, group: str, offset: int) -> RemotingCommand:
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group=group, topic="orders", queue_id=0, commit_offset=offset
    )
    return await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)


def pulling(offset: int, *, wait: bool = False) -> PullMessageRequestHeader:
    return pull_header(
        consumer_group="readers",
        queue_offset=offset,
        sys_flag=0x1 | 0x4 | 0x2 * wait,  # commits, and says what it wants
        commit_offset=offset,
        suspend_timeout_millis=15_000 * wait,
    )


async def pull(peer: Peer, offset: int) -> tuple[int, int, str | None]:
    """Pull with a commit of the offset; return code, next offset and remark."""
    return pulled(await peer.call(RequestCode.PULL_MESSAGE, pulling(offset)))


def pulled(answer: RemotingCommand) -> tuple[int, int, str | None]:
    following = response_header(answer, PullMessageResponseHeader).next_begin_offset
    return answer.code, following, answer.remark


def kept(rig: Rig) -> int:
    return rig.tables.offsets.query("readers", "orders", 0)


@pytest.mark.parametrize(
    ("fields", "offsets"),
    [
        ({}, {0: 3, 1: 0, 2: 0, 3: 0}),
        ({"timestamp": 0}, {0: 0, 1: 0, 2: 0, 3: 0}),
        ({"timestamp": START_MS + 1}, {0: 3, 1: 0, 2: 0, 3: 0}),
        ({"queue_id": 0, "offset": 1}, {0: 1}),
        ({"queue_id": 0, "offset": -1, "timestamp": 0}, {0: 0}),
    ],
)
@windowed()
async def test_a_reset_is_on_disk_when_it_is_answered(
    rig: Rig, fields: dict[str, Any], offsets: dict[int, int]
) -> None:
    """By time, to the end, or to an offset of one queue; the answer has the new offsets."""
    peer = await filled(rig)
    answer = await reset(peer, **fields)

    assert answer.code == 0, answer.remark
    table = decode_offset_table(answer.body)
    assert {queue.queue_id: offset for queue, offset in table.items()} == offsets
    assert {(queue.topic, queue.broker_name) for queue in table} == {("orders", "broker-a")}
    await rig.kill()
    assert kept(rig) == offsets[0]


@windowed()
async def test_a_connected_consumer_continues_there_at_its_next_pull(rig: Rig) -> None:
    """Its earlier commits are ignored."""
    peer = await filled(rig)
    await reset(peer, timestamp=0)

    ignored = await commit(peer, 3)
    assert (ignored.code, ignored.remark) == (0, "Offset has been previously reset")
    assert kept(rig) == 0
    assert await pull(peer, 3) == (ResponseCode.PULL_OFFSET_MOVED, 0, "OFFSET_RESET")
    assert kept(rig) == 0
    assert await pull(peer, 0) == (0, 3, "FOUND")
    assert (await commit(peer, 1)).remark is None
    assert kept(rig) == 1


@windowed()
async def test_a_held_pull_is_answered_after_a_reset(rig: Rig) -> None:
    """Otherwise it would wait for 15 s. Pulls of other groups stay held."""
    peer, other = await filled(rig), await rig.peer()
    waiting = peer.send(RequestCode.PULL_MESSAGE, pulling(3, wait=True))
    elsewhere = replace(pulling(3, wait=True), consumer_group="others")
    left = other.send(RequestCode.PULL_MESSAGE, elsewhere)
    await other.sync()
    await reset(peer, timestamp=0)

    assert pulled(await peer.answer(waiting)) == (ResponseCode.PULL_OFFSET_MOVED, 0, "OFFSET_RESET")
    assert rig.elapsed_ms < 1_000
    assert not other.answered(left)


@pytest.mark.parametrize(
    ("fields", "abandoned"),
    [
        ({"timestamp": 0}, (ResponseCode.PULL_OFFSET_MOVED, 0, "OFFSET_RESET")),
        ({}, (ResponseCode.PULL_RETRY_IMMEDIATELY, 3, "OFFSET_RESET")),
    ],
)
@windowed()
async def test_a_reset_is_kept_until_a_consumer_pulls_from_there(
    rig: Rig, fields: dict[str, Any], abandoned: tuple[int, int, str]
) -> None:
    """The pull of the queue's earlier owner is still held, and its answer reaches nobody."""
    earlier, owner = await filled(rig), await rig.peer()
    held = earlier.send(RequestCode.PULL_MESSAGE, pulling(3, wait=True))
    await earlier.sync()
    await reset(owner, **fields)

    assert pulled(await earlier.answer(held)) == abandoned
    target = abandoned[1]
    assert (await commit(owner, 2)).remark == "Offset has been previously reset"
    for _ in range(2):  # its first answer may be lost with a connection
        moved = ResponseCode.PULL_OFFSET_MOVED, target, "OFFSET_RESET"
        assert await pull(owner, 2) == moved
    await pull(owner, target)
    assert (await commit(owner, 2)).remark is None
    assert kept(rig) == 2


@pytest.mark.parametrize("how", ["kill", "restart"])
@windowed()
async def test_a_reset_outlives_the_broker(rig: Rig, how: str) -> None:
    """Until a consumer has pulled from there; after that it is over for good."""
    await reset(await filled(rig), timestamp=0)
    for _ in range(2):  # the second life has read it, and writes it again
        await (rig.kill() if how == "kill" else rig.restart())
        ignored = await commit(await rig.peer(), 3)
        assert ignored.remark == "Offset has been previously reset"
    peer = await rig.peer()
    assert await pull(peer, 3) == (ResponseCode.PULL_OFFSET_MOVED, 0, "OFFSET_RESET")
    await pull(peer, 0)
    await commit(peer, 1)
    await rig.restart()

    assert kept(rig) == 1
    assert (await commit(await rig.peer(), 2)).remark is None


@windowed()
async def test_a_consumer_that_is_there_already_is_not_sent_there(rig: Rig) -> None:
    """An official one would give the queue up, and take it again with its next rebalance."""
    peer = await filled(rig)
    await reset(peer, queue_id=0, offset=1)

    assert await pull(peer, 1) == (0, 3, "FOUND")
    assert (await commit(peer, 2)).remark is None


@windowed()
async def test_a_consumer_that_gives_the_queue_up_is_told_to_rebalance(rig: Rig) -> None:
    """As clients before 5.0 do; they commit the new offset then, and wait up to 20 s."""
    peer = await filled(rig)
    await reset(peer, timestamp=0)
    await pull(peer, 3)
    await commit(peer, 0)
    told = await peer.asked_for(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED)
    assert texts_of(told.header) == {"consumerGroup": "readers"}

    await pull(peer, 0)
    await commit(peer, 0)
    await peer.sync()
    assert peer.requests == []


async def told(rig: Rig, name: str, language: LanguageCode) -> Peer:
    """A consumer of the group, of a client in this language."""
    peer = await rig.peer("readers", member=False, name=name)
    await peer.consume("orders")
    connection_of(rig, peer).language = language
    return peer


def connection_of(rig: Rig, peer: Peer) -> ClientConnection:
    """The broker's end of a connection."""
    (connection,) = [one for one in rig.connections if one.name == peer.name]
    return connection


@pytest.mark.parametrize(
    ("fields", "offset"),
    [
        ({"timestamp": 0, "is_force": False}, 0),
        ({"timestamp": -1, "is_force": False}, 2),  # it would skip the third
        ({"timestamp": -1}, 3),
        ({"offset": 1}, 1),
    ],
)
@windowed()
async def test_connected_consumers_are_told_where_to_go_if_the_broker_shall_not_reset(
    rig: Rig, fields: dict[str, Any], offset: int
) -> None:
    """Each in the form that its client reads; the broker keeps what they have committed."""
    operator = await filled(rig)
    rig.broker.configure(with_value(rig.broker.config, "useServerSideResetOffset", "false"))
    java = await told(rig, "java", LanguageCode.JAVA)
    cpp = await told(rig, "cpp", LanguageCode.CPP)
    answer = await reset(operator, queue_id=0, **fields)

    assert answer.code == 0, answer.remark
    queue = QueueKey(broker_name="broker-a", queue_id=0, topic="orders")
    assert decode_offset_table(answer.body) == {queue: offset}
    for peer, begin in ((java, b'{"offsetTable":{{'), (cpp, b'{"offsetTable":[{')):
        request = await peer.asked_for(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
        assert request.is_one_way
        assert request.body.startswith(begin)
        assert decode_offset_table(request.body) == {queue: offset}
        assert (texts_of(request.header) or {}).items() >= {
            ("topic", "orders"),
            ("group", "readers"),
        }
    assert kept(rig) == 2
    assert (await commit(operator, 3)).remark is None


@windowed()
async def test_consumers_that_cannot_be_told_where_to_go_are_named(rig: Rig) -> None:
    """With the codes and words of RocketMQ 5.3.3, on which mqadmin resets another way."""
    peer = await filled(rig)
    rig.broker.configure(with_value(rig.broker.config, "useServerSideResetOffset", "false"))

    async def refused(**fields: Any) -> tuple[int, str | None]:
        answer = await reset(peer, **fields)
        return answer.code, answer.remark

    absent = "Consumer not online, so can not reset offset, Group: readers Topic: orders Timestamp:"
    assert await refused(queue_id=0) == (206, f"{absent} -1")
    assert await refused() == (206, f"{absent} -1")  # for one queue of four
    assert await refused(queue_id=1) == (1, "THe consumer group <readers> not exist")
    missing = "[reset-offset] reset offset failed, no topic in this broker. topic=none"
    assert await refused(topic="none") == (17, missing)
    connection_of(rig, await told(rig, "old", LanguageCode.JAVA)).version = 27
    old = "the client does not support this feature. version=27"
    assert await refused(queue_id=0) == (1, old)


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"topic": "none"}, 17, "Topic none does not exist"),
        ({"group": "none"}, 26, "Group none does not exist"),
        ({"queue_id": 0, "offset": 4}, 1, "Target offset 4 not in consume queue range [0-3]"),
        ({"group": "CID_RMQ_SYS_TRANS"}, 16, "the offsets of group[CID_RMQ_SYS_TRANS] are"),
    ],
)
@windowed()
async def test_what_cannot_be_reset_is_refused(
    rig: Rig, fields: dict[str, Any], code: int, remark: str
) -> None:
    """With the codes of RocketMQ 5.3.3, and the group stays where it is."""
    peer = await filled(rig)
    answer = await reset(peer, **fields)

    assert answer.code == code
    assert (answer.remark or "").startswith(remark)
    assert kept(rig) == 2


@windowed()
async def test_a_reset_is_forgotten_with_its_group(rig: Rig) -> None:
    """A group of the same name is not sent anywhere."""
    peer = await filled(rig)
    await reset(peer, timestamp=0)
    for _ in rig.tables.offsets.forget(group="readers"):
        pass

    assert (await pull(peer, 3))[0] == ResponseCode.PULL_NOT_FOUND
    assert kept(rig) == 3


async def clone(peer: Peer, **fields: Any) -> RemotingCommand:
    header: dict[str, Any] = {"src_group": "readers", "dest_group": "others", **fields}
    return await peer.call(RequestCode.CLONE_GROUP_OFFSET, CloneGroupOffsetRequestHeader(**header))


def offsets_of_others(rig: Rig) -> dict[str, int]:
    offsets = rig.tables.offsets
    return {topic: offsets.query("others", topic, 0) for topic in ("orders", "bills")}


async def two_topics(rig: Rig) -> Peer:
    """A group with offsets in two topics, and another one without."""
    peer = await filled(rig)
    await peer.plain("K", topic="bills")
    rig.tables.groups.ensure("others")
    rig.tables.offsets.commit("readers", "bills", 0, 1)
    rig.tables.offsets.commit("readers", "deleted", 0, 1)
    return peer


@pytest.mark.parametrize(
    ("fields", "offsets"),
    [
        ({}, {"orders": 2, "bills": 1}),
        ({"topic": " "}, {"orders": 2, "bills": 1}),
        ({"topic": "orders"}, {"orders": 2, "bills": -1}),
        ({"topic": "none"}, {"orders": -1, "bills": -1}),
        ({"src_group": "nobody"}, {"orders": -1, "bills": -1}),
    ],
)
@windowed()
async def test_a_group_gets_the_offsets_of_another(
    rig: Rig, fields: dict[str, Any], offsets: dict[str, int]
) -> None:
    """In one topic or all that exist; they are on disk when it is answered."""
    peer = await two_topics(rig)
    answer = await clone(peer, **fields)

    assert answer.code == 0, answer.remark
    await rig.kill()
    assert offsets_of_others(rig) == offsets


@pytest.mark.parametrize("offline", [False, True])
@windowed()
async def test_of_a_connected_group_only_its_topics_are_cloned(rig: Rig, offline: bool) -> None:
    """Offsets in a topic that it does not consume any more are old."""
    peer = await two_topics(rig)
    member = await rig.peer("readers", member=False)
    await member.consume("orders")
    await clone(peer, offline=offline)

    assert offsets_of_others(rig) == {"orders": 2, "bills": 1 if offline else -1}


@windowed()
async def test_a_clone_takes_the_place_of_a_reset(rig: Rig) -> None:
    """The operator's last word counts."""
    peer = await two_topics(rig)
    await reset(peer, group="others", timestamp=0)
    await clone(peer)

    assert offsets_of_others(rig)["orders"] == 2
    await commit_of(peer, "others", 3)
    assert offsets_of_others(rig)["orders"] == 3


@windowed()
async def test_a_group_that_does_not_exist_gets_no_offsets(rig: Rig) -> None:
    """RocketMQ would keep offsets that no list of groups shows."""
    peer = await two_topics(rig)
    answer = await clone(peer, dest_group="none")
    assert (answer.code, answer.remark) == (26, "Group none does not exist")


@windowed()
async def test_the_lowest_offset_of_all_groups_is_found(rig: Rig) -> None:
    """Without groups that are left out, and none where the compared group is lower itself."""
    peer = await two_topics(rig)
    for group, offset in (("slow", 1), ("others", 3)):
        rig.tables.offsets.commit(group, "orders", 0, offset)

    async def lowest(compared: str, left_out: str | None = None) -> dict[str, int]:
        header = QueryCorrectionOffsetHeader(
            topic="orders", compare_group=compared, filter_groups=left_out
        )
        answer = await peer.call(RequestCode.QUERY_CORRECTION_OFFSET, header)
        found: dict[str, int] = parse(answer.body)["correctionOffsets"]
        return found

    assert await lowest("others") == {"0": 1}
    assert await lowest("none", "slow,nobody") == {"0": 2}
    assert await lowest("slow", "slow") == {"0": INT64_MAX}
    assert await lowest("slow") == {"0": 1}
    assert rig.tables.offsets.query("slow", "orders", 0) == 1  # RocketMQ would delete it


@windowed()
async def test_times_tell_how_late_a_group_is(rig: Rig) -> None:
    """From the first to the last message, and the one that the group has had last."""
    peer = await rig.peer()
    rig.tables.groups.ensure("readers")
    for number in range(3):
        await peer.plain(f"K{number}")
        await rig.wait(1_000)
    await commit(peer, 2)
    header = GroupAndTopicRequestHeader(group="readers", topic="orders")
    answer = await peer.call(RequestCode.QUERY_CONSUME_TIME_SPAN, header)
    spans = parse(answer.body)["consumeTimeSpanSet"]

    assert [span["messageQueue"]["queueId"] for span in spans] == [0, 1, 2, 3]
    assert spans[0] | {"messageQueue": 0, "delayTime": 0} == {
        "consumeTimeStamp": START_MS + 1_000,
        "consumeTimeStampStr": local_time(START_MS + 1_000),
        "delayTime": 0,
        "maxTimeStamp": START_MS + 2_000,
        "maxTimeStampStr": local_time(START_MS + 2_000),
        "messageQueue": 0,
        "minTimeStamp": START_MS,
        "minTimeStampStr": local_time(START_MS),
    }
    assert 1_000 <= spans[0]["delayTime"] < 2_000
    assert spans[1]["delayTime"] == 0  # nothing waits there
    assert spans[1]["minTimeStamp"] == spans[1]["maxTimeStamp"] == -1

    unknown = GroupAndTopicRequestHeader(group="readers", topic="none")
    refused = await peer.call(RequestCode.QUERY_CONSUME_TIME_SPAN, unknown)
    assert (refused.code, refused.remark) == (17, "topic[none] not exist")


def local_time(time_ms: int) -> str:
    """As RocketMQ prints it."""
    seconds, milliseconds = divmod(time_ms, 1_000)
    return f"{time.strftime('%Y-%m-%d#%H:%M:%S', time.localtime(seconds))}:{milliseconds:03d}"
