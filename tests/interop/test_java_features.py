"""What producers and consumers of the Java clients may choose, against our broker.

`test_java_client.py` has what every program does; here is the rest of docs/compatibility.md's
table of features, with the newest client and the last of the 4.x series.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from halfmq.client import ClientConfig, blocking
from tests.support.features import feature
from tests.support.java_clients import TOOLS, JavaMissingError, Kind, Line, class_path
from tests.support.java_scenarios import Java, bodies, by_body, java_scenarios, of

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(
        any(shutil.which(tool) is None for tool in TOOLS),
        reason=f"needs {', '.join(TOOLS)}; the Java clients are NOT tested",
    ),
]

SCENARIOS = (
    "compress java-compressed",
    *("queues", "limits", "created", "namespaces", "vip"),
)
SETTINGS = {"messageDelayLevel": "1s 1s 1s 1s 1s 1s"}


@pytest.fixture(scope="module", params=["5.3.3", "4.9.8"])
def java(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Java]:
    """A broker and a JVM, where all scenarios have been started."""
    kind = Kind(request.param)
    try:
        class_path(kind.version)
    except JavaMissingError as missing:
        pytest.skip(f"{missing}; the Java client {kind.version} is NOT tested")
    home = tmp_path_factory.mktemp("java")
    with java_scenarios(kind, home, SCENARIOS, **SETTINGS) as running:
        yield running


def _queues_of(lines: list[Line], prefix: str) -> list[int]:
    return [line["queue"] for line in of(lines, "sent") if line["body"].startswith(prefix)]


@feature("compressed bodies: lz4, zstd", "Java 5.3.3")
def test_bodies_arrive_whole_however_they_are_compressed(java: Java) -> None:
    """The flags say how, and they come back as they were sent."""
    lines = java.seen("compress")

    kinds = {"ZLIB": 3, "LZ4": 1, "ZSTD": 2} if java.kind.version == "5.3.3" else {"ZLIB": 3}
    consumed = {line["tags"]: line for line in of(lines, "consumed")}
    assert {name: line["sys_flag"] >> 8 for name, line in consumed.items()} == kinds
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
