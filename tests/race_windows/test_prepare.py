"""Race windows before a transaction exists: properties of a prepare, and repeated prepares."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.store.format.topics import HALF_TOPIC
from tests.support.peers import COMMIT, ROLLBACK
from tests.support.race_windows import HOUR_MS, TIMEOUT_MS, Rig, windowed


@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
@windowed()
async def test_w17_a_delayed_half_is_refused(rig: Rig, name: str) -> None:
    """RocketMQ would put the half into its timer and lose it; here nothing is stored."""
    producer = await rig.peer()
    delay: dict[str, Any] = {name: "3"}
    header, body = producer.half_request("K1", **delay)
    answer = await producer.call(RequestCode.SEND_MESSAGE_V2, header, body)

    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert "TRANSACTION_DELAY_MS" in (answer.remark or "")  # what is offered instead
    assert rig.store.write_offset == 0


@windowed()
async def test_w17_a_delay_counts_from_the_commit(rig: Rig) -> None:
    """The half gets checks as usual; the final message is delivered later."""
    producer = await rig.peer()
    half = await producer.prepare("K1", TRANSACTION_DELAY_MS="60000")
    await rig.wait(TIMEOUT_MS + 100)
    await producer.answer_check(producer.checks[0], COMMIT)
    await rig.wait(59_000)
    assert rig.bodies() == []
    await rig.kill()

    await rig.wait(2_000)

    assert rig.bodies() == [b"row 1"]
    producer = await rig.peer()
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    await rig.wait(HOUR_MS)
    assert rig.bodies() == [b"row 1"]
    assert producer.checks == []


@windowed()
async def test_w17_transaction_bits_without_the_property_are_refused(rig: Rig) -> None:
    """RocketMQ answers SUCCESS and stores the message where no consumer reads."""
    producer = await rig.peer()
    header, body = producer.half_request("K1", TRAN_MSG="false")
    answer = await producer.call(RequestCode.SEND_MESSAGE_V2, header, body)

    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert rig.store.write_offset == 0


# --- repeated prepares


@pytest.mark.parametrize("decision", [None, COMMIT])
@pytest.mark.parametrize("killed", [False, True])
@windowed()
async def test_w19_a_prepare_sent_again_is_the_same_transaction(
    rig: Rig, decision: int | None, *, killed: bool
) -> None:
    """It gets the ids of the first half, also after a kill; nothing is stored."""
    producer = await rig.peer()
    first = await producer.prepare("K1")
    if decision is not None:
        await producer.end(first, decision)
    if killed:
        await rig.kill()
        producer = await rig.peer()

    again = await producer.prepare("K1")
    await rig.wait(TIMEOUT_MS + 100)

    assert again == first
    assert len(rig.records_of(HALF_TOPIC)) == 1
    assert producer.asked == ([] if decision else [first.offset])
    assert (await producer.end(again, COMMIT)).code == ResponseCode.SUCCESS
    assert rig.bodies() == [b"row 1"]


@windowed()
async def test_w19_duplicates_in_one_burst_are_one_transaction(rig: Rig) -> None:
    """All attempts in one read of the socket: one half, equal answers."""
    producer = await rig.peer()
    await producer.prepare("K0", b"so that the topic exists")
    header, body = producer.half_request("K1")
    frames = [producer.frame(RequestCode.SEND_MESSAGE_V2, header, body) for _ in range(3)]
    producer.write(b"".join(frame for _, frame in frames))
    halves = {producer.half_of(await producer.answer(opaque)) for opaque, _ in frames}

    assert len(halves) == 1
    assert len(rig.records_of(HALF_TOPIC)) == 2


@windowed()
async def test_w19_a_duplicate_is_answered_when_the_first_is_on_disk(rig: Rig) -> None:
    """Both answers promise the same."""
    producer = await rig.peer()
    await producer.prepare("K0", b"so that the topic exists")
    rig.disk.held = True
    header, body = producer.half_request("K1")
    first = producer.send(RequestCode.SEND_MESSAGE_V2, header, body)
    await producer.sync()
    second = producer.send(RequestCode.SEND_MESSAGE_V2, header, body)
    await producer.sync()
    assert not producer.answered(first)
    assert not producer.answered(second)

    rig.disk.held = False
    await rig.settle()

    assert producer.half_of(await producer.answer(second)) == producer.half_of(
        await producer.answer(first)
    )


@windowed()
async def test_w19_only_the_same_group_and_key_make_a_duplicate(rig: Rig) -> None:
    """Another group's message with that key, or a retry after a rollback, is a new one."""
    producer, other = await rig.peer(), await rig.peer("other")
    first, foreign = await producer.prepare("K1"), await other.prepare("K1", b"foreign")
    await producer.end(first, ROLLBACK)
    second = await producer.prepare("K1", b"second try")

    assert len({first.offset, foreign.offset, second.offset}) == 3
    assert (await producer.end(second, COMMIT)).code == ResponseCode.SUCCESS
    assert (await other.end(foreign, COMMIT)).code == ResponseCode.SUCCESS
    assert sorted(rig.bodies()) == [b"foreign", b"second try"]


# --- topics that change meanwhile


def _shrink(root: Path) -> None:
    """Reduce the topic to one queue, as an operator's command does."""
    path = root / "config" / "topics.json"
    table = json.loads(path.read_text())
    table["topicConfigTable"]["orders"] |= {"readQueueNums": 1, "writeQueueNums": 1}
    path.write_text(json.dumps(table))


def _delete(root: Path) -> None:
    path = root / "config" / "topics.json"
    table = json.loads(path.read_text())
    del table["topicConfigTable"]["orders"]
    path.write_text(json.dumps(table))


@pytest.mark.parametrize("change", [_shrink, _delete], ids=["shrunk", "deleted"])
@windowed()
async def test_w27_a_commit_goes_to_a_queue_that_consumers_read(
    rig: Rig, change: Callable[[Path], None]
) -> None:
    """Also if the topic lost queues, or was deleted, between prepare and commit."""
    producer = await rig.peer()
    half = await producer.prepare("K1", queue_id=3)
    await rig.stop()
    change(rig.root)
    await rig.start()
    producer = await rig.peer()

    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS

    topic = rig.tables.topics.get("orders")
    assert topic is not None
    (final,) = rig.consumed()
    assert final.queue_id < topic.read_queue_nums
