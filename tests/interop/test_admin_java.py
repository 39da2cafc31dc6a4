"""Every method of the Java interface for operators, at RocketMQ 5.3.3 and at halfmq.

It is `DefaultMQAdminExt` of 5.3.3, and that of 4.9.8, which has fewer methods. What mqadmin makes
of the same requests, `test_operators_hour.py` compares in detail; here each method is called at
least once, and none is forgotten.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from halfmq.broker.net.refused_codes import REFUSED_CODES, WITHOUT_ACCESS
from halfmq.client import Message, SendResult
from halfmq.client.blocking import Producer
from tests.support.two_brokers import Difference, Measured, Operator, at_both, compare, is_about

pytestmark = pytest.mark.campaign

CLUSTER: Final = "DefaultCluster"
BROKER: Final = "broker-a"
READERS: Final = "java-online-consumer"
TIMEOUT_MS: Final = 10_000
QUEUE: Final = {"topic": "orders", "brokerName": BROKER, "queueId": 0}

REFUSED: Final = {
    50: "createAndUpdatePlainAccessConfig",
    51: "deletePlainAccessConfig",
    52: "examineBrokerClusterAclVersionInfo",
    53: "updateGlobalWhiteAddrConfig",
    902: "addBrokerToContainer",
    903: "removeBrokerFromContainer",
    354: "checkRocksdbCqWriteProgress",
    355: "exportRocksDBConfigToJson",
    513: "createStaticTopic",
    907: "getBrokerHAStatus",
    908: "resetMasterFlushOffset",
    1005: "getInSyncStateData, getControllerMetaData, electMaster, cleanControllerBrokerData",
    1007: "getBrokerEpochCache",
    1009: "updateControllerConfig",
    1010: "getControllerConfig",
    2001: "updateColdDataFlowCtrGroupConfig",
    2002: "removeColdDataFlowCtrGroupConfig",
    2003: "getColdDataFlowCtrInfo",
    2004: "setCommitLogReadAheadMode",
    3001: "createUser",
    3002: "updateUser",
    3003: "deleteUser",
    3004: "getUser",
    3005: "listUser",
    3006: "createAcl",
    3007: "updateAcl",
    3008: "deleteAcl",
    3009: "getAcl",
    3010: "listAcl",
    200056: "exportPopRecords",
}
"""Methods that fail with the reason, by the request that is refused.

