"""Heartbeats, unregistering, members of a group, filter checks and queue locks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfmq.broker.errors import RequestRefusedError, UnfinishedError
from halfmq.broker.filters.filters_in_use import FiltersInUse
from halfmq.broker.handlers.clients import clients
from halfmq.broker.handlers.clients.clients import ClientHandlers, LockHandlers
from halfmq.broker.loop import slices
from halfmq.broker.tables.client_registry import EXPIRY_MS, ClientRegistry
from halfmq.broker.tables.group_table import GroupTable
from halfmq.broker.tables.queue_locks import QueueLocks
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import ConsumerGroupRequestHeader
from halfmq.remoting.own_requests import ConsumerInfo, decode_consumers
from tests.support.broker_doubles import (
    Clock,
    FakeConnection,
    call,
    config_path,
    ext,
    identity,
    request,
    routed,
)

TOLD = (
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
    ConsumerGroupRequestHeader(consumer_group="g"),
)


class Parts:
    """The handlers with real tables."""

    def __init__(
        self, root: Path, *, auto_create: bool = True, refuse_unequal: bool = False
    ) -> None:
        self.clock = Clock()
        self.topics = TopicTable(config_path(root, "topics.json"), identity(), now_ms=self.clock)
        self.groups = GroupTable(
            config_path(root, "subscriptionGroup.json"),
            auto_create=auto_create,
            now_ms=self.clock,
        )
        self.groups.load()
        self.registry = ClientRegistry(now_ms=self.clock, refuse_unequal=refuse_unequal)
        self.clients = ClientHandlers(
            self.registry, self.topics, self.groups, FiltersInUse(), wake=self._wake
        )
        self.handlers = self.clients.handlers()
        self.woken = False

    def _wake(self) -> None:
        self.woken = True

    def settle(self) -> int:
        """Run what the handlers have left to the next passes; return the number of slices."""
        slices = 0
        while self.woken:
            slices += 1
            self.woken = self.clients.tick() == 0
        return slices

    def beat(
        self,
        connection: FakeConnection,
        client_id: str,
        *,
        group: str = "g",
        model: str = "CLUSTERING",
        topics: tuple[str, ...] = ("T",),
        settles: bool = True,
        **fields: object,
    ) -> dict[str, str]:
        """Send one heartbeat; return the ext fields of its answer, after what follows from it."""
        body = {
            "clientID": client_id,
            "consumerDataSet": [
                {
                    "groupName": group,
                    "messageModel": model,
                    "subscriptionDataSet": [
                        {"topic": topic, "subString": "*", "subVersion": 1} for topic in topics
                    ],
                }
            ],
            "producerDataSet": [{"groupName": "CLIENT_INNER_PRODUCER"}],
            **fields,
        }
        command = request(RequestCode.HEART_BEAT, body=json.dumps(body).encode())
        answer = ext(call(self.handlers, command, connection))
        if settles:
            self.settle()
        return answer

    def lose(self, connection: FakeConnection) -> None:
        """Lose a connection, with what follows from it."""
        self.clients.connection_lost(connection)
        self.settle()

    def consumers(self, **fields: str) -> tuple[list[ConsumerInfo], dict[str, str]]:
        """Return a page of QUERY_CONSUMERS and the fields of its answer."""
        answer = call(self.handlers, request(RequestCode.QUERY_CONSUMERS, fields))
        return decode_consumers(answer.body), ext(answer)


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def test_a_first_heartbeat_creates_group_and_retry_topic(parts: Parts) -> None:
    """A consumer needs both before its first pull."""
    answer = parts.beat(FakeConnection(), "a")

    assert answer == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}
    assert parts.groups.get("g") is not None
    retry = parts.topics.get("%RETRY%g")
    assert retry is not None
    assert (retry.read_queue_nums, retry.perm) == (1, 6)
    assert parts.registry.consumer_ids("g") == ["a"]
    assert parts.registry.producers_of("CLIENT_INNER_PRODUCER")


def test_all_members_are_notified_of_a_new_one(parts: Parts) -> None:
    """All of them must rebalance, the new one included."""
    first, second = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    parts.beat(first, "a")
    assert first.requests == [TOLD]
    parts.beat(second, "b")
    assert first.requests == [TOLD, TOLD]
    assert second.requests == [TOLD]
    parts.beat(second, "b")
    assert second.requests == [TOLD]


def test_changes_of_a_large_group_are_notified_together(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand members that join and leave together cost notices, not their square."""
    one, many, stays = [FakeConnection(f"127.0.0.1:{port}") for port in (1, 2, 3)]
    for number in range(1_000):
        parts.beat(many if number % 2 else one, f"c{number:04}", settles=False)
    parts.beat(stays, "stays", settles=False)
    assert stays.requests == []  # not in the same pass
    parts.settle()
    assert [peer.requests for peer in (one, many, stays)] == [[TOLD]] * 3

    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    parts.clients.connection_lost(many)
    parts.clients.connection_lost(one)
    assert parts.settle() > 1_000
    assert stays.requests == [TOLD, TOLD]
    assert parts.registry.consumer_ids("g") == ["stays"]


