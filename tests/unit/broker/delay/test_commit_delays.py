"""Commits that are delivered some time later: their waiting record is the decision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.broker.delay.levels import DELAY_MS_MAX
from halfmq.broker.delay.timer_records import TimerRule
from halfmq.store.format.properties import decode_properties
from halfmq.store.format.topics import TIMER_TOPIC
from tests.support.broker_doubles import START_MS
from tests.support.delays import DAY_MS, HALF_ID, Rig, delayed, final
from tests.support.stores import append_durably

DELAY, DELIVER = "TRANSACTION_DELAY_MS", "TRANSACTION_DELIVER_MS"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "store")
    yield rig
    rig.stop()


@pytest.mark.parametrize(
    ("delay", "timer"),
    [
        (f"{DELAY}\x017000", {"TIMER_DELAY_MS": "7000"}),
        (f"{DELIVER}\x01{START_MS + 7_000}", {"TIMER_DELIVER_MS": str(START_MS + 7_000)}),
    ],
)
def test_a_commit_waits_as_a_timer_message_and_is_the_decision(
    delay: str, timer: dict[str, str]
) -> None:
    """An Apache RocketMQ that takes the store over delivers it at its time."""
    waiting = TimerRule(1, now_ms=lambda: START_MS).after_commit(final(delay))

    assert (waiting.topic, waiting.queue_id) == (TIMER_TOPIC, 0)
    assert (waiting.sys_flag, waiting.prepared_transaction_offset) == (0x8, 77)
    assert decode_properties(waiting.properties) == {
        "TAGS": "x",
        "TRANSACTION_HALF_ID": HALF_ID,
        "TIMER_OUT_MS": str(START_MS + 6_000),
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
        **timer,
    }


@pytest.mark.parametrize(
    "delay",
    [
        f"{DELAY}\x010",
        f"{DELIVER}\x01{START_MS}",
        f"{DELIVER}\x0112",
        f"{DELIVER}\x01soon\x02{DELAY}\x017000",
        f"{DELAY}\x01soon",
        f"{DELAY}\x01" + "9" * 5_000,
        "OTHER\x01x",
    ],
)
def test_a_commit_whose_time_has_come_is_delivered_at_once(delay: str) -> None:
    """So is one with an invalid time, which no prepare of halfmq accepts."""
    committed = TimerRule(1, now_ms=lambda: START_MS).after_commit(final(delay))

    assert (committed.topic, committed.queue_id) == ("orders", 3)
    assert b"TRANSACTION_DEL" not in committed.properties  # its retries must not wait for it


@pytest.mark.parametrize("delay_ms", [1, 7_321, DELAY_MS_MAX, 10**17])
def test_a_commit_is_delivered_in_its_millisecond_and_decides_nothing_again(
    rig: Rig, delay_ms: int
) -> None:
    """Stored twice in all; at most 40 days after the commit."""
    rig.commit("late", DELAY, delay_ms)
    due_ms = min(delay_ms, DELAY_MS_MAX)

    rig.after(due_ms - 1)
    assert rig.bodies() == []
    rig.after(1)

    (record,) = rig.records()
    assert record.store_timestamp == START_MS + due_ms
    assert record.sys_flag == 0
    assert record.prepared_transaction_offset < 0  # which names no half
    assert len(rig.records(TIMER_TOPIC)) == 1


def test_the_retry_of_a_delayed_commit_waits_for_its_level(rig: Rig) -> None:
    """It does not wait for the time of the first delivery, even if the clock is set back."""
    rig.commit("late", DELIVER, START_MS + 1_000)
    rig.after(1_000)
    (record,) = rig.records()
    rig.clocks.wall -= 10 * DAY_MS
    retry = delayed("late", 3, "%RETRY%g", 0)
    retry.properties = record.properties + b"DELAY\x013\x02"
    append_durably(rig.store, rig.levels.delayed(retry))
    rig.after(9_999)
    assert rig.bodies("%RETRY%g") == []
    rig.after(1)

    assert rig.bodies("%RETRY%g") == ["late"]


def test_a_plain_message_cannot_request_a_delay_from_its_commit(rig: Rig) -> None:
    """The property is not validated there, and could keep the log forever."""
    message = delayed("late", 1)
    message.properties += b"TRANSACTION_DELIVER_MS\x01999999999999999\x02"
    append_durably(rig.store, rig.levels.delayed(message))
    rig.after(1_000)

    assert rig.bodies() == ["late"]
