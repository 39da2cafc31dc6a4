"""Every command of mqadmin 5.3.3 and 4.9.8, run once against one broker.

docs/compatibility.md says of each of 5.3.3 whether it works here. What its output means in detail,
the other tests of mqadmin show; here is seen that a command ends as documented, and that none is
forgotten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final, NamedTuple

import pytest

from halfmq.broker.net.refused_codes import REFUSED_CODES, WITHOUT_ACCESS
from halfmq.client import Message, SendResult
from halfmq.client.blocking import Consumer, Producer
from tests.support.mqadmin import Mqadmin, mqadmin

pytestmark = pytest.mark.campaign


class Case(NamedTuple):
    """A command with its arguments, and what it says; its refusals are in ``failure``."""

    arguments: str
    says: str = ""
    refused: int | None = None  # the request code that is refused


BROKER: Final = "-b {address}"
CLUSTER: Final = "-c DefaultCluster"
CONTROLLER: Final = "-a {address}"
MESSAGE: Final = "Queue Offset: 0"

CASES: Final = {
    "updateTopic": Case(f"{BROKER} -t more -r 1 -w 1", "success"),
    "updateTopicList": Case(f"{BROKER} -f {{home}}/list-of-topics.json", "success"),
    "deleteTopic": Case(f"{CLUSTER} -t gone", "delete topic [gone] from cluster"),
    "updateSubGroup": Case(f"{BROKER} -g more", "success"),
    "updateSubGroupList": Case(f"{BROKER} -f {{home}}/list-of-groups.json", "success"),
    "setConsumeMode": Case(f"{BROKER} -t orders -g readers -m POP"),
    "deleteSubGroup": Case(f"{CLUSTER} -g gone", "delete subscription group [gone]"),
    "updateBrokerConfig": Case(f"{BROKER} -k fileReservedTime -v 71", "success"),
    "updateTopicPerm": Case(f"{BROKER} -t shut -p 4", "success"),
    "topicRoute": Case("-t orders", '"brokerName":"broker-a"'),
    "topicStatus": Case("-t orders", "broker-a 0 0"),
    "topicClusterList": Case("-t orders", "DefaultCluster"),
    "addBroker": Case("-c {address} -b broker.conf", refused=902),
    "removeBroker": Case("-c {address} -b DefaultCluster:broker-a:0", refused=903),
    "resetMasterFlushOffset": Case(f"{BROKER} -o 1", refused=908),
    "brokerStatus": Case(BROKER, "putTps"),
    "queryMsgById": Case("-t orders -i {offset_id}", MESSAGE),
    "queryMsgByKey": Case("-t orders -k key", "{id}"),
    "queryMsgByUniqueKey": Case("-t orders -i {id}", MESSAGE),
    "queryMsgByOffset": Case("-t orders -b broker-a -i {queue} -o 0", MESSAGE),
    "queryMsgTraceById": Case("-i {id} -t traces", "Pub writers"),
    "printMsg": Case("-t orders", "MSGID: {id}"),
    "printMsgByQueue": Case("-t orders -a broker-a -i {queue} -p true", "MSGID: {id}"),
    "sendMsgStatus": Case("-b broker-a -s 10 -c 1", "sendStatus=SEND_OK"),
    "brokerConsumeStats": Case(BROKER, "orders readers broker-a"),
    "producerConnection": Case("-g writers -t orders", "PYTHON"),
    "consumerConnection": Case("-g readers", "orders *"),
    "consumerProgress": Case("-g readers", "Diff Total: 0"),
    "consumerStatus": Case("-g readers", "Same subscription in the same group of consumer"),
    "cloneGroupOffset": Case("-s readers -d copy -t orders", "clone group offset success"),
    "producer": Case(BROKER, "producer group (writers)"),
    "clusterList": Case("", "broker-a"),
    "topicList": Case("", "orders"),
    "updateKvConfig": Case("-s NAMES -k key -v value", "success"),
    "deleteKvConfig": Case("-s NAMES -k key", "success"),
    "wipeWritePerm": Case("-b broker-a", "OK"),
    "addWritePerm": Case("-b broker-a", "OK"),
    "resetOffsetByTime": Case("-g idle -t bulk -s 0", "broker-a 0 0"),
    "skipAccumulatedMessage": Case("-g idle -t bulk", "broker-a 0 0"),
    "updateOrderConf": Case("-t orders -m put -v broker-a:1", "update orderConf success"),
    "cleanExpiredCQ": Case(BROKER, "success"),
    "deleteExpiredCommitLog": Case(BROKER, "success"),
    "cleanUnusedTopic": Case(BROKER, "success"),
    "statsAll": Case("-t orders", "orders readers"),
    "allocateMQ": Case("-t orders -i 10.0.0.1,10.0.0.2", '"10.0.0.1"'),
    "checkMsgSendRT": Case("-t bulk -a 2 -s 10", "Avg RT"),
    "getNamesrvConfig": Case("", "brokerName = broker-a"),
    "updateNamesrvConfig": Case("-k fileReservedTime -v 70", "success"),
    "getBrokerConfig": Case(BROKER, "brokerName = broker-a"),
    "getConsumerConfig": Case("-g readers", "readers"),
    "queryCq": Case(f"{BROKER} -t orders -q {{queue}} -i 0 -c 1", "physicOffset="),
    "sendMessage": Case("-t bulk -p body", "SEND_OK"),
    "consumeMessage": Case("-t orders -c 1", "Consume ok"),
    "updateStaticTopic": Case(f"{CLUSTER} -t static -qn 2", refused=513),
    "remappingStaticTopic": Case(f"{CLUSTER} -t orders", "Mapping info should not be null"),
    "exportMetadata": Case(f"{CLUSTER} -f {{home}}", "metadata.json success"),
    "exportConfigs": Case(f"{CLUSTER} -f {{home}}", "configs.json success"),
    "exportMetrics": Case(f"{CLUSTER} -f {{home}}", "metrics.json success"),
    "exportMetadataInRocksDB": Case("-p {home} -t topics", "RocksDB load error"),
    "exportPopRecord": Case(BROKER, refused=200056),
    "haStatus": Case(BROKER, refused=907),
    "getSyncStateSet": Case(f"{CONTROLLER} -b broker-a", refused=1005),
    "getBrokerEpoch": Case("-b broker-a", refused=1007),
    "getControllerMetaData": Case(CONTROLLER, refused=1005),
    "getControllerConfig": Case(CONTROLLER, refused=1010),
    "updateControllerConfig": Case(f"{CONTROLLER} -k key -v value", refused=1009),
    "electMaster": Case(f"{CONTROLLER} -b 0 -bn broker-a {CLUSTER}", refused=1005),
    "cleanBrokerMetadata": Case(f"{CONTROLLER} -bn broker-a {CLUSTER}", refused=1005),
    "dumpCompactionLog": Case("", "miss dump log file name"),
    "getColdDataFlowCtrInfo": Case(BROKER, refused=2003),
    "updateColdDataFlowCtrGroupConfig": Case(f"{BROKER} -g readers -v 1", refused=2001),
    "removeColdDataFlowCtrGroupConfig": Case(f"{BROKER} -g readers", refused=2002),
    "setCommitLogReadAheadMode": Case(f"{BROKER} -m 0", refused=2004),
    "createUser": Case(f"{BROKER} -u user -p secret", refused=3001),
    "updateUser": Case(f"{BROKER} -u user -p secret", refused=3002),
    "deleteUser": Case(f"{BROKER} -u user", refused=3003),
    "getUser": Case(f"{BROKER} -u user", refused=3004),
    "listUser": Case(BROKER, refused=3005),
    "copyUser": Case("-f {address} -t {address}", refused=3005),
    "createAcl": Case(f"{BROKER} -s User:user -r Topic:* -a Pub -d Allow", refused=3006),
    "updateAcl": Case(f"{BROKER} -s User:user -r Topic:* -a Pub -d Allow", refused=3007),
    "deleteAcl": Case(f"{BROKER} -s User:user", refused=3008),
    "getAcl": Case(f"{BROKER} -s User:user", refused=3009),
    "listAcl": Case(BROKER, refused=3010),
    "copyAcl": Case("-f {address} -t {address}", refused=3010),
    "rocksDBConfigToJson": Case(f"{CLUSTER} -t topics", refused=355),
    "checkRocksdbCqWriteProgress": Case(CLUSTER, refused=354),
}

OF_4_9: Final = {
    "queryMsgById": Case("-i {offset_id}", MESSAGE),
}
"""Commands whose arguments were others."""

ACCOUNTS_OF_4_9: Final = {
    "clusterAclConfigVersion",
    "deleteAclConfig",
    "getAccessConfigSubCommand",
    "updateAclConfig",
    "updateGlobalWhiteAddr",
}
"""They are about plain_acl.yml, and run in test_access_mqadmin.py."""

ENDLESS: Final = {"clusterRT", "startMonitoring"}
"""They run until somebody stops them, which would be the JVM of all others."""

FAILING: Final = {"remappingStaticTopic", "exportMetadataInRocksDB", "dumpCompactionLog"}
"""They fail in the tool itself: they want things that no halfmq broker has."""


class Filled(NamedTuple):
    """The tool, the commands it lists, and one message."""

    version: str
    tool: Mqadmin
    listed: set[str]
    sent: SendResult


@pytest.fixture(scope="module", params=["5.3.3", "4.9.8"])
def filled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Filled]:
    """A broker with a message, its producer and a consumer that are connected."""
    with ExitStack() as stack:
        tool = mqadmin(stack, request.param, tmp_path_factory.mktemp("commands"))
        address = tool.broker.address
        for topic in ("orders", "bulk", "gone", "shut", "traces"):
            tool.run("updateTopic", *tool.at, "-t", topic, "-r", "1", "-w", "1")
        for group in ("readers", "copy", "idle", "gone"):
            tool.run("updateSubGroup", *tool.at, "-g", group)
        lists = {"topics": [{"topicName": "listed"}], "groups": [{"groupName": "listed"}]}
        for name, content in lists.items():
            (tool.home / f"list-of-{name}.json").write_text(json.dumps(content))
        producer = stack.enter_context(Producer("writers", namesrv=address))
        sent = producer.send(Message("orders", b"body", keys=["key"]))
        producer.send(Message("traces", _trace_of(sent), keys=[sent.message_id]))
        consumer = stack.enter_context(Consumer("readers", {"orders": "*"}, namesrv=address))
        message = consumer.receive(timeout=30)
        assert message is not None
        message.ack()
        consumer.commit()
        (line,) = tool.client.run("mqadmin")
        listed = set(re.findall(r"^ {3}(\w+) {2,}\S", line["text"], re.MULTILINE))
        yield Filled(request.param, tool, listed, sent)


def _trace_of(sent: SendResult) -> bytes:
    """What a tracing producer tells of a message. Source: RocketMQ ``TraceDataEncoder``."""
    fields = "Pub", "1700000000000", "", "writers", "orders", sent.message_id, "", "key"
    more = "127.0.0.1:10911", "4", "1", "0", sent.offset_message_id, "true"
    return "\x01".join((*fields, *more)).encode() + b"\x02"


@pytest.mark.parametrize("name", CASES)
def test_a_command_ends_as_documented(filled: Filled, name: str) -> None:
    """It prints what it should, or says why not."""
    version, tool, listed, sent = filled
    if name not in listed:
        pytest.skip(f"mqadmin {version} has no {name}")
    case = OF_4_9.get(name, CASES[name]) if version == "4.9.8" else CASES[name]
    values = {
        "address": tool.broker.address,
        "home": str(tool.home),
        "id": sent.message_id,
        "offset_id": sent.offset_message_id,
        "queue": str(sent.queue.queue_id),
    }
    arguments = [part.format(**values) for part in case.arguments.split()]
    printed, failure = tool.outcome((name, *arguments))
    said = " ".join(f"{printed} {failure}".split())

    if case.refused is not None:
        why = WITHOUT_ACCESS.get(case.refused) or REFUSED_CODES[case.refused].why
        assert f"request type {case.refused} not supported: {why}" in said
    else:
        assert not failure or name in FAILING, failure
        assert case.says.format(**values) in said.replace('" : ', '":'), said


def test_no_command_is_forgotten(filled: Filled) -> None:
    """What the tool lists runs here, and so stands in docs/compatibility.md."""
    if filled.version == "4.9.8":
        assert filled.listed - ACCOUNTS_OF_4_9 <= CASES.keys() | ENDLESS
        return
    assert filled.listed == CASES.keys() | ENDLESS
