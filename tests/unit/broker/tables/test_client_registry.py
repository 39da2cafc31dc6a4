"""The registry of connected clients."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.ports import Connection
from halfmq.broker.tables.client_registry import (
    CLIENT_IDS_MAX,
    EXPIRY_MS,
    LEFT_GROUPS_MAX,
    ClientRegistry,
)
from halfmq.broker.tables.group_members import REFUSED_MAX, VARIANTS_MAX, Difference
from halfmq.remoting.bodies import (
    ConsumerData,
    HeartbeatData,
    MessageModel,
    ProducerData,
    SubscriptionData,
    decode_heartbeat,
    subscription_data,
)
from tests.support.broker_doubles import Clock, FakeConnection


def subscription(topic: str, version: int = 1, expression: str = "*") -> SubscriptionData:
    return subscription_data(topic, expression, sub_version=version)


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
    """Each member divides the queues by the list of all."""
    registry = ClientRegistry(now_ms=Clock())
    first, second = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")

    assert registry.heartbeat(consumer("a", subscription("T")), first) == ["g"]
    assert registry.heartbeat(consumer("b", subscription("T")), second) == ["g"]
    assert registry.heartbeat(consumer("b", subscription("T")), second) == []
    assert registry.consumer_ids("g") == ["a", "b"]
    assert registry.consumers_of("g") == [first, second]
    assert registry.consumer_ids("other") == []


def test_a_newer_subscription_replaces_the_old_and_a_missing_one_is_dropped() -> None:
    """Filters follow the version, topics the latest heartbeat."""
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


def test_a_client_that_reconnects_replaces_its_connection() -> None:
    """The end of the old connection must not remove its new registration."""
    registry = ClientRegistry(now_ms=Clock())
    old, new = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    registry.heartbeat(consumer("a", subscription("T")), old)
    registry.heartbeat(producer("a", "p"), old)

    assert registry.heartbeat(consumer("a", subscription("T")), new) == ["g"]
    registry.heartbeat(producer("a", "p"), new)
    assert not any(registry.forget(old))
    assert registry.consumers_of("g") == [new]
    assert registry.producers_of("p") == [new]
    assert registry.subscription_of("g", "T") is not None


def test_a_lost_connection_ends_all_its_registrations() -> None:
    """It may have producers and consumers of several groups."""
    registry = ClientRegistry(now_ms=Clock())
    lost, other = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    registry.heartbeat(consumer("a", subscription("T")), lost)
    registry.heartbeat(consumer("a", subscription("T"), group="h"), lost)
    registry.heartbeat(producer("a", "p"), lost)
    registry.heartbeat(consumer("b", subscription("T")), other)

    assert sorted(filter(None, registry.forget(lost))) == ["g", "h"]
    assert registry.consumer_ids("g") == ["b"]
    assert not registry.has_consumers("h")
    assert registry.producers_of("p") == []
    assert not any(registry.forget(lost))


def expired(registry: ClientRegistry) -> list[str]:
    """Remove silent clients; return the consumer groups that changed."""
    return [group for group in registry.expire() if group is not None]


def test_silent_clients_expire_one_by_one() -> None:
    """Ten thousand may vanish at once; those that send a heartbeat meanwhile stay."""
    clock = Clock()
    registry = ClientRegistry(now_ms=clock)
    connections = [FakeConnection(f"127.0.0.1:{number}") for number in range(4)]
    for number, connection in enumerate(connections):
        registry.heartbeat(consumer(f"c{number}", subscription("T")), connection)
        registry.heartbeat(producer(f"c{number}", "p"), connection)
    clock.now += EXPIRY_MS + 1

    steps, left = registry.expire(), []
    for _ in range(4):
        assert next(steps) is None
        left.append(len(registry.producers_of("p")))
    assert left == [3, 2, 1, 0]
    registry.heartbeat(consumer("c3", subscription("T")), connections[3])
    assert [group for group in steps if group] == ["g"]
    assert registry.consumer_ids("g") == ["c3"]


def test_a_client_without_heartbeat_expires() -> None:
    """A client that vanished without closing its connection must not keep its queues."""
    clock = Clock()
    registry = ClientRegistry(now_ms=clock)
    silent, alive = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    registry.heartbeat(consumer("a", subscription("T")), silent)
    registry.heartbeat(producer("a", "p"), silent)
    clock.now += EXPIRY_MS
    registry.heartbeat(consumer("b", subscription("T")), alive)
    assert expired(registry) == []
    clock.now += 1

    assert expired(registry) == ["g"]
    assert registry.consumer_ids("g") == ["b"]
    assert registry.producers_of("p") == []
    assert not any(registry.forget(silent))


@pytest.mark.parametrize("jump_ms", [300_000, 86_400_000])
def test_a_step_of_the_clock_expires_no_client(jump_ms: int) -> None:
    """Nor does a suspension of the process: it has not read the heartbeats yet."""
    clock = Clock()
    registry = ClientRegistry(now_ms=clock)
    for name in ("before", "behind"):
        registry.heartbeat(consumer(name, subscription("T")), FakeConnection())
        registry.heartbeat(producer(name, "p"), FakeConnection("127.0.0.1:3"))
        assert expired(registry) == []
        clock.now += jump_ms if name == "before" else 10_000
    assert expired(registry) == []
    assert registry.consumer_ids("g") == ["before", "behind"]

    for _ in range(13):  # and those that stay silent expire as ever
        clock.now += 10_000
        expired(registry)
    assert registry.consumer_ids("g") == []
    assert registry.producers_of("p") == []


def test_unregistering_ends_one_registration() -> None:
    """A client that stops one consumer keeps its others; an unknown one is no error."""
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


def test_the_hook_is_called_for_every_new_producer() -> None:
    """The transaction checker then sends its due checks."""
    registry = ClientRegistry(now_ms=Clock())
    heard: list[tuple[str, Connection]] = []
    registry.on_producer(lambda group, connection: heard.append((group, connection)))
    old, new = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    for connection in (old, old, new):
        registry.heartbeat(producer("a", "p"), connection)
    registry.heartbeat(consumer("a", subscription("T")), new)

    assert heard == [("p", old), ("p", new)]


def test_only_open_connections_of_producers_are_returned() -> None:
    """A check sent to a closed connection would be lost."""
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
    """Version 2 heartbeats omit subscriptions that the broker knows."""
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
    """Two of them would look the same."""
    registry = ClientRegistry(now_ms=Clock())

    assert registry.heartbeat(consumer("", subscription("T")), FakeConnection()) == []
    assert not registry.has_consumers("g")


def test_too_many_registrations_are_refused() -> None:
    """Known clients continue; a new one gets the reason."""
    registry = ClientRegistry(now_ms=Clock(), registrations_max=2)
    connection = FakeConnection()
    registry.heartbeat(producer("a", "p", "q"), connection)
    with pytest.raises(RequestRefusedError, match="the limit is 2"):
        registry.heartbeat(producer("b", "p"), connection)
    registry.heartbeat(producer("a", "p", "q"), connection)
    list(registry.forget(connection))

    registry.heartbeat(producer("b", "p"), connection)
    assert registry.producers_of("p") == [connection]


def test_every_registration_can_be_listed() -> None:
    """Operators see the connected clients."""
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
    """It may serve other groups; checks of this group must not be sent there."""
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


def test_a_producer_that_expired_or_moved_has_left_its_old_connection() -> None:
    """As long as the connection itself is open."""
    clock = Clock()
    registry = ClientRegistry(now_ms=clock)
    silent, old, new = (FakeConnection(f"127.0.0.1:{port}") for port in (1, 2, 3))
    registry.heartbeat(producer("a", "g"), silent)
    clock.now += EXPIRY_MS + 1
    registry.heartbeat(producer("b", "g"), old)
    expired(registry)
    registry.heartbeat(producer("b", "g"), new)
    assert [registry.has_left("g", one) for one in (silent, old, new)] == [True, True, False]


def test_groups_left_are_forgotten_with_their_connection_and_are_bounded() -> None:
    """A client that invents group names cannot fill the memory."""
    registry = ClientRegistry(now_ms=Clock())
    connection = FakeConnection()
    for number in range(LEFT_GROUPS_MAX + 10):
        registry.heartbeat(producer("a", f"g{number}"), connection)
        registry.unregister("a", f"g{number}", None)
    assert registry.has_left(f"g{LEFT_GROUPS_MAX + 5}", connection)
    # Nothing public shows how many groups are remembered.
    assert sum(map(len, registry._left.values())) <= LEFT_GROUPS_MAX

    connection.closed = True
    list(registry.forget(connection))
    assert not registry._left


def filters(**topics: str) -> list[SubscriptionData]:
    return [subscription_data(topic, text, sub_version=1) for topic, text in topics.items()]


def differences(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines about subscriptions."""
    names = ("unequal_subscriptions", "subscriptions_equal", "consumer_refused")
    return [line for line in caplog.messages if any(name in line for name in names)]


