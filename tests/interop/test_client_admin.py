"""Topics and groups are administered by our client, at a broker that is started for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfmq.client import (
    BrokerRefusedError,
    ConfigurationError,
    Counted,
    Message,
    Topic,
    Traffic,
)
from halfmq.client.blocking import Admin, Producer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.patience import wait_until


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with a file of settings."""
    directory = tmp_path_factory.mktemp("broker")
    conf = directory / "broker.conf"
    conf.touch()
    with broker_process(directory, conf=conf) as process:
        yield process


@pytest.fixture(scope="module")
def admin(broker: BrokerProcess) -> Iterator[Admin]:
    with Admin(namesrv=broker.address) as client:
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


def test_settings_are_shown_and_changed(admin: Admin) -> None:
    """By broker; what cannot be changed says why."""
    admin.change_setting("fileReservedTime", "24")
    assert admin.settings()["broker-a"]["fileReservedTime"] == "24"
    with pytest.raises(BrokerRefusedError, match="takes effect at a start only"):
        admin.change_setting("listenPort", "1")


def test_traffic_is_told(broker: BrokerProcess, admin: Admin) -> None:
    """Of a topic and of a group; what is unknown has none."""
    nothing = Counted(messages=0, per_second=0)
    assert admin.traffic("unknown") == Traffic(minute=nothing, hour=nothing, day=nothing)
    assert admin.traffic("unknown", "nobody").day == nothing
    with Producer("traffic", namesrv=broker.address) as producer:
        for _ in range(3):
            producer.send(Message("watched", b"body"))
    wait_until(lambda: admin.traffic("watched").minute.messages == 3, "nothing was counted")
    assert admin.traffic("watched").minute.per_second > 0
