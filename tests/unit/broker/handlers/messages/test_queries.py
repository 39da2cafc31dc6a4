"""Single messages by offset and by key, and routes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.handlers.clients.routes import RouteHandlers
from halfmq.broker.handlers.messages import queries
from halfmq.broker.handlers.messages.queries import QueryHandlers
from halfmq.broker.tables.registered_brokers import BrokerTable
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.store.format.record import decode_records
from halfmq.store.message_store import MessageStore
from tests.support.broker_doubles import (
    START_MS,
    Clock,
    FakeConnection,
    call,
    config_path,
    draft,
    ext,
    identity,
    request,
)
from tests.support.stores import append_durably

FOREVER = 2**63 - 1


def fill(store: MessageStore, *keys: str) -> int:
    """Store one message for each text of keys; return where the last one is."""
    for number, text in enumerate(keys):
        properties = f"KEYS\x01{text}\x02UNIQ_KEY\x01U{number}\x02".encode()
        (last,) = append_durably(store, draft(body=b"%d" % number, properties=properties))
    return last.physical_offset


def query(store: MessageStore, key: str, maximum: int = 32, **fields: str) -> RemotingCommand:
    header = {
        "topic": "orders",
        "key": key,
        "maxNum": str(maximum),
        "beginTimestamp": "0",
        "endTimestamp": str(FOREVER),
        **fields,
    }
    handlers = QueryHandlers(store).handlers()
    return call(handlers, request(RequestCode.QUERY_MESSAGE, header))


def bodies(answer: RemotingCommand) -> list[bytes]:
    return [record.body for record in decode_records(answer.body)]


def test_a_message_is_found_by_each_of_its_keys(store: MessageStore) -> None:
    """Several keys stand in one property, divided by blanks; the unique key counts too."""
    last = fill(store, "a b", "b", "c")

    assert bodies(query(store, "a")) == [b"0"]
    assert bodies(query(store, "b")) == [b"0", b"1"]
    assert bodies(query(store, "U2", _UNIQUE_KEY_QUERY="true")) == [b"2"]
    assert ext(query(store, "a")) == {
        "indexLastUpdateTimestamp": str(START_MS),
        "indexLastUpdatePhyoffset": str(last),
    }


def test_the_newest_messages_are_answered_oldest_first(store: MessageStore) -> None:
    """As many as asked for; with a unique key always up to 32."""
    fill(store, *["k"] * 5)

    assert bodies(query(store, "k", 2)) == [b"3", b"4"]
    assert len(bodies(query(store, "k", 0, _UNIQUE_KEY_QUERY="true"))) == 5


def test_no_answer_has_more_than_the_limit(store: MessageStore) -> None:
    fill(store, *["k"] * 70)

    assert len(bodies(query(store, "k", 1_000))) == queries.MESSAGES_MAX


def test_an_answer_fits_a_frame(store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large messages end it early, but one always passes."""
    monkeypatch.setattr(queries, "ANSWER_BYTES_MAX", 300)
    fill(store, "k", "k", "k")
    assert bodies(query(store, "k")) == [b"1", b"2"]
    monkeypatch.setattr(queries, "ANSWER_BYTES_MAX", 10)
    assert bodies(query(store, "k")) == [b"2"]


def test_messages_with_only_an_equal_hash_are_left_out(store: MessageStore) -> None:
    """The index holds hashes: "Aa" and "BB" have the same."""
    fill(store, "Aa", "BB")

    assert bodies(query(store, "BB")) == [b"1"]


def test_an_answer_without_messages_has_both_fields(store: MessageStore) -> None:
    """Clients read the fields without testing the code."""
    fill(store, "a")
    answer = query(store, "none")

    assert answer.code == ResponseCode.QUERY_NOT_FOUND
    assert answer.remark == "can not find message, maybe time range not correct"
    assert ext(answer) == {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}
    assert answer.body == b""


def test_a_record_is_answered_as_it_is_stored(store: MessageStore) -> None:
    """The client decodes it like a pulled one."""
    offset = fill(store, "a", "b")
    answer = call(
        QueryHandlers(store).handlers(),
        request(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(offset), "topic": "orders"}),
    )

    assert decode_records(answer.body) == [store.reader.record_at(offset)]


@pytest.mark.parametrize("offset", [7, 123_456_789, -1])
def test_an_offset_without_a_record_is_refused(store: MessageStore, offset: int) -> None:
    """With RocketMQ's words, which tools show."""
    fill(store, "a")
    command = request(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(offset)})
    with pytest.raises(RequestRefusedError) as refusal:
        QueryHandlers(store).handlers()[command.code](command, FakeConnection())

    assert refusal.value.code is ResponseCode.SYSTEM_ERROR
    assert refusal.value.remark == f"can not find message by the offset, {offset}"


