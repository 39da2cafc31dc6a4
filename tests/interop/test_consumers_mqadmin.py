"""mqadmin 5.3.3 looks into a running consumer of ours.

Compared is what it prints: the columns that its documentation and its sources show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

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
