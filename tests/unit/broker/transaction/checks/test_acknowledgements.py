"""Checks of halfmq clients, which acknowledge them."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmq.broker.transaction.checks import group_queues
from halfmq.broker.transaction.checks.timetable import BUCKET_MS
from halfmq.broker.transaction.state.state_machine import TransactionEvent
from halfmq.remoting.command import RemotingCommand
from tests.support.check_back import INTERVAL_MS, TIMEOUT_MS, counts, member
from tests.support.transactions import Broker


def test_only_an_acknowledged_check_counts(broker: Broker) -> None:
    """The time for the answer begins with the acknowledgement; no check is sent meanwhile."""
    producer = member(broker)
    broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    broker.wait(2_000)
    assert len(producer.checks) == 1
    assert counts(broker) == (1, 0, 0)

    producer.acknowledge()
    broker.wait(0)
    assert counts(broker) == (1, 1, 0)
    broker.wait(INTERVAL_MS - BUCKET_MS)
    assert len(producer.checks) == 1
    broker.wait(2 * BUCKET_MS)
    assert len(producer.checks) == 2


@pytest.mark.parametrize("code", [None, 1, -7])
def test_a_check_that_a_member_does_not_accept_goes_to_the_next_at_once(
    broker: Broker, code: int | None
) -> None:
    """Lost, late, refused or invalid: each member gets it once, the one that prepared first."""
    members = [member(broker, f"p{number}") for number in range(3)]
    broker.prepare(members[2])
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    asked = [members[2]]
    for number in (1, 2, 3):
        assert [one for one in members if one.checks] == [one for one in members if one in asked]
        assert sum(len(one.checks) for one in members) == number
        (open_one,) = [one for one in members if one.unacknowledged]
        open_one.acknowledge(code)
        broker.wait(0)
        asked += [one for one in members if one.unacknowledged]
    broker.wait(group_queues.BUSY_RETRY_MS - BUCKET_MS)
    assert sum(len(one.checks) for one in members) == 3
    assert counts(broker) == (3, 0, 3)

    broker.wait(2 * BUCKET_MS)
    assert len(members[2].checks) == 2
    members[2].acknowledge()
    broker.wait(0)
    assert counts(broker) == (4, 1, 3)


def test_a_group_that_accepts_no_check_gets_them_less_and_less_often(broker: Broker) -> None:
    """It may have no checker; no check is counted, and none is sent in a tight loop."""
    producer = member(broker)
    broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    for _ in range(3_600):
        producer.acknowledge(1)
        broker.wait(1_000)
    assert 100 <= len(producer.checks) <= 140
    assert counts(broker)[1] == 0
    assert broker.service.metrics()["parked"] == 0

    other = member(broker)
    broker.service.on_producer("pg", other)
    producer.acknowledge(1)
    broker.wait(0)
    producer.acknowledge(1)
    broker.wait(0)
    assert len(other.checks) == 1


def test_the_checks_of_a_refusing_group_wait_until_one_is_accepted(broker: Broker) -> None:
    """After some refusals in a row the rest waits; it continues with the first acceptance."""
    producer = member(broker)
    for _ in range(40 * group_queues.REFUSALS_MAX):
        broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    while producer.unacknowledged:
        producer.acknowledge(1)
        broker.wait(0)
    first = len(producer.checks)
    for _ in range(60):
        broker.wait(1_000)
        producer.acknowledge(1)
        broker.wait(0)
        producer.acknowledge(1)
    assert len(producer.checks) < 7 * first

    waited_s = 0
    while counts(broker)[1] < 40 * group_queues.REFUSALS_MAX:
        waited_s += 1
        broker.wait(1_000)
        producer.acknowledge()
        broker.wait(0)
    assert waited_s <= group_queues.REFUSED_RETRY_MS_MAX // 1_000 + 1


def test_a_late_refusal_does_not_end_the_pause_of_a_group(broker: Broker) -> None:
    """The check was in flight when the group was blocked, and its transaction was decided."""
    producer = member(broker)
    halves = [broker.prepare() for _ in range(group_queues.REFUSALS_MAX + 1)]
    broker.clock.now += group_queues.BUSY_RETRY_MS // 2
    young = broker.prepare()
    broker.wait(TIMEOUT_MS - group_queues.BUSY_RETRY_MS // 2 + BUCKET_MS)
    assert set(producer.checked_offsets) == {half.physical_offset for half in halves}
    *refused, late = producer.unacknowledged
    for on_answer in refused:
        on_answer(RemotingCommand(code=1))
    broker.wait(group_queues.BUSY_RETRY_MS // 2)
    assert young.physical_offset not in producer.checked_offsets

    broker.end(halves[-1], TransactionEvent.COMMIT)
    late(RemotingCommand(code=1))
    broker.wait(0)
    assert young.physical_offset not in producer.checked_offsets

    broker.wait(group_queues.BUSY_RETRY_MS)
    assert young.physical_offset in producer.checked_offsets


def test_a_member_that_accepts_few_checks_at_a_time_gets_the_rest_soon(broker: Broker) -> None:
    """The number of checks that a client accepts at once is limited."""
    producer = member(broker)
    at_a_time, total = 50, 600
    for _ in range(total):
        broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    waited_ms = 0
    while counts(broker)[1] < total * 9 // 10:
        left = at_a_time
        while producer.unacknowledged:
            waiting, producer.unacknowledged = producer.unacknowledged, []
            for on_answer in waiting:
                on_answer(RemotingCommand(code=int(left <= 0)))
                left -= 1
            broker.wait(0)
        waited_ms += BUCKET_MS
        broker.wait(BUCKET_MS)
    assert waited_ms < 2 * total // at_a_time * group_queues.FULL_RETRY_MS


def test_one_check_that_no_member_accepts_stops_no_other(broker: Broker) -> None:
    """A client may be unable to decode one message."""
    producer = member(broker)
    poison = broker.prepare()
    for _ in range(20):
        broker.prepare()
        broker.wait(5_000)
        while producer.unacknowledged:
            offsets = producer.checked_offsets[-len(producer.unacknowledged) :]
            waiting, producer.unacknowledged = producer.unacknowledged, []
            for offset, on_answer in zip(offsets, waiting, strict=True):
                code = 1 if offset == poison.physical_offset else 0
                on_answer(RemotingCommand(code=code))
            broker.wait(0)
    asked = producer.checked_offsets
    assert set(asked) >= {entry.offset for entry in broker.table.after(-1, 19)}
    assert asked.count(poison.physical_offset) < 12


def test_a_member_without_room_gets_the_next_check_after_an_acknowledgement(broker: Broker) -> None:
    """The number of checks in flight to a connection is bounded."""
    producer = member(broker)
    producer.room = 3
    halves = [broker.prepare() for _ in range(10)]
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    assert len(producer.checks) == 3
    for _ in range(9):
        producer.acknowledge()
        broker.wait(0)
    assert sorted(producer.checked_offsets) == [half.physical_offset for half in halves]
    assert counts(broker) == (10, 10, 0)


@pytest.mark.parametrize("code", [None, 0, 1])
def test_an_acknowledgement_after_the_decision_is_only_counted(
    broker: Broker, code: int | None
) -> None:
    """The producer may decide by itself while the check is in flight."""
    producer = member(broker)
    half = broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    broker.end(half, TransactionEvent.COMMIT)
    producer.acknowledge(code)
    broker.wait(0)
    for _ in range(10):
        broker.wait(INTERVAL_MS)
    assert len(producer.checks) == 1
    assert counts(broker) == (1, code == 0, code != 0)


def test_an_acknowledgement_wakes_the_checker(tmp_path: Path) -> None:
    """The next member gets the check at once, not with the next tick."""
    broker = Broker(tmp_path)
    woken: list[bool] = []
    broker.wake = lambda: woken.append(True)
    producer = member(broker)
    broker.prepare()
    broker.prepare()
    broker.wait(TIMEOUT_MS + BUCKET_MS)
    woken.clear()
    producer.acknowledge(1)
    assert woken == [True]
