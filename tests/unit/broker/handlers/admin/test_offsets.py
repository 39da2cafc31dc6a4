"""Operators send groups to other messages, whether a consumer is connected or not."""

from __future__ import annotations

from typing import Any

import pytest

from halfmq.broker.access.requirements import REQUIREMENTS
from halfmq.broker.handlers.admin.offsets import OffsetResetHandlers
from halfmq.remoting.admin_headers import ResetOffsetRequestHeader
from halfmq.remoting.bodies import decode_offset_table
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import (
    PullMessageRequestHeader,
    PullMessageResponseHeader,
    UpdateConsumerOffsetRequestHeader,
    response_header,
)
from tests.support.peers import START_MS, Peer
from tests.support.race_windows import Rig, windowed

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
    rig.broker._tables.groups.ensure("readers")
    await commit(peer, 2)
    return peer


async def commit(peer: Peer, offset: int) -> RemotingCommand:
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group="readers", topic="orders", queue_id=0, commit_offset=offset
    )
    return await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)


async def pull(peer: Peer, offset: int) -> tuple[int, int, str | None]:
    """Pull with a commit of the offset; return code, next offset and remark."""
    header = PullMessageRequestHeader(
        consumer_group="readers",
        topic="orders",
        queue_id=0,
        queue_offset=offset,
        max_msg_nums=32,
        sys_flag=0x1 | 0x4,  # commits, and says what it wants
        commit_offset=offset,
        suspend_timeout_millis=0,
        subscription="*",
        sub_version=0,
    )
    answer = await peer.call(RequestCode.PULL_MESSAGE, header)
    following = response_header(answer, PullMessageResponseHeader).next_begin_offset
    return answer.code, following, answer.remark


def kept(rig: Rig) -> int:
    return rig.broker._tables.offsets.query("readers", "orders", 0)


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
async def test_offsets_are_set_and_on_disk_when_it_is_answered(
    rig: Rig, fields: dict[str, Any], offsets: dict[int, int]
) -> None:
    """By time, to the end, or to an offset of one queue; the answer says where."""
    peer = await filled(rig)
    answer = await reset(peer, **fields)

    assert answer.code == 0, answer.remark
    table = decode_offset_table(answer.body)
    assert {queue.queue_id: offset for queue, offset in table.items()} == offsets
    assert {(queue.topic, queue.broker_name) for queue in table} == {("orders", "broker-a")}
    await rig.kill()
    assert kept(rig) == offsets[0]


@windowed()
async def test_a_connected_consumer_goes_there_at_its_next_pull(rig: Rig) -> None:
    """What it commits before that is of where it was, and does not count."""
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


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"topic": "none"}, 17, "Topic none does not exist"),
        ({"group": "none"}, 26, "Group none does not exist"),
        ({"queue_id": 0, "offset": 5}, 1, "Target offset 5 not in consume queue range [0-3]"),
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
    for _ in rig.broker._tables.offsets.forget(group="readers"):
        pass

    assert (await pull(peer, 3))[0] == ResponseCode.PULL_NOT_FOUND
    assert kept(rig) == 3


def test_every_request_has_an_access_rule() -> None:
    """A code without a rule would be open to everybody, or to nobody."""
    handlers = OffsetResetHandlers.handlers(OffsetResetHandlers.__new__(OffsetResetHandlers))
    assert handlers.keys() <= REQUIREMENTS.keys()
