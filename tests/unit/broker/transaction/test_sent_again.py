"""A committed message, or a copy of it, that is sent again with all its properties."""

from __future__ import annotations

from typing import Any

import pytest

from halfmq.client import MessageView
from halfmq.store.format.record import Record
from tests.support.peers import COMMIT, Peer
from tests.support.race_windows import Rig, windowed

DEAD = "%DLQ%billing"


async def _committed(rig: Rig, producer: Peer) -> Record:
    half = await producer.prepare("T1", TAGS="paid")
    assert (await producer.end(half, COMMIT)).code == 0
    await rig.settle()
    return rig.consumed()[0]


def _all_properties(record: Record) -> dict[str, Any]:
    return {**record.property_map}


@pytest.mark.parametrize("group", ["pg", "tool"])
@windowed()
async def test_a_dead_letter_that_is_sent_again_is_an_ordinary_message(
    rig: Rig, group: str
) -> None:
    """It arrives once more, whoever sends it, and is no part of a transaction."""
    producer, sender = await rig.peer(), await rig.peer(group)
    final = await _committed(rig, producer)
    assert (await producer.send_back(final.physical_offset, "billing", -1)).code == 0
    await rig.settle()
    (dead,) = rig.consumed(DEAD)
    assert "TRAN_MSG" not in dead.property_map
    assert MessageView(dead, "broker-a").transaction_id == "T1"

    answer = await sender.plain("", dead.body, **_all_properties(dead))
    await rig.settle()

    assert answer.code == 0, answer.remark
    assert [(one.body, one.property_map["TAGS"]) for one in rig.consumed()] == [
        (final.body, "paid"),
    ] * 2
    assert rig.metrics["pending"] == 0
    assert rig.metrics["prepares_repeated"] == 0


@pytest.mark.parametrize("sys_flag", [0, 4])  # Java's library sets the bit for TRAN_MSG
@windowed()
async def test_a_committed_message_that_a_tool_sends_again_is_an_ordinary_message(
    rig: Rig, sys_flag: int
) -> None:
    """Nobody would decide it: the tool has not prepared anything."""
    producer, tool = await rig.peer(), await rig.peer("tool")
    final = await _committed(rig, producer)
    answer = await tool.plain("", final.body, sys_flag=sys_flag, **_all_properties(final))
    await rig.settle()

    assert answer.code == 0, answer.remark
    again = rig.consumed()[1]
    assert (again.body, again.sys_flag) == (final.body, 0)
    assert "TRAN_MSG" not in again.property_map
    assert MessageView(again, "broker-a").half_message_id is None
    assert rig.metrics["pending"] == 0


@windowed()
async def test_a_committed_message_that_its_producer_prepares_again_is_a_new_half(
    rig: Rig,
) -> None:
    """It looks like a message that is forwarded in a transaction, so nobody sees it yet."""
    producer = await rig.peer()
    final = await _committed(rig, producer)
    half = await producer.prepare("", final.body, **final.property_map)
    repeated = await producer.prepare("", final.body, **final.property_map)

    assert rig.metrics["pending"] == 1
    assert half.offset == repeated.offset > final.physical_offset
    assert len(rig.consumed()) == 1
    assert (await producer.end(half, COMMIT)).code == 0
    await rig.settle()
    assert len(rig.consumed()) == 2
