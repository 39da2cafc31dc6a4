"""JSON bodies: those of every official client are read, halfmq's are readable to all of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halfmq.remoting import admin_bodies, bodies, fastjson
from halfmq.remoting.bodies import (
    BrokerData,
    ClusterInfo,
    ConsumeFromWhere,
    ConsumerData,
    ConsumeType,
    HeartbeatData,
    LockBatchBody,
    MessageModel,
    ProducerData,
    QueueData,
    QueueKey,
    TopicOffset,
    TopicRouteData,
    subscription_data,
    tag_code,
)
from halfmq.remoting.errors import BodyError, SubscriptionError
from tests.support.frames import RecordedFrame, all_recorded

QUEUES = [QueueKey(broker_name="b", queue_id=n, topic="T") for n in range(2)]


NONSENSE = b"{nonsense"  # the body of one request in the recordings


def recorded_bodies(meaning: str) -> list[RecordedFrame]:
    lines = [line for line in all_recorded() if line.meaning.startswith(meaning)]
    found = [line for line in lines if line.body and line.body != NONSENSE]
    assert found, f"no {meaning} was recorded"
    return found


# -- subscriptions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "code"),
    [("", 0), ("A", 65), ("TagA", 2598919), ("polygenelubricants", -(2**31)), ("🚀", 1773027)],
)
def test_tag_codes_are_javas(tag: str, code: int) -> None:
    """The broker selects messages by this number, which the consume queue holds."""
    assert tag_code(tag) == code


@pytest.mark.parametrize("expression", ["*", "", None])
def test_no_expression_subscribes_to_everything(expression: str | None) -> None:
    """The subscription has no codes, so it selects every message."""
    subscription = subscription_data("T", expression)

    assert subscription.codes is None
    assert subscription.tags_set == frozenset()
    assert subscription.sub_string == "*"


def test_tags_of_an_expression_are_split_and_trimmed() -> None:
    """The same as in Java's FilterAPI."""
    subscription = subscription_data("T", " A || TagA||", sub_version=5)

    assert subscription.tags_set == {"A", "TagA"}
    assert subscription.code_set == {65, 2598919}
    assert (subscription.expression_type, subscription.sub_version) == ("TAG", 5)


def test_an_expression_without_a_tag_is_refused() -> None:
    """The broker answers such a pull with 23 (SUBSCRIPTION_PARSE_FAILED)."""
    with pytest.raises(SubscriptionError, match=r"\|\|"):
        subscription_data("T", "||")


def test_sql_expressions_are_kept_as_they_are() -> None:
    """Their bars are operators, not separators."""
    subscription = subscription_data("T", "a || b", "SQL92")

    assert (subscription.sub_string, subscription.codes) == ("a || b", None)


# -- heartbeats ----------------------------------------------------------------------------------


def test_every_recorded_heartbeat_is_read() -> None:
    """Java, Go and C++ write them differently; tag hashes are computed, not taken over."""
    tags: set[str] = set()
    for line in recorded_bodies("HEART_BEAT request"):
        data = bodies.decode_heartbeat(line.body)
        raw = json.loads(line.body)

        assert data.client_id == raw.get("clientID", "")
        assert len(data.producer_data_set) == len(raw.get("producerDataSet") or [])
        assert len(data.consumer_data_set) == len(raw.get("consumerDataSet") or [])
        for consumer in data.consumer_data_set:
            for subscription in consumer.subscription_data_set:
                tags |= subscription.tags_set
                assert subscription.code_set == {tag_code(tag) for tag in subscription.tags_set}
    assert "TagA" in tags


def test_cpp_heartbeats_are_read() -> None:
    """They have enums by position, numbers as texts, wrong hashes and a newline at the end."""
    body = b"""{"clientID":"c","consumerDataSet":[{"consumeFromWhere":4,"consumeType":1,
        "groupName":"g","messageModel":0,"subscriptionDataSet":[{"classFilterMode":false,
        "codeSet":[0,0],"subString":"A||TagA","subVersion":"1758268800000","topic":"T"}]}]}\n"""
    data = bodies.decode_heartbeat(body)

    (consumer,) = data.consumer_data_set
    assert consumer.consume_from_where == ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    assert consumer.consume_type == ConsumeType.CONSUME_PASSIVELY
    assert consumer.message_model == MessageModel.BROADCASTING
    (subscription,) = consumer.subscription_data_set
    assert subscription.code_set == {65, 2598919}
    assert subscription.sub_version == 1758268800000
    assert subscription.expression_type == "TAG"


