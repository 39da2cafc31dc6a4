"""The registry of connected clients."""

from __future__ import annotations

import pytest

from halfmq.broker.connection import Connection
from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.registry import EXPIRY_MS, LEFT_GROUPS_MAX, ClientRegistry
from halfmq.remoting.bodies import (
    ConsumerData,
    HeartbeatData,
    MessageModel,
    ProducerData,
    SubscriptionData,
)
from tests.support.broker_doubles import Clock, FakeConnection


def subscription(topic: str, version: int = 1, expression: str = "*") -> SubscriptionData:
    return SubscriptionData(topic=topic, sub_string=expression, sub_version=version)


def consumer(
    client_id: str,
    *subscriptions: SubscriptionData,
    group: str = "g",
    fingerprint: int = 0,
    without_sub: bool = False,
) -> HeartbeatData:
    data = ConsumerData(
        group_name=group,
        message_model=MessageModel.CLUSTERING,
        subscription_data_set=subscriptions,
    )
    return HeartbeatData(
        client_id=client_id,
        consumer_data_set=(data,),
        heartbeat_fingerprint=fingerprint,
        without_sub=without_sub,
    )


def producer(client_id: str, *groups: str) -> HeartbeatData:
    return HeartbeatData(
        client_id=client_id,
        producer_data_set=tuple(ProducerData(group_name=group) for group in groups),
    )


def test_members_of_a_group_are_known_by_client_id() -> None:
    """Each member shares the queues by the list of all."""
    registry = ClientRegistry(now_ms=Clock())
    first, second = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")

    assert registry.heartbeat(consumer("a", subscription("T")), first) == ["g"]
    assert registry.heartbeat(consumer("b", subscription("T")), second) == ["g"]
    assert registry.heartbeat(consumer("b", subscription("T")), second) == []
    assert registry.consumer_ids("g") == ["a", "b"]
    assert registry.consumers_of("g") == [first, second]
    assert registry.consumer_ids("other") == []


def test_a_newer_subscription_replaces_and_an_absent_one_goes() -> None:
    """Filters change with the version, topics with the latest heartbeat."""
    registry = ClientRegistry(now_ms=Clock())
    connection = FakeConnection()
    registry.heartbeat(consumer("a", subscription("T", 5, "x"), subscription("U")), connection)

    assert registry.heartbeat(consumer("a", subscription("T", 4, "old")), connection) == ["g"]
    kept = registry.subscription_of("g", "T")
    assert kept is not None
    assert kept.sub_string == "x"
    assert registry.subscription_of("g", "U") is None

    assert registry.heartbeat(consumer("a", subscription("T", 6, "new")), connection) == []
    newer = registry.subscription_of("g", "T")
    assert newer is not None
    assert newer.sub_string == "new"


def test_a_client_that_comes_back_replaces_its_connection() -> None:
    """The end of the old connection must not remove the client that has a new one."""
    registry = ClientRegistry(now_ms=Clock())
    old, new = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    registry.heartbeat(consumer("a", subscription("T")), old)
    registry.heartbeat(producer("a", "p"), old)

    assert registry.heartbeat(consumer("a", subscription("T")), new) == ["g"]
    registry.heartbeat(producer("a", "p"), new)
    assert registry.forget(old) == []
    assert registry.consumers_of("g") == [new]
    assert registry.producers_of("p") == [new]
    assert registry.subscription_of("g", "T") is not None


def test_a_lost_connection_takes_all_its_registrations() -> None:
    """One connection may carry producers and consumers of several groups."""
    registry = ClientRegistry(now_ms=Clock())
    lost, other = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    registry.heartbeat(consumer("a", subscription("T")), lost)
    registry.heartbeat(consumer("a", subscription("T"), group="h"), lost)
    registry.heartbeat(producer("a", "p"), lost)
    registry.heartbeat(consumer("b", subscription("T")), other)

    assert sorted(registry.forget(lost)) == ["g", "h"]
    assert registry.consumer_ids("g") == ["b"]
    assert not registry.has_consumers("h")
    assert registry.producers_of("p") == []
    assert registry.forget(lost) == []


