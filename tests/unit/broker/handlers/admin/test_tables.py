"""Other brokers and exports read whole tables of offsets."""

from __future__ import annotations

from typing import Any

import pytest

from halfmq.broker.handlers.admin import tables as module
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.fastjson import parse
from tests.support.peers import Peer
from tests.support.race_windows import Rig, windowed


async def table(peer: Peer, code: RequestCode) -> dict[str, Any]:
    answer = await peer.call(code, None)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    found: dict[str, Any] = parse(answer.body)
    return found


@windowed()
async def test_all_offsets_are_answered(rig: Rig) -> None:
    """As in consumerOffset.json, also many of them."""
    offsets = rig.tables.offsets
    for number in range(300):
        offsets.commit(f"group-{number}", "orders", number % 4, number)
    found = await table(await rig.peer(), RequestCode.GET_ALL_CONSUMER_OFFSET)

    assert len(found["offsetTable"]) == 300
    assert found["offsetTable"]["orders@group-7"] == {"3": 7}
    assert found["dataVersion"] == offsets.data_version


@windowed()
async def test_a_broker_without_offsets_has_an_empty_table(rig: Rig) -> None:
    """RocketMQ's tools read an empty table without an error."""
    found = await table(await rig.peer(), RequestCode.GET_ALL_CONSUMER_OFFSET)

    assert found["offsetTable"] == {}


@windowed()
async def test_a_table_that_no_client_takes_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the remark says where it can be read."""
    monkeypatch.setattr(module, "ANSWER_BYTES_MAX", 10)
    rig.tables.offsets.commit("group", "orders", 0, 1)
    answer = await (await rig.peer()).call(RequestCode.GET_ALL_CONSUMER_OFFSET, None)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "config/consumerOffset.json" in (answer.remark or "")


@windowed()
async def test_positions_of_delay_levels_are_answered(rig: Rig) -> None:
    """Of the levels in use: how many of their messages were delivered."""
    peer = await rig.peer()
    await peer.plain("K", DELAY="1")
    await rig.wait(2_000)
    await rig.settle()
    found = await table(peer, RequestCode.GET_ALL_DELAY_OFFSET)

    assert found["offsetTable"] == {"1": 1}
    assert found["dataVersion"].keys() == {"counter", "stateVersion", "timestamp"}


@windowed()
async def test_cleaning_is_confirmed(rig: Rig) -> None:
    """At once; what is deleted, the tests of retention show."""
    peer = await rig.peer()
    for code in (RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, RequestCode.CLEAN_UNUSED_TOPIC):
        assert (await peer.call(code, None)).code == ResponseCode.SUCCESS