def test_go_heartbeats_are_read() -> None:
    """They have hashes as texts, and sub versions in nanoseconds."""
    body = (
        b'{"clientID":"c","producerDataSet":[],"consumerDataSet":[{"groupName":"g","consumeType":'
        b'"CONSUME_PASSIVELY","messageModel":"CLUSTERING","consumeFromWhere":'
        b'"CONSUME_FROM_LAST_OFFSET","subscriptionDataSet":[{"classFilterMode":false,"topic":"T",'
        b'"subString":"a \\u003e 1","tagsSet":[],"codeSet":["65"],"subVersion":1795255000000000000,'
        b'"expressionType":"SQL92"}],"unitMode":false}]}'
    )
    (subscription,) = bodies.decode_heartbeat(body).consumer_data_set[0].subscription_data_set

    assert subscription.sub_string == "a > 1"
    assert subscription.codes is None
    assert subscription.sub_version == 1795255000000000000


def test_a_heartbeat_survives_encoding_and_has_the_fields_of_javas() -> None:
    """Halfmq's client sends it to halfmq's broker and to official ones."""
    data = HeartbeatData(
        client_id="c",
        producer_data_set=(ProducerData(group_name="p"),),
        consumer_data_set=(
            ConsumerData(
                group_name="g",
                consume_type=ConsumeType.CONSUME_ACTIVELY,
                message_model=MessageModel.BROADCASTING,
                consume_from_where=ConsumeFromWhere.CONSUME_FROM_TIMESTAMP,
                subscription_data_set=(subscription_data("T", "A||B", sub_version=1),),
                unit_mode=True,
            ),
        ),
        heartbeat_fingerprint=5,
        without_sub=True,
    )
    body = bodies.encode_heartbeat(data)

    assert bodies.decode_heartbeat(body) == data
    (java,) = [
        json.loads(line.body)
        for line in recorded_bodies("HEART_BEAT request")
        if line.file == "java-5.3.3-json-push" and b'"codeSet":[2' in line.body
    ][:1]
    ours = json.loads(body)
    assert ours.keys() == java.keys()
    consumer, javas = ours["consumerDataSet"][0], java["consumerDataSet"][0]
    assert consumer.keys() == javas.keys()
    assert consumer["subscriptionDataSet"][0].keys() == javas["subscriptionDataSet"][0].keys()


@pytest.mark.parametrize(
    "body", [b"{}", b'{"clientID":""}', b'{"clientID":null,"consumerDataSet":null}']
)
def test_an_empty_heartbeat_is_a_heartbeat(body: bytes) -> None:
    """The official broker accepts it too."""
    assert bodies.decode_heartbeat(body) == HeartbeatData()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"clientID":5}',
        b'{"consumerDataSet":{"a":1}}',
        b'{"consumerDataSet":[1]}',
        b'{"consumerDataSet":[{"groupName":[]}]}',
        b'{"consumerDataSet":[{"subscriptionDataSet":[{"subVersion":"x"}]}]}',
        b'{"consumerDataSet":[{"subscriptionDataSet":[{"subVersion":1e30}]}]}',
        b'{"heartbeatFingerprint":[]}',
    ],
)
def test_any_other_body_of_a_heartbeat_is_a_body_error(body: bytes) -> None:
    """The broker answers with an error and keeps the connection."""
    with pytest.raises(BodyError):
        bodies.decode_heartbeat(body)


def test_unknown_values_in_a_heartbeat_become_the_default() -> None:
    """Consumers of later releases are served too."""
    body = (
        b'{"withoutSub":[],"consumerDataSet":[{"groupName":"g","consumeType":"CONSUME_ORBIT",'
        b'"messageModel":99,"consumeFromWhere":[],"subscriptionDataSet":[{"topic":"T",'
        b'"subString":"||"}]}]}'
    )
    (consumer,) = bodies.decode_heartbeat(body).consumer_data_set

    assert consumer.consume_type == ConsumeType.CONSUME_PASSIVELY
    assert consumer.message_model == MessageModel.CLUSTERING
    assert consumer.subscription_data_set[0].codes is None


def test_recorded_filter_checks_are_read() -> None:
    """A consumer with an SQL filter sends one before it starts."""
    for line in recorded_bodies("CHECK_CLIENT_CONFIG request"):
        if b"subscriptionData" in line.body:
            client_id, group, subscription = bodies.decode_subscription(line.body)
            again = bodies.encode_subscription_check(client_id, group, subscription)
            assert client_id
            assert bodies.decode_subscription(again) == (client_id, group, subscription)