def test_a_client_without_heartbeat_expires() -> None:
    """A peer that vanished without closing its connection shares no queues for ever."""
    clock = Clock()
    registry = ClientRegistry(now_ms=clock)
    silent, alive = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    registry.heartbeat(consumer("a", subscription("T")), silent)
    registry.heartbeat(producer("a", "p"), silent)
    clock.now += EXPIRY_MS
    registry.heartbeat(consumer("b", subscription("T")), alive)
    assert registry.expire() == []
    clock.now += 1

    assert registry.expire() == ["g"]
    assert registry.consumer_ids("g") == ["b"]
    assert registry.producers_of("p") == []
    assert registry.forget(silent) == []


@pytest.mark.parametrize("jump_ms", [300_000, 86_400_000])
def test_a_clock_set_forward_expires_nobody(jump_ms: int) -> None:
    """Nor does a process that was stopped for a while: it has not read the heartbeats yet."""
    clock = Clock()
    registry = ClientRegistry(now_ms=clock)
    for name in ("before", "behind"):
        registry.heartbeat(consumer(name, subscription("T")), FakeConnection())
        registry.heartbeat(producer(name, "p"), FakeConnection("127.0.0.1:3"))
        assert registry.expire() == []
        clock.now += jump_ms if name == "before" else 10_000
    assert registry.expire() == []
    assert registry.consumer_ids("g") == ["before", "behind"]

    for _ in range(13):  # and those that stay silent expire as ever
        clock.now += 10_000
        registry.expire()
    assert registry.consumer_ids("g") == []
    assert registry.producers_of("p") == []


def test_unregistering_ends_one_registration() -> None:
    """A client that stops one consumer keeps its others; unknown ones are no error."""
    registry = ClientRegistry(now_ms=Clock())
    connection = FakeConnection()
    registry.heartbeat(consumer("a", subscription("T")), connection)
    registry.heartbeat(producer("a", "p", "q"), connection)

    assert registry.unregister("a", "p", "g") == ["g"]
    assert registry.unregister("a", "none", "none") == []
    assert registry.unregister("nobody", None, "g") == []
    assert registry.unregister("a", "", "") == []
    assert registry.producers_of("p") == []
    assert registry.producers_of("q") == [connection]


def test_the_hook_hears_of_every_producer_that_comes_up() -> None:
    """The transaction checker asks a producer at once about what is due."""
    registry = ClientRegistry(now_ms=Clock())
    heard: list[tuple[str, Connection]] = []
    registry.on_producer(lambda group, connection: heard.append((group, connection)))
    old, new = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    for connection in (old, old, new):
        registry.heartbeat(producer("a", "p"), connection)
    registry.heartbeat(consumer("a", subscription("T")), new)

    assert heard == [("p", old), ("p", new)]


def test_only_open_connections_of_producers_are_offered() -> None:
    """A check-back to a closed connection would be lost."""
    registry = ClientRegistry(now_ms=Clock())
    closed, there = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    registry.heartbeat(producer("a", "p"), closed)
    registry.heartbeat(producer("b", "p"), there)
    closed.closed = True

    assert registry.producers_of("p") == [there]
    assert registry.producer_clients("p") == [("b", there)]
    assert registry.producer("p", "a") is None
    assert registry.producer("p", "b") is there
    assert registry.producers_of("none") == []


def test_a_heartbeat_without_subscriptions_keeps_them() -> None:
    """Version 2 heartbeats leave out what the broker already knows."""
    registry = ClientRegistry(now_ms=Clock())
    connection = FakeConnection()
    whole = consumer("a", subscription("T"), fingerprint=77)
    short = consumer("a", fingerprint=77, without_sub=True)
    assert not registry.knows_fingerprint(short)
    registry.heartbeat(whole, connection)

    assert registry.knows_fingerprint(short)
    assert registry.heartbeat(short, connection) == []
    assert registry.subscription_of("g", "T") is not None
    assert not registry.knows_fingerprint(consumer("a", fingerprint=78, without_sub=True))
    assert not registry.knows_fingerprint(consumer("b", fingerprint=77, without_sub=True))