def test_members_that_subscribe_differently_are_logged_once_per_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rolling deployment logs one line at its begin and one at its end."""
    caplog.set_level(logging.INFO)
    registry = ClientRegistry(now_ms=Clock())
    old, new = filters(T="a || b"), filters(T="b||a||c", U="*")
    for _ in range(3):
        for client_id in ("old-1", "old-2"):
            registry.heartbeat(consumer(client_id, *old), FakeConnection())
    assert differences(caplog) == []

    for _ in range(3):
        for client_id in ("old-1", "new-1", "old-2", "new-2"):
            wanted = new if client_id.startswith("new") else old
            registry.heartbeat(consumer(client_id, *wanted), FakeConnection())
    assert differences(caplog) == [
        (
            "event=unequal_subscriptions group=g topic=T client=new-1 filter='a || b || c' "
            "other_client=old-1 other_filter='a || b'"
        )
    ]

    registry.unregister("old-1", None, "g")
    assert len(differences(caplog)) == 1
    registry.unregister("old-2", None, "g")
    assert differences(caplog)[1:] == ["event=subscriptions_equal group=g"]


def test_a_member_that_subscribes_to_other_topics_differs_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It gets queues of topics that it does not read, with every strategy of the client."""
    registry = ClientRegistry(now_ms=Clock())
    registry.heartbeat(consumer("a", *filters(T="*", U="*")), FakeConnection())
    short = consumer("b", *filters(T="*"))
    registry.heartbeat(short, FakeConnection("127.0.0.1:2"))

    found = registry.difference(short)
    assert found == Difference("g", "U", "b", None, "a", "*")
    assert "b to nothing, a to '*'" in str(found)
    assert len(differences(caplog)) == 1
    assert registry.subscription_metrics() == {
        "groups": 1,
        "members": 2,
        "groups_unequal": 1,
        "members_refused": 0,
    }