# -- routes -------------------------------------------------------------------------------------


def test_recorded_routes_are_read_with_quoted_and_bare_broker_ids() -> None:
    """Official name servers send bare ids to old clients; halfmq writes them quoted."""
    bare = 0
    for line in recorded_bodies("GET_ROUTEINFO_BY_TOPIC response SUCCESS"):
        route = bodies.decode_route(line.body)
        bare += b"{0:" in line.body

        assert route.broker_datas[0].broker_name == "broker-a"
        assert route.broker_datas[0].broker_addrs[0].startswith("127.0.0.1:")
        assert bodies.decode_route(bodies.encode_route(route)) == route
        if b'{"0":' in line.body and b"enableActingMaster" in line.body:  # not in 4.9
            assert json.loads(bodies.encode_route(route)) == json.loads(line.body)
    assert bare


def test_a_route_is_readable_for_every_client() -> None:
    """Broker ids are quoted; there is no null, and no white space, which Go cannot read."""
    route = TopicRouteData(
        broker_datas=(BrokerData(broker_addrs={0: "127.0.0.1:10911"}, broker_name="b"),),
        queue_datas=(QueueData(broker_name="b", perm=6, read_queue_nums=4, write_queue_nums=4),),
    )

    assert bodies.encode_route(route) == (
        b'{"brokerDatas":[{"brokerAddrs":{"0":"127.0.0.1:10911"},"brokerName":"b","cluster":"",'
        b'"enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"b",'
        b'"perm":6,"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
    )


def test_routes_of_name_servers_before_4_9_are_read() -> None:
    """They call ``topicSysFlag`` ``topicSynFlag``."""
    body = b'{"queueDatas":[{"brokerName":"b","perm":6,"readQueueNums":1,"writeQueueNums":1,"topicSynFlag":2}]}'  # noqa: E501
    assert bodies.decode_route(body).queue_datas[0].topic_sys_flag == 2


def test_recorded_cluster_infos_are_read() -> None:
    """Official name servers always write bare broker ids in them."""
    for line in recorded_bodies("GET_BROKER_CLUSTER_INFO response SUCCESS"):
        info = bodies.decode_cluster_info(line.body)
        if info.broker_addr_table:  # empty until a broker has registered
            assert info.cluster_addr_table == {"DefaultCluster": ["broker-a"]}
            assert info.broker_addr_table["broker-a"].broker_addrs.keys() == {0}
        assert bodies.decode_cluster_info(bodies.encode_cluster_info(info)) == info
    assert json.loads(bodies.encode_cluster_info(ClusterInfo())) == {
        "brokerAddrTable": {},
        "clusterAddrTable": {},
    }


# -- locks, members, lists ------------------------------------------------------------------------


def test_recorded_locks_are_read_and_answered_alike() -> None:
    """Requests of clients in three languages, and the official broker's answers."""
    for line in recorded_bodies("LOCK_BATCH_MQ request") + recorded_bodies("UNLOCK_BATCH_MQ re"):
        data = bodies.decode_lock_batch(line.body)
        assert data.client_id
        assert all(queue.broker_name == "broker-a" for queue in data.mq_set)
    for line in recorded_bodies("LOCK_BATCH_MQ response SUCCESS"):
        queues = bodies.decode_locked_queues(line.body)
        assert json.loads(bodies.encode_locked_queues(queues)) == json.loads(line.body)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"consumerGroup":"g"}', b'{"mqSet":[1]}'])
def test_any_other_body_of_a_lock_is_a_body_error(body: bytes) -> None:
    """The broker answers with an error and keeps the connection."""
    with pytest.raises(BodyError):
        bodies.decode_lock_batch(body)


def test_group_members_tables_and_topic_lists_survive_encoding() -> None:
    """Recorded bodies of these kinds are written again byte for byte."""
    assert bodies.decode_consumer_list(bodies.encode_consumer_list(["a", "b"])) == ["a", "b"]
    for line in recorded_bodies("GET_CONSUMER_LIST_BY_GROUP response SUCCESS"):
        ids = bodies.decode_consumer_list(line.body)
        assert bodies.encode_consumer_list(ids) == line.body

    assert bodies.decode_table(bodies.encode_table({"k": "v"})) == {"k": "v"}
    for line in recorded_bodies("GET_BROKER_RUNTIME_INFO response SUCCESS"):
        assert "brokerVersionDesc" in bodies.decode_table(line.body)

    assert bodies.encode_topic_list(["T"]) == b'{"topicList":["T"]}'
    assert bodies.encode_topic_list([], "a:1") == b'{"brokerAddr":"a:1","topicList":[]}'
    for line in recorded_bodies("GET_ALL_TOPIC_LIST_FROM_NAMESERVER response SUCCESS"):
        assert bodies.encode_topic_list(bodies.decode_topic_list(line.body)) == line.body


