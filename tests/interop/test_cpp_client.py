"""The C++ client (PyPI wheel `rocketmq` 0.4.4), unmodified, against our broker."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import pytest

from halfmq.client import Message
from halfmq.client.blocking import Admin, Consumer, Producer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.features import feature
from tests.support.patience import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("rocketmq") is None,
    reason="the wheel rocketmq 0.4.4 exists for Linux on x86-64 only; the C++ client is NOT tested",
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all scenarios; their topics and groups differ."""
    with broker_process(tmp_path_factory.mktemp("cpp"), messageDelayLevel="1s 1s 1s 1s") as running:
        yield running


def _arguments(broker: BrokerProcess, home: Path, *scenario: str) -> dict[str, Any]:
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {
        "args": [sys.executable, "-m", "tests.support.cpp_client", broker.address, *scenario],
        "cwd": ROOT,
        "env": {**os.environ, "HOME": str(home), "PYTHONPATH": path},
        "text": True,
    }


def _run(broker: BrokerProcess, scenario: str, home: Path) -> list[dict[str, Any]]:
    arguments = _arguments(broker, home, scenario)
    done = subprocess.run(**arguments, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + broker.log
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@contextmanager
def _running(broker: BrokerProcess, home: Path, *scenario: str) -> Iterator[subprocess.Popen[str]]:
    """A scenario that says what it sees while it runs."""
    arguments = _arguments(broker, home, *scenario)
    with subprocess.Popen(**arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        alarm = Timer(PATIENCE_S, client.kill)
        alarm.start()
        try:
            yield client
        finally:
            alarm.cancel()
            client.kill()


def _said(client: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Yield what a scenario says, as it says it."""
    assert client.stdout is not None
    return (json.loads(line) for line in client.stdout if line.startswith("{"))


def _bodies(client: subprocess.Popen[str], count: int) -> list[str]:
    return [line["body"] for line in itertools.islice(_said(client), count)]


def _consumed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line["consumed"] for line in lines if "consumed" in line]


@feature("send: waiting, called back, one-way")
@feature("tags, checked by the client")
@feature("topics created by their first message")
def test_it_sends_and_consumes_by_tag(broker: BrokerProcess, tmp_path: Path) -> None:
    """Sends are acknowledged with ids and offsets; the push consumer gets the tags it wants.

    The first message makes the topic.
    """
    lines = _run(broker, "send_and_consume", tmp_path)

    sent = [line for line in lines if "sent" in line]
    consumed = _consumed(lines)
    assert [line["status"] for line in sent] == [0] * 5
    assert all(len(line["id"]) == 32 for line in sent)
    assert {one["body"] for one in consumed} == {"m-0", "m-1", "m-3", "m-4", "m-5"}
    assert all(one["keys"] == one["body"] and one["tags"] in {"A", "B"} for one in consumed)


@feature("batch")
def test_its_batch_becomes_single_messages(broker: BrokerProcess, tmp_path: Path) -> None:
    """It marks a batch by "1", which the official broker takes for no: it stores one message."""
    lines = _run(broker, "batch", tmp_path)

    assert sorted(one["body"] for one in _consumed(lines)) == ["b-0", "b-1", "b-2"]


@feature("a running consumer goes to the offsets to which its group is reset")
@pytest.mark.parametrize("in_broker", [True, False])
def test_it_starts_again_from_where_it_is_reset(tmp_path: Path, in_broker: bool) -> None:
    """Whether the broker has the offsets, or tells the client, in the form that it reads."""
    settings = {"useServerSideResetOffset": str(in_broker).lower()}
    with (
        broker_process(tmp_path / "broker", **settings) as broker,
        _running(broker, tmp_path, "reset") as client,
        Admin(namesrv=broker.address) as admin,
    ):
        assert sorted(_bodies(client, 3)) == ["r-0", "r-1", "r-2"]

        def consumed() -> int:
            offsets = admin.offsets("cpp-reset-consumer", "cpp-reset")
            return sum(one.offset for one in offsets)

        wait_until(lambda: consumed() == 3, "it commits every five seconds")
        admin.reset_offsets("cpp-reset-consumer", "cpp-reset", "first")
        assert sorted(_bodies(client, 3)) == ["r-0", "r-1", "r-2"]


@feature("ordered by key")
def test_messages_with_one_key_stay_in_order(broker: BrokerProcess, tmp_path: Path) -> None:
    """They go to one queue, one behind the other."""
    lines = _run(broker, "in_order", tmp_path)

    assert [line["offset"] for line in lines] == list(range(6))


@feature("selected queue")
def test_the_queue_is_chosen_by_the_caller(broker: BrokerProcess, tmp_path: Path) -> None:
    """By a function of the queues' number and an argument."""
    consumed = _consumed(_run(broker, "chosen", tmp_path))

    assert {one["body"]: one["queue"] for one in consumed} == {f"c-{n}": n for n in range(4)}


@feature("retry and dead letters")
def test_a_refused_message_comes_again(broker: BrokerProcess, tmp_path: Path) -> None:
    """Sent back to the broker, delayed, and delivered from the retry topic with its count."""
    lines = _run(broker, "retry", tmp_path)

    assert [(one["body"], one["times"]) for one in _consumed(lines)] == [("again", 1)]


@feature("pull: from chosen offsets, waiting")
def test_its_pull_consumer_reads_every_queue(broker: BrokerProcess, tmp_path: Path) -> None:
    """Offsets, bounds and bodies are what it expects."""
    lines = _run(broker, "pull", tmp_path)

    assert sorted(one["body"] for one in _consumed(lines)) == ["p-0", "p-1", "p-2", "p-3"]


@feature("orderly consumption: locks, suspend, hand-over")
def test_an_orderly_consumer_keeps_the_order(broker: BrokerProcess, tmp_path: Path) -> None:
    """Of each key, also when it refuses the first message."""
    consumed = [one["body"] for one in _consumed(_run(broker, "orderly", tmp_path))]

    assert [body for body in consumed if int(body[2:]) % 2 == 0] == ["o-0", "o-2", "o-4", "o-6"]
    assert [body for body in consumed if int(body[2:]) % 2 == 1] == ["o-1", "o-3", "o-5", "o-7"]


@feature("delay levels")
def test_a_delayed_message_comes_after_its_delay(broker: BrokerProcess, tmp_path: Path) -> None:
    """Another one is not held up."""
    consumed = {one["body"]: one for one in _consumed(_run(broker, "delay", tmp_path))}

    assert consumed["later"]["stored_after_ms"] >= 1000
    assert consumed["now"]["stored_after_ms"] < 1000


@feature("compressed bodies: zlib")
@feature("messages too large or illegal are refused")
def test_large_bodies_arrive_whole_or_are_refused(broker: BrokerProcess, tmp_path: Path) -> None:
    """It packs bodies; and it goes on after a refusal."""
    lines = _run(broker, "large", tmp_path)

    assert {one["body"] for one in _consumed(lines)} == {"a" * 6000, "after"}
    assert [line["kind"] for line in lines if "kind" in line] == ["ProducerSendSyncFailed"]


@feature("broadcasting")
def test_broadcasting_gives_everything_to_everyone(broker: BrokerProcess, tmp_path: Path) -> None:
    lines = _run(broker, "broadcasting", tmp_path)

    for name in ("first", "second"):
        assert sorted(_given(lines, name)) == ["b-0", "b-1", "b-2", "b-3"]


@feature("rebalance when a member joins or leaves")
def test_members_share_the_queues(broker: BrokerProcess, tmp_path: Path) -> None:
    """Each consumes; when one has left, the other consumes everything."""
    lines = _run(broker, "sharing", tmp_path)

    assert sorted(_given(lines, "stays")) == sorted(f"s-{number}" for number in range(16))


@feature("one group with members of several clients")
def test_it_shares_a_group_with_our_client(broker: BrokerProcess, tmp_path: Path) -> None:
    """Both divide the queues by the same rule: each has half of them, and none has two owners."""
    topic = "cpp-mixed"
    owners: dict[str, list[str]] = defaultdict(list)

    def take_theirs(client: subprocess.Popen[str]) -> None:
        for line in _said(client):
            owners[line["body"]].append("theirs")

    def take_ours(consumer: Consumer) -> None:
        for message in consumer:
            owners[message.body.decode()].append("ours")
            message.ack()

    with Admin(namesrv=broker.address) as admin:
        admin.create_topic(topic, queues=4)
    with (
        Producer("cpp-mixed-producer", namesrv=broker.address) as producer,
        _running(broker, tmp_path, "guest", topic, "concurrent") as client,
        Consumer(topic, {topic: "*"}, namesrv=broker.address) as consumer,
    ):
        numbers = itertools.count()

        def shared() -> bool:
            bodies = [str(next(numbers)) for _ in range(4)]
            queues = {producer.send(Message(topic, body.encode())).queue for body in bodies}
            assert len(queues) == 4
            wait_until(lambda: all(owners[body] for body in bodies), "somebody consumes each")
            return sorted(name for body in bodies for name in owners[body]) == BOTH

        threads = [
            Thread(target=take_theirs, args=(client,)),
            Thread(target=take_ours, args=(consumer,)),
        ]
        for thread in threads:
            thread.start()
        try:
            wait_until(shared, "each has half of the queues")
        finally:
            consumer.close()
            client.kill()
            for thread in threads:
                thread.join()


BOTH = ["ours", "ours", "theirs", "theirs"]


@feature("a member is killed: the others take over")
def test_the_others_take_over_from_one_that_is_killed(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    """At once: its connection is closed, and the broker tells them."""
    lines = _run(broker, "killed", tmp_path)

    assert {f"k-{number}" for number in range(16)} <= set(_given(lines, "survivor"))


@feature("the broker is killed twice while members come and go: at least once, in order")
@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["concurrent", "orderly"])
def test_nothing_is_lost_when_the_broker_is_killed(kind: str, tmp_path: Path) -> None:
    """Every acknowledged message is consumed; in each queue in order, if the group is orderly."""
    member = (f"cpp-flow-{kind}", kind)
    consumed: list[dict[str, Any]] = []

    def until(said: Iterator[dict[str, Any]], reached: Callable[[dict[str, Any]], bool]) -> None:
        for line in said:
            if line["event"] == "consumed":
                consumed.append(line)
            if reached(line):
                return
        raise AssertionError("the client ended")

    with (
        broker_process(tmp_path / "broker") as broker,
        _running(broker, tmp_path, "flow", *member) as client,
    ):
        said = _said(client)
        until(said, lambda line: line.get("count") == 50)
        with _running(broker, tmp_path, "guest", *member) as guest:
            until(_said(guest), lambda line: line["event"] == "consumed")
            broker.kill()
            broker.start()
            until(said, lambda line: line.get("count") == 150)
            rest, _ = guest.communicate()  # it leaves
        consumed += [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
        broker.kill()
        broker.start()
        wanted = {f"n-{number}" for number in range(200)}
        until(said, lambda _: wanted <= {line["body"] for line in consumed})

    assert {line["body"] for line in consumed} == wanted
    if kind == "orderly":
        consumed.sort(key=lambda line: line["at"])
        first = dict.fromkeys(int(line["body"][2:]) for line in consumed)  # it may come again
        for queue in range(4):
            own = [number for number in first if number % 4 == queue]
            assert own == sorted(own)


def _given(lines: list[dict[str, Any]], name: str) -> list[str]:
    return [line["given"] for line in lines if line.get("to") == name]
