"""Names of topics and groups."""

import pytest

from halfmq.store.format import topics
from halfmq.store.format.topics import (
    dead_letter_topic,
    is_system_topic,
    retry_topic,
    validate_group,
    validate_topic,
)


@pytest.mark.parametrize(
    "name",
    ["T", "orders-2_a", "%RETRY%g", "a|b", "t" * 127, "%DLQ%" + "g" * 250, topics.HALF_TOPIC],
)
def test_a_well_formed_topic_is_not_refused(name: str) -> None:
    """RocketMQ's clients use all of these names."""
    assert validate_topic(name) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "The specified topic is blank."),
        (" \t", "The specified topic is blank."),
        ("a b", "contains illegal characters"),
        ("größe", "contains illegal characters"),
        ("a/../b", "contains illegal characters"),
        ("T\n", "contains illegal characters"),
        ("t" * 128, "longer than topic max length 127."),
        ("%RETRY%" + "g" * 249, "longer than topic max length 255."),
    ],
)
def test_a_topic_is_refused_with_its_reason(name: str, reason: str) -> None:
    """A topic becomes a directory name and a field of every record."""
    assert reason in str(validate_topic(name))


@pytest.mark.parametrize("name", ["", "a.b", "g" * 249])
def test_a_group_is_refused_with_its_reason(name: str) -> None:
    """Also when its retry topic would be too long."""
    assert "The specified group" in str(validate_group(name))


def test_the_longest_group_has_a_valid_retry_topic() -> None:
    """Otherwise the group could not retry messages."""
    group = "g" * 248

    assert validate_group(group) is None
    assert validate_topic(retry_topic(group)) is None
    assert validate_topic(dead_letter_topic(group)) is None


def test_the_brokers_own_topics_are_known() -> None:
    """Clients may neither delete nor write to them."""
    assert is_system_topic("RMQ_SYS_TRANS_HALF_TOPIC")
    assert is_system_topic("rmq_sys_REVIVE_LOG_DefaultCluster")
    assert is_system_topic("TBW102")
    assert not is_system_topic("orders")
    assert topics.CLIENTS_MAY_NOT_SEND < topics.SYSTEM_TOPICS
