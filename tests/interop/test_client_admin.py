"""Topics and groups are administered by our client, at a broker that is started for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from halfmq.client import (
    BrokerRefusedError,
    ConfigurationError,
    Counted,
    Message,
    MessageQueue,
    SendResult,
    Topic,
    Traffic,
)
from halfmq.client.blocking import Admin, Consumer, Producer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.patience import PATIENCE_S, wait_until


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
        is_internal=False,
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


def sent(broker: BrokerProcess, topic: str, *bodies: bytes) -> list[SendResult]:
    with Producer("senders", namesrv=broker.address) as producer:
        return [producer.send(Message(topic, body, keys=body.decode())) for body in bodies]


def test_it_shows_where_a_group_is_and_sends_it_elsewhere(
    broker: BrokerProcess, admin: Admin
) -> None:
    """By a place, a time or an offset, or to where another group is."""
    before = datetime.now(UTC) - timedelta(hours=1)
    admin.create_topic("places", queues=1)
    admin.create_group("readers")
    admin.create_group("others")
    sent(broker, "places", b"1", b"2", b"3")
    queue = MessageQueue("places", "broker-a", 0)
    (stored,) = admin.queues("places")
    assert (stored.queue, stored.first, stored.end) == (queue, 0, 3)
    assert stored.last_stored is not None
    assert stored.last_stored > before
    assert admin.offsets("readers") == []
    assert admin.groups_of("places") == []

    assert admin.reset_offsets("readers", "places", "last") == {queue: 3}
    assert admin.groups_of("places") == ["readers"]
    (offset,) = admin.offsets("readers", "places")
    assert (offset.queue, offset.offset, offset.end, offset.lag) == (queue, 3, 3, 0)
    (span,) = admin.time_spans("readers", "places")
    assert span.queue == queue
    assert span.consumed == span.last_stored == stored.last_stored
    assert span.delay == 0

    admin.reset_offset("readers", queue, 2)
    assert [one.lag for one in admin.offsets("readers")] == [1]
    assert admin.time_spans("readers", "places")[0].delay > 0
    admin.clone_offsets("readers", "others", "places")
    assert [one.offset for one in admin.offsets("others")] == [2]
    assert admin.reset_offsets("readers", "places", before) == {queue: 0}
    assert admin.reset_offsets("readers", "places", "first") == {queue: 0}


def test_offsets_that_do_not_exist_are_refused(broker: BrokerProcess, admin: Admin) -> None:
    """Each error says what is missing, or what was expected."""
    sent(broker, "few", b"1")
    admin.create_group("readers")
    for topic, group, expected in (("few", "nobody", "nobody"), ("none", "readers", "none")):
        with pytest.raises(BrokerRefusedError, match=f"{expected} does not exist"):
            admin.reset_offsets(group, topic, "first")
    with pytest.raises(BrokerRefusedError, match="none"):
        admin.queues("none")
    with pytest.raises(BrokerRefusedError, match="not in consume queue range"):
        admin.reset_offset("readers", MessageQueue("few", "broker-a", 0), 99)
    for wrong in ("middle", datetime(2026, 1, 1)):  # noqa: DTZ001
        with pytest.raises(ConfigurationError, match="datetime with a time zone"):
            admin.reset_offsets("readers", "few", wrong)  # type: ignore[arg-type]


def test_messages_are_found_by_id_and_key(broker: BrokerProcess, admin: Admin) -> None:
    """None, or an empty list, if there is no such message."""
    first, second = sent(broker, "found", b"k-1", b"k-2")
    for found in (
        admin.message(second.offset_message_id),
        admin.message(second.message_id, "found"),
        *admin.messages_with_key("found", "k-2"),
    ):
        assert found is not None
        assert (found.body, found.message_id) == (b"k-2", second.message_id)
        assert found.queue == second.queue
    now = datetime.now(UTC)
    assert len(admin.messages_with_key("found", "k-1", until=now + timedelta(hours=1))) == 1
    assert admin.messages_with_key("found", "k-1", until=now - timedelta(hours=1)) == []
    assert admin.messages_with_key("found", "k-3") == []
    assert admin.message(first.message_id) is None  # without a topic it is not looked for
    assert admin.message("0" * 32, "found") is None


def test_a_running_consumer_is_asked(broker: BrokerProcess, admin: Admin) -> None:
    """What it is doing; and it is given a message again."""
    admin.create_topic("running", queues=1)
    with Consumer("runners", {"running": "*"}, namesrv=broker.address) as consumer:
        sent(broker, "running", b"1", b"2")
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        message.ack()
        told = admin.running_consumer("runners", consumer.client_id, stacks=True)
        assert told.filters["running"] == "*"
        queue = next(one for one in told.queues if one.queue.topic == "running")
        assert (queue.offset, queue.last_consumed is not None) == (1, True)
        assert "QueuePuller.run" in (told.stacks or "")

        with ThreadPoolExecutor(1) as pool:
            given = pool.submit(admin.consume_directly, "runners", consumer.client_id, message)
            bodies: list[bytes] = []
            while len(bodies) < 2:  # the second one may come first
                again = consumer.receive(PATIENCE_S)
                assert again is not None
                again.ack()
                bodies.append(again.body)
            done = given.result(PATIENCE_S)
        assert sorted(bodies) == [b"1", b"2"]
        assert (done.outcome, done.succeeded, done.remark) == ("CR_SUCCESS", True, None)
        with pytest.raises(BrokerRefusedError, match="not online"):
            admin.running_consumer("runners", "nobody")


def test_connected_producers_are_listed(broker: BrokerProcess, admin: Admin) -> None:
    """By group; none when it has left."""
    with Producer("seen", namesrv=broker.address) as producer:
        producer.send(Message("orders", b"x"))
        (found,) = [one for one in admin.producers() if one.group == "seen"]
        assert found.client_id
        assert found.broker_name == "broker-a"
        assert found.address.startswith("127.0.0.1:")
    wait_until(lambda: all(one.group != "seen" for one in admin.producers()), "it has not left")
