"""Traces of official Java clients, and what mqadmin makes of them, at RocketMQ 5.3.3 and halfmq."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from halfmq.store.format.record import Record
from tests.support.features import feature
from tests.support.patience import PATIENCE_S
from tests.support.rocketmq_broker import Wire
from tests.support.two_brokers import Difference, Measured, Operator, Told, at_both, compare

pytestmark = pytest.mark.campaign

TRACE_TOPICS: Final = {"usual": "RMQ_SYS_TRACE_TOPIC", "own": "own-traces"}
QUEUES: Final = 4  # of a topic that is made by its first message
SETTINGS: Final = {
    "messageDelayLevel": "1s 1s 1s 1s",
    # RocketMQ takes note of decisions in batches; a check in between delivers once more.
    "transactionOpBatchInterval": 500,
    "transactionTimeOut": 8000,
    "transactionCheckInterval": 4000,
}
TRACED: Final = {"Pub": 5, "EndTransaction": 4, "SubBefore": 6, "SubAfter": 6}
"""Traces of the scenario by type: sends (a batch is one), decisions, and consumed messages."""

_TIMES: Final = re.compile(r"\b1[6-9]\d{11}\b")
_ADDRESS: Final = re.compile(r"\b\d+(\.\d+){3}(:\d+)?\b")
_OFFSET_ID: Final = re.compile(r"\b[0-9A-F]{32}\b")


def _traces(wire: Wire, topic: str) -> Iterator[tuple[Record, list[str]]]:
    """Give each trace of a trace topic with its record. Source: RocketMQ ``TraceDataEncoder``."""
    for queue_id in range(QUEUES):
        for record in wire.records(topic, queue_id):
            for trace in record.body.decode().split("\x02"):
                if trace:
                    yield record, trace.split("\x01")


def _all_traces(wire: Wire, topic: str) -> list[list[str]]:
    """Wait until every trace of the scenario is there.

    There are more if a decision is asked for twice, or a message is consumed twice.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        traces = [trace for _, trace in _traces(wire, topic)]
        counts = {kind: sum(trace[0] == kind for trace in traces) for kind in TRACED}
        if all(counts[kind] >= count for kind, count in TRACED.items()):
            return traces
        assert time.monotonic() < deadline, f"{topic} has {counts}"
        time.sleep(0.2)


def _without_values(trace: list[str], bodies: dict[str, str]) -> str:
    """Replace what differs from run to run: times, addresses, and ids, by the message's body."""
    fields = [bodies.get(field, field) for field in trace]
    if fields[0].startswith("Sub"):
        fields[{"SubBefore": 4, "SubAfter": 1}[fields[0]]] = "REQUEST"
    cost = {"Pub": 10, "SubAfter": 3}.get(fields[0])
    if cost is not None:
        fields[cost] = "COST"
    text = " ".join(fields)
    for pattern, word in ((_TIMES, "MS"), (_OFFSET_ID, "ID"), (_ADDRESS, "ADDRESS")):
        text = pattern.sub(word, text)
    return text


def _trace(operator: Operator) -> None:
    """Have both kinds of clients leave traces; look at them and at what the tool shows."""
    runs = {
        name: operator.client.start("traced", name, *(() if name == "usual" else (topic,)))
        for name, topic in TRACE_TOPICS.items()
    }
    for name, topic in TRACE_TOPICS.items():
        seen = operator.client.until(runs[name], "traced")
        # Of a batch, whose messages have one id at RocketMQ, all are told as one.
        ids = {
            line["id"]: "batch" if line["body"].startswith("batch") else line["body"]
            for line in seen
            if line["event"] in ("sent", "consumed")
        }
        with Wire(operator.place.address) as wire:
            traces = _all_traces(wire, topic)
        lines = sorted({_without_values(trace, ids) for trace in traces})
        operator.told.append(Told(f"traces in {topic}", lines))
        operator.ask(f"sendMessage -t java-traced-{name} -p last")
        operator.client.lines(runs[name])
        by_body = {body: message_id for message_id, body in ids.items()}
        for body in ("again", "commit", "rollback", "unknown-commit"):
            operator.ask("queryMsgTraceById -t {topic} -i {id}", topic=topic, id=by_body[body])
        operator.ask("topicRoute -t {topic}", topic=topic)


ROLES: Final = ("producer", "consumer", "filtered", "broadcasting", "pulling", "blocked")


def _track(operator: Operator) -> None:
    """Ask what became of a message, of which each kind of consumer knows something else."""
    ask, client = operator.ask, operator.client
    ask("updateTopic -b {address} -t orders -r 1 -w 1")
    run = client.start("online", "orders", *ROLES)
    (sent,) = [line for line in client.until(run, "online") if line["event"] == "sent"]
    for role in ROLES[1:]:
        ask(f"consumerConnection -g java-online-{role}", until="orders")
    for role in ("consumer", "filtered"):
        ask(f"consumerProgress -g java-online-{role} -s true", until="broker-a 0 1 1 .* 0 0 ")
    ask("consumerProgress -g java-online-blocked -s true", until="broker-a 0 1 0 ")
    for role in ("pulling", "broadcasting"):
        ask(f"consumerProgress -g java-online-{role} -s true")
    ask("queryMsgByUniqueKey -t orders -i {id}", id=sent["id"])
    ask("queryMsgById -t orders -i {id}", id=sent["offset_id"])
    ask("sendMessage -t orders -p last")
    client.lines(run)
    ask("queryMsgByUniqueKey -t orders -i {id}", id=sent["id"])


DIFFERENCES: Final = (
    Difference(
        "queryMsgById, queryMsgByUniqueKey",
        r"(MessageTrack \[consumerGroup=orders,|See https:).*",
        r"MessageTrack .*(CONSUME_BROADCASTING|PULL), .*",
        "groups that are online without offsets are tracked; RocketMQ tracks those with offsets, "
        "and takes the topic's name for a group",
    ),
)
MEASURED: Final = (
    Measured("queryMsgTraceById", r"\d+ms"),
    Measured("sendMessage", r"^broker-a \d "),
    Measured("consumerProgress", r"Consume TPS: .*"),
)


@feature("message traces: sends, decisions, consumption")
@pytest.mark.parametrize("version", ["5.3.3", "4.9.8"])
def test_traces_are_stored_and_found_as_at_rocketmq(version: str, tmp_path: Path) -> None:
    """Of sends, decisions and consumption, in the usual trace topic and in one of their own."""
    theirs, ours = at_both(_trace, version, tmp_path, **SETTINGS)

    compare(theirs, ours, (), MEASURED)


def test_a_message_is_tracked_as_at_rocketmq(tmp_path: Path) -> None:
    """By consumers of each kind while they are online, and when they are gone."""
    theirs, ours = at_both(_track, "5.3.3", tmp_path)

    compare(theirs, ours, DIFFERENCES, MEASURED)
    text = "\n".join(line for told in ours for line in told.lines)
    assert set(re.findall(r"trackType=(\w+)", text)) == {
        *("CONSUMED", "CONSUMED_BUT_FILTERED", "CONSUME_BROADCASTING"),
        *("NOT_CONSUME_YET", "NOT_ONLINE", "PULL"),
    }