@pytest.mark.parametrize("ends", ["left", "lost", "expired", "changed"])
def test_a_filter_is_dropped_with_its_last_member(ends: str) -> None:
    """Until then the newest is used; a canary that has left must not filter for the others."""
    clock = Clock()
    registry = ClientRegistry(now_ms=clock)
    stays, canary = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    usual = consumer("a", subscription("T", 5, "created"), subscription("%RETRY%g"))
    registry.heartbeat(consumer("b", subscription("T", 9, "paid")), canary)
    registry.heartbeat(usual, stays)
    wanted = registry.subscription_of("g", "T")
    assert wanted is not None
    assert wanted.sub_string == "paid"

    if ends == "left":
        registry.unregister("b", None, "g")
    elif ends == "lost":
        list(registry.forget(canary))
    elif ends == "expired":
        for _ in range(20):
            clock.now += 10_000
            registry.heartbeat(usual, stays)
            expired(registry)
    else:
        registry.heartbeat(consumer("b", subscription("T", 8, "created")), canary)
    left = registry.subscription_of("g", "T")
    assert left is not None
    assert (left.sub_string, left.sub_version) == ("created", 9)
    assert registry.subscription_of("g", "%RETRY%g") is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [("a||b", " b || a "), ("*", ""), ("*", "||"), ("a", "a || a")],
)
def test_filters_that_mean_the_same_are_equal(one: str, other: str) -> None:
    """Java, Go and Python write them in different ways; retry topics are ignored."""
    registry = ClientRegistry(now_ms=Clock())
    registry.heartbeat(consumer("a", decoded("T", one)), FakeConnection())
    second = consumer("b", decoded("T", other), decoded("%RETRY%g", "*"))
    registry.heartbeat(second, FakeConnection("127.0.0.1:2"))

    assert registry.difference(second) is None


