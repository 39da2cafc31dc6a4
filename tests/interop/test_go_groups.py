"""Groups of the Go client, rocketmq-client-go v2.1.2, unmodified: who has which queues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from halfmq.client.blocking import Admin, Consumer
from halfmq.client.testing import broker_process
from tests.support.features import feature
from tests.support.go_client import go_client, going
from tests.support.group_members import wait_for_shares
from tests.support.java_clients import Kind, class_path, java_client
from tests.support.patience import wait_until

pytestmark = pytest.mark.campaign

TOPIC = "orders"
ROOMS = ("east@a", "west@b")


@pytest.fixture
def rooms(tmp_path: Path) -> Iterator[str]:
    """The name server of two brokers, each in a room of its own with four queues of the topic."""
    go_client()
    with ExitStack() as running:
        settings: dict[str, str] = {}
        for name in ROOMS:
            broker = broker_process(
                tmp_path / name,
                brokerName=name,
                registrationAddresses="127.0.0.1",
                **settings,
            )
            address = running.enter_context(broker).address
            settings.setdefault("namesrvAddr", address)
        namesrv = settings["namesrvAddr"]
        with Admin(namesrv=namesrv) as admin:

            def on_both() -> bool:
                admin.create_topic(TOPIC, queues=4)
                return {one.queue.broker_name for one in admin.queues(TOPIC)} == set(ROOMS)

            wait_until(on_both, "both brokers have the topic")
        yield namesrv


@feature("allocation strategies: averagely, by circle, consistent hash, by configuration, by room")
@pytest.mark.parametrize("room", ["east", "west"])
def test_members_share_by_machine_room(rooms: str, tmp_path: Path, room: str) -> None:
    """A fault of this client: they share the queues of the room whose name sorts first.

    It counts the queues of the wanted room, and takes as many from the start of all queues.
    """
    member = (rooms, tmp_path, "member", TOPIC, "concurrent", room)
    with going(*member), going(*member), Admin(namesrv=rooms) as admin:
        shares = wait_for_shares(admin, TOPIC, TOPIC, [2, 2])

    queues = sorted(queue for own in shares.values() for queue in own)
    assert [(one.broker_name, one.queue_id) for one in queues] == [
        ("east@a", queue) for queue in range(4)
    ]


JAVA = Kind("5.3.3", ("-Dpatience=600",))


@feature("one group with members of several clients", "Go 2.1.2", "Java 5.3.3")
def test_members_of_three_languages_own_each_queue_once(tmp_path: Path) -> None:
    """While they join one after the other, and when one is killed."""
    go_client()
    class_path(JAVA.version)
    with ExitStack() as running:
        namesrv = running.enter_context(broker_process(tmp_path / "broker")).address
        admin = running.enter_context(Admin(namesrv=namesrv))
        admin.create_topic(TOPIC, queues=8)

        def check_shares(*sizes: int) -> None:
            shares = wait_for_shares(admin, TOPIC, TOPIC, list(sizes))
            queues = sorted(queue.queue_id for own in shares.values() for queue in own)
            assert queues == list(range(8))

        running.enter_context(Consumer(TOPIC, {TOPIC: "*"}, namesrv=namesrv))
        check_shares(8)
        go = running.enter_context(going(namesrv, tmp_path, "member", TOPIC, "concurrent"))
        check_shares(4, 4)
        java = running.enter_context(java_client(JAVA, namesrv, tmp_path / "java"))
        java.start("member", TOPIC, TOPIC, "concurrent", "99")
        check_shares(2, 3, 3)
        go.kill()
        check_shares(4, 4)