RocketMQ serves it, refuses it without a reason, or says that an error occurred.
"""


def _refused(code: int, methods: str) -> Difference:
    why = WITHOUT_ACCESS.get(code) or REFUSED_CODES[code].why
    remark = re.escape(f"request type {code} not supported: {why}")
    calls = ", ".join(f"{method}(" for method in methods.split(", "))
    return Difference(calls, ".*", rf"MQ(Broker|Client)Exception 3:  {remark}", why)


DIFFERENCES: Final = (
    *(_refused(code, methods) for code, methods in REFUSED.items()),
    Difference(
        "examine, resetOffset, cloneGroup, queryTopic, queryConsumeTimeSpan, querySubscription",
        "",
        r"It does not exist; the first (message|consumer) .* creates it\.",
        "what was not found has its cause in a line of its own",
    ),
    Difference(
        "fetchAllTopicList, fetchTopicsByCLuster, getAllTopicConfig",
        r".*rmq_sys_(REVIVE_LOG_DefaultCluster|wheel_timer)\b.*",
        "",
        "there is no pop and no timer wheel, which have topics of their own",
    ),
    Difference(
        "wipeWritePermOfBroker, addWritePermOfBroker",
        "result = (20|17)",
        "result = (18|15)",
        "these two topics are not counted",
    ),
    Difference(
        "queryTopicConsumeByWho, messageTrackDetail",
        r'.*\] = "orders"|.*consumerGroup = "orders"|.*%RETRY%orders.*|.*Type = "UNKNOWN"',
        "",
        "RocketMQ 5.3.3 lists the topic's own name among the groups that consume it",
    ),
    Difference(
        "viewBrokerStatsData",
        r"stats(Hour|Day)\..*",
        r"stats(Hour|Day)\..*",
        "RocketMQ looks at its counters every ten minutes and every hour, halfmq when asked",
    ),
    Difference(
        "fetchBrokerRuntimeStats",
        r"table\.(putLatency999?|putMessageFailedTimes)\b.*",
        "",
        "latencies and failures of appends are not measured",
    ),
    Difference(
        "resumeCheckHalfMessage",
        "result = true",
        "result = false",
        "only half messages can be resumed; RocketMQ stores any other message a second time",
    ),
    Difference(
        "getNameServerConfig, getBrokerConfig",
        "(?!fileReservedTime).*",
        "(?!fileReservedTime).*",
        "each has settings of its own",
    ),
    Difference("fetchBrokerRuntimeStats", "", r"table\.halfmq\..*", "halfmq's own metrics"),
    Difference(
        "fetchBrokerRuntimeStats",
        "",
        r"table\.getTransferedTps",
        "the spelling that tools of 4.9 ask for, too",
    ),
)

CHANGES: Final[tuple[dict[str, object], ...]] = (
    {"attributes": {"-message.type": ""}},
    {"attributes": {"+message.type": "FIFO"}},
    {"attributes": {"+message.type": "NORMAL"}, "perm": 4, "order": True},
    {"attributes": {"-message.type": ""}},
    {"attributes": {"-message.type": ""}},
    {"attributes": {"+nope": "1"}},
    {"attributes": {"message.type": "FIFO"}},
    {"attributes": {"+message.type": "MIXED"}},
    {"attributes": {"+queue.type": "SimpleCQ"}},
)
"""One topic, first created and then changed; most are refused."""

OF_5: Final = (
    Difference(
        "fetchConsumeStatsInBroker",
        r".*(pullOffset = 0|totalInflightDiff = -2)",
        r".*(pullOffset = 2|totalInflightDiff = 0)",
        "RocketMQ leaves the offset of the last pull out here, and counts with 0",
    ),
)
"""Differences in fields that 4.9.8 does not have."""

MEASURED: Final = (
    Measured("", r"(?<=Host\.port = )\d+|(?<=HostBytes\.array = ).*"),
    Measured("", r"(?i)(?<=tps = ).*"),
    Measured("", r".*%RETRY%java.*", ""),  # clients tell the offsets of retry topics when they like
    Measured("getConsumerRunningInfo", r"(?<=RT = ).*|(?<=instanceName = ).*|0x\w+(?=@)|(?<=@)\w+"),
    Measured("getConsumerRunningInfo", r"(?<=\$\$Lambda\$)\d+"),
    Measured("getAllProducerInfo", r".*CLIENT_INNER_PRODUCER.*", ""),
    Measured("consumeMessageDirectly", r"(?<=spentTimeMills = ).*"),
    Measured("fetchBrokerRuntimeStats", r"( =|(?<=Ratio)_).*", ""),
)


def script(operator: Operator) -> None:
    """Call them all, at one broker."""
    _topics_and_groups(operator)
    _tables(operator)
    message = _messages_and_clients(operator)
    _offsets(operator)
    _name_server(operator)
    _settings(operator)
    _replicas_and_controllers(operator)
    _users(operator)
    operator.call("resumeCheckHalfMessage", "orders", message.message_id)
    operator.call("resumeCheckHalfMessage", message.offset_message_id)
    _removal(operator)
    assert operator.methods - operator.called == {"start/0", "shutdown/0"}


def _topics_and_groups(operator: Operator) -> None:
    call, at = operator.call, operator.place.address
    topic = {"readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    group = {"retryQueueNums": 1, "retryMaxTimes": 3}
    call("createAndUpdateTopicConfig", at, {"topicName": "orders", **topic})
    call("createAndUpdateTopicConfig", at, {"topicName": "TBW102", **topic})
    listed = [{"topicName": name, **topic} for name in ("bills", "gone")]
    call("createAndUpdateTopicConfigList", at, listed)
    for name in ("readers", "others"):
        call("createAndUpdateSubscriptionGroupConfig", at, {"groupName": name, **group})
    for changes in CHANGES:
        call("createAndUpdateTopicConfig", at, {"topicName": "changed", **topic, **changes})
        call("examineTopicConfig", at, "changed")
    for name in ("DefaultCluster", BROKER, "rmq_sys_x", "a b"):
        call("createAndUpdateTopicConfig", at, {"topicName": name, **topic})
    listed = [{"groupName": name, **group} for name in ("listed", "gone")]
    call("createAndUpdateSubscriptionGroupConfigList", at, listed)
    for name in ("orders", "unknown"):
        call("examineTopicConfig", at, name)
    for name in ("readers", "unknown"):
        call("examineSubscriptionGroupConfig", at, name)
    call("examineTopicRouteInfo", "orders", until="brokerName")
    call("createTopic", CLUSTER, "by-cluster", 2)
    attributes_or_flag: object = {} if "createTopic/5" in operator.methods else 0
    call("createTopic", CLUSTER, "by-cluster", 2, attributes_or_flag)
    call("createTopic", CLUSTER, "by-cluster-too", 2, 0, {})


def _tables(operator: Operator) -> None:
    call, at = operator.call, operator.place.address
    call("fetchAllTopicList")
    call("fetchTopicsByCLuster", CLUSTER)
    call("getAllTopicConfig", at, TIMEOUT_MS)
    call("getUserTopicConfig", at, False, TIMEOUT_MS)
    call("getAllSubscriptionGroup", at, TIMEOUT_MS)
    call("getUserSubscriptionGroup", at, TIMEOUT_MS)
    call("examineBrokerClusterInfo")
    call("getClusterList", "orders")
    call("getTopicClusterList", "orders")
    call("getNameServerAddressList")


def _messages_and_clients(operator: Operator) -> SendResult:
    """Return a message."""
    call, at = operator.call, operator.place.address
    run = operator.client.start("online", "orders", "producer", "consumer")
    operator.client.said(run, "online")
    with Producer("writers", namesrv=operator.place.namesrv) as producer:
        sent = producer.send(Message("orders", b"hello", tags="tag", keys=["key"]))
    operator.client.said(run, "consumed", body="hello")
    call("viewMessage", "orders", sent.message_id)
    call("viewMessage", "orders", sent.offset_message_id)
    call("viewMessage", sent.offset_message_id)
    call("queryMessage", CLUSTER, "orders", sent.message_id)
    call("queryMessage", "orders", "key", 9, 0, 1 << 62)
    call("queryMessage", "orders", "unknown", 9, 0, 1 << 62)
    call("queryConsumeQueue", at, "orders", 0, 0, 2, READERS)
    call("searchOffset", QUEUE, 0)
    call("searchOffset", at, "orders", 0, 0, TIMEOUT_MS)
    for method in ("maxOffset", "minOffset", "earliestMsgStoreTime"):
        call(method, QUEUE)

    connected = call("examineConsumerConnectionInfo", READERS, until="clientId")
    client = connected["connectionSet"][0]["clientId"]
    call("examineConsumerConnectionInfo", READERS, at)
    call("examineConsumerConnectionInfo", "readers")
    call("examineProducerConnectionInfo", "java-online-producer", "orders", until="clientId")
    call("getAllProducerInfo", at)
    call("examineConsumeStats", READERS, "orders", until="consumerOffset = 2")
    call("examineConsumeStats", READERS)
    call("examineConsumeStats", CLUSTER, READERS, "orders")
    call("examineConsumeStats", at, READERS, "orders", TIMEOUT_MS)
    call("examineConsumeStatsConcurrent", READERS, "orders")
    call("fetchConsumeStatsInBroker", at, False, TIMEOUT_MS)
    call("getConsumerRunningInfo", READERS, client, False)
    call("getConsumerRunningInfo", READERS, client, False, False)
    call("getConsumerRunningInfo", READERS, "nobody", False)
    call("getConsumeStatus", "orders", READERS, "")
    call("consumeMessageDirectly", READERS, client, sent.offset_message_id)
    call("consumeMessageDirectly", READERS, client, "orders", sent.offset_message_id)
    call("consumeMessageDirectly", CLUSTER, READERS, client, "orders", sent.message_id)
    call("messageTrackDetail", ["orders", sent.message_id])
    call("messageTrackDetailConcurrent", ["orders", sent.message_id])
    call("queryTopicConsumeByWho", "orders")
    call("queryTopicsByConsumer", READERS)
    call("queryTopicsByConsumerConcurrent", READERS)
    call("querySubscription", READERS, "orders")
    call("queryConsumeTimeSpan", "orders", READERS)
    call("queryConsumeTimeSpanConcurrent", "orders", READERS)
    call("examineTopicStats", "orders")
    call("examineTopicStats", at, "orders")
    call("examineTopicStatsConcurrent", "orders")
    call("examineTopicStats", "unknown")
    call("viewBrokerStatsData", at, "TOPIC_PUT_NUMS", "orders", until="Minute.sum = 2")
    call("updateAndGetGroupReadForbidden", at, READERS, "orders", False)
    call("updateAndGetGroupReadForbidden", at, READERS, "orders", True)
    call("resetOffsetByTimestamp", "orders", READERS, 0, True)
    call("resetOffsetByTimestamp", CLUSTER, "orders", READERS, 0, True)
    call("cloneGroupOffset", READERS, "others", "orders", True)
    with Producer("writers", namesrv=operator.place.namesrv) as producer:
        producer.send(Message("orders", b"last"))
    operator.client.lines(run)
    return sent


def _offsets(operator: Operator) -> None:
    call, at = operator.call, operator.place.address
    call("updateConsumeOffset", at, "readers", QUEUE, 1)
    call("examineConsumeStats", "readers", "orders")
    call("resetOffsetByQueueId", at, "readers", "orders", 0, 2)
    call("examineConsumeStats", "readers", "orders")
    call("resetOffsetByTimestampOld", "readers", "orders", 0, True)
    call("examineConsumeStats", "readers", "orders")
    call("resetOffsetNew", "readers", "orders", -1)
    call("examineConsumeStats", "readers", "orders")
    call("resetOffsetNewConcurrent", "readers", "orders", 0)
    call("examineConsumeStats", "readers", "orders")
    call("resetOffsetByQueueId", at, "readers", "orders", 0, 99)
    for topic, group in (("unknown", "readers"), ("orders", "unknown")):
        call("resetOffsetByTimestamp", topic, group, 0, True)
        call("cloneGroupOffset", group, "listed", topic, True)
        call("querySubscription", group, topic)
        call("queryTopicConsumeByWho", topic)
        call("queryTopicsByConsumer", group)
    call("viewBrokerStatsData", at, "TOPIC_PUT_NUMS", "unknown")
    call("queryConsumeTimeSpan", "unknown", "readers")
    call("queryConsumeQueue", at, "orders", 0, 0, 0, "")
    call("queryConsumeQueue", at, "orders", 0, 0, 9, "readers")
    call("examineProducerConnectionInfo", "nobody", "orders")


def _name_server(operator: Operator) -> None:
    call, namesrv = operator.call, operator.place.namesrv
    call("wipeWritePermOfBroker", namesrv, BROKER)
    call("addWritePermOfBroker", namesrv, BROKER)
    call("putKVConfig", "NAMES", "never", "value")
    call("createAndUpdateKvConfig", "NAMES", "key", "value")
    call("getKVConfig", "NAMES", "key")
    call("getKVConfig", "NAMES", "never")
    call("getKVListByNamespace", "NAMES")
    call("deleteKvConfig", "NAMES", "key")
    call("createOrUpdateOrderConf", "orders", "broker-a:1", True)
    call("createOrUpdateOrderConf", "orders", "broker-a:2", False)
    call("updateNameServerConfig", {"fileReservedTime": "70"}, [namesrv])
    call("getNameServerConfig", [namesrv])


def _settings(operator: Operator) -> None:
    call, at = operator.call, operator.place.address
    call("updateBrokerConfig", at, {"fileReservedTime": "71"})
    call("getBrokerConfig", at)
    call("fetchBrokerRuntimeStats", at)
    for method in ("cleanExpiredConsumerQueue", "deleteExpiredCommitLog", "cleanUnusedTopic"):
        call(method, CLUSTER)
        call(f"{method}ByAddr", at)
    call("setMessageRequestMode", at, "orders", "readers", "PULL", 0, TIMEOUT_MS)
    call("exportPopRecords", at, TIMEOUT_MS)
    call("checkRocksdbCqWriteProgress", at, "orders", 0)
    call("exportRocksDBConfigToJson", at, ["TOPICS"])
    call("getColdDataFlowCtrInfo", at)
    call("updateColdDataFlowCtrGroupConfig", at, {"readers": "1"})
    call("removeColdDataFlowCtrGroupConfig", at, "readers")
    call("setCommitLogReadAheadMode", at, "0")


def _replicas_and_controllers(operator: Operator) -> None:
    call, at = operator.call, operator.place.address
    call("addBrokerToContainer", at, "broker.conf")
    call("removeBrokerFromContainer", at, CLUSTER, BROKER, 0)
    call("getBrokerHAStatus", at)
    call("resetMasterFlushOffset", at, 1)
    call("getBrokerEpochCache", at)
    call("getInSyncStateData", at, [BROKER])
    call("getControllerMetaData", at)
    call("getControllerConfig", [at])
    call("updateControllerConfig", {"key": "value"}, [at])
    call("electMaster", at, CLUSTER, BROKER, 0)
    call("cleanControllerBrokerData", at, CLUSTER, BROKER, "0", False)


def _users(operator: Operator) -> None:
    call, at = operator.call, operator.place.address
    user = {"username": "user", "password": "secret", "userType": "Normal"}
    rule: tuple[object, ...] = "User:user", ["Topic:*"], ["Pub"], [], "Allow"
    entry = {"resource": "Topic:*", "actions": ["Pub"], "decision": "Allow"}
    rules = {"subject": "User:user", "policies": [{"policyType": "Custom", "entries": [entry]}]}
    call("createUser", at, "user", "secret", "Normal")
    call("createUser", at, user)
    call("updateUser", at, "user", "secret", "Normal", "enable")
    call("updateUser", at, user)
    call("getUser", at, "user")
    call("listUser", at, "")
    call("createAcl", at, *rule)
    call("createAcl", at, rules)
    call("updateAcl", at, *rule)
    call("updateAcl", at, rules)
    call("getAcl", at, "User:user")
    call("listAcl", at, "", "")
    call("deleteAcl", at, "User:user", "Topic:*")
    call("deleteUser", at, "user")
    account = {"accessKey": "account", "secretKey": "a secret", "admin": False}
    call("createAndUpdatePlainAccessConfig", at, account)
    call("examineBrokerClusterAclVersionInfo", at)
    call("updateGlobalWhiteAddrConfig", at, "127.0.0.1")
    call("updateGlobalWhiteAddrConfig", at, "127.0.0.1", "")
    call("deletePlainAccessConfig", at, "account")


def _removal(operator: Operator) -> None:
    call, at = operator.call, operator.place.address
    topic = {"topicName": "static", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    mapping = {"topic": "static", "totalQueues": 1, "bname": BROKER, "epoch": 1}
    call("createStaticTopic", at, "TBW102", topic, mapping, False)
    call("deleteSubscriptionGroup", at, "readers")
    call("deleteSubscriptionGroup", at, "others", True)
    call("deleteTopic", "orders", CLUSTER)
    call("deleteTopicInBroker", [at], "bills")
    call("deleteTopicInBrokerConcurrent", [at], "gone")
    call("deleteTopicInNameServer", [operator.place.namesrv], "bills")
    call("deleteTopicInNameServer", [operator.place.namesrv], CLUSTER, "gone")
    for name in ("unknown", "TBW102", " "):
        call("deleteTopicInBroker", [at], name)
    call("examineTopicConfig", at, "orders")


@pytest.mark.parametrize("version", ["5.3.3", "4.9.8"])
def test_every_method_gives_the_same_as_at_rocketmq(version: str, tmp_path: Path) -> None:
    """Every field of a result, or how the call fails, is the same, or differs for a reason."""
    theirs, ours = at_both(script, version, tmp_path)

    called = [told.command for told in theirs]
    rows = DIFFERENCES if version == "4.9.8" else (*DIFFERENCES, *OF_5)
    allowed = [row for row in rows if any(is_about(row, command) for command in called)]
    compare(theirs, ours, allowed, MEASURED)
