"""The broker as a name server of others: what they register is in the routes of all clients."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from halfmq.broker.config import TopicDefaults
from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.handlers.clients.brokers import BrokerHandlers
from halfmq.broker.handlers.clients.routes import RouteHandlers
from halfmq.broker.limits.kept import REGISTERED_BROKERS, REGISTERED_TOPICS
from halfmq.broker.ports import Handler
from halfmq.broker.tables import registered_brokers
from halfmq.broker.tables.kv_table import KvConfig
from halfmq.broker.tables.registered_brokers import HEARTBEAT_TIMEOUT_MS, BrokerTable
from halfmq.broker.tables.topic_config import PERM_WRITE
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.remoting.bodies import (
    QueueData,
    TopicRouteData,
    decode_cluster_info,
    decode_route,
    decode_topic_list,
    encode_route,
)
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import BodyError
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.headers import RECOGNITION_FIELD
from halfmq.remoting.registration_bodies import (
    DataVersion,
    RegisteredTopic,
    decode_registration,
    encode_registration,
)
from halfmq.remoting.replies import encode_reply
from halfmq.remoting.serialization import ext_fields
from halfmq.store.format.crc import crc32
from tests.support.broker_doubles import Clock, FakeConnection, call, request, response
from tests.support.frames import recorded

TOPICS = {"orders": (2, 6), "TBW102": (8, 7)}


class NameServer:
    """The handlers of a broker `halfmq-a` that knows no topic `orders`."""

    def __init__(self, tmp_path: Any) -> None:
        self.clock = Clock()
        self.drained: list[float] = []
        identity = TopicDefaults(broker_name="halfmq-a")
        topics = TopicTable(tmp_path / "topics.json", identity, now_ms=self.clock)
        self.brokers = BrokerTable(self.clock.monotonic)
        kv_config = KvConfig(tmp_path / "kvConfig.json", self.clock)
        self.handlers: dict[int, Handler] = {
            **RouteHandlers(topics, self.brokers, identity, self.drained.append).handlers(),
            **BrokerHandlers(self.brokers, kv_config, identity, "127.0.0.1").handlers(),
        }
        self.connection = FakeConnection()

    def ask(self, code: int, fields: dict[str, str], body: bytes = b"") -> RemotingCommand:
        command = request(code, fields, body)
        try:
            return call(self.handlers, command, self.connection)
        except RequestRefusedError as error:  # as the router answers
            return response(encode_reply(command, error.code, remark=error.remark))
        except BodyError as error:
            return response(encode_reply(command, ResponseCode.SYSTEM_ERROR, remark=str(error)))

    def register(
        self,
        name: str = "broker-b",
        *,
        version: int = 1,
        topics: dict[str, tuple[int, int]] = TOPICS,
        **fields: str,
    ) -> RemotingCommand:
        return self.ask(
            RequestCode.REGISTER_BROKER,
            identity_of(name) | {"haServerAddr": "10.0.0.2:10912"} | fields,
            registration(topics, version),
        )

    def route(self, topic: str, **fields: str) -> TopicRouteData:
        answer = self.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic, **fields})
        return TopicRouteData() if answer.code else decode_route(answer.body)

    def names_of(self, topic: str) -> list[str]:
        """Names of the brokers that have the topic."""
        route = self.route(topic)
        names = [broker.broker_name for broker in route.broker_datas]
        assert names == [queues.broker_name for queues in route.queue_datas]
        return names


def identity_of(name: str) -> dict[str, str]:
    return {
        "brokerName": name,
        "brokerAddr": "10.0.0.2:10911",
        "clusterName": "DefaultCluster",
        "brokerId": "0",
    }


def registration(topics: dict[str, tuple[int, int]], version: int = 1) -> bytes:
    entries = [
        (name, {"topicName": name, "readQueueNums": count, "writeQueueNums": count, "perm": perm})
        for name, (count, perm) in topics.items()
    ]
    return encode_registration(entries, DataVersion(counter=version))


@pytest.fixture
def server(tmp_path: Any) -> NameServer:
    return NameServer(tmp_path)


def test_routes_name_all_brokers_that_have_a_topic(server: NameServer) -> None:
    """Of one cluster, in one answer: producers spread over them, consumers read both."""
    assert server.register().code == 0

    assert server.names_of("orders") == ["broker-b"]
    assert server.names_of("TBW102") == ["halfmq-a", "broker-b"]
    (data,) = server.route("orders").broker_datas
    assert (data.broker_addrs, data.cluster) == ({0: "10.0.0.2:10911"}, "DefaultCluster")
    (queues,) = server.route("orders").queue_datas
    assert (queues.read_queue_nums, queues.write_queue_nums, queues.perm) == (2, 2, 6)
    cluster = decode_cluster_info(server.ask(RequestCode.GET_BROKER_CLUSTER_INFO, {}).body)
    assert cluster.cluster_addr_table == {"DefaultCluster": ["halfmq-a", "broker-b"]}
    names = server.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {})
    assert decode_topic_list(names.body).count("TBW102") == 1
    assert "orders" in decode_topic_list(names.body)


def test_a_broker_is_removed_by_request_by_timeout_or_with_its_connection(
    server: NameServer,
) -> None:
    """At once if the connection is lost, after two minutes if it is half open."""
    server.register()
    server.brokers.connection_lost(FakeConnection("127.0.0.1:50002"))
    assert server.names_of("orders") == ["broker-b"]
    server.brokers.connection_lost(server.connection)
    assert not server.names_of("orders")

    server.register(heartbeatTimeoutMillis="10000")
    server.register("broker-c")
    server.clock.now += 10_001
    list(server.brokers.expire())
    assert server.names_of("orders") == ["broker-c"]
    server.clock.now += HEARTBEAT_TIMEOUT_MS - 10_001
    assert server.ask(RequestCode.BROKER_HEARTBEAT, identity_of("broker-c")).code == 0
    server.clock.now += HEARTBEAT_TIMEOUT_MS
    list(server.brokers.expire())
    assert server.names_of("orders") == ["broker-c"]
    assert server.ask(RequestCode.UNREGISTER_BROKER, identity_of("broker-c")).code == 0
    assert server.ask(RequestCode.UNREGISTER_BROKER, identity_of("broker-c")).code == 0
    assert not server.names_of("orders")


def test_a_registration_adds_to_the_one_before(server: NameServer) -> None:
    """RocketMQ registers a new topic alone; an unchanged version changes no permission."""
    server.register()
    wiped = {"brokerName": "broker-b"}
    answer = server.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, wiped)
    assert ext_fields(answer)["wipeTopicCount"] == "2"
    server.register(topics={"orders": (2, 6), "new": (1, 6)})
    assert server.route("orders").queue_datas[0].perm == 4
    assert server.names_of("new") == ["broker-b"]
    server.register(version=2, topics={"orders": (3, 6)})
    assert server.route("orders").queue_datas[0].perm == 6
    assert server.route("orders").queue_datas[0].read_queue_nums == 3
    assert server.names_of("new") == ["broker-b"]


def test_one_topic_is_registered_alone(server: NameServer) -> None:
    """Only by registered brokers; what is said about other brokers is not stored."""
    queues = [
        QueueData(broker_name=name, perm=6, read_queue_nums=4, write_queue_nums=4)
        for name in ("broker-b", "unknown")
    ]
    body = encode_route(TopicRouteData(queue_datas=tuple(queues)))
    server.register()

    assert server.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": "new"}, body).code == 0

    assert server.names_of("new") == ["broker-b"]


def test_a_broker_asks_whether_its_topics_have_changed(server: NameServer) -> None:
    """So that it registers only then (`forceRegister=false`)."""
    known, changed = (json.dumps({"counter": number}).encode() for number in (1, 2))
    identity = identity_of("broker-b")
    for body, expected, version in [(known, "true", b""), (changed, "true", known)]:
        answer = server.ask(RequestCode.QUERY_DATA_VERSION, identity, body)
        assert ext_fields(answer)["changed"] == expected
        assert bool(answer.body) == bool(version)
        server.register()
    answer = server.ask(RequestCode.QUERY_DATA_VERSION, identity, known)
    assert ext_fields(answer)["changed"] == "false"
    assert json.loads(answer.body) == {"counter": 1, "stateVersion": 0, "timestamp": 0}


def test_the_answer_to_a_replica_names_its_master(server: NameServer) -> None:
    """Both belong to one broker, and the topics of the replica are those of the master."""
    server.register()
    replica = server.register(
        brokerId="1", brokerAddr="10.0.0.3:10911", topics={"lost": (1, 6), "other": (1, 6)}
    )

    fields = ext_fields(replica)
    assert (fields["masterAddr"], fields["haServerAddr"]) == ("10.0.0.2:10911", "10.0.0.2:10912")
    assert not server.names_of("lost")
    for name, expected in [
        ("broker-b", {"0": "10.0.0.2:10911", "1": "10.0.0.3:10911"}),
        ("halfmq-a", {"0": "127.0.0.1:10911"}),
        ("unknown", {}),
    ]:
        asked = {"clusterName": "DefaultCluster", "brokerName": name}
        answer = server.ask(RequestCode.GET_BROKER_MEMBER_GROUP, asked)
        assert json.loads(answer.body)["brokerMemberGroup"]["brokerAddrs"] == expected


def test_routes_are_marked_only_if_all_brokers_are_halfmq(server: NameServer) -> None:
    """A client would send MSGPACK headers to a RocketMQ broker, which cannot read them."""

    def is_marked() -> bool:
        fields = {"topic": "TBW102", RECOGNITION_FIELD: "1"}
        return RECOGNITION_FIELD in ext_fields(
            server.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields)
        )

    server.register("halfmq-b", halfmq="1")
    assert is_marked()
    server.register("official")
    assert not is_marked()
    server.brokers.unregister("official", 0)
    assert is_marked()


def test_a_broker_of_the_same_name_is_refused_but_itself_is_not(server: NameServer) -> None:
    """All brokers may have the same list of name servers, themselves included."""
    other = server.register("halfmq-a")
    assert (other.code, "brokerName" in (other.remark or "")) == (ResponseCode.SYSTEM_ERROR, True)
    assert server.register("halfmq-a", brokerAddr=server.connection.broker_address).code == 0
    assert server.names_of("TBW102") == ["halfmq-a"]


def test_an_invalid_registration_is_refused(server: NameServer) -> None:
    """Nothing of it is stored."""
    body = registration(TOPICS)
    fields = identity_of("broker-b") | {"haServerAddr": "10.0.0.2:10912"}
    wrong = [
        (fields | {"bodyCrc32": str((crc32(body) & 0x7FFFFFFF) ^ 1)}, body),
        (fields, registration({"orders": (2, 6)})),  # one topic of an unknown broker
        (fields, registration({"orders": (-1, 6), "b": (1, 6)})),
        (fields, registration({"orders": (65_536, 6), "b": (1, 6)})),
        (fields, registration({"x" * 300: (1, 6), "b": (1, 6)})),
        (fields, b"[]"),
        (fields, b"\x78\x9c garbage"),
        (fields, zlib.compress(b"\0\0")),
        (fields, zlib.compress(bytes(20 << 20))),  # more than a frame may have
    ]
    for number, (header, content) in enumerate(wrong):
        answer = server.ask(RequestCode.REGISTER_BROKER, header, content)
        assert answer.code == ResponseCode.SYSTEM_ERROR, number
    assert not server.brokers.brokers()


def test_what_is_kept_is_bounded(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may register cannot fill the memory; who has registered is renewed."""
    monkeypatch.setattr(
        registered_brokers, "REGISTERED_BROKERS", REGISTERED_BROKERS._replace(most=2)
    )
    monkeypatch.setattr(registered_brokers, "REGISTERED_TOPICS", REGISTERED_TOPICS._replace(most=5))
    assert server.register("broker-b").code == 0
    assert server.register("broker-c").code == 0
    assert server.register("broker-d").code == ResponseCode.SYSTEM_ERROR
    more = {**TOPICS, "new": (1, 6), "newer": (1, 6)}
    assert server.register("broker-c", version=2, topics=more).code == ResponseCode.SYSTEM_ERROR
    assert server.register("broker-c", version=2).code == 0