def decoded(topic: str, expression: str) -> SubscriptionData:
    """Return a subscription as the broker decodes it from a heartbeat."""
    body = {
        "clientID": "x",
        "consumerDataSet": [
            {
                "groupName": "g",
                "subscriptionDataSet": [{"topic": topic, "subString": expression}],
            }
        ],
    }
    (read,) = decode_heartbeat(json.dumps(body).encode()).consumer_data_set
    return read.subscription_data_set[0]


def test_a_reconnect_or_a_short_heartbeat_changes_no_subscription(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither is logged."""
    registry = ClientRegistry(now_ms=Clock())
    registry.heartbeat(consumer("a", *filters(T="a")), FakeConnection())
    whole = consumer("b", *filters(T="b"), fingerprint=7)
    registry.heartbeat(whole, FakeConnection("127.0.0.1:2"))
    assert len(differences(caplog)) == 1

    registry.heartbeat(whole, FakeConnection("127.0.0.1:3"))
    short = consumer("b", fingerprint=7, without_sub=True)
    registry.heartbeat(short, FakeConnection("127.0.0.1:3"))
    assert registry.difference(short) == registry.difference(whole) is not None
    assert len(differences(caplog)) == 1


def test_a_later_member_that_differs_is_refused_if_configured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may join as soon as the others have left."""
    registry = ClientRegistry(now_ms=Clock(), refuse_unequal=True)
    first, second = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    registry.heartbeat(consumer("a", *filters(T="a")), first)
    late = consumer("b", *filters(T="b"))
    for _ in range(3):
        assert registry.heartbeat(late, second) == []

    assert registry.consumer_ids("g") == ["a"]
    found = registry.difference(late)
    assert found == Difference("g", "T", "b", "b", "a", "a", refused=True)
    assert registry.refusal("g", second) == found
    assert registry.refusal("g", first) is None
    assert [line.split()[0] for line in differences(caplog)] == ["event=consumer_refused"]
    wanted = registry.subscription_of("g", "T")
    assert wanted is not None
    assert wanted.sub_string == "a"

    registry.unregister("a", None, "g")
    assert registry.heartbeat(late, second) == ["g"]
    assert registry.difference(late) is None
    assert registry.refusal("g", second) is None


def test_a_member_that_changes_its_subscription_is_refused_unless_it_is_alone() -> None:
    """The later heartbeat counts as the later member; the others get its queues."""
    registry = ClientRegistry(now_ms=Clock(), refuse_unequal=True)
    first, second = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    registry.heartbeat(consumer("a", *filters(T="a")), first)
    assert registry.heartbeat(consumer("a", *filters(T="b")), first) == []
    registry.heartbeat(consumer("b", *filters(T="b")), second)

    assert registry.heartbeat(consumer("b", *filters(T="c")), second) == ["g"]
    assert registry.consumer_ids("g") == ["a"]
    assert registry.heartbeat(consumer("b", *filters(T="b")), second) == ["g"]
    assert registry.consumer_ids("g") == ["a", "b"]


def test_the_memory_for_filters_is_bounded() -> None:
    """Clients that invent filters cannot fill it, and still get the difference."""
    registry = ClientRegistry(now_ms=Clock(), refuse_unequal=False)
    for number in range(3 * VARIANTS_MAX):
        data = consumer(f"c{number}", *filters(T=f"{number}" * 1000))
        registry.heartbeat(data, FakeConnection(f"127.0.0.1:{number}"))
        found = registry.difference(data)
        assert (found is None) == (number == 0)
        if found is not None:
            assert len(str(found)) < 1_000
    group = registry.consumer_groups["g"]
    assert len(group.variants) == VARIANTS_MAX + 1

    refusing = ClientRegistry(now_ms=Clock(), refuse_unequal=True)
    refusing.heartbeat(consumer("a", *filters(T="a")), FakeConnection())
    for number in range(2 * REFUSED_MAX):
        refusing.heartbeat(consumer(f"c{number}", *filters(T="b")), FakeConnection())
    assert len(refusing.consumer_groups["g"].refused) == REFUSED_MAX


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["a", "b", "a||b", None])), max_size=30
    )
)
def test_a_difference_is_reported_exactly_while_there_is_one(
    steps: list[tuple[int, str | None]],
) -> None:
    """For any order of joining, changing and leaving."""
    registry = ClientRegistry(now_ms=Clock())
    model: dict[str, str] = {}
    for number, wanted in steps:
        client_id = f"c{number}"
        if wanted is None:
            registry.unregister(client_id, None, "g")
            model.pop(client_id, None)
            continue
        data = consumer(client_id, *filters(T=wanted))
        registry.heartbeat(data, FakeConnection())
        model[client_id] = wanted
        found = registry.difference(data)
        assert (found is not None) == (len(set(model.values())) > 1)
        if found is not None:
            assert model[found.other_client_id] != wanted


