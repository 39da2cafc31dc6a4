"""Topics and groups are administered by our client, at a broker that is started for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfmq.client import BrokerRefusedError, ConfigurationError, Topic
from halfmq.client.blocking import Admin
from halfmq.client.testing import broker_process


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    with (
        broker_process(tmp_path_factory.mktemp("broker")) as broker,
        Admin(namesrv=broker.address) as client,
    ):
        yield client


def named(admin: Admin, name: str) -> Topic | None:
    return next((one for one in admin.topics() if one.name == name), None)


def test_a_topic_is_created_changed_and_deleted(admin: Admin) -> None:
    """A second call replaces the settings, and keeps attributes."""
    admin.create_topic("orders", queues=8, attributes={"message.type": "FIFO"})
    admin.create_topic("orders", queues=2, read_queues=8, writable=False)

    assert named(admin, "orders") == Topic(
        name="orders",
        broker_name="broker-a",
        read_queues=8,
        write_queues=2,
        readable=True,
        writable=False,
        attributes={"message.type": "FIFO"},
    )
    admin.delete_topic("orders")
    admin.delete_topic("orders")
    assert named(admin, "orders") is None


def test_what_is_no_topic_is_refused(admin: Admin) -> None:
    """By the broker, or before anything is sent."""
    with pytest.raises(BrokerRefusedError, match="conflict with system topic"):
        admin.create_topic("TBW102")
    with pytest.raises(BrokerRefusedError, match="conflict with system topic"):
        admin.delete_topic("TBW102")
    with pytest.raises(BrokerRefusedError, match="unsupported key: nope"):
        admin.create_topic("orders", attributes={"nope": "1"})
    with pytest.raises(ConfigurationError, match="queues"):
        admin.create_topic("orders", queues=0)


def test_a_group_is_created_and_deleted(admin: Admin) -> None:
    """It is on disk then; one that is unknown is deleted as well."""
    admin.create_group("billing", max_retries=3, retry_queues=2, broadcasting=False)
    admin.delete_group("billing", offsets=True)
    admin.delete_group("billing")
    with pytest.raises(BrokerRefusedError, match="illegal characters"):
        admin.create_group("a b")