# --- routes


@pytest.fixture
def topics(tmp_path: Path) -> TopicTable:
    table = TopicTable(config_path(tmp_path, "topics.json"), identity(), now_ms=Clock())
    table.ensure("orders", 4)
    return table


def route(topics: TopicTable, topic: str, **fields: str) -> RemotingCommand:
    command = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic, **fields})
    handlers = RouteHandlers(topics, BrokerTable(Clock()), identity(), lambda _: None).handlers()
    return call(handlers, command, FakeConnection(address="192.0.2.7:10911"))


def test_a_route_has_the_address_that_the_client_reached(topics: TopicTable) -> None:
    """In the exact form of the official name server: some clients split the text."""
    answer = route(topics, "orders")

    assert answer.body == (
        b'{"brokerDatas":[{"brokerAddrs":{"0":"192.0.2.7:10911"},"brokerName":"broker-a",'
        b'"cluster":"DefaultCluster","enableActingMaster":false}],"filterServerTable":{},'
        b'"queueDatas":[{"brokerName":"broker-a","perm":6,"readQueueNums":4,"topicSysFlag":0,'
        b'"writeQueueNums":4}]}'
    )
    assert answer.header is None


def test_an_unknown_topic_has_no_route(topics: TopicTable) -> None:
    """Clients create topics and find dead letters by this answer."""
    with pytest.raises(RequestRefusedError) as refusal:
        route(topics, "none")

    assert refusal.value.code is ResponseCode.TOPIC_NOT_EXIST
    assert refusal.value.remark == (
        "No topic route info in name server for the topic: none\n"
        "See https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details.\n"
        "It does not exist; the first message that is sent to it creates it."
    )
    assert refusal.value.ext_fields is None


@pytest.mark.parametrize(
    ("topic", "auto_create", "cause"),
    [
        ("none", False, "autoCreateTopicEnable is false"),
        ("TBW102", False, "autoCreateTopicEnable is false"),
        ("no name", True, "illegal characters"),
        ("%RETRY%readers", True, "the first consumer of its group"),
        ("%DLQ%readers", False, "the first dead letter of its group"),
    ],
)
def test_a_missing_route_has_a_reason(
    tmp_path: Path, topic: str, cause: str, *, auto_create: bool
) -> None:
    """Official clients show "No route info of this topic"; mqadmin and logs show the reason."""
    path = config_path(tmp_path, "topics.json")
    table = TopicTable(path, identity(auto_create=auto_create), now_ms=Clock())

    with pytest.raises(RequestRefusedError, match=cause):
        route(table, topic)


def test_the_template_is_shown_only_where_topics_are_created(tmp_path: Path) -> None:
    """Its rights tell the client that it may send to a topic that is not there yet."""
    path = config_path(tmp_path, "topics.json")
    open_table = TopicTable(path, identity(), now_ms=Clock())
    assert json.loads(route(open_table, "TBW102").body)["queueDatas"][0]["perm"] == 7
    closed_table = TopicTable(path, identity(auto_create=False), now_ms=Clock())
    with pytest.raises(RequestRefusedError):
        route(closed_table, "TBW102")


def test_a_halfmq_client_recognizes_the_broker(topics: TopicTable) -> None:
    """Only then does it send MSGPACK headers; official clients get no such field."""
    assert ext(route(topics, "orders", halfmq="1")) == {"halfmq": "1"}
    with pytest.raises(RequestRefusedError) as refusal:
        route(topics, "none", halfmq="1")
    assert refusal.value.ext_fields == {"halfmq": "1"}


def test_the_cluster_is_this_broker(topics: TopicTable) -> None:
    """Tools find it under its names and at the address they came by."""
    answer = call(
        RouteHandlers(topics, BrokerTable(Clock()), identity(), lambda _: None).handlers(),
        request(RequestCode.GET_BROKER_CLUSTER_INFO),
    )

    assert json.loads(answer.body) == {
        "brokerAddrTable": {
            "broker-a": {
                "brokerAddrs": {"0": "127.0.0.1:10911"},
                "brokerName": "broker-a",
                "cluster": "DefaultCluster",
                "enableActingMaster": False,
            }
        },
        "clusterAddrTable": {"DefaultCluster": ["broker-a"]},
    }


@pytest.mark.parametrize("header_type", [HeaderType.JSON, HeaderType.ROCKETMQ])
def test_all_topics_are_listed(topics: TopicTable, header_type: HeaderType) -> None:
    answer = call(
        RouteHandlers(topics, BrokerTable(Clock()), identity(), lambda _: None).handlers(),
        request(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, header_type=header_type),
    )

    assert answer.header_type == header_type
    assert set(json.loads(answer.body)["topicList"]) == {one.name for one in topics}
