"""mqadmin 5.3.3 looks into running consumers, official ones and ours.

Compared is what it prints: the columns that its documentation and its sources show.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from halfmq.client import Message
from halfmq.client.blocking import Consumer, Producer
from tests.support.mqadmin import Mqadmin, mqadmin
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mqadmin]:
    """A broker, and the tool beside it."""
    with ExitStack() as stack:
        yield mqadmin(stack, "5.3.3", tmp_path_factory.mktemp("consumers"))


def _send(tool: Mqadmin, topic: str, *bodies: bytes) -> list[str]:
    with Producer("admin-test", namesrv=tool.broker.address) as producer:
        return [
            producer.send(Message(topic, body, keys=["K"])).offset_message_id for body in bodies
        ]


@contextmanager
def _java_consumer(tool: Mqadmin, topic: str) -> Iterator[tuple[str, str]]:
    """A push consumer of the topic that has had one message: its group and client id."""
    tool.run("updateTopic", *tool.at, "-t", topic, "-r", "1", "-w", "1")
    _send(tool, topic, b"first")
    run = tool.start("consume", topic, "*", 2)
    tool.said(run, "consumed")
    group = f"java-consume-consumer-{run}"
    shown = tool.run("consumerConnection", "-g", group)
    client_id = next(line.split()[0] for line in shown if "JAVA" in line)
    yield group, client_id
    _send(tool, topic, b"last")
    tool.finish(run)


def _progress(tool: Mqadmin, group: str, topic: str, *options: str) -> list[str]:
    """The row of the topic that consumerProgress shows, as soon as the group has an offset."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for line in tool.run("consumerProgress", "-g", group, *options):
            if line.split()[0] == topic:
                return line.split()
    raise AssertionError(f"{group} has no offset in {topic}")


def test_an_official_consumer_tells_about_itself(tool: Mqadmin) -> None:
    """The tools consumerStatus, with stacks, and consumerProgress with client ids."""
    with _java_consumer(tool, "status") as (group, client_id):
        files = tool.run("consumerStatus", "-g", group)
        assert any(client_id in line and "V5_3_3" in line for line in files), files
        assert "Same subscription in the same group of consumer" in files
        assert "Rebalance OK" in files

        text = "\n".join(tool.run("consumerStatus", "-g", group, "-i", client_id, "-s"))
        for part in (
            "PROP_CONSUME_TYPE : CONSUME_PASSIVELY",
            "Topic: status ClassFilter: false SubExpression: *",
            "#Consumer Offset#",
            "status broker-a 0 1",
            "#Consumer RT&TPS#",
            "#Consumer jstack#",
            "ConsumeMessageThread",
        ):
            assert part in text, text

        row = _progress(tool, group, "status", "-s", "true")
        assert row[:5] == ["status", "broker-a", "0", "1", "1"]
        assert client_id.startswith(row[5]), row  # it shows the address in the client id


def test_our_consumer_does_what_operators_ask(tool: Mqadmin) -> None:
    """It tells about itself, consumes one message again, and continues where it is reset."""
    tool.run("updateTopic", *tool.at, "-t", "ours", "-r", "1", "-w", "1")
    with Consumer("our-group", {"ours": "*"}, namesrv=tool.broker.address) as consumer:
        _send(tool, "ours", b"first", b"second")
        messages = [consumer.receive(PATIENCE_S) for _ in range(2)]
        for message in messages:
            assert message is not None
            message.ack()
        consumer.commit()
        shown = tool.run("consumerConnection", "-g", "our-group")
        client_id = next(line.split()[0] for line in shown if "PYTHON" in line)

        at = "-g", "our-group"
        text = "\n".join(tool.run("consumerStatus", *at, "-i", client_id, "-s"))
        for part in (
            "PROP_CONSUME_TYPE : CONSUME_PASSIVELY",
            "Topic: ours ClassFilter: false SubExpression: *",
            "ours broker-a 0 2",
            "commitOffset=2",
            "#Consumer jstack#",
            "QueuePuller.run",
        ):
            assert part in text, text

        assert messages[1] is not None
        given = tool.start(
            *("mqadmin", "queryMsgByUniqueKey", "-t", "ours", "-i", messages[1].message_id, *at),
            *("-d", client_id, "-n", tool.broker.address),
        )
        again = consumer.receive(PATIENCE_S)
        assert again is not None
        assert again.body == b"second"
        again.ack()
        (printed,) = tool.finish(given)
        assert "CR_SUCCESS" in printed["text"], printed

        tool.run("resetOffsetByTime", *at, "-t", "ours", "-s", "0")
        bodies = [message.body for _ in range(2) if (message := consumer.receive(PATIENCE_S))]
        assert bodies == [b"first", b"second"]
