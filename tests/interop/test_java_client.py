"""The Java clients of Apache RocketMQ, unmodified, against our broker.

Their jars come from Maven Central. 5.4.0 is the newest, 4.9.8 the last of the 4.x series, and
4.4.0 talks to the VIP channel on its own. All scenarios of a client run side by side in one JVM.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator

import pytest

from halfmq.client import ClientConfig, Decision, Message, blocking
from tests.support.features import feature
from tests.support.java_clients import Kind, class_path, java_client
from tests.support.java_scenarios import Java, bodies, by_body, java_scenarios, of

pytestmark = pytest.mark.campaign

KINDS = {
    "5.4.0": Kind("5.4.0"),
    "5.3.3": Kind("5.3.3"),
    "5.3.3-binary-headers": Kind("5.3.3", ("-Drocketmq.serialize.type=ROCKETMQ",)),
    "4.9.8": Kind("4.9.8"),
    "4.4.0": Kind("4.4.0"),
}
SCENARIOS = (
    *("send", "batch", "delay", "sizes", "refused", "look_up"),
    *("orderly", "retry", "broadcasting", "sharing", "pull", "sql", "transactions"),
)
SINCE_4_6 = ("lite_pull", "request_reply")
SETTINGS = {
    "messageDelayLevel": "1s 2s 1s 1s 1s",
    "transactionTimeOut": 3000,
    "transactionCheckInterval": 2000,
}
REBALANCE_MS = 20_000
"""How often clients look by themselves who shares their queues."""


@pytest.fixture(scope="module", params=KINDS)
def java(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Java]:
    """A broker and a JVM, where all scenarios have been started."""
    kind = KINDS[request.param]
    class_path(kind.version)
    home = tmp_path_factory.mktemp("java")
    names = (*SCENARIOS, *SINCE_4_6) if kind.since_4_6 else SCENARIOS
    with java_scenarios(kind, home, names, **SETTINGS) as running:
        yield running


@feature("send: waiting, called back, one-way")
@feature("tags, checked by the client")
def test_it_sends_and_consumes_by_tag(java: Java) -> None:
    """Whether it waits, is called back or does not care: what is consumed is what was sent."""
    lines = java.seen("send")

    (client,) = of(lines, "client")
    assert client["vip_channel"] == (java.kind.version == "4.4.0")
    assert client["headers"] == ("ROCKETMQ" if java.kind.options else "JSON")
    sent, consumed = by_body(of(lines, "sent")), by_body(of(lines, "consumed"))
    assert len(sent) == len({line["id"] for line in sent.values()}) == 6
    assert {line["status"] for line in sent.values()} == {"SEND_OK"}
    assert set(consumed) == {"sync-0", "sync-1", "async-0", "async-1", "one-way"}
    for body in set(consumed) - {"one-way"}:
        for field in ("id", "offset_id", "queue", "queue_offset"):
            assert consumed[body][field] == sent[body][field]
        assert consumed[body]["keys"] == body
    assert consumed["sync-1"]["tags"] == "B"
    assert consumed["sync-1"]["colour"] == "grün-€"


@feature("batch")
def test_its_batch_becomes_single_messages(java: Java) -> None:
    """Each keeps its id, its tag and the order."""
    lines = java.seen("batch")

    (sent,) = of(lines, "sent")
    consumed = sorted(of(lines, "consumed"), key=lambda line: int(line["queue_offset"]))
    assert bodies(consumed) == [f"batch-{number}" for number in range(5)]
    assert [line["tags"] for line in consumed] == [f"T{number}" for number in range(5)]
    assert [line["id"] for line in consumed] == sent["id"].split(",")
    assert [line["offset_id"] for line in consumed] == sent["offset_id"].split(",")


@feature("delay levels")
def test_a_delayed_message_comes_after_its_delay(java: Java) -> None:
    """It is stored in its queue two seconds after it was made; another one is not held up."""
    consumed = by_body(of(java.seen("delay"), "consumed"))

    assert set(consumed) == {"now", "later"}
    assert consumed["later"]["store_ms"] - consumed["later"]["born_ms"] >= 2000
    assert consumed["now"]["store_ms"] - consumed["now"]["born_ms"] < 2000


@feature("compressed bodies: zlib")
def test_large_bodies_arrive_whole(java: Java) -> None:
    """It packs bodies of 4 KiB and more, and unpacks them; our broker keeps them as they come."""
    lines = java.seen("sizes")

    (made,) = of(lines, "made")
    consumed = {line["size"]: line for line in of(lines, "consumed")}
    assert made["even"] == zlib.crc32(b"a" * 6000) == consumed[6000]["crc"]
    assert made["big"] == consumed[3 << 20]["crc"]


@feature("messages too large or illegal are refused")
def test_a_refusal_has_the_code_that_it_knows(java: Java) -> None:
    """Properties that are too long are illegal; the connection goes on."""
    lines = java.seen("refused")

    assert [line["code"] for line in of(lines, "refused")] == [13]
    assert bodies(of(lines, "sent")) == ["after"]


def test_it_finds_messages_by_id_and_key(java: Java) -> None:
    """By where they are stored, by the id that it gave them, and by keys."""
    lines = java.seen("look_up")

    sent = bodies(of(lines, "sent"))
    assert bodies(of(lines, "by_offset_id")) == bodies(of(lines, "by_unique_key")) == sent
    found: dict[str, set[str]] = {}
    for line in of(lines, "by_key"):
        found.setdefault(line["key"], set()).add(line["body"])
    assert found == {
        "customer-0": {"look-up-0", "look-up-2"},
        "customer-1": {"look-up-1"},
        "invoice-2": {"look-up-2"},
    }


@feature("orderly consumption: locks, suspend, hand-over")
def test_an_orderly_consumer_keeps_the_order_of_each_queue(java: Java) -> None:
    """Also when it refuses a message; and when it has left, another one gets its locks at once."""
    consumed = of(java.seen("orderly"), "consumed")

    first = [line for line in consumed if line["consumer"] == "first"]
    even = [line for line in first if line["queue"] == 0]
    assert bodies(even) == ["o-0", "o-2", "o-4", "o-4", "o-6", "o-8", "o-10"]
    assert [line["times"] for line in even if line["body"] == "o-4"] == [0, 1]
    odd = [line for line in first if line["queue"] == 1]
    assert bodies(odd) == [f"o-{number}" for number in range(1, 12, 2)]
    second = [line for line in consumed if line["consumer"] == "second"]
    # The last ones may come again: the first one left while it was given them.
    assert {"o-12", "o-13"} <= set(bodies(second)) <= {"o-10", "o-11", "o-12", "o-13"}


@feature("retry and dead letters")
def test_a_refused_message_comes_again_and_at_last_is_a_dead_letter(java: Java) -> None:
    """It goes back to the broker, waits, and is counted; its id stays."""
    lines = java.seen("retry")

    sent, consumed = by_body(of(lines, "sent")), of(lines, "consumed")
    assert Counter((line["body"], line["times"]) for line in consumed) == Counter(
        [("once", 0), ("once", 1), ("never", 0), ("never", 1)]
    )
    assert {line["topic"] for line in consumed} == {"java-retry"}
    assert all(line["id"] == sent[line["body"]]["id"] for line in consumed)
    (dead,) = of(lines, "dead")
    assert (dead["topic"], dead["body"]) == ("%DLQ%java-retry-consumer", "never")


@feature("broadcasting")
def test_broadcasting_gives_everything_to_everyone(java: Java) -> None:
    """Each consumer keeps its own offsets."""
    consumed = of(java.seen("broadcasting"), "consumed")

    everything = sorted(f"b-{number}" for number in range(6))
    for consumer in ("first", "second"):
        own = [line for line in consumed if line["consumer"] == consumer]
        assert sorted(bodies(own)) == everything


@feature("rebalance when a member joins or leaves")
def test_consumers_of_a_group_share_the_queues(java: Java) -> None:
    """When one leaves, the broker tells the other, who takes over long before it would look."""
    lines = java.seen("sharing")

    events = [line["event"] for line in lines]
    shared, left = events.index("shared"), events.index("left")
    together = of(lines[shared:left], "consumed")
    owners: dict[str, str] = {}
    for line in together:  # the last ones may come again to the one that stays
        owners.setdefault(line["body"], line["consumer"])
    owners.pop("s-0", None)  # sent before there was anything to share
    assert Counter(owners.values()) == {"first": 2, "second": 2}
    assert lines[left]["taken_over_after_ms"] < REBALANCE_MS / 2
    alone = of(lines[left:], "consumed")
    assert {line["consumer"] for line in alone} == {"first"}
    assert set(bodies(together + alone)) >= {f"s-{number}" for number in range(1, 9)}


@feature("pull: from chosen offsets, waiting")
def test_a_pull_has_every_outcome(java: Java) -> None:
    """Found, filtered, nothing new, behind the end; and a pull that waits is woken."""
    lines = java.seen("pull")

    outcomes = {
        line["pull"]: (line["status"], line["next"], line["min"], line["max"])
        for line in of(lines, "pulled")
    }
    assert outcomes == {
        "everything": ("FOUND", 5, 0, 5),
        "two": ("FOUND", 3, 0, 5),
        "tagged": ("FOUND", 5, 0, 5),
        "no_such_tag": ("NO_MATCHED_MSG", 5, 0, 5),
        "at_the_end": ("NO_NEW_MSG", 5, 0, 5),
        "behind_the_end": ("OFFSET_ILLEGAL", 5, 0, 5),
        "awaited": ("FOUND", 6, 0, 6),
    }
    found: dict[str, list[str]] = {}
    for line in of(lines, "message"):
        found.setdefault(line["pull"], []).append(line["body"])
    assert found == {
        "everything": ["p-0", "p-1", "p-2", "p-3", "p-4"],
        "two": ["p-1", "p-2"],
        "tagged": ["p-0", "p-2", "p-4"],
        "awaited": ["p-5"],
    }
    assert of(lines, "woken")[0]["after_ms"] < 5000


def test_it_finds_offsets(java: Java) -> None:
    """First, last, by time, and the one that was committed."""
    lines = java.seen("pull")

    (bounds,) = of(lines, "bounds")
    assert (bounds["min"], bounds["max"]) == (0, 5)
    assert bounds["earliest_ms"] == min(line["store_ms"] for line in of(lines, "message"))
    assert [line["found"] for line in of(lines, "by_time")] == [0, 1, 2, 3, 4, 5]
    assert [line["queue_offset"] for line in of(lines, "committed")] == [3]


@feature("lite pull: subscribe, assign; seek to an offset, a time, the beginning, the end")
def test_a_lite_pull_consumer_subscribes_commits_seeks_and_assigns(java: Java) -> None:
    """Committed offsets outlive it; a queue of its own choice starts where it says."""
    if not java.kind.since_4_6:
        pytest.skip("the lite pull consumer came with 4.6")
    lines = java.seen("lite_pull")

    polled: dict[str, list[str]] = {}
    for line in of(lines, "polled"):
        polled.setdefault(line["how"], []).append(line["body"])
    assert sorted(polled.pop("subscribed")) == [f"l-{number}" for number in range(8)]
    assert sorted(polled.pop("selected")) == ["s-1", "s-2"]
    assert polled == {
        "sought": ["l-4"],
        "assigned": ["l-0", "l-4"],
        "from_the_beginning": ["l-0", "l-4"],
        "from_a_time": ["l-4"],
        "from_the_end": ["l-8"],
    }
    assert [line["queue_offset"] for line in of(lines, "committed")] == [2]


@feature("SQL92 filters")
def test_it_selects_by_properties(java: Java) -> None:
    """By push and by pull; a refused message comes again, a wrong expression stops the start."""
    lines = java.seen("sql")

    consumed = bodies(of(lines, "consumed"))
    assert set(consumed) == {"f-2", "f-5"}
    assert consumed.count("f-2") == 2
    assert bodies(of(lines, "pulled")) == ["f-2", "f-5"]
    (refused,) = of(lines, "refused")
    assert refused["code"] == 23
    assert "SQL92 filter is wrong at character 9: write = for equality" in refused["text"]


@feature("request-reply")
def test_requests_are_replied_to(java: Java) -> None:
    """By any consumer, also with a packed body; a reply to nobody is refused."""
    if not java.kind.since_4_6:
        pytest.skip("request-reply came with 4.6")
    lines = java.seen("request_reply")

    requested = by_body(of(lines, "requested"))
    replies = {line["body"]: line for line in of(lines, "replied")}
    assert {*requested, *replies} == {"waited", "called-back", "large"}
    for line in replies.values():
        assert line["status"] == "SEND_OK"
        assert line["queue_offset"] >= 0
    called_back = [line for line in of(lines, "called_back") if line["size"] is not None]
    assert {line["to"]: line["size"] for line in called_back} == {"called-back": 20, "large": 6000}
    assert {line["crc"] for line in called_back} == {line["crc"] for line in of(lines, "made")}
    (waited,) = of(lines, "waited")
    if java.kind.version > "5" and "failure" in waited:
        # DefaultMQProducerImpl gives up as soon as the request is stored: its `onSuccess` counts
        # the latch down that the reply should.
        assert "wait reply message timeout" in waited["failure"]
    else:
        assert waited["reply"] == "reply to waited"
    (refused,) = of(lines, "refused")
    assert refused["code"] == 1
    assert "channel of <nobody@1> not found" in refused["text"]


@feature("transactions: commit, rollback, unknown, check-back")
def test_transactions_end_as_their_producer_decides(java: Java) -> None:
    """At once or when asked; no consumer sees what was not committed, nor anything twice."""
    lines = java.seen("transactions")

    decided = by_body(of(lines, "decided"))
    assert {body: line["state"] for body, line in decided.items()} == {
        "commit": "COMMIT_MESSAGE",
        "rollback": "ROLLBACK_MESSAGE",
        "unknown-commit": "UNKNOW",
        "unknown-rollback": "UNKNOW",
        "unknown-late": "UNKNOW",
        "exception-commit": "UNKNOW",
    }
    checked = of(lines, "checked")
    asked = {"unknown-commit", "unknown-rollback", "unknown-late", "exception-commit"}
    assert set(bodies(checked)) == asked
    assert bodies(checked).count("unknown-late") >= 2
    consumed = [line for line in of(lines, "consumed") if line["body"] != "marker"]
    visible = {"commit", "unknown-commit", "unknown-late", "exception-commit"}
    assert Counter(bodies(consumed)) == Counter(visible)
    assert all(line["id"] == decided[line["body"]]["id"] for line in consumed)
    for line in [*checked, *consumed]:
        assert line["topic"] == "java-transactions"
        assert line["transaction_id"] == decided[line["body"]]["id"]
    assert all(line["queue"] == decided[line["body"]]["queue"] for line in consumed)


@feature("transactions: another producer of the group is asked")
def test_another_producer_answers_for_one_that_died(java: Java) -> None:
    """The process ends between half message and decision; whoever has its group is asked."""
    topic, group = "java-take-over", "java-take-over-producer"
    with java_client(java.kind, java.broker.address, java.home / "dying") as dying:
        status, words = dying.dying_words("die_undecided", topic, group)
    assert (status, bodies(words)) == (3, ["undecided-commit"])

    lines = java.client.run("take_over", topic, group)

    assert bodies(of(lines, "checked")) == ["undecided-commit"]
    assert Counter(bodies(of(lines, "consumed"))) == Counter(["hello", "undecided-commit"])
    committed = by_body(of(lines, "consumed"))["undecided-commit"]
    assert committed["transaction_id"] == words[0]["id"]


def test_our_consumer_reads_what_it_sends(java: Java) -> None:
    """Plain, compressed and from a batch."""
    lines = java.client.run("produce", "java-to-python")
    config = ClientConfig(namesrv=java.broker.address)
    consumer = blocking.Consumer(
        "python-consumer", {"java-to-python": "*"}, start_from="first", config=config
    )
    received: dict[bytes, blocking.MessageView] = {}
    with consumer:
        while len(received) < 5:
            message = consumer.receive(30)
            assert message is not None, sorted(received)
            received[message.body] = message
            message.ack()

    sent = by_body(of(lines, "sent"))
    assert set(received) == {b"plain", b"a" * 6000, b"batch-0", b"batch-1", b"batch-2"}
    assert received[b"plain"].message_id == sent["plain"]["id"]
    assert received[b"plain"].properties["colour"] == "grün-€"
    assert received[b"a" * 6000].tags == "B"
    assert len(received[b"a" * 6000].record.body) < 100  # as the client packed it
    batch = [received[f"batch-{number}".encode()].message_id for number in range(3)]
    assert batch == sent["batch"]["id"].split(",")


def test_it_consumes_what_our_transactions_commit(java: Java) -> None:
    config = ClientConfig(namesrv=java.broker.address)
    topic = "python-to-java"
    producer = blocking.TransactionProducer(
        "python-producer", checker=lambda _message: Decision.UNKNOWN, config=config
    )
    with producer:
        with producer.transaction(Message(topic, b"committed", tags="A", keys="c-1")) as kept:
            pass
        with producer.transaction(Message(topic, b"failed")) as failed:
            failed.rollback()
        for _ in range(8):
            producer.send(Message(topic, b"after"))
    consumed = of(java.client.run("consume", topic, "*", 9), "consumed")

    assert Counter(bodies(consumed)) == {"committed": 1, "after": 8}
    committed = by_body(consumed)["committed"]
    assert (committed["tags"], committed["keys"]) == ("A", "c-1")
    assert committed["transaction_id"] == kept.id