def test_a_client_without_an_id_is_not_registered() -> None:
    """Two of them could not be told apart."""
    registry = ClientRegistry(now_ms=Clock())

    assert registry.heartbeat(consumer("", subscription("T")), FakeConnection()) == []
    assert not registry.has_consumers("g")


def test_too_many_registrations_are_refused() -> None:
    """Known clients go on; a new one is told why not."""
    registry = ClientRegistry(now_ms=Clock(), registrations_max=2)
    connection = FakeConnection()
    registry.heartbeat(producer("a", "p", "q"), connection)
    with pytest.raises(RequestRefusedError, match="the limit is 2"):
        registry.heartbeat(producer("b", "p"), connection)
    registry.heartbeat(producer("a", "p", "q"), connection)
    registry.forget(connection)

    registry.heartbeat(producer("b", "p"), connection)
    assert registry.producers_of("p") == [connection]


def test_every_registration_can_be_listed() -> None:
    """Operators see who is connected."""
    registry = ClientRegistry(now_ms=Clock())
    connection = FakeConnection()
    registry.heartbeat(consumer("a", subscription("T")), connection)
    registry.heartbeat(producer("a", "p"), connection)

    assert [(kind, group, one.client_id) for kind, group, one in registry] == [
        ("consumer", "g", "a"),
        ("producer", "p", "a"),
    ]
    assert set(registry.consumer_groups) == {"g"}
    assert set(registry.producer_groups) == {"p"}


def test_a_connection_that_ends_its_producer_has_left_the_group() -> None:
    """It lives on for others; a check about the group's transactions must not go there."""
    registry = ClientRegistry(now_ms=Clock())
    connection = FakeConnection()
    assert not registry.has_left("g", connection)  # it may prepare before its first heartbeat
    registry.heartbeat(producer("a", "g", "h"), connection)
    registry.heartbeat(producer("b", "g"), connection)

    registry.unregister("a", "g", None)
    assert not registry.has_left("g", connection)  # its other client is still there
    registry.unregister("b", "g", None)
    assert registry.has_left("g", connection)
    assert not registry.has_left("h", connection)

    registry.heartbeat(producer("a", "g"), connection)
    assert not registry.has_left("g", connection)


def test_a_producer_that_fell_silent_or_moved_has_left_its_old_connection() -> None:
    """Whatever made the registration end, as long as the connection itself lives."""
    clock = Clock()
    registry = ClientRegistry(now_ms=clock)
    silent, old, new = (FakeConnection(f"127.0.0.1:{port}") for port in (1, 2, 3))
    registry.heartbeat(producer("a", "g"), silent)
    clock.now += EXPIRY_MS + 1
    registry.heartbeat(producer("b", "g"), old)
    registry.expire()
    registry.heartbeat(producer("b", "g"), new)
    assert [registry.has_left("g", one) for one in (silent, old, new)] == [True, True, False]


def test_groups_left_are_forgotten_with_their_connection_and_are_bounded() -> None:
    """A client that makes up group names cannot fill the memory."""
    registry = ClientRegistry(now_ms=Clock())
    connection = FakeConnection()
    for number in range(LEFT_GROUPS_MAX + 10):
        registry.heartbeat(producer("a", f"g{number}"), connection)
        registry.unregister("a", f"g{number}", None)
    assert registry.has_left(f"g{LEFT_GROUPS_MAX + 5}", connection)
    assert sum(map(len, registry._left.values())) <= LEFT_GROUPS_MAX

    connection.closed = True
    registry.forget(connection)
    assert not registry._left