def test_a_compressed_registration_has_blocks_after_their_lengths() -> None:
    """Of the version, the topics, and what is of no interest here."""

    def block(content: str) -> bytes:
        return len(content).to_bytes(4, "big") + content.encode()

    content = b"".join(
        [
            block('{"counter":3,"stateVersion":0,"timestamp":5}'),
            (2).to_bytes(4, "big"),
            block('orders 4 2 6 SINGLE_TAG {"+message.type":"NORMAL"}'),
            block("older 1 1 7 SINGLE_TAG"),
            block("[]"),
            (0).to_bytes(4, "big"),
        ]
    )

    decoded = decode_registration(zlib.compress(content, 9))

    assert decoded.version == DataVersion(counter=3, timestamp=5)
    assert decoded.topics == {
        "orders": RegisteredTopic(read_queue_nums=4, write_queue_nums=2, perm=6),
        "older": RegisteredTopic(read_queue_nums=1, write_queue_nums=1, perm=7),
    }


def test_an_official_broker_gets_the_answers_of_an_official_name_server(
    server: NameServer,
) -> None:
    """A recorded 5.3.3 registers, adds topics one by one, and unregisters."""
    asked: list[RemotingCommand] = []
    compared = 0
    for line in recorded("broker-5.3.3-registration"):
        (command,) = FrameDecoder().receive_data(line.frame)
        if not command.is_response:
            asked.append(command)
            continue
        question = asked.pop()
        if question.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            continue  # of topics that had been registered before the recording began
        ours = call(server.handlers, question, server.connection)
        assert (ours.code, ext_fields(ours)) == (command.code, ext_fields(command))
        if b"brokerAddrTable" in command.body:
            theirs = decode_cluster_info(command.body).broker_addr_table
            assert theirs.items() <= decode_cluster_info(ours.body).broker_addr_table.items()
        compared += 1
    assert compared > 8
    assert not server.brokers.brokers()


def test_a_drain_begins_with_the_routes(tmp_path: Path) -> None:
    """Producers go elsewhere while the broker still stores; a wrong time changes nothing."""
    server = NameServer(tmp_path)

    def permission() -> int:
        answer = server.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"})
        return decode_route(answer.body).queue_datas[0].perm

    before = permission()
    refused = server.ask(RequestCode.DRAIN_BROKER, {"waitMillis": "-1"})
    assert (refused.code, server.drained, permission()) == (29, [], before)
    answer = server.ask(RequestCode.DRAIN_BROKER, {"waitMillis": "1500"})
    assert (answer.code, server.drained) == (0, [1.5])
    assert permission() == before & ~PERM_WRITE
