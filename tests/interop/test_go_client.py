"""The Go client of Apache RocketMQ, rocketmq-client-go v2.1.2, unmodified, against our broker."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from halfmq.client import ClientConfig, Message, blocking
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.features import feature
from tests.support.go_client import GoProcess, Line, go_client, going, run_go
from tests.support.patience import wait_until
from tests.support.rocketmq_broker import Wire

pytestmark = pytest.mark.campaign

COMMITTED, ROLLED_BACK, UNKNOWN = 1, 2, 3
"""The client's numbers for local transaction states."""
DIED = 3
"""Exit status of a producer that ended between half message and decision."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all scenarios; their topics and groups differ."""
    go_client()
    settings = {
        "messageDelayLevel": "1s 1s 1s 1s",
        "transactionTimeOut": 2000,
        "transactionCheckInterval": 2000,
        "traceTopicEnable": "true",  # this client writes no traces to a topic that is not there
    }
    with broker_process(tmp_path_factory.mktemp("go"), **settings) as running:
        yield running


def _of(lines: list[Line], event: str) -> list[Line]:
    return [line for line in lines if line["event"] == event]


def _bodies(lines: list[Line]) -> list[str]:
    return [line["body"] for line in lines]


@feature("send: waiting, called back, one-way")
@feature("tags, checked by the client")
@feature("batch")
@feature("compressed bodies: zlib")
@feature("topics created by their first message")
def test_it_sends_and_consumes_by_tag(broker: BrokerProcess, tmp_path: Path) -> None:
    """One by one, called back, one-way, in a batch and packed. The first one makes the topic."""
    lines = run_go(broker.address, "send", tmp_path)

    sent = {line["body"]: line for line in _of(lines, "sent")}
    consumed = {line["body"]: line for line in _of(lines, "consumed")}
    assert {line["status"] for line in sent.values()} == {0}
    singles = {"sync-0", "sync-1", "async", "one-way", "a" * 6000}
    assert set(consumed) == singles | {"batch-0", "batch-1", "batch-2"}
    assert all(line["keys"] == body for body, line in consumed.items())
    for body in ("sync-0", "sync-1", "async"):
        assert consumed[body]["id"] == sent[body]["id"]
        assert consumed[body]["queue_offset"] == sent[body]["queue_offset"]
    first = sent["batch"]["queue_offset"]
    offsets = [consumed[f"batch-{number}"]["queue_offset"] for number in range(3)]
    assert offsets == [first, first + 1, first + 2]


@feature("retry and dead letters")
def test_a_refused_message_comes_again(broker: BrokerProcess, tmp_path: Path) -> None:
    """Sent back to the broker, delayed, and delivered with its count and its id."""
    lines = run_go(broker.address, "retry", tmp_path)

    (sent,) = _of(lines, "sent")
    consumed = _of(lines, "consumed")
    assert [(line["body"], line["times"]) for line in consumed] == [("again", 0), ("again", 1)]
    assert {line["topic"] for line in consumed} == {"go-retry"}
    assert {line["id"] for line in consumed} == {sent["id"]}


@feature("selected queue")
@feature("ordered by key")
def test_the_queue_is_chosen_by_the_caller_or_a_key(broker: BrokerProcess, tmp_path: Path) -> None:
    """Messages with one key go to one queue, in order."""
    sent = _of(run_go(broker.address, "queues", tmp_path), "sent")

    chosen = [line["queue"] for line in sent if line["body"].startswith("chosen")]
    assert chosen == [0, 1, 2, 3]
    for key in ("keyed-0", "keyed-1"):
        keyed = [line for line in sent if line["body"].startswith(key)]
        assert len({line["queue"] for line in keyed}) == 1
        offsets = [line["queue_offset"] for line in keyed]
        assert offsets == sorted(offsets)


@feature("orderly consumption: locks, suspend, hand-over")
def test_an_orderly_consumer_keeps_the_order(broker: BrokerProcess, tmp_path: Path) -> None:
    """Also when it refuses a message: the others wait for it."""
    lines = run_go(broker.address, "orderly", tmp_path)

    bodies = _bodies(_of(lines, "consumed"))
    assert bodies == ["o-0", "o-1", "o-2", "o-2", "o-3", "o-4", "o-5"]


@feature("broadcasting")
def test_broadcasting_gives_everything_to_everyone(broker: BrokerProcess, tmp_path: Path) -> None:
    """Each consumer keeps its own offsets."""
    given = _of(run_go(broker.address, "broadcasting", tmp_path), "given")

    for name in ("first", "second"):
        own = sorted(line["body"] for line in given if line["to"] == name)
        assert own == [f"b-{number}" for number in range(4)]


