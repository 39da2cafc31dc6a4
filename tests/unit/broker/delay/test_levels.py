"""Delay levels: the setting, and the form of a message while it waits."""

from __future__ import annotations

import pytest

from halfmq.broker.delay import levels
from halfmq.broker.delay.levels import DELAY_MS_MAX, DelayLevels, parse_delay_levels
from halfmq.store.format.properties import decode_properties
from halfmq.store.format.topics import SCHEDULE_TOPIC
from tests.support.broker_doubles import (
    START_MS,
    Clock,
    draft,
)
from tests.support.delays import (
    HALF_ID,
    LEVELS,
    delayed,
    final,
)


def test_the_default_levels_are_those_of_rocketmq() -> None:
    """Clients know level 3 as ten seconds."""
    assert len(LEVELS) == 18
    assert LEVELS[:4] == (1_000, 5_000, 10_000, 30_000)
    assert LEVELS[-2:] == (3_600_000, 7_200_000)
    assert parse_delay_levels("1d  2s\t3m") == (86_400_000, 2_000, 180_000)


@pytest.mark.parametrize("text", ["", "  ", "1", "s", "1x", "-1s", "0s", "1.5s", "1s,5s", "41d"])
def test_an_invalid_level_is_named_in_the_error(text: str) -> None:
    """A wrong setting stops the start."""
    with pytest.raises(ValueError, match="delay level"):
        parse_delay_levels(text)


def test_the_number_of_levels_is_limited() -> None:
    """Each is a queue that is read all the time."""
    assert len(parse_delay_levels("1s " * levels.LEVELS_MAX)) == levels.LEVELS_MAX
    with pytest.raises(ValueError, match="65 delay levels, allowed are 1 to 64"):
        parse_delay_levels("1s " * 65)


def test_a_delayed_message_waits_in_the_queue_of_its_level() -> None:
    """Properties and due time are where Apache RocketMQ stores them."""
    clock = Clock()
    waiting = delayed(clock, 3)

    assert (waiting.topic, waiting.queue_id) == (SCHEDULE_TOPIC, 2)
    assert waiting.tags_code == clock.now + 10_000
    assert decode_properties(waiting.properties) == {
        "TAGS": "x",
        "KEYS": "k",
        "DELAY": "3",
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
    }


def test_a_level_beyond_the_last_becomes_the_last() -> None:
    """Also in the stored property."""
    waiting = delayed(Clock(), 25)

    assert waiting.queue_id == 17
    assert decode_properties(waiting.properties)["DELAY"] == "18"


@pytest.mark.parametrize("level", [0, -1, "x", ""])
def test_without_a_level_nothing_is_delayed(level: str | int) -> None:
    """The message stays what it is."""
    properties = f"DELAY\x01{level}\x02".encode()
    message = draft(properties=properties)

    assert DelayLevels(LEVELS, now_ms=Clock()).delayed(message) is message


def test_a_second_delay_keeps_the_latest_topic() -> None:
    """The message goes to the topic of its latest send."""
    clock = Clock()
    again = DelayLevels(LEVELS, now_ms=clock).delayed(
        draft("%RETRY%g", 0, properties=delayed(clock, 1).properties)
    )

    assert decode_properties(again.properties)["REAL_TOPIC"] == "%RETRY%g"
    assert again.properties.count(b"REAL_TOPIC") == 1


@pytest.mark.parametrize(
    ("delay_ms", "level"),
    [(1, 1), (999, 1), (1_000, 1), (4_999, 1), (5_000, 2), (3_600_000, 17), (DELAY_MS_MAX, 18)],
)
def test_a_commit_waits_in_the_longest_level_that_is_not_too_long(
    delay_ms: int, level: int
) -> None:
    """Or in the shortest one; it stays the deciding record, and holds the time left."""
    clock = Clock()
    levels = DelayLevels(LEVELS, now_ms=clock)
    waiting = levels.after_commit(final(f"TRANSACTION_DELAY_MS\x01{delay_ms}"), clock.now)

    assert (waiting.topic, waiting.queue_id) == (SCHEDULE_TOPIC, level - 1)
    assert (waiting.sys_flag, waiting.prepared_transaction_offset) == (0x8, 77)
    assert decode_properties(waiting.properties) == {
        "TAGS": "x",
        "DELAY": str(level),
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
        "TRANSACTION_DELAY_MS": str(delay_ms),
        "TRANSACTION_HALF_ID": HALF_ID,
    }


@pytest.mark.parametrize(
    "delay",
    [
        "TRANSACTION_DELAY_MS\x010",
        f"TRANSACTION_DELIVER_MS\x01{START_MS}",
        "TRANSACTION_DELIVER_MS\x0112",
        "TRANSACTION_DELAY_MS\x01soon",
        "TRANSACTION_DELAY_MS\x01" + "9" * 5_000,
        "OTHER\x01x",
    ],
)
def test_a_commit_whose_time_has_come_is_delivered_at_once(delay: str) -> None:
    """So is one with an invalid time, which no prepare of halfmq accepts."""
    message = final(delay)

    committed = DelayLevels(LEVELS, now_ms=Clock()).after_commit(message, START_MS)

    assert (committed.topic, committed.queue_id) == ("orders", 3)
    assert b"TRANSACTION_DEL" not in committed.properties  # its retries must not wait for it


def test_levels_need_not_ascend() -> None:
    """The setting may name them in any order."""
    levels = DelayLevels((60_000, 1_000, 5_000), now_ms=Clock())

    assert levels.waiting(draft(), 7_000).queue_id == 2
    assert levels.waiting(draft(), 10).queue_id == 1
