"""Messages delivered some time after their commit, with crashes and clock steps in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.store.format.topics import TIMER_TOPIC
from tests.support.broker_doubles import START_MS
from tests.support.peers import COMMIT, Peer
from tests.support.race_windows import DAY_MS, HOUR_MS, Rig, windowed


async def _send(peer: Peer, body: bytes, level: int) -> None:
    """Send a plain message with a delay level."""
    header, _ = peer.half_request(body.decode(), sys_flag=0)
    properties = f"UNIQ_KEY\x01{body.decode()}\x02DELAY\x01{level}\x02"
    plain = replace(header, properties=properties)
    assert (await peer.call(RequestCode.SEND_MESSAGE_V2, plain, body)).code == 0


async def _arrivals(rig: Rig, milliseconds: int) -> dict[bytes, int]:
    """Let time pass; return after how many milliseconds each message could be consumed."""
    arrived: dict[bytes, int] = {}
    for elapsed in range(50, milliseconds + 50, 50):
        await rig.wait(50)
        for body in rig.bodies():
            arrived.setdefault(body, elapsed)
    return arrived


@pytest.mark.parametrize("kill_after_ms", [0, 900, 1_050, 3_000, 6_100, 7_050, 7_600])
@windowed()
async def test_w01_a_delayed_commit_survives_a_kill_and_is_delivered_once(
    rig: Rig, kill_after_ms: int
) -> None:
    """While it waits, and after its delivery but before that is saved."""
    producer = await rig.peer()
    half = await producer.prepare("K1", TRANSACTION_DELAY_MS="7000")
    began_ms = rig.elapsed_ms
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    await rig.wait(kill_after_ms, step_ms=50)
    await rig.kill()

    await rig.wait(began_ms + 6_950 - rig.elapsed_ms, step_ms=50)
    early = rig.bodies() if rig.elapsed_ms < began_ms + 7_000 else []
    await rig.wait(1_200, step_ms=50)

    assert early == []
    assert rig.bodies() == [b"row 1"]
    producer = await rig.peer()
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    await rig.kill()
    await rig.wait(HOUR_MS)
    assert rig.bodies() == [b"row 1"]
    assert [record.topic for record in rig.finals_of(half)] == [TIMER_TOPIC]


async def _shrink(rig: Rig) -> None:
    known = rig.tables.topics.get("orders")
    assert known is not None
    await rig.tables.topics.change(
        dataclasses.replace(known, read_queue_nums=1, write_queue_nums=1)
    )


async def _delete(rig: Rig) -> None:
    for name in ("orders", "%RETRY%billing"):
        await rig.tables.topics.delete(name, 0)
        rig.tables.topics.end_deletion(name)


@pytest.mark.parametrize("change", [_shrink, _delete], ids=["shrunk", "deleted"])
@windowed()
async def test_w27_a_delayed_message_goes_to_a_queue_that_consumers_read(
    rig: Rig, change: Callable[[Rig], Awaitable[None]]
) -> None:
    """Also if the topic lost queues, or was deleted, while it waited."""
    producer = await rig.peer()
    await producer.plain("K0", b"retried", queue_id=3)
    (record,) = rig.consumed()
    assert (await producer.send_back(record.physical_offset, "billing", 1)).code == 0
    await producer.plain("K1", b"plain", queue_id=3, DELAY="1")
    half = await producer.prepare("K2", b"committed", queue_id=3, TRANSACTION_DELAY_MS="1000")
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    await change(rig)
    await rig.wait(3_000)

    for name, bodies in ("orders", {b"plain", b"committed"}), ("%RETRY%billing", {b"retried"}):
        topic = rig.tables.topics.get(name)
        assert topic is not None
        readable = [one for one in rig.consumed(name) if one.queue_id < topic.read_queue_nums]
        assert {one.body for one in readable} >= bodies


@pytest.mark.parametrize("step_ms", [-10 * DAY_MS, -900, 900, 10 * DAY_MS])
@windowed()
async def test_w30_a_step_of_the_brokers_clock_moves_no_delay(rig: Rig, step_ms: int) -> None:
    """A delay counts from the send or the commit."""
    producer = await rig.peer()
    await _send(producer, b"before", 3)  # ten seconds
    half = await producer.prepare("K1", b"committed", TRANSACTION_DELAY_MS="12000")
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    await rig.wait(1_000, step_ms=50)
    rig.clock_ahead_ms = step_ms
    await _send(producer, b"after", 3)

    arrived = await _arrivals(rig, 13_000)

    assert sorted(rig.bodies()) == [b"after", b"before", b"committed"]
    assert 9_000 <= arrived[b"before"] <= 9_100
    assert 10_000 <= arrived[b"after"] <= 10_100
    assert 11_000 <= arrived[b"committed"] <= 12_100
    assert len(rig.records_of(TIMER_TOPIC)) == 1


@pytest.mark.parametrize("ahead_ms", [0, -10 * DAY_MS])
@pytest.mark.parametrize("killed", [False, True])
@windowed()
async def test_w30_a_clock_set_back_makes_no_delay_longer_than_a_restart(
    rig: Rig, killed: bool, ahead_ms: int
) -> None:
    """With timestamps in the future, the whole delay begins again at the start, once."""
    rig.clock_ahead_ms = 10 * DAY_MS
    producer = await rig.peer()
    await _send(producer, b"plain", 3)  # ten seconds
    half = await producer.prepare("K1", b"committed", TRANSACTION_DELAY_MS="12000")
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    await rig.wait(2_000)
    rig.clock_ahead_ms = ahead_ms
    await (rig.kill() if killed else rig.restart())
    producer = await rig.peer()
    await _send(producer, b"new", 3)

    arrived = await _arrivals(rig, 14_000)

    assert sorted(rig.bodies()) == [b"committed", b"new", b"plain"]
    assert arrived[b"plain"] <= 10_100
    assert 10_000 <= arrived[b"new"] <= 10_100
    assert arrived[b"committed"] <= 13_100


@pytest.mark.parametrize("step_ms", [-10 * DAY_MS, 0, 10 * DAY_MS])
@windowed()
async def test_w30_nothing_is_delivered_twice_by_a_kill_after_a_step(
    rig: Rig, step_ms: int
) -> None:
    """The last deliveries are recognised, whatever their timestamps."""
    producer = await rig.peer()
    for number in range(3):
        await _send(producer, b"plain %d" % number, 1)
        half = await producer.prepare(f"K{number}", b"%d" % number, TRANSACTION_DELAY_MS="1500")
        assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
        await rig.wait(300, step_ms=50)
    rig.clock_ahead_ms = step_ms
    await rig.wait(300, step_ms=50)
    arrived = len(rig.bodies())
    await rig.kill()
    await rig.wait(5_000, step_ms=50)

    assert 0 < arrived < 6
    assert len(rig.bodies()) == len(set(rig.bodies())) == 6


@pytest.mark.parametrize("step_ms", [-HOUR_MS, 0, HOUR_MS, 3 * HOUR_MS])
@windowed()
async def test_w30_a_time_of_delivery_is_one_by_the_brokers_clock(rig: Rig, step_ms: int) -> None:
    """After a step the delivery is as much later or sooner."""
    producer = await rig.peer()
    at_ms = START_MS + 3 * HOUR_MS
    half = await producer.prepare("K1", TRANSACTION_DELIVER_MS=str(at_ms))
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    await rig.wait(1_000)
    rig.clock_ahead_ms = step_ms
    left_ms = 3 * HOUR_MS - step_ms - 1_000
    if left_ms > 0:
        await rig.wait(left_ms - 1_000)
        assert rig.bodies() == []
    await rig.wait(3_000, step_ms=50)

    assert rig.bodies() == [b"row 1"]
