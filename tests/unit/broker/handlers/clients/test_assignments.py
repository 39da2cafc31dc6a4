"""Queues that the broker assigns to consumers that do not share them out themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfmq.broker.config import TopicDefaults
from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.handlers.clients.assignments import QUEUES_MAX, STRATEGIES, AssignmentHandlers
from halfmq.broker.handlers.clients.brokers import BrokerHandlers
from halfmq.broker.pop.request_modes import RequestModes
from halfmq.broker.tables.client_registry import ClientRegistry
from halfmq.broker.tables.kv_table import KvConfig
from halfmq.broker.tables.registered_brokers import BrokerTable
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.remoting.bodies import ConsumerData, HeartbeatData
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.registration_bodies import DataVersion, encode_registration
from tests.support.broker_doubles import Clock, FakeConnection, call, config_path, request, routed


class Parts:
    """A broker `a` with four queues of `orders`, and a registered one with three."""

    def __init__(self, tmp_path: Path) -> None:
        clock = Clock()
        names = TopicDefaults(broker_name="a")
        topics = TopicTable(config_path(tmp_path, "topics.json"), names, now_ms=clock)
        topics.ensure("orders", 4)
        topics.ensure("closed", 4, perm=2)
        brokers = BrokerTable(clock.monotonic)
        self.registry = ClientRegistry(now_ms=clock)
        kv_config = KvConfig(config_path(tmp_path, "kvConfig.json"), clock)
        modes = RequestModes(config_path(tmp_path, "messageRequestMode.json"), clock)
        self.handlers = {
            **BrokerHandlers(brokers, kv_config, names, "127.0.0.1").handlers(),
            **AssignmentHandlers(topics, brokers, self.registry, "a", modes).handlers(),
        }

    def register(self, count: int) -> None:
        entries = [
            (name, {"topicName": name, "readQueueNums": count, "writeQueueNums": 1, "perm": 6})
            for name in ("orders", "another")
        ]
        fields = {"brokerName": "b", "brokerAddr": "10.0.0.2:10911", "brokerId": "0"}
        fields |= {"clusterName": "c", "haServerAddr": "10.0.0.2:10912"}
        body = encode_registration(entries, DataVersion(counter=1))
        call(self.handlers, request(RequestCode.REGISTER_BROKER, fields, body))

    def join(self, *client_ids: str) -> None:
        for client_id in client_ids:
            group = ConsumerData(group_name="g")
            beat = HeartbeatData(client_id=client_id, consumer_data_set=(group,))
            self.registry.heartbeat(beat, FakeConnection())

    def assigned(self, client_id: str, **fields: str) -> list[str] | None:
        """Queues of a client, each as broker and number; None: it keeps what it has."""
        query = {
            "topic": "orders",
            "consumerGroup": "g",
            "clientId": client_id,
            "strategyName": "AVG",
            "messageModel": "CLUSTERING",
            **fields,
        }
        body = json.dumps(query).encode()
        answer = call(self.handlers, request(RequestCode.QUERY_ASSIGNMENT, body=body))
        entries: list[dict[str, Any]] | None
        entries = json.loads(answer.body).get("messageQueueAssignments")
        if entries is None:
            return None
        assert {entry["mode"] for entry in entries} <= {"PULL"}
        queues = [entry["messageQueue"] for entry in entries]
        assert {queue["topic"] for queue in queues} <= {query["topic"]}
        return [f"{queue['brokerName']}{queue['queueId']}" for queue in queues]


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def test_queues_of_all_brokers_are_shared_out_by_both_strategies(parts: Parts) -> None:
    """As official consumers share them out: in the order of broker, number and client."""
    parts.register(3)
    parts.join("two", "one", "three")  # in order: one, three, two

    assert parts.assigned("one") == ["a0", "a1", "a2"]
    assert parts.assigned("three") == ["a3", "b0"]
    assert parts.assigned("two") == ["b1", "b2"]
    circle = {"strategyName": "AVG_BY_CIRCLE"}
    assert parts.assigned("one", **circle) == ["a0", "a3", "b2"]
    assert parts.assigned("three", **circle) == ["a1", "b0"]
    assert parts.assigned("two", **circle) == ["a2", "b1"]


@pytest.mark.parametrize("strategy", STRATEGIES.values())
@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("members", [1, 2, 4, 7])
def test_every_queue_has_one_member(
    strategy: Callable[[int, int, int], range], count: int, members: int
) -> None:
    """Also if there are more members than queues."""
    shares = [strategy(count, members, index) for index in range(members)]

    assert sorted(number for share in shares for number in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_broadcasting_consumers_get_all_queues(parts: Parts) -> None:
    assert parts.assigned("one", messageModel="BROADCASTING") == ["a0", "a1", "a2", "a3"]


def test_a_client_keeps_what_it_has_of_unknown_topics_and_groups(parts: Parts) -> None:
    """One that is no member has no queues; a topic that is not readable has none."""
    assert parts.assigned("one") is None
    parts.join("one")
    assert parts.assigned("one", topic="unknown") is None
    assert parts.assigned("another") == []
    assert parts.assigned("one", topic="closed") == []


def test_what_cannot_be_assigned_is_refused_with_the_reason(parts: Parts) -> None:
    """An unknown strategy, more queues than fit into a turn of the loop, and no query."""

    def refusal(**fields: str) -> str:
        with pytest.raises(RequestRefusedError) as caught:
            parts.assigned("one", **fields)
        return str(caught.value.remark)

    parts.join("one")
    assert refusal(strategyName="CONFIG") == (
        "the strategy is 'CONFIG', expected AVG or AVG_BY_CIRCLE"
    )
    parts.register(QUEUES_MAX)
    assert refusal() == (
        f"the topic orders has {QUEUES_MAX + 4} queues, of which the broker assigns {QUEUES_MAX} "
        "at most; have the clients share them out: setClientRebalance(true)"
    )
    for body in (b"", b"{", b"{}"):
        answer = routed(parts.handlers, request(RequestCode.QUERY_ASSIGNMENT, body=body))
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert answer.remark
