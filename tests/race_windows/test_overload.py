"""Overload: prepares are refused before decisions, which RocketMQ drops when it is busy."""

from __future__ import annotations

import pytest

from halfmq.broker.limits.kept import UNFLUSHED_BYTES
from halfmq.broker.net import reply_release
from halfmq.remoting.codes import RequestCode, ResponseCode
from tests.support.peers import COMMIT, until
from tests.support.race_windows import Rig, windowed

BODY = b"x" * 50_000


@windowed()
async def test_w06_under_overload_prepares_are_refused_and_decisions_taken(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one connection, after the messages that reached the limit: no decision is lost."""
    monkeypatch.setattr(reply_release, "UNFLUSHED_BYTES", UNFLUSHED_BYTES._replace(most=200_000))
    monkeypatch.setattr(reply_release, "UNFLUSHED_DECISIONS_MAX", 2_000_000)
    producer = await rig.peer()
    halves = [await producer.prepare(f"K{number}", BODY) for number in range(6)]
    rig.disk.held = True
    late = [
        producer.send(RequestCode.SEND_MESSAGE_V2, *producer.half_request(f"L{number}", BODY))
        for number in range(20)
    ]
    for half in halves:
        producer.end_one_way(half, COMMIT)
    waiting = rig.release
    await until(waiting.over_limit)
    assert rig.metrics["committed"] == 0  # what is not read cannot be served
    rig.loop.now_ms += int(reply_release.STALLED_S_MAX * 1_000)
    await until(lambda: rig.metrics["committed"] == len(halves))
    await producer.sync()

    answered = [opaque for opaque in late if producer.answered(opaque)]
    assert answered, "refusals need not wait for the disk"
    for opaque in answered:
        answer = await producer.answer(opaque)
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert "wait for the disk" in (answer.remark or "")

    rig.disk.held = False
    await rig.settle()
    assert sorted(rig.bodies()) == [BODY] * len(halves)
    assert (await producer.prepare("after", BODY)).offset > 0


@windowed(pending_max=2)
async def test_w06_a_full_table_refuses_prepares_and_not_decisions(rig: Rig) -> None:
    """The refusal names the limit and the remedy, and a decision makes room."""
    producer = await rig.peer()
    first = await producer.prepare("K1")
    await producer.prepare("K2")
    header, body = producer.half_request("K3")
    refused = await producer.call(RequestCode.SEND_MESSAGE_V2, header, body)
    again = await producer.prepare("K1")

    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert "transactionPendingMax=2" in (refused.remark or "")
    assert again == first  # what is stored already needs no room

    assert (await producer.end(first, COMMIT)).code == ResponseCode.SUCCESS
    await producer.prepare("K3")
