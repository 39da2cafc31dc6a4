"""Delays and times of delivery that count from a commit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmq.broker.delay import delivery
from halfmq.broker.delay.levels import DelayLevels
from halfmq.store.format.topics import SCHEDULE_TOPIC
from tests.support.broker_doubles import (
    START_MS,
    Clock,
    FakeLog,
    draft,
)
from tests.support.delays import (
    DAY_MS,
    LEVELS,
    delayed,
    final,
    next_due_ms,
    service,
)


@given(
    delays_ms=st.lists(
        st.one_of(st.integers(1, 20_000), st.integers(1, 50_000_000)), min_size=1, max_size=4
    ),
    restart_every=st.integers(1, 40),
    killed=st.booleans(),
)
def test_a_commit_is_delivered_once_never_early_and_at_most_the_shortest_level_late(
    delays_ms: list[int], restart_every: int, killed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For any delay, with stops and kills; its copies link to no half."""
    root = tmp_path_factory.mktemp("commit")
    clock = Clock()
    log = FakeLog(clock)
    delays = service(root, log, clock)
    levels = DelayLevels(LEVELS, now_ms=clock)
    due = {}
    for number, delay_ms in enumerate(delays_ms):
        message = final(f"TRANSACTION_DELAY_MS\x01{delay_ms}")
        message.body = b"%d" % number
        due[message.body] = clock.now + delay_ms
        log.append([levels.after_commit(message, clock.now)])
    steps = 0
    while clock.now <= max(due.values()) + LEVELS[0]:
        steps += 1
        assert steps < 5_000, "the message goes round and round"
        if steps % restart_every == 0:
            if not killed:
                delays.persist()
            delays = service(root, log, clock)
        clock.now += int(delays.tick() * 1_000)
        clock.now = max(clock.now, next_due_ms(delays))

    arrived = log.queue("orders", 3)
    assert sorted(one.body for one in arrived) == sorted(due)
    for record in arrived:
        late_ms = record.store_timestamp - due[record.body]
        assert 0 <= late_ms <= LEVELS[0] + 1_000 * delivery.TICK_S_MIN
        assert (record.sys_flag, record.prepared_transaction_offset) == (0, 0)
    linked = [one for one in log.records.values() if one.prepared_transaction_offset]
    assert len(linked) == len(due)


@pytest.mark.parametrize("step_ms", [-50 * DAY_MS, -900, 900, 10 * DAY_MS])
def test_a_long_delay_is_stored_again_once_for_each_level(tmp_path: Path, step_ms: int) -> None:
    """Also if the wall clock steps: 18 s are waits of 10, 5, 1, 1 and 1 s."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    levels = DelayLevels(LEVELS, now_ms=clock)
    log.append([levels.after_commit(final("TRANSACTION_DELAY_MS\x0118000"), clock.now)])
    clock.now += 2_000
    clock.step(step_ms)
    while clock.monotonic() < START_MS + 18_000:
        assert log.queue("orders", 3) == []
        clock.now += 50
        delays.tick()

    (record,) = log.queue("orders", 3)
    assert b"TRANSACTION_DELAY_MS" not in record.properties
    waits = [one.queue_id for one in log.records.values() if one.topic == SCHEDULE_TOPIC]
    assert waits == [2, 1, 0, 0, 0]


@pytest.mark.parametrize("step_ms", [-50 * DAY_MS, -5_000])
def test_a_delay_begins_again_at_most_after_a_restart(tmp_path: Path, step_ms: int) -> None:
    """If the clock was set back meanwhile, the limit is the time left when it was stored."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    levels = DelayLevels(LEVELS, now_ms=clock)
    log.append([levels.after_commit(final("TRANSACTION_DELAY_MS\x0118000"), clock.now)])
    clock.now += 10_000
    delays.tick()  # 8 s are left, and the next wait begins
    clock.now += 1_000
    clock.step(step_ms)
    delays = service(tmp_path, log, clock)
    begun = clock.monotonic()
    while not log.queue("orders", 3):
        clock.now += 50
        delays.tick()

    assert 8_000 <= clock.monotonic() - begun <= 8_000 + LEVELS[0]


@pytest.mark.parametrize("step_ms", [-50 * DAY_MS, -5_000, 5_000, 7_000, 10 * DAY_MS])
def test_a_time_of_delivery_follows_the_wall_clock(tmp_path: Path, step_ms: int) -> None:
    """It is not early if the clock is set back, nor late if it is set forward."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    levels = DelayLevels(LEVELS, now_ms=clock)
    at_ms = START_MS + 8_000
    log.append([levels.after_commit(final(f"TRANSACTION_DELIVER_MS\x01{at_ms}"), clock.now)])
    delays.tick()
    clock.now += 2_000
    clock.step(step_ms)
    while clock.now < max(at_ms, START_MS + 2_000 + step_ms):
        assert log.queue("orders", 3) == []
        wait_ms = int(delays.tick() * 1_000)
        clock.now += max(wait_ms, next_due_ms(delays) - clock.monotonic())
    clock.now += 1_000  # within which a step is noticed
    delays.tick()

    assert len(log.queue("orders", 3)) == 1


def test_the_retry_of_a_delayed_message_waits_for_its_level(tmp_path: Path) -> None:
    """It does not wait for the time of the first delivery, even if the clock is set back."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    levels = DelayLevels(LEVELS, now_ms=clock)
    at_ms = START_MS + 1_000
    log.append([levels.after_commit(final(f"TRANSACTION_DELIVER_MS\x01{at_ms}"), clock.now)])
    clock.now += 1_000
    delays.tick()
    (record,) = log.queue("orders", 3)
    clock.step(-10 * DAY_MS)
    properties = record.properties + b"DELAY\x013\x02"
    log.append([levels.delayed(draft("%RETRY%g", 0, b"late", properties))])
    clock.now += 9_999
    delays.tick()
    assert log.queue("%RETRY%g", 0) == []
    clock.now += 1
    delays.tick()

    assert len(log.queue("%RETRY%g", 0)) == 1


def test_a_plain_message_cannot_request_a_time_of_delivery(tmp_path: Path) -> None:
    """The property is not validated there, and could keep the log forever."""
    clock = Clock()
    log = FakeLog(clock)
    delays = service(tmp_path, log, clock)
    waiting = delayed(clock, 1)
    waiting.properties += b"TRANSACTION_DELIVER_MS\x01999999999999999\x02"
    log.append([waiting])
    clock.now += 1_000
    delays.tick()

    assert len(log.queue("orders", 3)) == 1
