"""What producers and consumers of the Java clients may choose, against our broker.

`test_java_client.py` has what every program does; here is the rest of docs/compatibility.md's
table of features, with the newest client and the last of the 4.x series.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from halfmq.client import ClientConfig, Message, blocking
from halfmq.client.testing import broker_process
from halfmq.remoting.codes import ResponseCode
from tests.support.features import feature
from tests.support.java_clients import Kind, Line, class_path, java_client
from tests.support.java_scenarios import Java, bodies, by_body, java_scenarios, of

pytestmark = pytest.mark.campaign

VERSIONS = ("5.3.3", "4.9.8")
SCENARIOS = (
    "compress java-compressed",
    *("queues", "limits", "created", "namespaces", "vip"),
    *("positions", "strategies", "orderly_dead", "leaving"),
)
SETTINGS = {
    "messageDelayLevel": "1s 1s 1s 1s 1s 1s",
    "transactionTimeOut": 3000,
    "transactionCheckInterval": 2000,
}
BROKER_NAME = "room-a@broker"
"""As AllocateMessageQueueByMachineRoom wants it."""


def _kind(version: str) -> Kind:
    class_path(version)
    return Kind(version)


@pytest.fixture(scope="module", params=VERSIONS)
def java(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Java]:
    """A broker and a JVM, where all scenarios have been started."""
    kind = _kind(request.param)
    home = tmp_path_factory.mktemp("java")
    scenarios = [
        *SCENARIOS,
        *(["assigned", "timers", "popping", "pulling_poppers"] if kind.version == "5.3.3" else []),
    ]
    with java_scenarios(kind, home, scenarios, brokerName=BROKER_NAME, **SETTINGS) as running:
        yield running


def _queues_of(lines: list[Line], prefix: str) -> list[int]:
    return [line["queue"] for line in of(lines, "sent") if line["body"].startswith(prefix)]


@feature("delays of any time, and recall", "Java 5.3.3")
def test_a_message_comes_at_its_time_unless_it_is_recalled(java: Java) -> None:
    """Not before; the handle of the answer recalls it, unless it is too late."""
    if java.kind.version != "5.3.3":
        pytest.skip("this client has no such calls")
    lines = java.seen("timers")

    consumed = by_body(of(lines, "consumed"))
    assert set(consumed) == {"now", "at", "after"}
    assert consumed["at"]["store_ms"] >= of(lines, "due")[0]["at"]
    assert consumed["after"]["store_ms"] - consumed["after"]["born_ms"] >= 777
    (recalled,) = of(lines, "recalled")
    assert recalled["id"] == recalled["sent"]
    assert of(lines, "late")[0]["code"] == ResponseCode.ILLEGAL_OPERATION


@feature("message by message (pop)", "Java 5.3.3")
def test_members_that_pop_share_every_queue(java: Java) -> None:
    """More members than queues; what one of them fails comes again, and nothing else does."""
    if java.kind.version != "5.3.3":
        pytest.skip("consumers pop since 5.0")
    lines = of(java.seen("popping"), "consumed")

    times = Counter(line["body"] for line in lines)
    assert times == {f"p-{number}": 2 if number % 10 == 0 else 1 for number in range(24)}
    assert len({line["consumer"] for line in lines}) > 1
    again = {line["body"]: line["times"] for line in lines}
    assert {again[name] for name in ("p-0", "p-10", "p-20")} == {1}


@feature("message by message (pop)", "Java 5.3.3")
def test_a_lite_pull_consumer_of_a_group_that_pops_pulls(java: Java) -> None:
    """It balances by itself whatever the mode of its group; each message comes once."""
    if java.kind.version != "5.3.3":
        pytest.skip("consumers pop since 5.0")
    lines = java.seen("pulling_poppers")

    polled = Counter(line["body"] for line in of(lines, "polled"))
    assert polled == {f"l-{number}": 1 for number in range(8)}
    assert sum(line["queue_offset"] for line in of(lines, "committed")) == 8


@feature("compressed bodies: lz4, zstd")
def test_bodies_arrive_whole_however_they_are_compressed(java: Java) -> None:
    """The flags say how, and they come back as they were sent."""
    lines = java.seen("compress")

    consumed = {line["tags"]: line for line in of(lines, "consumed")}
    kinds = {name: line["sys_flag"] >> 8 for name, line in consumed.items()}
    assert kinds == {"ZLIB": 3, "LZ4": 1, "ZSTD": 2}
    assert {line["crc"] for line in [*of(lines, "made"), *consumed.values()]} == {
        of(lines, "made")[0]["crc"]
    }


def test_our_consumer_reads_all_of_them(java: Java) -> None:
    """By what `halfmq[compression]` installs."""
    count = len(of(java.seen("compress"), "sent"))
    config = ClientConfig(namesrv=java.broker.address)
    with blocking.Consumer(
        "python-compressed", {"java-compressed": "*"}, start_from="first", config=config
    ) as consumer:
        for _ in range(count):
            message = consumer.receive(30)
            assert message is not None
            assert message.body == b"a" * 6000
            assert len(message.record.body) < 100  # as the client packed it


@feature("selected queue")
def test_messages_go_to_the_queue_that_was_chosen(java: Java) -> None:
    """By the caller; otherwise to one after the other."""
    lines = java.seen("queues")

    assert _queues_of(lines, "chosen") == [0, 1, 2, 3]
    assert sorted(_queues_of(lines, "any")) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {line["body"]: line["queue"] for line in of(lines, "consumed")} == {
        line["body"]: line["queue"] for line in of(lines, "sent")
    }


@feature("ordered by key")
def test_messages_with_one_key_stay_in_order(java: Java) -> None:
    """A hash of the key chooses their queue, and there they lie in the order of the sends."""
    lines = java.seen("queues")

    for key in ("keyed-0", "keyed-1"):
        sent = [line for line in of(lines, "sent") if line["body"].startswith(key)]
        assert len({line["queue"] for line in sent}) == 1
        offsets = [line["queue_offset"] for line in sent]
        assert offsets == sorted(offsets)


@feature("messages too large or illegal are refused")
def test_what_is_too_large_is_refused_and_the_connection_goes_on(java: Java) -> None:
    """With the code that clients know; bad topics are refused by the client itself."""
    lines = java.seen("limits")

    assert bodies(of(lines, "sent")) == ["largest", "after"]
    assert {line["what"]: line["code"] for line in of(lines, "refused")} == {
        "body": 13,
        "batch": 13,
        "system": -1,
        "name": -1,
    }


@feature("topics created by their first message")
def test_a_new_topic_is_made_after_its_template(java: Java) -> None:
    """With as many queues as the client asks for and the template has, and its rights."""
    lines = java.seen("created")

    made = {
        line["topic"]: (line["read"], line["write"], line["perm"]) for line in of(lines, "topic")
    }
    assert made == {
        "java-created-few-topic": (2, 2, 6),
        "java-created-many-topic": (8, 8, 6),  # TBW102 has defaultTopicQueueNums
        "java-created-after-topic": (3, 3, 6),
    }


@feature("namespaces")
def test_namespaces_keep_topics_and_groups_apart(java: Java) -> None:
    """Those of the same names; a refused message comes again within its namespace."""
    lines = java.seen("namespaces")

    consumed = of(lines, "consumed")
    assert [(line["body"], line["times"]) for line in consumed] == [
        ("red", 0),
        ("red", 1),
        ("blue", 0),
        ("blue", 1),
    ]
    assert {line["topic"] for line in consumed} == {"java-namespaces"}


@feature("VIP channel")
def test_the_vip_channel_leads_to_the_same_topics(java: Java) -> None:
    """Two ports below; what is sent there, all consume."""
    lines = java.seen("vip")

    assert by_body(of(lines, "consumed"))["vip"]["id"] == by_body(of(lines, "sent"))["vip"]["id"]


@feature("start positions: in a new topic, the first message whatever is set")
def test_a_new_group_begins_where_it_says(java: Java) -> None:
    """Where nothing is gone yet it gets all, as at RocketMQ; also of a topic that was deleted."""
    lines = java.seen("positions")

    begun: dict[str, set[str]] = {}
    for line in of(lines, "consumed"):
        begun.setdefault(line["consumer"], set()).add(line["body"].split("-")[0])
    positions = ("FIRST_OFFSET", "LAST_OFFSET", "TIMESTAMP")
    assert begun == {f"CONSUME_FROM_{one}": {"early", "late", "new"} for one in positions}


@feature("allocation strategies: averagely, by circle, consistent hash, by configuration, by room")
def test_queues_are_shared_by_every_strategy(java: Java) -> None:
    """They run in the client, and need the same answers from the broker for all members."""
    lines = java.seen("strategies")

    shares = _shares_of(lines)
    assert sorted(shares["averagely"]) == [[0, 1], [2, 3]]
    assert sorted(shares["circle"]) == [[0, 2], [1, 3]]
    assert shares["config"] == [[3], [0, 1, 2]]
    assert sorted(shares["room"]) == [[0, 1], [2, 3]]
    assert shares["nearby"] == [[0, 2], [1, 3]]


@feature("queues assigned by the broker (`setClientRebalance(false)`)", "Java 5.3.3")
def test_the_broker_assigns_queues_to_consumers_that_ask(java: Java) -> None:
    """As consumers share them out themselves."""
    if java.kind.version != "5.3.3":
        pytest.skip("consumers ask since 5.0")
    shares = _shares_of(java.seen("assigned"))

    assert {name: sorted(members) for name, members in shares.items()} == {
        "averagely": [[0, 1], [2, 3]],
        "circle": [[0, 2], [1, 3]],
    }


def _shares_of(lines: list[Line]) -> dict[str, list[list[int]]]:
    """By strategy, the queues of each member; together they have all."""
    shares: dict[str, list[list[int]]] = {}
    for line in of(lines, "owns"):
        shares.setdefault(line["strategy"], []).append(json.loads(line["queues"]))
    for strategy, members in shares.items():
        assert sorted(queue for one in members for queue in one) == [0, 1, 2, 3], strategy
    return shares


@feature("retry and dead letters")
def test_an_orderly_consumer_gives_a_message_up_after_its_limit(java: Java) -> None:
    """Until then its queue waits; afterwards the next one comes."""
    lines = java.seen("orderly_dead")

    consumed = [line for line in of(lines, "consumed") if line["body"] != "founding"]
    assert [(line["body"], line["times"]) for line in consumed] == [
        ("before", 0),
        ("never", 0),
        ("never", 1),
        ("never", 2),
        ("after", 0),
    ]
    assert [line["body"] for line in of(lines, "dead")] == ["never"]


@feature("a member is killed: the others take over")
@pytest.mark.parametrize(("kind", "seconds"), [("concurrent", 10), ("orderly", 60)])
def test_the_others_take_over_from_one_that_is_killed(
    java: Java, kind: str, seconds: float
) -> None:
    """Every message is consumed, and by whom has the queue in order.

    Concurrent ones at once, because the broker tells them; orderly ones when the locks of the
    killed one have expired, 30 s after it renewed them, and they look again.
    """
    topic, group = f"java-killed-{kind}", f"java-killed-{kind}-consumer"
    client = java.client
    config = ClientConfig(namesrv=java.broker.address)
    with blocking.Producer("python-killing", config=config) as producer:
        _send_in_order(producer, topic, "founding")
        survivor = client.start("member", topic, group, kind, "4,2,4")
        client.said(survivor, "owns", count=4)
        with java_client(java.kind, java.broker.address, java.home / f"killed-{kind}") as victim:
            killed = victim.start("member", topic, group, kind, "2,99")
            victim.said(killed, "owns", count=2)
            client.said(survivor, "owns", count=2)
            _send_in_order(producer, topic, "shared")
            victim.kill()
        begin = time.monotonic()
        _send_in_order(producer, topic, "after")
        consumed = client.until(survivor, "owns", count=4)
        assert time.monotonic() - begin < seconds
        _send_in_order(producer, topic, "last")
        consumed = of(consumed + client.lines(survivor), "consumed")

    assert {f"{word}-{number}" for word in ("after", "last") for number in range(8)} <= {
        line["body"] for line in consumed
    }
    if kind == "orderly":
        for queue in range(4):
            offsets = [line["queue_offset"] for line in consumed if line["queue"] == queue]
            assert offsets == list(range(offsets[0], offsets[-1] + 1))


@feature("transactions: another producer of the group is asked")
def test_the_others_are_asked_about_what_a_producer_left_undecided(java: Java) -> None:
    """With the whole message; its decision counts."""
    lines = java.seen("leaving")

    asked = of(lines, "checked")
    assert set(bodies(asked)) == {"unknown-commit", "unknown-rollback"}
    ids = {body: line["id"] for body, line in by_body(of(lines, "decided")).items()}
    for line in asked:
        assert (line["topic"], line["tags"], line["keys"]) == ("java-leaving", "T", line["body"])
        assert (line["colour"], line["transaction_id"]) == ("grün-€", ids[line["body"]])
    assert sorted(bodies(of(lines, "consumed"))) == ["hello", "unknown-commit"]


@feature("the broker is killed twice while members come and go: at least once, in order")
@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_is_lost_when_the_broker_is_killed(version: str, tmp_path: Path) -> None:
    """Every acknowledged message is consumed, those of orderly groups in order."""
    flows = {kind: f"flow java-{kind} {kind} 400" for kind in ("concurrent", "orderly")}
    with java_scenarios(_kind(version), tmp_path, (), **SETTINGS) as java:
        runs = {kind: java.client.start(*words.split()) for kind, words in flows.items()}
        lines: dict[str, list[Line]] = {kind: [] for kind in flows}
        for count in (100, 250):
            for kind, run in runs.items():
                lines[kind] += java.client.until(run, "sent", count=count)
            java.broker.kill()
            java.broker.start()
        for kind, run in runs.items():
            lines[kind] += java.client.lines(run)

    for kind, said in lines.items():
        first = list(dict.fromkeys(bodies(of(said, "consumed"))))  # it may come again
        numbers = [int(body[2:]) for body in first if body != "founding"]
        assert sorted(numbers) == list(range(400))
        if kind == "orderly":
            for queue in range(4):
                own = [number for number in numbers if number % 4 == queue]
                assert own == sorted(own)


def _send_in_order(producer: blocking.Producer, topic: str, word: str) -> None:
    """Send two messages to each of four queues."""
    for number in range(8):
        body = f"{word}-{number}".encode()
        producer.send(Message(topic, body, tags="T"), order_key=f"key-{number % 4}")


def test_java_reads_what_our_producer_compresses(tmp_path: Path) -> None:
    """With each compression that a setting names; Java reads LZ4 and ZSTD since 5.0."""
    class_path("5.3.3")
    sent = {kind: kind.encode() * 4000 for kind in ("zlib", "lz4", "zstd")}
    with (
        broker_process(tmp_path / "broker") as broker,
        java_client(Kind("5.3.3"), broker.address, tmp_path / "client") as client,
    ):
        with blocking.Admin(namesrv=broker.address) as admin:
            admin.create_topic("packed")
        consuming = client.start("consume", "packed", "*", len(sent))
        for kind, body in sent.items():
            config = ClientConfig(compression=kind)  # type: ignore[arg-type]
            with blocking.Producer("packers", namesrv=broker.address, config=config) as producer:
                producer.send(blocking.Message("packed", body, tags=kind))
        lines = of(client.lines(consuming), "consumed")
    found = {line["tags"]: (line["sys_flag"] >> 8, line["crc"]) for line in lines}
    kinds = {"zlib": 0, "lz4": 1, "zstd": 2}  # zlib without its number, as clients before 5.0
    assert found == {kind: (kinds[kind], crc32(body)) for kind, body in sent.items()}
