"""Delay levels: the setting, and the form of a message while it waits."""

from __future__ import annotations

import pytest

from halfmq.broker.delay import levels
from halfmq.broker.delay.levels import DelayLevels, parse_delay_levels
from halfmq.store.format.properties import decode_properties
from halfmq.store.format.topics import SCHEDULE_TOPIC
from halfmq.store.log.append_request import AppendRequest
from tests.support.delays import LEVELS, delayed
from tests.support.stores import draft


def _waiting(level: str | int) -> AppendRequest:
    return DelayLevels(LEVELS).delayed(delayed("late", level))


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
    """Its properties are those that Apache RocketMQ stores."""
    waiting = _waiting(3)

    assert (waiting.topic, waiting.queue_id) == (SCHEDULE_TOPIC, 2)
    assert decode_properties(waiting.properties) == {
        "TAGS": "x",
        "KEYS": "k",
        "DELAY": "3",
        "REAL_TOPIC": "orders",
        "REAL_QID": "1",
    }


def test_a_level_beyond_the_last_becomes_the_last() -> None:
    """Also in the stored property."""
    waiting = _waiting(25)

    assert waiting.queue_id == 17
    assert decode_properties(waiting.properties)["DELAY"] == "18"


@pytest.mark.parametrize("level", [0, -1, "x", ""])
def test_without_a_level_nothing_is_delayed(level: str | int) -> None:
    """The message stays what it is."""
    properties = f"DELAY\x01{level}\x02".encode()
    message = draft(properties=properties)

    assert DelayLevels(LEVELS).delayed(message) is message


def test_a_second_delay_keeps_the_latest_topic() -> None:
    """The message goes to the topic of its latest send."""
    again = DelayLevels(LEVELS).delayed(draft("%RETRY%g", 0, properties=_waiting(1).properties))

    assert decode_properties(again.properties)["REAL_TOPIC"] == "%RETRY%g"
    assert again.properties.count(b"REAL_TOPIC") == 1
