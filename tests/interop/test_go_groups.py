"""The Go client in groups with others, and what an operator asks of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from halfmq.client import Message
from halfmq.client.blocking import Admin, Consumer, Producer
from halfmq.client.testing import broker_process
from tests.support.features import feature
from tests.support.go_client import GoProcess, go_client, going
from tests.support.group_members import wait_for_shares
from tests.support.java_clients import Kind, class_path, java_client
from tests.support.mqadmin import Mqadmin, mqadmin
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


BODIES = ["1", "2", "3"]


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mqadmin]:
    """A broker, and mqadmin 5.3.3 beside it."""
    go_client()
    with ExitStack() as stack:
        home = tmp_path_factory.mktemp("operated")
        yield mqadmin(stack, "5.3.3", home, traceTopicEnable="true")


@feature("message traces: sends, decisions, consumption")
def test_an_operator_is_shown_its_traces(tool: Mqadmin, tmp_path: Path) -> None:
    """Who sent a message, and which group consumed it."""
    with going(tool.broker.address, tmp_path, "traced") as client:
        sent = client.until("sent")[-1]
        client.until("consumed", id=sent["id"])
        shown: list[str] = []

        def both() -> bool:
            shown[:] = tool.attempt("queryMsgTraceById", "-i", sent["id"])
            return {"Pub", "Sub"} <= {line.split()[0] for line in shown if line}

        wait_until(both, "the traces of the send and of its consumption are shown")

    rows = {line.split()[0]: line.split() for line in shown if line.startswith(("Pub", "Sub"))}
    assert rows["Pub"][1] == "go-traced-producer"
    assert rows["Pub"][-1] == "success"
    assert rows["Sub"][1] == "go-traced-consumer"
    assert rows["Sub"][-1] == "success"


@feature("a running consumer goes to the offsets to which its group is reset")
@pytest.mark.parametrize(
    ("kind", "in_broker"),
    [
        ("concurrent", True),
        ("concurrent", False),
        ("orderly", True),
        ("orderly", False),
        ("broadcasting", True),
    ],
)
def test_a_running_consumer_starts_again_from_where_it_is_reset(
    tool: Mqadmin, tmp_path: Path, *, kind: str, in_broker: bool
) -> None:
    """Whether the broker has the offset or tells the consumer: it pauses ten seconds by itself."""
    with consuming(tool, tmp_path, f"go-reset-{kind}-{in_broker}", kind) as (member, topic):
        if kind != "broadcasting":  # its offsets are its own
            with Admin(namesrv=tool.broker.address) as admin:
                wait_until(lambda: committed(admin, topic) == len(BODIES), "it commits")
        reset_in_broker(tool, in_broker=in_broker)
        shown = tool.run("resetOffsetByTime", "-g", topic, "-t", topic, "-s", "0")
        assert shown[-1].split() == ["broker-a", "0", "0"], shown
        assert consumed(member) == BODIES


def test_a_broadcasting_consumer_is_not_told_to_go_elsewhere(tool: Mqadmin, tmp_path: Path) -> None:
    """The broker has no offsets of its group, and says that there is no such group."""
    with consuming(tool, tmp_path, "go-not-reset", "broadcasting") as (_, topic):
        reset_in_broker(tool, in_broker=False)
        refused = tool.failure("resetOffsetByTime", "-g", topic, "-t", topic, "-s", "0")
        assert f"THe consumer group <{topic}> not exist" in refused


@contextmanager
def consuming(tool: Mqadmin, home: Path, topic: str, kind: str) -> Iterator[tuple[GoProcess, str]]:
    """A consumer that has had all messages of a topic of one queue; its group has that name too."""
    tool.run("updateTopic", *tool.at, "-t", topic, "-r", "1", "-w", "1")
    with going(tool.broker.address, home, "member", topic, kind) as member:
        with Producer("resetting", namesrv=tool.broker.address) as producer:
            for body in BODIES:
                producer.send(Message(topic, body.encode()))
        assert consumed(member) == BODIES
        yield member, topic


def consumed(member: GoProcess) -> list[str]:
    """Return the bodies of the messages that it has next."""
    return sorted(member.until("consumed")[-1]["body"] for _ in BODIES)


def committed(admin: Admin, group: str) -> int:
    return sum(one.offset for one in admin.offsets(group, group))


def reset_in_broker(tool: Mqadmin, *, in_broker: bool) -> None:
    setting = "-k", "useServerSideResetOffset", "-v", str(in_broker).lower()
    tool.run("updateBrokerConfig", *tool.at, *setting)