@feature("messages too large or illegal are refused")
def test_what_is_too_large_is_refused(broker: BrokerProcess, tmp_path: Path) -> None:
    """With code 13, and the producer goes on."""
    lines = _of(run_go(broker.address, "limits", tmp_path), "size")

    assert [line["error"] == "<nil>" for line in lines] == [True, False, True]
    assert "CODE: 13" in lines[1]["error"]


@feature("namespaces")
def test_namespaces_keep_topics_and_groups_apart(broker: BrokerProcess, tmp_path: Path) -> None:
    lines = run_go(broker.address, "namespaces", tmp_path)

    assert _bodies(_of(lines, "consumed")) == ["red", "blue"]


@feature("request-reply")
def test_requests_are_replied_to(broker: BrokerProcess, tmp_path: Path) -> None:
    """Also if the reply has no body: that of `CreateReplyMessage` has none."""
    lines = run_go(broker.address, "request_reply", tmp_path)

    assert {line["to"]: line["body"] for line in _of(lines, "answered")} == {
        "waited": "reply to waited",
        "empty": "",
        "called-back": "reply to called-back",
    }
    (lost,) = _of(lines, "lost")  # nobody consumes it
    assert "wait reply message timeout" in lost["error"]
    replied = _of(lines, "replied")
    assert {line["error"] for line in replied} == {"<nil>"}


@feature("delay levels")
def test_a_delayed_message_comes_after_its_delay(broker: BrokerProcess, tmp_path: Path) -> None:
    """Another one is not held up."""
    consumed = _of(run_go(broker.address, "delay", tmp_path), "consumed")

    delays = {line["body"]: line["delayed_ms"] for line in consumed}
    assert delays["later"] >= 1000 > delays["now"]


@feature("rebalance when a member joins or leaves")
def test_members_share_the_queues(broker: BrokerProcess, tmp_path: Path) -> None:
    """By the strategies averagely and by circle; when one has left, the other has all."""
    lines = _of(run_go(broker.address, "sharing", tmp_path), "owns")

    shares: dict[str, list[list[int]]] = {}
    for line in lines:
        shares.setdefault(line["strategy"], []).append(line["queues"])
    assert {strategy: sorted(queues) for strategy, queues in shares.items()} == {
        "averagely": [[0, 1], [2, 3]],
        "averagely, left": [[0, 1, 2, 3]],
        "circle": [[0, 2], [1, 3]],
        "circle, left": [[0, 1, 2, 3]],
    }


@feature("SQL92 filters")
def test_it_selects_by_properties(broker: BrokerProcess, tmp_path: Path) -> None:
    """By an SQL92 expression, of messages stored before and while it consumes."""
    consumed = _bodies(_of(run_go(broker.address, "sql", tmp_path), "consumed"))

    assert sorted(consumed) == ["n-2", "n-3", "n-4", "n-5"]