# -- offset tables --------------------------------------------------------------------------------


def test_offset_tables_are_written_with_raw_object_keys() -> None:
    """Every release of fastjson and the Go client read this form; C++ clients need a list."""
    assert bodies.encode_offset_table({QUEUES[0]: 7}) == (
        b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:7}}'
    )
    assert bodies.encode_offset_list({QUEUES[0]: 7}) == (
        b'{"offsetTable":[{"brokerName":"b","offset":7,"queueId":0,"topic":"T"}]}'
    )


def test_recorded_offset_tables_are_written_again_byte_for_byte() -> None:
    """Offsets in requests and in clients' answers, and the statistics of topics."""
    for meaning in (
        "RESET_CONSUMER_CLIENT_OFFSET request",
        "INVOKE_BROKER_TO_RESET_OFFSET response SUCCESS",
    ):
        for line in recorded_bodies(meaning):
            if not line.body.startswith(b'{"offsetTable":['):  # the form for C++ clients
                offsets = bodies.decode_offset_table(line.body)
                assert bodies.encode_offset_table(offsets) == line.body
    for line in recorded_bodies("GET_TOPIC_STATS_INFO response SUCCESS"):
        stats = bodies.decode_topic_stats(line.body)
        assert bodies.encode_topic_stats(stats).startswith(line.body.rpartition(b":")[0])


def test_recorded_consumer_statuses_are_read() -> None:
    """A client's answer has its offsets by queue, in keys that are objects."""
    for line in recorded_bodies("GET_CONSUMER_STATUS_FROM_CLIENT response SUCCESS"):
        status = bodies.decode_consumer_status(line.body)
        assert bodies.decode_consumer_status(bodies.encode_consumer_status(status)) == status