# -- client ids


def _closed(connection: FakeConnection, registry: ClientRegistry) -> FakeConnection:
    connection.closed = True
    list(registry.forget(connection))
    return connection


@pytest.mark.parametrize("beat", [consumer("id", subscription("T")), producer("id", "g")])
def test_two_clients_of_one_id_are_reported_to_both_and_once_in_the_log(
    beat: HeartbeatData, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if they are three; a warning ends with the connection of the other."""
    registry = ClientRegistry(now_ms=Clock())
    clients = [FakeConnection(f"127.0.0.1:{number}") for number in range(1, 4)]
    for connection in clients:
        registry.heartbeat(beat, connection)
        assert registry.shared_id(beat) is None  # a client may have reconnected
    for _ in range(2):
        for connection in clients:
            registry.heartbeat(beat, connection)
            warning = registry.shared_id(beat)
            assert warning is not None
            assert connection.name in warning
    assert [one.message.split()[0] for one in caplog.records] == ["event=client_id_shared"]
    _closed(clients[0], registry)
    _closed(clients[1], registry)
    registry.heartbeat(beat, clients[2])
    assert registry.shared_id(beat) is None


def test_a_client_with_several_connections_is_one_client(caplog: pytest.LogCaptureFixture) -> None:
    """A reconnect while the old connection seems open, and one group per connection."""
    registry = ClientRegistry(now_ms=Clock())
    half_open, second, third = [FakeConnection(f"127.0.0.1:{number}") for number in range(1, 4)]
    shown = []
    for connection in (half_open, second, second, third, third):
        for beat in (consumer("id", subscription("T")), producer("id", "g")):
            registry.heartbeat(beat, connection)
            shown.append(registry.shared_id(beat))
    for _ in range(3):
        for group, connection in (("a", half_open), ("b", second), ("c", third)):
            beat = consumer("id", subscription("T"), group=group)
            registry.heartbeat(beat, connection)
            shown.append(registry.shared_id(beat))
    assert set(shown) == {None}
    assert not caplog.records


def test_an_id_belongs_to_the_principal_of_its_open_connections() -> None:
    """Also on a connection whose registration another one of the same client has replaced."""
    registry = ClientRegistry(now_ms=Clock())
    first, second, other = [FakeConnection(f"127.0.0.1:{number}") for number in range(1, 4)]
    for connection in (first, second):
        assert not registry.belongs_to_other("id", "one", connection)
        registry.heartbeat(producer("id", "g"), connection, "one")
    _closed(second, registry)

    assert registry.belongs_to_other("id", "two", other)
    assert not registry.belongs_to_other("id", "two", first)  # its key was changed
    assert not registry.belongs_to_other("id", "one", other)
    _closed(first, registry)
    assert not registry.belongs_to_other("id", "two", other)


def test_the_ids_of_one_connection_that_are_kept_are_bounded() -> None:
    """A principal that invents ids takes no memory; the latest are kept."""
    registry = ClientRegistry(now_ms=Clock())
    connection, other = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    for number in range(3 * CLIENT_IDS_MAX):
        registry.heartbeat(producer(f"id{number}", "g"), connection, "one")
        registry.unregister(f"id{number}", "g", None)
    kept = [
        number
        for number in range(3 * CLIENT_IDS_MAX)
        if registry.belongs_to_other(f"id{number}", "two", other)
    ]
    assert kept == list(range(2 * CLIENT_IDS_MAX, 3 * CLIENT_IDS_MAX))