@feature("pull: from chosen offsets, waiting")
def test_its_pull_consumer_polls_and_pulls_from_offsets(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    """Everything, one message by its offset, and what an SQL92 expression selects."""
    lines = run_go(broker.address, "pull", tmp_path)

    assert sorted(_bodies(_of(lines, "polled"))) == [f"n-{number}" for number in range(8)]
    assert _bodies(_of(lines, "pulled")) == ["last"]
    assert sorted(_bodies(_of(lines, "selected"))) == ["n-3", "n-7"]


@feature("pull: from chosen offsets, waiting")
def test_its_pull_consumer_goes_back_to_an_offset(broker: BrokerProcess, tmp_path: Path) -> None:
    """It commits a lower offset of each queue; the next consumer of its group begins there."""
    lines = run_go(broker.address, "moved", tmp_path)

    assert sorted(_bodies(_of(lines, "polled"))) == [f"n-{number}" for number in range(8)]
    assert {line["queue"]: line["offset"] for line in _of(lines, "offset")} == dict.fromkeys(
        range(4), 1
    )
    last = {line["body"] for line in _of(lines, "sent") if line["queue_offset"] == 1}
    assert {line["body"] for line in _of(lines, "again")} == last


@feature("transactions: commit, rollback, unknown, check-back")
def test_transactions_end_as_their_producer_decides(broker: BrokerProcess, tmp_path: Path) -> None:
    """At once or when asked; no consumer sees what was not committed, nor anything twice."""
    lines = run_go(broker.address, "transactions", tmp_path)

    decided = {line["body"]: line for line in _of(lines, "decided")}
    assert {body: line["state"] for body, line in decided.items()} == {
        "commit": COMMITTED,
        "rollback": ROLLED_BACK,
        "unknown-commit": UNKNOWN,
        "unknown-rollback": UNKNOWN,
    }
    checked = _of(lines, "checked")
    assert set(_bodies(checked)) == {"unknown-commit", "unknown-rollback"}
    consumed = [line for line in _of(lines, "consumed") if line["body"] != "marker"]
    assert Counter(_bodies(consumed)) == {"commit": 1, "unknown-commit": 1}
    for line in [*checked, *consumed]:
        assert line["topic"] == "go-transactions"
        assert line["transaction_id"] == line["unique_key"] == decided[line["body"]]["id"]


@feature("transactions: another producer of the group is asked")
def test_another_producer_answers_for_one_that_died(broker: BrokerProcess, tmp_path: Path) -> None:
    """The process ends between half message and decision; whoever has its group is asked."""
    words = run_go(broker.address, "die_undecided", tmp_path, status=DIED)
    assert _bodies(words) == ["dying-commit"]

    lines = run_go(broker.address, "take_over", tmp_path)

    checked = _of(lines, "checked")
    assert set(_bodies(checked)) == {"dying-commit"}
    assert {line["transaction_id"] for line in checked} == {words[0]["id"]}
    assert Counter(_bodies(_of(lines, "consumed"))) == {"commit": 1, "dying-commit": 1}


@feature("allocation strategies: averagely, by circle, consistent hash, by configuration, by room")
def test_members_share_by_hash_and_by_configuration(broker: BrokerProcess, tmp_path: Path) -> None:
    """Each queue has one owner, by configuration the one that it names."""
    shares: dict[str, dict[str, list[int]]] = {"hash": {}, "config": {}}
    for line in _of(run_go(broker.address, "allocated", tmp_path), "owns"):
        shares[line["strategy"]][line["member"]] = line["queues"]

    assert shares["config"] == {"one": [0, 1], "two": [2, 3]}
    assert sorted(queue for own in shares["hash"].values() for queue in own) == [0, 1, 2, 3]


@feature("start positions: in a new topic, the first message whatever is set")
def test_a_new_group_begins_where_it_says(broker: BrokerProcess, tmp_path: Path) -> None:
    """Where nothing is gone yet it gets all, as at RocketMQ; also of a topic that was deleted."""
    topic = "go-positions"
    config = ClientConfig(namesrv=broker.address)
    with blocking.Admin(config=config) as admin, blocking.Producer("p", config=config) as producer:
        admin.create_topic(topic)
        _send_to_each(producer, topic, "old")
        admin.delete_topic(topic)
        admin.create_topic(topic)
        _send_to_each(producer, topic, "early")
        moment = _next_second(admin, producer, topic).strftime("%Y%m%d%H%M%S")
        _send_to_each(producer, topic, "late")
        with going(broker.address, tmp_path, "positions", topic, moment) as consumers:
            bodies: dict[str, set[str]] = defaultdict(set)
            while not all(
                {f"{word}-{number}" for word in words for number in range(4)} <= bodies[name]
                for name, words in POSITIONS.items()
            ):
                _send_to_each(producer, topic, "new")
                for line in consumers.until("consumed") + consumers.heard():
                    if line["event"] == "consumed":
                        bodies[line["group"].removeprefix(f"{topic}-")].add(line["body"])

    seen = {name: {body.partition("-")[0] for body in own} for name, own in bodies.items()}
    assert seen == {name: set(words) for name, words in POSITIONS.items()}


POSITIONS = dict.fromkeys(("first", "timestamp", "last"), ("early", "late", "new"))


def _next_second(admin: blocking.Admin, producer: blocking.Producer, topic: str) -> datetime:
    """Return the second after a topic's last message once the broker stores messages in it.

    A start by time has no smaller unit.
    """

    def last_stored(name: str) -> datetime:
        return max(one.last_stored for one in admin.queues(name) if one.last_stored)

    following = last_stored(topic).replace(microsecond=0) + timedelta(seconds=1)

    def has_begun() -> bool:
        producer.send(Message("go-clock", b"tick"))
        return last_stored("go-clock") >= following

    wait_until(has_begun, "the broker stores in a later second")
    return following


def _send_to_each(producer: blocking.Producer, topic: str, word: str) -> None:
    """Send a message to each of four queues."""
    for number in range(4):
        body = f"{word}-{number}".encode()
        producer.send(Message(topic, body, tags="T"), order_key=f"key-{number}")


@feature("a member is killed: the others take over")
@pytest.mark.parametrize("kind", ["concurrent", "orderly"])
def test_the_others_take_over_from_one_that_is_killed(
    broker: BrokerProcess, tmp_path: Path, kind: str
) -> None:
    """Concurrent ones at once; orderly ones when the locks of the killed one have expired."""
    topic = f"go-killed-{kind}"
    config = ClientConfig(namesrv=broker.address)
    with blocking.Admin(config=config) as admin:
        admin.create_topic(topic)
    with (
        blocking.Producer("go-killing", config=config) as producer,
        going(broker.address, tmp_path, "member", topic, kind) as survivor,
        going(broker.address, tmp_path, "member", topic, kind) as victim,
    ):
        word = 0
        while not {0, 1, 2, 3} & _queues_of(victim, survivor, producer, topic, f"shared{word}"):
            word += 1
        victim.kill()
        _send_to_each(producer, topic, "after")
        lines: list[Line] = []
        while not {f"after-{number}" for number in range(4)} <= set(_bodies(lines)):
            lines += survivor.until("consumed")[-1:]
    if kind == "orderly":
        for queue in range(4):
            offsets = [line["queue_offset"] for line in lines if line["queue"] == queue]
            assert offsets == sorted(offsets)


def _queues_of(
    member: GoProcess, other: GoProcess, producer: blocking.Producer, topic: str, word: str
) -> set[int]:
    """Send to each queue; return from which of them the member consumed, and not the other."""
    _send_to_each(producer, topic, word)
    marks = {f"{word}-{number}" for number in range(4)}
    found: dict[GoProcess, dict[str, int]] = {member: {}, other: {}}
    while not marks <= found[member].keys() | found[other].keys():
        for one, seen in found.items():
            for line in one.heard():
                if line["event"] == "consumed":
                    seen[line["body"]] = line["queue"]
        time.sleep(0.05)
    return {queue for body, queue in found[member].items() if body in marks}


@feature("message traces: sends, decisions, consumption")
def test_traces_are_stored(broker: BrokerProcess, tmp_path: Path) -> None:
    """Of a send and its consumption, in the usual topic. This client traces no decisions."""
    with going(broker.address, tmp_path, "traced") as client:
        (sent,) = _of(client.until("sent"), "sent")
        client.until("consumed", id=sent["id"])
        traces: dict[str, list[str]] = {}
        with Wire(broker.address) as wire:
            while not {"Pub", "SubBefore", "SubAfter"} <= traces.keys():
                for record in wire.records("RMQ_SYS_TRACE_TOPIC", 0):
                    for trace in filter(None, record.body.decode().split("\x02")):
                        kind, *fields = trace.split("\x01")
                        traces[kind] = fields

    published, before, after = traces["Pub"], traces["SubBefore"], traces["SubAfter"]
    assert published[2:7] == ["go-traced-producer", "go-traced", sent["id"], "T", "seen"]
    assert published[7] == broker.address
    assert (published[8], published[12]) == ("4", "true")
    assert (before[2], before[4]) == ("go-traced-consumer", sent["id"])
    assert (after[0], after[1], after[3]) == (before[3], sent["id"], "true")


@feature("the broker is killed twice while members come and go: at least once, in order")
def test_nothing_is_lost_when_the_broker_is_killed(tmp_path: Path) -> None:
    """Every acknowledged message is consumed, those of orderly groups in order."""
    go_client()
    wanted = {f"n-{number}" for number in range(200)}
    with broker_process(tmp_path / "broker") as broker, ExitStack() as running:
        flows = {
            kind: running.enter_context(
                going(broker.address, tmp_path, "flow", f"go-flow-{kind}", kind)
            )
            for kind in ("concurrent", "orderly")
        }
        lines: dict[str, list[Line]] = {kind: [] for kind in flows}
        for count in (50, 100):
            for kind, flow in flows.items():
                lines[kind] += flow.until("sent", count=count)
            broker.kill()
            broker.start()
        for kind, flow in flows.items():
            while not wanted <= set(_bodies(_of(lines[kind], "consumed"))):
                lines[kind].append(flow.next())

    first = dict.fromkeys(_bodies(_of(lines["orderly"], "consumed")))  # it may come again
    numbers = [int(body[2:]) for body in first if body != "founding"]
    for queue in range(4):
        own = [number for number in numbers if number % 4 == queue]
        assert own == sorted(own)