def test_statistics_have_every_official_field() -> None:
    """Tools find each field under its official name."""
    stats = {QUEUES[0]: TopicOffset(min_offset=0, max_offset=7, last_update_timestamp=5)}
    assert bodies.encode_topic_stats(stats) == (
        b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:{"lastUpdateTimestamp":5,'
        b'"maxOffset":7,"minOffset":0}},"topicPutTps":0.0}'
    )
    assert bodies.encode_consumer_statuses({"c": {QUEUES[0]: 1}}) == (
        b'{"consumerTable":{"c":{{"brokerName":"b","queueId":0,"topic":"T"}:1}},'
        b'"messageQueueTable":{}}'
    )


# -- fastjson ------------------------------------------------------------------------------------


def test_every_recorded_json_body_is_parsed() -> None:
    """Peers of four releases wrote bare keys, object keys and white space."""
    parsed = relaxed = 0
    for line in all_recorded():
        if line.code is not None and line.body[:1] in {b"{", b"["} and line.body != NONSENSE:
            value = fastjson.parse(line.body)
            parsed += 1
            try:
                assert json.loads(line.body) == value
            except json.JSONDecodeError:
                relaxed += 1
    assert parsed > 700
    assert relaxed > 100


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{0:"a",1:"b"}', {"0": "a", "1": "b"}),
        ("{-5:{}}", {"-5": {}}),
        ('{{"a":[1]}:5}', {'{"a":[1]}': 5}),
        ("{true:1}", {"true": 1}),
        ('{0:[1,-2.5,1e2,true,false,null,"\\u00e9\\n"]}',
         {"0": [1, -2.5, 100.0, True, False, None, "é\n"]}),
        (" { 0 : [ ] , 1 : { } } ", {"0": [], "1": {}}),
        ('{0:"\x01\x02"}', {"0": "\x01\x02"}),
        ('{0:"\\ud800"}', {"0": "?"}),
        ('{"a":[{"x":1}],"b":{"$ref":"$.a[0]"}}', {"a": [{"x": 1}], "b": {"x": 1}}),
        ('{0:{"$ref":"$.1"},1:[2]}', {"0": [2], "1": [2]}),
    ],
)  # fmt: skip
def test_extensions_of_fastjson_are_read(text: str, value: object) -> None:
    """Number keys become texts, object keys compact JSON, references the values they refer to."""
    assert fastjson.parse(text.encode()) == value


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{0", b"{0:", b"{0:1", b"{0:1,", b"{0 1}", b"[1", b"[1 2]", b"{0:1}x", b"nul",
        b'{0:"a', b'{0:"\\q"}', b"{0:01x}", b"{0:--1}", b"{0:\xff}", b"\xff",
        b"{0:" + b"9" * 5000 + b"}", b"[" * 100_000, b"{0:" * 100_000, b'{"a":' * 100_000,
        b'{"$ref":"$"}', b'{"a":{"$ref":"$.a"}}', b'{"a":{"$ref":"$.b"}}',
        b'{"a":{"$ref":"$.a.b.c"}}',
        b'{"a":{"$ref":".."}}', b'{"a":{"$ref":5}}', b'{"a":[],"b":{"$ref":"$.a[0]"}}',
        b'{"a":[],"b":{"$ref":"$.a[99999999999999999999]"}}', b'{"a":[],"b":{"$ref":"$!"}}',
    ],
)  # fmt: skip
def test_everything_else_is_a_body_error(body: bytes) -> None:
    """Texts that are incomplete, too deep or too long, or whose references form a cycle."""
    with pytest.raises(BodyError):
        fastjson.parse(body)


def test_nested_references_cannot_exhaust_memory() -> None:
    """Twelve levels of ten references each would expand to 10^12 values."""
    levels: dict[str, Any] = {"l0": [0] * 10}
    for level in range(1, 12):
        levels[f"l{level}"] = [{"$ref": f"$.l{level - 1}"}] * 10

    with pytest.raises(BodyError, match="references"):
        fastjson.parse(json.dumps(levels).encode())


def test_lock_bodies_survive_encoding() -> None:
    """Queues of a request, and those of its answer; a null list is empty."""
    data = LockBatchBody(client_id="c", consumer_group="g", mq_set=tuple(QUEUES))

    assert bodies.decode_lock_batch(bodies.encode_lock_batch(data)) == data
    assert bodies.decode_locked_queues(bodies.encode_locked_queues(QUEUES)) == QUEUES
    assert bodies.decode_locked_queues(b'{"lockOKMQSet":null}') == []


@pytest.mark.parametrize(
    "body",
    [
        bodies.encode_offset_table({QUEUES[0]: 7, QUEUES[1]: 2**40}),
        bodies.encode_offset_list({QUEUES[0]: 7, QUEUES[1]: 2**40}),
        (
            b'{"offsetTable":[[{"topic":"T","brokerName":"b","queueId":0},7],'
            b'[{"topic":"T","brokerName":"b","queueId":1},1099511627776]]}'
        ),
        (
            b'{"offsetTable":{"{\\"brokerName\\":\\"b\\",\\"queueId\\":0,\\"topic\\":\\"T\\"}":7,'
            b'"{\\"brokerName\\":\\"b\\",\\"queueId\\":1,\\"topic\\":\\"T\\"}":1099511627776}}'
        ),
        (
            b'{ "offsetTable" : {{\n "topic":"T", "brokerName" : "b","queueId":0} : 7 ,\r\n'
            b'{"topic":"T","brokerName":"b","queueId":1}:"1099511627776"} }\n'
        ),
    ],
)
def test_offset_tables_are_read_in_every_form(body: bytes) -> None:
    """Raw or quoted object keys, a list (C++), pairs (Go), with any white space."""
    assert bodies.decode_offset_table(body) == {QUEUES[0]: 7, QUEUES[1]: 2**40}


def test_places_in_a_queue_are_read() -> None:
    """As both brokers write them; one without entries has only the bounds; the rest is refused."""
    entries = [{"physicOffset": 7, "physicSize": 1}, {"physicOffset": 2**40, "physicSize": 1}]
    decode = admin_bodies.decode_queue_places

    body = admin_bodies.encode_consume_queue(3, 9, entries, None, None)
    assert decode(body) == (3, [7, 2**40])
    assert decode(admin_bodies.encode_consume_queue(3, 9, None, None, None)) == (3, [])
    for wrong in (b"[]", b"{}", b'{"minQueueIndex":0,"queueData":[{}]}', b"", NONSENSE):
        with pytest.raises(BodyError):
            decode(wrong)
