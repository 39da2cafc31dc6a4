"""Running Java consumers do what operators want: go to other messages, consume one, tell offsets.

The operator's side is mqadmin of the same version, and its library for what has no command.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import pytest

from halfmq.client import Message
from halfmq.client.blocking import Producer
from tests.support.features import feature
from tests.support.mqadmin import Mqadmin, mqadmin
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.campaign

BODIES: Final = (b"1", b"2", b"3")


@pytest.fixture(scope="module", params=["5.3.3", "4.9.8"])
def tool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mqadmin]:
    """A broker, and Java consumers and mqadmin of a version beside it."""
    with ExitStack() as stack:
        yield mqadmin(stack, request.param, tmp_path_factory.mktemp("told"))


@contextmanager
def consuming(tool: Mqadmin, topic: str, count: int) -> Iterator[tuple[str, str, str]]:
    """A push consumer of a topic that has had all messages and committed: run, group, client id."""
    tool.run("updateTopic", *tool.at, "-t", topic, "-r", "1", "-w", "1")
    run = tool.start("consume", topic, "*", count)
    group = f"java-consume-consumer-{run}"
    send(tool, topic, *BODIES)
    for _ in BODIES:
        tool.said(run, "consumed")
    deadline = time.monotonic() + PATIENCE_S
    while offset(tool, group, topic) != len(BODIES):  # they commit every five seconds
        assert time.monotonic() < deadline
    shown = tool.run("consumerConnection", "-g", group)
    yield run, group, next(line.split()[0] for line in shown if "JAVA" in line)


def send(tool: Mqadmin, topic: str, *bodies: bytes) -> None:
    with Producer("told", namesrv=tool.broker.address) as producer:
        for body in bodies:
            producer.send(Message(topic, body, keys=["K"]))


def offset(tool: Mqadmin, group: str, topic: str) -> int | None:
    for line in tool.attempt("consumerProgress", "-g", group):
        if line.split()[:1] == [topic]:
            return int(line.split()[4])
    return None


@feature("a running consumer goes to the offsets to which its group is reset")
@pytest.mark.parametrize("in_broker", [True, False])
def test_a_running_consumer_starts_again_from_where_it_is_reset(
    tool: Mqadmin, in_broker: bool
) -> None:
    """Whether the broker has the offset, or tells the consumer, which sleeps ten seconds then."""
    setting = "-k", "useServerSideResetOffset", "-v", str(in_broker).lower()
    tool.run("updateBrokerConfig", *tool.at, *setting)
    topic = f"reset-{in_broker}"
    with consuming(tool, topic, 2 * len(BODIES)) as (run, group, _):
        shown = tool.run("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
        assert shown[-1].split() == ["broker-a", "0", "0"], shown
        again = [tool.said(run, "consumed")["body"] for _ in BODIES]
        assert sorted(again) == ["1", "2", "3"]
        tool.finish(run)


def test_a_running_consumer_is_given_one_message_and_tells_its_offsets(tool: Mqadmin) -> None:
    """309, which queryMsgByUniqueKey sends, goes through its listener; 223 has no command."""
    with consuming(tool, "one", len(BODIES) + 2) as (run, group, client_id):
        rows = [line.split() for line in tool.run("queryMsgByKey", "-t", "one", "-k", "K")]
        (message_id,) = [row[0] for row in rows if row[2] == "1"]  # the second message
        answer = tool.run(
            "queryMsgByUniqueKey", "-t", "one", "-i", message_id, "-g", group, "-d", client_id
        )
        assert "CR_SUCCESS" in "".join(answer), answer
        assert tool.said(run, "consumed")["body"] == "2"
        status = tool.start("consume_status", "one", group, client_id)
        (told,) = [line for line in tool.finish(status) if line["event"] == "offset"]
        assert (told["client"], told["queue"], told["offset"]) == (client_id, 0, len(BODIES))
        send(tool, "one", b"last")
        tool.finish(run)
