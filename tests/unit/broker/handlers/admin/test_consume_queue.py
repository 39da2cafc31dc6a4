"""Operators look into a consume queue."""

from __future__ import annotations

from typing import Any

import pytest

from halfmq.broker.handlers.admin import topics
from halfmq.remoting.admin_headers import QueryConsumeQueueRequestHeader
from halfmq.remoting.bodies import tag_code
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.fastjson import parse
from tests.support.peers import Peer
from tests.support.race_windows import Rig, windowed


async def query(peer: Peer, **fields: Any) -> RemotingCommand:
    header: dict[str, Any] = {"topic": "orders", "queue_id": 0, "index": 0, "count": 10, **fields}
    return await peer.call(
        RequestCode.QUERY_CONSUME_QUEUE, QueryConsumeQueueRequestHeader(**header)
    )


async def filled(rig: Rig) -> Peer:
    peer = await rig.peer()
    for number in range(3):
        await peer.plain(f"K{number}", TAGS="paid")
    return peer


@windowed()
async def test_entries_are_shown_as_they_are_stored(rig: Rig) -> None:
    """Where each record is, how large, and the hash of its tag."""
    peer = await filled(rig)
    answer = await query(peer, index=1, count=1)
    body = parse(answer.body)
    record = rig.records_of("orders")[1]

    assert (answer.code, answer.remark) == (0, None)
    assert body == {
        "maxQueueIndex": 3,
        "minQueueIndex": 0,
        "queueData": [
            {
                "eval": False,
                "physicOffset": record.physical_offset,
                "physicSize": record.total_size,
                "tagsCode": tag_code("paid"),
            }
        ],
    }
    assert len(parse((await query(peer)).body)["queueData"]) == 3
    assert parse((await query(peer, count=-1)).body)["queueData"] == []


@windowed()
async def test_one_answer_has_a_limited_number_of_entries(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await filled(rig)
    monkeypatch.setattr(topics, "ENTRIES_MAX", 2)
    answer = await query(peer, count=2**31 - 1)
    assert len(parse(answer.body)["queueData"]) == 2


@windowed()
async def test_the_subscription_of_a_group_is_shown(rig: Rig) -> None:
    peer = await filled(rig)
    nobody = parse((await query(peer, consumer_group="readers")).body)
    assert nobody["filterData"] == "readers@orders is not online!"
    assert "subscriptionData" not in nobody

    member = await rig.peer("readers", member=False)
    await member.consume("orders")
    online = parse((await query(peer, consumer_group="readers")).body)
    assert online["filterData"] == "null"
    assert online["subscriptionData"]["subString"] == "*"


@pytest.mark.parametrize("index", [-1, 3, 2**62])
@windowed()
async def test_outside_of_the_queue_its_ends_are_shown(rig: Rig, index: int) -> None:
    """RocketMQ answers without a body, on which mqadmin fails."""
    peer = await filled(rig)
    answer = await query(peer, index=index)
    assert (answer.code, answer.remark) == (0, f"Index {index} of 0@orders is not exist!")
    assert parse(answer.body) == {"maxQueueIndex": 3, "minQueueIndex": 0}


@windowed()
async def test_a_queue_that_does_not_exist_is_refused(rig: Rig) -> None:
    answer = await query(await rig.peer(), topic="none")
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "0@none is not exist!")