def test_members_are_notified_of_changed_topics(parts: Parts) -> None:
    """The other members may have to take over queues of a removed topic."""
    first, second = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    parts.beat(first, "a")
    parts.beat(second, "b")
    parts.beat(second, "b", topics=("T", "U"))

    assert first.requests == [TOLD] * 3
    assert second.requests == [TOLD] * 2


def test_members_are_notified_when_their_topic_is_created(parts: Parts) -> None:
    """They consume its first messages at once; groups of other topics are left alone."""
    waits, other = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    parts.beat(waits, "a")
    parts.beat(other, "b", group="other", topics=("U",))
    before = list(waits.requests), list(other.requests)

    parts.topics.ensure("T")
    parts.topics.create_on_send("V", "TBW102", 4, "")
    parts.settle()

    assert (waits.requests, other.requests) == ([*before[0], TOLD], before[1])


def test_a_broadcasting_group_is_not_notified(parts: Parts) -> None:
    """Its members do not share queues."""
    connection = FakeConnection()
    parts.beat(connection, "a", model="BROADCASTING")

    assert connection.requests == []
    assert parts.registry.consumer_ids("g") == ["a"]


def test_notifications_can_be_disabled_for_a_group(tmp_path: Path) -> None:
    """By notifyConsumerIdsChangedEnable=false in its settings."""
    path = config_path(tmp_path, "subscriptionGroup.json")
    path.parent.mkdir()
    entry = {"notifyConsumerIdsChangedEnable": False}
    path.write_text(json.dumps({"subscriptionGroupTable": {"g": entry}}))
    connection = FakeConnection()
    Parts(tmp_path).beat(connection, "a")

    assert connection.requests == []


def test_members_are_notified_when_one_leaves(parts: Parts) -> None:
    """By closing its connection, by unregistering, or by timing out."""
    left, stays = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    for client_id in ("a", "b", "c"):
        parts.beat(left, client_id)
    parts.beat(stays, "stays")
    stays.requests.clear()
    unregister = request(
        RequestCode.UNREGISTER_CLIENT, {"clientID": "a", "consumerGroup": "g", "producerGroup": ""}
    )
    assert call(parts.handlers, unregister, left).code == 0
    parts.settle()
    assert stays.requests == [TOLD]
    parts.lose(left)
    assert stays.requests == [TOLD, TOLD]  # once, although it carried two members
    parts.beat(left, "d")
    parts.clock.now += EXPIRY_MS
    parts.beat(stays, "stays")
    stays.requests.clear()
    parts.clock.now += 1
    for _ in parts.clients.expire():
        pass
    parts.settle()

    assert stays.requests == [TOLD]
    assert parts.registry.consumer_ids("g") == ["stays"]


def test_a_heartbeat_for_a_missing_group_succeeds_without_it(tmp_path: Path) -> None:
    """If groups are not created automatically; the pull has the reason."""
    parts = Parts(tmp_path, auto_create=False)
    answer = parts.beat(FakeConnection(), "a")

    assert answer["IS_SUPPORT_HEART_BEAT_V2"] == "true"
    assert parts.registry.consumer_ids("g") == []
    assert parts.topics.get("%RETRY%g") is None
    assert parts.registry.producers_of("CLIENT_INNER_PRODUCER")


def test_a_heartbeat_without_subscriptions_counts_only_if_they_are_known(parts: Parts) -> None:
    """Otherwise the client is asked to send them again, and its pulls register it meanwhile."""
    connection = FakeConnection()

    def short() -> dict[str, str]:
        return parts.beat(connection, "a", topics=(), heartbeatFingerprint=77, withoutSub=True)

    assert short()["IS_SUB_CHANGE"] == "true"
    whole = parts.beat(connection, "a", heartbeatFingerprint=77)
    assert whole["IS_SUB_CHANGE"] == "false"
    assert short()["IS_SUB_CHANGE"] == "false"
    assert parts.registry.subscription_of("g", "T") is not None


def test_the_answer_to_a_heartbeat_names_a_differing_member(parts: Parts) -> None:
    """In fields that official clients ignore, for as long as they differ."""
    first, second = FakeConnection("127.0.0.1:1"), FakeConnection("127.0.0.1:2")
    parts.beat(first, "a")
    told = parts.beat(second, "b", topics=("T", "U"))
    assert (told["unequalTopic"], told["unequalClientId"]) == ("U", "a")
    assert "unequalFilter" not in told
    told = parts.beat(first, "a")
    assert told == {
        "IS_SUPPORT_HEART_BEAT_V2": "true",
        "IS_SUB_CHANGE": "true",
        "unequalTopic": "U",
        "unequalClientId": "b",
        "unequalFilter": "*",
    }
    parts.lose(second)

    assert "unequalTopic" not in parts.beat(first, "a")


def test_a_refused_heartbeat_registers_everything_else(tmp_path: Path) -> None:
    """A process of official clients has one heartbeat for all its groups."""
    parts = Parts(tmp_path, refuse_unequal=True)
    parts.beat(FakeConnection("127.0.0.1:1"), "a")
    body = {
        "clientID": "b",
        "consumerDataSet": [
            {"groupName": group, "subscriptionDataSet": [{"topic": "U", "subString": "*"}]}
            for group in ("g", "h")
        ],
        "producerDataSet": [{"groupName": "p"}],
    }
    command = request(RequestCode.HEART_BEAT, body=json.dumps(body).encode())
    answer = call(parts.handlers, command, FakeConnection("127.0.0.1:2"))

    assert answer.code == ResponseCode.NO_PERMISSION
    assert answer.remark == (
        "the members of group g subscribe differently to topic T: b to nothing, a to '*'; "
        "all members of a group must subscribe to the same"
    )
    assert ext(answer)["unequalClientId"] == "a"
    assert parts.registry.consumer_ids("g") == ["a"]
    assert parts.registry.consumer_ids("h") == ["b"]
    assert parts.registry.producers_of("p")


def test_consumers_are_listed_in_pages_of_whole_members(tmp_path: Path) -> None:
    """Each member once, even if it was refused or subscribes to nothing."""
    parts = Parts(tmp_path, refuse_unequal=True)
    for number in range(4):
        connection = FakeConnection(f"127.0.0.1:{number}")
        parts.beat(connection, f"m{number}", topics=("T", "U"))
        parts.beat(connection, f"m{number}", group="h", topics=())
    parts.beat(FakeConnection("127.0.0.1:9"), "late", topics=("T",))
    seen: list[ConsumerInfo] = []
    after = {"nextGroup": "", "nextClient": ""}
    while "nextGroup" in after:
        page, after = parts.consumers(
            maxCount="3",
            afterGroup=after["nextGroup"],
            afterClient=after["nextClient"],
        )
        assert len(page) <= 4
        seen += page

    assert seen[:3] == [
        ConsumerInfo("g", "late", "127.0.0.1:9", "CLUSTERING", True, "T", "*"),
        ConsumerInfo("g", "m0", "127.0.0.1:0", "CLUSTERING", False, "T", "*"),
        ConsumerInfo("g", "m0", "127.0.0.1:0", "CLUSTERING", False, "U", "*"),
    ]
    assert [(one.group, one.client_id) for one in seen[3:]] == [
        *(("g", f"m{number}") for number in (1, 1, 2, 2, 3, 3)),
        *(("h", f"m{number}") for number in range(4)),
    ]
    assert {one.topic for one in seen[9:]} == {""}
    assert parts.consumers(consumerGroup="h")[0] == seen[9:]
    assert parts.consumers(consumerGroup="none") == ([], {})


@pytest.mark.parametrize("count", ["0", "1001"])
def test_a_page_of_consumers_is_limited(parts: Parts, count: str) -> None:
    """One request must not keep the others waiting."""
    command = request(RequestCode.QUERY_CONSUMERS, {"maxCount": count})
    with pytest.raises(RequestRefusedError, match=f"maxCount is {count}, expected 1 to 1000"):
        parts.handlers[RequestCode.QUERY_CONSUMERS](command, FakeConnection())


@pytest.mark.parametrize("body", [b"", b"{nonsense", b"[]", b'{"producerDataSet":3}'])
def test_an_invalid_heartbeat_is_refused(parts: Parts, body: bytes) -> None:
    """With the reason, and without closing the connection."""
    answer = routed(parts.handlers, request(RequestCode.HEART_BEAT, body=body))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark


def test_the_members_of_an_unknown_group_are_an_error(parts: Parts) -> None:
    """Clients skip the rebalance then, rather than take all queues."""
    with pytest.raises(RequestRefusedError, match="no consumer for this group, g") as refusal:
        parts.handlers[RequestCode.GET_CONSUMER_LIST_BY_GROUP](
            request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"}),
            FakeConnection(),
        )
    assert refusal.value.code is ResponseCode.SYSTEM_ERROR
    parts.beat(FakeConnection(), "a")
    answer = call(
        parts.handlers, request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
    )
    assert json.loads(answer.body) == {"consumerIdList": ["a"]}


def test_a_list_of_many_members_takes_a_turn(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred connections may ask for sixty thousand members in the same pass of the loop."""
    monkeypatch.setattr(clients, "LARGE_GROUP", 1)
    for name in ("a", "b"):
        parts.beat(FakeConnection(), name)
    asked = request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
    peer = FakeConnection()
    serve = parts.handlers[RequestCode.GET_CONSUMER_LIST_BY_GROUP]

    with pytest.raises(UnfinishedError):
        serve(asked, peer)
    assert serve(asked, peer) is not None


@pytest.mark.parametrize(
    ("subscription", "remark"),
    [
        ({"topic": "T", "subString": "*"}, None),
        ({"topic": "T", "subString": "a||b", "expressionType": "TAG"}, None),
        (
            {"topic": "T", "subString": "a > 1", "expressionType": "JS"},
            "The broker does not support consumer to filter message by JS",
        ),
    ],
)
def test_an_invalid_filter_is_refused_when_the_consumer_starts(
    parts: Parts, subscription: dict[str, str], remark: str | None
) -> None:
    """The user learns it from `start` instead of from missing messages."""
    body = json.dumps({"clientId": "a", "group": "g", "subscriptionData": subscription}).encode()
    command = request(RequestCode.CHECK_CLIENT_CONFIG, body=body)
    if remark is None:
        assert call(parts.handlers, command).code == 0
        return
    with pytest.raises(RequestRefusedError) as refusal:
        parts.handlers[command.code](command, FakeConnection())
    assert refusal.value.code is ResponseCode.SYSTEM_ERROR
    assert refusal.value.remark == remark


def test_queues_are_locked_for_one_client_at_a_time() -> None:
    """The answer lists the queues that the client holds; it must not consume others."""
    handlers = LockHandlers(QueueLocks(now_ms=Clock())).handlers()

    def ask(code: int, client_id: str, *queue_ids: int) -> bytes:
        queues = [
            {"topic": "orders", "brokerName": "broker-a", "queueId": one} for one in queue_ids
        ]
        body = {"consumerGroup": "g", "clientId": client_id, "mqSet": queues}
        return call(handlers, request(code, body=json.dumps(body).encode())).body

    assert ask(RequestCode.LOCK_BATCH_MQ, "a", 0) == (
        b'{"lockOKMQSet":[{"brokerName":"broker-a","queueId":0,"topic":"orders"}]}'
    )
    assert json.loads(ask(RequestCode.LOCK_BATCH_MQ, "b", 0)) == {"lockOKMQSet": []}
    assert ask(RequestCode.UNLOCK_BATCH_MQ, "a", 0) == b""
    assert b'"queueId":0' in ask(RequestCode.LOCK_BATCH_MQ, "b", 0)


@pytest.mark.parametrize("code", [RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ])
@pytest.mark.parametrize("body", [b"", b"{", b"{}"])
def test_a_body_that_names_no_queues_is_refused(code: RequestCode, body: bytes) -> None:
    handlers = LockHandlers(QueueLocks(now_ms=Clock())).handlers()
    answer = routed(handlers, request(code, body=body))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark
